"""`lohan bench adam` and `lohan bench io`: measures, shows a table or prints the JSON document. Loads torch only when measuring."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from lohan.cli.commands import print_error
from lohan.errors import ConfigError, LohanError
from lohan.hardware.transfers import Engine, Operation
from lohan.units import parse_bytes

if TYPE_CHECKING:
    from lohan.bench.records import Record, Watcher

AsJson = Annotated[bool, typer.Option("--json", help="Print the JSON document instead of the table.")]
Output = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the JSON document to this file, too.")]
Rounds = Annotated[int | None, typer.Option(min=1, help="Counted rounds; medians over them are given.")]


class ExitCode(IntEnum):
    FAILED = 1
    BAD_CONFIG = 2


def make_application() -> typer.Typer:
    """The group `bench`."""
    application = typer.Typer(
        no_args_is_help=True, help="Measure the native core on this machine: the CPU optimizer, and file transfers beside fio."
    )
    application.command("adam")(adam)
    application.command("io")(io)
    return application


def adam(
    elements: Annotated[int | None, typer.Option(min=1, help="Parameters in each array; unset: 50 M, fewer if memory is short.")] = None,
    rounds: Rounds = None,
    threads: Annotated[int, typer.Option(min=0, help="Of every system; 0: one for each CPU this process may use.")] = 0,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Compare the CPU optimizer with torch's, DeepSpeed's and bitsandbytes', all in one run, and with the memory's own speed."""

    def measure(watcher: Watcher) -> list[Record]:
        from lohan.bench.adam import DEFAULT_ROUNDS, run

        return run(elements=elements, rounds=rounds or DEFAULT_ROUNDS, threads=threads, watcher=watcher)

    with _errors_in_words():
        _bench("adam", measure, as_json=as_json, output=output)


def io(
    directory: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FOLDER", envvar="LOHAN_STATE_DIRS", help="Where to measure; again for more drives, files are striped over all."
        ),
    ] = None,
    size: Annotated[str, typer.Option(metavar="BYTES", help="Of the file in each folder.")] = "1G",
    block: Annotated[list[str] | None, typer.Option(metavar="BYTES", help="Block size; may be repeated. Unset: 256K, 1M, 4M.")] = None,
    depth: Annotated[
        list[int] | None, typer.Option(min=1, max=256, help="Blocks in flight in each folder; may be repeated. Unset: 8, 32.")
    ] = None,
    engine: Annotated[list[Engine] | None, typer.Option(help="May be repeated. Unset: both.")] = None,
    operation: Annotated[list[Operation] | None, typer.Option(help="May be repeated. Unset: all.")] = None,
    rounds: Rounds = None,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Compare reading and writing the state directories with fio on the same files, and say which setting is chosen for the engine."""
    with _errors_in_words():
        from lohan.bench.io import DEFAULT_BLOCK_BYTES, DEFAULT_DEPTHS, DEFAULT_ROUNDS, IoOptions, run

        options = IoOptions(
            directories=tuple(directory or [Path.cwd()]),
            size_bytes=_bytes(size, "--size"),
            engines=tuple(dict.fromkeys(engine or Engine)),
            operations=tuple(dict.fromkeys(operation or Operation)),
            block_bytes=tuple(dict.fromkeys(_bytes(text, "--block") for text in block)) if block else DEFAULT_BLOCK_BYTES,
            depths=tuple(dict.fromkeys(depth)) if depth else DEFAULT_DEPTHS,
            rounds=rounds or DEFAULT_ROUNDS,
        )
        _bench("io", lambda watcher: run(options, watcher), as_json=as_json, output=output, directories=options.directories)


def _bench(
    name: str, measure: Callable[[Watcher], list[Record]], *, as_json: bool, output: Path | None, directories: Sequence[Path] = ()
) -> None:
    from lohan.bench import records, show

    with _terminated_in_order(), show.stdout_kept_clean(), show.watcher_on_stderr() as watcher:
        measured = measure(watcher)
    content = records.document(name, measured, directories=directories)
    if output is not None:
        records.write_document(output, content)
    if as_json:
        sys.stdout.write(records.as_json(content))
    else:
        {"adam": show.print_adam, "io": show.print_io}[name](measured)


def _bytes(text: str, option: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ConfigError(str(error), place=option, remedy="Give a number with K, M or G behind it, e.g. 256K, 4M, 1G.") from None


@contextmanager
def _errors_in_words() -> Iterator[None]:
    try:
        yield
    except LohanError as error:
        print_error(error)
        raise typer.Exit(ExitCode.BAD_CONFIG if isinstance(error, ConfigError) else ExitCode.FAILED) from None


@contextmanager
def _terminated_in_order() -> Iterator[None]:
    """SIGTERM ends the command like an error would, so that the files it made are removed."""

    def stop(number: int, _: Any) -> NoReturn:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
