"""The reconciler: claims, the queue's reasons, lost supervisors and lost messages; called tick by tick."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from fixtures.appliance import environment_of
from fixtures.broker import Queues
from fixtures.processes import no_process_left
from fixtures.runs import make_run, read_run
from fixtures.scripted_supervisor import SUPERVISOR_COMMAND
from fixtures.simulated_machine import simulated_machine
from fixtures.waiting import wait_until
from sqlalchemy import Engine

from lohan.units import GIB
from lohan_app.db import write_transaction
from lohan_app.entities import BaseModel, Dataset, DatasetState, RunState, Wanted
from lohan_app.entities.base import now
from lohan_app.runs import repository
from lohan_app.runs.states import Trigger
from lohan_app.settings import Settings
from lohan_app.worker.celery import task_lock
from lohan_app.worker.launcher import RunFiles
from lohan_app.worker.processes import holding, is_held
from lohan_app.worker.reconciler import Reconciler
from lohan_app.worker.run_files import state_directories
from lohan_app.worker.verdict import RESUME, START_AGAIN

START_NOTHING = ("/bin/true",)


@pytest.fixture
def make(settings: Settings, engine: Engine) -> Iterator[Callable[..., Reconciler]]:
    made: list[Reconciler] = []

    def reconciler(supervisor_command: tuple[str, ...] = START_NOTHING) -> Reconciler:
        made.append(Reconciler(settings, engine, supervisor_command=supervisor_command, look=simulated_machine))
        return made[-1]

    yield reconciler
    for each in made:
        each.close()


def plan(ram_bytes: int = 0, ssd_bytes: int = 0) -> dict[str, Any]:
    tiers = [{"tier": name, "items": [{"bytes": size}]} for name, size in (("gpu", 0), ("ram", ram_bytes), ("ssd", ssd_bytes))]
    return {"device": "cpu", "tiers": tiers}


# ---------------------------------------------------------------- queue
@pytest.mark.broker
@pytest.mark.database
def test_a_run_that_fills_the_drive_with_its_own_states_starts_again(
    settings: Settings, engine: Engine, make: Callable[..., Reconciler], queues: Queues
) -> None:
    run_id = make_run(settings, engine, plan=plan(0, 100 * GIB + (1 << 20)), device="cpu:0")
    reconciler = make()
    reconciler.tick()
    assert "state directories" in read_run(engine, run_id).state_reason
    states = state_directories(settings, run_id)[0]
    states.mkdir(parents=True)
    (states / "master.bin").write_bytes(bytes(2 << 20))
    reconciler.tick()
    assert read_run(engine, run_id).state is RunState.STARTING


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
    assert run.reserved_directories == {str(settings.state_folders[0]): 3 * GIB}
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
