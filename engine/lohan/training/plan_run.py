"""The plan of a run as configured, or of a model alone, on this machine, now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from lohan.config import EngineSection, RunConfig, TrainingSection, UnitGrain
from lohan.errors import CapacityError
from lohan.hardware.probe import HardwareFacts, occupied_bytes, probe
from lohan.models.blocks import trace_workload
from lohan.models.load import load_config
from lohan.planning.machine import machine_profile
from lohan.planning.plan import Plan
from lohan.planning.planner import make_plan
from lohan.states.record import FOLDER

STATES_FOLDER = "states"


def state_directories(config: RunConfig) -> tuple[Path, ...]:
    """Where the run's states lie: as configured, else a folder in the run's own."""
    return config.engine.state_directories or (config.output.directory / STATES_FOLDER,)


def plan_run(
    config: RunConfig, model_config: Any = None, *, micro_batch_size: int | None = None, grain: UnitGrain = UnitGrain.AUTO
) -> Plan:
    """Trace the model, probe the machine, and divide the bytes. What the run's own states occupy already counts as free.

    Args:
        micro_batch_size: of a run that is resumed: taken where it still fits and the configuration names none.
        grain: of a run that is resumed, whose states are laid out by it: taken where the configuration names none.

    Raises:
        ModelError: the model cannot be used.
        ConfigError, CapacityError: the run does not fit.
    """
    workload = trace_workload(model_config or load_config(config.model.path))
    directories = state_directories(config)
    hardware = _with_own_states(probe(directories), directories)
    engine = config.engine.model_copy(update={"grain": grain}) if config.engine.grain is UnitGrain.AUTO else config.engine
    plan_with = partial(
        make_plan,
        workload,
        model_name=config.model.path.name,
        training=config.training,
        hardware=hardware,
        profile=machine_profile(engine, hardware),
    )
    if micro_batch_size is not None and engine.micro_batch_size is None:
        with suppress(CapacityError):
            return plan_with(engine=engine.model_copy(update={"micro_batch_size": micro_batch_size}))
    return plan_with(engine=engine)


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
