"""One trainer per run folder: an exclusive lock that the kernel drops when its holder dies, however it dies."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from lohan.errors import EngineError

LOCK_FILE = "trainer.lock"


class RunLockedError(EngineError):
    """Another trainer works in the run's folder; nothing of the folder was touched."""


@contextlib.contextmanager
def hold_run(directory: Path) -> Iterator[None]:
    """Hold `directory`'s trainer lock; the folder is made. The descriptor is closed on exec, so no child keeps the lock.

    Raises:
        RunLockedError: another trainer holds it.
        OSError: the folder or the file cannot be made.
    """
    directory.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunLockedError(
                "another trainer is at work in this folder",
                place=str(directory / LOCK_FILE),
                remedy="Wait for it, or use another output.directory.",
            ) from error
        yield
    finally:
        os.close(descriptor)
