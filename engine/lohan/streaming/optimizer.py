"""AdamW on the CPU, unit by unit as gradients arrive, over states that are read from and written back to the state store in chunks.

One thread keeps three chunks in flight: the states of the next are read while this one is updated and the one before is written.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from lohan._native import AdamSegment, AdamState, ThreadPool, adamw_update, gradient_norm
from lohan.errors import EngineError
from lohan.states.streams import Stream, trainable_streams
from lohan.streaming.gradients import HostGradient
from lohan.streaming.pending import Failure, PendingUpdates

if TYPE_CHECKING:
    from lohan.memory.arena import Arena
    from lohan.memory.store import Transfer
    from lohan.states.layout import Chunk, UnitLayout
    from lohan.states.state_store import StateStore

_CHUNKS_IN_FLIGHT = 3  # one being read, one being updated, one being written


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """One param group's values, as they were when the backward began."""

    learning_rate: float
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float


def read_groups(optimizer: torch.optim.Optimizer) -> list[Hyperparameters]:
    """The groups' current values; a tensor learning rate is read."""
    return [
        Hyperparameters(
            float(group["lr"]), float(group["betas"][0]), float(group["betas"][1]), float(group["eps"]), float(group["weight_decay"])
        )
        for group in optimizer.param_groups
    ]


@dataclass(frozen=True, slots=True)
class StepStatistics:
    """One step's gradients, before the update; `step` counts from 1."""

    step: int
    squared_gradient_norm: float
    """Sum of squares over all parameters, in fp64."""
    non_finite: int
    """Gradient elements that are NaN or infinite."""

    @property
    def gradient_norm(self) -> float:
        return float(self.squared_gradient_norm**0.5)


@dataclass(slots=True)
class UnitUpdate:
    """One unit's gradients and what to do with them. `segments` maps a chunk's index to its segments; chunks without any are skipped."""

    layout: UnitLayout
    step: int
    gradients: HostGradient
    touched: frozenset[int]
    segments: dict[int, list[AdamSegment]]
    unread_chunks: int = 0
    unwritten_chunks: int = 0


_Buffers = dict[Stream, torch.Tensor]
"""Host memory for one chunk's states."""


@dataclass(slots=True)
class _Job:
    """One chunk on its way through the pipeline."""

    update: UnitUpdate
    chunk: Chunk
    buffers: _Buffers
    transfers: list[Transfer] = field(default_factory=list)


class StepCounts:
    """Updates each parameter has had: one that gets no gradient in a step keeps its count, as in torch.optim."""

    def __init__(self, layouts: Sequence[UnitLayout], group_of: Sequence[Sequence[int | None]]) -> None:
        """`group_of[unit][parameter]` is the parameter's param group, None where it is frozen."""
        self._counts = [[0] * len(layout.parameters) for layout in layouts]
        self._group_of = group_of

    def advance(self, layout: UnitLayout, touched: frozenset[int], groups: Sequence[Hyperparameters]) -> dict[int, list[AdamSegment]]:
        """Count one update of the `touched` parameters and return its segments per chunk."""
        counts = self._counts[layout.index]
        for parameter in touched:
            counts[parameter] += 1
        segments: dict[int, list[AdamSegment]] = {}
        for chunk in layout.chunks:
            for piece in layout.pieces(chunk):
                if piece.parameter in touched:
                    group = self._group_of[layout.index][piece.parameter]
                    assert group is not None, "a frozen parameter has no gradient"
                    values = groups[group]
                    segments.setdefault(chunk.index, []).append(
                        AdamSegment(
                            piece.offset,
                            piece.length,
                            values.learning_rate,
                            values.beta1,
                            values.beta2,
                            values.epsilon,
                            values.weight_decay,
                            counts[piece.parameter],
                        )
                    )
        return segments


