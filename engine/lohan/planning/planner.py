"""Divides a run's bytes over GPU memory, RAM and SSD, before anything is loaded. Pure arithmetic: no torch, milliseconds.

In this version every block's inner activations are recomputed, and states lie on SSD but for what `engine.ram_state_bytes` takes. What is
chosen is whether blocks move whole or module by module; the micro-batch, the largest that fits; how many units keep their weights on the
GPU from forward to backward, and whether gradients of all units find room in host memory: as much as what is left holds. The figures come
from `lohan.planning.footprint`.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable

from lohan.config import (
    Clip,
    ClipUpdate,
    Durability,
    EngineSection,
    GradientBuffers,
    Precision,
    TrainingSection,
    UnitGrain,
    UnsafeFilesystems,
    UpdateSchedule,
)
from lohan.errors import CapacityError, ConfigError
from lohan.hardware.probe import GpuFacts, HardwareFacts
from lohan.planning.filesystems import REMEDY as FILESYSTEM_REMEDY
from lohan.planning.filesystems import refusal
from lohan.planning.footprint import (
    GPU_RESERVE_BYTES,
    Placement,
    Sizes,
    device_items,
    host_items,
    measure,
    place_states,
    slot_sizes,
    ssd_bytes_read,
    ssd_bytes_written,
    state_items,
)
from lohan.planning.plan import Plan, PlanItem, TierPlan
from lohan.planning.schedule import can_speculate, update_order
from lohan.planning.slots import WORKING_SLOTS
from lohan.planning.tiers import Tier
from lohan.planning.workload import Workload
from lohan.units import GIB, format_bytes

_SECONDS_PER_STEP = 10  # an example: there is no forecast of the time yet
RAM_RESERVE_BYTES = 1 * GIB
"""Left to the operating system."""
SSD_RESERVE_BYTES = 1 * GIB
"""Left on every drive."""


SLOW_BF16 = "This CPU has no bf16 instructions, so that bf16 takes 5 to 40 times as long as fp32."


def default_precision(engine: EngineSection, hardware: HardwareFacts) -> Precision:
    """What a run should use that has no reason for another: bf16, and fp32 on a CPU that has no instructions for bf16.

    Raises:
        ConfigError: there is no such device.
    """
    on_slow_cpu = _choose_gpu(engine, hardware) is None and not hardware.cpu.multiplies_bf16
    return Precision.FP32 if on_slow_cpu else Precision.BF16


def make_plan(workload: Workload, *, model_name: str, training: TrainingSection, engine: EngineSection, hardware: HardwareFacts) -> Plan:
    """The memory split of a run on `hardware`.

    The state directories are `hardware.state_directories`; free memory and space are taken as probed.

    Raises:
        ConfigError: the sequence is longer than the model's context, there is no such device, or a state directory is on a file system that
            is no place for states.
        CapacityError: a tier has too little; need, have, and the nearest setting that fits.
    """
    if training.sequence_length > workload.context_length:
        raise ConfigError(
            f"training.sequence_length is {training.sequence_length}, but the model's context is {workload.context_length} tokens",
            place="training.sequence_length",
            remedy=f"Use at most {workload.context_length}.",
        )
    _check_filesystems(engine, hardware)
    settings_digest = hashlib.sha256((training.model_dump_json() + engine.model_dump_json()).encode()).hexdigest()
    gpu = _choose_gpu(engine, hardware)
    grain = _choose_grain(workload, training, engine, hardware, gpu)
    sizes = measure(workload, training.precision, grain)
    micro_batch = _choose_micro_batch(sizes, training, engine, hardware, gpu)
    kept_units = _choose_kept_units(sizes, training, engine, hardware, gpu, micro_batch)
    engine = _with_gradient_buffers(sizes, training, engine, hardware, gpu, micro_batch)
    gpu_plan, ram_plan = _memory(sizes, training, engine, hardware, gpu, micro_batch, kept_units)
    placement = place_states(sizes, training.precision, engine)
    ssd_plan = TierPlan(tier=Tier.SSD, capacity_bytes=ssd_capacity(hardware), items=state_items(sizes, placement))
    if ssd_plan.used_bytes > ssd_plan.capacity_bytes:
        raise _capacity_error("SSD space", ssd_plan, _space_remedy(placement))
    notes = [
        _micro_batch_note(engine, training, micro_batch),
        *_grain_notes(engine, grain),
        *_kept_notes(sizes, kept_units),
        *_state_notes(placement),
        *_resume_notes(placement, training, engine),
        *_update_notes(training, engine),
    ]
    if training.precision is Precision.BF16 and default_precision(engine, hardware) is Precision.FP32:
        notes.append(f"{SLOW_BF16} Use fp32.")
    return Plan(
        model=model_name,
        parameters=workload.parameters,
        workload_digest=workload.digest,
        settings_digest=settings_digest,
        hardware_digest=hardware.digest,
        device=gpu.uuid if gpu is not None else (engine.device if engine.device.startswith("cpu") else "cpu"),
        precision=str(training.precision),
        states=str(placement.form),
        batch_size=training.batch_size,
        micro_batch_size=micro_batch,
        sequence_length=training.sequence_length,
        grain=str(grain),
        slots=WORKING_SLOTS,
        kept_units=kept_units,
        gradient_buffers=str(update_order(engine.schedule, training.clip, engine.gradient_buffers).gradients),
        schedule=str(engine.schedule),
        tiers=(gpu_plan, ram_plan, ssd_plan),
        durability=str(engine.durability),
        ssd_bytes_per_step=ssd_bytes_read(sizes, placement, kept_units) + ssd_bytes_written(placement),
        ssd_bytes_written_per_step=ssd_bytes_written(placement),
        notes=tuple(notes),
    )


def _choose_gpu(engine: EngineSection, hardware: HardwareFacts) -> GpuFacts | None:
    """The GPU a run uses; None for the CPU."""
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


def _choose_grain(
    workload: Workload, training: TrainingSection, engine: EngineSection, hardware: HardwareFacts, gpu: GpuFacts | None
) -> UnitGrain:
    """The grain that was asked for; else blocks where one row at a time fits then, or does not with modules either, else modules.

    Modules need smaller slots and buffers, but more tensors are kept between regions: a large batch may need less memory with blocks.
    """
    if engine.grain is UnitGrain.MODULE and workload.modules is None:
        raise ConfigError(
            "the blocks of this model cannot be cut into modules, or it was registered before they could",
            place="engine.grain",
            remedy='Use "block", or register the model again.',
        )
    if engine.grain is not UnitGrain.AUTO:
        return engine.grain

    def shortage_bytes(grain: UnitGrain) -> int:
        plans = _memory(measure(workload, training.precision, grain), training, engine, hardware, gpu, micro_batch=1, kept_units=0)
        return sum(max(0, plan.used_bytes - plan.capacity_bytes) for plan in plans)

    block = shortage_bytes(UnitGrain.BLOCK)
    return UnitGrain.MODULE if block and workload.modules and shortage_bytes(UnitGrain.MODULE) < block else UnitGrain.BLOCK


def _choose_micro_batch(
    sizes: Sizes, training: TrainingSection, engine: EngineSection, hardware: HardwareFacts, gpu: GpuFacts | None
) -> int:
    """The micro-batch that was asked for, or the largest that fits."""

    def shortage(micro_batch: int, batch_size: int, sequence_length: int) -> TierPlan | None:
        changed = training.model_copy(update={"batch_size": batch_size, "sequence_length": sequence_length})
        plans = _memory(sizes, changed, engine, hardware, gpu, micro_batch, kept_units=0)
        return next((plan for plan in plans if plan.used_bytes > plan.capacity_bytes), None)

    def largest_micro_batch(batch_size: int, sequence_length: int) -> int:
        return _largest(batch_size, lambda micro_batch: shortage(micro_batch, batch_size, sequence_length) is None)

    batch, length = training.batch_size, training.sequence_length
    fitting = largest_micro_batch(batch, length)
    asked = engine.micro_batch_size or fitting
    if 1 <= asked <= fitting:
        return asked
    short = shortage(max(1, asked), batch, length)
    assert short is not None, "what does not fit has a shortage"
    name = "GPU memory" if short.tier is Tier.GPU else "host memory"
    if fitting:
        raise _capacity_error(name, short, f"engine.micro_batch_size = {fitting} fits; leaving it out chooses by itself.")
    fitting_length = _largest(length, lambda shorter: shortage(1, batch, shorter) is None)
    fitting_batch = _largest(batch, lambda smaller: shortage(1, smaller, length) is None)
    nearest = []
    if fitting_batch:
        nearest.append(f"training.batch_size = {fitting_batch}")
    if fitting_length >= 8:
        nearest.append(f"training.sequence_length = {fitting_length}")
    if nearest:
        raise _capacity_error(name, short, f"{' or '.join(nearest)} fits, with one row at a time through a block.")
    least = shortage(1, 1, 8)
    least_bytes = least.used_bytes if least is not None else short.used_bytes
    where = "a GPU with" if short.tier is Tier.GPU else "free host memory of"
    raise _capacity_error(name, short, f"Even one row of 8 tokens needs {where} {format_bytes(least_bytes)}; use a smaller model.")


def _largest(upper: int, fits: Callable[[int], bool]) -> int:
    """The largest number of 1..upper that fits, where smaller ones need less; 0 if none does."""
    low, high = 0, upper
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _choose_kept_units(
    sizes: Sizes, training: TrainingSection, engine: EngineSection, hardware: HardwareFacts, gpu: GpuFacts | None, micro_batch: int
) -> int:
    """How many units' weights stay on the GPU from forward to backward: as many as fit beside the rest."""
    if gpu is None:
        return 0  # a slot would be host memory, which saves more (the optimizer's reads too) as `engine.ram_state_bytes`

    def fits(kept_units: int) -> bool:
        on_gpu, _ = _memory(sizes, training, engine, hardware, gpu, micro_batch, kept_units)
        return on_gpu.used_bytes <= on_gpu.capacity_bytes

    # From the top: a kept unit may cost less than nothing where the working slots then are smaller.
    return next((kept_units for kept_units in range(len(sizes.backward), 0, -1) if fits(kept_units)), 0)


