"""Kept activations' part of a step's operations: what leaves the device behind which block, and when it comes back. No torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice

from lohan.planning.footprint import KEPT_REGIONS_AHEAD, KEPT_STAGING_BUFFERS
from lohan.planning.tiers import Tier


class Move(StrEnum):
    """By the names that `OperationKind` has for them."""

    OUT = "activations_out"
    WRITE = "activations_write"
    READ = "activations_read"
    IN = "activations_in"


@dataclass(frozen=True, slots=True)
class KeptShape:
    """One thing that is kept of each region of a unit, and leaves the device."""

    place: int
    """Among what is kept of the block."""
    tier: Tier
    """`Tier.RAM` or `Tier.SSD`."""
    bytes: tuple[int, ...]
    """By region."""
    is_input: bool = False
    """Whether it is the region's input, which leaves before the region computes and is back before it is computed again."""


AddMove = Callable[[Move, int, int, int, int, tuple[int, ...]], int]
"""Kind, unit, place, region, bytes, and what is waited for; returns the operation's index."""


@dataclass(slots=True)
class _Moved:
    shape: KeptShape
    out: int
    write: int | None
    back: int | None = None


@dataclass(slots=True)
class KeptMoves:
    """Writes down what moves; `lohan.streaming.kept_tiers` does the same. Its methods are called in the order of the step's computations.

    Args:
        shapes: by unit, in the order in which it comes in a region.
        add: adds an operation.
    """

    shapes: Mapping[int, Sequence[KeptShape]]
    add: AddMove
    _regions: list[tuple[int, int]] = field(default_factory=list)
    """Unit and region of what has left, and whose backward has not come yet."""
    _moved: dict[tuple[int, int], list[_Moved]] = field(default_factory=dict)
    _leaving: deque[tuple[int, int]] = field(default_factory=deque)
    """Operation and bytes of what may still be on its way out."""
    _last: dict[tuple[Move, Tier], int] = field(default_factory=dict)
    _staging: list[int] = field(default_factory=list)
    """The last operation that used each staging buffer, in the order in which they were taken."""
    _largest_region: int = field(init=False)
    """What the region that sends out most sends out, in bytes."""

    def __post_init__(self) -> None:
        regions = (sizes for shapes in self.shapes.values() for sizes in zip(*(shape.bytes for shape in shapes), strict=True))
        self._largest_region = max(map(sum, regions), default=0)

    def send(self, unit: int, region: int, before: tuple[int, ...]) -> tuple[int, ...]:
        """A region's forward, which waits for `before`, has been added; returns what the next computation waits for besides it."""
        released: list[int] = []
        for shape in self.shapes.get(unit, ()):
            size = shape.bytes[region]
            most = max(self._largest_region, size)
            while self._leaving and sum(size for _, size in self._leaving) + size > most:
                released.append(self._leaving.popleft()[0])
            out = self._move(Move.OUT, unit, shape, region, before + self._buffer(shape.tier), anywhere=True)
            self._leaving.append((out, size))
            write = None
            if shape.tier is Tier.SSD:
                write = self._move(Move.WRITE, unit, shape, region, (out,))
                self._staging.append(write)
            self._moved.setdefault((unit, region), []).append(_Moved(shape, out, write))
        if (unit, region) in self._moved:
            self._regions.append((unit, region))
        return tuple(released)

    def bring(self, unit: int, region: int, now: tuple[int, ...]) -> tuple[int, ...]:
        """A region's recomputation is about to begin, once `now` is done; returns what it waits for besides."""
        left = tuple(out for out, _ in self._leaving)
        self._leaving.clear()
        if (unit, region) in self._moved:
            self._bring(unit, region, now)
        following = (key for key in reversed(self._regions) if key != (unit, region))
        for key in islice(following, KEPT_REGIONS_AHEAD):
            self._bring(*key, now)
        moved = self._moved.get((unit, region), [])
        return left + tuple(item.back for item in moved if item.shape.is_input and item.back is not None)

    def finish(self, unit: int, region: int) -> tuple[int, ...]:
        """A region's backward has been added; returns what the next computation waits for besides it."""
        if (unit, region) not in self._moved:
            return ()
        if self._regions[-1] == (unit, region):
            self._regions.pop()
        else:
            self._regions.remove((unit, region))
        return tuple(item.back for item in self._moved.pop((unit, region)) if item.back is not None)

    def _bring(self, unit: int, region: int, now: tuple[int, ...]) -> None:
        for item in self._moved[unit, region]:
            if item.back is not None:
                continue
            source = item.out
            if item.write is not None:
                source = self._move(Move.READ, unit, item.shape, region, (item.write, *self._buffer(Tier.SSD)))
            item.back = self._move(Move.IN, unit, item.shape, region, (*now, source))
            if item.write is not None:
                self._staging.append(item.back)

    def _buffer(self, tier: Tier) -> tuple[int, ...]:
        """What a staging buffer that is taken now waits for."""
        if tier is not Tier.SSD or len(self._staging) < KEPT_STAGING_BUFFERS:
            return ()
        return (self._staging[-KEPT_STAGING_BUFFERS],)

    def _move(self, move: Move, unit: int, shape: KeptShape, region: int, after: tuple[int, ...], *, anywhere: bool = False) -> int:
        """Moves of one kind and tier run one after the other; those out do so `anywhere` they go."""
        line = (move, Tier.GPU if anywhere else shape.tier)
        before = (self._last[line],) if line in self._last else ()
        self._last[line] = self.add(move, unit, shape.place, region, shape.bytes[region], after + before)
        return self._last[line]
