"""Kept activations on the drives: one file over all state directories, a thread that writes it and one that reads it ahead of use."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lohan.planning.kept_footprint import whole_pages
from lohan.planning.operations import OperationKind
from lohan.streaming.device import Event

if TYPE_CHECKING:
    from lohan.memory.store import Store, StoreFile, Transfer
    from lohan.streaming.kept_buffers import HostBuffer, StagingBuffers
    from lohan.streaming.pending import Failure
    from lohan.streaming.trace import Trace

FILE = "kept-activations"


@dataclass(frozen=True, slots=True)
class _Place:
    offset: int
    size_bytes: int


class StoredOutput:
    """One operator's outputs on their way to the drive and back.

    Args:
        copied: the end of the copy from the device to host memory.
        bring: copies the bytes that were read to the device.
    """

    def __init__(
        self,
        key: Hashable,
        size_bytes: int,
        copied: Event,
        bring: Callable[[HostBuffer], None],
        *,
        span: tuple[int, int, int, int],
    ) -> None:
        self.key, self.size_bytes, self.copied, self.bring = key, size_bytes, copied, bring
        self.span = span
        """Of its spans in the trace: step, unit, chunk, micro-batch."""
        self.buffer: HostBuffer | None = None
        """That a copy from the device fills, until it is written."""
        self.place: _Place | None = None
        self.is_handed_in = self.is_written = self.is_asked_for = self.has_come = False


class KeptDrive:
    """Writes outputs to the file and reads them back, in the order in which it is told to.

    The file is preallocated: each output of a region gets its place when it comes for the first time, and has it in every step. It holds
    nothing that a later session could use, and goes with this one; one that a killed process left is overwritten.

    Args:
        folders: where the file lies, striped over them.

    Raises:
        StorageError: a folder cannot be used.
    """

    def __init__(
        self, store: Store, folders: Sequence[Path], staging: StagingBuffers, failure: Failure, *, device: torch.device, trace: Trace | None
    ) -> None:
        self._store, self._staging, self._failure, self._device, self._trace = store, staging, failure, device, trace
        self._paths = [folder / FILE for folder in folders]
        self._remove_files()
        self._file: StoreFile | None = None
        self._opening = threading.Lock()
        self._size = 0
        self._free: dict[Hashable, list[_Place]] = defaultdict(list)
        self._outgrown: list[_Place] = []
        self._changed = threading.Condition()
        failure.wake(self._changed)
        self._to_write: queue.SimpleQueue[StoredOutput | None] = queue.SimpleQueue()
        self._to_read: queue.SimpleQueue[StoredOutput | None] = queue.SimpleQueue()
        self.bytes_written = self.bytes_read = 0
        self._threads = [
            threading.Thread(target=self._run, args=arguments, name=name, daemon=True)
            for name, arguments in (
                ("lohan-kept-writer", (self._to_write, self._write, "writing kept activations")),
                ("lohan-kept-reader", (self._to_read, self._read, "reading kept activations")),
            )
        ]
        for thread in self._threads:
            thread.start()

    @property
    def size_bytes(self) -> int:
        """Of the file."""
        return self._size

    def reserve(self, output: StoredOutput, room_bytes: int) -> None:
        """Give the output its place; a new one has `room_bytes`.

        Raises:
            StorageError: there is no space for it.
        """
        output.place = self._take_place(output.key, whole_pages(output.size_bytes), whole_pages(room_bytes))

    def make_room(self, outputs: Iterable[tuple[Hashable, int]]) -> None:
        """Give outputs of so many bytes their places before they come, all at once.

        Raises:
            StorageError: there is no space for them.
        """
        places: dict[Hashable, _Place] = {}
        size = self._size
        for key, need_bytes in outputs:
            places[key] = _Place(size, whole_pages(need_bytes))
            size += places[key].size_bytes
        if places:
            self._grow(size)
        for key, place in places.items():
            self._free[key].append(place)

    def write(self, output: StoredOutput, buffer: HostBuffer) -> None:
        """Have the output written from `buffer`, which goes back to the staging buffers then."""
        output.buffer, output.is_handed_in = buffer, True
        self._to_write.put(output)

    def read(self, output: StoredOutput) -> None:
        """Have the output read and brought to the device."""
        output.is_asked_for = True
        self._to_read.put(output)

    def wait(self, output: StoredOutput) -> None:
        """Wait until an output that was asked for has been read, and its copy to the device begun.

        Raises:
            EngineError: a background stage failed.
        """
        self._wait_for(lambda: output.has_come)
        self._failure.check()

    def forget(self, output: StoredOutput) -> None:
        """Nobody needs the output any more; waits for what is under way with it."""
        if output.is_handed_in:
            self._wait_for(lambda: output.has_come if output.is_asked_for else output.is_written)
        if output.place is not None:
            self._free[output.key].append(output.place)
            output.place = None

    def close(self) -> None:
        """End the threads and remove the file."""
        for requests in (self._to_write, self._to_read):
            requests.put(None)
        for thread in self._threads:
            if threading.current_thread() is not thread:
                thread.join()
        if self._file is not None:
            self._file.close()
            self._file = None
        self._remove_files()
        self._failure.leave(self._changed)

    def _remove_files(self) -> None:
        for path in self._paths:
            path.unlink(missing_ok=True)

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: condition() or self._failure.failed)

    def _take_place(self, key: Hashable, need_bytes: int, room_bytes: int) -> _Place:
        while self._free[key]:
            place = self._free[key].pop()
            if place.size_bytes >= need_bytes:
                return place
            self._outgrown.append(place)
        for place in self._outgrown:
            if place.size_bytes >= room_bytes:
                self._outgrown.remove(place)
                return place
        place = _Place(self._size, room_bytes)
        self._grow(self._size + room_bytes)
        return place

    def _grow(self, size_bytes: int) -> None:
        """In the first forward output after output, where no room was made before."""
        with self._opening:
            larger = self._store.open(self._paths if len(self._paths) > 1 else self._paths[0], size_bytes=size_bytes)
            if self._file is not None:
                self._file.close()  # waits for its transfers
            self._file, self._size = larger, size_bytes

    def _run(self, requests: queue.SimpleQueue[StoredOutput | None], do: Callable[[StoredOutput], None], what: str) -> None:
        while self._do_next(requests, do, what):
            pass

    def _do_next(self, requests: queue.SimpleQueue[StoredOutput | None], do: Callable[[StoredOutput], None], what: str) -> bool:
        """A function of its own, so that a thread that waits for the next output holds none of the last one's memory."""
        output = requests.get()
        if output is None:
            return False
        if not self._failure.failed:
            try:
                do(output)
            except Exception as error:  # noqa: BLE001 - reported to whoever waits for the output
                self._failure.set(what, error)
        return True

    def _write(self, output: StoredOutput) -> None:
        output.copied.synchronize()
        buffer, output.buffer = output.buffer, None
        assert buffer is not None, "it was handed in with one"
        self._transfer(output, buffer, OperationKind.ACTIVATIONS_WRITE)
        self.bytes_written += output.size_bytes
        self._staging.give_back(buffer)
        with self._changed:
            output.is_written = True
            self._changed.notify_all()

    def _read(self, output: StoredOutput) -> None:
        self.wait_written(output)
        buffer = self._staging.take()
        buffer.last_use.synchronize()
        self._transfer(output, buffer, OperationKind.ACTIVATIONS_READ)
        self.bytes_read += output.size_bytes
        output.bring(buffer)
        self._staging.give_back(buffer)
        with self._changed:
            output.has_come = True
            self._changed.notify_all()

    def wait_written(self, output: StoredOutput) -> None:
        """Wait until the output is on the drive.

        Raises:
            EngineError: a background stage failed.
        """
        self._wait_for(lambda: output.is_written)
        self._failure.check()

    def _transfer(self, output: StoredOutput, buffer: HostBuffer, kind: OperationKind) -> None:
        assert output.place is not None, "it has a place until it is forgotten"
        memory = buffer.memory[: whole_pages(output.size_bytes)]
        with self._opening:
            assert self._file is not None, "a place lies in the file"
            start = self._file.write if kind is OperationKind.ACTIVATIONS_WRITE else self._file.read
            transfer: Transfer = start(output.place.offset, memory)
        transfer.wait()
        if self._trace is not None:
            step, unit, chunk, micro_batch = output.span
            self._trace.add_transfers(step, kind, unit, chunk, [transfer], bytes=output.size_bytes, micro_batch=micro_batch)
