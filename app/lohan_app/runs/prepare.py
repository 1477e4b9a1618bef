"""The io task's work on a run: have its rows tokenised in a limited child; the run can start once that is done."""

from __future__ import annotations

import logging
from datetime import timedelta

from sqlalchemy import Engine, update
from sqlalchemy.orm import Session

from lohan.errors import NO_SPACE, ConfigError, DataError, LohanError, ModelError
from lohan.events import FailureCause, Phase
from lohan_app.base_models.service import model_folder
from lohan_app.datasets.service import rows_path
from lohan_app.db import read_transaction, write_transaction
from lohan_app.entities import Dataset, PauseCause, Run, RunState, Wanted
from lohan_app.entities.base import now
from lohan_app.runs import repository
from lohan_app.runs.announce import announce
from lohan_app.runs.row_tokens import BadRows
from lohan_app.runs.states import Trigger
from lohan_app.settings import Settings
from lohan_app.worker.celery import wake
from lohan_app.worker.limited import run_limited
from lohan_app.worker.verdict import DISK_FULL_SECONDS

log = logging.getLogger(__name__)

TOKEN_FILE = "tokens.safetensors"  # noqa: S105 - tokens of text
PREPARING = "Its rows are being prepared."
_CAUSES = {DataError: FailureCause.DATA, ModelError: FailureCause.MODEL, ConfigError: FailureCause.SETTINGS}


def prepare_run(settings: Settings, engine: Engine, run_id: str) -> None:
    """Tokenise the rows of a queued run that has not been prepared; anything else is left as it is."""
    with read_transaction(engine) as session:
        run = repository.get_run(session, run_id)
        dataset = session.get(Dataset, run.dataset_id) if run is not None else None
    if run is None or run.base_model_id is None or dataset is None or not _is_waiting(run):
        return
    folder = settings.run_folder(run_id)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _note(settings, engine, run_id, state_reason=PREPARING, phase=Phase.PREPARING_DATA, phase_progress=0.0)
    arguments = [
        str(rows_path(settings, dataset.id)),
        str(model_folder(settings, run.base_model_id)),
        str(folder / TOKEN_FILE),
        str(run.settings["training"]["sequence_length"]),
        BadRows.SKIP if run.skip_bad_rows else BadRows.REFUSE,
        str(dataset.row_count + dataset.bad_row_count),
    ]
    try:
        counts = run_limited(
            "lohan_app.runs.row_tokens",
            arguments,
            settings,
            on_progress=lambda fraction: _note(settings, engine, run_id, phase_progress=fraction),
        )
    except (LohanError, OSError) as error:
        if not isinstance(error, LohanError) and error.errno not in NO_SPACE:
            raise
        with write_transaction(engine) as session:
            _give_up(session, run_id, error)
        announce(settings, run_id)
        return
    log.info("%s: prepared %s", run_id, counts)
    _note(settings, engine, run_id, prepared_at=now(), state_reason="", phase="", phase_progress=None)
    wake(settings)


def _give_up(session: Session, run_id: str, error: LohanError | OSError) -> None:
    """Fail the run, or pause it where a drive is full. A task that comes late, after another one has prepared the run, changes nothing."""
    run = repository.lock_run(session, run_id)
    if run is None or run.prepared_at is not None:
        return
    if not isinstance(error, LohanError):
        repository.fire(
            session, run_id, Trigger.RUN_OUT_OF_SPACE, only_from=RunState.QUEUED, state_reason="The drive of the data folder is full.",
            phase_progress=None, pause_cause=PauseCause.DISK_FULL, start_after=now() + timedelta(seconds=DISK_FULL_SECONDS),
        )  # fmt: skip
        return
    cause = next((cause for kind, cause in _CAUSES.items() if isinstance(error, kind)), FailureCause.PROGRAM)
    problem = {**error.to_dict(), "cause": str(cause)}
    repository.fire(
        session, run_id, Trigger.FAIL, only_from=RunState.QUEUED, problem=problem, state_reason=error.message, phase_progress=None
    )


def _is_waiting(run: Run) -> bool:
    return run.state is RunState.QUEUED and run.wanted in (Wanted.RUN, Wanted.STOP) and run.prepared_at is None


def _note(settings: Settings, engine: Engine, run_id: str, **values: object) -> None:
    """Write down how far the preparation is; a run that was cancelled meanwhile keeps what it says, a paused one loses no work."""
    waiting = [RunState.QUEUED, RunState.PAUSED]
    with write_transaction(engine) as session:
        session.execute(update(Run).where(Run.id == run_id, Run.state.in_(waiting), Run.prepared_at.is_(None)).values(**values))
    announce(settings, run_id)