def _with_gradient_buffers(
    sizes: Sizes, training: TrainingSection, engine: EngineSection, hardware: HardwareFacts, gpu: GpuFacts | None, micro_batch: int
) -> EngineSection:
    """The settings with as much host memory for gradients as was asked for, else for all units' where the rest leaves room.

    Measured with 3.43 B parameters, 8 rows and states in RAM: with three buffers a GPU waited a fifth of a step for one to become free,
    while the CPU had nothing to do during the forward. A CPU that computes has no such time.
    """
    if engine.gradient_buffers is not GradientBuffers.AUTO:
        return engine
    every = engine.model_copy(update={"gradient_buffers": GradientBuffers.ALL})
    _, on_host = _memory(sizes, training, every, hardware, gpu, micro_batch, kept_units=0)
    pays = gpu is not None and engine.schedule is UpdateSchedule.OPTIMIZED and on_host.used_bytes <= on_host.capacity_bytes
    return every if pays else engine.model_copy(update={"gradient_buffers": GradientBuffers.FEW})


def _memory(
    sizes: Sizes,
    training: TrainingSection,
    engine: EngineSection,
    hardware: HardwareFacts,
    gpu: GpuFacts | None,
    micro_batch: int,
    kept_units: int,
) -> tuple[TierPlan, TierPlan]:
    """The GPU's and the host's plan; on the CPU the device's items are the host's."""
    on_device = device_items(sizes, training.batch_size, training.sequence_length, micro_batch, kept_units)
    placement = place_states(sizes, training.precision, engine)
    order = update_order(engine.schedule, training.clip, engine.gradient_buffers)
    on_host = host_items(sizes, placement, order, on_gpu=gpu is not None)
    host_bytes = max(0, hardware.ram.free_bytes - RAM_RESERVE_BYTES)
    if engine.host_memory_bytes is not None:
        host_bytes = min(host_bytes, engine.host_memory_bytes)
    if gpu is None:
        return (
            TierPlan(tier=Tier.GPU, capacity_bytes=0, items=()),
            TierPlan(tier=Tier.RAM, capacity_bytes=host_bytes, items=(*on_device, *on_host)),
        )
    reserve = PlanItem(
        name="non-torch reserve", bytes=GPU_RESERVE_BYTES, formula="CUDA context, library workspaces, allocator fragmentation"
    )
    gpu_bytes = min(gpu.free_bytes, engine.gpu_memory_bytes or gpu.free_bytes)
    return (
        TierPlan(tier=Tier.GPU, capacity_bytes=gpu_bytes, items=(*on_device, reserve)),
        TierPlan(tier=Tier.RAM, capacity_bytes=host_bytes, items=on_host),
    )


