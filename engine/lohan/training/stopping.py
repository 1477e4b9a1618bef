"""How a trainer is asked to stop: SIGTERM or SIGINT, or `control.json` in the run's folder. It stops at the next step boundary.

`{"wanted": "cancel"}` ends the run, `{"wanted": "pause"}` leaves what it can go on from, `{"wanted": "stop"}` ends the training there and
exports what it has learned. A signal alone means that the host or the unit stops.
"""

from __future__ import annotations

import json
import signal
import threading
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Any, Self

from lohan.errors import StopRequested
from lohan.events import ExitReason

CONTROL_FILE = "control.json"


class Control(StrEnum):
    """What `control.json` may want."""

    CANCEL = "cancel"
    PAUSE = "pause"
    STOP = "stop"


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
        """Raise if the run is to be left; a request to end the training and keep the result is no such thing.

        Raises:
            StopRequested: it is; `reason` says why.
        """
        if self.is_asked:
            raise StopRequested("the run was asked to stop")

    @property
    def is_asked(self) -> bool:
        """Whether the run is to be left, for whatever reason."""
        return self._signalled or self.control in (Control.CANCEL, Control.PAUSE)

    @property
    def is_cancelled(self) -> bool:
        """Whether `control.json` says so: nothing has to be kept."""
        return self.control is Control.CANCEL

    @property
    def is_enough(self) -> bool:
        """Whether the training is to end here and its result to be kept."""
        return self.control is Control.STOP

    @property
    def reason(self) -> ExitReason:
        """As control.json says; else whoever sent the signal wants the run started again later."""
        reasons = {Control.CANCEL: ExitReason.CANCELLED, Control.PAUSE: ExitReason.PAUSED}
        return reasons.get(self.control or Control.STOP, ExitReason.INTERRUPTED)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._signalled = True
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    @property
    def control(self) -> Control | None:
        """What `control.json` wants; None where it is missing, or says nothing known."""
        try:
            wanted = json.loads(self._control.read_bytes())
            return Control(wanted["wanted"])
        except (OSError, ValueError, TypeError, KeyError):
            return None
