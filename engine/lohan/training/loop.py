"""Trains one run from its configuration: lock, events, and why it ended. The work itself is `lohan.training.attempt`.

This module loads no torch, so that the lock is held and the first event is written within a moment of the process's start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lohan.config import RunConfig
from lohan.errors import StopRequested
from lohan.events import EventType, ExitReason, Phase
from lohan.training.failures import to_fields, write_stack
from lohan.training.reporter import Listener, Reporter, next_attempt
from lohan.training.run_lock import hold_run
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
        attempt: which start of this run it is; 1 is the first. None takes the one after the last that wrote an event.
        listener: is told every event besides, for a terminal.
        resume_from: a named snapshot to go on from instead; later steps than its own are forgotten.
        trace: which steps to record, and where to.

    Raises:
        RunLockedError: another trainer is at work in the run's folder; no event was written.
        OSError: the run's folder cannot be made or written to, so that there is no place for events.
    """
    directory = config.output.directory
    with hold_run(directory), StopWatch(directory) as stop:
        reporter = Reporter(directory, attempt=attempt or next_attempt(directory), listener=listener)
        reason, error, work, stopped_step = ExitReason.FAILED, None, None, None
        try:
            reporter.begin(Phase.PREPARING_DATA, "Starting.")
            from lohan.training.attempt import Attempt

            work = Attempt(config, reporter, stop, resume_from=resume_from, trace=trace)
            stopped_step = work.execute()
            reason = ExitReason.SUCCEEDED
        except StopRequested:
            reason = stop.reason
        except KeyboardInterrupt:
            reason = ExitReason.INTERRUPTED
        except Exception as fault:  # noqa: BLE001 - whatever it was, the run's page must say it
            error = to_fields(fault)
            write_stack(directory, fault)
        finally:
            _say_goodbye(reporter, reason, error, stopped_step)
            if work is not None:
                work.tidy(reason)
        return reason


def _say_goodbye(reporter: Reporter, reason: ExitReason, error: dict[str, Any] | None, stopped_step: int | None) -> None:
    """The last event.

    Raises:
        OSError: it could not be written, as on a full drive; whoever started the trainer has its exit code alone.
    """
    try:
        reporter.say(EventType.EXIT, reason=str(reason), error=error, stopped_step=stopped_step)
    finally:
        reporter.close()
