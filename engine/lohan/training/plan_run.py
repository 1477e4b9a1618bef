"""The plan of a run as configured, on this machine, now."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lohan.config import RunConfig
from lohan.hardware.probe import probe
from lohan.models.blocks import trace_workload
from lohan.models.load import load_config
from lohan.planning.plan import Plan
from lohan.planning.planner import make_plan

STATES_FOLDER = "states"


def state_directories(config: RunConfig) -> tuple[Path, ...]:
    """Where the run's states lie: as configured, else a folder in the run's own."""
    return config.engine.state_directories or (config.output.directory / STATES_FOLDER,)


def plan_run(config: RunConfig, model_config: Any = None) -> Plan:
    """Trace the model, probe the machine, and divide the bytes.

    Raises:
        ModelError: the model cannot be used.
        ConfigError, CapacityError: the run does not fit.
    """
    return make_plan(
        trace_workload(model_config or load_config(config.model.path)),
        model_name=config.model.path.name,
        training=config.training,
        engine=config.engine,
        hardware=probe(state_directories(config)),
    )
