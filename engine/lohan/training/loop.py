"""Trains one run from its configuration. The work itself is `lohan.training.attempt`, which loads torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lohan.config import RunConfig
from lohan.events import ExitReason, Phase
from lohan.training.job import Job, carry_out
from lohan.training.reporter import Listener, Reporter
from lohan.training.stopping import StopWatch

if TYPE_CHECKING:
    from lohan.training.tracing import TraceRequest


def train(
    config: RunConfig,
    *,
    attempt: int | None = None,
    listener: Listener | None = None,
    resume_from: str | None = None,
    trace: TraceRequest | None = None,
) -> ExitReason:
    """Run `config` to the export, from the base model or from the last recorded step; returns why it ended, as the last event does.

    Args:
        config: with absolute paths.
        attempt, listener: see `lohan.training.job.carry_out`.
        resume_from: a named snapshot to go on from instead; later steps than its own are forgotten.
        trace: which steps to record, and where to.

    Raises:
        RunLockedError: another trainer is at work in the run's folder; no event was written.
        OSError: the run's folder cannot be made or written to, so that there is no place for events.
    """

    def begin(reporter: Reporter, stop: StopWatch) -> Job:
        from lohan.training.attempt import Attempt

        return Attempt(config, reporter, stop, resume_from=resume_from, trace=trace)

    return carry_out(config.output.directory, begin, phase=Phase.PREPARING_DATA, attempt=attempt, listener=listener)
