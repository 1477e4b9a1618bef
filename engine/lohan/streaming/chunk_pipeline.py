"""Moves the chunks of units through their update: states are read, AdamW runs over them, and they are written back.

With three chunks in flight the states of the next are read while this one is updated and the one before is written. Chunks that lie in RAM
have nothing to be read: the next is the next that has, however many in RAM are updated before it, so that drives and CPU are both busy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch

from lohan._native import AdamSegment, AdamState, ThreadPool, adamw_update
from lohan.config import Durability
from lohan.planning.operations import OperationKind, UpdateSequence
from lohan.states.resident import Completed
from lohan.states.streams import Stream, trainable_streams
from lohan.streaming.hyperparameters import Hyperparameters

if TYPE_CHECKING:
    from lohan.memory.arena import Arena
    from lohan.memory.store import Transfer
    from lohan.states.layout import Chunk, UnitLayout
    from lohan.states.state_store import StateStore
    from lohan.streaming.gradients import HostGradient
    from lohan.streaming.trace import Trace


@dataclass(slots=True)
class UnitUpdate:
    """One unit's gradients and what to do with them. The optimizer's thread owns it from `submit` on."""

    layout: UnitLayout
    step: int
    gradients: HostGradient | None
    """None: this backward brought the unit none, only earlier ones of the step did."""
    touched: frozenset[int]
    """Indices of the parameters that have a gradient; chunks without any are left alone."""
    groups: Sequence[Hyperparameters]
    may_be_taken_back: bool = False
    """Whether a verdict on the step is still to come: states in RAM are then written to their second place, where they have one."""
    adds_only: bool = False
    """Whether a later backward of the step updates the unit."""
    values: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    """What is updated from: the gradients, or their fp32 sum over several backwards."""
    scale: float = 1.0
    segments: dict[int, list[AdamSegment]] = field(default_factory=dict)
    """By chunk index."""
    unread_chunks: int = 0
    unwritten_chunks: int = 0


_MOST_AHEAD = 8
"""Chunks, those in RAM among them, for which another unit is begun to find one to read: what overtakes waits for no more than these."""

_Buffers = dict[Stream, torch.Tensor]
"""Host memory for one chunk's states."""


@dataclass(slots=True)
class _Job:
    """One chunk on its way."""

    update: UnitUpdate
    chunk: Chunk
    states: _Buffers
    """What of the buffers the chunk fills, or its own memory in the state store."""
    buffers: _Buffers | None
    """To be used again; None where the states are in memory already."""
    transfers: list[Transfer] = field(default_factory=list)

    @property
    def state_bytes(self) -> int:
        return sum(part.nbytes for part in self.states.values())


