"""Queries on runs. Every change of a run's state is one compare-and-set UPDATE; every batch of events is one transaction.

A supervisor writes with the epoch it was given by `raise_epoch`: once another one has taken the run over, its writes change nothing.
The functions take an open session; whoever opened it commits (`lohan_app.db.write_transaction`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, cast

from sqlalchemy import ColumnElement, CursorResult, case, delete, func, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from lohan.events import Event, EventType, ExitReason, FailureCause
from lohan_app.entities import DeviceUse, PauseCause, Run, RunEvent, RunKind, RunMetric, RunState
from lohan_app.entities.base import now
from lohan_app.entities.runs import TERMINAL_STATES
from lohan_app.runs import curves
from lohan_app.runs.states import ACTIVE_STATES, Trigger, is_allowed, moves

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
LATEST_UNIX_SECONDS = 253_402_300_799  # the last second of year 9999, where datetime ends
_NO_RESERVATION: dict[str, Any] = {"devices": [], "reserved_ram_bytes": 0, "reserved_ssd_bytes": 0, "reserved_directories": None}
QUEUE_LOCK = int.from_bytes(b"queue")
"""Names the queue among PostgreSQL's advisory locks."""


class LostEpochError(Exception):
    """Another supervisor has taken the run over: whoever gets this must stop writing, and leave the trainer alone."""


# ---------------------------------------------------------------- state
def transition(session: Session, run_id: str, *, source: set[RunState], target: RunState, epoch: int | None = None, **values: Any) -> bool:
    """Move a run to `target` if it is in one of `source`, and in `epoch` where one is given; one UPDATE, with `values` set in it.

    Returns:
        Whether the run was moved. False is no error: somebody else was first, or the run has ended.
    """
    assert all(is_allowed(state, target) for state in source), f"no trigger leads from {source} to {target}"
    statement = update(Run).where(Run.id == run_id, Run.state.in_(source))
    if epoch is not None:
        statement = statement.where(Run.epoch == epoch)
    result = session.execute(statement.values(state=target, **values).execution_options(synchronize_session=False))
    return cast("CursorResult[Any]", result).rowcount == 1


def fire(
    session: Session, run_id: str, trigger: Trigger, *, epoch: int | None = None, only_from: RunState | None = None, **values: Any
) -> RunState | None:
    """Apply `trigger` as `states.TRANSITIONS` has it; a run that leaves the machine gives its reservation back.

    Args:
        only_from: the one state in which the trigger counts, where whoever fires it knows of no other.

    Returns:
        The state the run is in now, or None where the trigger changed nothing.
    """
    for target, found in moves(trigger).items():
        source = found if only_from is None else found & {only_from}
        if source and transition(session, run_id, source=source, target=target, epoch=epoch, **(_stamps(trigger, target) | values)):
            _note_use(session, run_id, trigger, target, devices=len(values.get("devices", ())))
            return target
    return None


def _note_use(session: Session, run_id: str, trigger: Trigger, target: RunState, *, devices: int) -> None:
    """Time on devices begins with a claim and ends where the reservation does."""
    if trigger is Trigger.CLAIM:
        session.execute(insert(DeviceUse).values(run_id=run_id, began_at=now(), devices=devices))
    elif target not in ACTIVE_STATES:
        ended = update(DeviceUse).where(DeviceUse.run_id == run_id, DeviceUse.ended_at.is_(None)).values(ended_at=now())
        session.execute(ended.execution_options(synchronize_session=False))


def _stamps(trigger: Trigger, target: RunState) -> dict[str, Any]:
    """What entering a state writes besides it."""
    stamps: dict[str, Any] = {"pause_cause": PauseCause.REQUEST if target is RunState.PAUSED else None}
    if target not in ACTIVE_STATES:
        stamps |= _NO_RESERVATION | {"eta_seconds": None}
    if target is not RunState.QUEUED:
        stamps["start_after"] = None
    if trigger is Trigger.SUBMIT:
        stamps["queued_at"] = now()
    if trigger is Trigger.RESUME:  # whoever left the line goes to its end; a full drive is nobody's choice
        stamps["queued_at"] = case((Run.pause_cause == PauseCause.DISK_FULL, Run.queued_at), else_=now())
    if target in TERMINAL_STATES:
        stamps["finished_at"] = now()
    return stamps


