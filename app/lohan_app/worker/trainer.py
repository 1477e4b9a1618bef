"""A trainer as its supervisor sees it: one it has started, or one it found running and adopts."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from lohan.errors import EngineError
from lohan_app.worker.launcher import RunFiles, TrainerNote, start_trainer
from lohan_app.worker.processes import oom_kill_count, write_atomically

KILL_SECONDS = 30.0
"""How long a killed process may take to go: the kernel has to give back its memory first."""


@dataclass(frozen=True, slots=True)
class TrainerEnd:
    """How a trainer's process ended."""

    status: int | None
    """Exit code, or minus the signal; None for an adopted trainer, whose status went to another parent."""
    kernel_out_of_memory: bool
    """Whether the kernel has killed for want of memory since the trainer started."""


class Trainer:
    """The process that trains; `attempt` is the one it was started for."""

    def __init__(self, files: RunFiles, note: TrainerNote, child: subprocess.Popen[bytes] | None) -> None:
        self.attempt = note.attempt
        self._files = files
        self._note = note
        self._child = child
        self._process = note.process()

    @classmethod
    def start(cls, files: RunFiles, *, attempt: int, device: str, command: Sequence[str]) -> Trainer:
        """Start one. Whatever an earlier attempt was told is forgotten first."""
        files.control.unlink(missing_ok=True)
        child = start_trainer(files, attempt=attempt, device=device, command=command)
        note = TrainerNote.read(files.trainer_note)
        assert note is not None, "it was written before the trainer ran"
        return cls(files, note, child)

    @classmethod
    def find(cls, files: RunFiles) -> Trainer | None:
        """The trainer that a supervisor before us has started, if its process lives.

        It counts from its start on, not from the moment it takes its lock: importing torch takes seconds.
        """
        note = TrainerNote.read(files.trainer_note)
        if note is None:
            return None
        trainer = cls(files, note, None)
        return trainer if trainer._process.is_alive() else None

    @property
    def pid(self) -> int:
        return self._note.pid

    def wait(self, seconds: float) -> bool:
        """Whether it has ended, after `seconds` at most."""
        return self._process.wait(seconds)

    def ask_to_cancel(self) -> None:
        """By file and signal: the file says why, the signal ends waiting for the next look at the file."""
        write_atomically(self._files.control, json.dumps({"wanted": "cancel"}).encode())
        self._process.send(signal.SIGTERM)

    def interrupt(self) -> None:
        """The host or the unit stops: finish the step and end."""
        self._process.send(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL, and wait for the end: only then may anybody else open the run's files.

        Raises:
            EngineError: the process does not go; the kernel holds it, most likely in a driver.
        """
        self._process.send(signal.SIGKILL)
        if not self.wait(KILL_SECONDS):
            raise EngineError(f"process {self.pid} does not end on SIGKILL", remedy="A driver or a disk holds it: see the kernel's log.")

    def end(self) -> TrainerEnd:
        """Take note of its end, after `wait` was true; whatever it had started itself goes with it."""
        self._process.kill_group()
        status = self._child.wait() if self._child is not None else None
        self._process.close()
        count = oom_kill_count()
        return TrainerEnd(status, count is not None and self._note.oom_kills is not None and count > self._note.oom_kills)
