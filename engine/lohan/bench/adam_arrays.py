"""What the optimizers of `lohan bench adam` work on: the same memory for all of them, so that nobody's pages lie better."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch.utils.dlpack import from_dlpack

from lohan._native import AdamState, AlignedBuffer
from lohan.bench.adam import Case

SCALED_BLOCK = 256


@dataclass(frozen=True)
class Arrays:
    """1-D tensors on the CPU, page aligned, `elements` long unless said otherwise.

    Systems take turns, so they may share: whoever steps finds what the others left, which costs no system more than another.
    """

    HYPERPARAMETERS: ClassVar[dict[str, float]] = {
        "learning_rate": 1e-4,
        "beta1": 0.9,
        "beta2": 0.999,
        "epsilon": 1e-8,
        "weight_decay": 0.01,
    }

    gradient: torch.Tensor
    """float32; the values of `half_gradient`, so that widening it again changes nothing."""
    half_gradient: torch.Tensor
    """bfloat16"""
    master: torch.Tensor
    """float32"""
    first_moment: torch.Tensor
    """float32"""
    second_moment: torch.Tensor
    """float32"""
    weights: torch.Tensor
    """bfloat16"""
    remainder: torch.Tensor
    """int16: what `weights` lacks of an fp32 master"""
    codes: tuple[torch.Tensor, torch.Tensor]
    """uint8, of both moments"""
    scales: tuple[torch.Tensor, torch.Tensor]
    """float32, one for each 256 elements of both moments"""
    second: dict[str, torch.Tensor]
    """Of the engine's state, by its names: where `second-place` writes"""
    reference: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    """float32, of the bandwidth reference alone"""

    @property
    def elements(self) -> int:
        return self.gradient.numel()

    @classmethod
    def allocate(cls, elements: int) -> Self:
        """Arrays as early in a training: weights of a normal distribution, gradients of about 1e-3, moments of zero."""
        blocks = -(-elements // SCALED_BLOCK)
        generator = torch.Generator().manual_seed(0)
        gradient, master = _array(elements, torch.float32), _array(elements, torch.float32)
        half_gradient, weights = _array(elements, torch.bfloat16), _array(elements, torch.bfloat16)
        half_gradient.copy_(gradient.normal_(0, 1e-3, generator=generator))
        gradient.copy_(half_gradient)
        weights.copy_(master.normal_(generator=generator))
        return cls(
            gradient=gradient,
            half_gradient=half_gradient,
            master=master,
            first_moment=_array(elements, torch.float32),
            second_moment=_array(elements, torch.float32),
            weights=weights,
            remainder=_array(elements, torch.int16),
            codes=(_array(elements, torch.uint8), _array(elements, torch.uint8)),
            scales=(_array(blocks, torch.float32), _array(blocks, torch.float32)),
            second={
                "weights": _array(elements, torch.bfloat16),
                "remainder": _array(elements, torch.int16),
                "first_moment": _array(elements, torch.float32),
                "second_moment": _array(elements, torch.float32),
            },
            reference=(_array(elements, torch.float32), _array(elements, torch.float32), _array(elements, torch.float32)),
        )

    def state(self, case: Case) -> AdamState:
        """The arrays that LoHan's optimizer updates in a case."""
        if case is Case.PLAIN_FP32:
            return AdamState(master=self.master, first_moment=self.first_moment, second_moment=self.second_moment)
        if case in (Case.ENGINE, Case.SECOND_PLACE):
            moments = {"first_moment": self.first_moment, "second_moment": self.second_moment}
            return AdamState(weights=self.weights, remainder=self.remainder, **moments)
        return AdamState(
            weights=self.weights,
            remainder=self.remainder,
            first_moment=self.codes[0],
            first_scales=self.scales[0],
            second_moment=self.codes[1],
            second_scales=self.scales[1],
        )

    def second_place(self) -> AdamState:
        """Where `second-place` writes what it makes of `state`."""
        return AdamState(**self.second)


def _array(elements: int, dtype: torch.dtype) -> torch.Tensor:
    # Torch's threads touch the pages first: on a machine with several memory nodes they lie where its threads run, if anybody's do.
    return from_dlpack(AlignedBuffer(elements * dtype.itemsize).array()).view(dtype).zero_()
