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
from lohan.streaming.device import Event, delay, make_stream, on_stream
from lohan.streaming.pending import Failure, PendingUpdates

if TYPE_CHECKING:
    from lohan.planning.slots import SlotSizes
    from lohan.states.layout import UnitLayout
    from lohan.states.state_store import StateStore

_LONGEST_DELAY_CYCLES = 2_000_000  # about 1 ms on a GPU: longer than a small unit's copy, so that a missing wait shows
_LONGEST_DELAY_SECONDS = 1e-3


class DebugMode(StrEnum):
    """How the engine helps to find its own faults."""

    OFF = "off"
    NAN_FILL = "nan_fill"
    """A slot is filled with NaN as soon as nothing holds it (that of a kept unit when its weights are updated), and copy streams are
    delayed at random: a read of weights that should not be there any more, or not yet, turns the loss into NaN."""


class Phase(StrEnum):
    """Which way units are walked through; decides what is loaded ahead."""

    FORWARD = "forward"
    BACKWARD = "backward"
    EVALUATION = "evaluation"


class AccessOrder:
    """The order in which units are expected, as indices. A wrong guess costs a load, never a wrong number."""

    def __init__(self, forward: Sequence[int], backward: Sequence[int]) -> None:
        self._sequences = {
            Phase.FORWARD: [*forward, *backward],
            Phase.BACKWARD: list(backward),  # not beyond: the next forward needs weights that are not updated yet
            Phase.EVALUATION: [*forward, *forward],
        }
        self._phase = Phase.FORWARD
        self._position = 0

    @property
    def backward(self) -> Sequence[int]:
        """The units whose weights a backward reads."""
        return self._sequences[Phase.BACKWARD]

    def after(self, unit: int, phase: Phase, count: int) -> list[int]:
        """The next `count` different units after `unit`; moves the position."""
        sequence = self._sequences[phase]
        start = self._position if phase is self._phase else 0
        self._phase = phase
        for position in (*range(start, len(sequence)), *range(min(start, len(sequence)))):
            if sequence[position] == unit:
                self._position = position
                return self._distinct(sequence[position + 1 :], unit, count)
        return []

    def first(self, count: int) -> list[int]:
        """The first `count` units of a forward."""
        return self._distinct(self._sequences[Phase.FORWARD], None, count)

    @staticmethod
    def _distinct(sequence: Sequence[int], unit: int | None, count: int) -> list[int]:
        return list(dict.fromkeys(index for index in sequence if index != unit))[:count]


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
    ) -> None:
        self._layouts, self._store, self._pending, self._failure, self._order = layouts, store, pending, failure, order
        self._debug, self._device = debug, device
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

        self._working = [make_slot(slots.working_elements) for _ in range(slots.working)]
        self._own = {unit: make_slot(layouts[unit].elements) for unit in slots.kept}
        self._changed = threading.Condition()
        self._clock = 0
        self._requests: queue.SimpleQueue[tuple[_Slot, int] | None] = queue.SimpleQueue()
        self.loads = 0
        failure.wake(self._changed)
        self._thread = threading.Thread(target=self._run, name="lohan-parameters", daemon=True)
        self._thread.start()

    def acquire(self, unit: int, phase: Phase) -> torch.Tensor:
        """Hold `unit` and return its flat weights (`layout.elements` long); the current stream waits for the copy.

        Raises:
            EngineError: a background stage failed, or every slot is held.
        """
        with self._changed:
            slot = self._hold(unit)
            # As far ahead as there are slots: the prefetch keeps whatever is among these units from being thrown out.
            self._prefetch(self._order.after(unit, phase, len(self._working) + len(self._own) - 1))
            self._changed.wait_for(lambda: not slot.loading or self._failure.failed)
            if self._failure.failed:
                slot.users -= 1
                self._failure.check()
            self._clock += 1
            slot.used_at = self._clock
        slot.loaded.wait()
        return slot.weights[: self._layouts[unit].elements]

    def release(self, unit: int) -> None:
        """Let go of one `acquire`; work queued on the current stream may still read the slot."""
        with self._changed:
            slot = self._find(unit)
            assert slot is not None and slot.users > 0, "released more often than acquired"
            if slot.users == 1 and unit not in self._own and self._debug is DebugMode.NAN_FILL:
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
            self._prefetch(self._order.first(len(self._working) + len(self._own)))

    def close(self) -> None:
        """End the loader and free the slots."""
        self._requests.put(None)
        if threading.current_thread() is not self._thread:  # the garbage collector may close a forgotten session from here
            self._thread.join()
        if self._stream is not None:
            self._stream.synchronize()
        with self._changed:
            self._working.clear()
            self._own.clear()
            self._staging.clear()

    def _find(self, unit: int) -> _Slot | None:
        own = self._own.get(unit)
        slots = self._working if own is None else (own,)
        return next((slot for slot in slots if slot.unit == unit), None)

    def _hold(self, unit: int) -> _Slot:
        """The slot of `unit`, counted as used; a load is requested if there is none."""
        while True:
            self._failure.check()
            slot = self._find(unit)
            if slot is None:
                slot = self._idle(unit, keep=())
                if slot is not None:
                    self._request(slot, unit)
            if slot is not None:
                slot.users += 1
                return slot
            if unit not in self._own and all(slot.users for slot in self._working):
                raise EngineError(
                    f"all {len(self._working)} parameter slots are in use at once",
                    remedy="Raise `slots`; a module of this model runs inside another one's forward.",
                )
            self._changed.wait()

    def _idle(self, unit: int, keep: Sequence[int]) -> _Slot | None:
        """A slot that `unit`, which has none now, can be loaded into; None while there is none.

        That is its own, or the least recently used working slot that is neither held nor being loaded and holds none of `keep`; empty
        ones first.
        """
        own = self._own.get(unit)
        if own is not None:
            return None if own.loading else own  # a load that was under way when the unit was invalidated
        candidates = [
            slot for slot in self._working if not slot.users and not slot.loading and (slot.unit is None or slot.unit not in keep)
        ]
        return min(candidates, key=lambda slot: (slot.unit is not None, slot.used_at), default=None)

    def _prefetch(self, units: Sequence[int]) -> None:
        for unit in units:
            if self._find(unit) is None:
                slot = self._idle(unit, keep=units)
                if slot is None:
                    return
                self._request(slot, unit)

    def _request(self, slot: _Slot, unit: int) -> None:
        slot.unit, slot.loading = unit, True
        self._requests.put((slot, unit))

    def _run(self) -> None:
        while (request := self._requests.get()) is not None:
            slot, unit = request
            try:
                if not self._failure.failed:
                    self._pending.wait(unit)
                    self._load(slot, self._layouts[unit])
            except Exception as error:  # noqa: BLE001 - reported to whoever waits for the unit
                self._failure.set("reading weights", error)
            with self._changed:
                slot.loading = False
                self.loads += 1
                self._changed.notify_all()

    def _load(self, slot: _Slot, layout: UnitLayout) -> None:
        if self._device.type == "cpu":
            if self._debug is DebugMode.NAN_FILL:
                time.sleep(self._delays.random() * _LONGEST_DELAY_SECONDS)
            for _, ticket in self._store.read_weights(layout, slot.weights, layout.chunks):
                ticket.wait()
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
                        slot.weights[chunk.offset : chunk.offset + chunk.length].copy_(memory, non_blocking=True)
                for chunk, ticket in self._store.read_weights(layout, staging, in_files):
                    ticket.wait()
                    part = slice(chunk.offset, chunk.offset + chunk.length)
                    slot.weights[part].copy_(staging[part], non_blocking=True)
            staged.record(self._stream)
            slot.loaded.record(self._stream)
