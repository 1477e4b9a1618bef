"""How fast the state directories read and write at once, to hold a step's traffic against: as `lohan bench io` measures `mixed`."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Final

from lohan.hardware.transfers import Operation
from lohan.profiling.folders import temporary_folders
from lohan.profiling.passes import Passes, transfer_setting
from lohan.units import GIB, MIB

_FILE_BYTES: Final = GIB
_LEAST_SECONDS: Final = 2.0
_SHARE_OF_FREE_SPACE: Final = 4


def mixed_bytes_per_second(directories: tuple[Path, ...], *, file_bytes: int = _FILE_BYTES, least_seconds: float = _LEAST_SECONDS) -> float:
    """Bytes a second, durable, of 70 % reads among 30 % writes, by the engine's own transfers and setting; 0 where there is no room.

    Args:
        file_bytes: in each directory, a multiple of 4 MiB; a quarter of what is free there, where that is less.
        least_seconds: the measurement takes as many passes as this lasts.

    Raises:
        IoError: a transfer failed.
    """
    setting = transfer_setting(directories)
    free = min(shutil.disk_usage(directory).free for directory in directories) // _SHARE_OF_FREE_SPACE
    grain = max(4 * MIB, setting.in_flight_bytes)
    file_bytes = min(file_bytes, free) // grain * grain
    if not file_bytes:
        return 0.0
    total = file_bytes * len(directories)
    with (
        temporary_folders(directories) as folders,
        Passes([folder / "states" for folder in folders], setting, file_bytes=file_bytes) as passes,
    ):
        passes.run(Operation.WRITE, total)  # what was never written reads as zeros without the drive being asked
        times = max(1, math.ceil(least_seconds / passes.run(Operation.MIXED, total)))
        return total * times / passes.run(Operation.MIXED, total, times=times)
