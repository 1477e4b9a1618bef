"""`lohan train --trace`: which steps of a run are recorded, and when the file is written. Loads torch only where a run does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from lohan.errors import ConfigError, StorageError

if TYPE_CHECKING:
    from lohan.planning.step_trace import StepTrace
    from lohan.streaming.executor import Session
    from lohan.streaming.trace import Trace
    from lohan.training.reporter import Reporter


@dataclass(frozen=True, slots=True)
class TraceReport:
    """What was recorded; there is at least one step."""

    path: Path
    steps: Sequence[StepTrace]
    on_gpu: bool


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """Record `steps` steps into the file `path`, and tell `on_written` once that is done."""

    path: Path
    steps: int
    on_written: Callable[[TraceReport], None]


def check_writable(path: Path) -> None:
    """See that a file can be made at `path`, before the run that it is to tell of.

    Raises:
        ConfigError: it cannot.
    """
    try:
        with path.open("ab"):
            pass
        if not path.stat().st_size:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}", place="--trace", remedy="Name a file this user may write to.") from error


class RunTrace:
    """The trace of one attempt, for which there need be no request. Leaving its `with` block writes what was not written yet.

    Args:
        total_steps: of the run.
        done: steps done before this attempt.
        is_watched: whether there is to be a trace without a request too, which records nothing by itself.
    """

    def __init__(self, request: TraceRequest | None, total_steps: int, done: int, reporter: Reporter, *, is_watched: bool) -> None:
        self._request, self._reporter = request, reporter
        self._session: Session | None = None
        self._is_written = False
        self.trace: Trace | None = None
        self.free_from = done + 1
        """The step from which on the trace can be used for something else."""
        if request is not None or is_watched:
            from lohan.streaming.trace import Trace

            # The first step of an attempt finds nothing loaded and its memory untouched.
            first = max(1, min(done + 2, total_steps)) if request is not None else total_steps + 1
            self.trace = Trace(first_step=first, steps=request.steps if request is not None else 1)
            if request is not None:
                self.free_from = first + request.steps

    def attach(self, session: Session) -> None:
        """The session that the trace was made for."""
        self._session = session

    def step_done(self) -> None:
        """A step's updates are done."""
        if self.trace is not None and self.trace.is_complete:
            self._write()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._write()

    def _write(self) -> None:
        if self._request is None or self.trace is None or self._session is None or self._is_written:
            return
        from lohan.streaming.trace import write_perfetto

        self._is_written = True
        report = TraceReport(self._request.path, self.trace.steps, self._session.device.type == "cuda")
        if not report.steps:
            self._reporter.warn("No step was traced: the run ended before.")
            return
        try:
            write_perfetto(self.trace, report.path, self._session.unit_names)
        except StorageError as error:  # the run goes on without it
            self._reporter.warn(str(error), error.remedy)
            return
        with contextlib.suppress(OSError):  # the terminal, or the program behind the pipe, has gone; the run has not
            self._request.on_written(report)
