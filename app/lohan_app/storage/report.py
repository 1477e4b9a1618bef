"""How much lies where: measured by the reconciler now and then, kept as one file that pages, REST and quotas read.

Folders are named by ids that the service makes. What has another name is none of ours, and is neither counted nor touched; symbolic links
are never followed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from enum import StrEnum
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from lohan_app.entities.base import now
from lohan_app.settings import Settings

RUN_ID = re.compile(r"run_[0-9a-f]{32}")
DATASET_ID = re.compile(r"dataset_[0-9a-f]{32}")
MODEL_ID = re.compile(r"model_[0-9a-f]{32}")
TRASH_ID = re.compile(r"(?:run|dataset)_[0-9a-f]{32}")
ASIDE = re.compile(r"\.trash-(run_[0-9a-f]{32})-[0-9a-f]{8}")
"""States that are being removed: renamed on their own drive first, so that a run has all of its states or none."""
PART = re.compile(r"(dataset_[0-9a-f]{32})\.part")
BLOCK_BYTES = 512  # of st_blocks, whatever the file system's blocks are


class Kind(StrEnum):
    """What holds space."""

    STATES = "states"
    """A run's master weights and moments, on one drive."""
    EXPORT = "export"
    """A run's result."""
    RUN_FILES = "run_files"
    """A run's prepared rows, events and logs."""
    DATASET = "dataset"
    UPLOAD = "upload"
    """A file that is arriving, or was."""
    MODEL = "model"
    """A base model's configuration and tokenizer; its weights stay where the administrator has them."""
    TRASH = "trash"


class Held(BaseModel):
    """So much in one place."""

    model_config = ConfigDict(frozen=True)

    kind: Kind
    id: str
    """Of the run, dataset or model."""
    place: str
    """The state directory, or the data folder."""
    path: str
    bytes: int


class StorageReport(BaseModel):
    """Everything that is held, and when that was measured."""

    model_config = ConfigDict(frozen=True)

    measured_at: datetime
    items: tuple[Held, ...]


def occupied_bytes(path: Path) -> int:
    """What a file, or a folder with all in it, takes of its drive; links count as links, and what vanishes meanwhile as nothing."""
    total = 0
    with suppress(OSError):
        total += BLOCK_BYTES * path.lstat().st_blocks
    for parent, folders, files in os.walk(path):
        for name in (*folders, *files):
            with suppress(OSError):
                total += BLOCK_BYTES * Path(parent, name).lstat().st_blocks
    return total


def named(folder: Path, pattern: re.Pattern[str]) -> Iterator[tuple[str, Path]]:
    """(id, path) of what lies in `folder` under a name that `pattern` takes whole; links are left out, a missing folder has nothing."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        match = pattern.fullmatch(entry.name)
        if match is not None and not entry.is_symlink():
            yield match[match.lastindex or 0], Path(entry.path)


def measure(settings: Settings) -> StorageReport:
    """Walk over everything. Takes as long as there are files: for the reconciler and the command line, never for a request."""
    started = now()
    return StorageReport(measured_at=started, items=tuple(_items(settings)))


def _items(settings: Settings) -> Iterator[Held]:
    for folder in settings.state_folders:
        for kind, pattern in ((Kind.STATES, RUN_ID), (Kind.TRASH, ASIDE)):
            for run_id, path in named(folder, pattern):
                yield Held(kind=kind, id=run_id, place=str(folder), path=str(path), bytes=occupied_bytes(path))
    data = settings.data_dir
    for run_id, path in named(data / "runs", RUN_ID):
        export = occupied_bytes(path / "export")
        yield Held(kind=Kind.RUN_FILES, id=run_id, place=str(data), path=str(path), bytes=occupied_bytes(path) - export)
        if export:
            yield Held(kind=Kind.EXPORT, id=run_id, place=str(data), path=str(path / "export"), bytes=export)
    rooms = (("datasets", Kind.DATASET, DATASET_ID), ("uploads", Kind.UPLOAD, PART), ("models", Kind.MODEL, MODEL_ID))
    for room, kind, pattern in (*rooms, ("trash", Kind.TRASH, TRASH_ID)):
        for item_id, path in named(data / room, pattern):
            yield Held(kind=kind, id=item_id, place=str(data), path=str(path), bytes=occupied_bytes(path))


def report_path(settings: Settings) -> Path:
    return settings.data_dir / "cache" / "storage.json"


def read_report(settings: Settings) -> StorageReport | None:
    """What was measured last; None where nothing was, or the file is damaged: it is measured again within a minute."""
    try:
        return StorageReport.model_validate_json(report_path(settings).read_bytes())
    except (OSError, ValidationError):
        return None
