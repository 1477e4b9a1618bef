"""What a run reserves, and whether it fits beside the others: devices, host memory, space for states."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from lohan.planning.plan import Tier
from lohan.units import GIB, format_bytes
from lohan_app.entities import Run
from lohan_app.settings import Settings

RAM_RESERVE_BYTES = 1 * GIB
"""Left to the operating system and to the service itself."""
SSD_RESERVE_BYTES = 1 * GIB
"""Left on every drive: a full drive stops the database too."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What the machine has, and what of it is free now."""

    devices: tuple[str, ...]
    """GPU UUIDs or `cpu:N` that runs may use, in the order in which they are given away."""
    ram_total_bytes: int
    ram_free_bytes: int
    ssd_free_bytes: Mapping[Path, int] = field(default_factory=dict)
    """By state directory."""


@dataclass(frozen=True, slots=True)
class Need:
    """What one run needs."""

    device: str
    """`auto`, `cpu`, `cuda`, or one device by name."""
    ram_bytes: int
    ssd_bytes: int
    """Over all state directories, evenly."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """What a run holds from its claim to its end."""

    devices: list[str]
    ram_bytes: int
    ssd_bytes: int

    def columns(self) -> dict[str, Any]:
        return {"devices": self.devices, "reserved_ram_bytes": self.ram_bytes, "reserved_ssd_bytes": self.ssd_bytes}


def look_at_machine(settings: Settings) -> Machine:
    """Measure what is there now; asks NVML and the operating system, never CUDA."""
    memory = psutil.virtual_memory()
    free = {}
    for folder in settings.state_folders:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        free[folder] = shutil.disk_usage(folder).free
    return Machine(settings.devices or default_devices(), memory.total, memory.available, free)


def default_devices() -> tuple[str, ...]:
    """Every GPU's UUID by NVML, or `cpu:0` where there is none."""
    return gpu_uuids() or ("cpu:0",)


def gpu_uuids() -> tuple[str, ...]:
    """The GPUs' UUIDs as the driver numbers them; empty without a driver or a GPU."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return tuple(str(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles)
    except pynvml.NVMLError:
        return ()
    finally:
        pynvml.nvmlShutdown()


def need_of(run: Run) -> Need:
    """What the run's plan asks for; a run without a plan asks for its device alone."""
    device = str(run.settings.get("engine", {}).get("device", "auto"))
    used = {Tier(tier["tier"]): sum(item["bytes"] for item in tier["items"]) for tier in (run.plan or {}).get("tiers", [])}
    ram = used.get(Tier.RAM, 0)
    if str((run.plan or {}).get("device", "")).startswith("cpu"):
        ram += used.get(Tier.GPU, 0)  # on the CPU the device's memory is the host's
    return Need(device, ram, used.get(Tier.SSD, 0))


def fit(need: Need, machine: Machine, active: Sequence[Run]) -> Reservation | str:
    """The reservation, if the run fits beside the `active` ones; otherwise the reason why not, in words."""
    taken = {device: run for run in active for device in run.devices}
    suitable = _suitable(machine.devices, need.device)
    if not suitable:
        return f"It asks for the device {need.device!r}, and runs may use {', '.join(machine.devices) or 'none'} (LOHAN_DEVICES)."
    free = [device for device in suitable if device not in taken]
    if not free:
        holders = ", ".join(sorted({f"{taken[device].name!r}" for device in suitable}))
        return f"Waits for {' or '.join(suitable)}, in use by {holders}."
    promised = sum(run.reserved_ram_bytes for run in active)
    room = machine.ram_total_bytes - RAM_RESERVE_BYTES - promised
    # What another run has reserved but not yet taken is free in the kernel's eyes, so both views must have room.
    if need.ram_bytes > min(room, machine.ram_free_bytes):
        have = format_bytes(max(0, min(room, machine.ram_free_bytes)))
        return f"Waits for host memory: needs {format_bytes(need.ram_bytes)}, free {have}."
    share = need.ssd_bytes / max(1, len(machine.ssd_free_bytes))
    # States are preallocated before the first step; until then their space still looks free.
    pending = sum(run.reserved_ssd_bytes for run in active if run.step == 0) / max(1, len(machine.ssd_free_bytes))
    for folder, free_bytes in machine.ssd_free_bytes.items():
        if need.ssd_bytes and share + pending + SSD_RESERVE_BYTES > free_bytes:
            have = format_bytes(max(0, int(free_bytes - pending - SSD_RESERVE_BYTES)))
            return f"Waits for space in {folder}: needs {format_bytes(int(share))}, free {have}."
    return Reservation([free[0]], need.ram_bytes, need.ssd_bytes)


def _suitable(devices: Sequence[str], asked: str) -> list[str]:
    """Those of `devices` that a run which asks for `asked` may get; `cuda:N` is the N-th GPU of the list."""
    gpus = [device for device in devices if not device.startswith("cpu")]
    by_name = {"auto": list(devices), "cuda": gpus, "cpu": [device for device in devices if device.startswith("cpu")]}
    by_name |= {f"cuda:{index}": [device] for index, device in enumerate(gpus)}
    return by_name.get(asked, [device for device in devices if device == asked])
