"""Divides a run's bytes over GPU memory, RAM and SSD, before anything is loaded. Pure arithmetic: no torch, milliseconds.

What is chosen is whether blocks move whole or module by module, the slots they move through, the micro-batch, how many units keep their
weights on the GPU from forward to backward, whether gradients of all units find room in host memory, how much of the states lies in RAM,
the size of their chunks, and what is kept of activations. Where machine and model were measured it is the shortest step that counts
(`lohan.planning.search`). Else rules do: the largest micro-batch that fits, room for all gradients, then states in what host memory has
left (`Fit.most_ram_states`), as many kept units as the GPU has room for, and blocks' inner activations are all computed again. Chunks and
slots go by rules always (`footprint.chunk_parameters`; three slots, and two where blocks would else not fit whole): nothing that is
measured tells their sizes apart. What a choice takes of each tier is `lohan.planning.fit`'s.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace

from lohan.config import (
    ActivationPolicy,
    ClipUpdate,
    Durability,
    EngineSection,
    GradientBuffers,
    KernelSet,
    Precision,
    TrainingSection,
    UnitGrain,
    UnsafeFilesystems,
)
from lohan.errors import CapacityError, ConfigError, DriveSpaceError
from lohan.hardware.probe import HardwareFacts
from lohan.hardware.profile import HardwareProfile
from lohan.planning.choice import Chooser
from lohan.planning.filesystems import REMEDY as FILESYSTEM_REMEDY
from lohan.planning.filesystems import refusal
from lohan.planning.fit import Fit, choose_gpu, emptied
from lohan.planning.footprint import ssd_bytes_read, ssd_bytes_written
from lohan.planning.forecast import Forecast
from lohan.planning.kernel_choice import choose_kernels
from lohan.planning.notes import plan_notes
from lohan.planning.plan import Plan, TierUse
from lohan.planning.prices import first_clip_update, foresee, speculated_clip_rate
from lohan.planning.schedule import DRIVES_CLIP_RATE, EXPECTED_CLIP_RATE
from lohan.planning.search import Chosen, Search, ram_sizes
from lohan.planning.slots import LEAST_SLOTS, WORKING_SLOTS
from lohan.planning.tiers import Tier
from lohan.planning.workload import Workload
from lohan.units import format_bytes

SLOW_BF16 = "This CPU has no bf16 instructions, so that bf16 takes 5 to 40 times as long as fp32."


def default_precision(engine: EngineSection, hardware: HardwareFacts) -> Precision:
    """What a run should use that has no reason for another: bf16, and fp32 on a CPU that has no instructions for bf16.

    Raises:
        ConfigError: there is no such device.
    """
    on_slow_cpu = choose_gpu(engine, hardware) is None and not hardware.cpu.multiplies_bf16
    return Precision.FP32 if on_slow_cpu else Precision.BF16


def make_plan(
    workload: Workload,
    *,
    model_name: str,
    training: TrainingSection,
    engine: EngineSection,
    hardware: HardwareFacts,
    profile: HardwareProfile | None = None,
    devices: int | None = None,
    clip_rate: float = EXPECTED_CLIP_RATE,
) -> Plan:
    """The memory split of a run on `hardware`.

    The state directories are `hardware.state_directories`; free memory and space are taken as probed.

    Args:
        profile: of the machine, as the run's device sees it.
        devices: on which runs may be at work beside each other, sharing host memory; None: as many as there are GPUs.
        clip_rate: the part of the steps that is expected to be clipped; a run learns it from its first steps.

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
    kernels, gpu = choose_kernels(workload, training, engine, profile), choose_gpu(engine, hardware)
    decided = engine.model_copy(update={"kernels": kernels})
    beside = devices or max(1, len(hardware.gpus))
    fit = _choose_grain(Fit(workload, training, decided, hardware, gpu, devices=beside, clip_rate=clip_rate))
    micro_batch, largest = _choose_micro_batch(fit)
    _check_drives(fit, micro_batch)
    chosen, foreseen, rate, why_not = _choose_by_time(fit, profile, largest)
    if chosen is not None:
        choice = chosen.choice
        fit, micro_batch, kept_units, retention = choice.fit, choice.micro_batch, choice.kept_units, choice.decision.retention
    else:
        fit = _with_ram_states(_with_gradient_buffers(fit, micro_batch), micro_batch)
        retention = fit.inputs_placed(micro_batch, 0).checked()
        kept_units = fit.most_kept_units(micro_batch, retention)
    swapped = fit.kept_on_drives(retention, micro_batch)
    written_bytes = ssd_bytes_written(fit.placement) + swapped
    notes = plan_notes(fit, micro_batch, kept_units, grain_asked=engine.grain, forecast=foreseen, written_bytes=written_bytes)
    notes += why_not
    if training.precision is Precision.BF16 and default_precision(engine, hardware) is Precision.FP32:
        notes.append(f"{SLOW_BF16} Use fp32.")
    return Plan(
        model=model_name,
        parameters=workload.parameters,
        workload_digest=workload.digest,
        settings_digest=hashlib.sha256((training.model_dump_json() + engine.model_dump_json()).encode()).hexdigest(),
        hardware_digest=hardware.digest,
        device=_device_of(fit),
        precision=str(training.precision),
        states=str(fit.placement.form),
        batch_size=training.batch_size,
        micro_batch_size=micro_batch,
        sequence_length=training.sequence_length,
        kernels=str(kernels),
        grain=str(fit.grain),
        slots=fit.slots,
        kept_units=kept_units,
        gradient_buffers=str(fit.order.gradients),
        ram_state_bytes=fit.chosen_ram_bytes,
        chunk_parameters=fit.placement.chunk_parameters,
        spare_state_bytes=fit.spare_bytes,
        clip_updates=str(first_clip_update(foreseen) if engine.clip_updates is ClipUpdate.AUTO else engine.clip_updates),
        speculated_clip_rate=rate,
        schedule=str(engine.schedule),
        policy=str(engine.policy if chosen is not None else ActivationPolicy.RECOMPUTE_ALL),
        retention=retention,
        tiers=fit.tiers(micro_batch, kept_units, retention),
        durability=str(engine.durability),
        ssd_bytes_per_step=ssd_bytes_read(fit.sizes, fit.placement, kept_units) + swapped + written_bytes,
        ssd_bytes_written_per_step=written_bytes,
        forecast=foreseen,
        notes=tuple(notes),
    )


