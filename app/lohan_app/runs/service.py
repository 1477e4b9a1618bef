"""Runs: planning, submitting, looking at. What is asked of runs that exist: `runs.lifecycle`."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from lohan.config import Precision, TrainingSection
from lohan.planning.plan import Plan
from lohan_app.auth.repository import add_audit_entry
from lohan_app.auth.schemas import Identity
from lohan_app.base_models import repository as base_models
from lohan_app.context import AppContext
from lohan_app.datasets import repository as datasets
from lohan_app.db import read_transaction, write_transaction
from lohan_app.entities import (
    BaseModel,
    BaseModelState,
    Dataset,
    DatasetState,
    IdempotencyKey,
    Metric,
    Run,
    RunEvent,
    RunKind,
    RunState,
)
from lohan_app.entities.base import now
from lohan_app.errors import Conflict, NotFound, Unprocessable
from lohan_app.paging import DEFAULT_LIMIT, Page, make_page
from lohan_app.runs import curves as curves_of
from lohan_app.runs import queries
from lohan_app.runs.forecasts import count_steps
from lohan_app.runs.line import WINDOW, QueuePlace, device_seconds, in_order, places
from lohan_app.runs.logs import read_log
from lohan_app.runs.planning import plan_run, suggested_precision
from lohan_app.runs.schemas import (
    CurvesView,
    CurveView,
    LogView,
    MetricPoint,
    MetricsView,
    PlanRequest,
    RunDetail,
    RunRequest,
    RunView,
    detail_of,
    view_of,
)
from lohan_app.settings import Settings
from lohan_app.storage import quota
from lohan_app.storage.quota import planned_bytes
from lohan_app.storage.retention import KEEP_STATES_DAYS
from lohan_app.worker.celery import send
from lohan_app.worker.launcher import RunFiles
from lohan_app.worker.processes import holder_of, is_held

# A trainer reports its phases a few times a second while it loads; nobody reads further back.
EVENTS_LIMIT = 5000
LAST_STEP = 2**31 - 1
POINTS_LIMIT = 2000
# Minimum, maximum, mean, first and last value of each: 2,000 points a curve.
CURVE_BUCKETS = POINTS_LIMIT // 5
IDEMPOTENCY_KEY = re.compile(r"[\x21-\x7e]{1,255}")


@dataclass(frozen=True, slots=True)
class Submission:
    """The reply to a submission: the run as it was queued; the same again where the request had been answered before."""

    run: RunDetail
    is_replay: bool


# ---------------------------------------------------------------- planning
def plan(context: AppContext, identity: Identity, request: PlanRequest) -> Plan:
    """The memory split a run would have; nothing is stored.

    Raises:
        NotFound, Conflict: see `checked_model` and `_checked_dataset`.
        Unprocessable, ConfigError, CapacityError: see `runs.planning.plan_run`.
    """
    with read_transaction(context.engine) as session:
        model = checked_model(base_models.get(session, request.base_model_id))
        if request.dataset_id is not None:
            _visible_dataset(datasets.get(session, request.dataset_id), identity)
    return _plan(context, model, request)


def planned_steps(context: AppContext, identity: Identity, training: TrainingSection, dataset_id: str | None) -> int | None:
    """Steps of a run with these settings, if all usable rows of the dataset find room; None where that cannot be known."""
    if training.max_steps or dataset_id is None:
        return training.max_steps
    with read_transaction(context.engine) as session:
        dataset = datasets.get(session, dataset_id)
        rows = (dataset.row_count or 0) if dataset is not None and identity.may_see(dataset.owner_id) else 0
    return count_steps(training, rows)


def planned_steps_of(context: AppContext, identity: Identity, run: RunDetail) -> int | None:
    """Steps of a run that has not begun; None where that cannot be known."""
    try:
        training = TrainingSection.model_validate(run.settings.get("training", {}))
    except ValidationError:  # stored by another version
        return None
    return planned_steps(context, identity, training, run.dataset_id)


def suggest_precision(context: AppContext) -> tuple[Precision, str]:
    """What a run that names no precision is trained in on this machine, and why where that is not bf16."""
    return suggested_precision(context.hardware.facts(), context.settings)


def _plan(context: AppContext, model: BaseModel, request: PlanRequest) -> Plan:
    micro, batch = request.engine.micro_batch_size, request.training.batch_size
    if micro is not None and micro > batch:
        raise Unprocessable(
            f"engine.micro_batch_size is {micro}, above training.batch_size {batch}",
            place="engine.micro_batch_size",
            remedy=f"Use at most {batch}, or leave it to the plan.",
        )
    with read_transaction(context.engine) as session:
        active = queries.active_runs(session)
    return plan_run(model, request.training, request.engine, facts=context.hardware.facts(), active=active, settings=context.settings)


def checked_model(model: BaseModel | None) -> BaseModel:
    """The model; raises NotFound or Conflict where there is none, or it cannot be used."""
    if model is None:
        raise NotFound("no such base model", place="base_model_id", remedy="Look at the list of base models.")
    if model.state is not BaseModelState.READY:
        raise Conflict(
            f"the base model {model.name!r} is {model.state}",
            place="base_model_id",
            remedy="Wait until it is ready." if model.state is BaseModelState.INSPECTING else "Use another model; its page says why.",
        )
    return model


def _visible_dataset(dataset: Dataset | None, identity: Identity) -> Dataset:
    if dataset is None or not identity.may_see(dataset.owner_id):
        raise NotFound("no such dataset", place="dataset_id", remedy="Look at the list of datasets.")
    return dataset


def _checked_dataset(dataset: Dataset | None, identity: Identity, request: RunRequest) -> Dataset:
    dataset = _visible_dataset(dataset, identity)
    if dataset.state is DatasetState.HAS_BAD_ROWS and not request.skip_bad_rows:
        raise Unprocessable(
            f"{dataset.bad_row_count} rows of the dataset cannot be used",
            place="skip_bad_rows",
            remedy=f"Correct them (GET /api/v1/datasets/{dataset.id}/errors lists them), or set skip_bad_rows to train without them.",
        )
    if dataset.state not in (DatasetState.READY, DatasetState.HAS_BAD_ROWS):
        raise Conflict(
            f"the dataset {dataset.name!r} is {dataset.state}",
            place="dataset_id",
            remedy="Use another dataset; its page says why." if dataset.state is DatasetState.INVALID else "Wait until it is ready.",
        )
    return dataset


# ---------------------------------------------------------------- submission
def submit(context: AppContext, identity: Identity, request: RunRequest, idempotency_key: str | None = None) -> Submission:
    """Queue a run with the plan it was made for, and have its rows prepared.

    Raises:
        as `plan`, and Unprocessable: the idempotency key is malformed, or was used for another request.
        QuotaExceeded: the user's quota has no room for the run's states and result.
    """
    check_key(idempotency_key)
    body_hash = hashlib.sha256(request.model_dump_json().encode()).hexdigest()
    with read_transaction(context.engine) as session:
        answered = earlier_answer(session, identity, idempotency_key, body_hash)
        if answered is not None:
            return answered
        check_parts(session, identity, request)
        model = checked_model(base_models.get(session, request.base_model_id))
    made = _plan(context, model, request)
    try:
        submission = _store(context, identity, request, made, idempotency_key, body_hash)
    except IntegrityError:
        # The same key at the same time on PostgreSQL: its primary key let the other request through, whose reply is this one's too.
        with read_transaction(context.engine) as session:
            answered = earlier_answer(session, identity, idempotency_key, body_hash)
        if answered is None:
            raise
        return answered
    if not submission.is_replay:
        send("runs.prepare", submission.run.id, settings=context.settings)
    return submission


def settings_of(request: RunRequest, training: TrainingSection) -> dict[str, Any]:
    """What is stored in `Run.settings`."""
    settings: dict[str, Any] = {"training": training.model_dump(mode="json"), "engine": request.engine.model_dump(mode="json")}
    return settings if request.keep_states_days is None else settings | {KEEP_STATES_DAYS: request.keep_states_days}


def check_quota(session: Session, context: AppContext, identity: Identity, owner_id: str, need_bytes: int) -> None:
    """Raises QuotaExceeded where the owner's quota has no room for a run that is going to hold so much; administrators decide freely."""
    quota.check(session, context.settings, user_id=owner_id, role=identity.role, need_bytes=need_bytes, what="the run")


