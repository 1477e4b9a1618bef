"""What every process that a supervisor starts has around its work: the folder's lock, events, requests to stop, and why it ended.

This module loads no torch, so that the lock is held and the first event is written within a moment of the process's start.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from lohan.errors import StopRequested
from lohan.events import EventType, ExitReason, Phase
from lohan.training.failures import TRAINING_MEMORY_REMEDY, to_fields, write_stack
from lohan.training.reporter import Listener, Reporter, next_attempt
from lohan.training.run_lock import hold_run
from lohan.training.stopping import StopWatch


class Job(Protocol):
    """The work itself."""

    def execute(self) -> int | None:
        """Do it; returns the step after which a training was ended by a request, else None.

        Raises:
            StopRequested: it was asked to be left.
            Exception: whatever went wrong.
        """

    def tidy(self, reason: ExitReason) -> None:
        """What is done after the last event."""


def carry_out(
    directory: Path,
    begin: Callable[[Reporter, StopWatch], Job],
    *,
    phase: Phase,
    attempt: int | None,
    listener: Listener | None,
    memory_remedy: str = TRAINING_MEMORY_REMEDY,
) -> ExitReason:
    """Do a job in `directory`; returns why it ended, as the last event does.

    Args:
        begin: makes the job; imports what takes long, and may fail as the job may.
        phase: which it begins with.
        attempt: which start of this job it is; 1 is the first. None takes the one after the last that wrote an event.
        listener: is told every event besides, for a terminal.
        memory_remedy: what makes the job smaller where memory ran out, as the beginning of a sentence.

    Raises:
        RunLockedError: another process is at work in the folder; no event was written.
        OSError: the folder cannot be made or written to, so that there is no place for events.
    """
    with hold_run(directory), StopWatch(directory) as stop:
        reporter = Reporter(directory, attempt=attempt or next_attempt(directory), listener=listener)
        reason, error, job, stopped_step = ExitReason.FAILED, None, None, None
        try:
            reporter.begin(phase, "Starting.")
            job = begin(reporter, stop)
            stopped_step = job.execute()
            reason = ExitReason.SUCCEEDED
        except StopRequested:
            reason = stop.reason
        except KeyboardInterrupt:
            reason = ExitReason.INTERRUPTED
        except Exception as fault:  # noqa: BLE001 - whatever it was, the run's page must say it
            error = to_fields(fault, memory_remedy=memory_remedy)
            write_stack(directory, fault)
        finally:
            _say_goodbye(reporter, reason, error, stopped_step)
            if job is not None:
                job.tidy(reason)
        return reason


def _say_goodbye(reporter: Reporter, reason: ExitReason, error: dict[str, Any] | None, stopped_step: int | None) -> None:
    """The last event.

    Raises:
        OSError: it could not be written, as on a full drive; whoever started the process has its exit code alone.
    """
    try:
        reporter.say(EventType.EXIT, reason=str(reason), error=error, stopped_step=stopped_step)
    finally:
        reporter.close()
