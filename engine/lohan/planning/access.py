"""In which order units are used, and which parameter slot the next one goes to: what the engine's parameter stream does, and what the
schedule counts on. No torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

from lohan.planning.slots import SlotSizes


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


class Slot(Protocol):
    """A parameter slot, as far as its choice goes."""

    unit: int | None
    loading: bool
    users: int
    used_at: int


_Slot = TypeVar("_Slot", bound=Slot)


class Slots(Generic[_Slot]):
    """Which slot a unit is in, or goes to.

    Args:
        working: slots that units pass through.
        own: the slots of kept units, by unit.
    """

    def __init__(self, working: list[_Slot], own: dict[int, _Slot]) -> None:
        self.working, self.own = working, own

    @property
    def count(self) -> int:
        return len(self.working) + len(self.own)

    def find(self, unit: int) -> _Slot | None:
        """The slot that holds `unit`."""
        own = self.own.get(unit)
        slots = self.working if own is None else (own,)
        return next((slot for slot in slots if slot.unit == unit), None)

    def idle(self, unit: int, keep: Collection[int]) -> _Slot | None:
        """A slot that `unit`, which has none now, can be loaded into; None while there is none.

        That is its own, or the least recently used working slot that is neither held nor being loaded and holds none of `keep`; empty
        ones first.
        """
        own = self.own.get(unit)
        if own is not None:
            return None if own.loading else own  # a load that was under way when the unit was invalidated
        candidates = [slot for slot in self.working if not slot.users and not slot.loading and (slot.unit is None or slot.unit not in keep)]
        return min(candidates, key=lambda slot: (slot.unit is not None, slot.used_at), default=None)


@dataclass(slots=True)
class _WalkedSlot:
    index: int
    unit: int | None = None
    loading: bool = False
    users: int = 0
    used_at: int = 0


Load = tuple[int, int]
"""Unit, and index of the slot that it is loaded into: working slots come first."""


class SlotWalk:
    """Plays the parameter stream of a step in which nothing is slow and no module runs out of order: what it loads, and where."""

    def __init__(self, order: AccessOrder, sizes: SlotSizes) -> None:
        self._order = order
        self._slots = Slots(
            [_WalkedSlot(index) for index in range(sizes.working)],
            {unit: _WalkedSlot(index) for index, unit in enumerate(sizes.kept, start=sizes.working)},
        )
        self._clock = 0

    def use(self, unit: int, phase: Phase) -> tuple[int, list[Load]]:
        """Hold `unit` for a while: the index of its slot, and what is loaded because of that, in order."""
        loads: list[Load] = []
        slot = self._slots.find(unit) or self._load(unit, (), loads)
        assert slot is not None, "nothing is held between two units"
        slot.users = 1
        self._prefetch(self._order.after(unit, phase, self._slots.count - 1), loads)
        self._clock += 1
        slot.used_at, slot.users = self._clock, 0
        return slot.index, loads

    def invalidate(self, unit: int) -> None:
        """The unit's weights are about to be updated."""
        slot = self._slots.find(unit)
        if slot is not None:
            slot.unit = None

    def begin_forward(self) -> list[Load]:
        """What is loaded for the next forward before it begins."""
        loads: list[Load] = []
        self._prefetch(self._order.first(self._slots.count), loads)
        return loads

    def _prefetch(self, units: Sequence[int], loads: list[Load]) -> None:
        for unit in units:
            if self._slots.find(unit) is None and self._load(unit, units, loads) is None:
                return

    def _load(self, unit: int, keep: Sequence[int], loads: list[Load]) -> _WalkedSlot | None:
        slot = self._slots.idle(unit, keep)
        if slot is not None:
            slot.unit = unit
            loads.append((unit, slot.index))
        return slot
