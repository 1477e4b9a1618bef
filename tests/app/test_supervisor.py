"""The supervisor with a scripted trainer: how runs begin, are watched, cancelled and judged."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures.processes import commands_of, no_process_left
from fixtures.relay import Relay
from fixtures.runs import make_run, read_events, read_metrics, read_run, want
from fixtures.scripted_supervisor import SUPERVISOR_COMMAND, TRAINER_COMMAND
from fixtures.waiting import wait_until
from pydantic import SecretStr
from sqlalchemy import Engine
from sqlalchemy.engine import make_url

from lohan.config import load_run_config
from lohan_app.db import write_transaction
from lohan_app.entities import RunState, Wanted
from lohan_app.runs import repository
from lohan_app.runs.states import Trigger
from lohan_app.settings import Settings
from lohan_app.worker.launcher import RunFiles, TrainerNote
from lohan_app.worker.patience import Patience
from lohan_app.worker.processes import holding
from lohan_app.worker.supervisor import Supervisor
from lohan_app.worker.verdict import RESUME, RESUME_OR_START_AGAIN, START_AGAIN


@pytest.fixture(autouse=True)
def _clean(tmp_path: Path) -> Iterator[None]:
    with no_process_left(tmp_path):
        yield


def supervise(settings: Settings, run_id: str, *, patience: Patience | None = None) -> None:
    """One whole supervisor, in this process."""
    supervisor = Supervisor(settings, run_id, trainer_command=TRAINER_COMMAND, patience=patience)
    assert supervisor.run() == 0


def environment(settings: Settings) -> dict[str, str]:
    extra = {"LOHAN_DATA_DIR": str(settings.data_dir), "LOHAN_MODEL_DIRS": str(settings.model_dirs[0]), "LOHAN_DEVICES": "cpu:0"}
    if settings.database_url is not None:
        extra["LOHAN_DATABASE_URL"] = settings.database_url.get_secret_value()
    return os.environ | extra


def start(settings: Settings, run_id: str) -> subprocess.Popen[bytes]:
    """A supervisor in a process of its own."""
    log = RunFiles(settings.run_folder(run_id)).supervisor_log.open("ab")
    with log:
        return subprocess.Popen([*SUPERVISOR_COMMAND, run_id], env=environment(settings), stdout=log, stderr=log, start_new_session=True)


def wait_for_step(engine: Engine, run_id: str, step: int = 1) -> None:
    wait_until(lambda: read_run(engine, run_id).step >= step, what=f"step {step}")


@pytest.mark.database
def test_a_run_from_its_start_to_its_end(settings: Settings, engine: Engine) -> None:
    run_id = make_run(settings, engine, state=RunState.STARTING, steps=5, reserved_ram_bytes=1000, plan={"tiers": [], "device": "cpu"})
    supervise(settings, run_id)
    run = read_run(engine, run_id)
    assert (run.state, run.attempt, run.epoch, run.step, run.total_steps) == (RunState.SUCCEEDED, 1, 1, 5, 5)
    assert (run.first_loss, run.last_loss, run.loss) == (4.0, 1.0, 4.0 / 5)
    assert (run.devices, run.reserved_ram_bytes, run.state_reason, run.problem) == ([], 0, "", None)
    assert run.started_at is not None
    assert run.finished_at is not None
    assert [metric.step for metric in read_metrics(engine, run_id)] == [1, 2, 3, 4, 5]
    assert [event.type for event in read_events(engine, run_id)][-1] == "exit"
    files = RunFiles(settings.run_folder(run_id))
    assert run.events_offset_bytes == files.events.stat().st_size
    assert "step 5/5" in files.trainer_log.read_text()
    assert json.loads(files.plan.read_text()) == run.plan
    assert not (settings.state_folders[0] / run_id).exists(), "an ended run's states are freed"


def test_the_trainer_gets_a_valid_configuration(settings: Settings, engine: Engine) -> None:
    odd = settings.model_dirs[0] / 'so "called" \\ größe 模型 🙂'
    run_id = make_run(settings, engine, state=RunState.STARTING, steps=1, model=odd, devices=["cpu:1"], skip_bad_rows=True)
    supervise(settings, run_id)
    files = RunFiles(settings.run_folder(run_id))
    config = load_run_config(files.config)
    assert config.model.path == odd
    assert config.data.path == files.tokens
    assert config.data.skip_bad_rows
    assert config.engine.device == "cpu:1"
    assert config.engine.state_directories == (settings.state_folders[0] / run_id,)
    assert config.output.directory == files.folder
    assert tomllib.loads(files.config.read_text())["training"]["max_steps"] == 1


def test_the_trainer_sees_no_secret(settings: Settings, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOHAN_DATABASE_URL", "postgresql://user:secret@host/name")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    run_id = make_run(settings, engine, state=RunState.STARTING)
    command = (sys.executable, "-c", "import os; print(sorted(os.environ)); print('secret' in str(os.environ))")
    Supervisor(settings, run_id, trainer_command=command).run()
    log = RunFiles(settings.run_folder(run_id)).trainer_log.read_text()
    assert "False" in log
    assert "LOHAN_DATABASE_URL" not in log
    assert "PATH" in log


def test_lines_that_are_no_events_are_skipped_and_counted(settings: Settings, engine: Engine) -> None:
    run_id = make_run(settings, engine, state=RunState.STARTING, steps=2)
    garbage = [
        b"{",
        b"[1]",
        b"null",
        b"\xff\xfe",
        b'{"attempt": 1e999, "seq": 1, "time": 1, "type": "step"}',
        b"[" * 100_000,
        b'{"seq": 1}',
    ]
    RunFiles(settings.run_folder(run_id)).events.write_bytes(b"\n".join(garbage) + b'\n{"attempt": 1, "se')
    supervise(settings, run_id)
    run = read_run(engine, run_id)
    assert (run.state, run.step) == (RunState.SUCCEEDED, 2)
    assert run.malformed_events == len(garbage) + 1, "with the line that was cut short"


def test_a_second_supervisor_leaves_the_run_alone(settings: Settings, engine: Engine) -> None:
    run_id = make_run(settings, engine, state=RunState.STARTING)
    with holding(RunFiles(settings.run_folder(run_id)).supervisor_lock):
        supervise(settings, run_id)
    run = read_run(engine, run_id)
    assert (run.state, run.epoch) == (RunState.STARTING, 0)


def test_an_ended_run_needs_no_supervisor(settings: Settings, engine: Engine) -> None:
    run_id = make_run(settings, engine, state=RunState.CANCELLED)
    supervise(settings, run_id)
    assert read_run(engine, run_id).state is RunState.CANCELLED
    assert not RunFiles(settings.run_folder(run_id)).trainer_note.exists()


@pytest.mark.database
def test_a_killed_supervisor_is_followed_by_one_that_adopts(settings: Settings, engine: Engine) -> None:
    run_id = make_run(settings, engine, state=RunState.STARTING, steps=40, script={"step_seconds": 0.05})
    first = start(settings, run_id)
    wait_for_step(engine, run_id, 3)
    note = TrainerNote.read(RunFiles(settings.run_folder(run_id)).trainer_note)
    assert note is not None
    first.kill()
    first.wait()
    assert note.process().is_alive(), "the trainer outlives its supervisor"
    supervise(settings, run_id)
    run = read_run(engine, run_id)
    assert (run.state, run.attempt, run.epoch, run.step) == (RunState.SUCCEEDED, 1, 2, 40)
    assert TrainerNote.read(RunFiles(settings.run_folder(run_id)).trainer_note) == note
    assert [metric.step for metric in read_metrics(engine, run_id)] == list(range(1, 41))


def test_a_trainer_that_still_imports_is_adopted_too(settings: Settings, engine: Engine) -> None:
    """It has no lock yet: what counts is its note, which is on disk before its first instruction."""
    run_id = make_run(settings, engine, state=RunState.STARTING, script={"start_seconds": 3.0})
    first = start(settings, run_id)
    files = RunFiles(settings.run_folder(run_id))
    wait_until(lambda: files.trainer_note.exists(), what="trainer.json")
    wait_until(lambda: len(commands_of(settings.data_dir, "scripted_trainer")) == 1, what="the trainer")
    first.kill()
    first.wait()
    supervise(settings, run_id)
    run = read_run(engine, run_id)
    assert (run.state, run.attempt) == (RunState.SUCCEEDED, 1)


def test_a_run_that_ended_while_nobody_watched_is_judged(settings: Settings, engine: Engine) -> None:
    run_id = make_run(settings, engine, state=RunState.STARTING, steps=5, script={"hold_at_step": 3})
    first = start(settings, run_id)
    wait_for_step(engine, run_id)
    first.kill()
    first.wait()
    (settings.run_folder(run_id) / "go").touch()
    wait_until(lambda: not commands_of(settings.data_dir, "scripted_trainer"), what="the trainer's end")
    assert read_run(engine, run_id).state is RunState.RUNNING
    supervise(settings, run_id)
    run = read_run(engine, run_id)
    assert (run.state, run.step, run.last_loss) == (RunState.SUCCEEDED, 5, 1.0)


def test_an_announced_attempt_that_never_began_is_started(settings: Settings, engine: Engine) -> None:
    """The supervisor before died between the transaction and the start: the attempt's number is not used twice."""
    run_id = make_run(settings, engine, state=RunState.RUNNING, attempt=1)
    supervise(settings, run_id)
    run = read_run(engine, run_id)
    assert (run.state, run.attempt) == (RunState.SUCCEEDED, 1)


