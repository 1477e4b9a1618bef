"""Exports of what a training run has recorded: runs of their own that read its states while they are at rest."""

from __future__ import annotations

from sqlalchemy.orm import Session

from lohan.config import Durability, Precision
from lohan.planning.workload import Workload
from lohan.units import GIB
from lohan_app.auth.schemas import Identity
from lohan_app.base_models import repository as base_models
from lohan_app.context import AppContext
from lohan_app.db import read_transaction
from lohan_app.entities import Run, RunKind, RunState
from lohan_app.errors import Conflict
from lohan_app.paging import DEFAULT_LIMIT, Page, make_page
from lohan_app.runs import queries, repository, service
from lohan_app.runs.kinds import Needs, settings_of
from lohan_app.runs.once import Answer, queue_once
from lohan_app.runs.schemas import ExportRequest, RunDetail, RunView, view_of
from lohan_app.settings import Settings
from lohan_app.storage import repository as storage
from lohan_app.storage.retention import durability_of
from lohan_app.worker.run_files import state_directories, states_bytes

PROGRAM_BYTES = GIB
"""Python with torch, and what passes through it besides one parameter."""
BYTES_PER_ELEMENT = 12
"""Of the parameter that is read: both halves of its master, the master, and what is written; one unit holds it at most."""
EXPORTABLE = frozenset({RunState.PAUSED, RunState.FAILED, RunState.CANCELLED})


def submit_export(
    context: AppContext, identity: Identity, run_id: str, request: ExportRequest, idempotency_key: str | None = None
) -> Answer:
    """Queue an export of the last step that the run has recorded.

    Raises:
        NotFound: there is no such run that this user may see.
        Conflict: it is no training at rest, or nothing that it recorded is kept.
        QuotaExceeded: its owner's quota has no room for the result.
        Unprocessable: the idempotency key is malformed, or was used for another request.
    """

    def make(session: Session) -> Run:
        service.visible(session, identity, run_id)
        source = repository.lock_run(session, run_id)
        check_source(session, context.settings, source)
        assert source is not None and source.base_model_id is not None, "it was checked"
        dtype = request.dtype or Precision(source.settings.get("training", {}).get("precision", Precision.BF16))
        needs = _needs(session, source.base_model_id, dtype)
        service.check_quota(session, context, identity, source.owner_id, needs.result_bytes)
        return Run(
            kind=RunKind.EXPORT,
            owner_id=source.owner_id,
            parent_id=source.id,
            name=f"Export of {source.name}",
            base_model_id=source.base_model_id,
            settings=settings_of(RunKind.EXPORT, {"dtype": str(dtype)}, needs),
        )

    return queue_once(context, identity, f"export {run_id} {request.model_dump_json()}", idempotency_key, make, action="run.export")


def list_exports(
    context: AppContext, identity: Identity, run_id: str, after: str | None = None, limit: int = DEFAULT_LIMIT
) -> Page[RunView]:
    """Exports of the run, newest first; raises NotFound where there is no such run that this user may see."""
    with read_transaction(context.engine) as session:
        service.visible(session, identity, run_id)
        rows = queries.list_runs(session, owner_id=None, states=None, after=after, limit=limit + 1, kind=RunKind.EXPORT, parent_id=run_id)
    return make_page(rows, limit, view_of, lambda row: row.run.id)


def check_source(session: Session, settings: Settings, run: Run | None) -> None:
    """See that the run, whose row is held, is at rest and that there is something to export.

    Raises:
        Conflict: it is not, or there is not; the message says which.
    """
    why = None if run is None else why_not(run)
    if run is None or why is not None:
        raise Conflict(
            why or "the run is gone", remedy="A paused, failed or cancelled training run can be exported, while its states are kept."
        )
    if storage.waiting_for_states(session, [run.id], RunKind.TRAIN):
        raise Conflict("a retry is about to go on from its states", place=run.id, remedy="Export the retry, once it is paused.")
    if not states_bytes(settings, run.id):
        raise Conflict(
            "the states of the run are no longer kept", place=run.id, remedy="A retry, or a setting of the storage, has used them up."
        )


def can_export(context: AppContext, run: RunDetail) -> bool:
    """Whether the run's page offers it: a look at a few folders."""
    return why_not(run) is None and any(folder.is_dir() for folder in state_directories(context.settings, run.id))


def why_not(run: Run | RunDetail) -> str | None:
    """Why the run cannot be exported, judging by its row; None where its states decide."""
    if run.kind is not RunKind.TRAIN:
        return "only training runs are exported"
    if run.state is RunState.SUCCEEDED:
        return "the run has a result already"
    if run.state not in EXPORTABLE:
        return f"the run is {run.state}"
    if run.step == 0 or durability_of(run) is Durability.NONE:
        return "the run has recorded no step"
    return None


def _needs(session: Session, base_model_id: str, dtype: Precision) -> Needs:
    model = base_models.get_locked(session, base_model_id)
    if model is None or model.workload is None:
        raise Conflict("the base model is gone", place="base_model_id", remedy="Its configuration and tokenizer are part of an export.")
    workload = Workload.model_validate(model.workload)
    largest = max(unit.parameters for unit in workload.units)
    return Needs(
        ram_bytes=PROGRAM_BYTES + BYTES_PER_ELEMENT * largest,
        result_bytes=workload.parameters * (4 if dtype is Precision.FP32 else 2),
    )
