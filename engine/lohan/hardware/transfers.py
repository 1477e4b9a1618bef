"""Chooses how files are read and written from a few measurements: engine, block size, operations in flight."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from lohan.units import format_bytes

# Settings this close to the best count as equally fast: medians of a few rounds on a busy drive repeat no better.
SAME_SPEED_FRACTION = 0.03


class Engine(StrEnum):
    """How transfers are given to the kernel."""

    URING = "uring"
    """io_uring."""
    THREADS = "threads"
    """pread and pwrite on threads, one for each operation in flight."""


class Operation(StrEnum):
    READ = "read"
    WRITE = "write"
    MIXED = "mixed"
    """Reads and writes in one stream."""


@dataclass(frozen=True)
class TransferSetting:
    engine: Engine
    block_bytes: int
    depth: int
    """Operations in flight in each folder."""

    @property
    def in_flight_bytes(self) -> int:
        """In each folder."""
        return self.block_bytes * self.depth


@dataclass(frozen=True)
class TransferSpeed:
    """One measurement; bytes per second are durable ones."""

    setting: TransferSetting
    operation: Operation
    bytes_per_second: float


@dataclass(frozen=True)
class TransferChoice:
    setting: TransferSetting
    bytes_per_second: float
    """Of the same number of bytes in each measured operation, one operation after the other."""
    reason: str
    """One sentence for people."""


def choose_transfers(speeds: Iterable[TransferSpeed]) -> TransferChoice | None:
    """The setting that moves the same number of bytes in every measured operation in the least time.

    Of settings within `SAME_SPEED_FRACTION` of the fastest, the one with the fewest bytes in flight is taken, since an urgent read waits
    behind those and they hold memory; then the one with fewer operations in flight; then io_uring, which needs no threads.
    A setting takes part only if it was measured in every operation that any setting was measured in.

    Returns:
        None when no setting was.
    """
    rates: dict[TransferSetting, dict[Operation, float]] = {}
    for speed in speeds:
        rates.setdefault(speed.setting, {})[speed.operation] = speed.bytes_per_second
    operations = {operation for measured in rates.values() for operation in measured}
    totals = {
        setting: len(measured) / sum(1 / rate for rate in measured.values())
        for setting, measured in rates.items()
        if measured.keys() == operations and all(rate > 0 for rate in measured.values())
    }
    if not totals:
        return None
    best = max(totals.values())
    close = [setting for setting, rate in totals.items() if rate >= best * (1 - SAME_SPEED_FRACTION)]
    chosen = min(close, key=lambda setting: (setting.in_flight_bytes, setting.depth, setting.engine is not Engine.URING))
    reason = f"{totals[chosen] / 1e9:.2f} GB/s over {', '.join(sorted(operations))}"
    if totals[chosen] == best:
        reason += f", the fastest of {len(totals)} settings"
    else:
        reason += (
            f", within {SAME_SPEED_FRACTION:.0%} of the fastest of {len(totals)} settings ({best / 1e9:.2f} GB/s) "
            f"and with the least in flight, {format_bytes(chosen.in_flight_bytes)}"
        )
    return TransferChoice(chosen, totals[chosen], reason)