@pytest.mark.parametrize(("durability", "goes_on"), [("step", RESUME), ("snapshot", RESUME_OR_START_AGAIN), ("none", START_AGAIN)])
def test_a_killed_trainer_is_queued_again_with_the_reason(settings: Settings, engine: Engine, durability: str, goes_on: str) -> None:
    run_id = make_run(settings, engine, state=RunState.STARTING, script={"kill_self_at_step": 2}, reserved_ram_bytes=5)
    with write_transaction(engine) as session:
        run = repository.get_run(session, run_id)
        assert run is not None
        run.settings = {"training": {"max_steps": 3}, "engine": {"durability": durability}}
    supervise(settings, run_id)
    run = read_run(engine, run_id)
    assert (run.state, run.attempt, run.devices, run.reserved_ram_bytes) == (RunState.QUEUED, 1, [], 0)
    assert "SIGKILL" in run.state_reason
    assert "attempt 1 of 3" in run.state_reason
    assert run.state_reason.endswith(goes_on)


def test_a_trainer_killed_in_every_attempt_fails(settings: Settings, engine: Engine) -> None:
    """At its first step, when none is known to be recorded; a third attempt that came further is not the last."""
    further = make_run(settings, engine, state=RunState.STARTING, script={"kill_self_at_step": 2}, attempt=2)
    supervise(settings, further)
    assert (read_run(engine, further).state, read_run(engine, further).attempt) == (RunState.QUEUED, 3)
    run_id = make_run(settings, engine, state=RunState.STARTING, script={"kill_self_at_step": 1}, attempt=2)
    supervise(settings, run_id)
    run = read_run(engine, run_id)
    assert (run.state, run.attempt) == (RunState.FAILED, 3)
    assert run.problem is not None
    assert "SIGKILL" in run.problem["message"]
    assert run.problem["remedy"]
    assert run.state_reason == run.problem["message"]


