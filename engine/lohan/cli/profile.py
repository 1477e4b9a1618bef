"""`lohan profile`: measures the machine, keeps what was measured, and shows it. Loads torch only when it is called."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lohan.cli.measuring import errors_in_words, terminated_in_order
from lohan.errors import ConfigError, StorageError

if TYPE_CHECKING:
    import torch

    from lohan.hardware.probe import HardwareFacts
    from lohan.hardware.profile import HardwareProfile
    from lohan.profiling.progress import OnProgress

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


def profile(
    directory: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FOLDER",
            envvar="LOHAN_STATE_DIRS",
            help="Where states will lie; again for more drives. Unset: states in the data folder.",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or a GPU's UUID.")] = "auto",
    profiles: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where profiles are kept. Unset: profiles in the data folder.")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure what was measured before, too.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="In a few seconds, roughly; measured anew by the next call without it.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile as JSON.")] = False,
) -> None:
    """Measure how fast this machine copies, computes, updates, reads and writes; plans go by it."""
    from lohan.bench.show import stdout_kept_clean
    from lohan.cli.show_profile import print_profile, shown_progress

    with errors_in_words():
        failure: StorageError | None = None
        with terminated_in_order(), stdout_kept_clean(), shown_progress() as on_progress:
            request = _request(directory, device, profiles, again=again, quick=quick)
            result, is_new = _machine(request, on_progress)
            if is_new:
                failure = _save(request.folder, result)
        if as_json:
            print(result.model_dump_json(indent=2))
        else:
            print_profile(result, is_new=is_new)
        if failure is not None:
            raise failure


def _request(directories: list[Path] | None, device: str, profiles: Path | None, *, again: bool, quick: bool) -> _Request:
    """Check what was asked for, and look at the machine.

    Raises:
        ConfigError: a folder that does not exist, or a device that does not.
    """
    from lohan.hardware.probe import probe

    for folder in directories or ():
        if not folder.is_dir():
            raise ConfigError("there is no such folder", place=f"--directory {folder}", remedy="Name a folder that exists.")
    # As the service has it, which is not asked: it is not part of the engine.
    data = Path(os.environ.get("LOHAN_DATA_DIR", "data")).absolute()
    places = tuple(folder.absolute() for folder in directories or (data / "states",))
    resolved = _resolve(device)
    return _Request(
        directories=places,
        folder=profiles or data / "profiles",
        device=resolved,
        facts=_facts(probe(places), resolved),
        again=again,
        quick=quick,
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
        state_directories=request.directories,
        on_progress=on_progress,
        effort=QUICK if request.quick else THOROUGH,
    )
    return with_blocks(measured, earlier.blocks if earlier is not None else ()), True


def _save(folder: Path, result: HardwareProfile) -> StorageError | None:
    """Keep the profile; what went wrong, so that what was measured is shown all the same."""
    from lohan.hardware.profile_files import save_profile

    try:
        save_profile(folder, result)
    except StorageError as error:
        return error
    return None
