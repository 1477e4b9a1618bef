"""What a session tells of itself in numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lohan.streaming.clipping import StepStatistics


@dataclass(frozen=True, slots=True)
class Statistics:
    """What a session has done so far; `last_step` is complete once `Session.wait_gradients` or `Session.wait` has returned."""

    steps: int
    """Updates, skipped ones included; those whose record is written are `committed_steps`."""
    committed_steps: int
    last_step: StepStatistics | None
    clipped_steps: int
    """Steps in which gradients were scaled down."""
    skipped_steps: int
    """Steps that were left out whole because a gradient was NaN or infinite."""
    speculated_steps: int
    """Steps whose updates began before it was known whether they would be clipped."""
    redone_steps: int
    """Those of them that were taken back, and done again or left out."""
    bytes_read: int
    """From the state files."""
    bytes_written: int
    """To the state files, the initial load included."""
    unit_loads: int
    """Units copied into a parameter slot."""
    full_logits_fallbacks: int
    """Losses that were computed through a tensor of batch x sequence x vocabulary."""
    device_peak_bytes: int
    """Most GPU memory that tensors held at once; 0 on the CPU, where `host_peak_bytes` counts everything."""
    host_peak_bytes: int
    """Most memory the process held at once."""

    @property
    def clip_rate(self) -> float:
        """The part of all steps in which gradients were scaled down; 0 before the first."""
        return self.clipped_steps / self.steps if self.steps else 0.0
