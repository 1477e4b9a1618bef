"""Plans a run for the machine as it will be when the run's turn comes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from lohan.config import Durability, EngineSection, Precision, TrainingSection, UnitGrain
from lohan.errors import CapacityError, ConfigError
from lohan.hardware.probe import HardwareFacts
from lohan.planning.plan import Plan
from lohan.planning.planner import SLOW_BF16, default_precision, make_plan
from lohan.planning.workload import Workload
from lohan_app.entities import BaseModel, Run
from lohan_app.errors import Unprocessable
from lohan_app.hardware.service import measured, usable, with_reserve
from lohan_app.settings import Settings

CPU_DEVICES = ("cpu:0",)


def plan_run(
    model: BaseModel, training: TrainingSection, engine: EngineSection, *, facts: HardwareFacts, active: Sequence[Run], settings: Settings
) -> Plan:
    """The memory split of a run of `model`; a precision that `training` leaves open becomes the one that suits the device.

    What our own active runs hold counts as free: a run waits for them, and must not be refused because one of them is at work. Where
    `lohan profile` measured machine and model the plan goes by that.

    Raises:
        Unprocessable: the device is none that runs may use.
        ConfigError, CapacityError: see `lohan.planning.planner.make_plan`.
    """
    idle = with_reserve(_as_if_idle(usable(facts, settings), active), settings)
    check_device(engine.device, idle, settings)
    if "precision" not in training.model_fields_set:
        training = training.model_copy(update={"precision": default_precision(engine, idle)})
    return _plan(model, training, engine, hardware=idle, facts=facts, settings=settings)


def plan_at_start(model: BaseModel, run: Run, *, device: str, hardware: HardwareFacts, facts: HardwareFacts, settings: Settings) -> Plan:
    """The plan of a queued run made again for the machine as it is when its turn has come.

    A run that goes on from recorded states keeps what these are laid out by, and its micro-batch where that still fits.

    Args:
        device: that it is to get.
        hardware: the machine less what other runs hold; what the run's own states occupy counts as free.
        facts: the whole machine.

    Raises:
        ValidationError: its settings, or its model's workload, were stored by another version.
        ConfigError, CapacityError: see `lohan.planning.planner.make_plan`.
    """
    training = TrainingSection.model_validate(run.settings.get("training", {}))
    engine = EngineSection.model_validate(run.settings.get("engine", {})).model_copy(update={"device": device})
    before = run.started_plan or run.plan
    goes_on = run.step > 0 or run.parent_id is not None
    if before is not None and goes_on and engine.durability is not Durability.NONE:
        found = Plan.model_validate(before)
        engine = engine.model_copy(update={"grain": UnitGrain(found.grain), "chunk_parameters": found.chunk_parameters})
        if engine.micro_batch_size is None:
            kept = engine.model_copy(update={"micro_batch_size": found.micro_batch_size})
            with suppress(CapacityError):
                return _plan(model, training, kept, hardware=hardware, facts=facts, settings=settings)
    return _plan(model, training, engine, hardware=hardware, facts=facts, settings=settings)


def _plan(
    model: BaseModel,
    training: TrainingSection,
    engine: EngineSection,
    *,
    hardware: HardwareFacts,
    facts: HardwareFacts,
    settings: Settings,
) -> Plan:
    engine = engine.model_copy(update={"unsafe_filesystems": settings.unsafe_filesystems})
    profile, fault = measured(facts, settings, engine)
    workload = Workload.model_validate(model.workload)
    devices = len(settings.devices or hardware.gpus or CPU_DEVICES)
    plan = make_plan(workload, model_name=model.name, training=training, engine=engine, hardware=hardware, profile=profile, devices=devices)
    return plan if fault is None else _with_fault(plan, fault)


def _with_fault(plan: Plan, fault: ConfigError) -> Plan:
    """The plan with the reason why a profile that is there was not used."""
    # Without a profile the planner says that nothing was measured, in its only note about that command: it was, and is damaged.
    others = (note for note in plan.notes if "`lohan profile`" not in note)
    return plan.model_copy(update={"notes": (*others, f"There is no forecast of the time: {fault.message}. {fault.remedy}")})


def suggested_precision(facts: HardwareFacts, settings: Settings) -> tuple[Precision, str]:
    """What suits the device that `auto` takes, and why where that is not bf16."""
    precision = default_precision(EngineSection(), usable(facts, settings))
    return precision, SLOW_BF16 if precision is Precision.FP32 else ""


def _as_if_idle(facts: HardwareFacts, active: Sequence[Run]) -> HardwareFacts:
    held = {device for run in active for device in run.devices}
    ram = min(facts.ram.total_bytes, facts.ram.free_bytes + sum(run.reserved_ram_bytes for run in active))
    # States are preallocated before the first step; until then their space still looks free.
    held_space = [run.reserved_space for run in active if run.step > 0]
    return facts.model_copy(
        update={
            "ram": facts.ram.model_copy(update={"free_bytes": ram}),
            "gpus": tuple(gpu.model_copy(update={"free_bytes": gpu.total_bytes}) if gpu.uuid in held else gpu for gpu in facts.gpus),
            "state_directories": tuple(
                directory.model_copy(
                    update={
                        "free_bytes": min(
                            directory.total_bytes, directory.free_bytes + sum(space.get(directory.path, 0) for space in held_space)
                        )
                    }
                )
                for directory in facts.state_directories
            ),
        }
    )


def check_device(asked: str, usable: HardwareFacts, settings: Settings, *, place: str = "engine.device") -> None:
    """A run that asks for a device it may never get would wait for ever: it is refused at once, with Unprocessable."""
    gpus = [gpu.uuid for gpu in usable.gpus]
    devices = settings.devices or gpus or CPU_DEVICES
    fits = {
        "auto": True,
        "cpu": any(device.startswith("cpu") for device in devices),
        "cuda": bool(gpus),
        **{f"cuda:{index}": True for index in range(len(gpus))},
    }
    if not fits.get(asked, asked in devices):
        raise Unprocessable(
            f"{asked!r} is no device that runs may use here; there are {', '.join(devices)}",
            place=place,
            remedy="Use `auto`, or one of these.",
        )
