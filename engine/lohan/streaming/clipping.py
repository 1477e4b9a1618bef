"""What is known of a step's gradients before its update, and by what factor they are scaled."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lohan._native import ThreadPool, gradient_norm
from lohan.config import Clip, ClipUpdate, GradientBuffers, UpdateSchedule
from lohan.errors import ConfigError
from lohan.planning.schedule import DRIVES_CLIP_RATE, UpdateOrder, update_order

if TYPE_CHECKING:
    import torch

    from lohan.states.layout import UnitLayout

_EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_ adds it to the norm


@dataclass(frozen=True, slots=True)
class UpdateRules:
    """How a step's gradients become updates.

    Raises:
        ConfigError: the largest norm is not a positive number.
    """

    schedule: UpdateSchedule = UpdateSchedule.OPTIMIZED
    clip: Clip = Clip.NONE
    max_gradient_norm: float = 1.0
    clip_updates: ClipUpdate = ClipUpdate.AUTO
    gradient_buffers: GradientBuffers = GradientBuffers.AUTO
    first_clip_updates: ClipUpdate = ClipUpdate.DEFER
    """With `clip_updates` AUTO, what is done before it was seen how many steps are clipped."""
    speculated_clip_rate: float = DRIVES_CLIP_RATE
    """With `clip_updates` AUTO, updates are speculated while a smaller part of the last steps was clipped."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.max_gradient_norm) and self.max_gradient_norm > 0):
            raise ConfigError(
                f"max_gradient_norm is {self.max_gradient_norm}, expected a number above 0",
                place="max_gradient_norm",
                remedy='1.0 is usual; clip="none" leaves gradients as they are.',
            )

    @property
    def order(self) -> UpdateOrder:
        return update_order(self.schedule, self.clip, self.gradient_buffers)

    def scale(self, squared_norm: float) -> float:
        """The factor that clipping multiplies with, as torch.nn.utils.clip_grad_norm_ has it: at most 1."""
        return 1.0 if self.clip is Clip.NONE else min(1.0, self.max_gradient_norm / (math.sqrt(squared_norm) + _EPSILON))


@dataclass(frozen=True, slots=True)
class UnitNorm:
    """One unit's gradients as they arrived."""

    squared: float
    non_finite: int


@dataclass(frozen=True, slots=True)
class StepStatistics:
    """One step's gradients, before the update; `step` counts from 1."""

    step: int
    squared_gradient_norm: float
    """Sum of squares over all parameters, in fp64, before clipping."""
    non_finite: int
    """Gradient elements that are NaN or infinite; if there are any, the step was skipped whole."""
    clipped: bool = False
    """Whether any gradient was scaled down."""

    @property
    def gradient_norm(self) -> float:
        return float(self.squared_gradient_norm**0.5)

    @property
    def skipped(self) -> bool:
        return self.non_finite > 0


def measure(gradients: torch.Tensor, layout: UnitLayout, touched: Iterable[int], pool: ThreadPool) -> UnitNorm:
    """The norm over the `touched` parameters of a unit; what lies between them is undefined and not looked at."""
    squared, non_finite = 0.0, 0
    for index in sorted(touched):
        place = layout.parameters[index]
        result = gradient_norm(gradients[place.offset : place.offset + place.elements], pool=pool)
        squared += result.squared_norm
        non_finite += result.non_finite
    return UnitNorm(squared, non_finite)


def summarise(step: int, norms: Mapping[int, UnitNorm], rules: UpdateRules) -> StepStatistics:
    """The step's statistics from its units' norms, by index."""
    # In unit order, so that the sum does not depend on the order of arrival.
    squared_norm = sum(norms[unit].squared for unit in sorted(norms))
    non_finite = sum(norm.non_finite for norm in norms.values())
    per_unit = rules.clip is Clip.PER_UNIT
    squares = [norm.squared for norm in norms.values()] if per_unit else [squared_norm]
    clipped = not non_finite and any(rules.scale(square) < 1 for square in squares)
    return StepStatistics(step, squared_norm, non_finite, clipped)
