"""Runs that nobody works on: what people want of them, what they are paused for, and what retries begin with.

The reconciler calls these; each looks at the rows and does what is to be done, and doing it twice changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import timedelta

from sqlalchemy import Engine

from lohan.units import MIB, format_bytes
from lohan_app.db import read_transaction, write_transaction
from lohan_app.entities import PauseCause, Run, RunKind, RunState, Wanted
from lohan_app.entities.base import now
from lohan_app.runs import repository
from lohan_app.runs.announce import announce
from lohan_app.runs.kinds import needs_of
from lohan_app.runs.states import ACTIVE_STATES, WAITING_STATES, Trigger
from lohan_app.settings import Settings
from lohan_app.storage.quota import result_bytes
from lohan_app.worker.reservations import Machine, held_by, need_of, space_shortage
from lohan_app.worker.run_files import states_by_directory, take_over_states

logger = logging.getLogger(__name__)

HEADROOM_BYTES = 512 * MIB
"""Free space that a run is not started without: its events and logs, the database and the system write there too."""
LONGEST_WAIT = timedelta(minutes=10)
"""No run waits longer than this after a lost attempt; a later moment comes of a clock that was set back."""


def must_wait(run: Run) -> bool:
    """Whether the run's pause for breath after a lost attempt is not over."""
    return run.start_after is not None and now() < run.start_after < now() + LONGEST_WAIT


class WaitingRuns:
    """The reconciler's hands for runs without a supervisor."""

    def __init__(self, settings: Settings, engine: Engine, look: Callable[[Settings], Machine]) -> None:
        self._settings, self._engine, self._look = settings, engine, look

    def heed(self) -> None:
        """Runs without a supervisor have nobody else who could cancel, pause or resume them."""
        with read_transaction(self._engine) as session:
            waiting = repository.runs_in(session, WAITING_STATES)
        for run in waiting:
            trigger = _trigger_for(run)
            if trigger is None:
                continue
            with write_transaction(self._engine) as session:
                state = repository.heed(session, run, trigger)
            if state is not None:
                logger.info("%s: %s, as wanted", run.id, state)
                announce(self._settings, run.id)

    def resume_where_there_is_room(self) -> None:
        """What a full drive has paused goes on when there is room for what it still writes; until then its page says how much it needs."""
        with read_transaction(self._engine) as session:
            paused = [run for run in repository.runs_in(session, [RunState.PAUSED]) if _waits_for_room(run)]
            active = repository.runs_in(session, ACTIVE_STATES) if paused else []
        if not paused:
            return
        machine = self._look(self._settings)
        for run in paused:
            shortage = self._shortage(run, machine, active)
            with write_transaction(self._engine) as session:
                if shortage is None:
                    repository.heed(session, run, Trigger.RESUME)
                else:
                    repository.explain(session, run.id, state=RunState.PAUSED, reason=_with_shortage(run.state_reason, shortage))
            if shortage is None:
                logger.info("%s: there is room again", run.id)
            if shortage is None or shortage not in run.state_reason:
                announce(self._settings, run.id)

    def _shortage(self, run: Run, machine: Machine, active: Sequence[Run]) -> str | None:
        """What is missing, in words; None where there is room."""
        result = result_bytes(run.plan or {}) if run.kind is RunKind.TRAIN else needs_of(run).result_bytes
        need = result + HEADROOM_BYTES
        if machine.data_free_bytes < need:
            return f"needs {format_bytes(need)} in the data folder, free {format_bytes(machine.data_free_bytes)}"
        folders = self._settings.state_folders
        space = need_of(run, folders, states=states_by_directory(self._settings, run.id)).space
        with_headroom = {path: size + HEADROOM_BYTES for path, size in space.items()}
        return space_shortage(with_headroom, machine, [held_by(other) for other in active])

    def take_over(self) -> None:
        """Retries that wait get what their parents have recorded, before anything of the parents is deleted."""
        with read_transaction(self._engine) as session:
            waiting = repository.runs_in(session, [RunState.QUEUED, RunState.PAUSED])
            read = repository.unfinished_exports(session)
        for run in waiting:
            if run.kind is RunKind.TRAIN and run.parent_id not in read:
                take_over_states(self._settings, run)


def _trigger_for(run: Run) -> Trigger | None:
    if run.wanted is Wanted.CANCEL:
        return Trigger.REQUEST_CANCEL
    if run.state is RunState.QUEUED and run.wanted is Wanted.PAUSE:
        return Trigger.REQUEST_PAUSE
    if run.state is RunState.PAUSED and run.wanted in (Wanted.RUN, Wanted.STOP) and run.pause_cause is PauseCause.REQUEST:
        return Trigger.RESUME
    return None


def _waits_for_room(run: Run) -> bool:
    return run.pause_cause is PauseCause.DISK_FULL and run.wanted in (Wanted.RUN, Wanted.STOP) and not must_wait(run)


def _with_shortage(reason: str, shortage: str) -> str:
    before = reason.partition(" It goes on by itself")[0]
    return f"{before} It goes on by itself when there is room: it {shortage}."
