"""The trainer as a process: lock, signals, exit codes, what it prints, and what it says when something unforeseen happens."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lohan.cli.commands import ExitCode
from lohan.cli.show import describe
from lohan.config import load_run_config
from lohan.errors import (
    CapacityError,
    ConfigError,
    DataError,
    DriveSpaceError,
    EngineError,
    NonFiniteError,
    ResumeError,
    StorageError,
)
from lohan.events import EventReader, EventType, FailureCause
from lohan.planning.plan import Plan
from lohan.training.failures import as_error, is_out_of_space, to_fields, write_stack
from lohan.training.metrics import Clock, MeanLoss
from lohan.training.run_lock import RunLockedError, hold_run
from tests.fixtures.rows import messages_rows, write_jsonl
from tests.fixtures.tiny_model import make_tiny_model
from tests.fixtures.waiting import wait_until

RUN_TOML = """
[model]
path = "model"
[data]
path = "rows.jsonl"
[training]
batch_size = 4
sequence_length = 96
max_steps = {steps}
precision = "fp32"
evaluation_rows = 4
[engine]
device = "cpu"
unsafe_filesystems = "allow"
threads = 1
[output]
directory = "run"
"""


def write_run(folder: Path, *, steps: int = 2) -> Path:
    make_tiny_model(folder / "model")
    write_jsonl(folder / "rows.jsonl", messages_rows(16))
    (folder / "run.toml").write_text(RUN_TOML.format(steps=steps))
    return folder / "run.toml"


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "lohan.cli", *map(str, arguments)]


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=240, check=False)


def events_of(folder: Path) -> list[tuple[str, dict]]:
    return [(event.type, event.fields) for event in EventReader(folder / "run" / "events.jsonl").read()]


def is_locked(folder: Path) -> bool:
    try:
        with hold_run(folder):
            return False
    except RunLockedError:
        return True


@pytest.fixture
def endless(tmp_path):
    """A trainer that would train for a very long time, in its own process group, stepping already."""
    run_file = write_run(tmp_path, steps=10_000_000)
    with (tmp_path / "output").open("wb") as output:
        process = subprocess.Popen(command("train", run_file), stdout=output, stderr=output, start_new_session=True)

    def stepping() -> bool:
        assert process.poll() is None, (tmp_path / "output").read_text()
        return "step" in [kind for kind, _ in events_of(tmp_path)]

    try:
        wait_until(stepping, timeout_seconds=200, what="the first step")
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()
        print((tmp_path / "output").read_text()[:2000])


def test_terminated_trainer_finishes_its_step_and_says_interrupted(endless, tmp_path):
    endless.send_signal(signal.SIGTERM)
    assert endless.wait(timeout=120) == ExitCode.INTERRUPTED
    events = events_of(tmp_path)
    assert events[-1] == ("exit", {"reason": "interrupted", "error": None, "stopped_step": None})
    assert events[-2][0] == "step"
    assert list((tmp_path / "run").glob("**/*.bin")), "the states stay, to be resumed from"
    assert not (tmp_path / "run" / "export").exists()


def test_cancel_is_read_from_the_control_file_without_a_signal(endless, tmp_path):
    control = tmp_path / "run" / "control.json"
    control.write_text("{broken")
    seen = len(events_of(tmp_path))
    wait_until(lambda: len(events_of(tmp_path)) > seen + 1, what="steps in spite of a broken control file")
    control.with_suffix(".new").write_text(json.dumps({"wanted": "cancel"}))
    control.with_suffix(".new").rename(control)
    assert endless.wait(timeout=120) == ExitCode.CANCELLED
    assert events_of(tmp_path)[-1] == ("exit", {"reason": "cancelled", "error": None, "stopped_step": None})


def test_second_trainer_on_the_folder_is_refused_and_writes_nothing(endless, tmp_path):
    second = run("train", tmp_path / "run.toml", "--attempt", "2")
    assert second.returncode == ExitCode.LOCKED
    assert "another trainer is at work in this folder" in second.stderr
    assert "Traceback" not in second.stderr
    attempts = {event.attempt for event in EventReader(tmp_path / "run" / "events.jsonl").read()}
    assert attempts == {1}
    # Killed, not ended: the kernel drops the lock with the process.
    os.killpg(endless.pid, signal.SIGKILL)
    endless.wait()
    wait_until(lambda: not is_locked(tmp_path / "run"), timeout_seconds=20, what="the lock to be free")


def test_lock_is_exclusive_and_not_inherited(tmp_path):
    with hold_run(tmp_path / "run"):
        with pytest.raises(RunLockedError, match="another trainer"), hold_run(tmp_path / "run"):
            pass
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False)
    try:
        # The kernel lets the parent go on a moment before it closes the child's descriptors.
        wait_until(lambda: not is_locked(tmp_path / "run"), timeout_seconds=20, what="the lock to be free")
        assert child.poll() is None
    finally:
        child.communicate(b"\n")


def test_lines_where_there_is_no_terminal(tmp_path):
    result = run("train", write_run(tmp_path))
    assert result.returncode == ExitCode.SUCCEEDED, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "Starting."
    assert "37.0 k parameters in fp32 on cpu: 2 steps of 4 rows (4 at once), up to 96 tokens a row" in lines
    assert any(line.startswith("step 1/2  loss ") and line.endswith("time left unknown") for line in lines)
    assert any(line.startswith("step 2/2  loss ") for line in lines)
    assert any(line.startswith("loss after the training: ") for line in lines)
    assert lines[-1] == f"succeeded: the model is in {tmp_path / 'run' / 'export'}"
    assert "\x1b" not in result.stdout


def test_a_trace_is_written_and_its_table_printed(tmp_path):
    file = tmp_path / "trace.json"
    result = run("train", write_run(tmp_path, steps=4), "--trace", file, "--trace-steps", "2")
    assert result.returncode == ExitCode.SUCCEEDED, result.stdout + result.stderr
    events = json.loads(file.read_text())["traceEvents"]
    assert {event["name"] for event in events if event.get("cat") == "step"} == {"step 2", "step 3"}
    lines = result.stdout.splitlines()
    table = next(number for number, line in enumerate(lines) if line.startswith("A step took "))
    assert "mean of 2, from step 2 on" in lines[table]
    rows = [line.split("\u2502")[1].strip() for line in lines[table:] if line.startswith("\u2502")]
    assert rows == ["computing CPU", "M2G (host to GPU)", "G2M (GPU to host)", "SSD read", "SSD write", "CPU (optimizer)"]
    assert any(line.startswith("Computing waited for weights ") for line in lines)
    assert f"The trace is in {file}; open it in ui.perfetto.dev." in lines
    assert table < next(number for number, line in enumerate(lines) if line.startswith("step 4/4")), "as soon as the steps are done"


def test_a_trace_that_cannot_be_written_is_refused_before_the_run(tmp_path):
    result = run("train", write_run(tmp_path), "--trace", tmp_path / "missing" / "trace.json")
    assert result.returncode == ExitCode.BAD_CONFIG
    assert result.stderr.startswith("lohan: --trace: ") and "No such file or directory" in result.stderr
    assert not (tmp_path / "run").exists()


def test_progress_bar_on_a_terminal(tmp_path):
    """The same run on a pseudo-terminal: a bar, the loss and the time left."""
    run_file = write_run(tmp_path, steps=3)
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command("train", run_file), stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm", "COLUMNS": "150"}
    )
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # reading a pseudo-terminal whose other end is closed fails
        while block := os.read(ours, 65536):
            shown += block
    os.close(ours)
    assert process.wait(timeout=120) == ExitCode.SUCCEEDED
    text = shown.decode()
    assert "\u2501" in text
    assert "step 2/3  loss " in text
    assert " left" in text
    assert "step 3/3  loss " in text
    assert "succeeded: the model is in" in text.replace("\r\n", " ")


def test_bad_configuration_is_named_without_a_stack(tmp_path):
    run_file = write_run(tmp_path)
    run_file.write_text(run_file.read_text().replace("batch_size = 4", "batch_size = 0\nlearning_rate = true"))
    for name in ("train", "plan"):
        result = run(name, run_file)
        assert result.returncode == ExitCode.BAD_CONFIG
        assert "training.batch_size" in result.stderr
        assert "Traceback" not in result.stderr
    result = run("train", tmp_path / "absent.toml")
    assert result.returncode == ExitCode.BAD_CONFIG
    assert f"{tmp_path / 'absent.toml'}: no such file" in result.stderr
    assert not (tmp_path / "run").exists()


def test_failed_run_prints_message_place_and_remedy(tmp_path):
    run_file = write_run(tmp_path)
    (tmp_path / "model" / "model.safetensors").unlink()
    result = run("train", run_file)
    assert result.returncode == ExitCode.FAILED
    assert "no weights: neither model.safetensors nor" in result.stdout
    assert "Put the model's safetensors files into the folder." in result.stdout
    assert "Traceback" not in result.stdout + result.stderr
    assert "Traceback" in (tmp_path / "run" / "trainer.log").read_text()


def test_folder_that_cannot_be_made(tmp_path):
    run_file = write_run(tmp_path)
    (tmp_path / "run").write_text("a file")
    result = run("train", run_file)
    assert result.returncode == ExitCode.FAILED
    assert "File exists" in result.stderr
    assert "Traceback" not in result.stderr


def test_plan_prints_tables_and_json(tmp_path):
    run_file = write_run(tmp_path)
    text = run("plan", run_file)
    assert text.returncode == 0, text.stderr
    for part in ("RAM:", "SSD:", "parameter slots", "master weights", "37.0 k parameters x 4 B", "Durability: step."):
        assert part in " ".join(text.stdout.split())  # lines are wrapped
    plan = Plan.model_validate_json(run("plan", run_file, "--json").stdout)
    assert plan.parameters == 37024
    assert not (tmp_path / "run").exists()


def test_starting_the_command_line_loads_no_torch():
    code = (
        "import sys, typer; from lohan.cli import register; register(typer.Typer()); import lohan.training.loop;"
        "print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def full_drive_error() -> OSError:
    """The kernel's own error for a write that finds no space."""
    with pytest.raises(OSError) as caught, Path("/dev/full").open("wb", buffering=0) as file:
        file.write(b"x")
    return caught.value