def check_key(key: str | None) -> None:
    """Raises Unprocessable where this is no idempotency key."""
    if key is not None and IDEMPOTENCY_KEY.fullmatch(key) is None:
        raise Unprocessable(
            "the idempotency key is malformed", place="Idempotency-Key", remedy="Use 1 to 255 visible ASCII characters, such as a UUID."
        )


def check_parts(session: Session, identity: Identity, request: RunRequest) -> None:
    """See that a run can be made of the request's model and dataset.

    Raises:
        NotFound, Conflict, Unprocessable: one of them is gone or not ready; see `submit`.
    """
    checked_model(base_models.get(session, request.base_model_id))
    _checked_dataset(datasets.get(session, request.dataset_id), identity, request)


def earlier_answer(session: Session, identity: Identity, key: str | None, body_hash: str) -> Submission | None:
    """The reply this key got before.

    Raises:
        Unprocessable: it was the key of another request.
    """
    stored = queries.stored_reply(session, identity.user_id, key) if key is not None else None
    if stored is None:
        return None
    if stored.body_hash != body_hash:
        raise Unprocessable(
            "this idempotency key was used for another request", place="Idempotency-Key", remedy="Use a new key for a new request."
        )
    return Submission(RunDetail.model_validate(stored.reply), is_replay=True)


