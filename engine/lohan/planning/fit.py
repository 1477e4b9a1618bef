"""A run's settings on a machine: what each tier has for the run, and what it takes of it. Pure arithmetic: no torch.

The items come from `lohan.planning.footprint`; what is chosen among settings is `lohan.planning.planner`'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from lohan.config import ClipUpdate, Durability, EngineSection, GradientBuffers, RamStates, TrainingSection, UnitGrain, UpdateSchedule
from lohan.errors import ConfigError
from lohan.hardware.probe import GpuFacts, HardwareFacts
from lohan.planning.footprint import (
    GPU_RESERVE_BYTES,
    Placement,
    Sizes,
    device_items,
    host_items,
    measure,
    place_states,
    slot_sizes,
    state_items,
    whole_state_bytes,
)
from lohan.planning.kept_footprint import RegionBytes, retention_items
from lohan.planning.plan import Holder, TierPlan, TierUse
from lohan.planning.retention import Kept, Placed
from lohan.planning.retention_choice import place_inputs
from lohan.planning.schedule import EXPECTED_CLIP_RATE, Begin, UpdateOrder, can_speculate, speculated_order, update_order
from lohan.planning.slots import WORKING_SLOTS
from lohan.planning.tiers import Tier
from lohan.planning.workload import Workload
from lohan.units import GIB

RAM_RESERVE_BYTES = 1 * GIB
"""Left to the operating system."""
SSD_RESERVE_BYTES = 1 * GIB
"""Left on every drive."""
CHOSEN_RAM_SHARE = 0.75
"""Of what a run may hold of host memory: beyond this no states are put there that could lie on drives, unless a number of bytes was asked
for. What is left is for another run, the page cache, and everybody else; where several devices can run, each run keeps to its part."""

NOTHING_KEPT = Placed()
ROUNDS = 8
"""Of making room for what kept activations themselves need on their way."""


@dataclass(frozen=True, slots=True)
class Rooms:
    """What each tier has left for activations."""

    gpu_bytes: int
    """Where the CPU computes, host memory: an output that stays where it is lies there."""
    ram_bytes: int
    ssd_bytes: int

    def less(self, gpu_bytes: int, ram_bytes: int, held: Rooms) -> Rooms:
        """With that much taken off what is held, and a quarter more: what makes room on one tier may need some on its way to another.

        Args:
            held: whole outputs leave gaps in a room, and taking off no more than a gap would change nothing.
        """
        return Rooms(
            max(0, min(self.gpu_bytes, held.gpu_bytes) - gpu_bytes - gpu_bytes // 4) if gpu_bytes else self.gpu_bytes,
            max(0, min(self.ram_bytes, held.ram_bytes) - ram_bytes - ram_bytes // 4) if ram_bytes else self.ram_bytes,
            self.ssd_bytes,
        )


@dataclass(frozen=True)
class Fit:
    """One way to run a workload on a machine, all but micro-batch and kept units."""

    workload: Workload
    training: TrainingSection
    engine: EngineSection
    hardware: HardwareFacts
    gpu: GpuFacts | None
    """None: the CPU computes."""
    grain: UnitGrain = UnitGrain.BLOCK
    slots: int = WORKING_SLOTS
    """On the device, that units pass through."""
    devices: int = 1
    """On which runs may be at work beside each other, sharing host memory."""
    most_spare_bytes: int = 0
    """Of host memory, for second places of states in RAM, in which updates are speculated."""
    clip_rate: float = EXPECTED_CLIP_RATE
    """The part of the steps that is clipped, so that speculated updates are done again."""

    @cached_property
    def sizes(self) -> Sizes:
        return measure(self.workload, self.training.precision, self.grain, self.slots, self.engine.kernels, on_gpu=self.gpu is not None)

    @cached_property
    def placement(self) -> Placement:
        return place_states(self.sizes, self.training.precision, self.engine)

    @property
    def order(self) -> UpdateOrder:
        if self.spare_bytes:
            return speculated_order(self.engine.schedule)
        return update_order(self.engine.schedule, self.training.clip, self.engine.gradient_buffers)

    @property
    def can_have_spare(self) -> bool:
        """Whether second places of states in RAM would let updates be speculated: whole units must lie there, and states that are
        committed every step need none."""
        engine, clip = self.engine, self.training.clip
        wanted = engine.clip_updates is not ClipUpdate.DEFER and can_speculate(engine.schedule, clip, engine.durability, has_spare=True)
        return wanted and engine.durability is not Durability.STEP and self.placement.ram_bytes >= self.placement.total_bytes

    @property
    def spare_bytes(self) -> int:
        """Of host memory, as the state store takes it."""
        if not (self.most_spare_bytes and self.can_have_spare):
            return 0
        return min(self.most_spare_bytes, whole_state_bytes(self.sizes, self.placement))

    @property
    def spare_share(self) -> float:
        """The part of the updates that may be speculated in second places."""
        return min(1.0, self.spare_bytes / self.placement.total_bytes)

    @property
    def redone_share(self) -> float:
        """The part of the updates that is done again, of those that are speculated in second places."""
        return self.clip_rate * self.spare_share

    def with_engine(self, **settings: Any) -> Fit:
        """The same with other engine settings."""
        changed = replace(self, engine=self.engine.model_copy(update=settings))
        if "kernels" not in settings:  # then these are the same
            changed.__dict__.update({name: getattr(self, name) for name in _OF_ANY_ENGINE})
        return changed

    def with_training(self, **settings: Any) -> Fit:
        """The same with other training settings."""
        return replace(self, training=self.training.model_copy(update=settings))

    @property
    def chooses_ram_states(self) -> bool:
        """Whether it is still open how much of the states lies in RAM; until that is said, none does."""
        return self.engine.ram_state_bytes is RamStates.AUTO

    @property
    def chooses_gradient_buffers(self) -> bool:
        """Whether few or all is open. A CPU that computes has no time during the forward that updates could be left to, and where updates
        wait for the backward's end all gradients do."""
        is_open = self.engine.gradient_buffers is GradientBuffers.AUTO and self.order.begin is Begin.ON_ARRIVAL
        return is_open and self.gpu is not None and self.engine.schedule is UpdateSchedule.OPTIMIZED

    def most_kept_units(self, micro_batch: int, retention: Kept) -> int:
        """How many units' weights may stay on the GPU from forward to backward: as many as fit beside the rest."""
        if self.gpu is None:
            return 0  # a slot would be host memory, which saves more (the optimizer's reads too) as states in RAM

        sizes = self.sizes
        on_gpu, _ = self.memory(micro_batch, 0, retention)
        room = on_gpu.left_bytes // sizes.itemsize + slot_sizes(sizes, 0).elements
        # From the top: a kept unit may cost less than nothing where the working slots then are smaller.
        return next((kept for kept in range(len(sizes.backward), 0, -1) if slot_sizes(sizes, kept).elements <= room), 0)

    def most_ram_states(self, micro_batch: int, retention: Kept) -> int:
        """Bytes of states that may be put in RAM beside everything else (`CHOSEN_RAM_SHARE`; a cap that was set is used to its end)."""
        _, on_host = self.with_engine(ram_state_bytes=0).memory(micro_batch, 0, retention)
        return min(self.placement.total_bytes, max(0, self._chosen_limit(on_host.capacity_bytes) - on_host.used_bytes))

    def most_spare(self, micro_batch: int, retention: Kept) -> int:
        """Bytes of second places that states in RAM may have beside everything else, by the same rule; a quarter of what is left then is
        for activations and what moves them."""
        _, on_host = self.memory(micro_batch, 0, retention)
        return max(0, self._chosen_limit(on_host.capacity_bytes) - on_host.used_bytes) * 3 // 4

    def _chosen_limit(self, capacity_bytes: int) -> int:
        """Of host memory, for what need not lie there."""
        return capacity_bytes if self.engine.host_memory_bytes is not None else int(capacity_bytes * CHOSEN_RAM_SHARE) // self.devices

    def least_ram_states(self) -> int:
        """Bytes of states that have no place on the drives, as far as RAM may be their only place."""
        on_drives = self.with_engine(ram_state_bytes=0).drives()
        missing = on_drives.used_bytes - on_drives.capacity_bytes
        return max(0, missing) if self.engine.durability is Durability.NONE else 0

    @property
    def chosen_ram_bytes(self) -> int:
        """Of host memory, as the state store takes it."""
        asked = self.engine.ram_state_bytes
        return 0 if isinstance(asked, RamStates) else min(asked, whole_state_bytes(self.sizes, self.placement))

    def with_ram_states(self, size_bytes: int) -> Fit:
        """The same with so much of the states in RAM: with all of them, if it is all they are counted as, padding included."""
        is_all = size_bytes >= self.placement.total_bytes
        return self.with_engine(ram_state_bytes=whole_state_bytes(self.sizes, self.placement) if is_all else size_bytes)

    @property
    def can_keep(self) -> bool:
        """Whether outputs and inputs of blocks can be kept elsewhere: those of blocks that are one unit."""
        return self.grain is UnitGrain.BLOCK

    @property
    def boundary_bytes(self) -> int:
        """Of the inputs of one block, for the whole batch."""
        return self.training.batch_size * self.training.sequence_length * self.sizes.hidden * self.sizes.itemsize

    def activation_rooms(self, micro_batch: int, kept_units: int) -> Rooms:
        """What is left for activations, the inputs of blocks among them."""
        on_gpu, on_host = self.memory(micro_batch, kept_units)
        drives = self.drives()
        inputs = self.workload.blocks * self.boundary_bytes if self.can_keep else 0
        device, host = on_gpu.left_bytes, on_host.left_bytes
        if self.gpu is None:
            device, host = host, 0  # what stays on the CPU's device lies in host memory already
        most_host, most_drives = self.engine.activation_ram_bytes, self.engine.activation_ssd_bytes
        return Rooms(
            gpu_bytes=max(0, device + inputs),
            ram_bytes=max(0, min(host, host if most_host is None else most_host)),
            ssd_bytes=max(0, min(drives.left_bytes, drives.left_bytes if most_drives is None else most_drives)),
        )

    def inputs_placed(self, micro_batch: int, kept_units: int) -> Placed:
        """Where the inputs of blocks wait if nothing else is kept: on the device as far as its memory goes, then in host memory, then on
        the drives. Those that no tier holds stay on the device, which then is too small."""
        key = (micro_batch, kept_units)
        if key not in self._inputs_placed:
            self._inputs_placed[key] = self._place_inputs(micro_batch, kept_units) if self.can_keep else NOTHING_KEPT
        return self._inputs_placed[key]

    @cached_property
    def _inputs_placed(self) -> dict[tuple[int, int], Placed]:
        return {}

    def _place_inputs(self, micro_batch: int, kept_units: int) -> Placed:
        rooms = self.activation_rooms(micro_batch, kept_units)
        retention = NOTHING_KEPT
        for _ in range(ROUNDS):
            retention = place_inputs(self.workload.blocks, self.boundary_bytes, (rooms.gpu_bytes, rooms.ram_bytes, rooms.ssd_bytes))
            less = self.less_room(rooms, micro_batch, kept_units, retention, held=rooms)
            if less is None:
                break
            rooms = less
        return retention

    def less_room(self, rooms: Rooms, micro_batch: int, kept_units: int, retention: Kept, *, held: Rooms) -> Rooms | None:
        """What to try where `retention`, which was made for `rooms`, needs more than there is on its way; None where it fits.

        Args:
            held: of the rooms, by the retention.
        """
        over = [max(0, -plan.left_bytes) for plan in self.memory(micro_batch, kept_units, retention)]
        if not any(over):
            return None
        gpu, ram, *_ = over if self.gpu is not None else reversed(over)
        return rooms.less(gpu, ram, held)

    def kept_items(self, retention: Kept, micro_batch: int) -> Mapping[Tier, tuple[Holder, ...]]:
        """What a retention keeps of this batch, by tier."""
        boundaries = retention.boundaries
        if not (retention.operators or boundaries.gpu_blocks or boundaries.ram_blocks or boundaries.ssd_blocks):
            return _NO_ITEMS
        if micro_batch not in self._regions:
            self._regions[micro_batch] = self._region_bytes(micro_batch)
        return retention_items(retention, *self._regions[micro_batch])

    @cached_property
    def _regions(self) -> dict[int, tuple[Mapping[str, RegionBytes], RegionBytes]]:
        """What `_region_bytes` found, by micro-batch."""
        return {}

    def _region_bytes(self, micro_batch: int) -> tuple[Mapping[str, RegionBytes], RegionBytes]:
        """Of each operator's outputs, and of inputs."""
        batch, length, itemsize = self.training.batch_size, self.training.sequence_length, self.sizes.itemsize
        whole, rest = divmod(batch, micro_batch)

        def of(size: Callable[[int], int]) -> RegionBytes:
            return RegionBytes.of([*[size(micro_batch)] * whole, *([size(rest)] if rest else [])])

        outputs = {
            operator.label: of(lambda rows, elements=operator.output_elements: round(elements.at(rows, length) * itemsize))  # type: ignore[misc]
            for operator in self.workload.operators_of(self.engine.kernels)
        }
        return outputs, of(lambda rows: rows * length * self.sizes.hidden * itemsize)

    def kept_on_drives(self, retention: Kept, micro_batch: int) -> int:
        """Bytes that every step writes to the drives and reads from them for activations."""
        return sum(item.bytes for item in self.kept_items(retention, micro_batch)[Tier.SSD])

    def memory(self, micro_batch: int, kept_units: int, retention: Kept = NOTHING_KEPT) -> tuple[TierUse, TierUse]:
        """What the GPU and the host hold; on the CPU the device's items are the host's."""
        training, engine = self.training, self.engine
        kept = self.kept_items(retention, micro_batch)
        boundaries = retention.boundaries
        on_device = (
            *device_items(
                self.sizes,
                training.batch_size,
                training.sequence_length,
                micro_batch,
                kept_units,
                moved_inputs=len(boundaries.ram_blocks) + len(boundaries.ssd_blocks),
            ),
            *kept[Tier.GPU],
        )
        on_host = (*self._host_items, *kept[Tier.RAM])
        host_bytes = max(0, self.hardware.ram.free_bytes - RAM_RESERVE_BYTES)
        if engine.host_memory_bytes is not None:
            host_bytes = min(host_bytes, engine.host_memory_bytes)
        if self.gpu is None:
            return TierUse(Tier.GPU, 0, ()), TierUse(Tier.RAM, host_bytes, (*on_device, *on_host))
        gpu_bytes = min(self.gpu.free_bytes, engine.gpu_memory_bytes or self.gpu.free_bytes)
        return TierUse(Tier.GPU, gpu_bytes, (*on_device, _RESERVE)), TierUse(Tier.RAM, host_bytes, on_host)

    @cached_property
    def _host_items(self) -> tuple[Holder, ...]:
        return host_items(self.sizes, self.placement, self.order, on_gpu=self.gpu is not None, spare_bytes=self.spare_bytes)

    def drives(self, retention: Kept = NOTHING_KEPT, micro_batch: int = 1) -> TierUse:
        """What lies in the state directories."""
        items = (*state_items(self.sizes, self.placement), *self.kept_items(retention, micro_batch)[Tier.SSD])
        return TierUse(Tier.SSD, self._ssd_capacity, items)

    @cached_property
    def _ssd_capacity(self) -> int:
        return ssd_capacity(self.hardware)

    def tiers(self, micro_batch: int, kept_units: int, retention: Kept) -> tuple[TierPlan, ...]:
        """All three, as a plan has them."""
        return tuple(use.plan() for use in (*self.memory(micro_batch, kept_units, retention), self.drives(retention, micro_batch)))