def test_a_failing_trainer_shows_its_reason(settings: Settings, engine: Engine) -> None:
    run_id = make_run(settings, engine, state=RunState.STARTING, script={"fail_at_step": 2})
    supervise(settings, run_id)
    run = read_run(engine, run_id)
    assert (run.state, run.state_reason) == (RunState.FAILED, "GPU memory ran out")
    assert run.problem == {"kind": "CapacityError", "message": "GPU memory ran out", "place": "step 3", "remedy": "Use a smaller batch."}


def test_a_trainer_that_cannot_say_why_is_quoted(settings: Settings, engine: Engine) -> None:
    run_id = make_run(settings, engine, state=RunState.STARTING, script={"crash_before_events": True})
    supervise(settings, run_id)
    run = read_run(engine, run_id)
    assert run.state is RunState.FAILED
    assert run.problem is not None
    assert "exit code 1" in run.problem["message"]
    assert "RuntimeError: a library is missing" in run.problem["message"]


def test_missing_weights_fail_the_run_before_a_trainer_starts(settings: Settings, engine: Engine) -> None:
    run_id = make_run(settings, engine, state=RunState.STARTING)
    (settings.model_dirs[0] / "tiny").rmdir()
    supervise(settings, run_id)
    run = read_run(engine, run_id)
    assert (run.state, run.attempt) == (RunState.FAILED, 0)
    assert run.problem is not None
    assert "tiny" in run.problem["message"]


