"""What a run says about the gradients of its steps."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from lohan.errors import NonFiniteError
from lohan.training.reporter import Reporter

if TYPE_CHECKING:
    from lohan.streaming.statistics import Statistics


MOST_NON_FINITE_STEPS = 20
"""So many steps in a row without a finite loss and gradients end a run. One batch may be odd; a step that is left out changes nothing, so
where that many other batches bring none either, the weights themselves are at fault."""


class FiniteWatch:
    """Counts the steps in a row that had a loss or gradients that are NaN or infinite."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def note(self, step: int, *, loss: float, skipped: bool) -> None:
        """Take note of a step (from 1) that was done.

        Raises:
            NonFiniteError: it was the last of too many.
        """
        self._in_a_row = 0 if math.isfinite(loss) and not skipped else self._in_a_row + 1
        if self._in_a_row < MOST_NON_FINITE_STEPS:
            return
        what = "the loss" if not math.isfinite(loss) else "a gradient"
        raise NonFiniteError(
            f"{what} was not a finite number in {self._in_a_row} steps in a row",
            place=f"steps {step - self._in_a_row + 1:,} to {step:,}",
            remedy="Start it again with a lower learning rate, more warm-up steps or gradient clipping, and check the data for odd rows.",
        )


def gradient_facts(statistics: Statistics) -> dict[str, Any]:
    """The fields of a `step` event about its gradients."""
    last = statistics.last_step
    return {
        "gradient_norm": last.gradient_norm if last is not None else None,
        "clipped": last is not None and last.clipped,
        "skipped": last is not None and last.skipped,
        "clip_rate": statistics.clip_rate,
    }


def warn_of_skipped_step(statistics: Statistics, reporter: Reporter) -> None:
    """Say so when the last step was left out."""
    last = statistics.last_step
    if last is not None and last.skipped:
        reporter.warn(
            f"Step {last.step} was left out whole: {last.non_finite} gradients are NaN or infinite."
            f" That makes {statistics.skipped_steps} of {statistics.steps} steps.",
            "If it happens often, lower the learning rate, and check the data for rows without trained tokens.",
        )
