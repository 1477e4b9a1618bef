"""Plans of the settings of `lohan bench step`, and which of them this machine holds at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from lohan.bench.step_options import StatesTier, StepOptions, StepSetting, StepTask
from lohan.config import Durability, EngineSection, Precision, TrainingSection
from lohan.errors import CapacityError, ConfigError
from lohan.hardware.probe import HardwareFacts, StateDirectoryFacts
from lohan.planning.fit import RAM_RESERVE_BYTES, SSD_RESERVE_BYTES
from lohan.planning.machine import machine_profile
from lohan.planning.planner import make_plan
from lohan.planning.state_form import StateForm
from lohan.planning.tiers import Tier
from lohan.units import format_bytes

if TYPE_CHECKING:
    from lohan.planning.workload import Workload

# The planner's names.
_EXPORTED: Final = "exported model"
_SSD_SPACE: Final = "SSD space"


def make_task(options: StepOptions, setting: StepSetting, workload: Workload, hardware: HardwareFacts) -> StepTask:
    """Plan one setting, as if it had the machine alone.

    Args:
        hardware: with the setting's directories.

    Raises:
        ConfigError: there is no such device, the profile cannot be read, or does not tell how long the step takes.
        CapacityError: it does not fit, or not with its policy.
    """
    training, engine = options.training(setting), options.engine(setting)
    exported = (2 if training.precision is Precision.BF16 else 4) * workload.parameters
    facts = _facts(hardware, setting, training, engine, workload.parameters, exported_bytes=exported)
    try:
        profile = machine_profile(engine, hardware)
        plan = make_plan(
            workload,
            model_name=str(options.shape),
            training=training,
            engine=engine,
            hardware=facts,
            profile=profile,
            clip_rate=options.clip_rate,
        )
    except CapacityError as error:
        raise _without_export(error, exported) if error.place == _SSD_SPACE else error from None
    if engine.profiles is not None and plan.forecast is None:
        why = next((note for note in plan.notes if "no forecast" in note), "there is no forecast of the time")
        raise ConfigError(
            f"the plan was to go by a profile: {why}",
            place=f"--profiles {engine.profiles}",
            remedy="Measure this machine and shape with `lohan profile MODEL`, with the same directories, or leave --profiles out.",
        )
    return StepTask(
        shape_name=options.shape,
        tier=setting.tier,
        states=options.state_kind,
        training=training,
        engine=engine,
        plan=plan,
        trace_path=options.trace_path(setting),
    )


def _facts(
    hardware: HardwareFacts,
    setting: StepSetting,
    training: TrainingSection,
    engine: EngineSection,
    parameters: int,
    *,
    exported_bytes: int,
) -> HardwareFacts:
    """What the planner must know besides: nothing is exported here, and files on a tmpfs are in host memory."""

    def with_room(directory: StateDirectoryFacts) -> StateDirectoryFacts:
        return directory.model_copy(update={"free_bytes": directory.free_bytes + exported_bytes})

    ram = hardware.ram
    if setting.tier is StatesTier.TMPFS:
        slots = 1 if engine.durability is Durability.NONE else 2
        in_files = slots * StateForm.of(training.precision, engine.states).state_bytes(parameters)
        ram = ram.model_copy(update={"free_bytes": max(0, ram.free_bytes - in_files)})
    return hardware.model_copy(update={"ram": ram, "state_directories": tuple(map(with_room, hardware.state_directories))})


def _without_export(error: CapacityError, exported_bytes: int) -> CapacityError:
    need, have = error.need_bytes - exported_bytes, max(0, error.have_bytes - exported_bytes)
    return CapacityError(
        f"the states need {format_bytes(need)}, {format_bytes(have)} may be used",
        need_bytes=need,
        have_bytes=have,
        place=error.place,
        remedy="Free space, name another directory, or measure a smaller shape or 8bit states.",
    )


def file_bytes(task: StepTask) -> int:
    """What the setting's state files take, over all its directories."""
    return sum(item.bytes for item in task.plan.tier(Tier.SSD).items if item.name != _EXPORTED)


Group = list[StepTask]
"""Tasks that one process takes in turns."""

_OF_RETENTION: Final[Any] = {
    "engine": {"policy", "swapped_activation_bytes"},
    "plan": {
        *("retention", "micro_batch_size", "tiers", "forecast", "policy", "notes", "settings_digest"),
        *("ssd_bytes_per_step", "ssd_bytes_written_per_step"),
    },
    "trace_path": True,
}
"""Where tasks may differ that one process can take."""


def grouped(tasks: Sequence[StepTask]) -> list[Group]:
    """The tasks, those together that differ in nothing but what is kept of activations and in micro-batches."""
    groups: list[Group] = []
    for task in tasks:
        group = next((group for group in groups if _alike(group[0], task)), None)
        if group is None:
            groups.append([task])
        else:
            group.append(task)
    return groups


def _alike(first: StepTask, second: StepTask) -> bool:
    one, other = (task.model_dump(exclude=_OF_RETENTION) for task in (first, second))
    capacities = ([tier.capacity_bytes for tier in task.plan.tiers] for task in (first, second))
    return one == other and next(capacities) == next(capacities)


def largest(group: Group) -> StepTask:
    """The group as one task, with what it takes at most of each tier."""
    tiers = zip(*(task.plan.tiers for task in group), strict=True)
    most = tuple(max(same, key=lambda tier: tier.used_bytes) for same in tiers)
    return group[0].model_copy(update={"plan": group[0].plan.model_copy(update={"tiers": most})})


def waves(groups: Sequence[Group], hardware: HardwareFacts) -> list[list[Group]]:
    """The groups, in order, as many at a time as this machine holds."""
    found: list[list[Group]] = []
    for group in groups:
        if found and fit_together([largest(one) for one in (*found[-1], group)], hardware):
            found[-1].append(group)
        else:
            found.append([group])
    return found


def fit_together(tasks: Sequence[StepTask], hardware: HardwareFacts) -> bool:
    """Whether this machine holds all of them at the same time: GPU, host memory and drives. They share one set of directories."""
    free_ram = hardware.ram.free_bytes - RAM_RESERVE_BYTES
    host = sum(task.plan.tier(Tier.RAM).used_bytes + (file_bytes(task) if task.tier is StatesTier.TMPFS else 0) for task in tasks)
    if host > free_ram:
        return False
    # The allocator keeps what was given back: up to its cap, and without one up to whatever there is.
    gpus = {gpu.uuid: gpu.free_bytes for gpu in hardware.gpus}
    for task in tasks:
        if task.plan.device in gpus:
            tier = task.plan.tier(Tier.GPU)
            gpus[task.plan.device] -= task.engine.gpu_memory_bytes or tier.capacity_bytes
    if min(gpus.values(), default=0) < 0:
        return False
    free: dict[str, int] = {directory.drive: directory.free_bytes - SSD_RESERVE_BYTES for directory in hardware.state_directories}
    needs: Counter[str] = Counter()
    for task in tasks:
        share = -(-file_bytes(task) // len(hardware.state_directories))
        for directory in hardware.state_directories:
            needs[directory.drive] += share
    return all(need <= free[drive] for drive, need in needs.items())
