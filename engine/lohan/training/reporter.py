"""Says what the trainer does: to events.jsonl, and to whoever shows it in a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lohan.events import EventReader, EventType, EventWriter, Phase

EVENTS_FILE = "events.jsonl"
_PHASE_SECONDS = 0.5

Listener = Callable[[EventType, dict[str, Any]], None]


def next_attempt(directory: Path) -> int:
    """The number behind the last attempt that wrote an event in a run's folder; 1 where there is none."""
    return 1 + max((event.attempt for event in EventReader(directory / EVENTS_FILE).read()), default=0)


class Reporter:
    """Writes events; progress inside a phase at most every half second, because a line per tensor would say nothing more."""

    def __init__(self, directory: Path, *, attempt: int, listener: Listener | None) -> None:
        self._writer = EventWriter(directory / EVENTS_FILE, attempt=attempt)
        self._listener = listener
        self._phase: Phase | None = None
        self._detail = ""
        self._said_at = 0.0

    def say(self, type: EventType, **fields: Any) -> None:
        self._writer.write(type, **fields)
        if self._listener is not None:
            try:
                self._listener(type, fields)
            except OSError:
                self._listener = None  # the terminal, or the program behind the pipe, has gone; the run has not

    def begin(self, phase: Phase, detail: str, done: float | None = None, **fields: Any) -> None:
        """Enter `phase`, or its next part; arguments are `progress`'s."""
        self._phase, self._detail = phase, detail
        self._say_phase(done, **fields)

    def progress(self, done: float | None, **fields: Any) -> None:
        """How much of the phase is done, 0 to 1; None while that is unknown. `fields` are what else the event says."""
        if time.monotonic() - self._said_at >= _PHASE_SECONDS:
            self._say_phase(done, **fields)

    def warn(self, message: str, remedy: str | None = None) -> None:
        self.say(EventType.WARNING, message=message, remedy=remedy)

    def sync(self) -> None:
        """Bring all events so far to the drive."""
        self._writer.sync()

    def close(self) -> None:
        self._writer.close()

    def _say_phase(self, done: float | None, **fields: Any) -> None:
        assert self._phase is not None
        self._said_at = time.monotonic()
        self.say(EventType.PHASE, phase=str(self._phase), progress=done, detail=self._detail, **fields)
