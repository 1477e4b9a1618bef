"""Host memory for what moves: page-aligned tensors of exactly the size asked for, from slabs that are used again, on one account.

A *slab* is one mapping: page aligned, huge-page advised and spread over the machine's NUMA nodes from 2 MiB on, registered with CUDA
where it is to be pinned, and with io_uring where files are read into it. torch's own pinned allocator rounds up to powers of two, which
wastes up to half; a slab here is the size asked for, rounded up to a page.
"""

from __future__ import annotations

import mmap
import sys
import threading
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import TYPE_CHECKING, Self

from lohan._native import AlignedBuffer
from lohan.errors import CapacityError
from lohan.units import format_bytes

if TYPE_CHECKING:
    import torch

    from lohan.memory.store import Store

LARGEST_WASTE = 1 / 8
"""Of a slab that is used again, at most this part lies idle behind the pages of the tensor it serves."""

_MOST_HOLDERS_NAMED = 4


class Paging(StrEnum):
    """What the system may do with the memory."""

    PAGEABLE = "pageable"
    """Ordinary memory, for the CPU and for file I/O."""
    PINNED = "pinned"
    """Registered with CUDA: copies to and from the GPU run asynchronously at full speed. Registering takes half a second per GB."""

    @classmethod
    def for_copies_with(cls, device: torch.device) -> Paging:
        """What memory needs to be for copies to and from `device`."""
        return cls.PINNED if device.type == "cuda" else cls.PAGEABLE


@dataclass(frozen=True, slots=True)
class Holding:
    """What one holder has of an arena, in bytes of slabs."""

    holder: str
    bytes: int
    peak_bytes: int
    """The most it has had at once."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """An arena's account at one moment, in bytes of slabs."""

    budget_bytes: int | None
    """What holdings and idle slabs may come to; None: whatever the machine has."""
    holdings: tuple[Holding, ...]
    """Largest first; those that have given everything back stay, with their peak."""
    idle_bytes: int
    """Given back, and kept to be used again."""
    peak_bytes: int
    """The most that was mapped at once, idle slabs included."""

    @property
    def held_bytes(self) -> int:
        return sum(holding.bytes for holding in self.holdings)

    def __str__(self) -> str:
        """Who holds what, in words."""
        held = [f"{holding.holder} {format_bytes(holding.bytes)}" for holding in self.holdings if holding.bytes]
        if len(held) > _MOST_HOLDERS_NAMED:
            held[_MOST_HOLDERS_NAMED - 1 :] = [f"{len(held) - _MOST_HOLDERS_NAMED + 1} more"]
        return ", ".join(held) or "nobody"


class _Slab:
    def __init__(self, size_bytes: int, paging: Paging, moved_by: Store | None) -> None:
        """Raises MemoryError when the system refuses the memory, or CUDA to pin it."""
        self.buffer = AlignedBuffer(size_bytes)
        self.size_bytes = size_bytes
        self.paging = paging
        self.moved_by = moved_by
        self.holder = ""
        # A refusal (no io_uring, or too little memory may be locked) only costs what pinning for each transfer costs.
        self._registered = moved_by.register(self.buffer) if moved_by is not None else None
        self._own_references = self._references()
        if paging is Paging.PINNED:
            _register(self.buffer)

    def in_use(self) -> bool:
        """Whether a tensor still refers to the memory: each one's storage refers to the buffer."""
        return self._references() > self._own_references

    def release(self) -> None:
        """Unpin. The memory goes with the last reference to the buffer."""
        self._registered = None
        if self.paging is Paging.PINNED:
            _unregister(self.buffer)

    def _references(self) -> int:
        return sys.getrefcount(self.buffer)


