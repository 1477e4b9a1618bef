"""The model states: master weights, moments and the working copy of every unit, in plain preallocated files and in RAM.

Each state directory holds one file per stream. A unit's chunks go round robin over the directories, so that reading one unit uses all
drives. The table from (unit, chunk, stream) to a place is computed from the layouts, never searched.

With `durability = step` a chunk has two slots in its file, and a step becomes the one to resume from in this order: data files synced,
step record written and synced beside the old one, renamed over it, directory synced. RAM then only saves reads.

With `durability = snapshot` the same is done for the steps that are committed, and only for those: in between, writes go again and again
to the slots that the last record does not name, and chunks in RAM stay there; a commit writes them to their slots first.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lohan._native import ThreadPool, checksum, copy_with_checksum, join_master, split_master
from lohan.config import Durability, UnsafeFilesystems
from lohan.errors import ConfigError, EngineError, ResumeError
from lohan.memory.arena import Arena, Paging
from lohan.memory.store import Store, StoreFile, Transfer
from lohan.states.named import NamedSnapshots
from lohan.states.preflight import check_filesystems, check_size, check_space, locked
from lohan.states.record import FOLDER, Fingerprint, RecordFile, StepRecord
from lohan.states.resident import Checked, Completed, ResidentChunks
from lohan.states.slots import Part, SlotTable
from lohan.states.streams import Stream, master_streams, place_chunks, streams_of, weights_stream

if TYPE_CHECKING:
    from lohan.planning.state_form import StateForm
    from lohan.states.layout import Chunk, ParameterLayout, UnitLayout


class StateStore:
    """The streams of all units. Reads and writes may come from any thread; a caller orders those that touch the same chunk.

    New states are at step 0 and belong to `load_unit` until `commit(0, …)`; after that a step is `begin_step`, its writes, `commit`. With
    durability `snapshot` a step may begin when the one before it was not committed. Reads see the newest writes, committed or not. With
    durability `none` nothing is kept and the order is not checked.

    Args:
        layouts: all units, by index.
        directories: where the files lie; chunks go round robin over them. Each is locked while it is open.
        form: which streams there are.
        store: opens the files.
        durability: what can be resumed.
        ram_bytes: of host memory for chunks, spread evenly (`lohan.planning.ram_states`); a resumed store may have another than before.
            With durability `none` these have no place in the files.
        spare_bytes: of host memory for second places of states in RAM, so that updates may be taken back (`rollback`) where no committed
            step could bring them back; none with durability `step`.
        weights_paging: of their working copies; see `ResidentChunks`.
        resume: go on from the step record that is there; otherwise what an earlier run left is overwritten.
        resume_from: go on from the snapshot of this name, which stays; what an earlier run left is overwritten.
        arena: where that memory comes from; None: an account of its own.
        threads: for checksums and for splitting and joining masters.
        unsafe_filesystems: whether the directories' file systems are checked.

    Raises:
        CapacityError: the directories' file systems, or host memory, have too little space.
        ConfigError: a directory is on a file system that does not suit states, or there is nothing to resume with durability `none`.
        ResumeError: the states to resume are missing, damaged, or belong to something else.
        StorageError: a directory cannot be made, is in use by another run, or a file operation failed.
    """

    def __init__(
        self,
        layouts: Sequence[UnitLayout],
        directories: Sequence[Path],
        form: StateForm,
        store: Store,
        *,
        durability: Durability = Durability.NONE,
        ram_bytes: int = 0,
        spare_bytes: int = 0,
        weights_paging: Paging = Paging.PAGEABLE,
        resume: bool = False,
        resume_from: str | None = None,
        arena: Arena | None = None,
        threads: int = 1,
        unsafe_filesystems: UnsafeFilesystems = UnsafeFilesystems.REFUSE,
    ) -> None:
        self.form, self.durability, self.transfers = form, durability, store
        self.record: StepRecord | None = None  # what was resumed
        self._newest: StepRecord | None = None  # what was committed last
        self._pool = ThreadPool(threads)
        self._counter = threading.Lock()
        self.bytes_read = 0
        self.bytes_written = 0
        self._files: dict[tuple[int, Stream], StoreFile] = {}
        self._lent: set[tuple[int, int]] = set()  # chunks that may have been changed in place since the last commit
        self._unsynced: set[tuple[int, Stream]] = set()
        self._unsaved: set[Part] = set()  # resident parts whose newest bytes no file has: durability `snapshot`
        self._slots = SlotTable()
        self._zero_sums: dict[int, int] = {}
        self._changed = threading.Condition()
        self._step = -1
        self._open_step: int | None = 0
        self._is_committing = False
        self._ended = ""
        if (resume or resume_from is not None) and durability is Durability.NONE:
            raise ConfigError("there is nothing to resume with durability none", place="engine.durability", remedy="Start the run anew.")
        with contextlib.ExitStack() as stack:
            folders = [directory / FOLDER for directory in directories]
            for folder in folders:
                stack.enter_context(locked(folder))
            check_filesystems(folders, durability, unsafe_filesystems)
            self._resident = ResidentChunks(
                layouts,
                form,
                arena or stack.enter_context(Arena()),
                ram_bytes,
                weights_paging,
                directories=len(directories),
                spare_bytes=0 if durability is Durability.STEP else spare_bytes,
            )
            stack.callback(self._resident.free)
            in_memory_alone = self._resident.chunks if durability is Durability.NONE else ()
            slots = 1 if durability is Durability.NONE else 2
            self._table, sizes = place_chunks(layouts, form, len(directories), slots=slots, without=in_memory_alone)
            self._record_file = RecordFile(folders, Fingerprint.of(layouts, form, len(directories)))
            self.named = NamedSnapshots(directories, layouts, form, durability, store, files=self._files, table=self._table)
            self.named.sweep()
            if resume_from is not None:
                self.named.read(resume_from)  # before anything is overwritten
                self._begin(folders, sizes, store, stack)
                self._restore(resume_from)
            elif resume:
                self._reopen(folders, sizes, store, stack)
            else:
                self._begin(folders, sizes, store, stack)
            stack.callback(self.named.close)
            self._resources = stack.pop_all()

    @property
    def weights_stream(self) -> Stream:
        """The stream the device computes with."""
        return weights_stream(self.form)

    def read(self, layout: UnitLayout, chunk: Chunk, stream: Stream, target: torch.Tensor, *, urgent: bool = False) -> Transfer:
        """Start filling `target` (1-D, `stream.length(chunk.length)` elements of the stream's dtype).

        Waiting for it raises ResumeError where resumed bytes are not those that were committed.
        """
        return self._read(layout, chunk, stream, 0, target, urgent=urgent)

    def write(self, layout: UnitLayout, chunk: Chunk, stream: Stream, source: torch.Tensor) -> Transfer:
        """Start writing `source` (1-D, `stream.length(chunk.length)` elements of the stream's dtype), which may be `resident` memory.

        Where it is the chunk's `spare` memory nothing is copied: the two places change their parts.

        Raises:
            EngineError: durability is not `none`, and no step is open.
        """
        assert source.numel() == stream.length(chunk.length) and source.dtype is stream.dtype
        part = (layout.index, chunk.index, stream)
        spare = self._resident.spare(part)
        if spare is not None and spare.data_ptr() == source.data_ptr():
            self._resident.exchange(part)
        memory = self._resident.get(part)
        is_in_place = memory is not None and memory.data_ptr() == source.data_ptr()
        if self.durability is Durability.NONE:
            if memory is None:
                return self._write_file(part, 0, source)
            if not is_in_place:
                memory.copy_(source)
            return Completed()
        with self._changed:
            if self._open_step is None or self._ended:
                raise EngineError(f"states are written outside a step{self._ended and f': {self._ended}'}", place=layout.name)
        to_copy = memory is not None and not is_in_place
        if memory is not None and self.durability is Durability.SNAPSHOT:
            if to_copy:
                memory.copy_(source)
            with self._counter:
                self._unsaved.add(part)
            return Completed()
        total = copy_with_checksum(memory, source, pool=self._pool) if to_copy else checksum(source, pool=self._pool)
        return self._write_file(part, self._slots.write(part, total), source)

    def resident(self, layout: UnitLayout, chunk: Chunk) -> dict[Stream, torch.Tensor] | None:
        """The chunk's own memory, stream by stream, or None where it has none: to update in place and then `write` from.

        Its contents are those of the newest write. `rollback` brings them back from the files.
        """
        if (layout.index, chunk.index) not in self._resident.chunks:
            return None
        with self._counter:
            self._lent.add((layout.index, chunk.index))
        return {stream: self._resident.parts[layout.index, chunk.index, stream] for stream in streams_of(chunk, self.form)}

    @property
    def units_with_spare(self) -> frozenset[int]:
        """The units that have a second place in memory: see `spare`."""
        return self._resident.units_with_spare

    def spare(self, layout: UnitLayout, chunk: Chunk) -> dict[Stream, torch.Tensor] | None:
        """The chunk's second place, stream by stream, or None where it has none: to update into and then `write` from.

        What it holds before is of no meaning. `rollback` makes the first place the chunk's again.
        """
        if layout.index not in self._resident.units_with_spare:
            return None
        found = {stream: self._resident.spare((layout.index, chunk.index, stream)) for stream in streams_of(chunk, self.form)}
        return {stream: memory for stream, memory in found.items() if memory is not None}

    def resident_weights(self, layout: UnitLayout, chunk: Chunk) -> torch.Tensor | None:
        """The memory of a chunk's working copy, to be read only; None where it has none."""
        return self._resident.get((layout.index, chunk.index, self.weights_stream))

    def read_weights(self, layout: UnitLayout, target: torch.Tensor, chunks: Sequence[Chunk]) -> list[tuple[Chunk, Transfer]]:
        """Start reading the working copies of a unit's `chunks` into its flat `target`, ahead of the optimizer's transfers."""
        return [
            (chunk, self.read(layout, chunk, self.weights_stream, target[chunk.offset : chunk.offset + chunk.length], urgent=True))
            for chunk in chunks
        ]

    def read_parameter(self, layout: UnitLayout, parameter: ParameterLayout) -> torch.Tensor:
        """A parameter's most exact value, in its shape: fp32 from the master, or the working copy's dtype where it is frozen."""
        streams = master_streams(self.form) if parameter.trainable else (self.weights_stream,)
        halves = [torch.empty(parameter.elements, dtype=stream.dtype) for stream in streams]
        transfers, done = [], 0
        for chunk in layout.chunks:
            start = max(parameter.offset, chunk.offset)
            length = min(parameter.offset + parameter.elements, chunk.offset + chunk.length) - start
            if length > 0:
                for stream, half in zip(streams, halves, strict=True):
                    transfers.append(self._read(layout, chunk, stream, start - chunk.offset, half[done : done + length], urgent=True))
                done += length
        for transfer in transfers:
            transfer.wait()
        if len(halves) == 1:
            return halves[0].view(parameter.shape)
        master = torch.empty(parameter.elements)
        join_master(halves[0], halves[1], master, pool=self._pool)
        return master.view(parameter.shape)

    def load_unit(self, layout: UnitLayout, read: Callable[[int, int, int], torch.Tensor]) -> None:
        """Fill a unit's streams; moments are zero. Holds one chunk at a time, whatever the size of a parameter.

        Args:
            read: takes a parameter's index, and start and stop of a stretch of its elements; returns that as a 1-D tensor on the CPU.
        """
        for chunk in layout.chunks:
            master = torch.zeros(chunk.length, dtype=torch.float32)
            for piece in layout.pieces(chunk):
                start = chunk.offset + piece.offset - layout.parameters[piece.parameter].offset
                values = read(piece.parameter, start, start + piece.length)
                master[piece.offset : piece.offset + piece.length].copy_(values)
            parts = self._divide(master) if chunk.trainable else {self.weights_stream: master.to(self.weights_stream.dtype)}
            transfers = [self.write(layout, chunk, stream, part) for stream, part in parts.items()]
            for stream in streams_of(chunk, self.form):
                if stream not in parts:
                    self._set_zero((layout.index, chunk.index, stream), stream.size_bytes(chunk.length))
            for transfer in transfers:
                transfer.wait()

    def begin_step(self, step: int) -> None:
        """Allow the writes of `step`, which come after the record of the step before is durable: this waits for it.

        With durability `snapshot` the step before need not have one; what is waited for is a commit that is under way.

        Raises:
            EngineError: the step is committed already or another one is open, or a commit failed meanwhile.
        """
        self._resident.settle()
        if self.durability is Durability.NONE:
            self._open_step = step
            return
        with self._changed:
            if self.durability is Durability.STEP:
                self._changed.wait_for(lambda: self._ended or self._step >= step - 1)
            else:
                self._changed.wait_for(lambda: self._ended or not self._is_committing)
            if self._ended or step not in self._steps_to_begin():
                raise EngineError(f"step {step} cannot begin: {self._ended or f'step {self._step} is committed'}")
            self._open_step = step

    def _steps_to_begin(self) -> tuple[int, ...]:
        """The open step, which may be begun again, and the one after it where that one may begin."""
        if self._open_step is None:
            return (self._step + 1,)
        may_pass = self.durability is Durability.SNAPSHOT and self._step >= 0
        return (self._open_step, self._open_step + 1) if may_pass else (self._open_step,)

    def commit(self, step: int, payload: Mapping[str, Any]) -> None:
        """Make `step` the one that is resumed from, with `payload` (JSON values). All its transfers must have ended. Blocks.

        Raises:
            EngineError: `step` is not the one that was begun, or `payload` is not JSON.
            StorageError: the file system refused. Which step is resumed is then open, and this store takes no more writes.
        """
        if self.durability is Durability.NONE:
            self._step, self._open_step = step, None
            return
        with self._changed:
            if self._ended or self._open_step != step:
                raise EngineError(f"step {step} cannot be committed: {self._ended or f'the step begun is {self._open_step}'}")
            self._is_committing = True
        try:
            self._save_memory()
            _sync_all([self._files[key] for key in sorted(self._unsynced)])
            self._newest = self._record_file.write(step, self._slots.newest(), payload)
        except BaseException as error:
            # After a failed sync nobody knows what is on the drive: the slots of either step may be the ones a reader will find.
            self._end(f"the commit of step {step} failed ({error})")
            raise
        self._slots.commit()
        self._unsynced.clear()
        self._lent.clear()
        with self._changed:
            self._step, self._open_step, self._is_committing = step, None, False
            self._changed.notify_all()

    def rollback(self) -> None:
        """Forget all writes since the last commit; where steps are not committed, all that went to second places (`spare`) since the step
        began. A step that is open stays open. None of its transfers may be under way.

        Raises:
            EngineError: durability is not `step` and no unit has a second place, or a commit failed.
            StorageError, ResumeError: what lies in memory cannot be read back.
        """
        if self._resident.units_with_spare:
            self._resident.take_back()
            return
        if self.durability is not Durability.STEP or self._ended or self._step < 0:
            raise EngineError(f"there is no step to go back to{self._ended and f': {self._ended}'}", remedy="Start the run anew.")
        written = set(self._slots.rollback())
        self._fill_memory([part for part in self._resident.parts if part in written or part[:2] in self._lent])
        self._lent.clear()

    def keep(self, name: str) -> None:
        """Keep the step that was committed last under `name`: see `NamedSnapshots`. Before the next step's first write."""
        assert self._newest is not None, "a step was committed"
        self.named.begin(name, self._newest, self._slots.newest())

    def close(self) -> None:
        """Close the files, give memory back and the directories free; the files stay."""
        self._end("the store is closed")
        self._resources.close()

    def _begin(self, folders: Sequence[Path], sizes: Mapping[tuple[int, Stream], int], store: Store, stack: contextlib.ExitStack) -> None:
        """Make new files in place of an earlier run's."""
        self._record_file.begin()
        for folder in folders:
            for stream in Stream:
                (folder / f"{stream}.bin").unlink(missing_ok=True)
        check_space(folders, sizes)
        for (directory, stream), size_bytes in sizes.items():
            # A new file: space that was never written reads as zeros, which is what moments start from.
            file = store.open(folders[directory] / f"{stream}.bin", size_bytes=size_bytes)
            stack.callback(file.close)
            self._files[directory, stream] = file
        self._record_file.files_made()

    def _reopen(self, folders: Sequence[Path], sizes: Mapping[tuple[int, Stream], int], store: Store, stack: contextlib.ExitStack) -> None:
        """Open the files of the step record as they are."""
        self.record, parts = self._record_file.read()
        for (directory, stream), size_bytes in sizes.items():
            path = folders[directory] / f"{stream}.bin"
            check_size(path, size_bytes)
            file = store.open(path)
            stack.callback(file.close)
            self._files[directory, stream] = file
        self._go_on(self.record, parts)

    def _restore(self, name: str) -> None:
        """Give the new files the states of the snapshot `name`, and make them the ones to resume from."""
        record, sums = self.named.read(name)
        self.named.restore(name)
        _sync_all(list(self._files.values()))
        parts = {part: (0, total) for part, total in sums.items()}
        self.record = self._record_file.write(record.step, parts, record.payload)
        self._go_on(self.record, parts)

    def _go_on(self, record: StepRecord, parts: Mapping[Part, tuple[int, int]]) -> None:
        self._slots.restore(parts)
        self._newest, self._step, self._open_step = record, record.step, None
        self._fill_memory(list(self._resident.parts))

    def _save_memory(self) -> None:
        """Write to the files what only memory has."""
        transfers = []
        for part in sorted(self._unsaved):
            memory = self._resident.parts[part]
            total = checksum(memory, pool=self._pool)  # while the parts before are being written
            transfers.append(self._write_file(part, self._slots.write(part, total), memory))
        for transfer in transfers:
            transfer.wait()
        self._unsaved.clear()

    def _fill_memory(self, parts: Sequence[Part]) -> None:
        """Read resident parts from the files."""
        transfers = []
        for part in parts:
            memory = self._resident.parts[part]
            transfers.append(self._read_file(part, 0, memory, whole=True, urgent=False))
        for transfer in transfers:
            transfer.wait()

    def _set_zero(self, part: Part, size_bytes: int) -> None:
        """Note that a part of new states is zero: its file is by itself."""
        memory = self._resident.get(part)
        if memory is not None:
            memory.zero_()
        if self.durability is not Durability.NONE:
            self._slots.write(part, self._checksum_of_zeros(size_bytes))
            self._unsynced.add((self._table[part].directory, part[2]))

    def _checksum_of_zeros(self, size_bytes: int) -> int:
        if size_bytes not in self._zero_sums:
            self._zero_sums[size_bytes] = checksum(torch.zeros(size_bytes, dtype=torch.uint8), pool=self._pool)
        return self._zero_sums[size_bytes]

    def _divide(self, master: torch.Tensor) -> dict[Stream, torch.Tensor]:
        """`master` (fp32) as the streams it is kept in."""
        if not self.form.is_split:
            return {Stream.MASTER: master}
        weights, remainder = (torch.empty(master.numel(), dtype=stream.dtype) for stream in master_streams(self.form))
        split_master(master, weights, remainder, pool=self._pool)
        return {Stream.WEIGHTS: weights, Stream.REMAINDER: remainder}

    def _write_file(self, part: Part, slot: int, source: torch.Tensor) -> Transfer:
        self.named.wait_for(part, slot)
        place = self._table[part]
        with self._counter:
            self.bytes_written += source.nbytes
            self._unsynced.add((place.directory, part[2]))
        return self._files[place.directory, part[2]].write(place.offsets_bytes[slot], source)

    def _read(self, layout: UnitLayout, chunk: Chunk, stream: Stream, skip: int, target: torch.Tensor, *, urgent: bool) -> Transfer:
        assert target.dtype is stream.dtype and skip + target.numel() <= stream.length(chunk.length)
        part = (layout.index, chunk.index, stream)
        memory = self._resident.get(part)
        if memory is not None:
            target.copy_(memory[skip : skip + target.numel()])
            return Completed()
        is_whole = target.numel() == stream.length(chunk.length)
        if not is_whole and self._slots.expected(part) is not None:
            # The sum is of the whole: look at that once, and then read the stretch.
            self._read_file(part, 0, torch.empty(stream.length(chunk.length), dtype=stream.dtype), whole=True, urgent=urgent).wait()
        return self._read_file(part, skip * stream.dtype.itemsize, target, whole=is_whole, urgent=urgent)

    def _read_file(self, part: Part, skip_bytes: int, target: torch.Tensor, *, whole: bool, urgent: bool) -> Transfer:
        place = self._table[part]
        with self._counter:
            self.bytes_read += target.nbytes
        slot = self._slots.current(part)
        transfer = self._files[place.directory, part[2]].read(place.offsets_bytes[slot] + skip_bytes, target, urgent=urgent)
        expected = self._slots.expected(part) if whole else None
        return transfer if expected is None else Checked(transfer, partial(self._verify, part, slot, expected, target))

    def _verify(self, part: Part, slot: int, expected: int, target: torch.Tensor) -> None:
        found = checksum(target, pool=self._pool)
        unit, chunk, stream = part
        place = self._table[part]
        if found != expected:
            raise ResumeError(
                f"{stream} of unit {unit}, chunk {chunk}, is not what was committed: checksum {found:08x} at byte"
                f" {place.offsets_bytes[slot]}, {expected:08x} in the step record",
                place=str(self._files[place.directory, stream].path),
                remedy="The drive or the file is damaged: check the drive and start the run from the beginning.",
            )
        self._slots.verified(part)

    def _end(self, why: str) -> None:
        """Take no more writes, and wake who waits for a step."""
        with self._changed:
            self._ended = self._ended or why
            self._changed.notify_all()


def _sync_all(files: Sequence[StoreFile]) -> None:
    """Make all of them durable, at the same time: they lie on different drives, and one drive's flushes share their work.

    Raises:
        StorageError: one could not be; the others have been tried.
    """
    if files:
        with ThreadPoolExecutor(len(files), thread_name_prefix="lohan-sync") as threads:
            synced = [threads.submit(file.sync) for file in files]
        for future in synced:
            future.result()
