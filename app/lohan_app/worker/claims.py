"""Gives out reservations in the queue's order: who may pass whom, and the claim itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Engine

from lohan_app.db import write_transaction
from lohan_app.runs import repository
from lohan_app.runs.states import ACTIVE_STATES, Trigger
from lohan_app.worker.reservations import Held, Machine, Need, Reservation, fit, free_devices, held_by, without

PASSING_LIMIT = timedelta(minutes=30)
"""Runs behind one that does not fit may pass it for so long. Then what it needs is kept free for it: only what fits beside that passes."""


class Line:
    """One walk through the queue. Ask for each run in the queue's order; say which one was started.

    A run that does not fit lets those behind it pass, so that it does not block smaller ones; when it has been in line for
    `PASSING_LIMIT`, what it needs counts as held for those behind it, so that they do not starve it. That is done only for a run that would
    start if all our active runs ended: one that waits for a stranger, or for more than the machine has, keeps nobody waiting.

    Args:
        at: now.
    """

    def __init__(self, machine: Machine, active: Iterable[Held], at: datetime) -> None:
        self._machine, self._active, self._at = machine, list(active), at
        self._kept: list[Held] = []

    @property
    def kept(self) -> Sequence[Held]:
        """What is kept free for runs that were asked for so far."""
        return self._kept

    @property
    def held(self) -> Sequence[Held]:
        """What a run that is asked for now has to fit beside."""
        return [*self._active, *self._kept]

    def ask(self, name: str, need: Need, since: datetime) -> Reservation | str:
        """What the run gets, or what it waits for; `since` is when it came into line."""
        answer = fit(need, self._machine, self.held)
        if not isinstance(answer, str):
            return answer
        if self._kept and not isinstance(fit(need, self._machine, self._active), str):
            waiting = ", ".join(f"{held.name!r}" for held in self._kept)
            return f"Lets {waiting} go first, for which what it needs is kept free after {_minutes(PASSING_LIMIT)} in line."
        if self.waits_for_ours(need) and self._at - since >= PASSING_LIMIT:
            self._keep(name, need)
            answer += f" After {_minutes(PASSING_LIMIT)} in line nobody passes it any more: what it needs is kept free."
        return answer

    def waits_for_ours(self, need: Need) -> bool:
        """Whether the run would fit if our active runs ended."""
        return not isinstance(fit(need, without(self._active, self._machine), []), str)

    def free_device(self, need: Need) -> str | None:
        """The device that the run would get; None where there is none, or it asks for none."""
        free = free_devices(need, self._machine, self.held)
        return None if isinstance(free, str) else next(iter(free), None)

    def started(self, held: Held) -> None:
        self._active.append(held)

    def _keep(self, name: str, need: Need) -> None:
        device = self.free_device(need)
        least = need.ram_bytes - need.spare_ram_bytes
        self._kept.append(Held(name, [] if device is None else [device], least, need.space, is_settled=False))


def _minutes(duration: timedelta) -> str:
    return f"{round(duration.total_seconds() / 60)} minutes"


def claim(
    engine: Engine,
    run_id: str,
    need: Need,
    machine: Machine,
    *,
    kept: Sequence[Held] = (),
    values: Mapping[str, Any] | None = None,
) -> Reservation | str | None:
    """Reserve what the run needs and move it to `starting`, if it fits beside the runs that are active when nobody else can claim.

    Args:
        machine: as it was looked at; what has been claimed since counts in any case.
        kept: beside which it has to fit too.
        values: columns that are written with the claim.

    Returns:
        What it has got; why it does not fit; None where it is not queued any more.
    """
    with write_transaction(engine) as session:
        repository.hold_queue(session)
        active = [held_by(run) for run in repository.runs_in(session, ACTIVE_STATES)]
        answer = fit(need, machine, [*active, *kept])
        if isinstance(answer, str):
            return answer
        # What an earlier attempt was at says nothing of this one.
        columns = answer.columns() | {"phase": "", "phase_progress": None} | dict(values or {})
        return answer if repository.fire(session, run_id, Trigger.CLAIM, **columns) is not None else None


def on_device(need: Need, device: str) -> Need:
    """The same need, of this one device."""
    return replace(need, device=device)
