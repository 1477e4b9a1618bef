"""In which form a run keeps its model states, and how many bytes that takes. Pure numbers."""

from __future__ import annotations

from enum import StrEnum

from lohan.config import Precision, States

SCALE_BLOCK = 256
"""Elements of an 8-bit moment that share one fp32 scale."""


class StateForm(StrEnum):
    """What is kept per trainable parameter."""

    FP32 = "fp32"
    """Master weights, which the device computes with, and two moments: 12 bytes."""
    SPLIT = "split"
    """Master weights as their bf16 half, which the device computes with, and a 16-bit remainder; two fp32 moments: 12 bytes."""
    FP32_8BIT = "fp32-8bit"
    """fp32 master weights, and two moments as 8-bit codes with a scale per 256: 6.03 bytes."""
    SPLIT_8BIT = "split-8bit"
    """A split master and 8-bit moments: 6.03 bytes."""

    @classmethod
    def of(cls, precision: Precision, states: States) -> StateForm:
        """The form that `engine.states` chooses for a run in `precision`."""
        if precision is Precision.FP32:
            return cls.FP32_8BIT if states is States.EIGHT_BIT else cls.FP32
        return cls.SPLIT_8BIT if states is States.EIGHT_BIT else cls.SPLIT

    @property
    def is_split(self) -> bool:
        return self in (StateForm.SPLIT, StateForm.SPLIT_8BIT)

    @property
    def has_8bit_moments(self) -> bool:
        return self in (StateForm.FP32_8BIT, StateForm.SPLIT_8BIT)

    def moments_bytes(self, parameters: int) -> int:
        """Both moments of `parameters` parameters, scales counted."""
        return 2 * (parameters + 4 * -(-parameters // SCALE_BLOCK)) if self.has_8bit_moments else 8 * parameters

    def state_bytes(self, parameters: int) -> int:
        """All states of `parameters` trainable parameters: what an update reads and writes."""
        return 4 * parameters + self.moments_bytes(parameters)
