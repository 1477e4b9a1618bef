"""`lohan profile`: measures the machine, and a model's block on it, keeps that, and shows it. Loads torch only when it is called."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lohan.cli.commands import CODE_OF, Attempt, job_errors_in_words
from lohan.cli.data_folder import ProfileFolder, StateDirectories, profile_folder, state_directories
from lohan.cli.measuring import errors_in_words, terminated_in_order
from lohan.cli.profile_job import run_profile_job
from lohan.config import KernelSet, Precision
from lohan.errors import ConfigError, StorageError

if TYPE_CHECKING:
    import torch

    from lohan.hardware.probe import HardwareFacts
    from lohan.hardware.profile import HardwareProfile
    from lohan.profiling.progress import OnProgress

_ROWS, _QUICK_ROWS = (1, 2, 4, 8), (1,)
# For the shapes of a model that nobody named: on two cores the head alone takes seconds a row.
_MOST_SECONDS = 40.0
_OF_DRIVES = ("ssd_read", "ssd_write", "ssd_mixed", "commit_seconds")
_DEVICE = re.compile(r"auto|cpu(:\d+)?|cuda(:\d+)?|GPU-[0-9a-f-]+")


@dataclass(frozen=True)
class _Request:
    """What was asked for, checked."""

    directories: tuple[Path, ...]
    folder: Path
    device: torch.device
    facts: HardwareFacts
    again: bool
    quick: bool
    drives: bool


@dataclass(frozen=True)
class _Model:
    """Whose block is measured, and in which shapes."""

    name: str
    config: Any
    digest: str
    """Of its workload."""
    rows: tuple[int, ...]
    may_be_left_out: bool
    """Whether shapes that take long are left out: nobody asked for them."""
    sequence_length: int
    precision: Precision
    kernels: tuple[KernelSet, ...]


def profile(
    model: Annotated[
        Path | None,
        typer.Argument(metavar="[MODEL]", help="Measure one block of this model, too: a Hugging Face folder, or a GGUF file."),
    ] = None,
    directory: StateDirectories = None,
    rows: Annotated[
        str | None, typer.Option(metavar="N,N", help="Rows of MODEL's micro-batches. Unset: 1,2,4,8, as far as a minute goes.")
    ] = None,
    sequence: Annotated[int, typer.Option("--seq", min=1, help="Tokens of a row.")] = 1024,
    precision: Annotated[
        Precision | None, typer.Option(help="Of MODEL's block. Unset: bf16, or fp32 on a CPU without bf16 instructions.")
    ] = None,
    kernels: Annotated[
        list[KernelSet] | None,
        typer.Option(help="What computes MODEL's norms, activations and rotary positions; may be repeated. Unset: all."),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or a GPU's UUID.")] = "auto",
    profiles: ProfileFolder = None,
    again: Annotated[bool, typer.Option("--again", help="Measure what was measured before, too.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="In a few seconds, roughly; measured anew by the next call without it.")] = False,
    drives: Annotated[bool, typer.Option("--drives/--no-drives", help="Whether reading, writing and commits are measured.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile as JSON.")] = False,
    job: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Print nothing: FOLDER/events.jsonl says how far it is, as in a run's folder.")
    ] = None,
    attempt: Attempt = None,
) -> None:
    """Measure how fast this machine copies, computes, updates, reads and writes, and how long a block of MODEL takes."""
    from lohan.bench.show import stdout_kept_clean
    from lohan.cli.show_profile import print_profile, shown_progress

    if job is not None:
        request_of = partial(_request, directory, device, profiles, again=again, quick=quick, drives=drives)
        with job_errors_in_words(job):
            reason = run_profile_job(
                job, partial(_measure_for_job, request_of, (model, rows, sequence, precision, kernels)), attempt=attempt
            )
        raise typer.Exit(CODE_OF[reason])
    with errors_in_words():
        failure: StorageError | None = None
        with terminated_in_order(), stdout_kept_clean(), shown_progress() as on_progress:
            if model is None and (rows is not None or precision is not None or kernels):
                option = "--rows" if rows is not None else "--precision" if precision is not None else "--kernels"
                raise ConfigError("it is of a model's block, and there is no MODEL", place=option, remedy="Name a model folder.")
            request = _request(directory, device, profiles, again=again, quick=quick, drives=drives)
            wanted = None if model is None else _model(model, request, rows, sequence, precision, kernels)
            result, is_new = _machine(request, on_progress)
            if is_new:
                failure = _save(request.folder, result)
            if wanted is not None:
                with_model = _with_model(request, wanted, result, on_progress)
                if with_model is not result:
                    result, failure = with_model, _save(request.folder, with_model)
        if as_json:
            print(result.model_dump_json(indent=2))
        else:
            print_profile(result, is_new=is_new, models={} if wanted is None else {wanted.digest: wanted.name})
        if failure is not None:
            raise failure


def _measure_for_job(
    request_of: Callable[[], _Request],
    about_model: tuple[Path | None, str | None, int, Precision | None, list[KernelSet] | None],
    on_progress: OnProgress,
    say_started: Callable[[str, int], None],
) -> None:
    """A `lohan.cli.profile_job.Measure`; raises what the command would print."""
    request, path = request_of(), about_model[0]
    wanted = None if path is None else _model(path, request, *about_model[1:])
    say_started(str(request.device), 1 + (len(wanted.kernels) if wanted is not None else 0))
    result, _ = _machine(request, on_progress)
    failure = _save(request.folder, result)
    if failure is None and wanted is not None:
        failure = _save(request.folder, _with_model(request, wanted, result, on_progress))
    if failure is not None:
        raise failure


def _request(directories: list[Path] | None, device: str, profiles: Path | None, *, again: bool, quick: bool, drives: bool) -> _Request:
    """Check what was asked for, and look at the machine.

    Raises:
        ConfigError: a folder that does not exist, or a device that does not.
    """
    from lohan.hardware.probe import probe

    for folder in directories or ():
        if not folder.is_dir():
            raise ConfigError("there is no such folder", place=f"--directory {folder}", remedy="Name a folder that exists.")
    places = state_directories(directories)
    resolved = _resolve(device)
    return _Request(
        directories=places,
        folder=profile_folder(profiles),
        device=resolved,
        facts=_facts(probe(places), resolved),
        again=again,
        quick=quick,
        drives=drives,
    )


def _resolve(device: str) -> torch.device:
    from lohan.streaming.device import resolve_device

    if _DEVICE.fullmatch(device) is None:
        raise ConfigError(f"device is {device!r}", place="--device", remedy="Use auto, cpu, cuda, cuda:N or a GPU's UUID.")
    try:
        return resolve_device(device)
    except ConfigError as error:
        raise ConfigError(error.message, place="--device", remedy=error.remedy) from error


def _facts(facts: HardwareFacts, device: torch.device) -> HardwareFacts:
    """The machine as the device sees it."""
    import torch

    from lohan.hardware.profile_files import facts_of_device

    if device.type != "cuda":
        return facts_of_device(facts, None)
    # torch gives the UUID without the prefix that NVML and nvidia-smi put before it.
    seen = facts_of_device(facts, f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    if not seen.gpus:
        raise ConfigError(
            f"{device} is none of the GPUs that NVIDIA's management library lists, so that its profile could not be found again",
            place="--device",
            remedy="See what `nvidia-smi -L` lists, and that nvidia-ml-py is installed.",
        )
    return seen


def _machine(request: _Request, on_progress: OnProgress) -> tuple[HardwareProfile, bool]:
    """The machine's profile, and whether it was measured just now. Blocks that were measured earlier stay in it."""
    from lohan.hardware.profile_files import load_profile, with_blocks

    try:
        earlier = load_profile(request.folder, request.facts)
    except ConfigError:
        if not request.again:
            raise
        earlier = None  # it cannot be read, and is replaced
    from lohan.profiling.machine import is_rough, measure_machine
    from lohan.profiling.timing import QUICK, THOROUGH

    if earlier is not None and not request.again and (request.quick or not is_rough(earlier)):
        return earlier, False

    measured = measure_machine(
        request.facts,
        device=request.device,
        state_directories=request.directories if request.drives else (),
        on_progress=on_progress,
        effort=QUICK if request.quick else THOROUGH,
    )
    if earlier is not None and not request.drives:
        measured = measured.model_copy(update={name: getattr(earlier, name) for name in _OF_DRIVES})
    return with_blocks(measured, earlier.blocks if earlier is not None else ()), True


