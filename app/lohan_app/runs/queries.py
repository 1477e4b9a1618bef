"""Queries that read runs for people; what moves runs is `runs.repository`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from sqlalchemy import Row, delete, func, select, tuple_
from sqlalchemy.orm import InstrumentedAttribute, Session, defer

from lohan.events import EventType
from lohan_app.entities import BaseModel, Dataset, DeviceUse, IdempotencyKey, Run, RunEvent, RunKind, RunMetric, RunState, User
from lohan_app.entities.base import now
from lohan_app.runs.line import Use
from lohan_app.runs.states import ACTIVE_STATES

Cursor = tuple[int, int]
"""(attempt, seq) of an event: events of a run are ordered by it."""
# A client that retries does so within minutes; a week also covers a laptop closed over the weekend.
IDEMPOTENCY_DAYS = 7

_METRIC_COLUMNS: tuple[InstrumentedAttribute[Any], ...] = (
    RunMetric.step,
    RunMetric.attempt,
    RunMetric.time,
    RunMetric.loss,
    RunMetric.learning_rate,
    RunMetric.gradient_norm,
    RunMetric.tokens,
    RunMetric.tokens_per_second,
    RunMetric.step_seconds,
    RunMetric.epoch,
    RunMetric.clip_rate,
    RunMetric.device_peak_bytes,
    RunMetric.host_bytes,
)
_NAMED = (
    select(Run, User.name, BaseModel.name, Dataset.name)
    .join(User, User.id == Run.owner_id)
    .outerjoin(BaseModel, BaseModel.id == Run.base_model_id)
    .outerjoin(Dataset, Dataset.id == Run.dataset_id)
)
_WITHOUT_PLANS = (defer(Run.plan), defer(Run.started_plan), defer(Run.settings))


class NamedRun(NamedTuple):
    """A run with the names of what it belongs to."""

    run: Run
    owner_name: str
    base_model_name: str | None
    dataset_name: str | None


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """An event as it goes to a stream: `step` events come from the metrics, the others from the events."""

    cursor: Cursor
    type: str
    data: dict[str, Any] = field(default_factory=dict)


# ---------------------------------------------------------------- runs
def named_run(session: Session, run_id: str) -> NamedRun | None:
    """None where there is no such run, or it was deleted."""
    row = session.execute(_NAMED.where(Run.id == run_id, Run.deleted_at.is_(None))).one_or_none()
    return NamedRun(*row) if row is not None else None


def named_runs(session: Session, run_ids: Iterable[str]) -> list[NamedRun]:
    """Those of the runs that are there, without plans and settings."""
    return [NamedRun(*row) for row in session.execute(_NAMED.options(*_WITHOUT_PLANS).where(Run.id.in_(list(run_ids))))]


def list_runs(
    session: Session,
    *,
    owner_id: str | None,
    states: Collection[RunState] | None,
    after: str | None,
    limit: int,
    kind: RunKind | None = None,
    except_kind: RunKind | None = None,
    parent_id: str | None = None,
) -> list[NamedRun]:
    """Newest first, without plans and settings; of all owners, states, kinds (but `except_kind`) and parents where these are None."""
    query = _NAMED.options(*_WITHOUT_PLANS).where(Run.deleted_at.is_(None)).order_by(Run.id.desc()).limit(limit)
    if owner_id is not None:
        query = query.where(Run.owner_id == owner_id)
    if states is not None:
        query = query.where(Run.state.in_(list(states)))
    if kind is not None:
        query = query.where(Run.kind == kind)
    if except_kind is not None:
        query = query.where(Run.kind != except_kind)
    if parent_id is not None:
        query = query.where(Run.parent_id == parent_id)
    if after is not None:
        query = query.where(Run.id < after)
    return [NamedRun(*row) for row in session.execute(query)]


def active_runs(session: Session) -> Sequence[Run]:
    """Runs that hold devices and memory now."""
    query = select(Run).options(defer(Run.plan), defer(Run.started_plan))
    return session.scalars(query.where(Run.state.in_(ACTIVE_STATES))).all()


def queued_runs(session: Session) -> Sequence[Run]:
    """The queue in no order, without plans and settings."""
    return session.scalars(select(Run).options(*_WITHOUT_PLANS).where(Run.state == RunState.QUEUED, Run.deleted_at.is_(None))).all()


def device_uses(session: Session, since: datetime) -> list[Use]:
    """When whose runs held devices, of what had not ended before `since`; deleted runs count."""
    rows = session.execute(
        select(Run.owner_id, DeviceUse.devices, DeviceUse.began_at, DeviceUse.ended_at)
        .join(Run, Run.id == DeviceUse.run_id)
        .where(DeviceUse.ended_at.is_(None) | (DeviceUse.ended_at > since))
    )
    return [Use(*row) for row in rows]


# ---------------------------------------------------------------- idempotency
def stored_reply(session: Session, user_id: str, key: str) -> IdempotencyKey | None:
    return session.get(IdempotencyKey, (user_id, key))


def store_reply(session: Session, reply: IdempotencyKey) -> None:
    """Keep the reply with the run it belongs to, and forget those that nobody will ask for again."""
    session.execute(delete(IdempotencyKey).where(IdempotencyKey.created_at < now() - timedelta(days=IDEMPOTENCY_DAYS)))
    session.add(reply)
    session.flush()


# ---------------------------------------------------------------- metrics and events
def metrics_range(session: Session, run_id: str, after_step: int, to_step: int) -> tuple[int, int, int]:
    """(number of steps, first step, last step) of those after `after_step`, up to and with `to_step`; zeros where there are none."""
    count, first, last = session.execute(
        select(func.count(), func.min(RunMetric.step), func.max(RunMetric.step)).where(
            RunMetric.run_id == run_id, RunMetric.step > after_step, RunMetric.step <= to_step
        )
    ).one()
    return count, first or 0, last or 0


def metrics_between(session: Session, run_id: str, first_step: int, last_step: int) -> Sequence[Row[Any]]:
    """Rows of the columns of `MetricPoint`, both ends with them, in the order of steps."""
    query = select(*_METRIC_COLUMNS).where(RunMetric.run_id == run_id, RunMetric.step.between(first_step, last_step))
    return session.execute(query.order_by(RunMetric.step)).all()


def metrics_at(session: Session, run_id: str, steps: Collection[int]) -> Sequence[Row[Any]]:
    """The same for these steps; a few thousand at most."""
    query = select(*_METRIC_COLUMNS).where(RunMetric.run_id == run_id, RunMetric.step.in_(sorted(steps)))
    return session.execute(query.order_by(RunMetric.step)).all()


def recorded_events(session: Session, run_id: str, limit: int) -> Sequence[RunEvent]:
    """The last `limit` events of the run other than steps, oldest first."""
    query = select(RunEvent).where(RunEvent.run_id == run_id).order_by(RunEvent.attempt.desc(), RunEvent.seq.desc()).limit(limit)
    return session.scalars(query).all()[::-1]


def answer_of(session: Session, run_id: str) -> dict[str, Any] | None:
    """What a chat's latest attempt has answered, as the fields of `AnswerView`; None before its first words."""
    query = select(RunEvent).where(RunEvent.run_id == run_id, RunEvent.type.in_([EventType.ANSWER, EventType.ANSWER_PART]))
    events = session.scalars(query.order_by(RunEvent.attempt, RunEvent.seq)).all()
    if not events:
        return None
    latest = [event.fields for event in events if event.attempt == events[-1].attempt]
    if events[-1].type == EventType.ANSWER:
        return dict(latest[-1])
    return {"text": "".join(str(fields.get("text", "")) for fields in latest)}


