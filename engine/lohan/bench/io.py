"""`lohan bench io`: file transfers beside fio's, over engines, operations, block sizes and depths, and the choice among them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lohan._native import IoError
from lohan.bench import fio, striping
from lohan.bench.records import Record, Watcher, median
from lohan.errors import ConfigError, StorageError
from lohan.hardware.transfers import (
    CHOICE_FILE,
    ENGINE_BLOCK_BYTES,
    Engine,
    Operation,
    TransferChoice,
    TransferSetting,
    TransferSpeed,
    choose_transfers,
    save_choice,
)
from lohan.profiling.folders import temporary_folders
from lohan.profiling.passes import Passes, as_storage_error, refusal
from lohan.units import GIB, KIB, MIB, format_bytes

DEFAULT_SIZE_BYTES: Final = GIB
DEFAULT_BLOCK_BYTES: Final = (256 * KIB, MIB, 4 * MIB)
DEFAULT_DEPTHS: Final = (8, 32)
DEFAULT_ROUNDS: Final = 3
FEW_THREADS: Final = 8
# Whole pages bypass the page cache; 4 KiB is the largest logical block of common drives.
BLOCK_GRAIN_BYTES: Final = 4 * KIB
# Files in several folders are striped in pieces of this size.
STRIPE_BYTES: Final = 4 * MIB


@dataclass(frozen=True)
class IoOptions:
    """What is measured.

    Raises:
        ConfigError: a folder that does not exist, a block size that is no multiple of 4 KiB, or files too small for the settings.
    """

    directories: tuple[Path, ...]
    size_bytes: int = DEFAULT_SIZE_BYTES
    """Of the file in each folder."""
    engines: tuple[Engine, ...] = tuple(Engine)
    operations: tuple[Operation, ...] = tuple(Operation)
    block_bytes: tuple[int, ...] = DEFAULT_BLOCK_BYTES
    depths: tuple[int, ...] = DEFAULT_DEPTHS
    rounds: int = DEFAULT_ROUNDS
    least_seconds: float = 1.0
    """A measurement goes over the files as often as this takes. fio's threads start some 20 ms apart, more on a busy machine, and each
    takes its own time: in a measurement of 50 ms that alone looked like twice the speed. With more than `FEW_THREADS` of them it is four
    times as long: with 32 threads a second still flattered fio by up to a third."""
    striping_bytes: int = striping.TOTAL_BYTES
    """What `striping.run` moves at a time."""

    def __post_init__(self) -> None:
        for directory in self.directories:
            if not directory.is_dir():
                raise ConfigError("there is no such folder", place=f"--directory {directory}", remedy="Name a folder that exists.")
        for block in self.block_bytes:
            if block < BLOCK_GRAIN_BYTES or block % BLOCK_GRAIN_BYTES:
                raise ConfigError(
                    f"{block} bytes is no multiple of 4 KiB", place="--block", remedy="Give a multiple of 4 KiB, e.g. 256K or 4M."
                )
        least = max(STRIPE_BYTES, max(self.block_bytes) * max(self.depths))
        if self.size_bytes < least:
            raise ConfigError(
                f"{format_bytes(self.size_bytes)} is less than the largest block and depth have in flight",
                place="--size",
                remedy=f"Give at least {format_bytes(least)}, or smaller blocks and depths.",
            )

    @property
    def file_bytes(self) -> int:
        """`size_bytes`, rounded down to whole stripes."""
        return self.size_bytes // STRIPE_BYTES * STRIPE_BYTES

    def bytes_per_path(self, setting: TransferSetting) -> int:
        """What a pass moves in each folder: the whole file, but for what does not divide into fio's threads and blocks."""
        return self.file_bytes // setting.in_flight_bytes * setting.in_flight_bytes


