"""`lohan export`: writes what a run at rest has recorded as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lohan.cli.commands import CODE_OF, Attempt, ExitCode, RunFile, job_errors_in_words, print_error
from lohan.config import Precision
from lohan.errors import ConfigError
from lohan.events import ExitReason, Phase

if TYPE_CHECKING:
    from lohan.config import RunConfig
    from lohan.training.job import Job
    from lohan.training.reporter import Listener, Reporter
    from lohan.training.stopping import StopWatch

ExportFolder = Annotated[
    Path | None,
    typer.Option("--to", metavar="FOLDER", help="FOLDER/export is the model, events and log lie beside it. Unset: exported in the run's."),
]


def export(
    run_file: RunFile,
    to: ExportFolder = None,
    dtype: Annotated[Precision | None, typer.Option(help="Of the weights. Unset: the run's precision.")] = None,
    attempt: Attempt = None,
) -> None:
    """Write the weights that a run recorded last, without training on: a Hugging Face folder, streamed from its states.

    No trainer can be at work on the run meanwhile. Its states are only read.
    """
    from lohan.cli.show import make_show
    from lohan.config import load_run_config

    try:
        config = load_run_config(run_file)
        folder = (to or config.output.directory / "exported").absolute()
        if folder == config.output.directory.absolute():
            raise ConfigError("an export cannot be in the run's own folder", place="--to", remedy="Name a folder beside it, or in it.")
    except ConfigError as error:
        print_error(error)
        raise typer.Exit(ExitCode.BAD_CONFIG) from None
    shown = config.model_copy(update={"output": config.output.model_copy(update={"directory": folder})})
    with job_errors_in_words(folder), make_show(shown) as show:
        reason = _carry_out(config, folder, dtype, attempt, show.event)
    raise typer.Exit(CODE_OF[reason])


def _carry_out(config: RunConfig, folder: Path, dtype: Precision | None, attempt: int | None, listener: Listener) -> ExitReason:
    from lohan.training.job import carry_out

    def begin(reporter: Reporter, stop: StopWatch) -> Job:
        from lohan.training.exporting import ExportJob

        return ExportJob(config, folder / "export", reporter, stop, dtype=dtype)

    return carry_out(folder, begin, phase=Phase.LOADING_MODEL, attempt=attempt, listener=listener)
