"""The model states on disk: master weights, moments and the working copy of every unit, in plain preallocated files.

Each state directory holds one file per stream. A unit's chunks go round robin over the directories, so that reading one unit uses all
drives. The table from (unit, chunk, stream) to a place is computed from the layouts, never searched.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

import torch

from lohan._native import ThreadPool, join_master, split_master
from lohan.errors import CapacityError, StorageError
from lohan.memory.store import Store, StoreFile, Transfer
from lohan.states.streams import Stream, master_streams, place_chunks, weights_stream
from lohan.units import format_bytes

if TYPE_CHECKING:
    from lohan.planning.state_form import StateForm
    from lohan.states.layout import Chunk, ParameterLayout, UnitLayout

FOLDER = "lohan-states"


class StateStore:
    """The streams of all units. Reads and writes may come from any thread; a caller orders those that touch the same chunk.

    Opening overwrites what an earlier run left in the directories. A directory is locked while it is open.

    Args:
        layouts: all units, by index.
        directories: where the files lie; chunks go round robin over them.
        form: which streams there are.
        store: opens the files.
        threads: for splitting and joining masters.

    Raises:
        CapacityError: the directories' file systems have too little space.
        StorageError: a directory cannot be made, is in use by another run, or a file operation failed.
    """

    def __init__(
        self, layouts: Sequence[UnitLayout], directories: Sequence[Path], form: StateForm, store: Store, *, threads: int = 1
    ) -> None:
        self.form = form
        self._pool = ThreadPool(threads)
        self._table, sizes = place_chunks(layouts, form, len(directories))
        self._counter = threading.Lock()
        self.bytes_read = 0
        self.bytes_written = 0
        self._files: dict[tuple[int, Stream], StoreFile] = {}
        with contextlib.ExitStack() as stack:
            folders = [directory / FOLDER for directory in directories]
            for folder in folders:
                stack.enter_context(_locked(folder))
            _remove_leftovers(folders)
            _check_space(folders, sizes)
            for (directory, stream), size_bytes in sizes.items():
                # A new file: space that was never written reads as zeros, which is what moments start from.
                file = store.open(folders[directory] / f"{stream}.bin", size_bytes=size_bytes)
                stack.callback(file.close)
                self._files[directory, stream] = file
            self._resources = stack.pop_all()

    @property
    def weights_stream(self) -> Stream:
        """The stream the device computes with."""
        return weights_stream(self.form)

    def read(self, layout: UnitLayout, chunk: Chunk, stream: Stream, target: torch.Tensor, *, urgent: bool = False) -> Transfer:
        """Start filling `target` (1-D, `stream.length(chunk.length)` elements of the stream's dtype)."""
        return self._read(layout, chunk, stream, 0, target, urgent=urgent)

    def write(self, layout: UnitLayout, chunk: Chunk, stream: Stream, source: torch.Tensor) -> Transfer:
        """Start writing `source` (1-D, `stream.length(chunk.length)` elements of the stream's dtype)."""
        assert source.numel() == stream.length(chunk.length) and source.dtype is stream.dtype
        place = self._table[layout.index, chunk.index, stream]
        with self._counter:
            self.bytes_written += source.nbytes
        return self._files[place.directory, stream].write(place.offset_bytes, source)

    def read_weights(self, layout: UnitLayout, target: torch.Tensor) -> list[tuple[Chunk, Transfer]]:
        """Start reading a unit's working copy into the flat `target`, ahead of the optimizer's transfers."""
        return [
            (chunk, self.read(layout, chunk, self.weights_stream, target[chunk.offset : chunk.offset + chunk.length], urgent=True))
            for chunk in layout.chunks
        ]

    def read_parameter(self, layout: UnitLayout, parameter: ParameterLayout) -> torch.Tensor:
        """A parameter's most exact value, in its shape: fp32 from the master, or the working copy's dtype where it is frozen."""
        streams = master_streams(self.form) if parameter.trainable else (self.weights_stream,)
        parts = [torch.empty(parameter.elements, dtype=stream.dtype) for stream in streams]
        transfers, done = [], 0
        for chunk in layout.chunks:
            start = max(parameter.offset, chunk.offset)
            length = min(parameter.offset + parameter.elements, chunk.offset + chunk.length) - start
            if length > 0:
                for stream, part in zip(streams, parts, strict=True):
                    transfers.append(self._read(layout, chunk, stream, start - chunk.offset, part[done : done + length], urgent=True))
                done += length
        for transfer in transfers:
            transfer.wait()
        if len(parts) == 1:
            return parts[0].view(parameter.shape)
        master = torch.empty(parameter.elements)
        join_master(parts[0], parts[1], master, pool=self._pool)
        return master.view(parameter.shape)

    def load_unit(self, layout: UnitLayout, read: Callable[[int], torch.Tensor]) -> None:
        """Fill a unit's streams from `read(parameter index)`, which returns the parameter on the CPU; moments stay zero.

        Holds one parameter and one chunk at a time.
        """
        held, values = -1, torch.empty(0)
        for chunk in layout.chunks:
            master = torch.zeros(chunk.length, dtype=torch.float32)
            for piece in layout.pieces(chunk):
                place = layout.parameters[piece.parameter]
                if held != piece.parameter:
                    held, values = piece.parameter, read(piece.parameter).reshape(-1)
                start = chunk.offset + piece.offset - place.offset
                master[piece.offset : piece.offset + piece.length].copy_(values[start : start + piece.length])
            parts = self._divide(master) if chunk.trainable else {self.weights_stream: master.to(self.weights_stream.dtype)}
            for transfer in [self.write(layout, chunk, stream, part) for stream, part in parts.items()]:
                transfer.wait()

    def _divide(self, master: torch.Tensor) -> dict[Stream, torch.Tensor]:
        """`master` (fp32) as the streams it is kept in."""
        if not self.form.is_split:
            return {Stream.MASTER: master}
        weights, remainder = (torch.empty(master.numel(), dtype=stream.dtype) for stream in master_streams(self.form))
        split_master(master, weights, remainder, pool=self._pool)
        return {Stream.WEIGHTS: weights, Stream.REMAINDER: remainder}

    def close(self) -> None:
        """Close the files and give the directories free; the files stay."""
        self._resources.close()

    def _read(self, layout: UnitLayout, chunk: Chunk, stream: Stream, skip: int, target: torch.Tensor, *, urgent: bool) -> Transfer:
        assert target.dtype is stream.dtype and skip + target.numel() <= stream.length(chunk.length)
        place = self._table[layout.index, chunk.index, stream]
        with self._counter:
            self.bytes_read += target.nbytes
        file = self._files[place.directory, stream]
        return file.read(place.offset_bytes + skip * stream.dtype.itemsize, target, urgent=urgent)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[IO[bytes]]:
    """Make `folder` and hold its lock."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("ab")
    except OSError as error:
        raise StorageError(
            f"the state directory cannot be used: {error.strerror}",
            place=str(folder),
            remedy="Name a folder on a local drive that this user may write to.",
            errno=error.errno,
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StorageError(
                "the state directory is in use by another run", place=str(folder), remedy="Use another folder.", errno=error.errno
            ) from error
        yield lock


def _remove_leftovers(folders: Sequence[Path]) -> None:
    for folder in folders:
        for stream in Stream:
            (folder / f"{stream}.bin").unlink(missing_ok=True)


def _check_space(folders: Sequence[Path], sizes: dict[tuple[int, Stream], int]) -> None:
    needs: dict[int, tuple[Path, int]] = {}
    for (directory, _), size_bytes in sizes.items():
        folder = folders[directory]
        device = os.stat(folder).st_dev  # noqa: PTH116 - directories on one file system share its space
        needs[device] = (folder, needs.get(device, (folder, 0))[1] + size_bytes)
    for folder, need in needs.values():
        free = shutil.disk_usage(folder).free
        if need > free:
            raise CapacityError(
                f"the model states need {format_bytes(need)}, {format_bytes(free)} are free",
                need_bytes=need,
                have_bytes=free,
                place=str(folder),
                remedy="Free space, or add a state directory on another drive.",
            )