def hold_queue(session: Session) -> None:
    """Let nobody else give out reservations before this transaction ends: two claims never count on the same room.

    On SQLite `write_transaction` holds the whole database already.
    """
    if session.get_bind().dialect.name == "postgresql":
        session.execute(select(func.pg_advisory_xact_lock(QUEUE_LOCK)))


def heed(session: Session, run: Run, trigger: Trigger) -> RunState | None:
    """Fire `trigger` for what was wanted of a waiting run, unless somebody has wanted something else since `run` was read."""
    is_so = select(Run.id).where(Run.id == run.id, Run.wanted == run.wanted, Run.state == run.state).with_for_update()
    if session.scalar(is_so) is None:
        return None
    return fire(session, run.id, trigger, only_from=run.state, state_reason="")


def raise_epoch(session: Session, run_id: str) -> int | None:
    """Take the run over: the returned epoch is the only one that may write from now on; None where there is no such run."""
    return session.scalar(
        update(Run).where(Run.id == run_id).values(epoch=Run.epoch + 1).returning(Run.epoch).execution_options(synchronize_session=False)
    )


def explain(session: Session, run_id: str, *, state: RunState, reason: str) -> None:
    """Say in words why a run is where it is; nothing is written where it says so already."""
    session.execute(
        update(Run)
        .where(Run.id == run_id, Run.state == state, Run.state_reason != reason)
        .values(state_reason=reason)
        .execution_options(synchronize_session=False)
    )


def lock_run(session: Session, run_id: str) -> Run | None:
    """The run, its row held until the transaction ends: what is decided by it is still so when it is written."""
    return session.scalars(select(Run).where(Run.id == run_id).with_for_update().execution_options(populate_existing=True)).one_or_none()


def get_run(session: Session, run_id: str) -> Run | None:
    """The run as it stands in the database now."""
    return session.get(Run, run_id, populate_existing=True)


def unfinished_retry(session: Session, run_id: str) -> str | None:
    """Id of the run that does again what this one was to do and has not ended; None where there is none."""
    retries = select(Run.id).where(
        Run.parent_id == run_id, Run.kind.not_in([RunKind.EXPORT, RunKind.CHAT]), Run.state.not_in(TERMINAL_STATES)
    )
    return session.scalars(retries).first()


def unfinished_exports(session: Session) -> dict[str, Run]:
    """Exports that have yet to read a run's states, or do; of each run that has such its oldest, by the run's id."""
    query = select(Run).where(Run.kind == RunKind.EXPORT, Run.state.not_in(TERMINAL_STATES)).order_by(Run.id.desc())
    return {run.parent_id: run for run in session.scalars(query) if run.parent_id is not None}


def unfinished_chat(session: Session, run_id: str) -> Run | None:
    """A chat that asks the run's result, or is going to; None where there is none."""
    return session.scalars(select(Run).where(_chats_with(run_id), Run.state.not_in(TERMINAL_STATES))).first()


def mark_deleted(session: Session, run_id: str, at: datetime) -> list[str]:
    """Take a run that has ended out of everybody's sight, and the chats with it; returns the ids of the chats."""
    goes = ((Run.id == run_id) | _chats_with(run_id)) & Run.deleted_at.is_(None) & Run.state.in_(TERMINAL_STATES)
    chats = list(session.scalars(select(Run.id).where(goes, Run.id != run_id)))
    session.execute(update(Run).where(goes).values(deleted_at=at).execution_options(synchronize_session=False))
    return chats


def chats_deleted_with(session: Session, run: Run) -> Sequence[Run]:
    """Of a deleted run the chats that went with it, their rows held."""
    query = select(Run).where(_chats_with(run.id), Run.deleted_at == run.deleted_at)
    return session.scalars(query.with_for_update()).all()


