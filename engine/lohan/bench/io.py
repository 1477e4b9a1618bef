"""`lohan bench io`: file transfers beside fio's, over engines, operations, block sizes and depths, and what the engine should use."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lohan._native import IoError
from lohan.bench import fio
from lohan.bench.passes import Passes, refusal
from lohan.bench.records import Record, Watcher, median
from lohan.errors import ConfigError, StorageError
from lohan.hardware.transfers import Engine, Operation, TransferSetting, TransferSpeed, choose_transfers
from lohan.units import GIB, KIB, MIB, format_bytes

DEFAULT_SIZE_BYTES: Final = GIB
DEFAULT_BLOCK_BYTES: Final = (256 * KIB, MIB, 4 * MIB)
DEFAULT_DEPTHS: Final = (8, 32)
DEFAULT_ROUNDS: Final = 5
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
    """Of all files together."""
    engines: tuple[Engine, ...] = tuple(Engine)
    operations: tuple[Operation, ...] = tuple(Operation)
    block_bytes: tuple[int, ...] = DEFAULT_BLOCK_BYTES
    depths: tuple[int, ...] = DEFAULT_DEPTHS
    rounds: int = DEFAULT_ROUNDS
    least_seconds: float = 0.5
    """A measurement goes over the files as often as this takes. fio's threads start some 20 ms apart and each takes its own time: in a
    short measurement that alone looks like twice the speed."""

    def __post_init__(self) -> None:
        for directory in self.directories:
            if not directory.is_dir():
                raise ConfigError("there is no such folder", place=f"--directory {directory}", remedy="Name a folder that exists.")
        for block in self.block_bytes:
            if block < BLOCK_GRAIN_BYTES or block % BLOCK_GRAIN_BYTES:
                raise ConfigError(
                    f"{block} bytes is no multiple of 4 KiB", place="--block", remedy="Give a multiple of 4 KiB, e.g. 256K or 4M."
                )
        least = math.lcm(self.grain_bytes, STRIPE_BYTES * len(self.directories))
        if self.size_bytes < least:
            raise ConfigError(
                f"{format_bytes(self.size_bytes)} is less than the largest block and depth move at a time",
                place="--size",
                remedy=f"Give at least {format_bytes(least)}, or smaller blocks and depths.",
            )

    @property
    def grain_bytes(self) -> int:
        """What the largest setting keeps in flight in every folder."""
        return max(self.block_bytes) * max(self.depths) * len(self.directories)

    @property
    def file_bytes(self) -> int:
        """`size_bytes`, rounded down to whole stripes in every folder."""
        grain = STRIPE_BYTES * len(self.directories)
        return self.size_bytes // grain * grain

    def pass_bytes(self, setting: TransferSetting) -> int:
        """What a pass moves: the whole file, but for what does not divide among folders, fio's threads and blocks."""
        grain = setting.in_flight_bytes * len(self.directories)
        return self.file_bytes // grain * grain

    def settings(self) -> list[TransferSetting]:
        return [
            TransferSetting(engine, block, depth) for engine in self.engines for block in sorted(self.block_bytes) for depth in self.depths
        ]


def run(options: IoOptions, watcher: Watcher) -> list[Record]:
    """Measure, and end with the choice.

    Raises:
        StorageError: a folder has no room, cannot be written to, or a drive failed.
    """
    executable = fio.program()
    records: list[Record] = [] if executable else [{"system": "fio", "skipped": fio.MISSING}]
    usable = []
    for engine in options.engines:
        reason = refusal(engine)
        if reason:
            records.append({"system": "lohan", "engine": str(engine), "skipped": reason})
        else:
            usable.append(engine)
    settings = [setting for setting in options.settings() if setting.engine in usable]
    systems = 2 if executable else 1
    watcher.expect(len(settings) * len(options.operations) * options.rounds * systems)
    speeds: list[TransferSpeed] = []
    try:
        with _state_files(options.directories) as paths:
            _fill(paths, options, watcher)
            for setting in settings:
                with Passes(paths, setting, file_bytes=options.file_bytes) as passes:
                    for operation in options.operations:
                        measured = _Measurement(setting, operation, options, passes, paths)
                        measured.measure(executable, watcher)
                        speeds.append(measured.speed)
                        records += measured.records()
    except IoError as error:
        raise _as_storage_error(error) from error
    return [*records, *_choice(speeds)]