def ssd_capacity(hardware: HardwareFacts) -> int:
    """What can be spread evenly over the directories: the scarcest drive decides; directories on one drive share it."""
    directories = hardware.state_directories
    per_drive = Counter(directory.drive for directory in directories)
    room = [max(0, directory.free_bytes - SSD_RESERVE_BYTES) * len(directories) // per_drive[directory.drive] for directory in directories]
    return min(room, default=0)


def _micro_batch_note(engine: EngineSection, training: TrainingSection, micro_batch: int) -> str:
    if engine.micro_batch_size is not None:
        return f"A micro-batch of {micro_batch} was asked for."
    if micro_batch == training.batch_size:
        return "The whole batch runs through a block at once."
    return f"A micro-batch of {micro_batch} is the largest that fits."


def _grain_notes(engine: EngineSection, grain: UnitGrain) -> list[str]:
    if grain is UnitGrain.BLOCK:
        return []
    why = "as was asked for" if engine.grain is UnitGrain.MODULE else "since whole blocks do not fit"
    return [f"Attention and MLP of each block move one by one, {why}."]


def _kept_notes(sizes: Sizes, kept_units: int) -> list[str]:
    if not kept_units:
        return []
    size = format_bytes(slot_sizes(sizes, kept_units).kept_elements * sizes.itemsize)
    return [f"The weights of {kept_units} of {len(sizes.units)} units ({size}) stay on the GPU from forward to backward."]


def _check_filesystems(engine: EngineSection, hardware: HardwareFacts) -> None:
    for directory in hardware.state_directories:
        reason = refusal(directory.filesystem, engine.durability)
        if reason is not None and engine.unsafe_filesystems is UnsafeFilesystems.REFUSE:
            raise ConfigError(f"the state directory {directory.path} {reason}", place="engine.state_directories", remedy=FILESYSTEM_REMEDY)


def _space_remedy(placement: Placement) -> str:
    remedy = "Free space, or add a drive to the state directories."
    return f"{remedy} engine.durability = none needs half the space." if placement.slots == 2 else remedy


def _state_notes(placement: Placement) -> list[str]:
    notes, form, written = [], placement.form, ssd_bytes_written(placement)
    if written:
        daily = 86400 / _SECONDS_PER_STEP * written / 1e12
        notes.append(
            f"A step writes {format_bytes(written)} to the drives: {daily:.2g} TB a day at a step every {_SECONDS_PER_STEP} seconds."
            " Compare that with what the drives are rated for."
        )
    if form.is_split:
        notes.append("The device computes with the bf16 halves of the master weights; the remainders keep all 32 bits of them.")
    if form.has_8bit_moments:
        notes.append("Moments are kept in 8 bits: the updates are close to AdamW's, not equal.")
    return notes


def _resume_notes(placement: Placement, training: TrainingSection, engine: EngineSection) -> list[str]:
    """What snapshots cost and keep, and the space that named ones take besides."""
    notes = []
    if engine.durability is Durability.SNAPSHOT:
        of_ram = f", which writes another {format_bytes(placement.ram_bytes)} of states in RAM" if placement.ram_bytes else ""
        notes.append(
            f"A snapshot is made every {engine.snapshot_minutes:g} minutes and when the run stops{of_ram}:"
            " a run that is killed loses what it did since the last one."
        )
    if training.keep_steps:
        notes.append(
            f"{len(training.keep_steps)} named snapshots take {format_bytes(placement.total_bytes)} each, which is not counted here;"
            " there must be room when one is made, else the run goes on without it."
        )
    return notes


def _update_notes(training: TrainingSection, engine: EngineSection) -> list[str]:
    largest = f"{training.max_gradient_norm:g}"
    match training.clip:
        case Clip.GLOBAL:
            begin = "updates begin after the backward"
            if can_speculate(engine.schedule, training.clip, engine.durability):
                begin = {
                    ClipUpdate.AUTO: f"{begin}, or before it ends while few steps are clipped",
                    ClipUpdate.DEFER: begin,
                    ClipUpdate.SPECULATE: "updates begin as gradients arrive, and are done again where a step is clipped",
                }[engine.clip_updates]
            return [f"Gradients are clipped to a common norm of {largest}: {begin}."]
        case Clip.PER_UNIT:
            return [f"Each unit's gradients are clipped to a norm of {largest} by itself."]
        case Clip.NONE:
            return []


def _capacity_error(name: str, plan: TierPlan, remedy: str) -> CapacityError:
    largest = max(plan.items, key=lambda item: item.bytes)
    return CapacityError(
        f"the run needs {format_bytes(plan.used_bytes)}, {format_bytes(plan.capacity_bytes)} may be used;"
        f" most of it is {largest.name} ({format_bytes(largest.bytes)})",
        need_bytes=plan.used_bytes,
        have_bytes=plan.capacity_bytes,
        place=name,
        remedy=remedy,
    )