def chained(cause: Exception) -> EngineError:
    error = EngineError("the optimizer stage failed")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("make", "kind", "message", "remedy"),
    [
        (
            lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."),
            "CapacityError",
            "GPU memory ran out",
            "micro_batch",
        ),
        (lambda: MemoryError(), "CapacityError", "host memory ran out", "micro_batch"),
        (
            lambda: RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
            "CapacityError",
            "host memory ran out",
            "micro_batch",
        ),
        (full_drive_error, "StorageError", "the drive is full", "Free space"),
        (lambda: chained(full_drive_error()), "StorageError", "the drive is full", "Free space"),
        (lambda: PermissionError(13, "Permission denied", "/x/y"), "StorageError", "Permission denied", "may write"),
        (lambda: DataError("odd", place="rows:1", remedy="mend"), "DataError", "odd", "mend"),
        (lambda: chained(ValueError("x")), "EngineError", "the optimizer stage failed", ""),
        (lambda: ZeroDivisionError("division by zero\nmore"), "EngineError", "ZeroDivisionError: division by zero", "trainer.log"),
        (lambda: KeyError(), "EngineError", "KeyError: ", "trainer.log"),
    ],
)
def test_every_end_has_words(make, kind, message, remedy):
    error = as_error(make())
    assert error.to_dict()["kind"] == kind
    assert message in error.message
    assert "\n" not in error.message
    assert remedy in (error.remedy or "")


