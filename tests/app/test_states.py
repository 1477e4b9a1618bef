"""The run's state machine: the table, every compare-and-set, the epoch, and events copied once."""

from __future__ import annotations

import itertools

import pytest
from fixtures.runs import make_run, read_events, read_metrics, read_run
from sqlalchemy import Engine

from lohan.events import Event
from lohan_app.db import write_transaction
from lohan_app.entities import TERMINAL_STATES, RunState
from lohan_app.runs import repository
from lohan_app.runs.repository import LostEpochError
from lohan_app.runs.states import ACTIVE_STATES, TRANSITIONS, WAITING_STATES, Trigger, moves, next_state
from lohan_app.settings import Settings


def step(number: int, *, attempt: int = 1, seq: int | None = None, loss: object = 1.5) -> Event:
    fields = {"step": number, "total_steps": 9, "loss": loss, "learning_rate": 1e-3, "tokens": 8, "step_seconds": 0.1, "eta_seconds": 3.0}
    return Event(attempt, seq if seq is not None else 10 + number, 1_800_000_000.0 + number, "step", fields)


def started(*, attempt: int = 1, seq: int = 1, **fields: object) -> Event:
    return Event(attempt, seq, 1_800_000_000.0, "started", {"total_steps": 9, "device": "cpu:0"} | fields)


def record(engine: Engine, run_id: str, events: list[Event], *, epoch: int = 0, offset: int = 100, malformed: int = 0) -> None:
    with write_transaction(engine) as session:
        repository.record_events(session, run_id, epoch=epoch, events=events, offset_bytes=offset, malformed=malformed)


def test_every_state_is_waiting_active_or_terminal() -> None:
    assert frozenset(RunState) == WAITING_STATES | ACTIVE_STATES | TERMINAL_STATES
    assert len(WAITING_STATES) + len(ACTIVE_STATES) + len(TERMINAL_STATES) == len(RunState)


def test_terminal_states_have_no_way_out_and_every_other_can_be_cancelled() -> None:
    for state, trigger in itertools.product(RunState, Trigger):
        if state in TERMINAL_STATES:
            assert next_state(state, trigger) is None
    for state in WAITING_STATES | ACTIVE_STATES - {RunState.CANCELLING}:
        assert next_state(state, Trigger.REQUEST_CANCEL) in {RunState.CANCELLED, RunState.CANCELLING}


def test_every_state_can_be_reached() -> None:
    reached = {RunState.DRAFT}
    for _ in RunState:
        reached |= {target for (source, _), target in TRANSITIONS.items() if source in reached}
    assert reached == set(RunState)


def test_moves_are_the_table_by_trigger() -> None:
    pairs = {(source, trigger): target for trigger in Trigger for target, sources in moves(trigger).items() for source in sources}
    assert pairs == dict(TRANSITIONS)


@pytest.mark.database
def test_fire_does_exactly_what_the_table_says(settings: Settings, engine: Engine) -> None:
    run_id = make_run(settings, engine)
    for state, trigger in itertools.product(RunState, Trigger):
        with write_transaction(engine) as session:
            run = repository.get_run(session, run_id)
            assert run is not None
            run.state = state
        with write_transaction(engine) as session:
            result = repository.fire(session, run_id, trigger)
        expected = next_state(state, trigger)
        assert result is expected
        assert read_run(engine, run_id).state is (expected or state)


@pytest.mark.database
def test_a_lower_epoch_changes_nothing(settings: Settings, engine: Engine) -> None:
    run_id = make_run(settings, engine, state=RunState.RUNNING)
    with write_transaction(engine) as session:
        first = repository.raise_epoch(session, run_id)
        second = repository.raise_epoch(session, run_id)
    assert (first, second) == (1, 2)
    with write_transaction(engine) as session:
        assert repository.fire(session, run_id, Trigger.SUCCEED, epoch=first) is None
    with pytest.raises(LostEpochError):
        record(engine, run_id, [step(1)], epoch=1)
    assert read_run(engine, run_id).state is RunState.RUNNING
    assert read_metrics(engine, run_id) == []
    with write_transaction(engine) as session:
        assert repository.fire(session, run_id, Trigger.SUCCEED, epoch=second) is RunState.SUCCEEDED


@pytest.mark.database
def test_raise_epoch_of_an_unknown_run(engine: Engine) -> None:
    with write_transaction(engine) as session:
        assert repository.raise_epoch(session, "run_unknown") is None


