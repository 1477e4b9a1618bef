"""`lohan profile --job FOLDER`: the same measurement, as a job of the service that says in FOLDER how far it is."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from lohan.events import EventType, ExitReason, Phase

if TYPE_CHECKING:
    from lohan.profiling.progress import OnProgress, ProfileProgress
    from lohan.training.job import Job
    from lohan.training.reporter import Reporter
    from lohan.training.stopping import StopWatch

Measure = Callable[["OnProgress", Callable[[str, int], None]], None]
"""Measures and keeps the result. Is given whom to tell of progress, and whom to tell, before anything is measured, on what and in how many
parts it measures."""


class ProfileJob:
    """A measurement between its first event and its last. It may stop between two figures; nothing is kept then."""

    def __init__(self, measure: Measure, reporter: Reporter, stop: StopWatch) -> None:
        self._measure, self._reporter, self._stop = measure, reporter, stop
        self._what = ""
        self._parts, self._parts_done = 1, 0
        self._begin = time.monotonic()

    def tidy(self, reason: ExitReason) -> None:
        """Nothing: what is measured with removes its own files."""

    def execute(self) -> None:
        self._measure(self._tell, self._say_started)

    def _say_started(self, device: str, parts: int) -> None:
        self._parts = parts
        self._reporter.say(EventType.STARTED, device=device, total_steps=0, resumed_step=0)

    def _tell(self, progress: ProfileProgress) -> None:
        self._stop.check()
        if progress.note:
            self._reporter.say(EventType.NOTE, message=progress.note)
        elif not progress.what:
            self._parts_done += 1  # the machine, or a set of kernels
        if not progress.what:
            return
        done = min(1.0, (self._parts_done + progress.fraction) / self._parts)
        fields = {"eta_seconds": self._seconds_left(progress, done)}
        if progress.what != self._what:
            self._what = progress.what
            self._reporter.begin(Phase.MEASURING, f"Measuring {progress.what}.", done, **fields)
        else:
            self._reporter.progress(done, **fields)

    def _seconds_left(self, progress: ProfileProgress, done: float) -> float | None:
        if self._parts == 1:
            return progress.seconds_left
        return (time.monotonic() - self._begin) / done * (1 - done) if done else None


def run_profile_job(folder: Path, measure: Measure, *, attempt: int | None) -> ExitReason:
    """Measure as a job in `folder`; raises as `lohan.training.job.carry_out`."""
    from lohan.training.job import carry_out

    def begin(reporter: Reporter, stop: StopWatch) -> Job:
        return ProfileJob(measure, reporter, stop)

    return carry_out(folder, begin, phase=Phase.MEASURING, attempt=attempt, listener=None)
