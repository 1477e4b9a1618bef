"""What a session does where `lohan.init` was told, where its plan says, and else."""

from __future__ import annotations

import os
from enum import StrEnum
from typing import TYPE_CHECKING, TypeVar

from lohan.config import Clip, ClipUpdate, GradientBuffers, UnitGrain, UpdateSchedule
from lohan.errors import ConfigError
from lohan.planning.retention import Retention
from lohan.planning.schedule import DRIVES_CLIP_RATE
from lohan.planning.slots import WORKING_SLOTS
from lohan.states.layout import DEFAULT_CHUNK_PARAMETERS
from lohan.streaming.clipping import UpdateRules

if TYPE_CHECKING:
    from lohan.planning.plan import Plan

_Kind = TypeVar("_Kind", bound=StrEnum)

_LAUNCHING_CPUS = 2
"""Left to the thread that launches forward and backward, and to those that start copies and transfers: of 16 CPUs with an update thread on
each, a block's forward takes 12.6 ms of host time, without updates 6.0."""
_LEAST_SHARED_CPUS = 8
"""With fewer, two are more than a quarter of them, and host memory's bandwidth may no longer be what bounds updates."""
_MOST_THREADS = 1024
"""Of the native core's pool."""


def choose(
    micro_batch_size: int | None, slots: int | None, kept_units: int | None, batch_size: int, plan: Plan | None
) -> tuple[int, int, int]:
    """Micro-batch, slots and kept units: what was asked for, else the plan's, else all rows, 3 slots and none."""
    if micro_batch_size is None:
        micro_batch_size = plan.micro_batch_size if plan is not None else batch_size
    if slots is None:
        slots = plan.slots if plan is not None else WORKING_SLOTS
    if kept_units is None:
        kept_units = plan.kept_units if plan is not None else 0
    check_ranges(micro_batch_size=micro_batch_size)
    if slots < 2:
        raise ConfigError(f"slots is {slots}, expected at least 2", place="slots", remedy="One unit is loaded while another is used.")
    if kept_units < 0:
        raise ConfigError(f"kept_units is {kept_units}, expected at least 0", place="kept_units", remedy="Correct the value.")
    return micro_batch_size, slots, kept_units


def choose_states(
    chunk_parameters: int | None, ram_state_bytes: int | None, spare_state_bytes: int | None, plan: Plan | None
) -> tuple[int, int, int]:
    """Chunks, states in RAM, and their second places: what was asked for, else the plan's, else the largest chunks and none."""
    planned = (DEFAULT_CHUNK_PARAMETERS, 0, 0)
    if plan is not None:
        planned = plan.chunk_parameters, plan.ram_state_bytes, plan.spare_state_bytes
    return (
        planned[0] if chunk_parameters is None else chunk_parameters,
        planned[1] if ram_state_bytes is None else ram_state_bytes,
        planned[2] if spare_state_bytes is None else spare_state_bytes,
    )


def choose_retention(retention: Retention | None, plan: Plan | None) -> Retention:
    """What was asked for, else the plan's, else nothing is kept of activations."""
    if retention is not None:
        return retention
    return plan.retention if plan is not None else Retention()


def choose_threads(threads: int) -> int:
    """How many threads update, here and where updates are measured: what was asked for, else one for each CPU this process may use.

    From 8 CPUs on two are left to the threads that launch kernels.
    """
    if threads:
        return threads
    usable = len(os.sched_getaffinity(0))
    return min(usable - _LAUNCHING_CPUS if usable >= _LEAST_SHARED_CPUS else usable, _MOST_THREADS)


def choose_grain(grain: UnitGrain, plan: Plan | None) -> UnitGrain:
    """What was asked for, else the plan's, else blocks."""
    if grain is not UnitGrain.AUTO:
        return grain
    return UnitGrain(plan.grain) if plan is not None else UnitGrain.BLOCK


def choose_rules(
    schedule: str, clip: str, max_gradient_norm: float, clip_updates: str, gradient_buffers: str, plan: Plan | None
) -> UpdateRules:
    """What was asked for, with the plan's gradient buffers, or few, where that is left open, and what clipped runs begin with."""
    buffers = member(GradientBuffers, gradient_buffers, "gradient_buffers")
    if buffers is GradientBuffers.AUTO:
        buffers = GradientBuffers(plan.gradient_buffers) if plan is not None else GradientBuffers.FEW
    return UpdateRules(
        member(UpdateSchedule, schedule, "schedule"),
        member(Clip, clip, "clip"),
        max_gradient_norm,
        member(ClipUpdate, clip_updates, "clip_updates"),
        buffers,
        ClipUpdate(plan.clip_updates) if plan is not None else ClipUpdate.DEFER,
        plan.speculated_clip_rate if plan is not None else DRIVES_CLIP_RATE,
    )


def member(kind: type[_Kind], value: str, name: str) -> _Kind:
    """`value` as a member of `kind`."""
    try:
        return kind(value)
    except ValueError:
        allowed = ", ".join(kind)
        raise ConfigError(f"{name} is {value!r}, expected one of {allowed}", place=name, remedy="Correct the value.") from None


def check_ranges(**values: int) -> None:
    """See that all are at least 1; raises ConfigError."""
    for name, value in values.items():
        if value < 1:
            raise ConfigError(f"{name} is {value}, expected at least 1", place=name, remedy="Correct the value.")
