"""What is seen to before model states are written into a directory: nobody else uses it, and its file system will do and has room."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from lohan.config import Durability, UnsafeFilesystems
from lohan.errors import CapacityError, ConfigError, DriveSpaceError, ResumeError, StorageError
from lohan.hardware.probe import filesystem_type
from lohan.planning.filesystems import REMEDY, refusal
from lohan.states.streams import Stream
from lohan.units import format_bytes


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[IO[bytes]]:
    """Make `folder` and hold its lock.

    Raises:
        StorageError: it cannot be made, or is in use by another run.
    """
    try:
        make_folder(folder)
        lock = (folder / "lock").open("ab")
    except OSError as error:
        remedy = "Name a folder on a local drive that this user may write to."
        raise StorageError.of(error, "the state directory cannot be used", place=folder, remedy=remedy) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StorageError(
                "the state directory is in use by another run", place=str(folder), remedy="Use another folder.", errno=error.errno
            ) from error
        yield lock


def make_folder(folder: Path) -> None:
    """Make `folder` with its parents, so that a power failure does not take its entry back; raises OSError."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        with contextlib.suppress(PermissionError):  # one may write to a folder and not open it; then the system's own time must do
            sync(path.parent)


def sync(path: Path) -> None:
    """Make a file's bytes or a folder's entries durable; raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_filesystems(folders: Sequence[Path], durability: Durability, unsafe: UnsafeFilesystems) -> None:
    """Refuse folders on file systems that do not suit model states, unless `unsafe` allows them.

    Raises:
        ConfigError: a folder is on such a file system.
    """
    if unsafe is UnsafeFilesystems.ALLOW:
        return
    for folder in folders:
        reason = refusal(filesystem_type(folder), durability)
        if reason is not None:
            raise ConfigError(f"the state directory {reason}", place=str(folder), remedy=REMEDY)


def check_size(path: Path, size_bytes: int) -> None:
    """See that a state file that is to be resumed is there and whole.

    Raises:
        ResumeError: it is missing, or of another size.
    """
    found = path.stat().st_size if path.is_file() else None
    if found != size_bytes:
        raise ResumeError(
            "the state file is missing" if found is None else f"the state file has {found} bytes instead of {size_bytes}",
            place=str(path),
            remedy="Put the run's own file back, or start the run from the beginning.",
        )


def check_space(folders: Sequence[Path], sizes: Mapping[tuple[int, Stream], int]) -> None:
    """See that files of these sizes, by (directory, stream), have room; directories on one file system share its space.

    Raises:
        DriveSpaceError: a file system has too little room free.
        CapacityError: one is too small.
    """
    needs: dict[int, tuple[Path, int]] = {}
    for (directory, _), size_bytes in sizes.items():
        folder = folders[directory]
        device = os.stat(folder).st_dev  # noqa: PTH116 - the number names the file system
        needs[device] = (folder, needs.get(device, (folder, 0))[1] + size_bytes)
    for folder, need in needs.values():
        drive = shutil.disk_usage(folder)
        if need > drive.free:
            error = DriveSpaceError if need <= drive.total else CapacityError
            raise error(
                f"the model states need {format_bytes(need)}, {format_bytes(drive.free)} are free",
                need_bytes=need,
                have_bytes=drive.free,
                place=str(folder),
                remedy="Free space, or add a state directory on another drive.",
            )
