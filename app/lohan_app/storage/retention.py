"""When what a run has left behind expires: pure rules over rows. The reconciler's `worker.housekeeping` carries them out.

A chunk's two slots lie beside each other in one preallocated file, and which of them is committed stands in the step record alone. Both are
kept: giving the other slot's blocks back would leave holes that a retry may find no room to fill, in the middle of a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Protocol

from lohan.config import Durability, EngineSection
from lohan_app.entities import TERMINAL_STATES, Run, RunKind, RunState
from lohan_app.settings import Settings

KEEP_STATES_DAYS = "keep_states_days"
"""Key in `Run.settings`: days for which a run wants its states kept after it has succeeded."""


class HasSettings(Protocol):
    """A row, or what the API shows of one."""

    @property
    def settings(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class Rules:
    """How long things stay that nobody works with any more."""

    states: timedelta
    """States of a run that has succeeded, where the run itself says nothing: its result has them already."""
    failed_states: timedelta
    """States of a failed or cancelled run: a retry goes on from them."""
    trash: timedelta
    """Result and notes of a deleted run."""


@dataclass(frozen=True, slots=True)
class Expiry:
    """From when on something may be removed, and why it is kept till then."""

    at: datetime
    why: str

    def is_due(self, moment: datetime) -> bool:
        return moment >= self.at


def rules_of(settings: Settings) -> Rules:
    return Rules(
        states=timedelta(days=settings.keep_states_days),
        failed_states=timedelta(days=settings.keep_failed_states_days),
        trash=timedelta(days=settings.trash_days),
    )


def states_expiry(run: Run, rules: Rules) -> Expiry | None:
    """When the run's states may go; None while it has not ended: they then are what it goes on from."""
    if run.state not in TERMINAL_STATES:
        return None
    if run.deleted_at is not None:
        return Expiry(run.deleted_at, "the run was deleted")
    ended = run.finished_at or run.created_at
    if run.kind is not RunKind.TRAIN:
        return Expiry(ended, "nothing goes on from them")
    if run.state is RunState.SUCCEEDED:
        asked = run.settings.get(KEEP_STATES_DAYS)
        keep = rules.states if asked is None else timedelta(days=asked)
        return Expiry(ended + keep, "kept as was asked for" if keep else "the result is exported")
    # As it was stored, unchecked: settings of another version must not keep the reconciler from its work.
    if run.settings.get("engine", {}).get("durability") == Durability.NONE:
        return Expiry(ended, "nothing can go on from them (durability none)")
    if run.state is RunState.CANCELLED and run.step == 0:
        return Expiry(ended, "the run was cancelled before its first step")
    return Expiry(ended + rules.failed_states, "a retry goes on from them")


def trash_expiry(deleted_at: datetime, rules: Rules) -> Expiry:
    """When a deleted run's result and notes go; earlier where something else needs the room."""
    return Expiry(deleted_at + rules.trash, "kept for a while after its deletion")


def durability_of(run: HasSettings) -> Durability:
    """What the run keeps to go on from."""
    return EngineSection.model_validate(run.settings.get("engine", {})).durability
