"""Numbers about a run: the learning rate's course, the token-weighted mean loss, and how long it will take."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

from lohan.config import Schedule, TrainingSection

_REMEMBERED_STEPS = 20


def learning_rate_factor(training: TrainingSection, step: int, total_steps: int) -> float:
    """What the learning rate is multiplied with in step `step` (from 0).

    During the warm-up it rises linearly and reaches 1 with the last warm-up step; then it stays (constant), or falls towards 0,
    which it would reach one step after the last: linearly, or as half a cosine wave.
    """
    if step < training.warmup_steps:
        return (step + 1) / training.warmup_steps
    if training.schedule is Schedule.CONSTANT:
        return 1.0
    progress = min(1.0, (step - training.warmup_steps) / max(1, total_steps - training.warmup_steps))
    return 1 - progress if training.schedule is Schedule.LINEAR else (1 + math.cos(math.pi * progress)) / 2


class MeanLoss:
    """Mean over trained tokens, from means over batches."""

    def __init__(self) -> None:
        self._sum = 0.0
        self.tokens = 0

    def add(self, mean: float, tokens: int) -> None:
        self._sum += mean * tokens
        self.tokens += tokens

    @property
    def value(self) -> float:
        return self._sum / self.tokens if self.tokens else math.nan


class Clock:
    """Estimates the time left from the steps of this attempt; a step before it never counts."""

    def __init__(self, total_steps: int) -> None:
        self._total_steps = total_steps
        self._recent: deque[float] = deque(maxlen=_REMEMBERED_STEPS)
        self.afterwards_seconds = 0.0
        """What follows the last step, as far as it is known."""

    def add(self, step_seconds: float) -> None:
        self._recent.append(step_seconds)

    def eta_seconds(self, steps_done: int) -> float | None:
        """Seconds until the end: the recent steps' median for each step left; None before two steps are measured."""
        if len(self._recent) < 2:
            return None
        return median(self._recent) * (self._total_steps - steps_done) + self.afterwards_seconds