class AcceleratorError(RuntimeError):
    """As torch raises it since 2.8: with CUDA's number."""

    def __init__(self, message: str, error_code: int) -> None:
        super().__init__(message)
        self.error_code = error_code


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (lambda: torch.OutOfMemoryError("CUDA out of memory."), FailureCause.GPU_MEMORY),
        (lambda: chained(torch.OutOfMemoryError("CUDA out of memory.")), FailureCause.GPU_MEMORY),
        (MemoryError, FailureCause.HOST_MEMORY),
        (full_drive_error, FailureCause.DISK_FULL),
        (lambda: StorageError("pwrite failed: no space", place="/s/a.bin", errno=28), FailureCause.DISK_FULL),
        (lambda: chained(StorageError("pwrite failed: quota", place="/s/a.bin", errno=122)), FailureCause.DISK_FULL),
        (lambda: StorageError("pread failed: I/O error", place="/s/a.bin", errno=5), FailureCause.STORAGE),
        (lambda: PermissionError(13, "Permission denied", "/x/y"), FailureCause.STORAGE),
        (lambda: NonFiniteError("nan"), FailureCause.NON_FINITE),
        (lambda: DataError("odd"), FailureCause.DATA),
        (lambda: ConfigError("odd"), FailureCause.SETTINGS),
        (lambda: ResumeError("odd"), FailureCause.RESUME),
        (lambda: CapacityError("small", need_bytes=2, have_bytes=1), FailureCause.CAPACITY),
        (lambda: DriveSpaceError("full now", need_bytes=2, have_bytes=1), FailureCause.DISK_FULL),
        (lambda: AcceleratorError("CUDA error: words of tomorrow", 999), FailureCause.LOST_GPU),
        (lambda: AcceleratorError("CUDA error: device-side assert triggered", 710), FailureCause.PROGRAM),
        (lambda: RuntimeError("CUDA error: unspecified launch failure\nmore"), FailureCause.LOST_GPU),
        (lambda: RuntimeError("CUDA error: uncorrectable ECC error encountered"), FailureCause.LOST_GPU),
        (lambda: chained(RuntimeError("CUDA error: unknown error")), FailureCause.LOST_GPU),
        (lambda: RuntimeError("CUDA error: an illegal memory access was encountered"), FailureCause.PROGRAM),
        (ZeroDivisionError, FailureCause.PROGRAM),
    ],
)
def test_every_end_has_a_cause(make, cause):
    fields = to_fields(make())
    assert fields["cause"] == cause
    assert fields.keys() == {"kind", "message", "place", "remedy", "cause"}
    assert fields["message"]


