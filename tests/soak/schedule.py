"""What is killed and what fails when: a pure function of the seed, so that a soak can be made again."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain

LONGEST_GAP_SECONDS = 15.0
SHORTEST_GAP_SECONDS = 5.0


class Victim(StrEnum):
    """The kinds of process that are killed."""

    WEB = "web"
    WORKER = "worker"
    CELERY = "celery"
    POOL_CHILD = "pool_child"
    SUPERVISOR = "supervisor"
    TRAINER = "trainer"
    BROKER = "broker"
    UP = "up"
    """Where `lohan up` runs the others."""


class Fault(StrEnum):
    """What fails besides, again and again."""

    NONE = "none"
    REDIS = "redis"
    POSTGRES = "postgres"
    DISK = "disk"


class Act(StrEnum):
    """What is done to a server or a drive."""

    FLUSH_BROKER = "flush_broker"
    """FLUSHALL: the server stays, and knows nothing any more."""
    WIPE_BROKER = "wipe_broker"
    """The server is killed, its files are removed, and it is started again."""
    RESTART_DATABASE = "restart_database"
    """Stopped at once, with connections and transactions cut, and started again after a while."""
    FILL_DRIVE = "fill_drive"
    EMPTY_DRIVE = "empty_drive"


@dataclass(frozen=True, slots=True)
class Stroke:
    """One thing that happens."""

    at_seconds: float
    what: Victim | Act
    pick: float
    """From 0 up to 1: which of several processes is killed, or how long a server stays away."""


def make_schedule(seed: int, seconds: float, victims: Sequence[Victim], fault: Fault) -> list[Stroke]:
    """The strokes of a soak that lasts `seconds`, in order. A longer soak of the same seed begins like a shorter one.

    Kinds of victims come in shuffled rounds: each is hit once before any is hit again.
    """
    kills = _strokes(random.Random(f"{seed} kills"), seconds, _rounds(victims), SHORTEST_GAP_SECONDS, LONGEST_GAP_SECONDS)  # noqa: S311
    numbers = random.Random(f"{seed} {fault}")  # noqa: S311 - not for secrets
    match fault:
        case Fault.NONE:
            acts: Iterator[Stroke] = iter(())
        case Fault.REDIS:
            acts = _strokes(numbers, seconds, _rounds([Act.FLUSH_BROKER, Act.WIPE_BROKER]), 4.0, 12.0)
        case Fault.POSTGRES:
            acts = _strokes(numbers, seconds, _rounds([Act.RESTART_DATABASE]), 10.0, 25.0)
        case Fault.DISK:
            acts = _strokes(numbers, seconds, _in_turn([Act.FILL_DRIVE, Act.EMPTY_DRIVE]), 5.0, 20.0)
    return sorted(chain(kills, acts), key=lambda stroke: stroke.at_seconds)


Kinds = Callable[[random.Random], Iterator[Victim | Act]]


def _rounds(kinds: Sequence[Victim | Act]) -> Kinds:
    def draw(numbers: random.Random) -> Iterator[Victim | Act]:
        while True:
            yield from numbers.sample(list(kinds), len(kinds))

    return draw


def _in_turn(kinds: Sequence[Victim | Act]) -> Kinds:
    def draw(_numbers: random.Random) -> Iterator[Victim | Act]:
        while True:
            yield from kinds

    return draw


def _strokes(numbers: random.Random, seconds: float, kinds: Kinds, shortest: float, longest: float) -> Iterator[Stroke]:
    at_seconds = 0.0
    for what in kinds(numbers):
        at_seconds += numbers.uniform(shortest, longest)
        if at_seconds >= seconds:
            return
        yield Stroke(round(at_seconds, 2), what, round(numbers.random(), 4))
