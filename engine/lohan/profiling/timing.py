"""Repeats what is measured, and says how far the repetitions lie apart."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from lohan.hardware.profile import Measured
from lohan.units import MIB

# Before each timed call. OpenMP's threads, which torch computes with, go on spinning for milliseconds after their work: whoever came
# next on the same cores took 15.8 ms instead of 12.4 on two of them.
PAUSE_SECONDS: Final = 0.02
_MOST_REPETITIONS: Final = 25
_GPU_WARM_UP_FRACTION: Final = 0.5
# No clock here tells less apart.
_LEAST_SECONDS: Final = 1e-9


@dataclass(frozen=True)
class Effort:
    """How much is done for a figure. Sizes are upper bounds: less is taken where memory or drives have less to spare."""

    seconds: float
    """Of repetitions of one figure, where a single one does not take longer."""
    repetitions: int
    """At the least."""
    copy_bytes: int
    """Of a copy."""
    elements: int
    """Parameters that AdamW updates at a time."""
    file_bytes: int
    """In each state directory."""
    matrix_side: int
    """Of the square matrices that a GPU multiplies; a CPU gets a quarter."""


THOROUGH: Final = Effort(
    seconds=0.8, repetitions=5, copy_bytes=256 * MIB, elements=32 * MIB, file_bytes=512 * MIB, matrix_side=8192
)  # 32 Mi parameters: a chunk
QUICK: Final = Effort(seconds=0.05, repetitions=3, copy_bytes=16 * MIB, elements=2 * MIB, file_bytes=16 * MIB, matrix_side=2048)


def timed(work: Callable[[], object]) -> Callable[[], float]:
    """`work` as a call that returns its seconds on the host's clock."""

    def call() -> float:
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin

    return call


def repeated(call: Callable[[], float], effort: Effort, *, on_gpu: bool = False) -> list[float]:
    """The seconds that `call` returns, time after time, behind a warm-up that does not count.

    Args:
        on_gpu: whether a GPU is what is busy: it is warmed up for a while, since clocks and link rise only under load, and then kept busy
            as a run keeps it.
    """
    warm = time.monotonic() + (effort.seconds * _GPU_WARM_UP_FRACTION if on_gpu else 0.0)
    call()
    while on_gpu and time.monotonic() < warm:
        call()
    seconds: list[float] = []
    end = time.monotonic() + effort.seconds
    while len(seconds) < effort.repetitions or (time.monotonic() < end and len(seconds) < _MOST_REPETITIONS):
        if not on_gpu:
            time.sleep(PAUSE_SECONDS)
        seconds.append(max(call(), _LEAST_SECONDS))
    return seconds


def summary(values: Sequence[float]) -> Measured:
    """The median, and how far the values lie apart."""
    median = statistics.median(values)
    return Measured(value=median, spread=(max(values) - min(values)) / median, repetitions=len(values))


def rate(amount: float, call: Callable[[], float], effort: Effort, *, on_gpu: bool = False) -> Measured:
    """How much a second `call` does, which does `amount` each time and returns its seconds; see `repeated`."""
    return summary([amount / seconds for seconds in repeated(call, effort, on_gpu=on_gpu)])
