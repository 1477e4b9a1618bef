"""Keeps profiles: one JSON file for each machine, `<folder>/<fingerprint>.json`. No torch.

A machine here is what one device sees of it: its CPU and memory, that device, and the file systems of the state directories. What is
measured with another GPU, on the CPU alone, or with other drives is another file, and is never taken for this one's.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from lohan.errors import ConfigError, StorageError
from lohan.hardware.profile import PROFILE_VERSION, BlockTimes, HardwareProfile

if TYPE_CHECKING:
    from lohan.hardware.probe import HardwareFacts

_REMEDY = "Measure again: lohan profile --again."


def facts_of_device(facts: HardwareFacts, gpu_uuid: str | None) -> HardwareFacts:
    """The machine as one device sees it: without its other GPUs, without any for the CPU (None)."""
    return facts.model_copy(update={"gpus": tuple(gpu for gpu in facts.gpus if gpu.uuid == gpu_uuid)})


def profile_path(folder: Path, facts: HardwareFacts) -> Path:
    """Where the profile of this machine lies, if it was measured."""
    return folder / f"{facts.digest}.json"


def load_profile(folder: Path, facts: HardwareFacts) -> HardwareProfile | None:
    """The profile of this machine; None where it was never measured.

    Args:
        facts: as the device sees the machine (`facts_of_device`).

    Raises:
        ConfigError: the file is damaged, was written by a newer version, or is another machine's under this one's name.
    """
    path = profile_path(folder, facts)
    profile = read_profile(path)
    if profile is not None and profile.fingerprint != facts.digest:
        raise _unusable(path, "the profile is another machine's")
    return profile


def read_profile(path: Path) -> HardwareProfile | None:
    """The profile in a file; None where there is no such file.

    Raises:
        ConfigError: the file is damaged, or was written by a newer version.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise _unusable(path, f"the profile cannot be read: {error}") from error
    try:
        content = json.loads(text)
    except ValueError as error:
        raise _unusable(path, f"the profile is damaged: it is not JSON ({error})") from error
    version = content.get("version", 1) if isinstance(content, dict) else None
    if isinstance(version, int) and version > PROFILE_VERSION:
        raise _unusable(path, f"the profile has version {version}; this version of lohan reads up to {PROFILE_VERSION}")
    try:
        # As JSON: an integer in place of a string, or a list in place of a tuple, is read as pydantic reads JSON.
        return HardwareProfile.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "file"
        raise _unusable(path, f"the profile is damaged: {where}: {first['msg']}") from error


def save_profile(folder: Path, profile: HardwareProfile) -> Path:
    """Write a profile in place of this machine's earlier one; a reader finds the old one or the new one, never a part.

    Returns:
        The file's path.

    Raises:
        StorageError: the folder cannot be made or written to; an earlier profile is left as it is.
    """
    path = folder / f"{profile.fingerprint}.json"
    unfinished: Path | None = None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=folder, prefix=f".{path.name}.")
        unfinished = Path(name)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(profile.model_dump_json(indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(path)
        unfinished = None
        _sync_folder(folder)
    except OSError as error:
        remedy = "Free space, or name a folder this user may write to (--profiles)."
        raise StorageError.of(error, "the profile cannot be kept", place=path, remedy=remedy) from error
    finally:
        if unfinished is not None:
            with suppress(OSError):
                unfinished.unlink()
    return path


def find_block(
    profile: HardwareProfile, *, workload_digest: str, kernels: str, precision: str, rows: int, sequence_length: int
) -> BlockTimes | None:
    """What was measured of a model's block in this shape; None where it was not."""
    wanted = (workload_digest, kernels, precision, rows, sequence_length)
    return next((block for block in profile.blocks if _key(block) == wanted), None)


def with_blocks(profile: HardwareProfile, measured: Iterable[BlockTimes]) -> HardwareProfile:
    """The profile with these blocks, each in place of an earlier measurement of the same model, kernels, precision and shape."""
    blocks = {_key(block): block for block in (*profile.blocks, *measured)}
    return profile.model_copy(update={"blocks": tuple(blocks.values())})


def _key(block: BlockTimes) -> tuple[str, str, str, int, int]:
    return (block.workload_digest, block.kernels, block.precision, block.rows, block.sequence_length)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unusable(path: Path, message: str) -> ConfigError:
    return ConfigError(message, place=str(path), remedy=_REMEDY)
