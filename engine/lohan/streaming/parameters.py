"""Streams units' working weights from the state store into a few flat device buffers (slots), ahead of use.

A unit is loaded into a slot by one loader thread, used while it is *held* (acquire … release), and stays there until its slot is
needed or its weights are updated; *kept* units have slots of their own (`lohan.planning.slots`), which nothing else needs. On a GPU the
copy runs on its own stream: the compute stream waits for the copy before it reads, the copy waits for the compute stream's last use
before it writes.
"""

from __future__ import annotations

import math
import queue
import random
import threading
import time
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

import torch

from lohan.errors import EngineError
from lohan.memory.arena import Arena, Paging
from lohan.planning.access import AccessOrder, Phase, Slots
from lohan.planning.operations import OperationKind
from lohan.planning.step_trace import Wait
from lohan.streaming.device import Event, delay, make_stream, on_stream
from lohan.streaming.pending import Failure, PendingUpdates

if TYPE_CHECKING:
    from lohan.memory.store import Transfer
    from lohan.planning.slots import SlotSizes
    from lohan.states.layout import Chunk, UnitLayout
    from lohan.states.state_store import StateStore
    from lohan.streaming.trace import Mark, Trace

_LONGEST_DELAY_CYCLES = 2_000_000  # about 1 ms on a GPU: longer than a small unit's copy, so that a missing wait shows
_LONGEST_DELAY_SECONDS = 1e-3


class DebugMode(StrEnum):
    """How the engine helps to find its own faults."""

    OFF = "off"
    NAN_FILL = "nan_fill"
    """A slot is filled with NaN as soon as nothing holds it (that of a kept unit when its weights are updated), and copy streams are
    delayed at random: a read of weights that should not be there any more, or not yet, turns the loss into NaN."""


class _Slot:
    def __init__(self, weights: torch.Tensor, device: torch.device) -> None:
        self.weights = weights
        self.unit: int | None = None
        self.loading = False
        self.users = 0
        self.used_at = 0
        self.loaded = Event(device)
        self.last_use = Event(device)


