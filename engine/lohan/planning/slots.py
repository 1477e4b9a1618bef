"""How many parameter slots there are on the device, how large each is, and which units stay in them. Pure numbers.

A few *working* slots hold units in turn; each is as large as the largest unit that has to pass through them. A *kept* unit has a slot of
its own size: its weights stay from its forward to its backward, and one load a step is enough.

Loads of a step, for a model of `n` units of which `b` read their weights in the backward too (all but an untied embedding), with `k` kept
units and `s` working slots: the forward loads every unit once. When it ends, kept units are all there, and the working slots hold the `s`
units that the backward needs first of the others, since what is needed next is never thrown out (`ParameterStream`). The backward loads
the rest: `n + b - k - s` loads in all, never less than `n`. Where a tied embedding is not kept, the output projection at the forward's end
loads it once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WORKING_SLOTS = 3
"""One computed with, one being filled, one still in use by queued work."""
LEAST_SLOTS = 2
"""Where memory has no room for three: one is filled while the other is computed with."""


@dataclass(frozen=True, slots=True)
class SlotSizes:
    """The slots; sizes in elements."""

    kept: tuple[int, ...]
    """Units with a slot of their own, by index, in the order in which a backward needs them."""
    kept_elements: int
    """Of all these together."""
    working: int
    working_elements: int
    """Of each working slot."""

    @property
    def elements(self) -> int:
        return self.kept_elements + self.working * self.working_elements


def size_slots(units: Sequence[int], backward: Sequence[int], *, working: int, kept: int) -> SlotSizes:
    """The slots of a model.

    Which units are kept does not change how many loads are saved for a byte; those that a backward needs first are held for the shortest.

    Args:
        units: elements of each.
        backward: the units whose weights a backward reads, by index, in its order.
        working: working slots at most; there are no more than units to pass through them.
        kept: units that are kept at most.
    """
    own = tuple(dict.fromkeys(backward))[:kept]
    kept_units = frozenset(own)
    others = [size for unit, size in enumerate(units) if unit not in kept_units]
    return SlotSizes(own, sum(units[unit] for unit in own), min(working, len(others)), max(others, default=0))
