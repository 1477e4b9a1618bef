"""What `lohan train` does. A user's error is printed as message, place and remedy, never as a stack."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import Annotated

import typer

from lohan.errors import ConfigError, LohanError
from lohan.events import ExitReason

RunFile = Annotated[
    Path, typer.Argument(metavar="RUN.toml", help="The run's configuration; relative paths in it are taken from its folder.")
]
TraceFile = Annotated[
    Path | None,
    typer.Option(
        "--trace", metavar="FILE", help="Record some steps: a file for ui.perfetto.dev, and a table of how busy GPU, drives and CPU were."
    ),
]
TraceSteps = Annotated[int, typer.Option(min=1, help="How many steps --trace records; the first step of all is left out.")]
Attempt = Annotated[
    int | None, typer.Option(min=1, help="Which start of this run it is, for its events; by default one more than the last that wrote any.")
]
ResumeFrom = Annotated[
    str | None,
    typer.Option("--resume-from", metavar="NAME", help="Go on from this named snapshot; the run's own states are overwritten, it stays."),
]


class ExitCode(IntEnum):
    """Of `lohan train`, `lohan export`, `lohan chat` and `lohan profile --job`; supervisors read them."""

    SUCCEEDED = 0
    FAILED = 1
    BAD_CONFIG = 2
    LOCKED = 3
    CANCELLED = 4
    INTERRUPTED = 5
    PAUSED = 6
    OUT_OF_SPACE = 7
    """The drive with the run's folder is full; there was no room even for the last event."""


CODE_OF = {
    ExitReason.SUCCEEDED: ExitCode.SUCCEEDED,
    ExitReason.FAILED: ExitCode.FAILED,
    ExitReason.CANCELLED: ExitCode.CANCELLED,
    ExitReason.PAUSED: ExitCode.PAUSED,
    ExitReason.INTERRUPTED: ExitCode.INTERRUPTED,
}


def train(
    run_file: RunFile, attempt: Attempt = None, resume_from: ResumeFrom = None, trace: TraceFile = None, trace_steps: TraceSteps = 3
) -> None:
    """Train a model as RUN.toml says; the result is a Hugging Face folder, <output.directory>/export.

    A run whose state directories hold the record of a step goes on from there.
    """
    from lohan.cli.show import make_show
    from lohan.config import load_run_config
    from lohan.training.loop import train as run
    from lohan.training.tracing import TraceRequest, check_writable

    try:
        config = load_run_config(run_file)
        if trace is not None:
            check_writable(trace)
    except ConfigError as error:
        print_error(error)
        raise typer.Exit(ExitCode.BAD_CONFIG) from None
    with job_errors_in_words(config.output.directory), make_show(config) as show:
        request = TraceRequest(trace.absolute(), trace_steps, show.busy) if trace is not None else None
        reason = run(config, attempt=attempt, listener=show.event, resume_from=resume_from, trace=request)
    raise typer.Exit(CODE_OF[reason])


@contextmanager
def job_errors_in_words(folder: Path) -> Iterator[None]:
    """What keeps a job from beginning, or from saying its last word, in `folder`: printed, with the exit code that says which it was."""
    from lohan.training.failures import is_out_of_space
    from lohan.training.run_lock import RunLockedError

    try:
        yield
    except RunLockedError as error:
        print_error(error)
        raise typer.Exit(ExitCode.LOCKED) from None
    except OSError as error:
        if is_out_of_space(error):
            print(f"lohan: {folder}: {error.strerror}. Free space, then start the run again.", file=sys.stderr)
            raise typer.Exit(ExitCode.OUT_OF_SPACE) from None
        # Outside the attempt: the run's folder itself cannot be made or written to.
        print(f"lohan: {folder}: {error.strerror or error}. Name a folder this user may write to.", file=sys.stderr)
        raise typer.Exit(ExitCode.FAILED) from None


def print_error(error: LohanError) -> None:
    """A user's error on stderr: place, message, remedy."""
    where = f"{error.place}: " if error.place else ""
    print(f"lohan: {where}{error.message}", file=sys.stderr)
    if error.remedy:
        print(f"  {error.remedy}", file=sys.stderr)