def _store(context: AppContext, identity: Identity, request: RunRequest, made: Plan, key: str | None, body_hash: str) -> Submission:
    """The run, its idempotency key and its audit entry in one transaction; what was checked before is checked again under it."""
    with write_transaction(context.engine) as session:
        answered = earlier_answer(session, identity, key, body_hash)
        if answered is not None:
            return answered
        model = checked_model(base_models.get_locked(session, request.base_model_id))
        dataset = _checked_dataset(datasets.get_locked(session, request.dataset_id), identity, request)
        training = request.training.model_copy(update={"precision": Precision(made.precision)})
        stored_plan = made.model_dump(mode="json")
        check_quota(session, context, identity, identity.user_id, planned_bytes(stored_plan))
        run = Run(
            owner_id=identity.user_id,
            name=request.name,
            base_model_id=model.id,
            dataset_id=dataset.id,
            skip_bad_rows=request.skip_bad_rows,
            settings=settings_of(request, training),
            plan=stored_plan,
            state=RunState.QUEUED,
            queued_at=now(),
            devices=[],
        )
        session.add(run)
        session.flush()
        queued = detail(session, queries.NamedRun(run, identity.user_name, model.name, dataset.name))
        if key is not None:
            reply = queued.model_dump(mode="json")
            queries.store_reply(
                session, IdempotencyKey(user_id=identity.user_id, key=key, body_hash=body_hash, status_code=201, reply=reply)
            )
        add_audit_entry(session, user_id=identity.user_id, action="run.submit", subject=run.id, address=identity.address)
    return Submission(queued, is_replay=False)


# ---------------------------------------------------------------- reading
def list_runs(
    context: AppContext,
    identity: Identity,
    after: str | None = None,
    limit: int = DEFAULT_LIMIT,
    states: Collection[RunState] | None = None,
    kind: RunKind | None = None,
    except_kind: RunKind | None = None,
) -> Page[RunView]:
    """The user's runs in one of `states` (None: in any), of `kind` (None: of any but `except_kind`), newest first; an administrator's list
    has everybody's."""
    owner_id = None if identity.is_admin else identity.user_id
    with read_transaction(context.engine) as session:
        rows = queries.list_runs(
            session, owner_id=owner_id, states=states, after=after, limit=limit + 1, kind=kind, except_kind=except_kind
        )
    return make_page(rows, limit, view_of, lambda row: row.run.id)


def get_run(context: AppContext, identity: Identity, run_id: str) -> RunDetail:
    """Raises NotFound where there is none that this user may see."""
    with read_transaction(context.engine) as session:
        return detail(session, visible(session, identity, run_id))


def detail(session: Session, named: queries.NamedRun) -> RunDetail:
    """The run with its settings, plans, place in the queue, and what it has answered."""
    place = places_in_queue(session).get(named.run.id) if named.run.state is RunState.QUEUED else None
    answer = queries.answer_of(session, named.run.id) if named.run.kind is RunKind.CHAT else None
    return detail_of(named, place, answer)


def places_in_queue(session: Session) -> dict[str, QueuePlace]:
    """The place of every queued run, by id: in the order in which the reconciler asks for them."""
    at = now()
    seconds = device_seconds(queries.device_uses(session, at - WINDOW), at)
    return places(in_order(queries.queued_runs(session), seconds), seconds)


def queue_places(context: AppContext) -> dict[str, QueuePlace]:
    """The place of every queued run, by id."""
    with read_transaction(context.engine) as session:
        return places_in_queue(session)


def visible(session: Session, identity: Identity, run_id: str) -> queries.NamedRun:
    """Raises NotFound where there is none that this user may see."""
    # A stranger's run and none at all look the same.
    row = queries.named_run(session, run_id)
    if row is None or not identity.may_see(row.run.owner_id):
        raise NotFound("no such run", place=run_id, remedy="Look at the list of runs.")
    return row


def check_at_rest(settings: Settings, run_id: str) -> None:
    """Raises Conflict where a process still works in the run's folder."""
    lock = RunFiles(settings.run_folder(run_id)).trainer_lock
    if is_held(lock):
        process = holder_of(lock) or "(unknown)"
        raise Conflict(f"process {process} still works in the run's folder", place=run_id, remedy="Wait for it, or end it.")


