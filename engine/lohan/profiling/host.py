"""How fast the CPU copies, updates, sums up and checks, with the native core and the memory that the engine uses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from lohan._native import AdamSegment, ThreadPool, adamw_update, checksum, gradient_norm
from lohan.errors import CapacityError
from lohan.hardware.profile import UpdateRate
from lohan.memory.arena import Arena
from lohan.profiling.timing import Effort, rate, timed
from lohan.states.layout import UNIT_ALIGNMENT
from lohan.states.streams import trainable_streams
from lohan.streaming.chunk_pipeline import make_adam_state
from lohan.units import MIB, format_bytes

if TYPE_CHECKING:
    from lohan.hardware.profile import Measured
    from lohan.planning.state_form import StateForm

_HOLDER = "profiler"
_PART_OF_FREE_MEMORY = 4
_LEAST_BYTES = 4 * MIB
# An update's arrays: states of at most 12 bytes a parameter and gradients of at most 4.
_UPDATE_BYTES_PER_ELEMENT = 16
_HYPERPARAMETERS = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "weight_decay": 0.01}


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """torch computes with so many CPU threads meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class HostMeasurements:
    """What the CPU does with arrays that no cache holds.

    Args:
        pool: the threads of the native core, as many as a run has.
        free_bytes: of host memory; a quarter is used at most.

    Raises:
        CapacityError: too little is free.
    """

    def __init__(self, pool: ThreadPool, effort: Effort, *, free_bytes: int) -> None:
        self._pool, self._effort = pool, effort
        self._most_bytes = free_bytes // _PART_OF_FREE_MEMORY
        if self._most_bytes < _LEAST_BYTES:
            need_bytes = _LEAST_BYTES * _PART_OF_FREE_MEMORY
            raise CapacityError(
                f"a measurement needs {format_bytes(need_bytes)} of free memory, {format_bytes(free_bytes)} are free",
                need_bytes=need_bytes,
                have_bytes=free_bytes,
                place="host memory",
                remedy="Free memory on this machine, and measure again.",
            )

    def memory(self) -> Measured:
        """Bytes a second that a copy reads and writes, together."""
        size_bytes = min(self._effort.copy_bytes, self._most_bytes // 2)
        with Arena() as arena:
            source, target = (arena.allocate(size_bytes // 4, torch.float32, holder=_HOLDER).fill_(1.0) for _ in range(2))
            return rate(2 * source.nbytes, timed(lambda: target.copy_(source)), self._effort)

    def update(self, form: StateForm) -> UpdateRate:
        """Parameters a second that AdamW updates in states of one form, with gradients as the engine has them for it."""
        elements = self._elements
        gradient_type = torch.bfloat16 if form.is_split else torch.float32
        with Arena() as arena:
            gradients = arena.allocate(elements, gradient_type, holder=_HOLDER).fill_(1e-3)
            streams = {
                stream: arena.allocate(stream.length(elements), stream.dtype, holder=_HOLDER).zero_() for stream in trainable_streams(form)
            }
            state, segments = make_adam_state(streams), [AdamSegment(0, elements, step=1, **_HYPERPARAMETERS)]
            measured = rate(elements, timed(lambda: adamw_update(segments, gradients, state, pool=self._pool)), self._effort)
        return UpdateRate(form=str(form), threads=self._pool.threads, elements_per_second=measured)

    def gradient_norm(self, gradient_type: torch.dtype) -> Measured:
        """Bytes a second of gradients that are read for their norm."""
        with Arena() as arena:
            gradients = arena.allocate(self._elements, gradient_type, holder=_HOLDER).fill_(1e-3)
            return rate(gradients.nbytes, timed(lambda: gradient_norm(gradients, pool=self._pool)), self._effort)

    def checksum(self) -> Measured:
        """Bytes a second of states whose CRC-32C is taken."""
        with Arena() as arena:
            states = arena.allocate(self._elements, torch.float32, holder=_HOLDER).fill_(1.0)
            return rate(states.nbytes, timed(lambda: checksum(states, pool=self._pool)), self._effort)

    @property
    def _elements(self) -> int:
        return min(self._effort.elements, self._most_bytes // _UPDATE_BYTES_PER_ELEMENT) // UNIT_ALIGNMENT * UNIT_ALIGNMENT
