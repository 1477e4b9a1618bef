"""Measures one block of a model, and its head, in the shapes that plans choose from."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from lohan.config import KernelSet, Precision
from lohan.errors import ConfigError
from lohan.hardware.probe import probe
from lohan.hardware.profile_files import with_blocks
from lohan.models.block_times import measure_block
from lohan.models.blocks import trace_workload
from lohan.planning.workload import UnitKind
from lohan.profiling.progress import Meter, OnProgress
from lohan.units import format_bytes, format_duration

if TYPE_CHECKING:
    from lohan.hardware.profile import BlockTimes, HardwareProfile
    from lohan.planning.workload import Workload

REPETITIONS = 3
# Weights, their gradients, and room for what is computed with them; activations, and their gradients while they go back.
_COPIES_OF_WEIGHTS = 3
_COPIES_OF_ACTIVATIONS = 2


def measure_model(
    profile: HardwareProfile,
    config: Any,
    *,
    rows_list: Sequence[int],
    length: int,
    precision: Precision,
    device: torch.device,
    kernels: KernelSet = KernelSet.TORCH,
    repetitions: int = REPETITIONS,
    most_seconds: float | None = None,
    on_progress: OnProgress | None = None,
) -> HardwareProfile:
    """Time a block of `config`'s model with each number of rows, and put the times into `profile` in place of earlier ones.

    Args:
        config: a transformers configuration.
        rows_list: of micro-batches, ascending.
        length: tokens a row.
        precision: what the device computes in.
        device: that of the profile.
        kernels: the kernel set.
        repetitions: of every shape.
        most_seconds: shapes that would make it longer than this, judging by those measured before, are left out; None measures all.
        on_progress: is told of every shape, and why one is missing: it does not fit, takes too long, or its block cannot be computed by
            itself.

    Raises:
        ConfigError: no rows, or rows longer than the model's context.
        ModelError: the model has no block that the engine can find.
    """
    workload = trace_workload(config)
    _check(rows_list, length, workload)
    meter = Meter([rows + 1 for rows in rows_list], on_progress, in_seconds=False)
    measured: list[BlockTimes] = []
    begin = time.monotonic()
    seconds_per_row = _known_seconds_per_row(profile, workload.digest, length, precision, repetitions)
    for rows in rows_list:
        shape = f"{rows} x {length} tokens" + (f" with {kernels}" if kernels is not KernelSet.TORCH else "")
        reason = "" if device.type == "cuda" else _too_large_for_host(workload, rows, length, precision)
        expected = seconds_per_row * rows
        if not reason and expected and most_seconds is not None and time.monotonic() - begin + expected > most_seconds:
            reason = f"it would take about {format_duration(expected)}; `--rows {rows}` measures it"
        if reason:
            meter.leave_out(f"Not measured: {shape}: {reason}.")
            continue
        meter.begin(f"a block and the head, {shape}")
        started = time.monotonic()
        try:
            times = measure_block(
                config,
                rows=rows,
                length=length,
                precision=precision,
                device=device,
                kernels=kernels,
                repetitions=repetitions,
                on_progress=meter.advance,
            )
            measured.append(times)
            seconds_per_row = (time.monotonic() - started) / rows
        except torch.OutOfMemoryError:
            meter.note(f"Not measured: {shape}: it does not fit into the memory of {profile.device}.")
        except RuntimeError as error:
            first_line = str(error).strip().partition("\n")[0]
            meter.note(f"Not measured: {shape}: the block cannot be computed by itself ({first_line}).")
        if device.type == "cuda":
            torch.cuda.empty_cache()
        meter.end()
    return with_blocks(profile, measured)


def _check(rows_list: Sequence[int], length: int, workload: Workload) -> None:
    if not rows_list or min(rows_list) < 1:
        raise ConfigError(
            f"a micro-batch of {min(rows_list, default=0)} rows cannot be measured", place="rows", remedy="Give 1 or more, e.g. 1,2,4,8."
        )
    if not 1 <= length <= workload.context_length:
        raise ConfigError(
            f"rows of {length} tokens cannot be measured: the model's context is {workload.context_length}",
            place="length",
            remedy=f"Give 1 to {workload.context_length}.",
        )


def _known_seconds_per_row(profile: HardwareProfile, digest: str, length: int, precision: Precision, repetitions: int) -> float:
    """What measuring the same model took for each row, judging by the profile; 0 where that is not known."""
    found = [0.0]
    for block in profile.blocks:
        if (block.workload_digest, block.sequence_length, block.precision) == (digest, length, precision.value):
            head = 0.0 if block.head_seconds is None else block.head_seconds.value
            # Two passes to warm up; the forward is run again for its operators' times.
            passes = 2 * block.forward_seconds.value + block.backward_seconds.value + head
            found.append((repetitions + 2) * passes / block.rows)
    return max(found)


def _too_large_for_host(workload: Workload, rows: int, length: int, precision: Precision) -> str:
    """Why a block cannot be measured in host memory, where the system ends a process that takes too much; empty where it can."""
    weights = max(unit.parameters for unit in workload.units if unit.kind is not UnitKind.EMBEDDING)
    activations = rows * length * workload.block_saved_elements_per_token
    elements = _COPIES_OF_WEIGHTS * weights + _COPIES_OF_ACTIVATIONS * activations
    need_bytes = elements * (2 if precision is Precision.BF16 else 4)
    free_bytes = probe().ram.free_bytes
    return f"it needs about {format_bytes(need_bytes)}, {format_bytes(free_bytes)} are free" if need_bytes > free_bytes else ""
