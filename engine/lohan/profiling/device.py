"""How fast a device copies and multiplies."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from lohan.errors import CapacityError
from lohan.memory.arena import Arena, Paging
from lohan.profiling.timing import Effort, rate, timed
from lohan.streaming.device import make_stream
from lohan.units import MIB, format_bytes

if TYPE_CHECKING:
    from lohan.hardware.profile import Measured

# Copies of less say more about their start than about the link.
_LEAST_COPY_BYTES = 4 * MIB
_PART_OF_FREE_MEMORY = 8
_LEAST_MATRIX_SIDE = 256
# What is over sooner is repeated: a launch takes microseconds, and clocks settle within milliseconds.
_LEAST_GPU_SECONDS = 0.02
_LEAST_MILLISECONDS = 1e-3

_Copy = tuple[Any, torch.Tensor, torch.Tensor]
"""Stream, target, source."""


def measure_copies(device: torch.device, effort: Effort, *, free_host_bytes: int) -> tuple[Measured, Measured, Measured]:
    """Bytes a second from page-locked host memory to a GPU, back, and each way while both go on.

    Args:
        free_host_bytes: an eighth of it is used at most.

    Raises:
        CapacityError: host or GPU have too little memory free, or CUDA refuses to pin it.
    """
    size_bytes = _copy_bytes(effort, min(free_host_bytes, _free_bytes(device)))
    with torch.cuda.device(device), Arena() as arena:
        pinned = [arena.allocate(size_bytes, torch.uint8, holder="profiler", paging=Paging.PINNED).zero_() for _ in range(2)]
        on_device = [torch.zeros(size_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
        to_device = (make_stream(device), on_device[0], pinned[0])
        to_host = (make_stream(device), pinned[1], on_device[1])
        torch.cuda.synchronize(device)
        one_way = [rate(size_bytes, partial(_copy_seconds, [copy]), effort, on_gpu=True) for copy in (to_device, to_host)]
        both = rate(size_bytes, partial(_copy_seconds, [to_device, to_host]), effort, on_gpu=True)
    return one_way[0], one_way[1], both


def measure_device_memory(device: torch.device, effort: Effort) -> Measured:
    """Bytes a second that a copy within a GPU reads and writes, together.

    Raises:
        CapacityError: the GPU has too little memory free.
    """
    size_bytes = _copy_bytes(effort, _free_bytes(device))
    source = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return _device_rate(2 * size_bytes, lambda: target.copy_(source), device, effort)


def measure_matmul(device: torch.device, dtype: torch.dtype, effort: Effort, *, free_bytes: int | None = None) -> Measured:
    """FLOP a second of a product of square matrices, two for each multiplication and addition.

    Args:
        free_bytes: of the device's memory; None asks the GPU.

    Raises:
        CapacityError: the device has too little memory free.
    """
    free_bytes = _free_bytes(device) if free_bytes is None else free_bytes
    side = effort.matrix_side if device.type == "cuda" else effort.matrix_side // 4
    while 3 * side * side * dtype.itemsize > free_bytes // 2:
        side //= 2
        if side < _LEAST_MATRIX_SIDE:
            raise _too_little(3 * _LEAST_MATRIX_SIDE**2 * dtype.itemsize * 2, free_bytes, device)
    generator = torch.Generator(device).manual_seed(0)
    # Numbers as in training: products of zeros take less power, and a GPU that is not held back by it is faster.
    left, right = (torch.randn(side, side, dtype=dtype, device=device, generator=generator) for _ in range(2))
    product = torch.empty_like(left)
    return _device_rate(2 * side**3, lambda: torch.mm(left, right, out=product), device, effort)


def _device_rate(amount: float, work: Callable[[], object], device: torch.device, effort: Effort) -> Measured:
    """How much a second `work` does, which keeps the device busy and does `amount`: on a GPU by the GPU's own clock."""
    if device.type != "cuda":
        return rate(amount, timed(work), effort)
    _gpu_seconds(work, device, 1)
    times = max(1, math.ceil(_LEAST_GPU_SECONDS / _gpu_seconds(work, device, 1)))
    return rate(amount * times, lambda: _gpu_seconds(work, device, times), effort, on_gpu=True)


def _gpu_seconds(work: Callable[[], object], device: torch.device, times: int) -> float:
    """Seconds between two events around so many calls."""
    with torch.cuda.device(device):
        begin, end = _timing_event(), _timing_event()
        begin.record()
        for _ in range(times):
            work()
        end.record()
        end.synchronize()
        return max(float(begin.elapsed_time(end)), _LEAST_MILLISECONDS) / 1e3


def _copy_seconds(copies: Sequence[_Copy]) -> float:
    """Seconds from the common start of copies on streams of their own to the end of the last."""
    begin = _timing_event()
    begin.record()
    ends = []
    for stream, target, source in copies:
        stream.wait_event(begin)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            end = _timing_event()
            end.record(stream)
            ends.append(end)
    for end in ends:
        end.synchronize()
    return max(float(begin.elapsed_time(end)) for end in ends) / 1e3


def _timing_event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _free_bytes(device: torch.device) -> int:
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return int(free_bytes)


def _copy_bytes(effort: Effort, free_bytes: int) -> int:
    size_bytes = min(effort.copy_bytes, free_bytes // _PART_OF_FREE_MEMORY // MIB * MIB)
    if size_bytes < _LEAST_COPY_BYTES:
        raise _too_little(_LEAST_COPY_BYTES * _PART_OF_FREE_MEMORY, free_bytes, None)
    return size_bytes


def _too_little(need_bytes: int, have_bytes: int, device: torch.device | None) -> CapacityError:
    where = "host or GPU" if device is None else str(device)
    return CapacityError(
        f"a measurement needs {format_bytes(need_bytes)} of free memory, {format_bytes(have_bytes)} are free",
        need_bytes=need_bytes,
        have_bytes=have_bytes,
        place=where,
        remedy="Free memory on this machine, and measure again.",
    )
