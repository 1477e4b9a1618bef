"""What commands that measure share: errors in words, and an end in order."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any, NoReturn

import typer

from lohan.cli.commands import print_error
from lohan.errors import ConfigError, LohanError


class ExitCode(IntEnum):
    FAILED = 1
    BAD_CONFIG = 2


@contextmanager
def errors_in_words() -> Iterator[None]:
    """A user's error is printed and ends the command, with 2 for a setting or argument and 1 for anything else."""
    try:
        yield
    except LohanError as error:
        print_error(error)
        raise typer.Exit(ExitCode.BAD_CONFIG if isinstance(error, ConfigError) else ExitCode.FAILED) from None


@contextmanager
def terminated_in_order() -> Iterator[None]:
    """SIGTERM ends the command like an error would, so that the files it made are removed."""

    def stop(number: int, _: Any) -> NoReturn:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
