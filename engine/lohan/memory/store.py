"""Files of tensors: the only user of native I/O, and the place where the system's errors become the user's.

Transfers run in the native core, in pieces of up to 4 MiB, through io_uring or, where that is refused, threads; each directory has a
queue of its own. Whole pages bypass the page cache where the file system takes O_DIRECT. Tensors are 1-D, contiguous and on the CPU;
any alignment works, page-aligned ones (`Arena`) cost no extra copy.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from lohan._native import AlignedBuffer, FaultPlan, IoEngine, IoError, IoErrorKind, IoFile, IoMemory, IoPool, IoTicket
from lohan.errors import StorageError
from lohan.hardware.transfers import ENGINE_BLOCK_BYTES, Engine, known_setting
from lohan.units import format_bytes

if TYPE_CHECKING:
    import torch

# Reads and writes under way at a time in each directory, without io_uring: most NVMe drives reach their rate at 4 of 4 MiB each.
_IO_THREADS = 4
# The same with io_uring, where one more needs no thread. An urgent transfer may find this many pieces before it in the drive: 32 MiB,
# a hundredth of a second at 3 GB/s.
_IO_DEPTH = 8
# How much of a striped file lies in one directory before the next one's turn: one piece of a transfer.
_STRIPE_BYTES = ENGINE_BLOCK_BYTES


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
        free = _free_space(path) if error.kind in (IoErrorKind.NO_SPACE, IoErrorKind.QUOTA) else ""
        raise StorageError(
            f"{error.operation}{where} failed: {os.strerror(number)}{free}",
            place=path,
            remedy=error.remedy,
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

    @property
    def times(self) -> tuple[float, float] | None:
        """When its first call into the system began and its last one ended, in seconds of `time.perf_counter`.

        None until the transfer has ended, and where no call was made.
        """
        return self._ticket.times

    def on_done(self, callback: Callable[[Transfer], object]) -> None:
        """Have `callback(transfer)` called in another thread once the transfer has ended, well or badly.

        Callbacks of a store run one after the other. What one raises goes to `sys.unraisablehook`.
        """
        self._ticket.on_done(lambda _: callback(self))


class StoreFile:
    """An open file of fixed size. All methods may be called from any thread; a caller orders transfers that overlap."""

    def __init__(self, file: IoFile) -> None:
        self._file = file

    @property
    def path(self) -> Path:
        return Path(self._file.path)

    @property
    def paths(self) -> list[Path]:
        """Where the file lies: one path, or those it is striped over."""
        return [Path(path) for path in self._file.paths]

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

    def read_batch(self, requests: Iterable[tuple[int, torch.Tensor]], *, urgent: bool = False) -> list[Transfer]:
        """Start a `read` for each (offset, target), all with one call into the system; starts none when one cannot be."""
        return [Transfer(ticket) for ticket in self._file.read_batch(requests, urgent=urgent)]

    def write_batch(self, requests: Iterable[tuple[int, torch.Tensor]], *, urgent: bool = False) -> list[Transfer]:
        """Start a `write` for each (offset, source), all with one call into the system; starts none when one cannot be."""
        return [Transfer(ticket) for ticket in self._file.write_batch(requests, urgent=urgent)]

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

    def __init__(
        self,
        *,
        threads: int = _IO_THREADS,
        depth: int = _IO_DEPTH,
        engine: IoEngine = IoEngine.AUTO,
        faults: FaultPlan | None = None,
    ) -> None:
        """Start the workers.

        Args:
            threads: transfers under way at a time in each directory, without io_uring.
            depth: the same with io_uring.
            engine: what carries the transfers out; `IoEngine.URING` raises RuntimeError where there is no io_uring.
            faults: operations that go wrong, for tests.
        """
        self._pool = IoPool(threads, engine=engine, depth=depth, faults=faults)

    @classmethod
    def measured(cls, directories: Sequence[Path]) -> Self:
        """As `lohan bench io` found it fastest in one of `directories`; where it was never run, as their file systems are known to take it.

        A choice of io_uring falls back to threads where the system refuses it, as on another host or in a container.
        """
        setting = known_setting(directories)
        if setting is None:
            return cls()
        engine = IoEngine.THREADS if setting.engine is Engine.THREADS else IoEngine.AUTO
        return cls(threads=setting.depth if setting.engine is Engine.THREADS else _IO_THREADS, depth=setting.depth, engine=engine)

    @property
    def engine(self) -> IoEngine:
        """What carries the transfers out: `IoEngine.URING` or `IoEngine.THREADS`."""
        return self._pool.engine

    @property
    def engine_refusal(self) -> str:
        """Why it is not io_uring, in words; empty when it is, or was not to be."""
        return self._pool.engine_refusal

    def open(self, path: Path | Sequence[Path], *, size_bytes: int | None = None, stripe_bytes: int = _STRIPE_BYTES) -> StoreFile:
        """Open a regular file for reading and writing.

        Args:
            path: the file, or several that are one file, striped over them in turn. Without `size_bytes` they must exist.
            size_bytes: make the file if it is missing (mode 0600), give it this size and allocate its space now, so that a full
                drive is met here and not in the middle of a run. What the file held within the size stays.
            stripe_bytes: how much lies in one path before the next one's turn; a multiple of the page size.

        Raises:
            StorageError: the file cannot be opened or there is no room for it; a new file is then not left behind.
            ValueError: it is no regular file, or not striped like this.
        """
        with _translated():
            paths = path if isinstance(path, Path) else list(path)
            return StoreFile(self._pool.open(paths, size_bytes=size_bytes, stripe_bytes=stripe_bytes))

    def register(self, buffer: AlignedBuffer) -> IoMemory:
        """Have the kernel pin `buffer` once, for all transfers, as long as what is returned lives; its `refusal` says why it does not."""
        return self._pool.register_memory(buffer)

    def close(self) -> None:
        """Complete what was started and end the threads; files stay open. Closing twice is harmless."""
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
