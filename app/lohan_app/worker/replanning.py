"""Plans of runs whose turn has come, made again for the machine as it is then."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

from pydantic import ValidationError
from sqlalchemy import Engine

from lohan.errors import CapacityError, LohanError
from lohan.events import FailureCause
from lohan.hardware.probe import HardwareFacts
from lohan.planning.fit import RAM_RESERVE_BYTES, SSD_RESERVE_BYTES
from lohan.planning.plan import Plan
from lohan_app.db import read_transaction, write_transaction
from lohan_app.entities import BaseModel, Run, RunState
from lohan_app.runs import repository
from lohan_app.runs.announce import announce
from lohan_app.runs.planning import plan_at_start
from lohan_app.runs.states import Trigger
from lohan_app.settings import Settings
from lohan_app.worker.reservations import WAITS_FOR_SPACE, Held, Machine, ram_room, space_rooms

logger = logging.getLogger(__name__)

ANY_SPACE_BYTES = 1 << 62
"""Drives come and go: a run is not given up for want of space."""


def facts_beside(facts: HardwareFacts, machine: Machine, held: Sequence[Held], states: Mapping[str, int]) -> HardwareFacts:
    """The machine as one more run sees it: without what others hold, and with its own states' space, by directory, as if free."""
    rooms, own = space_rooms(machine, held), Counter[str]()
    for directory in facts.state_directories:
        own[directory.drive] += states.get(directory.path, 0)
    directories = tuple(
        directory.model_copy(update={"free_bytes": rooms[directory.drive] + own[directory.drive] + SSD_RESERVE_BYTES})
        for directory in facts.state_directories
    )
    ram = facts.ram.model_copy(update={"free_bytes": ram_room(machine, held) + RAM_RESERVE_BYTES})
    return facts.model_copy(update={"ram": ram, "state_directories": directories})


def whole(facts: HardwareFacts) -> HardwareFacts:
    """The machine as if nobody used it."""
    return facts.model_copy(
        update={
            "ram": facts.ram.model_copy(update={"free_bytes": facts.ram.total_bytes}),
            "gpus": tuple(gpu.model_copy(update={"free_bytes": gpu.total_bytes, "holders": ()}) for gpu in facts.gpus),
            "state_directories": tuple(
                directory.model_copy(update={"free_bytes": ANY_SPACE_BYTES}) for directory in facts.state_directories
            ),
        }
    )


class Replanner:
    """Makes plans; of a run that does not fit it says why, and gives it up where it never will."""

    def __init__(self, settings: Settings, engine: Engine) -> None:
        self._settings, self._engine = settings, engine

    def plan(self, run: Run, device: str, machine: Machine, held: Sequence[Held], states: Mapping[str, int]) -> Plan | CapacityError | None:
        """The plan for `device` beside what is held; None where there is nothing to plan from: the run keeps what it was queued with."""
        if machine.facts is None:
            return None
        return self._make(run, device, facts_beside(machine.facts, machine, held, states), machine.facts)

    def reason(self, run: Run, device: str, machine: Machine, error: CapacityError) -> str:
        """Why the run goes on waiting, in words; one that cannot ever fit is failed with the difference."""
        assert machine.facts is not None, "there was a plan to be made"
        never = self._make(run, device, whole(machine.facts), machine.facts)
        if isinstance(never, CapacityError):
            self._fail(run, never)
            return ""
        lack = f"{error.place}: {error.message}"
        words = WAITS_FOR_SPACE if error.place == "SSD space" else "Does not fit the machine as it is now"
        return f"{words}: {lack}. {error.remedy or ''}".strip()

    def _make(self, run: Run, device: str, hardware: HardwareFacts, facts: HardwareFacts) -> Plan | CapacityError | None:
        with read_transaction(self._engine) as session:
            model = session.get(BaseModel, run.base_model_id)
        if model is None or model.workload is None:
            return None
        try:
            return plan_at_start(model, run, device=device, hardware=hardware, facts=facts, settings=self._settings)
        except CapacityError as error:
            return error
        except (LohanError, ValidationError) as error:  # its trainer meets the same, and says what to do
            logger.warning("%s: is not planned again: %s", run.id, error)
            return None

    def _fail(self, run: Run, error: CapacityError) -> None:
        message = f"it can never run on this machine: {error.message}"
        problem = {**error.to_dict(), "message": message, "cause": str(FailureCause.CAPACITY)}
        with write_transaction(self._engine) as session:
            repository.fire(session, run.id, Trigger.FAIL, only_from=RunState.QUEUED, problem=problem, state_reason=message)
        announce(self._settings, run.id)
        logger.info("%s: %s", run.id, message)
