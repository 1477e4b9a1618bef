"""What a run reserves, and whether it fits beside the others: devices, host memory, space for states."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lohan.config import Durability, RamStates
from lohan.hardware.probe import probe
from lohan.planning.fit import RAM_RESERVE_BYTES, ssd_capacity
from lohan.planning.footprint import RAM_STATES
from lohan.planning.tiers import Tier
from lohan.units import format_bytes
from lohan_app.entities import Run
from lohan_app.hardware.service import with_reserve
from lohan_app.settings import Settings

WAITS_FOR_SPACE = "Waits for space in the state directories"
"""How the reason of a queued run begins that finds no room there."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What the machine has, and what of it is free now."""

    devices: tuple[str, ...]
    """GPU UUIDs or `cpu:N` that runs may use, in the order in which they are given away."""
    ram_total_bytes: int
    ram_free_bytes: int
    ssd_free_bytes: int
    """What can be spread evenly over the state directories."""
    data_free_bytes: int
    """Where runs write their results, events and logs."""


@dataclass(frozen=True, slots=True)
class Need:
    """What one run needs."""

    device: str
    """`auto`, `cpu`, `cuda`, or one device by name."""
    ram_bytes: int
    ssd_bytes: int
    """Over all state directories, evenly."""
    spare_ram_bytes: int = 0
    """Of the host memory, copies of states that the plan put there and that the run can do without: it then reads them from the drives."""


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
    facts = with_reserve(probe(settings.state_folders), settings)
    devices = settings.devices or tuple(gpu.uuid for gpu in facts.gpus) or ("cpu:0",)
    data_free = shutil.disk_usage(settings.data_dir).free
    return Machine(devices, facts.ram.total_bytes, facts.ram.free_bytes, ssd_capacity(facts), data_free)


def need_of(run: Run, *, states_bytes: int = 0) -> Need:
    """What the run's plan asks for, less what its states of an earlier attempt occupy; without a plan it asks for its device alone."""
    device = str(run.settings.get("engine", {}).get("device", "auto"))
    plan, asked = run.plan or {}, run.settings.get("engine", {}).get("ram_state_bytes", RamStates.AUTO)
    # Without durability, what lies in RAM has no place on the drives.
    is_spare = asked == RamStates.AUTO and plan.get("durability") in (Durability.STEP, Durability.SNAPSHOT)
    used = {Tier(tier["tier"]): sum(item["bytes"] for item in tier["items"]) for tier in plan.get("tiers", [])}
    ssd_bytes = max(0, used.get(Tier.SSD, 0) - states_bytes)
    return Need(device, used.get(Tier.RAM, 0), ssd_bytes, spare_ram_bytes=states_in_ram(plan) if is_spare else 0)


def states_in_ram(plan: Mapping[str, Any]) -> int:
    """Bytes of model states that a plan puts in host memory."""
    return sum(
        item["bytes"] for tier in plan.get("tiers", ()) if tier["tier"] == Tier.RAM for item in tier["items"] if item["name"] == RAM_STATES
    )


def fit(need: Need, machine: Machine, active: Sequence[Run]) -> Reservation | str:
    """The reservation, if the run fits beside the `active` ones, with as many of its states in RAM as then have room; otherwise the reason
    why not, in words."""
    taken = {device: run for run in active for device in run.devices}
    suitable = _suitable(machine.devices, need.device)
    if not suitable:
        return f"It asks for the device {need.device!r}, and runs may use {', '.join(machine.devices) or 'none'} (LOHAN_DEVICES)."
    free = [device for device in suitable if device not in taken]
    if not free:
        holders = ", ".join(sorted({f"{taken[device].name!r}" for device in suitable}))
        return f"Waits for {' or '.join(suitable)}, in use by {holders}."
    promised = sum(run.reserved_ram_bytes for run in active)
    # What another run has reserved but not yet taken is free in the kernel's eyes, so both views must have room.
    ram_room = max(0, min(machine.ram_total_bytes - promised, machine.ram_free_bytes) - RAM_RESERVE_BYTES)
    ram_bytes = max(need.ram_bytes - need.spare_ram_bytes, min(need.ram_bytes, ram_room))
    if ram_bytes > ram_room:
        return f"Waits for host memory: needs {format_bytes(ram_bytes)}, free {format_bytes(ram_room)}."
    # States are preallocated before the first step; until then their space still looks free.
    ssd_room = max(0, machine.ssd_free_bytes - sum(run.reserved_ssd_bytes for run in active if run.step == 0))
    if need.ssd_bytes > ssd_room:
        return f"{WAITS_FOR_SPACE}: needs {format_bytes(need.ssd_bytes)}, free {format_bytes(ssd_room)}."
    return Reservation([free[0]], ram_bytes, need.ssd_bytes)


def _suitable(devices: Sequence[str], asked: str) -> list[str]:
    """Those of `devices` that a run which asks for `asked` may get; `cuda:N` is the N-th GPU of the list."""
    gpus = [device for device in devices if not device.startswith("cpu")]
    by_name = {"auto": list(devices), "cuda": gpus, "cpu": [device for device in devices if device.startswith("cpu")]}
    by_name |= {f"cuda:{index}": [device] for index, device in enumerate(gpus)}
    return by_name.get(asked, [device for device in devices if device == asked])
