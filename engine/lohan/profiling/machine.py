"""Measures a machine: its links, its memory, its processors and its drives."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lohan._native import ThreadPool
from lohan.errors import CapacityError, StorageError
from lohan.hardware.profile import HardwareProfile
from lohan.planning.state_form import StateForm
from lohan.profiling.device import measure_copies, measure_device_memory, measure_matmul
from lohan.profiling.drives import measure_commit, measure_drives
from lohan.profiling.host import HostMeasurements, torch_threads
from lohan.profiling.progress import Meter, OnProgress
from lohan.profiling.timing import THOROUGH, Effort
from lohan.streaming.choices import choose_threads

if TYPE_CHECKING:
    from lohan.hardware.probe import HardwareFacts

# Of a figure, for its memory and its warm-up: only until the first is measured, then the time left follows what they took.
_START_SECONDS = 0.3
NO_GPU = "There is no GPU: nothing is copied to one or back, and the device's memory is the host's."
NO_DIRECTORIES = "No state directory is named: reading, writing and commits are not measured."


@dataclass(frozen=True)
class _Stage:
    """One or several figures that are measured together."""

    what: str
    figures: int
    """How many it measures one after the other."""
    measure: Callable[[], Mapping[str, Any]]
    """Returns fields of the profile."""
    needed: bool = True
    """Whether there is no profile without."""


def measure_machine(
    facts: HardwareFacts,
    *,
    device: torch.device,
    state_directories: Sequence[Path] = (),
    threads: int = 0,
    on_progress: OnProgress | None = None,
    effort: Effort = THOROUGH,
) -> HardwareProfile:
    """Measure everything a `HardwareProfile` has, but for blocks (`measure_model`). Takes about 15 seconds with `THOROUGH`.

    Args:
        facts: of the machine as the device sees it (`facts_of_device`), with the state directories.
        device: what blocks are to be computed on.
        state_directories: what is written to, a bounded amount; those of `facts`.
        threads: of the CPU; 0 takes what a run does: `choose_threads` for the native core, and torch's own number for torch.
        on_progress: is told of every stage, and why a figure is missing.
        effort: how long is measured.

    Returns:
        A profile without blocks. What cannot be measured here is None.

    Raises:
        CapacityError: host or GPU have too little memory free for figures that no profile goes without.
    """
    pool = ThreadPool(choose_threads(threads))
    fields: dict[str, Any] = {}
    stages = list(_stages(facts, device, state_directories, pool, effort))
    meter = Meter([stage.figures * (effort.seconds + _START_SECONDS) for stage in stages], on_progress)
    with torch_threads(threads or torch.get_num_threads()):
        for stage in stages:
            meter.begin(stage.what)
            try:
                measured = dict(stage.measure())
            except torch.OutOfMemoryError as error:
                raise _no_gpu_memory(device) from error
            except (CapacityError, StorageError, MemoryError) as error:
                if stage.needed:
                    raise
                meter.note(f"Not measured: {stage.what}: {error}")
                measured = {}
            for note in measured.pop("notes", ()):
                meter.note(note)
            fields["updates"] = fields.get("updates", ()) + measured.pop("updates", ())
            fields |= measured
            meter.end()
    if device.type != "cuda":
        fields["device_memory"] = fields["host_memory"]
        meter.note(NO_GPU)
    if not state_directories:
        meter.note(NO_DIRECTORIES)
    return HardwareProfile(
        fingerprint=facts.digest,
        date=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else facts.cpu.name,
        **fields,
    )


def is_rough(profile: HardwareProfile) -> bool:
    """Whether a machine was measured with less than `THOROUGH`."""
    return profile.host_memory.repetitions < THOROUGH.repetitions


def working_type(facts: HardwareFacts, device: torch.device) -> torch.dtype:
    """What a device computes in where nothing else is asked for: bf16, or fp32 on a CPU without instructions for bf16."""
    return torch.bfloat16 if device.type == "cuda" or facts.cpu.multiplies_bf16 else torch.float32


def _stages(
    facts: HardwareFacts, device: torch.device, state_directories: Sequence[Path], pool: ThreadPool, effort: Effort
) -> Iterator[_Stage]:
    free_bytes = facts.ram.free_bytes
    host = HostMeasurements(pool, effort, free_bytes=free_bytes)
    compute_type = working_type(facts, device)
    if device.type == "cuda":

        def copies() -> Mapping[str, Any]:
            names = ("host_to_device", "device_to_host", "both_ways")
            return dict(zip(names, measure_copies(device, effort, free_host_bytes=free_bytes), strict=True))

        yield _Stage("copies between host and GPU", 3, copies, needed=False)
        yield _Stage("the GPU's memory", 1, lambda: {"device_memory": measure_device_memory(device, effort)})
    free = None if device.type == "cuda" else free_bytes
    yield _Stage(
        "matrix products",
        1,
        lambda: {"matmul_flops_per_second": measure_matmul(device, compute_type, effort, free_bytes=free)},
    )
    yield _Stage("host memory", 1, lambda: {"host_memory": host.memory()})
    for form in StateForm:
        yield _Stage(f"AdamW, states {form}", 1, partial(_update, host, form))
    yield _Stage("gradient norm", 1, lambda: {"gradient_norm": host.gradient_norm(compute_type)})
    yield _Stage("checksums", 1, lambda: {"checksum": host.checksum()})
    if state_directories:
        yield _Stage("state directories", 4, partial(_drives, state_directories, effort, free_bytes), needed=False)
        yield _Stage("commits", 1, lambda: {"commit_seconds": measure_commit(state_directories, effort)}, needed=False)


def _update(host: HostMeasurements, form: StateForm) -> Mapping[str, Any]:
    return {"updates": (host.update(form),)}


def _drives(directories: Sequence[Path], effort: Effort, free_bytes: int) -> Mapping[str, Any]:
    speeds = measure_drives(directories, effort, free_host_bytes=free_bytes)
    return {"ssd_read": speeds.read, "ssd_write": speeds.write, "ssd_mixed": speeds.mixed, "notes": speeds.notes}


def _no_gpu_memory(device: torch.device) -> CapacityError:
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return CapacityError(
        "the GPU's memory was taken by somebody else during the measurement",
        need_bytes=0,
        have_bytes=int(free_bytes),
        place=str(device),
        remedy="Free the GPU, and measure again.",
    )