def forget_words(session: Session, run: Run) -> None:
    """Remove what was said in a deleted chat, whose row stays: questions and answers."""
    if run.kind is not RunKind.CHAT:
        return
    run.settings = {name: value for name, value in run.settings.items() if name != RunKind.CHAT}
    run.problem, run.state_reason = None, ""
    session.execute(delete(RunEvent).where(RunEvent.run_id == run.id).execution_options(synchronize_session=False))


def _chats_with(run_id: str) -> ColumnElement[bool]:
    return (Run.parent_id == run_id) & (Run.kind == RunKind.CHAT)


def runs_in(session: Session, states: Iterable[RunState]) -> Sequence[Run]:
    """Runs in one of `states` that were not deleted, oldest first."""
    return session.scalars(select(Run).where(Run.state.in_(list(states)), Run.deleted_at.is_(None)).order_by(Run.created_at, Run.id)).all()


# ---------------------------------------------------------------- events
def record_events(session: Session, run_id: str, *, epoch: int, events: Sequence[Event], offset_bytes: int, malformed: int) -> None:
    """Copy a batch of events into the database and move the stored read position behind it, all in the caller's transaction.

    Reading a stretch again changes nothing: events are keyed (run, attempt, seq), metrics (run, step) with the latest attempt winning.
    What an attempt says of a step behind the one that a later attempt goes on from holds no longer, whenever it comes.
    An event whose numbers do not fit the tables is counted as malformed.

    Raises:
        LostEpochError: the run has a newer supervisor, or has ended; nothing was written.
    """
    usable = [event for event in events if _is_usable(event)]
    malformed += len(events) - len(usable)
    begun = _attempts_begun(session, run_id)
    newest = max(begun, default=0)
    begun |= {event.attempt: resumed_step(event.fields) for event in usable if event.type == EventType.STARTED}
    usable = _without_undone_steps(usable, begun)
    summary = _summary([event for event in usable if event.attempt >= newest])
    summary |= {"events_offset_bytes": offset_bytes, "malformed_events": malformed}
    result = session.execute(
        update(Run)
        .where(Run.id == run_id, Run.epoch == epoch, Run.state.not_in(TERMINAL_STATES))
        .values(**summary)
        .execution_options(synchronize_session=False)
    )
    if cast("CursorResult[Any]", result).rowcount != 1:
        raise LostEpochError(run_id)
    for event in usable:
        if event.type == EventType.STARTED:
            _forget_undone_steps(session, run_id, event)
    _insert_events(session, run_id, [event for event in usable if event.type != EventType.STEP])
    _forget_answer_parts(session, run_id, usable)
    _upsert_metrics(session, run_id, [event for event in usable if event.type == EventType.STEP])


def exit_event(session: Session, run_id: str, *, attempt: int) -> RunEvent | None:
    """The trainer's last word on an attempt; None where it had no time for one."""
    return session.scalars(
        select(RunEvent)
        .where(RunEvent.run_id == run_id, RunEvent.attempt == attempt, RunEvent.type == EventType.EXIT)
        .order_by(RunEvent.seq.desc())
    ).first()


def lost_attempts(session: Session, run_id: str, *, attempt: int, recorded_step: int = 0) -> int:
    """How many attempts, `attempt` included, have gone on from the step that `attempt` went on from.

    A run that comes further with every attempt is not given up: where `recorded_step`, which the next attempt will go on from, lies behind
    that step, `attempt` alone counts. What was ended by a request, by a host that stops or by a full drive does not count.
    """
    events = session.scalars(
        select(RunEvent).where(RunEvent.run_id == run_id, RunEvent.type.in_([EventType.STARTED, EventType.EXIT]))
    ).all()
    begun = {event.attempt: resumed_step(event.fields) for event in events if event.type == EventType.STARTED}
    excused = {event.attempt for event in events if event.type == EventType.EXIT and _is_excused(event.fields)}
    step = lost = 0
    for number in range(1, attempt + 1):
        # One that ended before its first event had nothing to go on from but what the one before it had.
        moved = begun.get(number, step) != step
        step = begun.get(number, step)
        lost = (0 if moved else lost) + (number not in excused)
    # Before an attempt's first word what is recorded is the work of those before it.
    return min(lost, 1) if attempt in begun and recorded_step > step else lost


