"""What an init system does for the appliance: starts its processes, and starts them again when they end."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

RESTART_SECONDS = 0.5
STOP_SECONDS = 60.0


class Service:
    """One process that is kept running, in a session of its own.

    Args:
        user: the account it runs under; None for our own.
        stop_signal: what `stop` sends.
    """

    def __init__(
        self, name: str, command: Sequence[str], *, log: Path, environment: Mapping[str, str], user: str | None = None,
        stop_signal: signal.Signals = signal.SIGTERM,
    ) -> None:  # fmt: skip
        self.name = name
        self._stop_signal = stop_signal
        self.starts = 0
        self._command, self._log, self._environment, self._user = list(command), log, dict(environment), user
        self._process: subprocess.Popen[bytes] | None = None
        self._next_start_at = 0.0

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def keep(self) -> None:
        """Start it where it does not run; call this often."""
        if self._process is not None and self._process.poll() is not None:
            self._process = None
            self._next_start_at = max(self._next_start_at, time.monotonic() + RESTART_SECONDS)
        if self._process is None and time.monotonic() >= self._next_start_at:
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment, start_new_session=True,
                    user=self._user, cwd=self._log.parent,
                )  # fmt: skip
            self.starts += 1

    def keep_away(self, seconds: float) -> None:
        """Once it has ended, it is not started again for so long."""
        self._next_start_at = time.monotonic() + seconds

    def stop(self) -> None:
        """Signal it and wait for its end."""
        if self._process is None:
            return
        self._process.send_signal(self._stop_signal)
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process = None
