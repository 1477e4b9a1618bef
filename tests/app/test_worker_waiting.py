"""What the reconciler does for runs that nobody works on: wishes, full drives, pauses for breath, retries, and what deletions leave."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from fixtures.broker import Queues
from fixtures.runs import make_run, read_run, set_run, want
from fixtures.simulated_machine import simulated_machine
from sqlalchemy import Engine

from lohan.units import GIB, MIB
from lohan_app.db import write_transaction
from lohan_app.entities import PauseCause, RunState, Wanted
from lohan_app.entities.base import now
from lohan_app.runs import repository
from lohan_app.runs.states import Trigger
from lohan_app.settings import Settings
from lohan_app.worker.reconciler import Reconciler
from lohan_app.worker.reservations import Machine
from lohan_app.worker.run_files import state_directories
from lohan_app.worker.waiting import HEADROOM_BYTES, LONGEST_WAIT

PLAN = {"device": "cpu", "parameters": GIB, "precision": "bf16", "tiers": [{"tier": "ssd", "items": [{"bytes": 20 * GIB}]}]}


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """With two drives for states."""
    return settings.model_copy(update={"state_dirs": (settings.data_dir / "drive-0", settings.data_dir / "drive-1")})


@pytest.fixture
def machine(settings: Settings) -> dict[str, Machine]:
    """What the machine looks like; a test changes it."""
    return {"now": simulated_machine(settings)}


@pytest.fixture
def tick(settings: Settings, engine: Engine, machine: dict[str, Machine], queues: Queues) -> Iterator[Callable[[], None]]:
    reconciler = Reconciler(settings, engine, supervisor_command=("/bin/true",), look=lambda _: machine["now"])
    yield reconciler.tick
    reconciler.close()


def paused_by_full_drive(settings: Settings, engine: Engine, **columns: Any) -> str:
    values = {"pause_cause": PauseCause.DISK_FULL, "state_reason": "The drive is full (/states).", "plan": PLAN, "device": "cpu:0"}
    return make_run(settings, engine, state=RunState.PAUSED, **(values | columns))


# ---------------------------------------------------------------- wishes
@pytest.mark.broker
@pytest.mark.database
@pytest.mark.parametrize(
    ("state", "wanted", "cause", "expected"),
    [
        (RunState.QUEUED, Wanted.PAUSE, None, RunState.PAUSED),
        (RunState.QUEUED, Wanted.CANCEL, None, RunState.CANCELLED),
        (RunState.DRAFT, Wanted.CANCEL, None, RunState.CANCELLED),
        (RunState.PAUSED, Wanted.CANCEL, PauseCause.DISK_FULL, RunState.CANCELLED),
        (RunState.PAUSED, Wanted.PAUSE, PauseCause.REQUEST, RunState.PAUSED),
        (RunState.PAUSED, Wanted.PAUSE, PauseCause.DISK_FULL, RunState.PAUSED),
        # Taken back while its trainer was pausing; stopped while it was pausing.
        (RunState.PAUSED, Wanted.RUN, PauseCause.REQUEST, RunState.STARTING),
        (RunState.PAUSED, Wanted.STOP, PauseCause.REQUEST, RunState.STARTING),
        (RunState.QUEUED, Wanted.STOP, None, RunState.STARTING),
        (RunState.DRAFT, Wanted.RUN, None, RunState.DRAFT),
    ],
)
def test_what_is_wanted_of_a_waiting_run_happens(
    settings: Settings,
    engine: Engine,
    tick: Callable[[], None],
    state: RunState,
    wanted: Wanted,
    cause: PauseCause | None,
    expected: RunState,
) -> None:
    run_id = make_run(settings, engine, state=state, wanted=wanted, pause_cause=cause)
    tick()
    run = read_run(engine, run_id)
    assert (run.state, run.wanted) == (expected, wanted)


@pytest.mark.database
def test_a_wish_that_has_changed_since_it_was_read_is_not_carried_out(settings: Settings, engine: Engine) -> None:
    run_id = make_run(settings, engine, wanted=Wanted.PAUSE)
    read = read_run(engine, run_id)
    want(engine, run_id, Wanted.RUN)
    with write_transaction(engine) as session:
        assert repository.heed(session, read, Trigger.REQUEST_PAUSE) is None
    assert read_run(engine, run_id).state is RunState.QUEUED


@pytest.mark.broker
@pytest.mark.database
def test_the_queue_goes_on_after_a_failed_run(settings: Settings, engine: Engine, tick: Callable[[], None]) -> None:
    first, second = (make_run(settings, engine, device="cpu:0") for _ in range(2))
    tick()
    assert [read_run(engine, run_id).state for run_id in (first, second)] == [RunState.STARTING, RunState.QUEUED]
    with write_transaction(engine) as session:
        repository.fire(session, first, Trigger.FAIL, problem={"message": "why"})
    tick()
    assert [read_run(engine, run_id).state for run_id in (first, second)] == [RunState.FAILED, RunState.STARTING]


# ---------------------------------------------------------------- full drives
@pytest.mark.broker
@pytest.mark.database
@pytest.mark.parametrize(
    ("shortage", "words"),
    [
        ({"data_free_bytes": 2 * GIB + HEADROOM_BYTES - 1}, "it needs 2.50 GiB in the data folder, free 2.50 GiB"),
        ({"ssd_free_bytes": 20 * GIB}, "it needs 10.50 GiB in {drive}, free 10.00 GiB"),
    ],
)
def test_a_run_that_a_full_drive_has_paused_goes_on_when_space_returns(
    settings: Settings, engine: Engine, tick: Callable[[], None], machine: dict[str, Machine], shortage: dict[str, int], words: str
) -> None:
    run_id = paused_by_full_drive(settings, engine)
    machine["now"] = simulated_machine(settings, **shortage)
    told = words.format(drive=settings.state_folders[0])
    for _ in range(2):
        tick()
        run = read_run(engine, run_id)
        assert (run.state, run.pause_cause) == (RunState.PAUSED, PauseCause.DISK_FULL)
        assert run.state_reason == f"The drive is full (/states). It goes on by itself when there is room: {told}."
    machine["now"] = simulated_machine(settings)
    tick()
    run = read_run(engine, run_id)
    assert (run.state, run.pause_cause, run.devices) == (RunState.STARTING, None, ["cpu:0"])


@pytest.mark.broker
@pytest.mark.database
def test_space_that_other_runs_were_promised_is_not_room(
    settings: Settings, engine: Engine, tick: Callable[[], None], machine: dict[str, Machine]
) -> None:
    run_id = paused_by_full_drive(settings, engine)
    promised = {str(folder): 85 * GIB // 2 for folder in settings.state_folders}
    other = make_run(settings, engine, state=RunState.STARTING, devices=["cpu:1"], reserved_directories=promised)
    tick()
    assert read_run(engine, run_id).state is RunState.PAUSED
    set_run(engine, other, step=1, phase="training")  # its states are on the drive now, and no longer free
    tick()
    assert read_run(engine, run_id).state is RunState.STARTING


@pytest.mark.broker
@pytest.mark.database
def test_its_own_states_are_counted_once(settings: Settings, engine: Engine, tick: Callable[[], None], machine: dict[str, Machine]) -> None:
    run_id = paused_by_full_drive(settings, engine, plan=PLAN | {"tiers": [{"tier": "ssd", "items": [{"bytes": 2 * MIB}]}]})
    machine["now"] = simulated_machine(settings, ssd_free_bytes=2 * HEADROOM_BYTES)
    tick()
    assert read_run(engine, run_id).state is RunState.PAUSED
    for states in state_directories(settings, run_id):
        assert read_run(engine, run_id).state is RunState.PAUSED
        states.mkdir(parents=True)
        (states / "master.bin").write_bytes(bytes(MIB))
        tick()
    assert read_run(engine, run_id).state is RunState.STARTING


@pytest.mark.broker
@pytest.mark.database
def test_a_quota_is_not_tried_again_at_once_and_a_person_may_keep_it_paused(
    settings: Settings, engine: Engine, tick: Callable[[], None]
) -> None:
    waiting = paused_by_full_drive(settings, engine, start_after=now() + timedelta(minutes=1))
    kept = paused_by_full_drive(settings, engine, wanted=Wanted.PAUSE)
    tick()
    assert [read_run(engine, run_id).state for run_id in (waiting, kept)] == [RunState.PAUSED, RunState.PAUSED]
    set_run(engine, waiting, start_after=now() - timedelta(seconds=1))
    tick()
    assert [read_run(engine, run_id).state for run_id in (waiting, kept)] == [RunState.STARTING, RunState.PAUSED]


# ---------------------------------------------------------------- pauses for breath
@pytest.mark.broker
@pytest.mark.database
def test_a_run_takes_breath_and_lets_others_pass(settings: Settings, engine: Engine, tick: Callable[[], None]) -> None:
    tired = make_run(settings, engine, device="cpu:0", start_after=now() + timedelta(minutes=1), state_reason="Killed (attempt 2 of 3).")
    other = make_run(settings, engine, device="cpu:0")
    tick()
    assert [read_run(engine, run_id).state for run_id in (tired, other)] == [RunState.QUEUED, RunState.STARTING]
    assert read_run(engine, tired).state_reason == "Killed (attempt 2 of 3)."


@pytest.mark.broker
@pytest.mark.database
@pytest.mark.parametrize("off", [-timedelta(seconds=1), LONGEST_WAIT + timedelta(days=1)])
def test_a_moment_that_has_passed_or_that_a_clock_set_back_has_moved_away_holds_nobody(
    settings: Settings, engine: Engine, tick: Callable[[], None], off: timedelta
) -> None:
    run_id = make_run(settings, engine, start_after=now() + off)
    tick()
    assert read_run(engine, run_id).state is RunState.STARTING


# ---------------------------------------------------------------- retries
def leave_states(settings: Settings, run_id: str, text: str) -> None:
    for folder in state_directories(settings, run_id):
        folder.mkdir(parents=True)
        (folder / "states.bin").write_text(text)


@pytest.mark.broker
@pytest.mark.database
def test_a_retry_begins_with_what_its_parent_has_recorded(settings: Settings, engine: Engine, tick: Callable[[], None]) -> None:
    parent = make_run(settings, engine, state=RunState.FAILED)
    leave_states(settings, parent, "recorded")
    # Cut off between the drives, and gone on with.
    child = make_run(settings, engine, parent_id=parent)
    first = state_directories(settings, parent)[0]
    first.rename(state_directories(settings, child)[0])
    for _ in range(2):
        tick()
        assert [(folder / "states.bin").read_text() for folder in state_directories(settings, child)] == ["recorded"] * 2
        assert not any(folder.exists() for folder in state_directories(settings, parent))
    assert read_run(engine, child).state is RunState.STARTING


@pytest.mark.broker
@pytest.mark.database
def test_a_run_that_has_begun_keeps_its_own_states(settings: Settings, engine: Engine, tick: Callable[[], None]) -> None:
    parent = make_run(settings, engine, state=RunState.FAILED)
    child = make_run(settings, engine, parent_id=parent, attempt=1)
    leave_states(settings, parent, "of the parent")
    leave_states(settings, child, "its own")
    tick()
    assert [(folder / "states.bin").read_text() for folder in state_directories(settings, child)] == ["its own"] * 2
    assert all(folder.exists() for folder in state_directories(settings, parent))
