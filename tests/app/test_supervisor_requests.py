"""What a supervisor does when somebody wants its run paused, stopped with its result, or killed, when its trainer falls silent, and when
a drive is full; with the scripted trainer in processes of its own."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures.processes import commands_of, no_process_left
from fixtures.runs import kill_wanted, make_run, read_events, read_run, want
from fixtures.scripted_supervisor import SUPERVISOR_COMMAND, TRAINER_COMMAND
from fixtures.waiting import wait_until
from sqlalchemy import Engine

from lohan_app.db import write_transaction
from lohan_app.entities import PauseCause, Run, RunState, Wanted
from lohan_app.entities.base import now
from lohan_app.runs import repository
from lohan_app.runs.states import Trigger
from lohan_app.settings import Settings
from lohan_app.worker.launcher import RunFiles, TrainerNote
from lohan_app.worker.patience import Patience
from lohan_app.worker.supervisor import Supervisor
from lohan_app.worker.verdict import BACKOFF_SECONDS, DISK_FULL_SECONDS


@pytest.fixture(autouse=True)
def _clean(tmp_path: Path) -> Iterator[None]:
    with no_process_left(tmp_path):
        yield


def supervise(settings: Settings, run_id: str, patience: Patience | None = None) -> None:
    """One whole supervisor, in this process."""
    assert Supervisor(settings, run_id, trainer_command=TRAINER_COMMAND, patience=patience).run() == 0


def start(settings: Settings, run_id: str) -> subprocess.Popen[bytes]:
    """A supervisor in a process of its own."""
    extra = {"LOHAN_DATA_DIR": str(settings.data_dir), "LOHAN_MODEL_DIRS": str(settings.model_dirs[0]), "LOHAN_DEVICES": "cpu:0"}
    if settings.database_url is not None:
        extra["LOHAN_DATABASE_URL"] = settings.database_url.get_secret_value()
    with RunFiles(settings.run_folder(run_id)).supervisor_log.open("ab") as log:
        return subprocess.Popen([*SUPERVISOR_COMMAND, run_id], env=os.environ | extra, stdout=log, stderr=log, start_new_session=True)


def start_and_wait_for_step(settings: Settings, engine: Engine, run_id: str, step: int = 1) -> subprocess.Popen[bytes]:
    process = start(settings, run_id)
    wait_until(lambda: read_run(engine, run_id).step >= step, what=f"step {step}")
    return process


def claim_again(engine: Engine, run_id: str) -> None:
    """What the reconciler does with a run that waits."""
    with write_transaction(engine) as session:
        assert repository.fire(session, run_id, Trigger.CLAIM, devices=["cpu:0"]) is RunState.STARTING


def resume(engine: Engine, run_id: str, wanted: Wanted = Wanted.RUN) -> None:
    """What a request to resume or to stop does with a paused run, and the reconciler after it."""
    want(engine, run_id, wanted)
    with write_transaction(engine) as session:
        assert repository.fire(session, run_id, Trigger.RESUME) is RunState.QUEUED
    claim_again(engine, run_id)


def wait_for_end(process: subprocess.Popen[bytes]) -> None:
    assert process.wait(60) == 0


def last_reason(engine: Engine, run_id: str) -> str:
    return str(read_events(engine, run_id)[-1].fields["reason"])


# ---------------------------------------------------------------- pause
@pytest.mark.database
def test_a_run_pauses_after_its_step_and_goes_on_as_the_next_attempt(settings: Settings, engine: Engine) -> None:
    run_id = make_run(settings, engine, state=RunState.STARTING, steps=10, script={"hold_at_step": {"1": 4}}, reserved_ram_bytes=7)
    process = start_and_wait_for_step(settings, engine, run_id, 4)
    want(engine, run_id, Wanted.PAUSE)
    wait_for_end(process)
    run = read_run(engine, run_id)
    assert (run.state, run.pause_cause, run.attempt, run.step) == (RunState.PAUSED, PauseCause.REQUEST, 1, 4)
    assert (run.devices, run.reserved_ram_bytes, run.start_after) == ([], 0, None)
    assert run.state_reason.startswith("Paused by request.")
    assert last_reason(engine, run_id) == "paused"
    assert (settings.state_folders[0] / run_id).exists(), "what it goes on from stays"
    resume(engine, run_id)
    supervise(settings, run_id)
    run = read_run(engine, run_id)
    assert (run.state, run.attempt, run.pause_cause) == (RunState.SUCCEEDED, 2, None)


def test_a_run_that_has_not_started_is_paused_without_a_trainer(settings: Settings, engine: Engine) -> None:
    for state, attempt in ((RunState.STARTING, 0), (RunState.RUNNING, 1)):  # announced, but its supervisor died before the start
        run_id = make_run(settings, engine, state=state, attempt=attempt, wanted=Wanted.PAUSE)
        supervise(settings, run_id)
        assert read_run(engine, run_id).state is RunState.PAUSED
        assert not RunFiles(settings.run_folder(run_id)).trainer_note.exists()


def test_a_pause_reaches_an_adopted_trainer(settings: Settings, engine: Engine) -> None:
    run_id = make_run(settings, engine, state=RunState.STARTING, steps=10_000)
    first = start_and_wait_for_step(settings, engine, run_id)
    first.kill()
    first.wait()
    want(engine, run_id, Wanted.PAUSE)
    supervise(settings, run_id)
    assert read_run(engine, run_id).state is RunState.PAUSED


def test_a_cancellation_overtakes_a_pause(settings: Settings, engine: Engine) -> None:
    run_id = make_run(settings, engine, state=RunState.STARTING, steps=10_000, script={"ignore_signals": True})
    process = start_and_wait_for_step(settings, engine, run_id)
    want(engine, run_id, Wanted.PAUSE)
    wait_until(lambda: read_run(engine, run_id).state is RunState.PAUSING, what="the pause to be passed on")
    want(engine, run_id, Wanted.CANCEL)
    wait_until(lambda: read_run(engine, run_id).state is RunState.CANCELLING, what="the cancellation to be passed on")
    kill_wanted(engine, run_id)
    wait_for_end(process)
    run = read_run(engine, run_id)
    assert (run.state, run.problem) == (RunState.CANCELLED, None)
    assert (settings.state_folders[0] / run_id).exists(), "a retry goes on from them"


def test_a_trainer_that_dies_while_it_is_to_pause_leaves_a_paused_run(settings: Settings, engine: Engine) -> None:
    run_id = make_run(settings, engine, state=RunState.STARTING, steps=10_000, script={"ignore_signals": True})
    process = start_and_wait_for_step(settings, engine, run_id, 2)
    want(engine, run_id, Wanted.PAUSE)
    wait_until(lambda: read_run(engine, run_id).state is RunState.PAUSING, what="the pause to be passed on")
    note = TrainerNote.read(RunFiles(settings.run_folder(run_id)).trainer_note)
    assert note is not None
    os.kill(note.pid, signal.SIGKILL)
    wait_for_end(process)
    run = read_run(engine, run_id)
    assert run.state is RunState.PAUSED
    assert "SIGKILL" in run.state_reason


# ---------------------------------------------------------------- stop
def test_a_stopped_run_succeeds_with_the_step_it_came_to(settings: Settings, engine: Engine) -> None:
    run_id = make_run(settings, engine, state=RunState.STARTING, steps=10_000, script={"hold_at_step": 6})
    process = start_and_wait_for_step(settings, engine, run_id, 6)
    want(engine, run_id, Wanted.STOP)
    wait_for_end(process)
    run = read_run(engine, run_id)
    assert (run.state, run.stopped_step, run.step, run.last_loss) == (RunState.SUCCEEDED, 6, 6, 1.0)
    assert run.state_reason == "Stopped early at step 6: the result has the weights of that step."


def test_a_paused_run_that_is_stopped_is_told_before_it_starts(settings: Settings, engine: Engine) -> None:
    run_id = make_run(settings, engine, state=RunState.PAUSED, steps=10_000, attempt=1, step=5)
    resume(engine, run_id, Wanted.STOP)
    supervise(settings, run_id)
    run = read_run(engine, run_id)
    assert (run.state, run.attempt, run.stopped_step) == (RunState.SUCCEEDED, 2, 1), "the scripted trainer begins with step 1"


def test_a_run_that_is_done_before_a_stop_is_seen_was_not_stopped_early(settings: Settings, engine: Engine) -> None:
    run_id = make_run(settings, engine, state=RunState.STARTING, steps=1, wanted=Wanted.STOP)
    supervise(settings, run_id)
    run = read_run(engine, run_id)
    assert (run.state, run.stopped_step, run.state_reason) == (RunState.SUCCEEDED, None, "")


# ---------------------------------------------------------------- force
@pytest.mark.database
def test_a_trainer_that_does_not_react_is_killed_by_request(settings: Settings, engine: Engine) -> None:
    run_id = make_run(settings, engine, state=RunState.STARTING, steps=10_000, script={"ignore_signals": True})
    process = start_and_wait_for_step(settings, engine, run_id, 2)
    kill_wanted(engine, run_id)
    wait_for_end(process)
    run = read_run(engine, run_id)
    assert (run.state, run.pause_cause) == (RunState.PAUSED, PauseCause.REQUEST)
    assert run.state_reason.startswith("The trainer was killed by request")
    assert not commands_of(settings.data_dir, "scripted_trainer")


def test_a_kill_is_meant_for_one_attempt(settings: Settings, engine: Engine) -> None:
    run_id = make_run(settings, engine, state=RunState.STARTING, attempt=1, kill_attempt=1)
    supervise(settings, run_id)
    run = read_run(engine, run_id)
    assert (run.state, run.attempt) == (RunState.SUCCEEDED, 2)


# ---------------------------------------------------------------- silence
@pytest.mark.parametrize(
    ("silent_at_step", "patience"),
    [
        (0, Patience(start_silence_seconds=2.0, step_silence_seconds=3600)),
        (2, Patience(start_silence_seconds=3600, step_silence_seconds=2.0)),
    ],
)
def test_a_silent_trainer_is_killed_and_started_again(settings: Settings, engine: Engine, silent_at_step: int, patience: Patience) -> None:
    run_id = make_run(settings, engine, state=RunState.STARTING, script={"silent_at_step": {"1": silent_at_step}})
    supervise(settings, run_id, patience)
    run = read_run(engine, run_id)
    assert (run.state, run.attempt) == (RunState.QUEUED, 1)
    assert run.state_reason.startswith("The trainer showed no sign of life for 2 s and was killed (attempt 1 of 3).")
    claim_again(engine, run_id)
    supervise(settings, run_id)
    assert read_run(engine, run_id).state is RunState.SUCCEEDED


def test_a_stopped_process_is_silent(settings: Settings, engine: Engine) -> None:
    """SIGSTOP: it is alive, holds its lock, and cannot even be told to end."""
    run_id = make_run(settings, engine, state=RunState.STARTING, script={"hold_at_step": 1}, attempt=2)
    first = start_and_wait_for_step(settings, engine, run_id, 1)
    first.kill()
    first.wait()
    note = TrainerNote.read(RunFiles(settings.run_folder(run_id)).trainer_note)
    assert note is not None
    os.kill(note.pid, signal.SIGSTOP)
    supervise(settings, run_id, Patience(start_silence_seconds=3600, step_silence_seconds=0.5))
    run = read_run(engine, run_id)
    assert (run.state, run.attempt) == (RunState.FAILED, 3)
    assert run.problem is not None
    assert run.problem["cause"] == "hung"
    assert "in the last of 3 attempts" in run.problem["message"]


# ---------------------------------------------------------------- full drives and pauses for breath
@pytest.mark.parametrize("script", [{"full_at_step": 2}, {"full_and_mute_at_step": 2}])
def test_a_full_drive_pauses_the_run_and_costs_it_no_life(settings: Settings, engine: Engine, script: dict[str, int]) -> None:
    run_id = make_run(settings, engine, state=RunState.STARTING, script=script, reserved_ssd_bytes=9)
    for attempt in range(1, 5):  # more than a run has lives
        before = now()
        supervise(settings, run_id)
        run = read_run(engine, run_id)
        assert (run.state, run.pause_cause, run.attempt, run.problem) == (RunState.PAUSED, PauseCause.DISK_FULL, attempt, None)
        assert (run.wanted, run.devices, run.reserved_ssd_bytes) == (Wanted.RUN, [], 0)
        assert run.state_reason.startswith("The drive is full (")
        assert run.start_after is not None
        assert (run.start_after - before).total_seconds() >= DISK_FULL_SECONDS
        resume(engine, run_id)
    assert read_run(engine, run_id).state is RunState.STARTING


def test_a_full_drive_does_not_stand_in_the_way_of_a_cancellation(settings: Settings, engine: Engine) -> None:
    run_id = make_run(settings, engine, state=RunState.STARTING, steps=10_000, script={"hold_at_step": 2, "full_at_step": 2})
    process = start_and_wait_for_step(settings, engine, run_id, 2)
    want(engine, run_id, Wanted.CANCEL)  # which ends the wait at step 2, where the drive is full
    wait_for_end(process)
    run = read_run(engine, run_id)
    assert (run.state, run.pause_cause, run.start_after) == (RunState.CANCELLED, None, None)


def test_an_attempt_that_came_no_further_is_followed_by_a_longer_and_longer_pause(settings: Settings, engine: Engine) -> None:
    run_id = make_run(settings, engine, state=RunState.STARTING, script={"kill_self_at_step": 1})
    for attempt, pause_seconds in enumerate(BACKOFF_SECONDS, 1):
        before = now()
        supervise(settings, run_id)
        run = read_run(engine, run_id)
        assert (run.state, run.attempt) == (RunState.QUEUED, attempt)
        assert run.start_after is not None
        assert pause_seconds <= (run.start_after - before).total_seconds() <= pause_seconds + 60
        claim_again(engine, run_id)
        assert read_run(engine, run_id).start_after is None
    supervise(settings, run_id)
    run = read_run(engine, run_id)
    assert run.state is RunState.FAILED
    assert run.problem is not None
    assert run.problem["cause"] == "killed"


def test_a_failed_run_keeps_what_a_retry_goes_on_from(settings: Settings, engine: Engine) -> None:
    kept = make_run(settings, engine, state=RunState.STARTING, script={"fail_at_step": 2})
    none = make_run(settings, engine, state=RunState.STARTING, script={"fail_at_step": 2})
    with write_transaction(engine) as session:
        run = session.get(Run, none)
        assert run is not None
        run.settings = {"training": {"max_steps": 3}, "engine": {"durability": "none"}}
    for run_id in (kept, none):
        supervise(settings, run_id)
        assert read_run(engine, run_id).state is RunState.FAILED
    assert [(settings.state_folders[0] / run_id).exists() for run_id in (kept, none)] == [True, False]
