"""What a run says about the gradients of its steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lohan.training.reporter import Reporter

if TYPE_CHECKING:
    from lohan.streaming.statistics import Statistics


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
