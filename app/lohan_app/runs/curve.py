"""Down-sampling: a curve of millions of steps in a few thousand points that look the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

POINTS_LIMIT = 2000
# A stretch keeps up to three points: its lowest, its highest and its first gap.
POINTS_PER_STRETCH = 3


class Point(Protocol):
    """One step of a curve; `loss` is None where it was not a finite number."""

    @property
    def step(self) -> int: ...
    @property
    def loss(self) -> float | None: ...


def down_sample(points: Iterable[Any], *, first_step: int, last_step: int, limit: int = POINTS_LIMIT) -> Iterator[Any]:
    """Yield at most `limit` of `points` (in the order of steps): of each of equal stretches of steps the minimum, the maximum and the
    first gap, and always the first and the last point. A spike or a gap of one step stays in sight."""
    stretches = max(1, (limit - 2) // POINTS_PER_STRETCH)
    width = max(1, -(-(last_step - first_step + 1) // stretches))
    kept: dict[int, Any] = {}
    stretch, last = None, None
    for point in points:
        number = (point.step - first_step) // width
        if number != stretch:
            yield from _in_order(kept)
            # The very first point stands for itself, whatever its loss.
            kept = {} if stretch is not None else {-1: point}
            stretch = number
        _keep(kept, point)
        last = point
    if last is not None:
        kept[-2] = last
    yield from _in_order(kept)


def _keep(kept: dict[int, Any], point: Point) -> None:
    """Slot 0 holds the first gap of the stretch, 1 its minimum, 2 its maximum."""
    if point.loss is None:
        kept.setdefault(0, point)
        return
    if 1 not in kept or point.loss < kept[1].loss:
        kept[1] = point
    if 2 not in kept or point.loss > kept[2].loss:
        kept[2] = point


def _in_order(kept: dict[int, Any]) -> list[Any]:
    return sorted({point.step: point for point in kept.values()}.values(), key=lambda point: point.step)