class ChunkPipeline:
    """Used by the optimizer's thread only.

    Args:
        chunk_elements: of the largest chunk.
        in_flight: chunks under way at a time; each may have buffers.
        sequence: the order of each unit's chunks.
        on_read: called with a unit once its gradients are no longer needed.
        on_written: called with a unit once all its chunks are written.
        trace: is told of reads, updates and writes.
    """

    def __init__(
        self,
        store: StateStore,
        arena: Arena,
        pool: ThreadPool,
        *,
        chunk_elements: int,
        in_flight: int,
        sequence: UpdateSequence,
        on_read: Callable[[UnitUpdate], None],
        on_written: Callable[[UnitUpdate], None],
        trace: Trace | None,
    ) -> None:
        self._store, self._pool, self._on_read, self._on_written = store, pool, on_read, on_written
        self._sequence, self._trace = sequence, trace
        self._most, self._most_reading = in_flight, max(1, in_flight - 1)
        allocate = partial(arena.allocate, holder="optimizer staging", moved_by=store.transfers)
        self._free: list[_Buffers] = [
            {stream: allocate(stream.length(chunk_elements), stream.dtype) for stream in trainable_streams(store.form)}
            for _ in range(in_flight)
        ]
        self._queue: deque[tuple[UnitUpdate, Chunk]] = deque()
        self._reading: deque[_Job] = deque()
        self._counted = 0
        """Of those that are read, all but what lies in RAM; with one chunk in flight all."""
        self._uses_drives = False
        self._writing: deque[_Job] = deque()

    @property
    def idle(self) -> bool:
        """Whether everything that was added is written."""
        return not (self._queue or self._reading or self._writing)

    @property
    def hungry(self) -> bool:
        """Whether another chunk's read could begin, but none is queued."""
        if self._queue or not self._may_begin():
            return False
        return len(self._reading) < (_MOST_AHEAD if self._uses_drives else self._most_reading)

    def add(self, update: UnitUpdate) -> None:
        """Queue a unit's chunks."""
        layout = update.layout
        chunks = [layout.chunks[index] for index in self._sequence.chunks(layout.index) if index in update.segments]
        update.unread_chunks = update.unwritten_chunks = len(chunks)
        self._queue.extend((update, chunk) for chunk in chunks)

    def advance(self, *, more_to_come: bool) -> None:
        """Begin the reads there is room for, update one chunk, and end writes that nothing else can be done beside.

        Raises:
            StorageError: a transfer failed.
        """
        while self._queue and self._may_begin():
            job = self._start_reading(*self._queue.popleft())
            self._counted += self._counts(job)
            self._uses_drives = self._uses_drives or job.buffers is not None
            self._reading.append(job)
        if self._reading:
            job = self._reading.popleft()
            self._counted -= self._counts(job)
            self._update(job)
            if all(isinstance(transfer, Completed) for transfer in job.transfers):
                self._finish_writing(job)  # in RAM alone: nothing that others would wait for
            else:
                self._writing.append(job)
        while self._writing and (self._is_full() or not (self._reading or self._queue or more_to_come)):
            self._finish_writing(self._writing.popleft())

    def drain(self) -> None:
        """Do everything that was added."""
        while not self.idle:
            self.advance(more_to_come=False)

    def abandon(self) -> None:
        """After an error, or at the end: dropping the transfers waits for them."""
        for job in (*self._reading, *self._writing):
            job.transfers.clear()
        for chunks in (self._queue, self._reading, self._writing):
            chunks.clear()
        self._counted = 0

    def free(self) -> None:
        """Give the buffers back."""
        self._free.clear()

    def _is_full(self) -> bool:
        """Whether a chunk must be written before another is updated."""
        return len(self._writing) + min(len(self._reading), self._most_reading - 1) >= self._most

    def _may_begin(self) -> bool:
        """Whether the next chunk may be read, or taken where it lies."""
        return self._counted < self._most_reading and bool(self._free)

    def _counts(self, job: _Job) -> bool:
        """Whether nothing more than `_most_reading` of its kind may be begun."""
        return job.buffers is not None or self._most == 1

    def _take_back(self, job: _Job) -> None:
        if job.buffers is not None:
            self._free.append(job.buffers)

    def _start_reading(self, update: UnitUpdate, chunk: Chunk) -> _Job:
        resident = self._store.resident(update.layout, chunk)
        if resident is not None:
            return _Job(update, chunk, resident, None)
        buffers = self._free.pop()
        job = _Job(update, chunk, _parts(buffers, chunk), buffers)
        for stream, part in job.states.items():
            job.transfers.append(self._store.read(update.layout, chunk, stream, part))
        return job

    def _update(self, job: _Job) -> None:
        for transfer in job.transfers:
            transfer.wait()
        update, chunk = job.update, job.chunk
        begun = None
        if self._trace is not None:
            self._add_transfers(OperationKind.STATES_READ, job)
            begun = self._trace.host_mark(update.step)
        gradients, segments = update.values[chunk.offset : chunk.offset + chunk.length], update.segments[chunk.index]
        old, job.states = job.states, self._target(job)
        out = make_adam_state(job.states) if job.states is not old else None
        adamw_update(segments, gradients, make_adam_state(old), out=out, gradient_scale=update.scale, pool=self._pool)
        updated = self._trace.host_mark(update.step) if self._trace is not None else None
        update.unread_chunks -= 1
        if update.unread_chunks == 0:
            self._on_read(update)
        job.transfers = [self._store.write(update.layout, chunk, stream, part) for stream, part in job.states.items()]
        if self._trace is not None:
            self._add_cpu(self._trace, job, begun, updated)

    def _target(self, job: _Job) -> _Buffers:
        """Where the chunk's new states go: over the old ones, or to their second place, which then has what is not updated, too."""
        spare = self._store.spare(job.update.layout, job.chunk) if job.update.may_be_taken_back and job.buffers is None else None
        if spare is None:
            return job.states
        for start, stop in _gaps(job.update.segments[job.chunk.index], job.chunk.length):
            for stream, memory in spare.items():
                place = slice(stream.length(start), stream.length(stop))
                memory[place].copy_(job.states[stream][place])
        return spare

    def _add_cpu(self, trace: Trace, job: _Job, begun: float | None, updated: float | None) -> None:
        """Trace a chunk's update and, where its writes are for a record, the sums taken before them."""
        step, place = job.update.step, {"chunk": job.chunk.index, "bytes": job.state_bytes}
        trace.add(step, OperationKind.UPDATE, job.update.layout.index, begun, updated, **place)
        if self._store.durability is not Durability.NONE and not all(isinstance(transfer, Completed) for transfer in job.transfers):
            trace.add(step, OperationKind.CHECKSUM, job.update.layout.index, updated, trace.host_mark(step), **place)

    def _add_transfers(self, kind: OperationKind, job: _Job) -> None:
        assert self._trace is not None, "transfers are told to a trace only"
        update = job.update
        self._trace.add_transfers(update.step, kind, update.layout.index, job.chunk.index, job.transfers, bytes=job.state_bytes)

    def _finish_writing(self, job: _Job) -> None:
        for transfer in job.transfers:
            transfer.wait()
        if self._trace is not None:
            self._add_transfers(OperationKind.STATES_WRITE, job)
        self._take_back(job)
        job.update.unwritten_chunks -= 1
        if job.update.unwritten_chunks == 0:
            self._on_written(job.update)


def _gaps(segments: Sequence[AdamSegment], length: int) -> Iterator[tuple[int, int]]:
    """The stretches of a chunk that no segment covers."""
    end = 0
    for segment in sorted(segments, key=lambda segment: segment.offset):
        if segment.offset > end:
            yield end, segment.offset
        end = segment.offset + segment.length
    if end < length:
        yield end, length


def _parts(buffers: _Buffers, chunk: Chunk) -> _Buffers:
    """What `chunk` needs of each buffer."""
    return {stream: buffer[: stream.length(chunk.length)] for stream, buffer in buffers.items()}


_CODED = {Stream.FIRST_CODES: "first_moment", Stream.SECOND_CODES: "second_moment"}


def make_adam_state(streams: Mapping[Stream, torch.Tensor]) -> AdamState:
    """The native core's view of a chunk's states; it takes 8-bit codes in place of moments."""
    return AdamState(**{_CODED.get(stream, str(stream)): tensor for stream, tensor in streams.items()})
