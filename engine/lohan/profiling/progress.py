"""Tells how far a measurement is, and how long it still takes judging by what was measured already."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ProfileProgress:
    """How far a profile is."""

    what: str
    """What is measured now; empty at the end."""
    fraction: float
    """Of all that is measured, done."""
    seconds_left: float | None
    """None: nothing is known yet."""
    note: str = ""
    """A sentence about the figures: why one is missing, or what it stands for."""


OnProgress = Callable[[ProfileProgress], None]


class Meter:
    """Counts stages by the time each was expected to take.

    Args:
        expected: of each stage in order, in seconds, or in any unit where `in_seconds` is False.
        in_seconds: whether an estimate can be given before the first stage has ended.
    """

    def __init__(self, expected: Sequence[float], on_progress: OnProgress | None, *, in_seconds: bool = True) -> None:
        self._expected, self._on_progress, self._in_seconds = list(expected), on_progress, in_seconds
        self._ended = 0
        self._share = 0.0
        self._what = ""
        self._begin = time.monotonic()

    def begin(self, what: str) -> None:
        """A stage begins; the one before it has ended."""
        self._what = what
        self._tell()

    def advance(self, share: float) -> None:
        """So much of the stage is done, 0 to 1."""
        self._share = share
        self._tell()

    def end(self) -> None:
        """The stage that was begun has ended."""
        self._ended, self._share = self._ended + 1, 0.0
        if self._ended == len(self._expected):
            self._what = ""
            self._tell()

    def leave_out(self, sentence: str) -> None:
        """The next stage is not begun: a note says why, and its time is no longer waited for."""
        self._expected[self._ended] = 0.0
        self.note(sentence)
        self.end()

    def note(self, sentence: str) -> None:
        self._tell(sentence)

    @property
    def _done(self) -> float:
        """Of what was expected."""
        current = self._expected[self._ended] if self._ended < len(self._expected) else 0.0
        return sum(self._expected[: self._ended]) + self._share * current

    def _seconds_left(self) -> float | None:
        left = sum(self._expected) - self._done
        if self._done:
            return (time.monotonic() - self._begin) / self._done * left
        return left if self._in_seconds else None

    def _tell(self, note: str = "") -> None:
        if self._on_progress is not None:
            total = sum(self._expected)
            fraction = self._done / total if total else 1.0
            self._on_progress(ProfileProgress(self._what, fraction, self._seconds_left(), note))
