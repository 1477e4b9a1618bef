"""The parent's end of a process that is measured (`step_worker`, see `serving`): starts it, asks it, and sees that nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress
from shutil import copyfile
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

from lohan.errors import LohanError
from lohan.hardware.transfers import CHOICE_FILE
from lohan.profiling.folders import temporary_folders

if TYPE_CHECKING:
    from pathlib import Path

    from lohan.bench.records import Record

_LAST_BYTES: Final = 2000


class ChildFailed(LohanError):  # noqa: N818 - what a child said, or its death
    """A child could not go on; the message is the reason."""


class ChildTask(Protocol):
    """What a child is told first, as JSON: a pydantic model with a field `folders`."""

    @property
    def name(self) -> str:
        """As progress shows it."""

    @property
    def directories(self) -> tuple[Path, ...]:
        """In each of which the child gets a folder of its own."""

    def model_copy(self, *, update: dict[str, Any]) -> Self: ...

    def model_dump_json(self) -> str: ...


class Measured(Protocol):
    """What takes steps when asked: a process, or a part of one."""

    def wait_ready(self) -> float: ...

    def step(self) -> Record: ...

    def pause(self) -> None: ...

    def finish(self) -> Record: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class StepChild:
    """A process of its own for one task, with folders of its own. Leaving its `with` block ends the process and removes the folders.

    It is in a session of its own, so that Ctrl-C reaches the parent alone, which then ends it.
    """

    def __init__(self, task: ChildTask, *, command: tuple[str, ...] = (sys.executable, "-m", "lohan.bench.step_worker")) -> None:
        self.task = task
        self._command = command
        self._resources = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            directories = self.task.directories
            folders = stack.enter_context(temporary_folders(directories))
            _bring_choices(directories, folders)
            self._messages = stack.enter_context(tempfile.TemporaryFile())
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._messages, text=True, start_new_session=True
            )
            stack.callback(self._end)
            self._order(self.task.model_copy(update={"folders": tuple(folders)}).model_dump_json())
            self._resources = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    def wait_ready(self) -> float:
        """Seconds that the set-up took.

        Raises:
            ChildFailed: it failed.
        """
        return float(self._answer("ready"))

    def step(self) -> Record:
        """One step, see `StepRun.step`.

        Raises:
            ChildFailed: it failed.
        """
        self._order("step")
        step: Record = self._answer("step")
        return step

    def pause(self) -> None:
        """Have everything end that its steps have begun, see `StepRun.pause`.

        Raises:
            ChildFailed: it failed.
        """
        self._order("pause")
        self._answer("pause")

    def use(self, choice: str) -> None:
        """Have it go on in another way, see `ServedRun.use`.

        Raises:
            ChildFailed: it failed.
        """
        self._order(f"use {choice}")
        self._answer("use")

    def finish(self) -> Record:
        """What the whole run took, see `StepRun.finish`.

        Raises:
            ChildFailed: it failed.
        """
        self._order("finish")
        result: Record = self._answer("result")
        return result

    def _order(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return  # its last answer, or its death, says why

    def _answer(self, name: str) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ChildFailed(self._death())
        answer = json.loads(line)
        if "error" in answer:
            raise ChildFailed(answer["error"])
        return answer[name]

    def _death(self) -> str:
        """How the process ended, in words."""
        status = self._process.wait()
        if status == -signal.SIGKILL:
            return "the process was killed: the system ran out of memory, or somebody did it"
        self._messages.seek(0)
        lines = self._messages.read().decode(errors="replace").strip().splitlines() or ["it said nothing"]
        return f"the process ended with status {status}: {lines[-1][-_LAST_BYTES:]}"

    def _end(self) -> None:
        """Nothing that it holds is worth waiting for; nor is what it started in its session, such as compilers."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                continue


def _bring_choices(directories: tuple[Path, ...], folders: list[Path]) -> None:
    """What `lohan bench io` chose for a directory holds for a folder in it."""
    for directory, folder in zip(directories, folders, strict=True):
        if (directory / CHOICE_FILE).is_file():
            copyfile(directory / CHOICE_FILE, folder / CHOICE_FILE)
