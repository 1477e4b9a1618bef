"""The reconciler: reservations, the queue's reasons, lost supervisors and lost messages; called tick by tick."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from fixtures.appliance import environment_of
from fixtures.broker import Queues
from fixtures.processes import no_process_left
from fixtures.runs import make_run, read_run
from fixtures.scripted_supervisor import SUPERVISOR_COMMAND
from fixtures.waiting import wait_until
from sqlalchemy import Engine

from lohan.planning.fit import RAM_RESERVE_BYTES
from lohan.units import GIB
from lohan_app.db import write_transaction
from lohan_app.entities import BaseModel, Dataset, DatasetState, Run, RunState, Wanted
from lohan_app.entities.base import now
from lohan_app.runs import repository
from lohan_app.runs.states import Trigger
from lohan_app.settings import Settings
from lohan_app.worker.celery import task_lock
from lohan_app.worker.launcher import RunFiles
from lohan_app.worker.processes import holding, is_held
from lohan_app.worker.reconciler import Reconciler
from lohan_app.worker.reservations import Machine, Need, Reservation, fit, look_at_machine, need_of
from lohan_app.worker.run_files import state_directories
from lohan_app.worker.verdict import RESUME, START_AGAIN

FREE = {"ram_total_bytes": 64 * GIB, "ram_free_bytes": 60 * GIB, "ssd_free_bytes": 100 * GIB, "data_free_bytes": 100 * GIB}
MACHINE = Machine(("cpu:0", "cpu:1"), **FREE)
GPUS = Machine(("GPU-a", "GPU-b"), **FREE)
START_NOTHING = ("/bin/true",)


@pytest.fixture
def make(settings: Settings, engine: Engine) -> Iterator[Callable[..., Reconciler]]:
    made: list[Reconciler] = []

    def reconciler(machine: Machine = MACHINE, supervisor_command: tuple[str, ...] = START_NOTHING) -> Reconciler:
        made.append(Reconciler(settings, engine, supervisor_command=supervisor_command, look=lambda _: machine))
        return made[-1]

    yield reconciler
    for each in made:
        each.close()


def plan(ram_bytes: int = 0, ssd_bytes: int = 0) -> dict[str, Any]:
    tiers = [{"tier": name, "items": [{"bytes": size}]} for name, size in (("gpu", 0), ("ram", ram_bytes), ("ssd", ssd_bytes))]
    return {"device": "cpu", "tiers": tiers}


def active(**columns: Any) -> Run:
    return Run(**({"name": "other", "devices": ["cpu:0"], "reserved_ram_bytes": 0, "reserved_ssd_bytes": 0, "step": 0} | columns))


# ---------------------------------------------------------------- reservations
@pytest.mark.parametrize(
    ("asked", "machine", "given"),
    [
        ("auto", MACHINE, "cpu:0"),
        ("cpu", MACHINE, "cpu:0"),
        ("cpu:1", MACHINE, "cpu:1"),
        ("auto", GPUS, "GPU-a"),
        ("cuda", GPUS, "GPU-a"),
        ("cuda:1", GPUS, "GPU-b"),
        ("GPU-b", GPUS, "GPU-b"),
    ],
)
def test_a_run_gets_the_device_it_asks_for(asked: str, machine: Machine, given: str) -> None:
    answer = fit(Need(asked, 5, 6), machine, [])
    assert answer == Reservation([given], 5, 6)


@pytest.mark.parametrize(("asked", "machine"), [("cuda", MACHINE), ("cpu", GPUS), ("cuda:2", GPUS), ("GPU-x", GPUS), ("cpu:7", MACHINE)])
def test_a_device_that_runs_may_not_use_is_named(asked: str, machine: Machine) -> None:
    answer = fit(Need(asked, 0, 0), machine, [])
    assert isinstance(answer, str)
    assert repr(asked) in answer
    assert "LOHAN_DEVICES" in answer


def test_a_taken_device_leaves_the_next_one_and_then_none() -> None:
    first, second = active(name="first"), active(name="second", devices=["cpu:1"])
    assert fit(Need("auto", 0, 0), MACHINE, [first]) == Reservation(["cpu:1"], 0, 0)
    answer = fit(Need("auto", 0, 0), MACHINE, [first, second])
    assert answer == "Waits for cpu:0 or cpu:1, in use by 'first', 'second'."


def test_host_memory_has_to_fit_beside_what_others_were_promised_and_what_is_free_now() -> None:
    other = active(reserved_ram_bytes=40 * GIB)
    room = 64 * GIB - 40 * GIB - RAM_RESERVE_BYTES
    assert isinstance(fit(Need("auto", room, 0), MACHINE, [other]), Reservation)
    assert "host memory" in str(fit(Need("auto", room + 1, 0), MACHINE, [other]))
    crowded = replace(MACHINE, ram_free_bytes=10 * GIB)
    assert "host memory" in str(fit(Need("auto", 10 * GIB, 0), crowded, []))


def test_a_run_that_may_keep_states_on_the_drives_takes_what_host_memory_there_is():
    """Rather than to wait for more: states in RAM are copies, which save reads."""
    crowded = replace(MACHINE, ram_free_bytes=10 * GIB + RAM_RESERVE_BYTES)
    assert fit(Need("auto", 12 * GIB, 0, spare_ram_bytes=4 * GIB), crowded, []) == Reservation(["cpu:0"], 10 * GIB, 0)
    assert fit(Need("auto", 9 * GIB, 0, spare_ram_bytes=4 * GIB), crowded, []) == Reservation(["cpu:0"], 9 * GIB, 0)
    assert "needs 11.00 GiB, free 10.00 GiB" in str(fit(Need("auto", 15 * GIB, 0, spare_ram_bytes=4 * GIB), crowded, []))


@pytest.mark.parametrize(
    ("durability", "asked", "spare"),
    [("step", "auto", 2), ("snapshot", None, 2), ("none", "auto", 0), ("step", 2 * GIB, 0), ("step", 0, 0)],
)
def test_only_copies_that_the_plan_chose_can_be_spared(settings, engine, durability, asked, spare):
    items = [{"name": "model states", "bytes": 2 * GIB, "formula": ""}, {"name": "process base", "bytes": GIB, "formula": ""}]
    plan = {"durability": durability, "tiers": [{"tier": "ram", "capacity_bytes": 9 * GIB, "items": items}]}
    run = read_run(engine, make_run(settings, engine, plan=plan))
    run.settings = {"engine": {} if asked is None else {"ram_state_bytes": asked}}
    assert need_of(run) == Need("auto", 3 * GIB, 0, spare_ram_bytes=spare * GIB)


def test_space_that_another_run_is_about_to_fill_is_not_given_twice() -> None:
    other = active(reserved_ssd_bytes=60 * GIB)
    assert "state directories" in str(fit(Need("auto", 0, 41 * GIB), MACHINE, [other]))
    assert isinstance(fit(Need("auto", 0, 40 * GIB), MACHINE, [other]), Reservation)
    # After its first step its states are on the disk, and so no longer free.
    assert isinstance(fit(Need("auto", 0, 41 * GIB), MACHINE, [active(reserved_ssd_bytes=60 * GIB, step=1)]), Reservation)


@pytest.mark.database
def test_the_need_comes_from_the_plan(settings: Settings, engine: Engine) -> None:
    run = read_run(engine, make_run(settings, engine, plan=plan(3 * GIB, 5 * GIB), device="cpu:1"))
    assert need_of(run) == Need("cpu:1", 3 * GIB, 5 * GIB)
    assert need_of(read_run(engine, make_run(settings, engine))) == Need("auto", 0, 0)
    # What its earlier attempts left is taken already.
    assert need_of(run, states_bytes=2 * GIB) == Need("cpu:1", 3 * GIB, 3 * GIB)
    assert need_of(run, states_bytes=9 * GIB) == Need("cpu:1", 3 * GIB, 0)


@pytest.mark.broker
@pytest.mark.database
def test_a_run_that_fills_the_drive_with_its_own_states_starts_again(
    settings: Settings, engine: Engine, make: Callable[..., Reconciler], queues: Queues
) -> None:
    run_id = make_run(settings, engine, plan=plan(0, MACHINE.ssd_free_bytes + (1 << 20)), device="cpu:0")
    reconciler = make()
    reconciler.tick()
    assert "state directories" in read_run(engine, run_id).state_reason
    states = state_directories(settings, run_id)[0]
    states.mkdir(parents=True)
    (states / "master.bin").write_bytes(bytes(2 << 20))
    reconciler.tick()
    assert read_run(engine, run_id).state is RunState.STARTING


def test_this_machine(settings: Settings) -> None:
    machine = look_at_machine(settings)
    assert machine.devices == settings.devices
    assert machine.ram_total_bytes >= machine.ram_free_bytes > 0
    assert machine.ssd_free_bytes > 0


# ---------------------------------------------------------------- queue
@pytest.mark.broker
@pytest.mark.database
def test_the_oldest_run_that_fits_is_claimed_and_launched(
    settings: Settings, engine: Engine, make: Callable[..., Reconciler], queues: Queues
) -> None:
    first = make_run(settings, engine, plan=plan(70 * GIB), name="too large")
    second = make_run(settings, engine, plan=plan(2 * GIB, 3 * GIB))
    make().tick()
    run = read_run(engine, second)
    assert (run.state, run.devices, run.reserved_ram_bytes, run.reserved_ssd_bytes) == (RunState.STARTING, ["cpu:0"], 2 * GIB, 3 * GIB)
    assert queues.take() == [("runs.launch", second)]
    waiting = read_run(engine, first)
    assert waiting.state is RunState.QUEUED
    assert waiting.state_reason.startswith("Waits for host memory: needs 70.00 GiB")


@pytest.mark.broker
@pytest.mark.database
def test_two_runs_on_one_device_never_start_together(
    settings: Settings, engine: Engine, make: Callable[..., Reconciler], queues: Queues
) -> None:
    runs = [make_run(settings, engine, device="cpu:1", name=f"run {number}") for number in range(3)]
    reconciler = make()
    for _ in range(3):
        reconciler.tick()
    assert [read_run(engine, run_id).state for run_id in runs] == [RunState.STARTING, RunState.QUEUED, RunState.QUEUED]
    assert read_run(engine, runs[1]).state_reason == "Waits for cpu:1, in use by 'run 0'."
    with write_transaction(engine) as session:
        repository.fire(session, runs[0], Trigger.FAIL)
    reconciler.tick()
    assert read_run(engine, runs[1]).state is RunState.STARTING


@pytest.mark.broker
@pytest.mark.database
def test_an_unprepared_run_waits(settings: Settings, engine: Engine, make: Callable[..., Reconciler], queues: Queues) -> None:
    run_id = make_run(settings, engine, prepared_at=None)
    make().tick()
    run = read_run(engine, run_id)
    assert (run.state, run.state_reason) == (RunState.QUEUED, "Its rows are being prepared.")
    assert queues.take() == []


@pytest.mark.broker
@pytest.mark.database
def test_a_run_whose_folder_somebody_trains_in_waits(
    settings: Settings, engine: Engine, make: Callable[..., Reconciler], queues: Queues
) -> None:
    run_id = make_run(settings, engine)
    reconciler = make()
    with holding(RunFiles(settings.run_folder(run_id)).trainer_lock):
        reconciler.tick()
        run = read_run(engine, run_id)
        assert run.state is RunState.QUEUED
        assert "trains in this run's folder" in run.state_reason
    reconciler.tick()
    assert read_run(engine, run_id).state is RunState.STARTING


@pytest.mark.broker
@pytest.mark.database
@pytest.mark.parametrize("state", [RunState.QUEUED, RunState.PAUSED, RunState.DRAFT])
def test_waiting_runs_are_cancelled_here(
    settings: Settings, engine: Engine, make: Callable[..., Reconciler], queues: Queues, state: RunState
) -> None:
    run_id = make_run(settings, engine, state=state, wanted=Wanted.CANCEL)
    left = settings.state_folders[0] / run_id
    left.mkdir()
    make().tick()
    run = read_run(engine, run_id)
    assert run.state is RunState.CANCELLED
    assert run.finished_at is not None
    assert not left.exists()


@pytest.mark.broker
@pytest.mark.database
def test_only_one_reconciler_acts(settings: Settings, engine: Engine, make: Callable[..., Reconciler], queues: Queues) -> None:
    first, second = make(), make()
    first.tick()
    run_id = make_run(settings, engine)
    second.tick()
    assert read_run(engine, run_id).state is RunState.QUEUED
    first.close()
    second.tick()
    assert read_run(engine, run_id).state is RunState.STARTING


# ---------------------------------------------------------------- supervisors
@pytest.mark.broker
@pytest.mark.database
def test_a_lost_supervisor_is_sent_for_once_and_then_started_directly(
    settings: Settings, engine: Engine, make: Callable[..., Reconciler], queues: Queues, tmp_path: Path
) -> None:
    with no_process_left(tmp_path):
        run_id = make_run(settings, engine, state=RunState.RUNNING)
        files = RunFiles(settings.run_folder(run_id))
        mark = tmp_path / "started"
        reconciler = make(supervisor_command=("/bin/sh", "-c", f'echo "$0" >> {mark}'))
        with holding(files.supervisor_lock):
            reconciler.tick()
        assert queues.take() == []
        reconciler.tick()
        reconciler.tick()
        assert queues.take() == [("runs.launch", run_id)], "patience: the message needs a moment"
        assert not mark.exists()
        reconciler._launches[run_id].next_at = 0.0
        reconciler.tick()
        assert queues.take() == []
        wait_until(mark.exists, what="the direct start")
        assert mark.read_text().split() == [run_id]


@pytest.mark.broker
@pytest.mark.database
def test_a_supervisor_that_never_stays_up_is_said_on_the_run(
    settings: Settings, engine: Engine, make: Callable[..., Reconciler], queues: Queues
) -> None:
    run_id = make_run(settings, engine, state=RunState.STARTING)
    reconciler = make(supervisor_command=("/bin/false",))
    for _ in range(4):
        assert read_run(engine, run_id).state_reason == ""
        reconciler.tick()
        reconciler._launches[run_id].next_at = 0.0
    run = read_run(engine, run_id)
    assert run.state is RunState.STARTING
    assert str(RunFiles(settings.run_folder(run_id)).supervisor_log) in run.state_reason


@pytest.mark.database
def test_without_a_broker_runs_start_all_the_same(
    settings: Settings, engine: Engine, make: Callable[..., Reconciler], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing listens on the broker's socket: the message is refused at once, and the supervisor is started directly."""
    for name, value in environment_of(settings).items():
        monkeypatch.setenv(name, value)
    with no_process_left(tmp_path):
        run_id = make_run(settings, engine, steps=2)
        reconciler = make(supervisor_command=SUPERVISOR_COMMAND)
        reconciler.tick()
        wait_until(lambda: read_run(engine, run_id).state is RunState.SUCCEEDED, what="success")
        wait_until(lambda: not is_held(RunFiles(settings.run_folder(run_id)).supervisor_lock), what="the supervisor's end")