def _model(
    path: Path, request: _Request, rows: str | None, sequence: int, precision: Precision | None, kernels: list[KernelSet] | None
) -> _Model:
    """Check what was asked for of a model, and look at it.

    Raises:
        ConfigError: rows that are no numbers, or longer than the model's context, or kernels that cannot run on the device.
        ModelError: the model cannot be used.
    """
    import torch

    from lohan.models.blocks import trace_workload
    from lohan.models.kernels import resolve_kernels, usable_kernels
    from lohan.models.load import load_config
    from lohan.profiling.machine import working_type

    default = _QUICK_ROWS if request.quick else _ROWS
    config = load_config(path)
    workload = trace_workload(config)
    if sequence > workload.context_length:
        raise ConfigError(
            f"rows of {sequence} tokens cannot be measured: the model's context is {workload.context_length}",
            place="--seq",
            remedy=f"Give at most {workload.context_length}.",
        )
    own = Precision.BF16 if working_type(request.facts, request.device) is torch.bfloat16 else Precision.FP32
    return _Model(
        name=path.absolute().name,
        config=config,
        digest=workload.digest,
        rows=default if rows is None else _parse_rows(rows),
        may_be_left_out=rows is None,
        sequence_length=sequence,
        precision=precision or own,
        kernels=tuple(dict.fromkeys(resolve_kernels(one, request.device) for one in kernels))
        if kernels
        else usable_kernels(request.device),
    )


