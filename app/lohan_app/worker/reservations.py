"""What a run reserves, and whether it fits beside the others: devices, host memory, space in each state directory."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lohan.config import Durability, RamStates
from lohan.events import Phase
from lohan.hardware.probe import GpuFacts, GpuWork, HardwareFacts, probe
from lohan.planning.fit import RAM_RESERVE_BYTES, SSD_RESERVE_BYTES
from lohan.planning.footprint import RAM_STATES
from lohan.planning.tiers import Tier
from lohan.units import format_bytes
from lohan_app.entities import Run, RunKind
from lohan_app.hardware.holders import describe, run_of
from lohan_app.hardware.service import with_reserve
from lohan_app.runs.kinds import NO_DEVICE, needs_of
from lohan_app.settings import Settings

WAITS_FOR_SPACE = "Waits for space in the state directories"
"""How the reason of a queued run begins that finds no room there."""
GPU_DRIFT = 1 / 16
"""Of a GPU's memory: a plan takes what was free when it was made. Where a display or the driver has taken so much more since, the plan is
made again rather than waited with; where more is gone, somebody is at work there."""
_SETTLED_PHASES = frozenset({Phase.TRAINING, Phase.EVALUATING, Phase.EXPORTING})


@dataclass(frozen=True, slots=True)
class GpuRoom:
    """A GPU as it is now."""

    total_bytes: int
    free_bytes: int
    held_by: tuple[str, ...] = ()
    """Processes that compute on it, in words; where none of our runs has it reserved, they keep it from all of them."""
    drawn_by: tuple[str, ...] = ()
    """Processes that draw on it: in nobody's way but by their memory."""


@dataclass(frozen=True, slots=True)
class DirectoryRoom:
    """A state directory as it is now."""

    path: str
    drive: str
    """Directories with the same one share its space."""
    free_bytes: int
    """Less what is kept back on every drive."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What the machine has, and what of it is free now."""

    devices: tuple[str, ...]
    """GPU UUIDs or `cpu:N` that runs may use, in the order in which they are given away."""
    ram_total_bytes: int
    ram_free_bytes: int
    directories: tuple[DirectoryRoom, ...]
    data_free_bytes: int
    """Where runs write their results, events and logs."""
    gpus: Mapping[str, GpuRoom] = field(default_factory=dict)
    """By UUID."""
    facts: HardwareFacts | None = None
    """What plans are made from."""


