"""How fast the state directories are read and written with the engine's own transfers, and how long a commit there takes."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from lohan._native import IoError
from lohan.config import Durability, UnsafeFilesystems
from lohan.errors import CapacityError
from lohan.hardware.probe import lies_in_memory
from lohan.hardware.transfers import Operation, TransferSetting
from lohan.memory.store import Store
from lohan.planning.fit import SSD_RESERVE_BYTES
from lohan.planning.state_form import StateForm
from lohan.planning.workload import UnitKind
from lohan.profiling.folders import temporary_folders
from lohan.profiling.passes import HALF_READS, Passes, as_storage_error, transfer_setting
from lohan.profiling.timing import Effort, rate, repeated, summary, timed
from lohan.states.layout import UNIT_ALIGNMENT, ParameterSpecification, layout_unit
from lohan.states.state_store import StateStore
from lohan.states.streams import trainable_streams
from lohan.units import MIB, format_bytes

if TYPE_CHECKING:
    from lohan.hardware.profile import Measured

_PREFIX: Final = ".lohan-profile-"
# Kinds of file system whose files are memory.
_PART_OF_FREE_MEMORY: Final = 8
# Files are striped in pieces of this size.
_STRIPE_BYTES: Final = 4 * MIB
# Of a chunk for commits: 3 MiB of states, which a drive has soon written.
_COMMITTED_ELEMENTS: Final = 128 * UNIT_ALIGNMENT


@dataclass(frozen=True)
class DriveSpeeds:
    """Bytes a second over all state directories together; what is written counts when it is durable."""

    read: Measured
    write: Measured
    mixed: Measured
    """Read and written together, half and half."""
    notes: tuple[str, ...]
    """What the figures stand for, where that is not what the drives do, in sentences."""


def measure_drives(directories: Sequence[Path], effort: Effort, *, free_host_bytes: int) -> DriveSpeeds:
    """Write files, striped over `directories`, and read and write them again; they are removed whatever happens.

    A directory that does not exist yet is measured in the nearest folder above it that does.

    Args:
        free_host_bytes: an eighth of it is used at most by the transfers' buffers, and as much by files that are memory.

    Raises:
        CapacityError: drives or memory have too little free: the planner's reserve stays untouched.
        StorageError: a folder cannot be written to, or a transfer failed.
    """
    existing = [nearest_folder(directory) for directory in directories]
    setting = transfer_setting(directories)
    file_bytes = _file_bytes(existing, setting, effort, free_host_bytes)
    total = file_bytes * len(existing)
    with _errors_of_transfers(), temporary_folders(existing, prefix=_PREFIX) as folders:
        paths = [folder / "states" for folder in folders]
        with Passes(paths, setting, file_bytes=file_bytes, mix=HALF_READS) as passes:
            # What was never written reads as zeros without the drive being asked.
            fill_seconds = passes.run(Operation.WRITE, total)
            grain = _grain(setting) * len(existing)
            # A slow drive is asked for less at a time.
            moved = min(total, max(grain, int(total * effort.seconds / fill_seconds) // grain * grain))
            speeds = {
                operation: rate(moved, partial(passes.run, operation, moved), effort)
                for operation in (Operation.WRITE, Operation.READ, Operation.MIXED)
            }
            direct = passes.direct
    notes = _notes(directories, existing, direct=direct)
    return DriveSpeeds(speeds[Operation.READ], speeds[Operation.WRITE], speeds[Operation.MIXED], notes)


def measure_commit(directories: Sequence[Path], effort: Effort) -> Measured:
    """Seconds that the state store needs to commit a step whose writes have ended: files synced, record written, renamed, synced.

    The states are small ones of their own, and are removed whatever happens.

    Raises:
        CapacityError, StorageError: as for `measure_drives`.
    """
    existing = [nearest_folder(directory) for directory in directories]
    _check_space(existing, 4 * StateForm.SPLIT.state_bytes(_COMMITTED_ELEMENTS))
    parameter = ParameterSpecification("weight", (_COMMITTED_ELEMENTS * len(existing),), trainable=True)
    layout = layout_unit(0, "profiler", UnitKind.BLOCK, [parameter], chunk_parameters=_COMMITTED_ELEMENTS)
    values = {stream: torch.ones(stream.length(_COMMITTED_ELEMENTS), dtype=stream.dtype) for stream in trainable_streams(StateForm.SPLIT)}
    with temporary_folders(existing, prefix=_PREFIX) as folders, Store.measured(directories) as store:
        states = StateStore(
            [layout], folders, StateForm.SPLIT, store, durability=Durability.STEP, unsafe_filesystems=UnsafeFilesystems.ALLOW
        )
        try:
            states.load_unit(layout, lambda _, start, stop: torch.ones(stop - start))
            states.commit(0, {})
            steps = iter(range(1, 1 << 30))

            def step() -> float:
                number = next(steps)
                states.begin_step(number)
                for transfer in [states.write(layout, chunk, stream, part) for chunk in layout.chunks for stream, part in values.items()]:
                    transfer.wait()
                return timed(lambda: states.commit(number, {}))()

            return summary(repeated(step, effort))
        finally:
            states.close()


def nearest_folder(directory: Path) -> Path:
    """`directory`, or the nearest folder above it that exists."""
    folder = directory.absolute()
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return folder


def _file_bytes(folders: Sequence[Path], setting: TransferSetting, effort: Effort, free_host_bytes: int) -> int:
    """Of the file in each folder: whole stripes, and whole batches of blocks in flight."""
    grain = _grain(setting)
    # A quarter more than is in flight, in every folder.
    buffer_bytes = setting.in_flight_bytes * len(folders) * 5 // 4
    share = free_host_bytes // _PART_OF_FREE_MEMORY
    if buffer_bytes > share:
        raise CapacityError(
            f"the transfers' buffers take {format_bytes(buffer_bytes)}, more than an eighth of the free memory",
            need_bytes=buffer_bytes * _PART_OF_FREE_MEMORY,
            have_bytes=free_host_bytes,
            place="host memory",
            remedy="Free memory, or measure fewer blocks in flight with `lohan bench io --depth`.",
        )
    room = _check_space(folders, grain)
    if any(map(lies_in_memory, folders)):
        room = min(room, share // len(folders))
    file_bytes = min(max(effort.file_bytes, grain), room) // grain * grain
    if not file_bytes:
        raise CapacityError(
            f"a file to measure with takes {format_bytes(grain)} in every directory, and {format_bytes(room)} of memory can be had for it",
            need_bytes=grain,
            have_bytes=room,
            place=str(folders[0]),
            remedy="Free memory on this machine, and measure again.",
        )
    return file_bytes


def _grain(setting: TransferSetting) -> int:
    return max(_STRIPE_BYTES, setting.in_flight_bytes)


def _check_space(folders: Sequence[Path], need_bytes: int) -> int:
    """What every folder has for a file, the reserve left alone; folders on one file system share it.

    Raises:
        CapacityError: one has less than `need_bytes`.
    """
    devices = [folder.stat().st_dev for folder in folders]
    sharing = Counter(devices)
    room = 1 << 62
    for folder, device in zip(folders, devices, strict=True):
        free = shutil.disk_usage(folder).free
        room = min(room, max(0, free - SSD_RESERVE_BYTES) // sharing[device])
        if room < need_bytes:
            raise CapacityError(
                f"a file to measure with takes {format_bytes(need_bytes)} and {format_bytes(SSD_RESERVE_BYTES)} stay free, "
                f"{format_bytes(free)} are free",
                need_bytes=need_bytes * sharing[device] + SSD_RESERVE_BYTES,
                have_bytes=free,
                place=str(folder),
                remedy="Free space there, and measure again.",
            )
    return room


@contextmanager
def _errors_of_transfers() -> Iterator[None]:
    try:
        yield
    except IoError as error:
        raise as_storage_error(error) from error


def _notes(directories: Sequence[Path], existing: Sequence[Path], *, direct: bool) -> tuple[str, ...]:
    in_memory = [directory for directory, folder in zip(directories, existing, strict=True) if lies_in_memory(folder)]
    notes = [f"{directory} lies in memory (tmpfs): its figures are the memory's, not a drive's." for directory in in_memory]
    if not direct and not in_memory:
        notes.append("Files there go through the page cache (no O_DIRECT): what is read may come from memory.")
    return tuple(notes)