def test_a_full_drive_is_found_behind_a_stage_and_nowhere_else():
    assert is_out_of_space(chained(full_drive_error()))
    assert not is_out_of_space(chained(PermissionError(13, "Permission denied", "/x/y")))


def test_stack_goes_to_the_log_behind_what_is_there(tmp_path):
    (tmp_path / "trainer.log").write_text("before\n")
    write_stack(tmp_path, full_drive_error())
    text = (tmp_path / "trainer.log").read_text()
    assert text.startswith("before\nTraceback")
    assert "No space left on device" in text


def test_eta_counts_the_steps_of_this_attempt_alone():
    """900 of 1000 steps were done before; 10 more took 6 s each: 90 are left. Before two steps it is unknown."""
    clock = Clock(total_steps=1000)
    assert clock.eta_seconds(900) is None
    clock.add(60.0)
    assert clock.eta_seconds(901) is None
    for _ in range(9):
        clock.add(6.0)
    assert clock.eta_seconds(910) == 540
    clock.afterwards_seconds = 12.0
    assert clock.eta_seconds(910) == 552


def test_eta_follows_a_change_of_pace():
    clock = Clock(total_steps=100)
    for _ in range(40):
        clock.add(1.0)
    for _ in range(20):
        clock.add(5.0)
    assert clock.eta_seconds(60) == 200


def test_mean_loss_weighs_by_tokens():
    loss = MeanLoss()
    loss.add(1.0, 30)
    loss.add(4.0, 10)
    assert loss.value == 1.75
    assert loss.tokens == 40


def test_unknown_numbers_are_described(tmp_path):
    config = load_run_config(write_run(tmp_path))
    step = {
        "step": 1,
        "total_steps": 2,
        "loss": float("nan"),
        "gradient_norm": None,
        "clipped": False,
        "skipped": False,
        "learning_rate": 1e-5,
        "tokens_per_second": 10.0,
        "step_seconds": 1.0,
        "eta_seconds": None,
    }
    assert describe(EventType.STEP, step, config) == (
        "step 1/2  loss nan  gradient norm unknown  learning rate 1e-05  10 tokens/s  1.00 s  time left unknown"
    )
    error = DataError("odd [bold]row[/]", place="rows.jsonl:3", remedy="Mend it.").to_dict()
    assert describe(EventType.EXIT, {"reason": "failed", "error": error}, config) == "failed: rows.jsonl:3: odd [bold]row[/]\n  Mend it."
