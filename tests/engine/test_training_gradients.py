"""What a run says about its gradients: clipping as configured, and steps that are left out."""

from __future__ import annotations

import pytest

from lohan.errors import NonFiniteError
from lohan.events import EventType, ExitReason, FailureCause
from lohan.streaming.loss_head import ModelForward
from lohan.training.gradients import MOST_NON_FINITE_STEPS, FiniteWatch
from lohan.training.loop import train
from tests.engine.test_training import STEPS, events_of, make_config


def test_a_run_clips_as_its_file_says(tmp_path):
    config = make_config(tmp_path, clip="global", max_gradient_norm=0.01, engine={"schedule": "serial"})
    assert train(config, attempt=1) is ExitReason.SUCCEEDED
    steps = events_of(config, EventType.STEP)
    assert len(steps) == STEPS
    assert all(step["clipped"] and step["clip_rate"] == 1.0 and step["gradient_norm"] > 0.01 for step in steps)


def test_a_run_goes_on_after_a_step_that_is_left_out(tmp_path, monkeypatch):
    forward = ModelForward.__call__
    losses = []

    def spoilt(self, *arguments, **options):
        output = forward(self, *arguments, **options)
        if output.loss is not None and output.loss.requires_grad:
            losses.append(output.loss)
            if len(losses) == 2:
                output.loss = output.loss * float("nan")
        return output

    monkeypatch.setattr(ModelForward, "__call__", spoilt)
    config = make_config(tmp_path, clip="global")
    assert train(config, attempt=1) is ExitReason.SUCCEEDED
    steps = events_of(config, EventType.STEP)
    assert [step["skipped"] for step in steps] == [step == 2 for step in range(1, STEPS + 1)]
    assert steps[1]["gradient_norm"] is None and steps[1]["loss"] is None
    assert all(step["gradient_norm"] is not None for step in steps if not step["skipped"])
    warnings = [event["message"] for event in events_of(config, EventType.WARNING)]
    assert len(warnings) == 1 and warnings[0].startswith("Step 2 was left out whole")


def test_a_run_whose_every_step_is_left_out_ends_with_the_reason(tmp_path, monkeypatch):
    """Steps that are left out change no weight, so the run has lost nothing but its time."""
    forward = ModelForward.__call__

    def spoilt(self, *arguments, **options):
        output = forward(self, *arguments, **options)
        if output.loss is not None and output.loss.requires_grad:
            output.loss = output.loss * float("nan")
        return output

    monkeypatch.setattr(ModelForward, "__call__", spoilt)
    config = make_config(tmp_path, max_steps=MOST_NON_FINITE_STEPS + 5)
    assert train(config, attempt=1) is ExitReason.FAILED
    assert len(events_of(config, EventType.STEP)) == MOST_NON_FINITE_STEPS
    error = events_of(config, EventType.EXIT)[0]["error"]
    assert (error["kind"], error["cause"]) == ("NonFiniteError", FailureCause.NON_FINITE)
    assert error["place"] == f"steps 1 to {MOST_NON_FINITE_STEPS}"
    assert "learning rate" in error["remedy"]


def test_a_finite_step_begins_the_count_again():
    watch = FiniteWatch()
    for step in range(1, 4 * MOST_NON_FINITE_STEPS):
        watch.note(step, loss=1.0, skipped=step % MOST_NON_FINITE_STEPS != 0)
    watch = FiniteWatch()
    for step in range(1, MOST_NON_FINITE_STEPS):
        watch.note(step, loss=float("inf"), skipped=False)
    with pytest.raises(NonFiniteError, match="the loss was not a finite number in 20 steps"):
        watch.note(MOST_NON_FINITE_STEPS, loss=float("nan"), skipped=True)
