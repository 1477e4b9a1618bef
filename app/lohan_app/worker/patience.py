"""How long a supervisor waits: for a trainer to show a sign of life, to heed a request, and before it is started again."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

CANCEL_PATIENCE_SECONDS = 600.0
"""A step of the largest models takes minutes; a trainer that has not ended by then is killed."""
STEPS_OF_SILENCE = 10
"""A run whose steps take longer than the limit is given this many of them."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Limits in seconds."""

    cancel_seconds: float = CANCEL_PATIENCE_SECONDS
    start_silence_seconds: float = 3600.0
    """Without an event before the attempt's first step: the kernel may be reading a large model, or compiling."""
    step_silence_seconds: float = 1800.0
    """Without an event from the first step on."""


class Pulse:
    """Notices that a trainer has gone silent: by its events file, and by this machine's own monotonic clock. A database that does not
    answer, a clock that is set and a machine that sleeps make nobody silent."""

    def __init__(self, events: Path, patience: Patience) -> None:
        self._events, self._patience = events, patience
        self._size_bytes = -1
        self._heard_at = time.monotonic()
        self.step_seconds: float | None = None
        """What the attempt's last step took; None before its first."""

    @property
    def limit_seconds(self) -> float:
        """How long it may be silent now."""
        if self.step_seconds is None:
            return self._patience.start_silence_seconds
        return max(self._patience.step_silence_seconds, STEPS_OF_SILENCE * self.step_seconds)

    def is_lost(self) -> bool:
        """Whether it has been silent for too long; call it every now and then."""
        size = self._events.stat().st_size if self._events.exists() else 0
        if size != self._size_bytes:
            self._size_bytes, self._heard_at = size, time.monotonic()
        return time.monotonic() - self._heard_at > self.limit_seconds