def _is_excused(fields: Mapping[str, Any]) -> bool:
    if fields.get("reason") in (ExitReason.INTERRUPTED, ExitReason.PAUSED):
        return True
    error = fields.get("error")
    return isinstance(error, dict) and error.get("cause") == FailureCause.DISK_FULL


def _is_usable(event: Event) -> bool:
    if not (0 < event.attempt <= INT32_MAX and 0 < event.seq <= INT32_MAX and event.type.isidentifier() and len(event.type) <= 32):
        return False
    if not 0 <= event.time <= LATEST_UNIX_SECONDS:  # false for NaN too
        return False
    if event.type != EventType.STEP:
        return True
    step = event.fields.get("step")
    return isinstance(step, int) and 0 < step <= INT32_MAX


def _summary(events: Sequence[Event]) -> dict[str, Any]:
    """What the events say about where the run stands, as columns of `Run`; later events win."""
    columns: dict[str, Any] = {}
    for event in events:
        columns["heartbeat_at"] = datetime.fromtimestamp(event.time, UTC)
        fields = event.fields
        match event.type:
            case EventType.STARTED:
                step = resumed_step(fields)
                columns |= {"step": step, "resumed_step": step or None, "loss": _number(fields.get("loss")), "last_loss": None}
                columns |= {"total_steps": _integer(fields.get("total_steps")), "eta_seconds": None, "phase_progress": None}
                if not step:
                    columns["first_loss"] = None  # a trainer that begins from the base model measures it again
            case EventType.PHASE:
                columns |= {"phase": str(fields.get("phase", "")).replace("\0", "")[:32], "phase_progress": _number(fields.get("progress"))}
                if "eta_seconds" in fields:
                    columns["eta_seconds"] = _number(fields["eta_seconds"])
            case EventType.STEP:
                columns |= {"step": _integer(fields.get("step")), "loss": _number(fields.get("loss"))}
                columns |= {"total_steps": _integer(fields.get("total_steps")), "eta_seconds": _number(fields.get("eta_seconds"))}
            case EventType.ANSWER_PART:
                columns["phase_progress"] = _number(fields.get("progress"))
            case EventType.EVALUATION:
                column = "first_loss" if fields.get("when") == "before" else "last_loss"
                columns[column] = _number(fields.get("loss"))
            case EventType.PLAN_CORRECTED:
                columns["corrected_step_seconds"] = _number(fields.get("new_seconds"))
            case EventType.EXIT:
                columns["eta_seconds"] = None
    return columns


def resumed_step(fields: Mapping[str, Any]) -> int:
    """The step that a `started` event goes on from; 0 from the base model."""
    return _integer(fields.get("resumed_step"))


def _attempts_begun(session: Session, run_id: str) -> dict[int, int]:
    """The step that each attempt in the database goes on from."""
    begun = session.scalars(select(RunEvent).where(RunEvent.run_id == run_id, RunEvent.type == EventType.STARTED))
    return {event.attempt: resumed_step(event.fields) for event in begun}


def _without_undone_steps(events: Sequence[Event], begun: Mapping[int, int]) -> list[Event]:
    """`events` less the steps that a later attempt does again."""

    def is_undone(event: Event) -> bool:
        return event.type == EventType.STEP and any(
            event.attempt < attempt and event.fields["step"] > step for attempt, step in begun.items()
        )

    return [event for event in events if not is_undone(event)]


def _forget_undone_steps(session: Session, run_id: str, started: Event) -> None:
    """A restarted trainer does its steps again: the curve of the attempts before would run ahead of it until overtaken."""
    session.execute(
        delete(RunMetric)
        .where(RunMetric.run_id == run_id, RunMetric.attempt < started.attempt, RunMetric.step > resumed_step(started.fields))
        .execution_options(synchronize_session=False)
    )
    curves.refresh(session, run_id, first_step=resumed_step(started.fields) + 1, last_step=INT32_MAX)