class _Measurement:
    """One setting and operation, ours and fio's in turns."""

    def __init__(self, setting: TransferSetting, operation: Operation, options: IoOptions, passes: Passes, paths: Sequence[Path]) -> None:
        self._setting, self._operation, self._options, self._passes = setting, operation, options, passes
        self._total_bytes = options.pass_bytes(setting)
        self._paths = paths
        self._times = 1
        self._ours: list[float] = []
        self._theirs: list[float] = []
        self._refusal = ""

    def measure(self, executable: str | None, watcher: Watcher) -> None:
        """`rounds` of each, alternating which goes first, after one pass that says how many make a measurement."""
        self._times = max(1, math.ceil(self._options.least_seconds / self._passes.run(self._operation, self._total_bytes)))
        for turn in range(self._options.rounds):
            for who in ("lohan", "fio") if turn % 2 == 0 else ("fio", "lohan"):
                if who == "lohan":
                    seconds = self._passes.run(self._operation, self._total_bytes, times=self._times)
                    self._ours.append(self._total_bytes * self._times / seconds)
                    watcher.done(self._what("lohan", self._ours[-1]))
                elif executable is not None:
                    self._run_fio(executable)
                    watcher.done(self._what("fio", self._theirs[-1] if self._theirs else 0.0))

    def _run_fio(self, executable: str) -> None:
        if self._refusal:
            return
        job = fio.FioJob(
            paths=self._paths,
            engine=self._setting.engine,
            operation=self._operation,
            block_bytes=self._setting.block_bytes,
            depth=self._setting.depth,
            total_bytes=self._total_bytes,
            times=self._times,
            direct=self._passes.direct,
        )
        try:
            self._theirs.append(fio.run(job, executable))
        except fio.FioError as error:
            self._refusal = str(error)

    def _what(self, system: str, rate: float) -> str:
        setting = self._setting
        engine = setting.engine if system == "lohan" else fio.ENGINE_NAMES[setting.engine]
        return f"{system} {engine} {self._operation} {format_bytes(setting.block_bytes)} x {setting.depth}: {rate / 1e9:.2f} GB/s"

    @property
    def speed(self) -> TransferSpeed:
        return TransferSpeed(self._setting, self._operation, median(self._ours))

    def records(self) -> list[Record]:
        theirs = median(self._theirs) if self._theirs and not self._refusal else None
        result = [self._record("lohan", str(self._setting.engine), self._ours, theirs)]
        name = fio.ENGINE_NAMES[self._setting.engine]
        if theirs is not None:
            result.append(self._record("fio", name, self._theirs, theirs))
        elif self._refusal:
            result.append({**self._place("fio", name), "skipped": self._refusal})
        return result

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
            "directories": len(self._options.directories),
            "direct": self._passes.direct,
            "bytes_per_second": median(rates),
            "ratio_to_fio": None if theirs is None else median(rates) / theirs,
            "bytes_per_second_all": rates,
        }


def _choice(speeds: Sequence[TransferSpeed]) -> list[Record]:
    choice = choose_transfers(speeds)
    if choice is None:
        return []
    setting = choice.setting
    return [
        {
            "system": "lohan",
            "chosen": True,
            "engine": str(setting.engine),
            "block_bytes": setting.block_bytes,
            "depth": setting.depth,
            "bytes_per_second": choice.bytes_per_second,
            "reason": choice.reason,
        }
    ]


def _fill(paths: Sequence[Path], options: IoOptions, watcher: Watcher) -> None:
    """Write all files once: blocks that were never written read as zeros without the drive being asked, and cost more to write."""
    watcher.note(f"writing {format_bytes(options.file_bytes)} to measure with")
    setting = TransferSetting(Engine.THREADS, STRIPE_BYTES, 4)
    with Passes(paths, setting, file_bytes=options.file_bytes) as passes:
        passes.run(Operation.WRITE, options.file_bytes)


@contextmanager
def _state_files(directories: Sequence[Path]) -> Iterator[list[Path]]:
    """Paths of one file to be in each folder, in folders of their own that are removed at the end."""
    folders: list[Path] = []
    try:
        for directory in directories:
            try:
                folders.append(Path(tempfile.mkdtemp(dir=directory.absolute(), prefix=".lohan-bench-")))
            except OSError as error:
                raise StorageError(
                    f"no folder can be made: {error.strerror}",
                    place=str(directory),
                    remedy="Name a folder this user may write to.",
                    errno=error.errno,
                ) from error
        yield [folder / "states" for folder in folders]
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def _as_storage_error(error: IoError) -> StorageError:
    return StorageError(
        f"{error.operation} failed: {error.strerror}",
        place=str(error.filename),
        remedy="Name a folder with room for --size on a drive that works.",
        errno=error.errno,
        offset=error.offset,
    )