def _device_of(fit: Fit) -> str:
    if fit.gpu is not None:
        return fit.gpu.uuid
    return fit.engine.device if fit.engine.device.startswith("cpu") else "cpu"


def _choose_grain(fit: Fit) -> Fit:
    """With grain and slots that let one row at a time fit: whole blocks before modules, three slots before two.

    Modules need smaller slots and buffers, but more tensors are kept between regions: a large batch may need less memory with blocks. With
    two slots a unit is loaded while another computes; the third lets that begin before all queued work on the last one is done.

    Raises:
        ConfigError: modules were asked for, and there are none.
    """
    asked, modules = fit.engine.grain, fit.workload.modules
    if asked is UnitGrain.MODULE and modules is None:
        raise ConfigError(
            "the blocks of this model cannot be cut into modules, or it was registered before they could",
            place="engine.grain",
            remedy='Use "block", or register the model again.',
        )
    grains = [asked] if asked is not UnitGrain.AUTO else [UnitGrain.BLOCK, *([UnitGrain.MODULE] if modules is not None else [])]
    ways = [replace(fit, grain=grain, slots=slots) for grain in grains for slots in (WORKING_SLOTS, LEAST_SLOTS)]

    def shortage(way: Fit) -> int:
        return sum(max(0, plan.used_bytes - plan.capacity_bytes) for plan in way.memory(1, 0, way.inputs_placed(1, 0)))

    return next((way for way in ways if not shortage(way)), None) or min(ways, key=shortage)


def _check_drives(fit: Fit, micro_batch: int) -> None:
    """See that the drives have room for the states, but for those that may lie in RAM instead.

    Raises:
        DriveSpaceError: they have not that much free.
        CapacityError: they are too small.
    """
    states = fit.drives()
    short = states.used_bytes - states.capacity_bytes
    if short <= 0:
        return
    in_ram = 0
    if fit.chooses_ram_states and fit.engine.durability is Durability.NONE:
        in_ram = fit.most_ram_states(micro_batch, fit.inputs_placed(micro_batch, 0))
        if short <= in_ram:
            return
    would_fit = states.used_bytes <= replace(fit, hardware=emptied(fit.hardware)).drives().capacity_bytes + in_ram
    kind = DriveSpaceError if would_fit else CapacityError
    raise _capacity_error("SSD space", states, _space_remedy(fit, short, in_ram), kind)