def metrics(context: AppContext, identity: Identity, run_id: str, after_step: int = 0, to_step: int = LAST_STEP) -> MetricsView:
    """Steps of the run after `after_step`, up to and with `to_step`; of more than 2,000 those that its loss curve consists of."""
    with read_transaction(context.engine) as session:
        visible(session, identity, run_id)
        total, first, last = queries.metrics_range(session, run_id, after_step, to_step)
        attempt, seq = queries.last_cursor(session, run_id)
        if total <= POINTS_LIMIT:
            points = queries.metrics_between(session, run_id, first, last)
        else:
            points = queries.metrics_at(session, run_id, _outline(session, run_id, first, last))
        data = [MetricPoint.model_validate(point) for point in points]
    last_event_id = f"{attempt}:{seq}" if attempt else None
    return MetricsView(data=data, total=total, down_sampled=total > POINTS_LIMIT, last_event_id=last_event_id)


def _outline(session: Session, run_id: str, first: int, last: int) -> set[int]:
    """Of each of equal stretches of steps that of the lowest and of the highest loss and the first without one; the range's ends."""
    width = curves_of.bucket_steps(first, last, (POINTS_LIMIT - 2) // 3)
    rows = curves_of.read(session, run_id, [Metric.LOSS], first_step=first, last_step=last, width=width)
    steps = {step for row in rows for step in (row.minimum_step, row.maximum_step, row.gap_step) if step is not None}
    return steps | {first, last}


def curves(
    context: AppContext, identity: Identity, run_id: str, metrics: Sequence[Metric], after_step: int = 0, to_step: int = LAST_STEP
) -> CurvesView:
    """Curves of the run's steps after `after_step`, up to and with `to_step`; a narrower range gets finer buckets."""
    with read_transaction(context.engine) as session:
        visible(session, identity, run_id)
        total, first, last = queries.metrics_range(session, run_id, after_step, to_step)
        attempt, seq = queries.last_cursor(session, run_id)
        width = curves_of.bucket_steps(first, last, CURVE_BUCKETS)
        rows = curves_of.read_envelopes(session, run_id, metrics, first_step=first, last_step=last, width=width)
    found = {metric: CurveView() for metric in metrics}
    for row in rows:
        _append(found[Metric(row.metric)], row, width, first, last)
    last_event_id = f"{attempt}:{seq}" if attempt else None
    return CurvesView(total=total, bucket_steps=width, curves=found, last_event_id=last_event_id)


def _append(curve: CurveView, row: curves_of.Envelope, width: int, first: int, last: int) -> None:
    begin, end = max(first, row.bucket * width), min(last, (row.bucket + 1) * width - 1)
    curve.first_step.append(row.first_step)
    curve.last_step.append(row.last_step)
    curve.gaps.append(row.steps - row.finite_steps)
    curve.missing.append(end - begin + 1 - row.steps)
    curve.first.append(row.first_value)
    curve.last.append(row.last_value)
    curve.minimum.append(row.minimum)
    curve.maximum.append(row.maximum)
    curve.mean.append(row.total / row.finite_steps if row.total is not None else None)


def recorded_events(context: AppContext, identity: Identity, run_id: str) -> Sequence[RunEvent]:
    """What the trainer said besides its steps, oldest first; the last 5,000."""
    with read_transaction(context.engine) as session:
        visible(session, identity, run_id)
        return queries.recorded_events(session, run_id, EVENTS_LIMIT)


def log_tail(context: AppContext, identity: Identity, run_id: str, offset: int | None = None) -> LogView:
    """The trainer's log from byte `offset` on; its last 64 KiB where none is given."""
    with read_transaction(context.engine) as session:
        visible(session, identity, run_id)
    return read_log(context.settings.run_folder(run_id) / "trainer.log", offset)


def export_of(context: AppContext, identity: Identity, run_id: str) -> tuple[Path, str]:
    """The folder with the run's result, and the run's name.

    Raises:
        NotFound: see `get_run`.
        Conflict: the run has no result (yet).
    """
    with read_transaction(context.engine) as session:
        run = visible(session, identity, run_id).run
    if run.kind is RunKind.PROFILE:
        raise Conflict("a measurement has nothing to download", place=run_id, remedy="Its figures are on the hardware page.")
    if run.kind is RunKind.CHAT:
        raise Conflict("a chat has nothing to download", place=run_id, remedy="Its answer is in `answer` of GET /api/v1/runs/{id}.")
    folder = context.settings.run_folder(run_id) / "export"
    if run.state is not RunState.SUCCEEDED:
        raise Conflict(f"the run is {run.state}, and has no result", place=run_id, remedy="A run that succeeded can be downloaded.")
    if not folder.is_dir():
        raise NotFound("the run's result is no longer on the disk", place=run_id, remedy="Run it again.")
    return folder, run.name
