"""What people may ask of a run, as data: in which state which request does what. Service, REST and pages share it.

Whatever is not in `EFFECTS` is refused with the run's state and what is allowed instead, and changes nothing: a page that was opened an
hour ago, a second click and a program that repeats itself all end here.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Protocol

from lohan_app.entities.runs import RunKind, RunState, Wanted


class Request(StrEnum):
    """Named as in the address: `POST /api/v1/runs/{id}/<request>`; `delete` is the method DELETE."""

    SUBMIT = "submit"
    """Put a draft into the queue."""
    PAUSE = "pause"
    RESUME = "resume"
    STOP = "stop"
    """End the training after the step at work and keep what it has learned."""
    CANCEL = "cancel"
    FORCE_STOP = "force-stop"
    """Kill a trainer that does not react."""
    RETRY = "retry"
    """A new run that goes on from where this one ended."""
    CLONE = "clone"
    """A draft with the same settings."""
    DELETE = "delete"


class Effect(StrEnum):
    """What a request does in the transaction that takes it."""

    NOW = "now"
    """Nobody works on the run: it is moved at once."""
    ASK = "ask"
    """`wanted` says so from now on; whoever holds the run acts on it."""
    KILL = "kill"
    """The attempt at work is marked to be killed; the run is paused then, or cancelled where that was wanted."""
    NOTHING = "nothing"
    """It is so already."""
    MAKE = "make"
    """Another run is made; this one stays as it is."""
    REMOVE = "remove"


_WANTED = {Request.PAUSE: Wanted.PAUSE, Request.RESUME: Wanted.RUN, Request.STOP: Wanted.STOP, Request.CANCEL: Wanted.CANCEL}
_AT_WORK = {Request.PAUSE: Effect.ASK, Request.RESUME: Effect.ASK, Request.CANCEL: Effect.ASK, Request.CLONE: Effect.MAKE}
_ENDED = {Request.CLONE: Effect.MAKE, Request.DELETE: Effect.REMOVE}
_BY_STATE: dict[RunState, dict[Request, Effect]] = {
    RunState.DRAFT: {Request.SUBMIT: Effect.NOW, Request.CANCEL: Effect.NOW, **_ENDED},
    RunState.QUEUED: {
        Request.SUBMIT: Effect.NOTHING,
        Request.PAUSE: Effect.NOW,
        Request.RESUME: Effect.ASK,
        Request.CANCEL: Effect.NOW,
        Request.CLONE: Effect.MAKE,
    },
    RunState.STARTING: _AT_WORK,
    RunState.RUNNING: _AT_WORK | {Request.STOP: Effect.ASK, Request.FORCE_STOP: Effect.KILL},
    RunState.PAUSING: _AT_WORK | {Request.STOP: Effect.ASK, Request.FORCE_STOP: Effect.KILL},
    RunState.PAUSED: {
        Request.PAUSE: Effect.ASK,
        Request.RESUME: Effect.NOW,
        Request.STOP: Effect.NOW,
        Request.CANCEL: Effect.NOW,
        Request.CLONE: Effect.MAKE,
    },
    RunState.CANCELLING: {Request.CANCEL: Effect.ASK, Request.FORCE_STOP: Effect.KILL, Request.CLONE: Effect.MAKE},
    RunState.SUCCEEDED: _ENDED,
    RunState.FAILED: _ENDED | {Request.RETRY: Effect.MAKE},
    RunState.CANCELLED: _ENDED | {Request.RETRY: Effect.MAKE},
}
EFFECTS: Mapping[tuple[RunState, Request], Effect] = MappingProxyType(
    {(state, request): effect for state, effects in _BY_STATE.items() for request, effect in effects.items()}
)
_NO_HALF = "it keeps nothing that it could go on from, nor a part of its result: cancel it, and begin again"
_NO_DRAFT = "drafts are of training runs: ask for it anew, where it was asked for first"
_UNKNOWN = {Request.SUBMIT: _NO_DRAFT, Request.PAUSE: _NO_HALF, Request.STOP: _NO_HALF, Request.CLONE: _NO_DRAFT}
UNKNOWN: Mapping[RunKind, Mapping[Request, str]] = MappingProxyType(
    {kind: MappingProxyType({} if kind is RunKind.TRAIN else _UNKNOWN) for kind in RunKind}
)
"""What runs of a kind cannot be asked in any state, and why. Stopped by force, they are cancelled: there is nothing to pause them at."""
# What is still possible while a cancellation is under way: it is never taken back.
_BESIDE_CANCELLATION = frozenset({Request.CANCEL, Request.FORCE_STOP, Request.CLONE})
_WAITING = frozenset({RunState.QUEUED, RunState.PAUSED})


def effect_of(request: Request, state: RunState, wanted: Wanted, kind: RunKind = RunKind.TRAIN) -> Effect | None:
    """What `request` does to a run in `state` of which `wanted` is wanted; None where it is refused."""
    if request in UNKNOWN[kind]:
        return None
    effect = EFFECTS.get((state, request))
    if effect is None or state is RunState.DRAFT or effect in (Effect.MAKE, Effect.REMOVE):
        return effect
    if wanted is Wanted.CANCEL:
        if request not in _BESIDE_CANCELLATION:
            return None
        return Effect.NOTHING if request is Request.CANCEL and state not in _WAITING else effect
    if wanted is Wanted.STOP and request is Request.RESUME:
        return None  # the trainer may have left its last step already
    if effect is Effect.ASK and _WANTED[request] is wanted:
        return Effect.NOTHING
    return effect


def wanted_by(request: Request) -> Wanted:
    """What is wanted of a run from such a request on."""
    return _WANTED[request]


def wanted_after_kill(kind: RunKind, wanted: Wanted) -> Wanted:
    """What is wanted of a run of which `wanted` was wanted, once it is to be stopped by force."""
    return Wanted.CANCEL if wanted is Wanted.CANCEL or Request.PAUSE in UNKNOWN[kind] else Wanted.PAUSE


class Standing(Protocol):
    """Where a run stands, as far as requests depend on it: a row, or what the API shows of one."""

    @property
    def kind(self) -> RunKind: ...
    @property
    def state(self) -> RunState: ...
    @property
    def wanted(self) -> Wanted: ...
    @property
    def step(self) -> int: ...


def allowed(run: Standing) -> list[Request]:
    """The requests that would change something now, in the order in which a person would think of them."""
    return [request for request in Request if _is_allowed(request, run)]


def _is_allowed(request: Request, run: Standing) -> bool:
    if request is Request.STOP and run.step == 0:
        return False  # there is nothing to keep yet
    return effect_of(request, run.state, run.wanted, run.kind) not in (None, Effect.NOTHING)
