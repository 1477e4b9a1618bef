"""Child processes that are kept running: started again when they end, with a growing pause, and ended with their parent."""

from __future__ import annotations

import logging
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from lohan_app.worker.processes import command_with, kill_group_of

logger = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 30.0
STEADY_SECONDS = 30.0
"""A child that has lived this long has started well: the next pause is the first one again."""


class Child:
    """One kept process. It leads its own group, so Ctrl-C reaches the parent alone, which then ends its children in order.

    The kernel sends it SIGTERM when the parent dies: nothing that `lohan up` started keeps a port or a socket after it.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        patience_seconds: float = 10.0,
    ) -> None:
        self.name = name
        self.starts = 0
        self._command = list(command)
        self._environment = os.environ | (environment or {})
        self._pass_fds = tuple(pass_fds)
        self._patience_seconds = patience_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ending = False
        self._started_at = 0.0
        self._pause_seconds = FIRST_PAUSE_SECONDS
        self._next_start_at = 0.0

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def keep(self) -> None:
        """Start it, or start it again when it has ended and its pause is over. Called often by the parent's only thread: the kernel
        counts a parent as dead when the thread that started the child ends."""
        if self._process is not None:
            status = self._process.poll()
            if status is None:
                return
            self._note_end(status)
        if time.monotonic() >= self._next_start_at:
            self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            command_with(["--parent", str(os.getpid())], self._command),
            stdin=subprocess.DEVNULL, start_new_session=True, pass_fds=self._pass_fds, env=self._environment,
        )  # fmt: skip
        self.starts += 1
        self._started_at = time.monotonic()

    def _note_end(self, status: int) -> None:
        assert self._process is not None
        kill_group_of(self._process)
        self._process = None
        if time.monotonic() - self._started_at >= STEADY_SECONDS:
            self._pause_seconds = FIRST_PAUSE_SECONDS
        logger.warning("%s ended with status %d; it is started again in %.1f s", self.name, status, self._pause_seconds)
        self._next_start_at = time.monotonic() + self._pause_seconds
        self._pause_seconds = min(2 * self._pause_seconds, LONGEST_PAUSE_SECONDS)

    def ask_to_end(self) -> None:
        """SIGTERM, once, without waiting: Celery takes a second one for impatience."""
        if self._process is not None and not self._is_ending:
            self._process.terminate()
            self._is_ending = True

    def end(self) -> None:
        """SIGTERM, patience, SIGKILL to the whole group."""
        if self._process is not None:
            self.ask_to_end()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(self._patience_seconds)
            kill_group_of(self._process)
            self._process = None


def end_all(children: Sequence[Child]) -> None:
    """End children side by side."""
    for child in children:
        child.ask_to_end()
    for child in children:
        child.end()