def test_cancel_before_the_start(settings: Settings, engine: Engine) -> None:
    run_id = make_run(settings, engine, state=RunState.STARTING, wanted=Wanted.CANCEL)
    supervise(settings, run_id)
    run = read_run(engine, run_id)
    assert (run.state, run.attempt) == (RunState.CANCELLED, 0)


def test_cancel_while_it_trains(settings: Settings, engine: Engine) -> None:
    run_id = make_run(settings, engine, state=RunState.STARTING, steps=10_000)
    process = start(settings, run_id)
    wait_for_step(engine, run_id)
    want(engine, run_id, Wanted.CANCEL)
    process.wait(30)
    run = read_run(engine, run_id)
    assert (run.state, run.state_reason, run.problem, run.attempt) == (RunState.CANCELLED, "", None, 1)
    assert read_events(engine, run_id)[-1].fields["reason"] == "cancelled"


def test_cancel_reaches_an_adopted_trainer(settings: Settings, engine: Engine) -> None:
    run_id = make_run(settings, engine, state=RunState.STARTING, steps=10_000)
    first = start(settings, run_id)
    wait_for_step(engine, run_id)
    first.kill()
    first.wait()
    want(engine, run_id, Wanted.CANCEL)
    supervise(settings, run_id)
    assert read_run(engine, run_id).state is RunState.CANCELLED


def test_a_trainer_that_ignores_the_request_is_killed(settings: Settings, engine: Engine) -> None:
    run_id = make_run(settings, engine, state=RunState.STARTING, steps=10_000, script={"ignore_signals": True})
    first = start(settings, run_id)
    wait_for_step(engine, run_id)
    first.kill()
    first.wait()
    want(engine, run_id, Wanted.CANCEL)
    supervise(settings, run_id, patience=Patience(cancel_seconds=0.5))
    assert read_run(engine, run_id).state is RunState.CANCELLED
    assert not commands_of(settings.data_dir, "scripted_trainer")


def test_a_stopping_host_interrupts_the_run_and_this_is_no_failed_attempt(settings: Settings, engine: Engine) -> None:
    run_id = make_run(settings, engine, state=RunState.STARTING, steps=10_000, script={"kill_self_at_step": {"2": 1}})
    process = start(settings, run_id)
    wait_for_step(engine, run_id)
    process.send_signal(signal.SIGTERM)
    process.wait(30)
    run = read_run(engine, run_id)
    assert (run.state, run.attempt) == (RunState.QUEUED, 1)
    assert "stopped" in run.state_reason
    with write_transaction(engine) as session:
        repository.fire(session, run_id, Trigger.CLAIM, devices=["cpu:0"])
    supervise(settings, run_id)
    run = read_run(engine, run_id)
    assert (run.state, run.attempt) == (RunState.QUEUED, 2)
    assert "attempt 1 of 3" in run.state_reason


