"""How a trainer is asked to stop: SIGTERM or SIGINT, or `control.json` in the run's folder. It stops at the next step boundary."""

from __future__ import annotations

import json
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any, Self

from lohan.errors import StopRequested
from lohan.events import ExitReason

CONTROL_FILE = "control.json"


class StopWatch:
    """Notes requests to stop while its `with` block runs. A second SIGINT interrupts at once, as at any other program."""

    def __init__(self, directory: Path) -> None:
        self._control = directory / CONTROL_FILE
        self._signalled = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        # Python delivers signals to the main thread only, and refuses handlers from others.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raise if a stop was asked for.

        Raises:
            StopRequested: it was; `reason` says why.
        """
        if self.is_asked:
            raise StopRequested("the run was asked to stop")

    @property
    def is_asked(self) -> bool:
        """Whether the run is to stop, for whatever reason."""
        return self._signalled or self.is_cancelled

    @property
    def reason(self) -> ExitReason:
        """Cancelled where control.json says so; else whoever sent the signal wants the run started again later."""
        return ExitReason.CANCELLED if self.is_cancelled else ExitReason.INTERRUPTED

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._signalled = True
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    @property
    def is_cancelled(self) -> bool:
        """Whether `control.json` says so."""
        try:
            wanted = json.loads(self._control.read_bytes())
        except (OSError, ValueError):
            return False
        return isinstance(wanted, dict) and wanted.get("wanted") == "cancel"
