"""The run's state machine as data: in which state which trigger leads where.

Whatever is not in `TRANSITIONS` does not happen: a late event, a second click or a supervisor that lost its run changes nothing.
Terminal states have no way out; a finished run is continued by a new run with `parent_id`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from lohan_app.entities.runs import TERMINAL_STATES, RunState

ACTIVE_STATES = frozenset({RunState.STARTING, RunState.RUNNING, RunState.PAUSING, RunState.CANCELLING})
"""States in which a run holds its reservation and has, or is about to get, a supervisor."""
WAITING_STATES = frozenset({RunState.DRAFT, RunState.QUEUED, RunState.PAUSED})
"""States without a reservation and without a supervisor."""


class Trigger(StrEnum):
    """What can happen to a run."""

    SUBMIT = "submit"
    """A draft is put into the queue."""
    CLAIM = "claim"
    """The reconciler reserves what the run needs and has a supervisor started."""
    RELEASE = "release"
    """A supervisor gives the run back before any trainer was started."""
    TRAINER_STARTED = "trainer_started"
    REQUEST_CANCEL = "request_cancel"
    """The user wants the run cancelled."""
    REQUEST_PAUSE = "request_pause"
    """The user wants the run paused."""
    RESUME = "resume"
    """A paused run is to go on: somebody wants it to, or what it was paused for has passed."""
    SUCCEED = "succeed"
    """The trainer's work is done and exported."""
    FAIL = "fail"
    """Preparing, starting or training failed for a reason that another attempt would meet again, or too often."""
    END_EARLY = "end_early"
    """The trainer ended before its work was done, without a fault of the run: at a request, by a host that stops, or killed."""
    RUN_OUT_OF_SPACE = "run_out_of_space"
    """A drive had no room left for what the run writes."""


TRANSITIONS: Mapping[tuple[RunState, Trigger], RunState] = MappingProxyType(
    {
        (RunState.DRAFT, Trigger.SUBMIT): RunState.QUEUED,
        (RunState.DRAFT, Trigger.REQUEST_CANCEL): RunState.CANCELLED,
        (RunState.QUEUED, Trigger.CLAIM): RunState.STARTING,
        (RunState.QUEUED, Trigger.REQUEST_CANCEL): RunState.CANCELLED,
        (RunState.QUEUED, Trigger.REQUEST_PAUSE): RunState.PAUSED,
        (RunState.QUEUED, Trigger.FAIL): RunState.FAILED,
        (RunState.QUEUED, Trigger.RUN_OUT_OF_SPACE): RunState.PAUSED,
        (RunState.STARTING, Trigger.TRAINER_STARTED): RunState.RUNNING,
        (RunState.STARTING, Trigger.RELEASE): RunState.QUEUED,
        (RunState.STARTING, Trigger.REQUEST_CANCEL): RunState.CANCELLED,
        (RunState.STARTING, Trigger.REQUEST_PAUSE): RunState.PAUSED,
        (RunState.STARTING, Trigger.FAIL): RunState.FAILED,
        (RunState.STARTING, Trigger.RUN_OUT_OF_SPACE): RunState.PAUSED,
        (RunState.RUNNING, Trigger.REQUEST_CANCEL): RunState.CANCELLING,
        (RunState.RUNNING, Trigger.REQUEST_PAUSE): RunState.PAUSING,
        (RunState.RUNNING, Trigger.SUCCEED): RunState.SUCCEEDED,
        (RunState.RUNNING, Trigger.FAIL): RunState.FAILED,
        (RunState.RUNNING, Trigger.END_EARLY): RunState.QUEUED,
        (RunState.RUNNING, Trigger.RUN_OUT_OF_SPACE): RunState.PAUSED,
        # A cancellation overtakes a pause, never the other way round.
        (RunState.PAUSING, Trigger.REQUEST_CANCEL): RunState.CANCELLING,
        (RunState.PAUSING, Trigger.SUCCEED): RunState.SUCCEEDED,
        (RunState.PAUSING, Trigger.FAIL): RunState.FAILED,
        (RunState.PAUSING, Trigger.END_EARLY): RunState.PAUSED,
        (RunState.PAUSING, Trigger.RUN_OUT_OF_SPACE): RunState.PAUSED,
        (RunState.PAUSED, Trigger.RESUME): RunState.QUEUED,
        (RunState.PAUSED, Trigger.REQUEST_CANCEL): RunState.CANCELLED,
        # The last step may have been done before the request was seen: the result then counts.
        (RunState.CANCELLING, Trigger.SUCCEED): RunState.SUCCEEDED,
        (RunState.CANCELLING, Trigger.FAIL): RunState.FAILED,
        (RunState.CANCELLING, Trigger.END_EARLY): RunState.CANCELLED,
        (RunState.CANCELLING, Trigger.RUN_OUT_OF_SPACE): RunState.CANCELLED,
    }
)


def next_state(state: RunState, trigger: Trigger) -> RunState | None:
    """Where `trigger` leads from `state`; None where it changes nothing."""
    return TRANSITIONS.get((state, trigger))


def moves(trigger: Trigger) -> dict[RunState, set[RunState]]:
    """Target state to the states from which `trigger` leads there: what a compare-and-set needs."""
    found: dict[RunState, set[RunState]] = {}
    for (source, name), target in TRANSITIONS.items():
        if name is trigger:
            found.setdefault(target, set()).add(source)
    return found


def is_allowed(source: RunState, target: RunState) -> bool:
    """Whether any trigger leads from `source` to `target`."""
    return any(start == source and end == target for (start, _), end in TRANSITIONS.items())


assert not any(source in TERMINAL_STATES for source, _ in TRANSITIONS), "terminal states are final"