def _choose_micro_batch(fit: Fit) -> tuple[int, int]:
    """The micro-batch that was asked for, or the largest that fits while the inputs of blocks stay on the device, if any does; and the
    largest that fits at all, or the same."""

    def shortage(micro_batch: int, batch_size: int, sequence_length: int) -> TierUse | None:
        changed = fit.with_training(batch_size=batch_size, sequence_length=sequence_length)
        plans = changed.memory(micro_batch, 0, changed.inputs_placed(micro_batch, 0))
        return next((plan for plan in plans if plan.used_bytes > plan.capacity_bytes), None)

    def leaves_inputs(micro_batch: int) -> bool:
        return all(plan.used_bytes <= plan.capacity_bytes for plan in fit.memory(micro_batch, 0))

    batch, length = fit.training.batch_size, fit.training.sequence_length
    fitting = _largest(batch, lambda micro_batch: shortage(micro_batch, batch, length) is None)
    asked = fit.engine.micro_batch_size or _largest(batch, leaves_inputs) or fitting
    if 1 <= asked <= fitting:
        return asked, asked if fit.engine.micro_batch_size is not None else fitting
    short = shortage(max(1, asked), batch, length)
    assert short is not None, "what does not fit has a shortage"
    name = "GPU memory" if short.tier is Tier.GPU else "host memory"
    if fitting:
        raise _capacity_error(name, short, f"engine.micro_batch_size = {fitting} fits; leaving it out chooses by itself.")
    fewer = fit.with_engine(ram_state_bytes=0)
    if fit.placement.ram_bytes and short.tier is Tier.RAM:
        _, on_host = fewer.memory(1, 0, fewer.inputs_placed(1, 0))
        if on_host.used_bytes <= on_host.capacity_bytes:
            left = format_bytes(on_host.capacity_bytes - on_host.used_bytes)
            raise _capacity_error(name, short, f'engine.ram_state_bytes up to {left} fits; "auto" chooses by itself.')
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


def _with_gradient_buffers(fit: Fit, micro_batch: int) -> Fit:
    """With as much host memory for gradients as was asked for, else for all units' where the rest leaves room.

    Measured with 3.43 B parameters, 8 rows and states in RAM: with three buffers a GPU waited a fifth of a step for one to become free,
    while the CPU had nothing to do during the forward. A CPU that computes has no such time.
    """
    if fit.engine.gradient_buffers is not GradientBuffers.AUTO:
        return fit
    every = fit.with_engine(gradient_buffers=GradientBuffers.ALL)
    needed = every.with_ram_states(every.least_ram_states()) if every.chooses_ram_states else every
    _, on_host = needed.memory(micro_batch, 0, needed.inputs_placed(micro_batch, 0))
    if fit.chooses_gradient_buffers and on_host.used_bytes <= on_host.capacity_bytes:
        return every
    return fit.with_engine(gradient_buffers=GradientBuffers.FEW)


def _with_ram_states(fit: Fit, micro_batch: int) -> Fit:
    """With as many states in RAM as was asked for, else as have room: each byte there is one less to be read by every step."""
    return fit.with_ram_states(ram_sizes(fit, micro_batch)[0]) if fit.chooses_ram_states else fit