@pytest.mark.broker
@pytest.mark.database
@pytest.mark.parametrize("goes_on", [START_AGAIN, RESUME])
def test_why_the_last_attempt_ended_stays_readable_while_the_next_one_runs(
    settings: Settings, engine: Engine, make: Callable[..., Reconciler], queues: Queues, goes_on: str
) -> None:
    reason = f"The trainer was ended by SIGKILL (attempt 1 of 3). {goes_on}"
    again = make_run(settings, engine, attempt=1, state_reason=reason, device="cpu:0")
    fresh = make_run(settings, engine, state_reason="Waits for cpu:1, in use by 'other'.", device="cpu:1")
    make().tick()
    assert read_run(engine, again).state_reason == reason
    assert read_run(engine, fresh).state_reason == ""


# ---------------------------------------------------------------- tasks
@pytest.mark.broker
@pytest.mark.database
def test_undone_tasks_are_sent_again(settings: Settings, engine: Engine, make: Callable[..., Reconciler], queues: Queues) -> None:
    young = make_run(settings, engine, prepared_at=None)
    old = make_run(settings, engine, prepared_at=None, created_at=now() - timedelta(minutes=2))
    with write_transaction(engine) as session:
        dataset = session.get(Dataset, read_run(engine, young).dataset_id)
        model = session.get(BaseModel, read_run(engine, young).base_model_id)
        assert dataset is not None
        assert model is not None
        dataset.state, dataset.created_at = DatasetState.VALIDATING, now() - timedelta(minutes=2)
        model.state, model.created_at = "inspecting", now() - timedelta(minutes=2)
    reconciler = make()
    with holding(task_lock(settings, "runs.prepare", old)):
        reconciler.tick()
    assert sorted(queues.take()) == [("base_models.inspect", model.id), ("datasets.validate", dataset.id)], "a task at work is left alone"
    reconciler.tick()
    assert queues.take() == [("runs.prepare", old)]
    reconciler.tick()
    assert queues.take() == [], "and not every two seconds"