class ParameterStream:
    """Slots and their loader.

    Args:
        layouts: all units, by index.
        store: where weights come from.
        arena: allocates host memory.
        pending: whose updates a load waits for.
        order: what to load ahead.
        slots: the device buffers.
        trace: is told of reads, copies and waits.
    """

    def __init__(
        self,
        layouts: Sequence[UnitLayout],
        store: StateStore,
        arena: Arena,
        pending: PendingUpdates,
        failure: Failure,
        order: AccessOrder,
        *,
        device: torch.device,
        dtype: torch.dtype,
        slots: SlotSizes,
        debug: DebugMode,
        trace: Trace | None,
    ) -> None:
        self._layouts, self._store, self._pending, self._failure, self._order = layouts, store, pending, failure, order
        self._debug, self._device, self._trace = debug, device, trace
        self._itemsize = dtype.itemsize
        self._delays = random.Random(0)  # noqa: S311 - not for secrets
        largest = max(layout.elements for layout in layouts)
        self._stream = make_stream(device)
        on_cpu = device.type == "cpu"
        self._staging = [
            arena.allocate(largest, dtype, holder="host staging", paging=Paging.for_copies_with(device), moved_by=store.transfers)
            for _ in range(0 if on_cpu else 2)
        ]
        self._staged = [Event(device) for _ in self._staging]

        def make_slot(elements: int) -> _Slot:
            # On the CPU a slot is host memory that files are read into directly.
            if on_cpu:
                return _Slot(arena.allocate(elements, dtype, holder="parameter slots", moved_by=store.transfers), device)
            return _Slot(torch.empty(elements, dtype=dtype, device=device), device)

        self._slots = Slots(
            [make_slot(slots.working_elements) for _ in range(slots.working)],
            {unit: make_slot(layouts[unit].elements) for unit in slots.kept},
        )
        self._changed = threading.Condition()
        self._clock = 0
        self._requests: queue.SimpleQueue[tuple[_Slot, int, int] | None] = queue.SimpleQueue()
        self.loads = 0
        failure.wake(self._changed)
        self._thread = threading.Thread(target=self._run, name="lohan-parameters", daemon=True)
        self._thread.start()

    def acquire(self, unit: int, phase: Phase) -> torch.Tensor:
        """Hold `unit` and return its flat weights (`layout.elements` long); the current stream waits for the copy.

        Raises:
            EngineError: a background stage failed, or every slot is held.
        """
        # An evaluation may run between two steps, and belongs to none.
        step = self._trace.step if self._trace is not None and phase is not Phase.EVALUATION else 0
        begun = self._trace.mark(step) if self._trace is not None else None
        cause = Wait.UPDATES if self._trace is not None and self._pending.is_pending(unit) else Wait.WEIGHTS
        with self._changed:
            slot = self._hold(unit, step)
            # As far ahead as there are slots: the prefetch keeps whatever is among these units from being thrown out.
            following = self._order.after(unit, phase, self._slots.count - 1)
            if phase is Phase.BACKWARD:
                # Where modules run in another order, a unit that is updated already may seem to follow. Its update may end with the
                # backward only, and the backward would wait for loads behind it.
                following = [index for index in following if not self._pending.is_pending(index)]
            self._prefetch(following, step)
            self._changed.wait_for(lambda: not slot.loading or self._failure.failed)
            if self._failure.failed:
                slot.users -= 1
                self._failure.check()
            self._clock += 1
            slot.used_at = self._clock
        slot.loaded.wait()
        if self._trace is not None:
            self._trace.add(step, cause, unit, begun, self._trace.mark(step))
        return slot.weights[: self._layouts[unit].elements]

    def release(self, unit: int) -> None:
        """Let go of one `acquire`; work queued on the current stream may still read the slot."""
        with self._changed:
            slot = self._find(unit)
            assert slot is not None and slot.users > 0, "released more often than acquired"
            if slot.users == 1 and unit not in self._slots.own and self._debug is DebugMode.NAN_FILL:
                slot.weights.fill_(math.nan)
                slot.unit = None
            slot.last_use.record()
            slot.users -= 1
            self._changed.notify_all()

    def invalidate(self, unit: int) -> None:
        """Forget `unit`'s weights: they are about to be updated. A load under way is discarded."""
        with self._changed:
            slot = self._find(unit)
            if slot is not None:
                assert slot.users == 0, "a unit is updated only when nothing uses it"
                if self._debug is DebugMode.NAN_FILL:
                    slot.weights.fill_(math.nan)
                    slot.last_use.record()
                slot.unit = None

    def prefetch_forward(self) -> None:
        """Start loading the first units of the next forward."""
        with self._changed:
            self._prefetch(self._order.first(self._slots.count), self._trace.step if self._trace is not None else 0)

    def close(self) -> None:
        """End the loader and free the slots."""
        self._requests.put(None)
        if threading.current_thread() is not self._thread:  # the garbage collector may close a forgotten session from here
            self._thread.join()
        if self._stream is not None:
            self._stream.synchronize()
        with self._changed:
            self._slots.working.clear()
            self._slots.own.clear()
            self._staging.clear()

    def _find(self, unit: int) -> _Slot | None:
        return self._slots.find(unit)

    def _hold(self, unit: int, step: int) -> _Slot:
        """The slot of `unit`, counted as used; a load is requested if there is none."""
        while True:
            self._failure.check()
            slot = self._find(unit)
            if slot is None:
                slot = self._slots.idle(unit, keep=())
                if slot is not None:
                    self._request(slot, unit, step)
            if slot is not None:
                slot.users += 1
                return slot
            if unit not in self._slots.own and all(slot.users for slot in self._slots.working):
                raise EngineError(
                    f"all {len(self._slots.working)} parameter slots are in use at once",
                    remedy="Raise `slots`; a module of this model runs inside another one's forward.",
                )
            self._changed.wait()

    def _prefetch(self, units: Sequence[int], step: int) -> None:
        for unit in units:
            if self._find(unit) is None:
                slot = self._slots.idle(unit, keep=units)
                if slot is None:
                    return
                self._request(slot, unit, step)

    def _request(self, slot: _Slot, unit: int, step: int) -> None:
        slot.unit, slot.loading = unit, True
        self._requests.put((slot, unit, step))

    def _run(self) -> None:
        while (request := self._requests.get()) is not None:
            slot, unit, step = request
            try:
                if not self._failure.failed:
                    self._pending.wait(unit)
                    self._load(slot, self._layouts[unit], step)
            except Exception as error:  # noqa: BLE001 - reported to whoever waits for the unit
                self._failure.set("reading weights", error)
            with self._changed:
                slot.loading = False
                self.loads += 1
                self._changed.notify_all()

    def _load(self, slot: _Slot, layout: UnitLayout, step: int) -> None:
        if self._device.type == "cpu":
            if self._debug is DebugMode.NAN_FILL:
                time.sleep(self._delays.random() * _LONGEST_DELAY_SECONDS)
            for chunk, transfer in self._read_into_slot(slot, layout, step):
                self._await(transfer, layout, chunk, step)
            return
        with torch.cuda.device(self._device):
            if self._debug is DebugMode.NAN_FILL:
                delay(self._stream, self._delays.randrange(_LONGEST_DELAY_CYCLES))
            slot.last_use.wait(self._stream)
            self._staging.reverse()  # alternate: one is read into while the other is copied from
            self._staged.reverse()
            staging, staged = self._staging[0], self._staged[0]
            staged.synchronize()
            with on_stream(self._stream):
                in_files = []
                for chunk in layout.chunks:
                    memory = self._store.resident_weights(layout, chunk)
                    if memory is None:
                        in_files.append(chunk)
                    else:
                        # Its next update waits for gradients, and they for who waits for this copy.
                        self._copy(slot, layout, chunk, memory, step)
                for chunk, transfer in self._store.read_weights(layout, staging, in_files):
                    self._await(transfer, layout, chunk, step)
                    self._copy(slot, layout, chunk, staging[chunk.offset : chunk.offset + chunk.length], step)
            staged.record(self._stream)
            slot.loaded.record(self._stream)

    def _read_into_slot(self, slot: _Slot, layout: UnitLayout, step: int) -> list[tuple[Chunk, Transfer]]:
        """Start reading a unit into its slot on the CPU; from host memory that is a copy, which ends here."""
        reads: list[tuple[Chunk, Transfer]] = []
        for chunk in layout.chunks:
            begun = self._trace.mark(step) if self._trace is not None else None
            reads += self._store.read_weights(layout, slot.weights, [chunk])
            if self._trace is not None and self._store.resident_weights(layout, chunk) is not None:
                self._add_copy(layout, chunk, step, begun, self._trace.mark(step))
        return reads

    def _copy(self, slot: _Slot, layout: UnitLayout, chunk: Chunk, source: torch.Tensor, step: int) -> None:
        """Have the copy stream bring a chunk to the GPU."""
        begun = self._trace.mark(step, self._stream) if self._trace is not None else None
        slot.weights[chunk.offset : chunk.offset + chunk.length].copy_(source, non_blocking=True)
        if self._trace is not None:
            self._add_copy(layout, chunk, step, begun, self._trace.mark(step, self._stream))

    def _await(self, transfer: Transfer, layout: UnitLayout, chunk: Chunk, step: int) -> None:
        transfer.wait()
        if self._trace is not None:
            size = chunk.length * self._itemsize
            self._trace.add_transfers(step, OperationKind.WEIGHTS_READ, layout.index, chunk.index, [transfer], bytes=size)

    def _add_copy(self, layout: UnitLayout, chunk: Chunk, step: int, begun: Mark | None, ended: Mark | None) -> None:
        assert self._trace is not None, "copies are told to a trace only"
        size = chunk.length * self._itemsize
        self._trace.add(step, OperationKind.WEIGHTS_COPY, layout.index, begun, ended, chunk=chunk.index, bytes=size)
