"""Folders to measure in, which are gone at the end."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lohan.errors import StorageError


@contextmanager
def temporary_folders(directories: Sequence[Path], *, prefix: str = ".lohan-bench-") -> Iterator[list[Path]]:
    """A new folder in each of the directories; removed at the end with what is in it.

    Args:
        prefix: of the folders' names.

    Raises:
        StorageError: one cannot be made.
    """
    folders: list[Path] = []
    try:
        for directory in directories:
            try:
                folders.append(Path(tempfile.mkdtemp(dir=directory.absolute(), prefix=prefix)))
            except OSError as error:
                remedy = "Name a folder this user may write to."
                raise StorageError.of(error, "no folder can be made", place=directory, remedy=remedy) from error
        yield folders
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
