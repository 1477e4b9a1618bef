"""Files of tensors: the only user of native I/O, and the place where the system's errors become the user's.

Transfers run in the native core's own threads, in pieces of up to 4 MiB; whole pages bypass the page cache where the file system
takes O_DIRECT. Tensors are 1-D, contiguous and on the CPU; any alignment works, page-aligned ones (`Arena`) cost no extra copy.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from lohan._native import IoError, IoFile, IoPool, IoTicket
from lohan.errors import StorageError
from lohan.units import format_bytes

if TYPE_CHECKING:
    import torch

# Reads and writes under way at a time: enough to keep one drive busy at 4 MiB each, and most NVMe drives reach their rate at 4.
_IO_THREADS = 4

_REMEDIES = {
    errno.ENOSPC: "Free space on this drive, or name a state directory on another one.",
    errno.EDQUOT: "This user's disk quota is used up: free space, raise the quota, or name a state directory on another drive.",
    errno.EIO: "The drive reported an error and can no longer be trusted: look at `dmesg` and `smartctl -a`, and use another drive.",
    errno.EFBIG: "The file system, or this process's limit (`ulimit -f`), allows no such file size: raise the limit or use another drive.",
    errno.EACCES: "Give this process's user the right to read and write there, or name another folder.",
    errno.EPERM: "Give this process's user the right to read and write there, or name another folder.",
    errno.EROFS: "The file system is mounted read-only: mount it writable, or name a folder on another drive.",
    errno.ENOENT: "Name an existing file, or a folder that exists.",
    errno.ENOTDIR: "A part of the path is no folder: name another path.",
    errno.EISDIR: "The path names a folder: name a file.",
    errno.EMFILE: "This process has too many open files: raise its limit (`ulimit -n`).",
    errno.ENFILE: "The system has too many open files: close programs or raise `fs.file-max`.",
    errno.ENODATA: "Something else shortened the file while it was in use: leave a run's files alone, and start the run again.",
    errno.ENODEV: "The drive is gone: check that it is connected and mounted.",
    errno.ENXIO: "The drive is gone: check that it is connected and mounted.",
    errno.ENOMEM: "Free memory on this machine.",
}
_OTHER_REMEDY = "Check the drive and its file system, or name a folder on another one."


def _free_space(path: str) -> str:
    """How much room is left where `path` lies or was to lie, for the message; empty when that cannot be told."""
    try:
        return f"; {format_bytes(shutil.disk_usage(Path(path).parent).free)} are free"
    except OSError:
        return ""


@contextmanager
def _translated() -> Iterator[None]:
    """Raise the native core's IoError as StorageError: path, offset, errno, and what to do about it."""
    try:
        yield
    except IoError as error:
        number = error.errno or 0
        where = "" if error.offset is None else f" at byte {error.offset}"
        path = os.fsdecode(error.filename)
        free = _free_space(path) if number in (errno.ENOSPC, errno.EDQUOT) else ""
        raise StorageError(
            f"{error.operation}{where} failed: {os.strerror(number)}{free}",
            place=path,
            remedy=_REMEDIES.get(number, _OTHER_REMEDY),
            errno=number,
            offset=error.offset,
        ) from error


class Transfer:
    """A read or write under way. It keeps its tensor alive; dropping it waits for the transfer to end."""

    __slots__ = ("_ticket",)

    def __init__(self, ticket: IoTicket) -> None:
        self._ticket = ticket

    def wait(self) -> None:
        """Block until the transfer has ended.

        Raises:
            StorageError: it failed; the tensor's, or the file's, bytes in its range are undefined.
        """
        with _translated():
            self._ticket.wait()

    def done(self) -> bool:
        """Whether the transfer has ended, well or badly."""
        return self._ticket.done()


class StoreFile:
    """An open file of fixed size. All methods may be called from any thread; a caller orders transfers that overlap."""

    def __init__(self, file: IoFile) -> None:
        self._file = file

    @property
    def path(self) -> Path:
        return Path(self._file.path)

    @property
    def size_bytes(self) -> int:
        return self._file.size_bytes

    @property
    def direct(self) -> bool:
        """Whether whole pages bypass the page cache (O_DIRECT)."""
        return self._file.direct

    @property
    def direct_refusal(self) -> str:
        """Why `direct` is False, in words; empty when it is True."""
        return self._file.direct_refusal

    @property
    def alignment_bytes(self) -> int:
        """Ranges that begin and end on multiples of this bypass the page cache as a whole; 1 when not `direct`."""
        return self._file.alignment_bytes

    def read(self, offset: int, target: torch.Tensor, *, urgent: bool = False) -> Transfer:
        """Start filling `target` (1-D, contiguous, any dtype) from byte `offset`; urgent transfers go before all others.

        Raises:
            ValueError: the range leaves the file, the tensor cannot be used, or the file is closed.
        """
        return Transfer(self._file.read(offset, target, urgent=urgent))

    def write(self, offset: int, source: torch.Tensor, *, urgent: bool = False) -> Transfer:
        """Start writing `source` (1-D, contiguous, any dtype) at byte `offset`; it must not change until the transfer has ended.

        Raises:
            ValueError: the range leaves the file, the tensor cannot be used, or the file is closed.
        """
        return Transfer(self._file.write(offset, source, urgent=urgent))

    def sync(self) -> None:
        """Make durable what was written; the end of a write does not.

        Raises:
            StorageError: the system failed; what was written since the last sync may be lost, and a second sync cannot tell.
        """
        with _translated():
            self._file.sync()

    def close(self) -> None:
        """Wait for the file's transfers, then close it; closing twice is harmless."""
        with _translated():
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Store:
    """Opens files and runs their transfers on its own threads. May be used from any thread, not in a forked child."""

    def __init__(self, *, threads: int = _IO_THREADS) -> None:
        self._pool = IoPool(threads)

    def open(self, path: Path, *, size_bytes: int | None = None) -> StoreFile:
        """Open a regular file for reading and writing.

        Args:
            path: the file. Without `size_bytes` it must exist.
            size_bytes: make the file if it is missing (mode 0600), give it this size and allocate its space now, so that a full
                drive is met here and not in the middle of a run. What the file held within the size stays.

        Raises:
            StorageError: the file cannot be opened or there is no room for it; a new file is then not left behind.
        """
        with _translated():
            return StoreFile(self._pool.open(path, size_bytes=size_bytes))

    def close(self) -> None:
        """Complete what was started and end the threads; files stay open. Closing twice is harmless."""
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
