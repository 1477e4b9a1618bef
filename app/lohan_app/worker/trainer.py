"""A trainer as its supervisor sees it: one it has started, or one it found running and adopts."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from lohan.errors import EngineError
from lohan_app.entities import Wanted
from lohan_app.worker.launcher import RunFiles, TrainerNote, start_trainer
from lohan_app.worker.processes import oom_kill_count, write_atomically

KILL_SECONDS = 30.0
"""How long a killed process may take to go: the kernel has to give back its memory first."""


class Killed(StrEnum):
    """Why a supervisor has killed its trainer."""

    BY_REQUEST = "by_request"
    HUNG = "hung"
    """It showed no sign of life for longer than the limit."""
    UNHEEDING = "unheeding"
    """It did not end in time after it was cancelled."""


@dataclass(frozen=True, slots=True)
class TrainerEnd:
    """How a trainer's process ended."""

    status: int | None
    """Exit code, or minus the signal; None for an adopted trainer, whose status went to another parent."""
    kernel_out_of_memory: bool
    """Whether the kernel has killed for want of memory since the trainer started."""
    killed: Killed | None = None
    """Set where it was this supervisor that has killed it."""
    silence_seconds: float = 0.0
    """The limit that a trainer which hung had passed."""


class Trainer:
    """The process that trains; `attempt` is the one it was started for."""

    def __init__(self, files: RunFiles, note: TrainerNote, child: subprocess.Popen[bytes] | None) -> None:
        self.attempt = note.attempt
        self._files = files
        self._note = note
        self._child = child
        self._process = note.process()
        self._killed: Killed | None = None
        self._silence_seconds = 0.0

    @classmethod
    def start(cls, files: RunFiles, *, attempt: int, device: str, command: Sequence[str], wanted: Wanted = Wanted.RUN) -> Trainer:
        """Start one. Whatever an earlier attempt was told is forgotten first; `stop` is told before it runs."""
        files.control.unlink(missing_ok=True)
        if wanted is Wanted.STOP:
            _write_control(files, wanted)
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

    def tell(self, wanted: Wanted) -> None:
        """What is wanted of it, by file and signal: the file says what, the signal ends waiting for the next look at the file.

        Not for `stop`: a signal means that the run is to be left, and this one is to bring its result.
        """
        _write_control(self._files, wanted)
        if wanted is not Wanted.STOP:
            self._process.send(signal.SIGTERM)

    def interrupt(self) -> None:
        """The host or the unit stops: finish the step and end."""
        self._process.send(signal.SIGTERM)

    def kill(self, why: Killed, *, silence_seconds: float = 0.0) -> None:
        """SIGKILL, and wait for the end: only then may anybody else open the run's files.

        Raises:
            EngineError: the process does not go; the kernel holds it, most likely in a driver.
        """
        if self._killed is None:
            self._killed, self._silence_seconds = why, silence_seconds
        self._process.send(signal.SIGKILL)
        if not self.wait(KILL_SECONDS):
            raise EngineError(f"process {self.pid} does not end on SIGKILL", remedy="A driver or a disk holds it: see the kernel's log.")

    def end(self) -> TrainerEnd:
        """Take note of its end, after `wait` was true; whatever it had started itself goes with it."""
        self._process.kill_group()
        status = self._child.wait() if self._child is not None else None
        self._process.close()
        count = oom_kill_count()
        out_of_memory = count is not None and self._note.oom_kills is not None and count > self._note.oom_kills
        return TrainerEnd(status, out_of_memory, self._killed, self._silence_seconds)


def _write_control(files: RunFiles, wanted: Wanted) -> None:
    write_atomically(files.control, json.dumps({"wanted": str(wanted)}).encode())
