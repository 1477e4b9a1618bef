"""Starts supervisors and trainers: in sessions of their own, with nothing inherited but what is named here."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lohan.errors import EngineError
from lohan_app.settings import Settings
from lohan_app.worker.processes import (
    Process,
    clean_environment,
    command_with,
    oom_kill_count,
    python_module,
    read_json,
    start_ticks,
    write_atomically,
)

TRAINER_COMMAND = tuple(python_module("lohan.cli"))
# The trainer is by far the biggest process, and its work is the one that can be done again: the kernel should pick it first.
TRAINER_OOM_SCORE = 500
START_SECONDS = 30


@dataclass(frozen=True, slots=True)
class RunFiles:
    """The files of a run's folder that the supervisor and the trainer share."""

    folder: Path

    @property
    def events(self) -> Path:
        return self.folder / "events.jsonl"

    @property
    def trainer_log(self) -> Path:
        return self.folder / "trainer.log"

    @property
    def supervisor_log(self) -> Path:
        return self.folder / "supervisor.log"

    @property
    def trainer_lock(self) -> Path:
        return self.folder / "trainer.lock"

    @property
    def supervisor_lock(self) -> Path:
        return self.folder / "supervisor.lock"

    @property
    def trainer_note(self) -> Path:
        return self.folder / "trainer.json"

    @property
    def control(self) -> Path:
        return self.folder / "control.json"

    @property
    def config(self) -> Path:
        return self.folder / "run.toml"

    @property
    def plan(self) -> Path:
        return self.folder / "plan.json"

    @property
    def conversation(self) -> Path:
        return self.folder / "chat.json"

    @property
    def tokens(self) -> Path:
        return self.folder / "tokens.safetensors"


@dataclass(frozen=True, slots=True)
class TrainerNote:
    """`trainer.json`: which process is, or was, the trainer. Written before the trainer's first instruction."""

    pid: int
    start_ticks: int
    attempt: int
    oom_kills: int | None
    """The kernel's counter when the trainer started; a higher one later says why it is gone."""

    @classmethod
    def read(cls, path: Path) -> TrainerNote | None:
        note = read_json(path)
        if note is None:
            return None
        try:
            return cls(int(note["pid"]), int(note["start_ticks"]), int(note["attempt"]), note.get("oom_kills"))
        except (KeyError, TypeError, ValueError):
            return None

    def write(self, path: Path) -> None:
        note = {"pid": self.pid, "start_ticks": self.start_ticks, "attempt": self.attempt, "oom_kills": self.oom_kills}
        write_atomically(path, json.dumps(note).encode())

    def process(self) -> Process:
        return Process(self.pid, self.start_ticks)


def start_supervisor(settings: Settings, run_id: str, command: Sequence[str]) -> None:
    """Start `command` and the run's id in a new session, orphaned at once, with its output in supervisor.log; returns when that is done.

    It keeps our working folder: relative paths in the settings must mean the same to it.

    Raises:
        EngineError: it could not be started.
    """
    files = RunFiles(settings.run_folder(run_id))
    files.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with files.supervisor_log.open("ab") as log:
        done = subprocess.run(
            command_with(["--detach"], [*command, run_id]),
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=START_SECONDS, check=False,
        )  # fmt: skip
    if done.returncode != 0:
        raise EngineError(f"the supervisor of {run_id} did not start (exit code {done.returncode})", place=str(files.supervisor_log))


def start_trainer(files: RunFiles, *, attempt: int, device: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start `command`, an attempt's trainer, as leader of its own session, and write `trainer.json` before its first instruction.

    The process waits at a pipe until the note is on disk. If we die before that, the pipe closes and it ends: there is never a trainer
    that the next supervisor cannot find.
    """
    gate_exit, gate_entry = os.pipe()
    try:
        with files.trainer_log.open("ab") as log:
            trainer = subprocess.Popen(
                command_with(
                    [f"--gate={gate_exit}", f"--oom-score-adj={TRAINER_OOM_SCORE}"],
                    [*command, "--attempt", str(attempt)],
                ),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=files.folder, start_new_session=True,
                env=clean_environment(CUDA_VISIBLE_DEVICES=device if device.startswith("GPU-") else ""), pass_fds=(gate_exit,),
            )  # fmt: skip
    except BaseException:
        os.close(gate_entry)
        raise
    finally:
        os.close(gate_exit)
    try:
        TrainerNote(trainer.pid, start_ticks(trainer.pid) or 0, attempt, oom_kill_count()).write(files.trainer_note)
        os.write(gate_entry, b"1")
    except BaseException:
        trainer.kill()
        trainer.wait()
        raise
    finally:
        os.close(gate_entry)
    return trainer
