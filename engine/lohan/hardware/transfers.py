"""Chooses how files are read and written from a few measurements: engine, block size, operations in flight.

`lohan bench io` measures a folder and leaves the choice in it (`CHOICE_FILE`); what opens state files there later goes by it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from lohan.hardware.probe import lies_in_memory
from lohan.units import format_bytes

CHOICE_FILE = "lohan-transfers.json"
_CHOICE_SCHEMA = 1
# What the native core moves at a time: runs can take no other block, whatever was measured.
ENGINE_BLOCK_BYTES = 4 << 20
_MOST_DEPTH = 256
_LEAST_COPYING_THREADS, _MOST_COPYING_THREADS = 4, 16

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
    """The setting for runs: the one that moves the same number of bytes in every measured operation in the least time.

    Only settings with `ENGINE_BLOCK_BYTES` count, or all when none has those.
    Of settings within `SAME_SPEED_FRACTION` of the fastest, the one with the fewest bytes in flight is taken, since an urgent read waits
    behind those and they hold memory; then the one with fewer operations in flight; then io_uring, which needs no threads.
    A setting takes part only if it was measured in every operation that any setting was measured in.

    Returns:
        None when no setting was.
    """
    speeds = list(speeds)
    usable = [speed for speed in speeds if speed.setting.block_bytes == ENGINE_BLOCK_BYTES]
    rates: dict[TransferSetting, dict[Operation, float]] = {}
    for speed in usable or speeds:
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


def known_setting(directories: Sequence[Path]) -> TransferSetting | None:
    """What moves the files of these folders fastest, as far as that is known: `load_choice`, or what files in memory take. Else None."""
    chosen = load_choice(directories)
    if chosen is None and directories and all(map(lies_in_memory, directories)):
        # There a transfer is a copy, and io_uring does a file's writes one after the other. Of 16 processors 6 or 8 copied 3.43 billion
        # parameters' states in 2.9 s, 12 in 2.3 s: the optimizer's threads share what is left.
        depth = min(_MOST_COPYING_THREADS, max(_LEAST_COPYING_THREADS, len(os.sched_getaffinity(0)) * 3 // 4))
        return TransferSetting(Engine.THREADS, ENGINE_BLOCK_BYTES, depth)
    return chosen


def save_choice(directory: Path, choice: TransferChoice) -> None:
    """Leave `choice` in the folder it was measured in.

    Raises:
        OSError: the folder cannot be written to.
    """
    content = {"schema": _CHOICE_SCHEMA, **asdict(choice.setting), "bytes_per_second": choice.bytes_per_second, "reason": choice.reason}
    unfinished = directory / f".{CHOICE_FILE}.new"
    unfinished.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(unfinished, directory / CHOICE_FILE)  # noqa: PTH105 - atomic, and named like the rename it is


def load_choice(directories: Sequence[Path]) -> TransferSetting | None:
    """What was chosen for these folders: the setting of the first that has one, or None.

    A file that is not what `save_choice` writes counts as none: the choice is about speed alone, and measuring anew mends it.
    """
    for directory in directories:
        try:
            content = json.loads((directory / CHOICE_FILE).read_text(encoding="utf-8"))
            setting = TransferSetting(Engine(content["engine"]), int(content["block_bytes"]), int(content["depth"]))
        except (OSError, ValueError, TypeError, KeyError):
            continue
        if content.get("schema") == _CHOICE_SCHEMA and setting.block_bytes == ENGINE_BLOCK_BYTES and 1 <= setting.depth <= _MOST_DEPTH:
            return setting
    return None