def _forget_answer_parts(session: Session, run_id: str, events: Sequence[Event]) -> None:
    """The pieces of an answer are for whoever reads it while it grows: the whole answer, and an attempt that begins it anew, make them
    many rows that say nothing."""
    begun = max((event.attempt for event in events if event.type == EventType.STARTED), default=0)
    whole = max((event.attempt for event in events if event.type == EventType.ANSWER), default=0)
    if begun > 1 or whole:
        parts = delete(RunEvent).where(RunEvent.run_id == run_id, RunEvent.type == EventType.ANSWER_PART)
        session.execute(parts.where(RunEvent.attempt <= max(begun - 1, whole)).execution_options(synchronize_session=False))


def _insert_events(session: Session, run_id: str, events: Sequence[Event]) -> None:
    if not events:
        return
    rows = {
        (event.attempt, event.seq): {
            "run_id": run_id,
            "attempt": event.attempt,
            "seq": event.seq,
            "time": event.time,
            "type": event.type,
            "fields": event.fields,
        }
        for event in events
    }
    session.execute(_insert(session, RunEvent).values(list(rows.values())).on_conflict_do_nothing())


def _upsert_metrics(session: Session, run_id: str, events: Sequence[Event]) -> None:
    if not events:
        return
    # One row per step: PostgreSQL refuses a statement that would write the same row twice.
    newest: dict[int, Event] = {}
    for event in events:
        step = event.fields["step"]
        if step not in newest or (newest[step].attempt, newest[step].seq) < (event.attempt, event.seq):
            newest[step] = event
    insert = _insert(session, RunMetric).values([_metric_row(run_id, event) for event in newest.values()])
    columns = [column.name for column in RunMetric.__table__.columns if not column.primary_key]
    session.execute(
        insert.on_conflict_do_update(
            index_elements=["run_id", "step"],
            set_={name: insert.excluded[name] for name in columns},
            where=RunMetric.attempt <= insert.excluded["attempt"],
        )
    )
    for first, last in _stretches(newest):
        curves.refresh(session, run_id, first_step=first, last_step=last)


def _stretches(steps: Iterable[int]) -> list[tuple[int, int]]:
    """First and last of steps that follow each other closely: one for a healthy trainer, few for any."""
    found: list[tuple[int, int]] = []
    for step in sorted(steps):
        if found and step - found[-1][1] <= curves.SUMMARY_STEPS:
            found[-1] = (found[-1][0], step)
        else:
            found.append((step, step))
    return found


def _metric_row(run_id: str, event: Event) -> dict[str, Any]:
    fields = event.fields
    return {
        "run_id": run_id,
        "step": fields["step"],
        "attempt": event.attempt,
        "seq": event.seq,
        "time": event.time,
        "loss": _number(fields.get("loss")),
        "learning_rate": _number(fields.get("learning_rate")) or 0.0,
        "gradient_norm": _number(fields.get("gradient_norm")),
        "tokens": _integer(fields.get("tokens")),
        "tokens_per_second": _number(fields.get("tokens_per_second")),
        "step_seconds": _number(fields.get("step_seconds")) or 0.0,
        "epoch": _number(fields.get("epoch")),
        "clip_rate": _number(fields.get("clip_rate")),
        "device_peak_bytes": _bytes(fields.get("device_peak_bytes")),
        "host_bytes": _bytes(fields.get("host_bytes")),
    }


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _bytes(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= INT64_MAX else None


def _integer(value: Any) -> int:
    return min(max(int(value), 0), INT32_MAX) if isinstance(value, int) else 0


def _insert(session: Session, entity: type[RunEvent | RunMetric]) -> sqlite.Insert | postgresql.Insert:
    """INSERT with ON CONFLICT, which SQLAlchemy offers per database only."""
    if session.get_bind().dialect.name == "postgresql":
        return postgresql.insert(entity)
    return sqlite.insert(entity)
