"""Shows what striping over folders brings where the folders' drives are the limit: two that are held to a rate, beside one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from lohan._native import FaultPlan
from lohan.bench.records import Record, Watcher, interleaved, median
from lohan.hardware.transfers import Engine, Operation, TransferSetting
from lohan.profiling.passes import Passes
from lohan.units import MIB

OPERATIONS: Final = (Operation.READ, Operation.WRITE)
# Far below what any drive does that a run would use, so that the limit decides; 64 MiB then take half a second in one folder.
_LIMIT_BYTES_PER_SECOND: Final = 128 * 10**6
# Of a drive so slow that two of that limit would be too much for it, a quarter.
_FRACTION_OF_SLOW_DRIVE: Final = 4
TOTAL_BYTES: Final = 64 * MIB


def limit_for(measured: Sequence[float]) -> int:
    """The rate each folder is held to, given what this drive was measured to reach, in bytes per second."""
    return max(1, int(min([_LIMIT_BYTES_PER_SECOND, *(rate / _FRACTION_OF_SLOW_DRIVE for rate in measured)])))


def run(
    folder: Path, *, engine: Engine, limit_bytes_per_second: int, total_bytes: int = TOTAL_BYTES, rounds: int, watcher: Watcher
) -> list[Record]:
    """Measure a file in one limited folder, and one striped over two, in turns.

    Args:
        folder: two folders are made in it.
        total_bytes: of each measurement; a multiple of 8 MiB.

    Raises:
        IoError: the files cannot be made, or a transfer failed.
    """
    folders = [folder / "limited1", folder / "limited2"]
    faults = FaultPlan()
    for limited in folders:
        limited.mkdir()
        faults.limit_bandwidth(f"{limited}/", limit_bytes_per_second)
    setting = TransferSetting(engine, MIB, 4)
    with ExitStack() as stack:
        one = stack.enter_context(Passes([folders[0] / "one"], setting, file_bytes=total_bytes, faults=faults))
        two = stack.enter_context(Passes([limited / "two" for limited in folders], setting, file_bytes=total_bytes // 2, faults=faults))
        calls = {
            f"{count} limited folders, {operation}": lambda passes=passes, operation=operation: passes.run(operation, total_bytes)
            for count, passes in ((1, one), (2, two))
            for operation in OPERATIONS
        }
        seconds = interleaved(calls, rounds=rounds, watcher=watcher)
    records = []
    for operation in OPERATIONS:
        rates = {count: total_bytes / median(seconds[f"{count} limited folders, {operation}"]) for count in (1, 2)}
        records += [
            {
                "system": "lohan",
                "engine": str(engine),
                "operation": str(operation),
                "block_bytes": setting.block_bytes,
                "depth": setting.depth,
                "directories": count,
                "directory_limit_bytes_per_second": limit_bytes_per_second,
                "bytes_per_second": rates[count],
                "ratio_to_one_directory": rates[count] / rates[1],
                "ratio_to_fio": None,
            }
            for count in (1, 2)
        ]
    return records
