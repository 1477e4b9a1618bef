"""Gradients of several backwards in one step: which backwards only add, and the fp32 sums in host memory that they add to."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from lohan.memory.arena import Arena
    from lohan.states.layout import UnitLayout

_lock = threading.Lock()
_depth = 0


@contextmanager
def accumulate() -> Iterator[None]:
    """A backward that begins inside the block only adds to the step's gradients; the first one outside it adds and updates.

    `with lohan.accumulate(): loss.backward()`. Sums are fp32, in 4 bytes of host memory a trainable parameter, taken at the first use.
    As in plain PyTorch the gradients are those of the sum of the losses. For the mean over all tokens of a step, divide each
    micro-batch's loss, summed over its tokens, by the tokens of the whole step: transformers models take that number as
    `num_items_in_batch`.

    The block counts for every session of the process and for all its threads: backwards may run in threads of autograd's own.
    """
    global _depth  # autograd's threads see neither thread-local nor context variables of the caller
    with _lock:
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1


def accumulating() -> bool:
    """Whether a block of `accumulate` is open."""
    return _depth > 0


class GradientSums:
    """fp32 sums per unit, over the backwards of one step. Used by the optimizer's thread only."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._buffers: dict[int, torch.Tensor] = {}
        self._touched: dict[int, frozenset[int]] = {}

    def add(self, layout: UnitLayout, gradients: torch.Tensor, touched: frozenset[int]) -> None:
        """Add the `touched` parameters' gradients (flat, as long as the unit's trainable part); the rest of them is not looked at.

        Raises:
            CapacityError: there is no host memory for the unit's sum.
        """
        if layout.index not in self._buffers:
            self._buffers[layout.index] = self._arena.allocate(layout.trainable_elements, torch.float32, holder="accumulated gradients")
        total, before = self._buffers[layout.index], self._touched.get(layout.index, frozenset())
        for index in touched:
            place = layout.parameters[index]
            part = slice(place.offset, place.offset + place.elements)
            if index in before:
                total[part].add_(gradients[part])
            else:
                total[part].copy_(gradients[part])
        self._touched[layout.index] = before | touched

    def holds(self, unit: int) -> bool:
        """Whether the unit has a sum in this step."""
        return unit in self._touched

    def take(self, unit: int) -> tuple[torch.Tensor, frozenset[int]]:
        """The unit's sum, and the parameters that have one. It stays as it is until the unit's next `add`."""
        return self._buffers[unit], self._touched.pop(unit)