@pytest.mark.database
def test_an_ended_run_gives_its_reservation_back(settings: Settings, engine: Engine) -> None:
    run_id = make_run(settings, engine, state=RunState.RUNNING, reserved_ram_bytes=7, reserved_ssd_bytes=9)
    with write_transaction(engine) as session:
        repository.fire(session, run_id, Trigger.FAIL, state_reason="why", problem={"message": "why"})
    run = read_run(engine, run_id)
    assert (run.devices, run.reserved_ram_bytes, run.reserved_ssd_bytes) == ([], 0, 0)
    assert run.finished_at is not None
    assert run.state_reason == "why"


@pytest.mark.database
def test_reading_a_stretch_again_changes_nothing(settings: Settings, engine: Engine) -> None:
    run_id = make_run(settings, engine, state=RunState.RUNNING)
    events = [
        started(),
        Event(1, 2, 1_800_000_000.5, "phase", {"phase": "training", "progress": 0.25}),
        Event(1, 3, 1_800_000_000.6, "evaluation", {"when": "before", "loss": 4.5, "rows": 4}),
        step(1),
        step(2, loss=None),
        Event(1, 30, 1_800_000_009.0, "evaluation", {"when": "after", "loss": 0.5, "rows": 4}),
    ]
    for _ in range(2):
        record(engine, run_id, events, offset=321, malformed=1)
    run = read_run(engine, run_id)
    assert (run.phase, run.phase_progress, run.step, run.total_steps, run.loss) == ("training", 0.25, 2, 9, None)
    assert (run.first_loss, run.last_loss, run.eta_seconds) == (4.5, 0.5, 3.0)
    assert (run.events_offset_bytes, run.malformed_events) == (321, 1)
    assert run.heartbeat_at is not None
    assert run.heartbeat_at.timestamp() == 1_800_000_009.0
    assert [(metric.step, metric.loss, metric.seq) for metric in read_metrics(engine, run_id)] == [(1, 1.5, 11), (2, None, 12)]
    assert [event.seq for event in read_events(engine, run_id)] == [1, 2, 3, 30]


@pytest.mark.database
def test_the_latest_attempt_wins_and_its_start_forgets_the_curve_before(settings: Settings, engine: Engine) -> None:
    run_id = make_run(settings, engine, state=RunState.RUNNING)
    record(engine, run_id, [started(), *(step(number) for number in range(1, 6))])
    # In one batch: the same step twice, of two attempts, and a late event of the older one.
    record(engine, run_id, [started(attempt=2), step(1, attempt=2, loss=2.5), step(1, attempt=1, loss=9.9)])
    assert [(metric.step, metric.attempt, metric.loss) for metric in read_metrics(engine, run_id)] == [(1, 2, 2.5)]
    record(engine, run_id, [step(1, attempt=1, loss=9.9)])
    assert [(metric.step, metric.attempt, metric.loss) for metric in read_metrics(engine, run_id)] == [(1, 2, 2.5)]


@pytest.mark.database
@pytest.mark.parametrize("batch", [1, 2, 3, 100])
def test_a_resumed_attempt_keeps_the_curve_up_to_its_step(settings: Settings, engine: Engine, batch: int) -> None:
    """However the events are divided into batches, and although the first attempt came further than its last record."""
    run_id = make_run(settings, engine, state=RunState.RUNNING)
    events = [
        started(),
        Event(1, 2, 1_800_000_000.1, "evaluation", {"when": "before", "loss": 4.5, "rows": 4}),
        *(step(number) for number in range(1, 7)),
        started(attempt=2, resumed_step=4, loss=1.5),
        step(5, attempt=2, loss=2.5),
    ]
    for at in range(0, len(events), batch):
        record(engine, run_id, events[at : at + batch])
    expected = [(1, 1, 1.5), (2, 1, 1.5), (3, 1, 1.5), (4, 1, 1.5), (5, 2, 2.5)]
    assert [(metric.step, metric.attempt, metric.loss) for metric in read_metrics(engine, run_id)] == expected
    # A stretch of the first attempt that is read again, to its end or by itself, brings nothing back.
    for again in (events, events[5:8], [step(6)], [step(9, seq=99)]):
        record(engine, run_id, again)
        assert [(metric.step, metric.attempt, metric.loss) for metric in read_metrics(engine, run_id)] == expected
    run = read_run(engine, run_id)
    assert (run.step, run.loss, run.resumed_step, run.first_loss) == (5, 2.5, 4, 4.5)


