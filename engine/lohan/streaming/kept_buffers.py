"""Host memory for kept activations: a buffer for each output that waits in RAM, and a few that those for the drive pass through."""

from __future__ import annotations

import math
import threading
from collections.abc import Hashable
from typing import TYPE_CHECKING

import torch

from lohan.memory.arena import Arena, Paging
from lohan.planning.footprint import KEPT_STAGING_BUFFERS
from lohan.planning.kept_footprint import KEPT, KEPT_ON_THEIR_WAY
from lohan.streaming.device import Event

if TYPE_CHECKING:
    from lohan.memory.store import Store
    from lohan.streaming.pending import Failure


class HostBuffer:
    """Bytes in host memory; `last_use` must be waited for before they are overwritten."""

    def __init__(self, memory: torch.Tensor, device: torch.device) -> None:
        self.memory = memory
        self.last_use = Event(device)


class KeptBuffers:
    """One buffer for each output, used again by the next step. Used by the threads that run forward and backward, never two at once.

    Where two forwards share a backward an output has a second buffer meanwhile.
    """

    def __init__(self, arena: Arena, device: torch.device, *, fill_with_nan: bool) -> None:
        self._arena, self._device, self._fill_with_nan = arena, device, fill_with_nan
        self._free: dict[Hashable, HostBuffer] = {}

    def take(self, key: Hashable, need_bytes: int, room_bytes: int) -> HostBuffer:
        """A buffer of at least `need_bytes`; a new one has `room_bytes`, what the output may need at most.

        Raises:
            CapacityError: the arena has no room.
        """
        buffer = self._free.pop(key, None)
        if buffer is not None and buffer.memory.numel() < need_bytes:
            self._discard(buffer)
            buffer = None
        if buffer is None:
            size = max(need_bytes, room_bytes)
            memory = self._arena.allocate(size, torch.uint8, holder=KEPT, paging=Paging.for_copies_with(self._device))
            buffer = HostBuffer(memory, self._device)
        return buffer

    def give_back(self, key: Hashable, buffer: HostBuffer) -> None:
        """The buffer may be overwritten once its `last_use` has come."""
        if self._fill_with_nan:
            buffer.last_use.synchronize()
            buffer.memory.fill_(0xFF)  # as a number of any precision: NaN
        if key in self._free:
            self._discard(buffer)
        else:
            self._free[key] = buffer

    def free(self) -> None:
        """Give all memory back; no copy is under way."""
        for buffer in self._free.values():
            self._arena.free(buffer.memory)
        self._free.clear()

    def _discard(self, buffer: HostBuffer) -> None:
        buffer.last_use.synchronize()
        self._arena.free(buffer.memory)


class StagingBuffers:
    """A few buffers as large as the largest output that passes through. Thread-safe.

    They are made when the first output comes, and made anew when a larger one does: within the first forward.
    """

    def __init__(self, arena: Arena, store: Store, failure: Failure, device: torch.device) -> None:
        self._arena, self._store, self._failure, self._device = arena, store, failure, device
        self._size = 0
        self._free: list[HostBuffer] = []
        self._changed = threading.Condition()
        failure.wake(self._changed)

    def prepare(self, size_bytes: int) -> None:
        """Make all buffers at least this large; waits for those in use.

        Raises:
            CapacityError: the arena has no room.
            EngineError: a background stage failed.
        """
        with self._changed:
            if size_bytes <= self._size:
                return
            if self._size:
                self._changed.wait_for(lambda: len(self._free) == KEPT_STAGING_BUFFERS or self._failure.failed)
                self._failure.check()
            self._free_all()
            self._size = size_bytes
            paging = Paging.for_copies_with(self._device)
            for _ in range(KEPT_STAGING_BUFFERS):
                memory = self._arena.allocate(size_bytes, torch.uint8, holder=KEPT_ON_THEIR_WAY, paging=paging, moved_by=self._store)
                self._free.append(HostBuffer(memory, self._device))

    def take(self) -> HostBuffer:
        """Wait for a buffer; its `last_use` may still lie ahead.

        Raises:
            EngineError: a background stage failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: bool(self._free) or self._failure.failed)
            self._failure.check()
            return self._free.pop(0)

    def give_back(self, buffer: HostBuffer) -> None:
        with self._changed:
            self._free.append(buffer)
            self._changed.notify_all()

    def free(self) -> None:
        """Give all memory back; no copy and no transfer is under way."""
        with self._changed:
            self._free_all()
            self._size = 0

    def _free_all(self) -> None:
        for buffer in self._free:
            buffer.last_use.synchronize()
            self._arena.free(buffer.memory)
        self._free.clear()


def room_for(size_bytes: int, tokens: int, most_tokens: int) -> int:
    """Of an output of `size_bytes` for so many tokens, what it may need for the most that a micro-batch has: shorter batches come first
    as likely as not, and buffers should be made once."""
    return size_bytes if tokens >= most_tokens else math.ceil(size_bytes * most_tokens / tokens)
