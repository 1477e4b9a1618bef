"""The run's two tables, exhaustively: every state, whatever is wanted, times every request, times every event, in either order.

A stale tab, a double click and a late event are all one thing here: something that comes when the run is no longer where its sender
believes it to be.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from fixtures.runs import make_run, read_run
from fixtures.service import Person
from sqlalchemy import Engine, inspect, update
from sqlalchemy.orm import Session

from lohan.events import Event, EventType
from lohan_app.db import write_transaction
from lohan_app.entities import TERMINAL_STATES, Run, RunKind, RunState, Wanted
from lohan_app.errors import Conflict
from lohan_app.runs import lifecycle, repository
from lohan_app.runs.repository import LostEpochError
from lohan_app.runs.requests import EFFECTS, UNKNOWN, Effect, Request, allowed, effect_of, wanted_by
from lohan_app.runs.states import ACTIVE_STATES, TRANSITIONS, Trigger, next_state
from lohan_app.settings import Settings

ASKED = [request for request in Request if request not in (Request.RETRY, Request.CLONE, Request.DELETE)]
# What each request does, written down a second time and in another way: a column per request, a line per state and wish. `!` moves the run
# at once, `?` asks its supervisor, `k` kills, `=` is so already, `+` makes another run, `x` deletes, `.` is refused.
HEAD = "submit pause resume stop cancel force-stop retry clone delete"
TABLE = """
    draft/*          ! . . . ! . . + x
    queued/run       = ! = . ! . . + .
    queued/pause     = ! ? . ! . . + .
    queued/stop      = ! . . ! . . + .
    queued/cancel    . . . . ! . . + .
    starting/run     . ? = . ? . . + .
    starting/pause   . = ? . ? . . + .
    starting/stop    . ? . . ? . . + .
    starting/cancel  . . . . = . . + .
    running/run      . ? = ? ? k . + .
    running/pause    . = ? ? ? k . + .
    running/stop     . ? . = ? k . + .
    running/cancel   . . . . = k . + .
    pausing/run      . ? = ? ? k . + .
    pausing/pause    . = ? ? ? k . + .
    pausing/stop     . ? . = ? k . + .
    pausing/cancel   . . . . = k . + .
    paused/run       . ? ! ! ! . . + .
    paused/pause     . = ! ! ! . . + .
    paused/stop      . ? . ! ! . . + .
    paused/cancel    . . . . ! . . + .
    cancelling/run   . . . . ? k . + .
    cancelling/pause . . . . ? k . + .
    cancelling/stop  . . . . ? k . + .
    cancelling/cancel . . . . = k . + .
    succeeded/*      . . . . . . . + x
    failed/*         . . . . . . + + x
    cancelled/*      . . . . . . + + x
"""
# Of measurements and exports, which nothing is paused, stopped or drafted of.
OTHER_TABLE = """
    draft/*          . . . . ! . . . x
    queued/run       . . = . ! . . . .
    queued/pause     . . ? . ! . . . .
    queued/stop      . . . . ! . . . .
    queued/cancel    . . . . ! . . . .
    starting/run     . . = . ? . . . .
    starting/pause   . . ? . ? . . . .
    starting/stop    . . . . ? . . . .
    starting/cancel  . . . . = . . . .
    running/run      . . = . ? k . . .
    running/pause    . . ? . ? k . . .
    running/stop     . . . . ? k . . .
    running/cancel   . . . . = k . . .
    pausing/run      . . = . ? k . . .
    pausing/pause    . . ? . ? k . . .
    pausing/stop     . . . . ? k . . .
    pausing/cancel   . . . . = k . . .
    paused/run       . . ! . ! . . . .
    paused/pause     . . ! . ! . . . .
    paused/stop      . . . . ! . . . .
    paused/cancel    . . . . ! . . . .
    cancelling/run   . . . . ? k . . .
    cancelling/pause . . . . ? k . . .
    cancelling/stop  . . . . ? k . . .
    cancelling/cancel . . . . = k . . .
    succeeded/*      . . . . . . . . x
    failed/*         . . . . . . + . x
    cancelled/*      . . . . . . + . x
"""
TABLES = {RunKind.TRAIN: TABLE, RunKind.PROFILE: OTHER_TABLE, RunKind.EXPORT: OTHER_TABLE, RunKind.CHAT: OTHER_TABLE}
MARKS = {"!": Effect.NOW, "?": Effect.ASK, "k": Effect.KILL, "=": Effect.NOTHING, "+": Effect.MAKE, "x": Effect.REMOVE, ".": None}
LOCKED_COLUMNS = [column.key for column in inspect(Run).columns]


def written_down(kind: RunKind) -> dict[tuple[RunState, Wanted, Request], Effect | None]:
    found = {}
    for line in TABLES[kind].split("\n"):
        if not line.strip():
            continue
        place, *marks = line.split()
        state, wish = place.split("/")
        for wanted in Wanted if wish == "*" else [Wanted(wish)]:
            for name, mark in zip(HEAD.split(), marks, strict=True):
                found[RunState(state), wanted, Request(name)] = MARKS[mark]
    return found


@pytest.mark.parametrize("kind", RunKind)
def test_every_request_in_every_state_does_what_is_written_down(kind: RunKind) -> None:
    expected = written_down(kind)
    assert expected.keys() == set(itertools.product(RunState, Wanted, Request))
    assert {key: effect_of(key[2], key[0], key[1], kind) for key in expected} == expected


def test_a_request_that_moves_a_run_has_a_way_in_the_state_machine() -> None:
    for (state, request), effect in EFFECTS.items():
        if effect is Effect.NOW:
            assert next_state(state, lifecycle.TRIGGERS[request]) is not None, (state, request)
        if effect in (Effect.ASK, Effect.KILL) and state is not RunState.CANCELLING:
            assert state in ACTIVE_STATES | {RunState.PAUSED, RunState.QUEUED}, (state, request)


def test_what_is_allowed_changes_something_and_is_never_refused() -> None:
    for kind, state, wanted, step in itertools.product(RunKind, RunState, Wanted, (0, 3)):
        run = Run(kind=kind, state=state, wanted=wanted, step=step)
        for request in Request:
            effect = effect_of(request, state, wanted, kind)
            expected = effect not in (None, Effect.NOTHING) and not (request is Request.STOP and step == 0)
            assert (request in allowed(run)) is expected, (kind, state, wanted, step, request)


def put(session: Session, run_id: str, **values: Any) -> Run:
    if values:
        session.execute(update(Run).where(Run.id == run_id).values(**values))
    session.expire_all()
    run = repository.lock_run(session, run_id)
    assert run is not None
    return run


def columns(run: Run) -> dict[str, Any]:
    return {name: getattr(run, name) for name in LOCKED_COLUMNS}


def asked(session: Session, owner: Person, run_id: str, request: Request) -> bool:
    """Whether the request was taken."""
    session.expire_all()
    run = repository.lock_run(session, run_id)
    assert run is not None
    try:
        lifecycle.apply(session, owner.identity, run, request, {})
    except Conflict as error:
        assert str(run.state) in error.message
        assert UNKNOWN[run.kind].get(request, "") in error.message
        assert "Allowed now: " in (error.remedy or "")
        return False
    return True


def after_request(state: RunState, wanted: Wanted, request: Request, kind: RunKind) -> tuple[RunState, Wanted]:
    """Where the tables say that a request leads."""
    effect = effect_of(request, state, wanted, kind)
    if effect in (None, Effect.NOTHING):
        return state, wanted
    if effect is Effect.KILL:
        return state, Wanted.PAUSE if kind is RunKind.TRAIN and wanted is not Wanted.CANCEL else Wanted.CANCEL
    wanted = wanted if request is Request.SUBMIT else wanted_by(request)
    if effect is Effect.ASK:
        return state, wanted
    target = next_state(state, lifecycle.TRIGGERS[request])
    assert target is not None
    return target, wanted


# The tables are the same on both databases; two states show that PostgreSQL's row locks and comparisons are.
@pytest.mark.parametrize(
    "state",
    [pytest.param(state, marks=pytest.mark.database) if state in (RunState.PAUSED, RunState.CANCELLED) else state for state in RunState],
)
def test_every_request_and_every_event_in_either_order(settings: Settings, engine: Engine, owner: Person, state: RunState) -> None:
    """What the database holds afterwards is what the two tables say, whichever comes first; an ended run does not change by a column."""
    run_id = make_run(settings, engine, state=state, step=3)
    with write_transaction(engine) as session:
        for wanted, request, trigger in itertools.product(Wanted, ASKED, Trigger):
            before = columns(put(session, run_id, state=state, wanted=wanted, kill_attempt=None, finished_at=None))
            # The page was opened, the event came, and then somebody clicked.
            moved = next_state(state, trigger)
            assert repository.fire(session, run_id, trigger) is moved
            here = moved or state
            taken = asked(session, owner, run_id, request)
            assert taken is (effect_of(request, here, wanted) is not None), (state, wanted, trigger, request)
            after = put(session, run_id)
            assert (after.state, after.wanted) == after_request(here, wanted, request, RunKind.TRAIN), (state, wanted, trigger, request)
            if state in TERMINAL_STATES:
                assert columns(after) == before
            # Somebody clicked, and then the event came.
            put(session, run_id, **before)
            taken = asked(session, owner, run_id, request)
            assert taken is (effect_of(request, state, wanted) is not None)
            here, wish = after_request(state, wanted, request, RunKind.TRAIN)
            moved = next_state(here, trigger)
            assert repository.fire(session, run_id, trigger) is moved
            after = put(session, run_id)
            assert (after.state, after.wanted) == (moved or here, wish), (state, wanted, request, trigger)
            if state in TERMINAL_STATES:
                assert columns(after) == before
            put(session, run_id, **before)


@pytest.mark.parametrize("kind", [kind for kind in RunKind if kind is not RunKind.TRAIN])
def test_every_request_of_another_kind(settings: Settings, engine: Engine, owner: Person, kind: RunKind) -> None:
    """What an event does is the same for every kind: `repository.fire` does not look at it. What a request does is not."""
    parent_id = make_run(settings, engine) if kind in (RunKind.EXPORT, RunKind.CHAT) else None
    run_id = make_run(settings, engine, kind=kind, step=3, parent_id=parent_id)
    with write_transaction(engine) as session:
        for state, wanted, request in itertools.product(RunState, Wanted, ASKED):
            before = columns(put(session, run_id, state=state, wanted=wanted, kill_attempt=None, finished_at=None))
            taken = asked(session, owner, run_id, request)
            assert taken is (effect_of(request, state, wanted, kind) is not None), (state, wanted, request)
            after = put(session, run_id)
            assert (after.state, after.wanted) == after_request(state, wanted, request, kind), (state, wanted, request)
            if not taken:
                assert columns(after) == before


@pytest.mark.database
def test_a_second_click_changes_nothing_more(settings: Settings, engine: Engine, owner: Person) -> None:
    run_id = make_run(settings, engine, step=3)
    with write_transaction(engine) as session:
        for state, wanted, request in itertools.product(RunState, Wanted, ASKED):
            put(session, run_id, state=state, wanted=wanted)
            if not asked(session, owner, run_id, request):
                continue
            first = columns(put(session, run_id))
            asked(session, owner, run_id, request)
            assert columns(put(session, run_id)) == first, (state, wanted, request)


@pytest.mark.database
@pytest.mark.parametrize("state", sorted(TERMINAL_STATES))
def test_a_late_event_changes_nothing_of_an_ended_run(settings: Settings, engine: Engine, state: RunState) -> None:
    run_id = make_run(settings, engine, state=state, epoch=4, step=3, loss=0.5, phase="training")
    before = columns(read_run(engine, run_id))
    late = [
        Event(2, number, 1_800_000_000.0, str(kind), {"step": 9, "phase": "exporting", "loss": 9.0, "reason": "failed", "when": "after"})
        for number, kind in enumerate(EventType, 1)
    ]
    for event in late:
        with pytest.raises(LostEpochError), write_transaction(engine) as session:
            repository.record_events(session, run_id, epoch=4, events=[event], offset_bytes=999, malformed=9)
    with write_transaction(engine) as session:
        for trigger, epoch in itertools.product(Trigger, (None, 3, 4)):
            assert repository.fire(session, run_id, trigger, epoch=epoch) is None
        for other in RunState:
            repository.explain(session, run_id, state=other, reason="late" if other is not state else "")
    assert columns(read_run(engine, run_id)) == before


@pytest.mark.database
def test_a_trigger_that_counts_in_one_state_counts_in_no_other(settings: Settings, engine: Engine) -> None:
    run_id = make_run(settings, engine)
    with write_transaction(engine) as session:
        for (state, trigger), target in TRANSITIONS.items():
            for other in RunState:
                put(session, run_id, state=state)
                assert repository.fire(session, run_id, trigger, only_from=other) is (target if other is state else None)