@dataclass(frozen=True, slots=True)
class Need:
    """What one run needs."""

    device: str
    """`auto`, `cpu`, `cuda`, one device by name, or `NO_DEVICE`."""
    ram_bytes: int
    space: Mapping[str, int] = field(default_factory=dict)
    """Bytes by state directory."""
    spare_ram_bytes: int = 0
    """Of the host memory, what the plan put there and the run can do without: copies of states that it would else read from the drives, and
    second places for updates that would else wait."""
    gpu_bytes: int = 0
    gpu_drift: float = GPU_DRIFT
    """Share of a GPU's memory that may be missing of it: 0 for what has no plan that could be made again."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """What a run holds from its claim to its end."""

    devices: list[str]
    ram_bytes: int
    space: Mapping[str, int] = field(default_factory=dict)

    def columns(self) -> dict[str, Any]:
        return {
            "devices": self.devices,
            "reserved_ram_bytes": self.ram_bytes,
            "reserved_ssd_bytes": sum(self.space.values()),
            "reserved_directories": dict(self.space),
        }


@dataclass(frozen=True, slots=True)
class Held:
    """What a run holds, or what is kept free for one."""

    name: str
    devices: Sequence[str]
    ram_bytes: int
    space: Mapping[str, int]
    is_settled: bool
    """Whether it has taken what it reserved, so that this no longer looks free."""


def _even_shares(size_bytes: int, folders: Sequence[Path]) -> dict[str, int]:
    """Bytes in each state directory of what is spread over all, as chunks are: one after the other, in turn."""
    share = -(-size_bytes // max(1, len(folders)))
    return {str(folder): share for folder in folders}


def held_by(run: Run) -> Held:
    """What an active run holds. Memory and files are taken before the first step; an attempt that has not come to one is about to."""
    is_settled = (run.step > 0 and run.phase in _SETTLED_PHASES) or run.phase == Phase.ANSWERING
    return Held(run.name, run.devices, run.reserved_ram_bytes, run.reserved_space, is_settled)


def look_at_machine(settings: Settings) -> Machine:
    """Measure what is there now; asks NVML and the operating system, never CUDA."""
    facts = with_reserve(probe(settings.state_folders), settings)
    return Machine(
        devices=settings.devices or tuple(gpu.uuid for gpu in facts.gpus) or ("cpu:0",),
        ram_total_bytes=facts.ram.total_bytes,
        ram_free_bytes=facts.ram.free_bytes,
        directories=tuple(
            DirectoryRoom(directory.path, directory.drive, max(0, directory.free_bytes - SSD_RESERVE_BYTES))
            for directory in facts.state_directories
        ),
        data_free_bytes=shutil.disk_usage(settings.data_dir).free,
        gpus={gpu.uuid: gpu_room(settings, gpu) for gpu in facts.gpus},
        facts=facts,
    )


def gpu_room(settings: Settings, gpu: GpuFacts) -> GpuRoom:
    computing: list[str] = []
    drawing: list[str] = []
    for holder in gpu.holders:
        run_id = run_of(settings, holder.pid) if holder.work is GpuWork.COMPUTE else None
        words = describe(holder) if run_id is None else f"the trainer of {run_id}, {describe(holder)}, which is just ending"
        (computing if holder.work is GpuWork.COMPUTE else drawing).append(words)
    return GpuRoom(gpu.total_bytes, gpu.free_bytes, tuple(computing), tuple(drawing))


def need_of(run: Run, folders: Sequence[Path], *, states: Mapping[str, int], plan: Mapping[str, Any] | None = None) -> Need:
    """What the run's plan asks for (the one it last began with, else the one it was queued with); without a plan, its device alone.

    A run that is no training says itself what it needs. Chunks go over the directories in turn, so each has to hold an equal share.

    Args:
        folders: the state directories.
        states: what its states of an earlier attempt occupy in each directory: it needs so much less there.
        plan: instead of its own.
    """
    if run.kind is not RunKind.TRAIN:
        needs = needs_of(run)
        space = _even_shares(needs.ssd_bytes, folders)
        return Need(needs.device, needs.ram_bytes, space, gpu_bytes=needs.gpu_bytes, gpu_drift=0.0)
    engine = run.settings.get("engine", {})
    plan, asked = plan or run.started_plan or run.plan or {}, engine.get("ram_state_bytes", RamStates.AUTO)
    # Without durability, what lies in RAM has no place on the drives.
    is_spare = asked == RamStates.AUTO and plan.get("durability") in (Durability.STEP, Durability.SNAPSHOT)
    used = {Tier(tier["tier"]): sum(item["bytes"] for item in tier["items"]) for tier in plan.get("tiers", [])}
    shares = _even_shares(used.get(Tier.SSD, 0), folders)
    return Need(
        device=str(engine.get("device", "auto")),
        ram_bytes=used.get(Tier.RAM, 0),
        space={path: max(0, share - states.get(path, 0)) for path, share in shares.items()},
        spare_ram_bytes=(states_in_ram(plan) if is_spare else 0) + int(plan.get("spare_state_bytes", 0)),
        gpu_bytes=used.get(Tier.GPU, 0),
    )


def states_in_ram(plan: Mapping[str, Any]) -> int:
    """Bytes of model states that a plan puts in host memory."""
    return sum(
        item["bytes"] for tier in plan.get("tiers", ()) if tier["tier"] == Tier.RAM for item in tier["items"] if item["name"] == RAM_STATES
    )


def fit(need: Need, machine: Machine, active: Sequence[Held]) -> Reservation | str:
    """The reservation, if the run fits beside the `active` ones, with as many of its states in RAM as then have room; otherwise the reason
    why not, in words."""
    free = free_devices(need, machine, active)
    if isinstance(free, str):
        return free
    room = ram_room(machine, active)
    ram_bytes = max(need.ram_bytes - need.spare_ram_bytes, min(need.ram_bytes, room))
    if ram_bytes > room:
        return f"Waits for host memory: needs {format_bytes(ram_bytes)}, free {format_bytes(room)}."
    short = space_shortage(need.space, machine, active)
    if short is not None:
        return f"{WAITS_FOR_SPACE}: {short}."
    return Reservation(free[:1], ram_bytes, need.space)


def free_devices(need: Need, machine: Machine, active: Sequence[Held]) -> list[str] | str:
    """Devices that the run could get now, best first, none for one that asks for none; or who has them."""
    if need.device == NO_DEVICE:
        return []
    suitable = suitable_devices(machine.devices, need.device)
    if not suitable:
        return f"It asks for the device {need.device!r}, and runs may use {', '.join(machine.devices) or 'none'} (LOHAN_DEVICES)."
    taken = {device: run.name for run in active for device in run.devices}
    strangers = {device: machine.gpus[device].held_by for device in suitable if device not in taken and device in machine.gpus}
    short = {
        device: gpu
        for device in suitable
        if device not in taken and (gpu := machine.gpus.get(device)) and gpu.free_bytes < need.gpu_bytes - need.gpu_drift * gpu.total_bytes
    }
    free = [device for device in suitable if not (device in taken or strangers.get(device) or device in short)]
    if free:
        return free
    users = sorted({f"{taken[device]!r}" for device in suitable if device in taken})
    users += [words for device in suitable for words in strangers.get(device, ())]
    reason = f"Waits for {' or '.join(suitable)}" + (f", in use by {', '.join(users)}" if users else "")
    for device, gpu in short.items():
        if not gpu.held_by:
            beside = f" beside {', '.join(gpu.drawn_by)}" if gpu.drawn_by else ""
            reason += f"; needs {format_bytes(need.gpu_bytes)} of {device}, free {format_bytes(gpu.free_bytes)}{beside}"
    return f"{reason}."


def ram_room(machine: Machine, active: Iterable[Held]) -> int:
    """Host memory that can be promised. What a run has reserved but not taken yet is free in the kernel's eyes, and the kernel's view knows
    of other programs: both must have room."""
    active = list(active)
    promised = sum(run.ram_bytes for run in active)
    untaken = sum(run.ram_bytes for run in active if not run.is_settled)
    return max(0, min(machine.ram_total_bytes - promised, machine.ram_free_bytes - untaken) - RAM_RESERVE_BYTES)


def space_rooms(machine: Machine, active: Iterable[Held]) -> dict[str, int]:
    """Space by drive that can be promised: states that are still to be made look free."""
    drive_of = {directory.path: directory.drive for directory in machine.directories}
    rooms = {directory.drive: directory.free_bytes for directory in machine.directories}
    for run in active:
        for path, size in run.space.items():
            if not run.is_settled and path in drive_of:
                rooms[drive_of[path]] -= size
    return {drive: max(0, room) for drive, room in rooms.items()}


def space_shortage(space: Mapping[str, int], machine: Machine, active: Iterable[Held]) -> str | None:
    """Which directory has too little, with need and have; None where all have room."""
    rooms, needs = space_rooms(machine, active), Counter[str]()
    for directory in machine.directories:
        needs[directory.drive] += space.get(directory.path, 0)
    for drive, size in needs.items():
        if size > rooms[drive]:
            paths = " and ".join(directory.path for directory in machine.directories if directory.drive == drive)
            return f"needs {format_bytes(size)} in {paths}, free {format_bytes(rooms[drive])}"
    return None


def without(active: Iterable[Held], machine: Machine) -> Machine:
    """The machine as it will be when these runs have ended and their files are gone."""
    ram = machine.ram_free_bytes
    given_back = Counter[str]()
    for run in active:
        if run.is_settled:
            ram += run.ram_bytes
            given_back.update(run.space)
    return replace(
        machine,
        ram_free_bytes=min(machine.ram_total_bytes, ram),
        directories=tuple(
            replace(directory, free_bytes=directory.free_bytes + given_back[directory.path]) for directory in machine.directories
        ),
    )


def suitable_devices(devices: Sequence[str], asked: str) -> list[str]:
    """Those of `devices` that a run which asks for `asked` may get; `cuda:N` is the N-th GPU of the list."""
    gpus = [device for device in devices if not device.startswith("cpu")]
    by_name = {"auto": list(devices), "cuda": gpus, "cpu": [device for device in devices if device.startswith("cpu")]}
    by_name |= {f"cuda:{index}": [device] for index, device in enumerate(gpus)}
    return by_name.get(asked, [device for device in devices if device == asked])
