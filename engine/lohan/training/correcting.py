"""Holds a run's first steps against its plan's forecast, and has the session keep something else where the plan was wrong."""

from __future__ import annotations

from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from lohan.errors import CapacityError, LohanError, StorageError
from lohan.events import EventType
from lohan.planning.corrected_plan import corrected_plan
from lohan.planning.correction import MEASURED_STEPS, MOST_CORRECTIONS, SKIPPED_STEPS, Correction, MeasuredStep, correct
from lohan.planning.plan import Plan
from lohan.training.corrected_profile import CorrectedProfile
from lohan.training.plan_run import PlannedRun

if TYPE_CHECKING:
    from lohan.streaming.executor import Session
    from lohan.streaming.trace import Trace
    from lohan.training.reporter import Reporter

PLAN_FILE = "plan.json"
_WORTH_TELLING = 0.01


class Outcome(StrEnum):
    """What becomes of a plan whose forecast was wrong; see `EventType.PLAN_CORRECTED`."""

    KEPT = "kept"
    """Nothing else is better by enough."""
    CHANGED = "changed"
    NO_ROOM = "no_room"
    """Something else would be better, and there was no room for it."""


def write_plan(plan: Plan, directory: Path) -> None:
    """Into the run's folder."""
    temporary = directory / (PLAN_FILE + ".tmp")
    temporary.write_text(plan.model_dump_json(indent=2) + "\n", encoding="utf-8")
    temporary.replace(directory / PLAN_FILE)


class PlanWatch:
    """Measures a few steps after one that does not count, and once more after each change. Changes no result of the training.

    Args:
        trace: the session's, which records what nobody else wants of it; None: the run has no forecast.
        begin: the step from which on it is free, and behind which the steps begin that count.
    """

    def __init__(
        self, planned: PlannedRun, session: Session, trace: Trace | None, reporter: Reporter, directory: Path, *, begin: int
    ) -> None:
        self._planned, self._session, self._trace, self._reporter, self._directory = planned, session, trace, reporter, directory
        self._running = planned.running if trace is not None else None
        self._plan, self._corrections = planned.plan, planned.corrections
        self._first = begin + SKIPPED_STEPS
        self._steps: list[MeasuredStep] = []

    @property
    def is_over(self) -> bool:
        """Whether no further step is looked at."""
        return self._running is None or self._corrections >= MOST_CORRECTIONS

    def step_done(self, step: MeasuredStep) -> None:
        """A step's gradients are known; its last updates may be under way."""
        if self.is_over or self._trace is None:
            return
        if step.step == self._first - 1:
            self._trace.record(self._first, MEASURED_STEPS)
        elif self._first <= step.step < self._first + MEASURED_STEPS:
            self._steps.append(step)
        elif self._steps:  # the last one's updates are done too
            self._judge(step.step)

    def _judge(self, step: int) -> None:
        assert self._running is not None and self._trace is not None, "steps are measured against a forecast"
        traces = [] if self._trace.dropped_spans else self._trace.steps
        steps, self._steps = self._steps, []
        running, self._running = self._running, None
        try:
            correction = correct(running, steps, traces)
        except LohanError as error:  # the run goes on as it was planned
            self._reporter.warn(f"The forecast cannot be corrected: {error.message}.", error.remedy)
            return
        if correction is None:
            return
        self._corrections += 1
        outcome = self._change(correction)
        self._plan = corrected_plan(self._plan, correction, retention_changed=outcome is Outcome.CHANGED)
        self._save(correction)
        self._say(step, correction, outcome)
        if outcome is Outcome.CHANGED:
            self._running = replace(correction.running, retention=self._plan.retention)
            self._first = step + 1 + SKIPPED_STEPS

    def _save(self, correction: Correction) -> None:
        try:
            CorrectedProfile(corrections=self._corrections, profile=correction.running.profile).save(self._directory)
            write_plan(self._plan, self._directory)
        except OSError as error:  # a resumed run corrects again
            self._reporter.warn(f"The corrected plan cannot be written: {error.strerror or error}.", "Make room in the run's folder.")

    def _change(self, correction: Correction) -> Outcome:
        if correction.better is None:
            return Outcome.KEPT
        try:
            self._session.retain(correction.better.decision.retention)
        except (CapacityError, StorageError) as error:
            self._reporter.warn(f"The run goes on as it was planned: {error.message}.", error.remedy)
            return Outcome.NO_ROOM
        return Outcome.CHANGED

    def _say(self, step: int, correction: Correction, outcome: Outcome) -> None:
        better = correction.better
        new_seconds = better.seconds if better is not None and outcome is Outcome.CHANGED else correction.corrected_seconds
        self._reporter.say(
            EventType.PLAN_CORRECTED,
            step=step,
            outcome=str(outcome),
            ratio=correction.ratio,
            foreseen_seconds=correction.foreseen_seconds,
            corrected_seconds=correction.corrected_seconds,
            new_seconds=new_seconds,
            factors=asdict(correction.factors),
            detail=_sentence(correction, outcome, new_seconds),
        )


def _sentence(correction: Correction, outcome: Outcome, new_seconds: float) -> str:
    factors = asdict(correction.factors)
    told = ", ".join(f"{name.replace('_', ' ')} {factor:.3g}" for name, factor in factors.items() if abs(factor - 1) >= _WORTH_TELLING)
    ending = {
        Outcome.KEPT: "What is kept of activations stays as it is.",
        Outcome.CHANGED: f"Other activations are kept from here on: {new_seconds:.3g} s are foreseen then.",
        Outcome.NO_ROOM: "For what would be better there was no room.",
    }[outcome]
    return (
        f"The first steps took {correction.ratio:.3g} times as long as foreseen"
        f" ({told or 'and show how often they are clipped'}): a whole batch is now foreseen to take"
        f" {correction.corrected_seconds:.3g} s instead of {correction.foreseen_seconds:.3g}. {ending}"
    )