def run(options: IoOptions, watcher: Watcher) -> list[Record]:
    """Measure, and end with the choice.

    Raises:
        StorageError: a folder has no room, cannot be written to, or a drive failed.
    """
    executable = fio.program()
    records: list[Record] = [] if executable else [{"system": "fio", "skipped": fio.MISSING}]
    refusals = {engine: refusal(engine) for engine in options.engines}
    records += [{"system": "lohan", "engine": str(engine), "skipped": reason} for engine, reason in refusals.items() if reason]
    engines = [engine for engine in options.engines if not refusals[engine]]
    if not engines:
        return records
    comparisons = len(options.block_bytes) * len(options.depths) * len(options.operations)
    watcher.expect(comparisons * len(engines) * (2 if executable else 1) * options.rounds)
    speeds: list[TransferSpeed] = []
    try:
        with temporary_folders(options.directories) as folders:
            paths = [folder / "states" for folder in folders]
            _fill(paths, options, watcher)
            for block, depth in itertools.product(sorted(options.block_bytes), sorted(options.depths)):
                settings = [TransferSetting(engine, block, depth) for engine in engines]
                for measured in _compare(settings, paths, options, executable, watcher):
                    speeds.append(measured.speed)
                    records += measured.records()
            limit = striping.limit_for([speed.bytes_per_second / len(paths) for speed in speeds])
            records += striping.run(
                folders[0],
                engine=engines[0],
                limit_bytes_per_second=limit,
                total_bytes=options.striping_bytes,
                rounds=options.rounds,
                watcher=watcher,
            )
    except IoError as error:
        raise as_storage_error(error) from error
    choice = choose_transfers(speeds)
    if choice is None:
        return records
    if choice.setting.block_bytes == ENGINE_BLOCK_BYTES:
        for directory in options.directories:
            _save(directory, choice)
    return [*records, _choice_record(choice)]


def _compare(
    settings: Sequence[TransferSetting], paths: Sequence[Path], options: IoOptions, executable: str | None, watcher: Watcher
) -> Iterator[_Measurement]:
    """Measure settings that differ in the engine alone, each beside fio, all in turns, operation by operation."""
    with ExitStack() as stack:
        passes = [stack.enter_context(Passes(paths, setting, file_bytes=options.file_bytes)) for setting in settings]
        for operation in options.operations:
            compared = [_Measurement(setting, operation, options, own, paths) for setting, own in zip(settings, passes, strict=True)]
            for measured in compared:
                measured.prepare()
            for turn in range(options.rounds):
                for measured in compared if turn % 2 == 0 else reversed(compared):
                    measured.run_round(turn, executable, watcher)
            by_engine = {measured.engine: measured for measured in compared}
            for measured in compared:
                measured.beside = by_engine.get(Engine.URING)
                yield measured


