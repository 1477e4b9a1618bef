"""Which of a chunk's two slots holds what: the bookkeeping of durability `step` and `snapshot`. No files, no bytes.

A step writes to the slot that the last committed step does not use, so that a crash at any instant leaves that step whole; steps that
follow it without being committed write to the same slot. The unit of it is one stream of one chunk (*part*), since these are written
one by one.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from lohan.states.streams import Stream

Part = tuple[int, int, Stream]
"""Unit, chunk, stream."""


class SlotTable:
    """Slot and CRC-32C of every part, as committed and as of now. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._committed: dict[Part, tuple[int, int]] = {}
        self._written: dict[Part, tuple[int, int]] = {}
        self._unverified: dict[Part, int] = {}

    def restore(self, parts: Mapping[Part, tuple[int, int]]) -> None:
        """Take a record's slots and sums; none of them has been compared with the files yet."""
        with self._lock:
            self._committed = dict(parts)
            self._written.clear()
            self._unverified = {part: slot for part, (slot, _) in parts.items()}

    def current(self, part: Part) -> int:
        """The slot that holds the newest bytes."""
        with self._lock:
            return self._current(part)[0]

    def write(self, part: Part, checksum: int) -> int:
        """The slot that the part's next bytes go to; they are the newest from now on."""
        with self._lock:
            slot = 1 - self._committed[part][0] if part in self._committed else 0
            self._written[part] = (slot, checksum)
            if self._unverified.get(part) == slot:
                del self._unverified[part]
            return slot

    def expected(self, part: Part) -> int | None:
        """The sum that the part's newest bytes must be found to have; None where they need no look (any more)."""
        with self._lock:
            slot, checksum = self._current(part)
            return checksum if self._unverified.get(part) == slot else None

    def verified(self, part: Part) -> None:
        """The part's newest bytes have the expected sum."""
        with self._lock:
            self._unverified.pop(part, None)

    def checksum(self, part: Part) -> int:
        """The sum of the part's newest bytes."""
        with self._lock:
            return self._current(part)[1]

    def newest(self) -> dict[Part, tuple[int, int]]:
        """Slot and sum of every part, as a commit would make them."""
        with self._lock:
            return self._committed | self._written

    def commit(self) -> None:
        with self._lock:
            self._committed |= self._written
            self._written.clear()

    def rollback(self) -> list[Part]:
        """Forget what was written since the last commit; returns the parts that were."""
        with self._lock:
            parts = list(self._written)
            self._written.clear()
            return parts

    def _current(self, part: Part) -> tuple[int, int]:
        return self._written.get(part) or self._committed.get(part) or (0, 0)