class OptimizerWorker:
    """The thread that updates units. `submit` may be called from any thread; errors go to `failure`.

    Args:
        give_back: called with a unit's gradients once they have been read.
        chunk_elements: of the largest chunk.
    """

    def __init__(
        self,
        store: StateStore,
        arena: Arena,
        pending: PendingUpdates,
        failure: Failure,
        give_back: Callable[[HostGradient], None],
        *,
        chunk_elements: int,
        threads: int,
    ) -> None:
        self._store, self._pending, self._failure, self._give_back = store, pending, failure, give_back
        self._pool = ThreadPool(threads)
        allocate = partial(arena.allocate, holder="optimizer staging")
        self._free: list[_Buffers] = [
            {stream: allocate(stream.length(chunk_elements), stream.dtype) for stream in trainable_streams(store.form)}
            for _ in range(_CHUNKS_IN_FLIGHT)
        ]
        self._updates: queue.SimpleQueue[UnitUpdate | None] = queue.SimpleQueue()
        self._chunks: deque[tuple[UnitUpdate, Chunk]] = deque()
        self._reading: deque[_Job] = deque()
        self._writing: deque[_Job] = deque()
        self._closing = False
        self._norms: dict[int, dict[int, tuple[float, int]]] = {}
        self._thread = threading.Thread(target=self._run, name="lohan-optimizer", daemon=True)
        self._thread.start()

    def submit(self, update: UnitUpdate) -> None:
        """Queue a unit's update; readers of the unit wait from now on."""
        self._pending.begin(update.layout.index)
        self._updates.put(update)

    def statistics(self) -> StepStatistics | None:
        """What is known of the newest step's gradients: all of it once every update is done; None before the first."""
        steps = dict(self._norms)  # a copy: the worker may be adding to it
        if not steps:
            return None
        step = max(steps)
        units = dict(steps[step])
        # In unit order, so that the sum does not depend on the order of arrival.
        return StepStatistics(step, sum(units[unit][0] for unit in sorted(units)), sum(count for _, count in units.values()))

    def close(self) -> None:
        """Finish what was submitted and end the thread."""
        self._updates.put(None)
        if threading.current_thread() is not self._thread:  # the garbage collector may close a forgotten session from here
            self._thread.join()
        self._free.clear()

    def _run(self) -> None:
        try:
            while self._advance():
                pass
        except Exception as error:  # noqa: BLE001 - reported to whoever waits for an update
            self._failure.set("the optimizer", error)
            self._abandon()

    def _advance(self) -> bool:
        """One turn of the pipeline; False when closed and empty."""
        while self._free and len(self._reading) < _CHUNKS_IN_FLIGHT - 1:
            taken = self._next_chunk()
            if taken is None:
                break
            self._reading.append(self._start_reading(*taken))
        if self._reading:
            job = self._reading.popleft()
            self._update(job)
            self._writing.append(job)
        while self._writing and (not self._free or not (self._reading or self._chunks or not self._updates.empty())):
            self._finish_writing(self._writing.popleft())
        return bool(self._reading or self._writing or self._chunks or not self._closing)

    def _next_chunk(self) -> tuple[UnitUpdate, Chunk] | None:
        """The next chunk to update; waits for one only when nothing else is in flight."""
        while not self._chunks and not self._closing:
            idle = not self._reading and not self._writing
            if not idle and self._updates.empty():
                return None
            update = self._updates.get()
            if update is None:
                self._closing = True
            else:
                self._open(update)
        return self._chunks.popleft() if self._chunks else None

    def _open(self, update: UnitUpdate) -> None:
        """Measure a unit's gradients, refuse non-finite ones, and queue its chunks."""
        update.gradients.ready.synchronize()
        squared_norm, non_finite = 0.0, 0
        for index in sorted(update.touched):
            place = update.layout.parameters[index]
            part = update.gradients.buffer[place.offset : place.offset + place.elements]
            result = gradient_norm(part, pool=self._pool)
            squared_norm += result.squared_norm
            non_finite += result.non_finite
        self._norms = {step: norms for step, norms in self._norms.items() if step >= update.step - 1}
        self._norms.setdefault(update.step, {})[update.layout.index] = (squared_norm, non_finite)
        if non_finite:
            raise EngineError(
                f"{non_finite} gradients of {update.layout.name} are NaN or infinite in step {update.step}; its weights were not updated",
                place=update.layout.name,
                remedy="Start again with a lower learning rate, and check the data for rows without trained tokens.",
            )
        chunks = [chunk for chunk in update.layout.chunks if chunk.index in update.segments]
        update.unread_chunks = update.unwritten_chunks = len(chunks)
        self._chunks.extend((update, chunk) for chunk in chunks)

    def _start_reading(self, update: UnitUpdate, chunk: Chunk) -> _Job:
        job = _Job(update, chunk, self._free.pop())
        for stream, part in _parts(job.buffers, chunk).items():
            job.transfers.append(self._store.read(update.layout, chunk, stream, part))
        return job

    def _update(self, job: _Job) -> None:
        for transfer in job.transfers:
            transfer.wait()
        update, chunk = job.update, job.chunk
        states = _parts(job.buffers, chunk)
        gradients = update.gradients.buffer[chunk.offset : chunk.offset + chunk.length]
        adamw_update(update.segments[chunk.index], gradients, make_adam_state(states), pool=self._pool)
        update.unread_chunks -= 1
        if update.unread_chunks == 0:
            self._give_back(update.gradients)
        job.transfers = [self._store.write(update.layout, chunk, stream, part) for stream, part in states.items()]

    def _finish_writing(self, job: _Job) -> None:
        for transfer in job.transfers:
            transfer.wait()
        self._free.append(job.buffers)
        job.update.unwritten_chunks -= 1
        if job.update.unwritten_chunks == 0:
            self._pending.finish(job.update.layout.index)

    def _abandon(self) -> None:
        """After an error: let transfers end before their buffers go; nothing more is updated."""
        for job in (*self._reading, *self._writing):
            job.transfers.clear()
        self._chunks.clear()