class _Measurement:
    """One setting and operation, ours and fio's in turns."""

    def __init__(self, setting: TransferSetting, operation: Operation, options: IoOptions, passes: Passes, paths: Sequence[Path]) -> None:
        self._setting, self._operation, self._passes = setting, operation, passes
        many_threads = setting.engine is Engine.THREADS and setting.depth > FEW_THREADS
        self._least_seconds = options.least_seconds * (4 if many_threads else 1)
        self._paths = paths
        self._bytes_per_path = options.bytes_per_path(setting)
        self._total_bytes = self._bytes_per_path * len(paths)
        self._times = 1
        self._ours: list[float] = []
        self._theirs: list[float] = []
        self._refusal = ""
        self.beside: _Measurement | None = None
        """The same with io_uring."""

    @property
    def engine(self) -> Engine:
        return self._setting.engine

    def prepare(self) -> None:
        """Warm up with one pass; it says how many make a measurement."""
        self._times = max(1, math.ceil(self._least_seconds / self._passes.run(self._operation, self._total_bytes)))

    def run_round(self, turn: int, executable: str | None, watcher: Watcher) -> None:
        """Measure ours and fio's once; in odd turns fio goes first."""
        for who in ("lohan", "fio") if turn % 2 == 0 else ("fio", "lohan"):
            if who == "lohan":
                seconds = self._passes.run(self._operation, self._total_bytes, times=self._times)
                self._ours.append(self._total_bytes * self._times / seconds)
                watcher.done(self._what("lohan", str(self.engine), self._ours[-1]))
            elif executable is not None:
                self._run_fio(executable)
                watcher.done(self._what("fio", fio.ENGINE_NAMES[self.engine], self._theirs[-1] if self._theirs else 0.0))

    def _run_fio(self, executable: str) -> None:
        if self._refusal:
            return
        job = fio.FioJob(
            paths=self._paths,
            engine=self.engine,
            operation=self._operation,
            block_bytes=self._setting.block_bytes,
            depth=self._setting.depth,
            bytes_per_path=self._bytes_per_path,
            times=self._times,
            direct=self._passes.direct,
            registered=self._passes.registered,
        )
        try:
            self._theirs.append(fio.run(job, executable))
        except fio.FioError as error:
            self._refusal = str(error)

    def _what(self, system: str, engine: str, rate: float) -> str:
        setting = self._setting
        return f"{system} {engine} {self._operation} {format_bytes(setting.block_bytes)} x {setting.depth}: {rate / 1e9:.2f} GB/s"

    @property
    def bytes_per_second(self) -> float:
        return median(self._ours)

    @property
    def speed(self) -> TransferSpeed:
        return TransferSpeed(self._setting, self._operation, self.bytes_per_second)

    def records(self) -> list[Record]:
        """Ours, and fio's or why there is none."""
        theirs = median(self._theirs) if self._theirs and not self._refusal else None
        ours = self._record("lohan", str(self.engine), self._ours, theirs)
        if self.engine is Engine.THREADS and self.beside is not None:
            ours["ratio_to_uring"] = self.bytes_per_second / self.beside.bytes_per_second
        name = fio.ENGINE_NAMES[self.engine]
        if theirs is not None:
            return [ours, self._record("fio", name, self._theirs, theirs)]
        return [ours, {**self._place("fio", name), "skipped": self._refusal}] if self._refusal else [ours]

    def _place(self, system: str, engine: str) -> Record:
        return {
            "system": system,
            "engine": engine,
            "operation": str(self._operation),
            "block_bytes": self._setting.block_bytes,
            "depth": self._setting.depth,
        }

    def _record(self, system: str, engine: str, rates: list[float], theirs: float | None) -> Record:
        return {
            **self._place(system, engine),
            "directories": len(self._paths),
            "direct": self._passes.direct,
            "registered": self._passes.registered,
            "bytes_per_second": median(rates),
            "ratio_to_fio": None if theirs is None else median(rates) / theirs,
            "bytes_per_second_all": rates,
        }


def _save(directory: Path, choice: TransferChoice) -> None:
    try:
        save_choice(directory, choice)
    except OSError as error:
        remedy = "Free space, or give this user the right to write there; the measurement itself is done."
        raise StorageError.of(error, "the choice cannot be kept", place=directory / CHOICE_FILE, remedy=remedy) from error


def _choice_record(choice: TransferChoice) -> Record:
    return {
        "system": "lohan",
        "chosen": True,
        "engine": str(choice.setting.engine),
        "block_bytes": choice.setting.block_bytes,
        "depth": choice.setting.depth,
        "bytes_per_second": choice.bytes_per_second,
        "reason": choice.reason,
    }


def _fill(paths: Sequence[Path], options: IoOptions, watcher: Watcher) -> None:
    """Write all files once: blocks that were never written read as zeros without the drive being asked, and cost more to write."""
    watcher.note(f"writing {format_bytes(options.file_bytes * len(paths))} to measure with")
    setting = TransferSetting(Engine.THREADS, STRIPE_BYTES, 4)
    with Passes(paths, setting, file_bytes=options.file_bytes) as passes:
        passes.run(Operation.WRITE, options.file_bytes * len(paths))