@pytest.mark.database
def test_a_resumed_run_stands_at_its_step_until_it_does_the_next(settings: Settings, engine: Engine) -> None:
    run_id = make_run(settings, engine, state=RunState.RUNNING)
    record(engine, run_id, [started(), *(step(number) for number in range(1, 7))])
    record(engine, run_id, [started(attempt=2, resumed_step=5, loss=1.25), step(6)])
    run = read_run(engine, run_id)
    assert (run.step, run.loss, run.resumed_step, run.eta_seconds) == (5, 1.25, 5, None)
    record(engine, run_id, [started(attempt=3)])
    run = read_run(engine, run_id)
    assert (run.step, run.loss, run.resumed_step, run.first_loss) == (0, None, None, None)
    assert read_metrics(engine, run_id) == []


@pytest.mark.database
def test_events_that_do_not_fit_the_tables_are_counted(settings: Settings, engine: Engine) -> None:
    run_id = make_run(settings, engine, state=RunState.RUNNING)
    odd = [
        Event(2**40, 1, 1.0, "step", {"step": 1}),
        Event(1, 2**40, 1.0, "phase", {}),
        Event(1, 1, float("nan"), "phase", {}),
        Event(1, 1, 1e300, "phase", {}),
        Event(1, 1, 1.0, "x" * 33, {}),
        Event(1, 1, 1.0, "phase\0", {}),
        Event(1, 1, 1.0, "step", {"step": "one"}),
        Event(1, 1, 1.0, "step", {"step": 0}),
    ]
    record(engine, run_id, [*odd, step(3, loss="nonsense"), Event(1, 40, 1.0, "phase", {"phase": "a\0b" + "c" * 99, "progress": 10**400})])
    run = read_run(engine, run_id)
    assert run.malformed_events == len(odd)
    assert (run.step, run.loss, run.phase_progress) == (3, None, None)
    assert len(run.phase) == 32
    assert "\0" not in run.phase


@pytest.mark.database
@pytest.mark.parametrize(
    ("resumed", "interrupted", "lost"),
    [
        ([0], [], 1),
        ([0, 0, 0], [], 3),
        ([0, 0, 0], [1, 3], 1),
        ([0, 5, 9], [], 1),
        ([0, 5, 5, 5], [], 3),
        ([0, 5, 5, 5], [3], 2),
        ([0, 5, None, None], [], 3),
        ([None, None], [], 2),
        ([7, 7, 0], [], 1),
    ],
)
def test_attempts_are_lost_that_came_no_further(
    settings: Settings, engine: Engine, resumed: list[int | None], interrupted: list[int], lost: int
) -> None:
    run_id = make_run(settings, engine, state=RunState.RUNNING)
    events = [started(attempt=attempt, resumed_step=step) for attempt, step in enumerate(resumed, 1) if step is not None]
    record(engine, run_id, [*events, *(Event(attempt, 9, 1.0, "exit", {"reason": "interrupted"}) for attempt in interrupted)])
    with write_transaction(engine) as session:
        assert repository.lost_attempts(session, run_id, attempt=len(resumed)) == lost


@pytest.mark.parametrize(("recorded", "lost"), [(0, 3), (4, 3), (5, 3), (6, 1)])
def test_an_attempt_that_came_further_is_the_first_at_its_place(settings: Settings, engine: Engine, recorded: int, lost: int) -> None:
    """Two that came no further than step 5, and one that the next will not have to do again."""
    run_id = make_run(settings, engine, state=RunState.RUNNING)
    record(engine, run_id, [started(attempt=attempt, resumed_step=5) for attempt in (1, 2, 3)])
    with write_transaction(engine) as session:
        assert repository.lost_attempts(session, run_id, attempt=3, recorded_step=recorded) == lost
        assert repository.lost_attempts(session, run_id, attempt=5, recorded_step=recorded) == 5, "two more died before their first word"


@pytest.mark.database
def test_the_last_word_of_an_attempt_is_its_own(settings: Settings, engine: Engine) -> None:
    run_id = make_run(settings, engine, state=RunState.RUNNING)
    exits = [Event(attempt, 5, 1.0, "exit", {"reason": reason}) for attempt, reason in ((1, "interrupted"), (2, "failed"))]
    record(engine, run_id, exits)
    with write_transaction(engine) as session:
        last = repository.exit_event(session, run_id, attempt=2)
        assert last is not None
        assert last.fields == {"reason": "failed"}
        assert repository.exit_event(session, run_id, attempt=4) is None