def _parts(buffers: _Buffers, chunk: Chunk) -> _Buffers:
    """What `chunk` needs of each buffer."""
    return {stream: buffer[: stream.length(chunk.length)] for stream, buffer in buffers.items()}


_CODED = {Stream.FIRST_CODES: "first_moment", Stream.SECOND_CODES: "second_moment"}


def make_adam_state(streams: Mapping[Stream, torch.Tensor]) -> AdamState:
    """The native core's view of a chunk's states; it takes 8-bit codes in place of moments."""
    return AdamState(**{_CODED.get(stream, str(stream)): tensor for stream, tensor in streams.items()})


def check_optimizer(optimizer: Any, trainable: Sequence[tuple[str, torch.nn.Parameter]], known: Sequence[torch.nn.Parameter]) -> list[int]:
    """See that `optimizer` is one the engine computes exactly, and find the param group of each trainable parameter.

    Args:
        trainable: (name, parameter) of all that get updated.
        known: all parameters of the model, frozen ones too.

    Returns:
        One group index per entry of `trainable`.

    Raises:
        EngineError: another class or option, a used optimizer, an unknown parameter, or one that is missing.
    """
    if type(optimizer) is not torch.optim.AdamW:
        raise EngineError(
            f"the optimizer is {type(optimizer).__name__}, expected torch.optim.AdamW itself", remedy="Pass a torch.optim.AdamW."
        )
    if optimizer.state:
        raise EngineError(
            "the optimizer has already made steps", remedy="Pass a new torch.optim.AdamW; its states are kept in the state store."
        )
    model_ids = {id(parameter) for parameter in known}
    group_of: dict[int, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        for option in ("amsgrad", "maximize", "capturable", "differentiable"):
            if group.get(option):
                raise EngineError(
                    f"param group {index} sets {option}, which is not supported", remedy=f"Make the optimizer without {option}."
                )
        for parameter in group["params"]:
            if id(parameter) not in model_ids:
                raise EngineError(
                    f"param group {index} holds a parameter of shape {tuple(parameter.shape)} that is not in the model",
                    remedy="Make the optimizer from this model's parameters, after the last change to the model.",
                )
            group_of[id(parameter)] = index
    for name, parameter in trainable:
        if id(parameter) not in group_of:
            raise EngineError(
                f"parameter {name} requires grad but is in no param group",
                place=name,
                remedy="Add it to the optimizer, or freeze it with requires_grad_(False).",
            )
    return [group_of[id(parameter)] for _, parameter in trainable]