class Arena:
    """Allocates host tensors, knows who holds them, and keeps their memory until it is closed. Thread-safe.

    A slab that was given back serves a later request of the same paging and store if at most `LARGEST_WASTE` of it would lie idle; the
    smallest such slab is taken. Idle slabs go back to the system when the budget or the machine has no room for a new one.

    Args:
        budget_bytes: the most that may be mapped at once; None leaves it to the machine.
    """

    def __init__(self, *, budget_bytes: int | None = None) -> None:
        self._budget_bytes = budget_bytes
        self._lock = threading.Lock()
        self._held: dict[int, _Slab] = {}
        self._idle: list[_Slab] = []
        self._holdings: Counter[str] = Counter()
        self._peaks: Counter[str] = Counter()
        self._mapped_bytes = 0
        self._peak_bytes = 0

    @property
    def ledger(self) -> Ledger:
        """Who holds what, now."""
        with self._lock:
            return self._account()

    def allocate(
        self, elements: int, dtype: torch.dtype, *, holder: str, paging: Paging = Paging.PAGEABLE, moved_by: Store | None = None
    ) -> torch.Tensor:
        """A page-aligned 1-D tensor on the CPU. Its contents are undefined: zero in a new slab, an earlier holder's in a used one.

        Args:
            elements: its length.
            holder: who it is for, in words that a user understands; the ledger adds up by it.
            moved_by: whose transfers read and write it: the kernel pins it for them once, where it may, instead of each time.

        Raises:
            CapacityError: the budget is used up, the system refuses the memory, or CUDA refuses to pin it.
        """
        import torch
        from torch.utils.dlpack import from_dlpack

        if elements == 0:
            return torch.empty(0, dtype=dtype)
        need_bytes = elements * dtype.itemsize
        with self._lock:
            slab = self._reuse(need_bytes, paging, moved_by) or self._map(need_bytes, paging, moved_by, holder)
            slab.holder = holder
            self._held[slab.buffer.address] = slab
            self._holdings[holder] += slab.size_bytes
            self._peaks[holder] = max(self._peaks[holder], self._holdings[holder])
            return from_dlpack(slab.buffer.array())[:need_bytes].view(dtype)

    def free(self, tensor: torch.Tensor) -> None:
        """Give back what `allocate` returned. The memory is used again once no tensor refers to it any more.

        Raises:
            ValueError: the tensor does not begin where one begins that this arena gave out, or was given back already.
        """
        if tensor.numel() == 0:
            return
        with self._lock:
            slab = self._held.pop(tensor.data_ptr(), None)
            if slab is None:
                raise ValueError("the tensor is none that this arena gave out and has not got back")
            self._holdings[slab.holder] -= slab.size_bytes
            self._idle.append(slab)

    def close(self) -> None:
        """Unpin the memory and give it back; what a tensor still refers to stays until the tensor goes. No copy may be under way."""
        with self._lock:
            for slab in (*self._held.values(), *self._idle):
                slab.release()
            self._held.clear()
            self._idle.clear()
            self._holdings = Counter(dict.fromkeys(self._holdings, 0))
            self._mapped_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _account(self) -> Ledger:
        holdings = [Holding(holder, size_bytes, self._peaks[holder]) for holder, size_bytes in self._holdings.items()]
        return Ledger(
            budget_bytes=self._budget_bytes,
            holdings=tuple(sorted(holdings, key=lambda holding: (-holding.bytes, holding.holder))),
            idle_bytes=sum(slab.size_bytes for slab in self._idle),
            peak_bytes=self._peak_bytes,
        )

    def _reuse(self, need_bytes: int, paging: Paging, moved_by: Store | None) -> _Slab | None:
        """The smallest idle slab that serves, no longer idle."""
        fitting = [
            slab
            for slab in self._idle
            if slab.paging is paging
            and slab.moved_by is moved_by
            and slab.size_bytes >= need_bytes
            and _round_up(need_bytes) >= (1 - LARGEST_WASTE) * slab.size_bytes
            and not slab.in_use()
        ]
        best = min(fitting, key=lambda slab: slab.size_bytes, default=None)
        if best is not None:
            self._idle.remove(best)
        return best

    def _map(self, need_bytes: int, paging: Paging, moved_by: Store | None, holder: str) -> _Slab:
        """A new slab, within the budget."""
        size_bytes = _round_up(need_bytes)
        if self._budget_bytes is not None:
            self._give_up_idle(self._mapped_bytes + size_bytes - self._budget_bytes)
            if self._mapped_bytes + size_bytes > self._budget_bytes:
                raise self._over_budget(holder, size_bytes, self._budget_bytes)
        try:
            slab = _Slab(size_bytes, paging, moved_by)
        except MemoryError:
            self._give_up_idle(size_bytes)
            try:
                slab = _Slab(size_bytes, paging, moved_by)
            except MemoryError as error:
                raise self._refused(holder, size_bytes, str(error)) from error
        self._mapped_bytes += size_bytes
        self._peak_bytes = max(self._peak_bytes, self._mapped_bytes)
        return slab

    def _give_up_idle(self, excess_bytes: int) -> None:
        """Return idle slabs to the system, the largest first, until `excess_bytes` are returned or none is left."""
        for slab in sorted(self._idle, key=lambda slab: -slab.size_bytes):
            if excess_bytes <= 0:
                return
            if not slab.in_use():
                slab.release()
                self._idle.remove(slab)
                self._mapped_bytes -= slab.size_bytes
                excess_bytes -= slab.size_bytes

    def _over_budget(self, holder: str, need_bytes: int, budget_bytes: int) -> CapacityError:
        have_bytes = budget_bytes - self._mapped_bytes
        return self._capacity_error(
            f"{holder} needs {format_bytes(need_bytes)} of host memory, {format_bytes(have_bytes)} of the {format_bytes(budget_bytes)} that"
            " may be used are left",
            need_bytes,
            have_bytes,
            "Raise engine.host_memory_bytes if it is set, free memory on this machine, or use a smaller model.",
        )

    def _refused(self, holder: str, need_bytes: int, reason: str) -> CapacityError:
        import psutil

        have_bytes = psutil.virtual_memory().available
        free = format_bytes(have_bytes)
        return self._capacity_error(
            f"{holder} needs {format_bytes(need_bytes)} of host memory, which cannot be had ({free} are free): {reason}",
            need_bytes,
            have_bytes,
            "Free memory, raise this process's limits (`ulimit -v`, `ulimit -l`), or lower engine.host_memory_bytes.",
        )

    def _capacity_error(self, message: str, need_bytes: int, have_bytes: int, remedy: str) -> CapacityError:
        account = self._account()
        holders = {holding.holder: holding.bytes for holding in account.holdings if holding.bytes}
        return CapacityError(
            f"{message}; held by {account}",
            need_bytes=need_bytes,
            have_bytes=have_bytes,
            holders=holders,
            place="host memory",
            remedy=remedy,
        )


def _round_up(size_bytes: int) -> int:
    return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _register(buffer: AlignedBuffer) -> None:
    import torch

    status = torch.cuda.cudart().cudaHostRegister(buffer.address, buffer.size_bytes, 0)  # type: ignore[no-untyped-call]
    if int(status) != 0:
        raise MemoryError(f"CUDA cannot pin it (cudaHostRegister: {status})")


def _unregister(buffer: AlignedBuffer) -> None:
    import torch

    status = torch.cuda.cudart().cudaHostUnregister(buffer.address)  # type: ignore[no-untyped-call]
    assert int(status) == 0, f"cudaHostUnregister of memory that was registered: {status}"
