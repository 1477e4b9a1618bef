"""Who is next: the queue's order and each run's place in it, in words. Pure; reconciler, REST and pages share it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from pydantic import BaseModel

from lohan.units import format_duration
from lohan_app.entities import Run

WINDOW = timedelta(days=7)
"""How far back an owner's time on devices counts."""


class Use(NamedTuple):
    """A stretch of time for which a run of this owner held devices."""

    owner_id: str
    devices: int
    began_at: datetime
    ended_at: datetime | None
    """None while it holds them."""


class QueuePlace(BaseModel):
    """Where a queued run stands."""

    position: int
    """1 is next."""
    of: int
    """Runs in the queue."""
    why: str
    """In words: what is before it, and by what rule."""


def device_seconds(uses: Iterable[Use], at: datetime) -> dict[str, float]:
    """Each owner's device-seconds in the `WINDOW` before `at`.

    An attempt counts from its claim until it gives its devices back (`DeviceUse`): loading and evaluating keep others
    from a device as training does. It counts once per device, a CPU device (`cpu:N`) like a GPU, and only with the part that lies in the
    window; attempts at work count until `at`. Failed, cancelled and deleted runs count: they held the device all the same.
    """
    seconds: dict[str, float] = {}
    for use in uses:
        held = (use.ended_at or at) - max(use.began_at, at - WINDOW)
        seconds[use.owner_id] = seconds.get(use.owner_id, 0.0) + use.devices * max(0.0, held.total_seconds())
    return seconds


def in_line_since(run: Run) -> datetime:
    return run.queued_at or run.created_at


def in_order(runs: Iterable[Run], seconds: Mapping[str, float]) -> list[Run]:
    """Higher priority first; then the owner with the least time on devices; then who has been in line for longest."""
    return sorted(runs, key=lambda run: (-run.priority, seconds.get(run.owner_id, 0.0), in_line_since(run), run.id))


def places(ordered: Sequence[Run], seconds: Mapping[str, float]) -> dict[str, QueuePlace]:
    """The place of every run of the queue, by id."""
    return {
        run.id: QueuePlace(position=index + 1, of=len(ordered), why=_why(run, ordered[:index], seconds))
        for index, run in enumerate(ordered)
    }


def _why(run: Run, before: Sequence[Run], seconds: Mapping[str, float]) -> str:
    if not before:
        return "Nobody is before it."
    higher = sum(other.priority > run.priority for other in before)
    mine = sum(other.priority == run.priority and other.owner_id == run.owner_id for other in before)
    others = [other for other in before if other.priority == run.priority and other.owner_id != run.owner_id]
    least = [other for other in others if seconds.get(other.owner_id, 0.0) < seconds.get(run.owner_id, 0.0)]
    older = len(others) - len(least)
    days = WINDOW.days
    told = [
        f"{higher} with a higher priority" if higher else "",
        f"{len(least)} of owners who had less time on devices in the last {days} days than its own"
        f" ({format_duration(seconds.get(run.owner_id, 0.0))})"
        if least
        else "",
        f"{mine} of the same owner, longer in line" if mine else "",
        f"{older} that came into line earlier" if older else "",
    ]
    return f"Before it: {', '.join(part for part in told if part)}."
