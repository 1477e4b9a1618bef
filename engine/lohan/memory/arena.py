"""Host memory for what moves: page-aligned tensors of exactly the size asked for, huge-page advised, pinned where there is a GPU."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self

from lohan._native import AlignedBuffer
from lohan.errors import CapacityError
from lohan.units import format_bytes

if TYPE_CHECKING:
    import torch


class Arena:
    """Allocates host tensors and holds their memory until it is closed. Not thread-safe.

    torch's own pinned allocator rounds up to powers of two, which wastes up to half; here a tensor takes its bytes rounded up to a page.

    Args:
        pinned: register the memory with CUDA, so that copies to and from the GPU run asynchronously at full speed.
    """

    def __init__(self, *, pinned: bool = False) -> None:
        self._pinned = pinned
        self._buffers: list[AlignedBuffer] = []

    @property
    def held_bytes(self) -> int:
        """Bytes allocated and not yet given back by `close`."""
        return sum(buffer.size_bytes for buffer in self._buffers)

    def allocate(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """A zero-filled, page-aligned 1-D tensor on the CPU.

        Raises:
            CapacityError: the system refuses the memory, or CUDA refuses to pin it.
        """
        import torch
        from torch.utils.dlpack import from_dlpack

        if elements == 0:
            return torch.empty(0, dtype=dtype)
        size_bytes = elements * dtype.itemsize
        try:
            buffer = AlignedBuffer(size_bytes)
            if self._pinned:
                _register(buffer)
        except MemoryError as error:
            raise _out_of_memory(size_bytes, str(error)) from error
        self._buffers.append(buffer)
        return from_dlpack(buffer.array()).view(dtype)

    def close(self) -> None:
        """Unpin the memory and give it back; what a tensor still refers to stays until the tensor goes. No copy may be under way."""
        buffers, self._buffers = self._buffers, []
        if self._pinned:
            for buffer in buffers:
                _unregister(buffer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _register(buffer: AlignedBuffer) -> None:
    import torch

    status = torch.cuda.cudart().cudaHostRegister(buffer.address, buffer.size_bytes, 0)  # type: ignore[no-untyped-call]
    if int(status) != 0:
        raise MemoryError(f"CUDA cannot pin it (cudaHostRegister: {status})")


def _unregister(buffer: AlignedBuffer) -> None:
    import torch

    status = torch.cuda.cudart().cudaHostUnregister(buffer.address)  # type: ignore[no-untyped-call]
    assert int(status) == 0, f"cudaHostUnregister of memory that was registered: {status}"


def _out_of_memory(need_bytes: int, reason: str) -> CapacityError:
    import psutil

    free = psutil.virtual_memory().available
    return CapacityError(
        f"{format_bytes(need_bytes)} of host memory cannot be had, {format_bytes(free)} are free: {reason}",
        need_bytes=need_bytes,
        have_bytes=free,
        remedy="Free memory, raise this process's limits (`ulimit -v`, `ulimit -l`), or lower engine.host_memory_bytes.",
    )