def chats_of(session: Session, run_id: str, *, owner_id: str | None, limit: int) -> Sequence[Run]:
    """Chats with the run, newest first, with their settings; of all owners for None."""
    query = select(Run).where(Run.parent_id == run_id, Run.kind == RunKind.CHAT, Run.deleted_at.is_(None))
    if owner_id is not None:
        query = query.where(Run.owner_id == owner_id)
    return session.scalars(query.order_by(Run.id.desc()).limit(limit)).all()


def last_cursor(session: Session, run_id: str) -> Cursor:
    """Where the run's newest event stands; (0, 0) where there is none."""
    cursors = [(0, 0)]
    for entity in (RunEvent, RunMetric):
        query = select(entity.attempt, entity.seq).where(entity.run_id == run_id)
        row = session.execute(query.order_by(entity.attempt.desc(), entity.seq.desc()).limit(1)).one_or_none()
        if row is not None:
            cursors.append((row[0], row[1]))
    return max(cursors)


def events_after(session: Session, run_id: str, cursor: Cursor, limit: int) -> list[StoredEvent]:
    """The next `limit` events of the run, steps among them, in order."""
    events = session.scalars(
        select(RunEvent)
        .where(RunEvent.run_id == run_id, tuple_(RunEvent.attempt, RunEvent.seq) > cursor)
        .order_by(RunEvent.attempt, RunEvent.seq)
        .limit(limit)
    )
    steps = session.scalars(
        select(RunMetric)
        .where(RunMetric.run_id == run_id, tuple_(RunMetric.attempt, RunMetric.seq) > cursor)
        .order_by(RunMetric.attempt, RunMetric.seq)
        .limit(limit)
    )
    found = [StoredEvent((event.attempt, event.seq), event.type, {**event.fields, "time": event.time}) for event in events]
    found += [
        StoredEvent((step.attempt, step.seq), EventType.STEP, {column.key: getattr(step, column.key) for column in _METRIC_COLUMNS})
        for step in steps
    ]
    return sorted(found, key=lambda event: event.cursor)[:limit]