_OF_ANY_ENGINE = ("sizes", "_regions", "_ssd_capacity")
"""What of a fit no engine setting but the kernels changes."""
_NO_ITEMS: Mapping[Tier, tuple[Holder, ...]] = MappingProxyType(dict.fromkeys(Tier, ()))
_RESERVE = Holder("non-torch reserve", GPU_RESERVE_BYTES, lambda: "CUDA context, library workspaces, allocator fragmentation")


def ssd_capacity(hardware: HardwareFacts) -> int:
    """What can be spread evenly over the directories: the scarcest drive decides; directories on one drive share it."""
    directories = hardware.state_directories
    per_drive = Counter(directory.drive for directory in directories)
    room = [max(0, directory.free_bytes - SSD_RESERVE_BYTES) * len(directories) // per_drive[directory.drive] for directory in directories]
    return min(room, default=0)


def emptied(hardware: HardwareFacts) -> HardwareFacts:
    """The same machine with nothing on the drives of the state directories."""
    drives = tuple(directory.model_copy(update={"free_bytes": directory.total_bytes}) for directory in hardware.state_directories)
    return hardware.model_copy(update={"state_directories": drives})


def choose_gpu(engine: EngineSection, hardware: HardwareFacts) -> GpuFacts | None:
    """The GPU a run uses; None for the CPU.

    Raises:
        ConfigError: there is no such device.
    """
    if engine.device.startswith("cpu") or (engine.device == "auto" and not hardware.gpus):
        return None
    index = 0 if engine.device in ("auto", "cuda") else None
    if engine.device.startswith("cuda:"):
        index = int(engine.device.partition(":")[2])
    for position, gpu in enumerate(hardware.gpus):
        if position == index or gpu.uuid == engine.device:
            return gpu
    there = ", ".join(gpu.uuid for gpu in hardware.gpus) or "none"
    raise ConfigError(
        f"engine.device is {engine.device!r}; usable GPUs: {there}", place="engine.device", remedy="Use auto, cpu, or one of these."
    )