def test_a_stranger_on_the_run_folder_is_left_alone(settings: Settings, engine: Engine) -> None:
    run_id = make_run(settings, engine, state=RunState.STARTING)
    with holding(RunFiles(settings.run_folder(run_id)).trainer_lock):
        supervise(settings, run_id)
    run = read_run(engine, run_id)
    assert (run.state, run.attempt) == (RunState.QUEUED, 0)
    assert "Another process" in run.state_reason


def test_what_an_old_trainer_left_behind_is_ended_before_the_next(settings: Settings, engine: Engine) -> None:
    """A forked child has inherited the lock's descriptor, and so the lock; the trainer itself was killed while nobody watched."""
    run_id = make_run(settings, engine, state=RunState.STARTING, steps=10_000, script={"leave_child": {"1": True}})
    files = RunFiles(settings.run_folder(run_id))
    first = start(settings, run_id)
    wait_for_step(engine, run_id)
    first.kill()
    first.wait()
    note = TrainerNote.read(files.trainer_note)
    assert note is not None
    os.kill(note.pid, signal.SIGKILL)
    wait_until(lambda: not note.process().is_alive(), what="the trainer's end")
    descriptor = os.open(files.trainer_lock, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    supervise(settings, run_id)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(descriptor)
    run = read_run(engine, run_id)
    assert (run.state, run.attempt) == (RunState.QUEUED, 1)
    assert not commands_of(settings.data_dir, "scripted_trainer")


@pytest.mark.database
def test_a_run_taken_over_is_not_written_to(settings: Settings, engine: Engine) -> None:
    run_id = make_run(settings, engine, state=RunState.STARTING, steps=10_000)
    process = start(settings, run_id)
    wait_for_step(engine, run_id)
    with write_transaction(engine) as session:
        repository.raise_epoch(session, run_id)
    process.wait(30)
    run = read_run(engine, run_id)
    assert run.state is RunState.RUNNING
    assert len(commands_of(settings.data_dir, "scripted_trainer")) == 1, "the trainer belongs to the new supervisor"
    assert "taken over" in RunFiles(settings.run_folder(run_id)).supervisor_log.read_text()


@pytest.mark.database(only="postgres")
def test_the_run_goes_on_while_the_database_is_away(settings: Settings, engine: Engine) -> None:
    """A relay stands between the supervisor and PostgreSQL, and is cut; the trainer does not notice, and nothing is lost."""
    assert settings.database_url is not None
    server = make_url(settings.database_url.get_secret_value())
    with Relay(str(server.host), server.port or 5432) as relay:
        url = server.set(host="127.0.0.1", port=relay.port).render_as_string(hide_password=False)
        cut_off = settings.model_copy(update={"database_url": SecretStr(url)})
        run_id = make_run(settings, engine, state=RunState.STARTING, steps=10, script={"hold_at_step": 5})
        process = start(cut_off, run_id)
        wait_for_step(engine, run_id, 5)
        relay.cut()
        (settings.run_folder(run_id) / "go").touch()
        files = RunFiles(settings.run_folder(run_id))
        wait_until(lambda: "step 10/10" in files.trainer_log.read_text(), what="the trainer's last step")
        wait_until(lambda: "does not answer" in files.supervisor_log.read_text(), what="the supervisor's notice")
        assert process.poll() is None
        run = read_run(engine, run_id)
        assert (run.state, run.step) == (RunState.RUNNING, 5)
        relay.mend()
        assert process.wait(60) == 0
    run = read_run(engine, run_id)
    assert (run.state, run.step, run.attempt) == (RunState.SUCCEEDED, 10, 1)
    assert [metric.step for metric in read_metrics(engine, run_id)] == list(range(1, 11))