def _parse_rows(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[1-9][0-9]{0,3}", part) for part in parts):
        raise ConfigError(
            f"{text!r} is no list of numbers of rows", place="--rows", remedy="Give 1 to 9999, with commas between, e.g. 1,2,4,8."
        )
    return tuple(sorted({int(part) for part in parts}))


def _with_model(request: _Request, model: _Model, machine: HardwareProfile, on_progress: OnProgress) -> HardwareProfile:
    """The profile with the model's block in the shapes and with the kernels that were asked for; the same one where it has them already."""
    from lohan.hardware.profile_files import find_block
    from lohan.profiling.model import REPETITIONS, measure_model

    repetitions = 1 if request.quick else REPETITIONS
    for kernels in model.kernels:
        find = partial(
            find_block,
            machine,
            workload_digest=model.digest,
            kernels=str(kernels),
            precision=model.precision.value,
            sequence_length=model.sequence_length,
        )
        known = {rows: find(rows=rows) for rows in model.rows}
        missing = [
            rows for rows, block in known.items() if request.again or block is None or block.forward_seconds.repetitions < repetitions
        ]
        if missing:
            machine = measure_model(
                machine,
                model.config,
                rows_list=missing,
                length=model.sequence_length,
                precision=model.precision,
                device=request.device,
                kernels=kernels,
                repetitions=repetitions,
                most_seconds=_MOST_SECONDS if model.may_be_left_out else None,
                on_progress=on_progress,
            )
    return machine


def _save(folder: Path, result: HardwareProfile) -> StorageError | None:
    """Keep the profile; what went wrong, so that what was measured is shown all the same."""
    from lohan.hardware.profile_files import save_profile

    try:
        save_profile(folder, result)
    except StorageError as error:
        return error
    return None
