"""How fast a machine is, as data: what `lohan.hardware.profiler` measured, kept per machine. No torch."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

PROFILE_VERSION = 1
Seconds = Annotated[FiniteFloat, Field(ge=0)]


class _Facts(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Measured(_Facts):
    """A figure with how far its repetitions lie apart."""

    value: Annotated[FiniteFloat, Field(gt=0)]
    """The median."""
    spread: Annotated[FiniteFloat, Field(ge=0)] = 0.0
    """(Largest - smallest) / median."""
    repetitions: Annotated[int, Field(ge=1)] = 1


def value_or(measured: Measured | None, otherwise: float) -> float:
    """Its value, where there is one."""
    return otherwise if measured is None else measured.value


class BlockTimes(_Facts):
    """One block of a model on the device, its weights there, with the kernels in use."""

    workload_digest: str
    """Of the model's `Workload`."""
    kernels: str
    """The kernel set, e.g. `torch`."""
    precision: str
    rows: Annotated[int, Field(ge=1)]
    """Of the micro-batch."""
    sequence_length: Annotated[int, Field(ge=1)]
    forward_seconds: Measured
    backward_seconds: Measured
    """Without recomputation."""
    operator_seconds: dict[str, Seconds] = Field(default_factory=dict)
    """Of the forward, by `OperatorWorkload.label`: medians."""
    head_seconds: Measured | None = None
    """Final norm, output projection and loss of the same rows: forward and backward, the loss head's recomputation included."""
    forward_launch_seconds: Measured | None = None
    """Of the host's one thread that queues the forward's kernels as a run does; None on a CPU, which is itself the device."""
    backward_launch_seconds: Measured | None = None
    """The same of the backward, recomputation included."""


class UpdateRate(_Facts):
    """AdamW as the engine runs it: bf16 or fp32 gradients in, states of one form updated, the working copy out."""

    form: str
    """By `StateForm`'s values."""
    threads: Annotated[int, Field(ge=1)]
    elements_per_second: Measured


class HardwareProfile(_Facts):
    """What one machine does in a second. Rates in bytes per second where nothing else is said; None: there is no such thing here."""

    version: Annotated[int, Field(ge=1, le=PROFILE_VERSION)] = PROFILE_VERSION
    fingerprint: str
    """`HardwareFacts.digest` of the machine with its state directories."""
    date: str
    """ISO 8601, UTC."""
    device: str
    """The device's name."""
    host_to_device: Measured | None = None
    """Page-locked host memory to the GPU, nothing else under way."""
    device_to_host: Measured | None = None
    both_ways: Measured | None = None
    """Of each direction, while the other is as busy."""
    device_memory: Measured
    """Read and written by a copy on the device, together."""
    matmul_flops_per_second: Measured
    """Of a large matrix product in the working precision."""
    host_memory: Measured
    """Read and written by a copy in host memory with all threads, together."""
    ssd_read: Measured | None = None
    """Of all state directories together, with the engine's transfers."""
    ssd_write: Measured | None = None
    ssd_mixed: Measured | None = None
    """Reads and writes together, half and half."""
    commit_seconds: Measured | None = None
    """Syncing the data files of a step and writing its record, when little is left to sync."""
    updates: tuple[UpdateRate, ...] = ()
    gradient_norm: Measured | None = None
    """Gradients read for their norm."""
    checksum: Measured | None = None
    """CRC-32C over a chunk's states."""
    blocks: tuple[BlockTimes, ...] = ()