def _choose_by_time(fit: Fit, profile: HardwareProfile | None, fitting: int) -> tuple[Chosen | None, Forecast | None, float, list[str]]:
    """The shortest step, what it is made of, up to which clip rate it is speculated, and a note where none can be foreseen.

    Args:
        fitting: the largest micro-batch, or the one that was asked for.

    Raises:
        CapacityError: the policy that was asked for cannot be followed on this machine.
    """
    why_not = "This machine was not measured: there is no forecast of the time. `lohan profile` measures it."
    if profile is None:
        return None, None, DRIVES_CLIP_RATE, [why_not]
    if profile.ssd_write is None and fit.engine.activation_ssd_bytes is None:
        fit = fit.with_engine(activation_ssd_bytes=0)  # what was not measured is no place for activations, and states in RAM need no drive
    try:
        chooser = Chooser(fit, profile, fit.engine.policy)
        micro_batches = [fitting] if fit.engine.micro_batch_size is not None else _micro_batches(fitting)
        buffered = fit if fit.chooses_gradient_buffers else _with_gradient_buffers(fit, fitting)
        chosen = Search(buffered, chooser).choose(micro_batches)
        speculating = _with_spare(buffered, fitting)
        if chosen is not None and speculating is not None:
            speculated = Search(speculating, chooser).choose(micro_batches)
            is_asked = fit.engine.clip_updates is ClipUpdate.SPECULATE
            if speculated is not None and (is_asked or speculated.choice.seconds < chosen.choice.seconds):
                chosen = speculated
        if chosen is not None:
            return chosen, foresee(chosen, chooser, profile), speculated_clip_rate(chosen.choice, chooser), []
        kernels = "" if fit.engine.kernels is KernelSet.AUTO else f" with {fit.engine.kernels} kernels"
        why_not = f"This model was not measured here{kernels}: there is no forecast of the time. `lohan profile MODEL` measures it."
    except ConfigError as error:
        why_not = f"There is no forecast of the time: {error.message}. {error.remedy or ''}".strip()
    return None, None, DRIVES_CLIP_RATE, [why_not]


def _with_spare(fit: Fit, micro_batch: int) -> Fit | None:
    """With second places for states in RAM, in what host memory has left beside the rest; None where there is no room or use for any.

    They go before activations: a GiB of second places lets 0.09 billion parameters be updated under the backward, 16 ms with a CPU that
    updates 5.5 billion a second, where a GiB of kept matrix products saved 6 ms of the same machine's recomputation.
    """
    whole = _with_ram_states(fit, micro_batch)
    if not whole.can_have_spare:
        return None
    found = replace(fit, most_spare_bytes=whole.most_spare(micro_batch, whole.inputs_placed(micro_batch, 0)))
    return found if found.most_spare_bytes else None


def _micro_batches(fitting: int) -> list[int]:
    """Worth trying: the largest that fits, and the powers of two below it."""
    return sorted({fitting, *(1 << power for power in range(fitting.bit_length()))}, reverse=True)


def _check_filesystems(engine: EngineSection, hardware: HardwareFacts) -> None:
    for directory in hardware.state_directories:
        reason = refusal(directory.filesystem, engine.durability)
        if reason is not None and engine.unsafe_filesystems is UnsafeFilesystems.REFUSE:
            raise ConfigError(f"the state directory {directory.path} {reason}", place="engine.state_directories", remedy=FILESYSTEM_REMEDY)


def _space_remedy(fit: Fit, short: int, in_ram: int) -> str:
    """What else there is to do.

    Args:
        short: bytes that are missing on the drives.
        in_ram: bytes of states that RAM has room for in their place.
    """
    remedy = "Free space, or add a drive to the state directories."
    if fit.placement.slots == 2:
        without = fit.with_engine(durability=Durability.NONE).drives()
        fits = "fits" if without.used_bytes <= without.capacity_bytes else "does not fit either"
        return f"{remedy} engine.durability = none needs half the space: {format_bytes(without.used_bytes)}, which {fits}."
    if fit.chooses_ram_states:
        return f"{remedy} {format_bytes(short - in_ram)} more of free host memory would hold what the drives do not."
    return f'{remedy} With engine.ram_state_bytes = "auto" a part of the states may lie in RAM instead.'


def _capacity_error(name: str, plan: TierUse, remedy: str, kind: type[CapacityError] = CapacityError) -> CapacityError:
    largest = max(plan.holders, key=lambda holder: holder.bytes)
    return kind(
        f"the run needs {format_bytes(plan.used_bytes)}, {format_bytes(plan.capacity_bytes)} may be used;"
        f" most of it is {largest.name} ({format_bytes(largest.bytes)})",
        need_bytes=plan.used_bytes,
        have_bytes=plan.capacity_bytes,
        place=name,
        remedy=remedy,
    )
