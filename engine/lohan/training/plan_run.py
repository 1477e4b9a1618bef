"""The plan of a run as configured, or of a model alone, on this machine, now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lohan.config import ActivationPolicy, EngineSection, GradientBuffers, KernelSet, RunConfig, TrainingSection, UnitGrain
from lohan.errors import CapacityError
from lohan.hardware.probe import HardwareFacts, occupied_bytes, probe
from lohan.hardware.profile import HardwareProfile
from lohan.models.blocks import trace_workload
from lohan.models.load import load_config
from lohan.planning.correction import Running
from lohan.planning.fit import Fit, choose_gpu
from lohan.planning.machine import machine_profile
from lohan.planning.plan import Plan
from lohan.planning.planner import make_plan
from lohan.planning.workload import Workload
from lohan.states.record import FOLDER
from lohan.training.corrected_profile import corrected_by_run

STATES_FOLDER = "states"


def state_directories(config: RunConfig) -> tuple[Path, ...]:
    """Where the run's states lie: as configured, else a folder in the run's own."""
    return config.engine.state_directories or (config.output.directory / STATES_FOLDER,)


@dataclass(frozen=True)
class PlannedRun:
    """A plan, and what it was made from."""

    plan: Plan
    workload: Workload
    training: TrainingSection
    engine: EngineSection
    hardware: HardwareFacts
    profile: HardwareProfile | None
    """Of the machine, corrected by earlier steps of the run where there were such."""
    corrections: int = 0
    """That the profile has had."""

    @property
    def running(self) -> Running | None:
        """What the run does, as far as its steps can be held against a forecast; None where there is none."""
        plan = self.plan
        if self.profile is None or plan.forecast is None:
            return None
        chosen = {
            "kernels": KernelSet(plan.kernels),
            "gradient_buffers": GradientBuffers(plan.gradient_buffers),
            "ram_state_bytes": plan.ram_state_bytes,
            "chunk_parameters": plan.chunk_parameters,
        }
        engine = self.engine.model_copy(update=chosen)
        gpu = choose_gpu(engine, self.hardware)
        fit = Fit(
            self.workload,
            self.training,
            engine,
            self.hardware,
            gpu,
            UnitGrain(plan.grain),
            plan.slots,
            most_spare_bytes=plan.spare_state_bytes,
        )
        policy = ActivationPolicy(plan.policy)
        return Running(fit, self.profile, policy, plan.micro_batch_size, plan.kept_units, plan.retention)


def plan_run(
    config: RunConfig, model_config: Any = None, *, micro_batch_size: int | None = None, grain: UnitGrain = UnitGrain.AUTO
) -> Plan:
    """The plan alone; arguments and errors are `prepare_run`'s."""
    return prepare_run(config, model_config, micro_batch_size=micro_batch_size, grain=grain).plan


def prepare_run(
    config: RunConfig,
    model_config: Any = None,
    *,
    micro_batch_size: int | None = None,
    grain: UnitGrain = UnitGrain.AUTO,
    chunk_parameters: int | None = None,
) -> PlannedRun:
    """Trace the model, probe the machine, and divide the bytes. What the run's own states occupy already counts as free.

    Args:
        micro_batch_size: of a run that is resumed: taken where it still fits and the configuration names none.
        grain: of a run that is resumed, whose states are laid out by it: taken where the configuration names none.
        chunk_parameters: likewise: its states are cut by it.

    Raises:
        ModelError: the model cannot be used.
        ConfigError, CapacityError: the run does not fit.
    """
    workload = trace_workload(model_config or load_config(config.model.path))
    directories = state_directories(config)
    hardware = _with_own_states(probe(directories), directories)
    engine = config.engine
    if engine.grain is UnitGrain.AUTO:
        engine = engine.model_copy(update={"grain": grain})
    if engine.chunk_parameters is None:
        engine = engine.model_copy(update={"chunk_parameters": chunk_parameters})
    profile, corrections = corrected_by_run(config.output.directory, machine_profile(engine, hardware))

    def prepared(engine: EngineSection) -> PlannedRun:
        plan = make_plan(
            workload, model_name=config.model.path.name, training=config.training, engine=engine, hardware=hardware, profile=profile
        )
        return PlannedRun(plan, workload, config.training, engine, hardware, profile, corrections)

    if micro_batch_size is not None and engine.micro_batch_size is None:
        with suppress(CapacityError):
            return prepared(engine.model_copy(update={"micro_batch_size": micro_batch_size}))
    return prepared(engine)


def plan_model(model: Path, training: TrainingSection, engine: EngineSection, directories: Sequence[Path]) -> Plan:
    """The plan of a run that trains `model` with states in `directories`, before there is any data.

    Raises:
        ModelError: the model cannot be used.
        ConfigError, CapacityError: the run does not fit, or the profile cannot be read.
    """
    workload = trace_workload(load_config(model))
    hardware = probe(directories)
    profile = machine_profile(engine, hardware)
    return make_plan(workload, model_name=model.name, training=training, engine=engine, hardware=hardware, profile=profile)


def _with_own_states(hardware: HardwareFacts, directories: Sequence[Path]) -> HardwareFacts:
    own: Counter[str] = Counter()
    for directory, facts in zip(directories, hardware.state_directories, strict=True):
        own[facts.drive] += occupied_bytes(directory / FOLDER)
    drives = tuple(facts.model_copy(update={"free_bytes": facts.free_bytes + own[facts.drive]}) for facts in hardware.state_directories)
    return hardware.model_copy(update={"state_directories": drives})
