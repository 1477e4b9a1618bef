"""The step record: which step the state files hold, in which slots, and what it takes to go on from there.

One JSON file in the first state directory. One is enough: a rename replaces it as a whole, and the slots that the old one names are
written to only after the new one's directory entry is durable. Every directory also carries an identity, so that none is taken for
another's after a move.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lohan._native import ThreadPool, checksum
from lohan.errors import EngineError, ResumeError, StorageError
from lohan.planning.workload import UnitKind
from lohan.states.preflight import sync
from lohan.states.slots import Part
from lohan.states.streams import Stream

if TYPE_CHECKING:
    from lohan.planning.state_form import StateForm
    from lohan.states.layout import UnitLayout

FOLDER = "lohan-states"
"""The states' folder in each state directory."""
RECORD_VERSION = 1
RECORD_FILE, IDENTITY_FILE = "record.json", "identity.json"


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A committed step."""

    step: int
    """Optimizer updates so far; 0: the weights as they were loaded."""
    payload: Mapping[str, Any]
    """What whoever committed wanted to find again: JSON values."""
    epoch: int = 1
    """How often the states have been opened: 1 until the first resume."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What state files belong to. Paths are not in it: a folder may move."""

    model: str
    """SHA-256 of units and parameters: names, shapes, which are trained."""
    chunks: str
    """SHA-256 of how units are cut into chunks."""
    form: str
    directories: int
    grain: str = "block"
    """What a block moves as: `block` or `module`."""

    @classmethod
    def of(cls, layouts: Sequence[UnitLayout], form: StateForm, directories: int) -> Fingerprint:
        parameters = [[unit.name, [[place.name, place.shape, place.trainable] for place in unit.parameters]] for unit in layouts]
        chunks = [[[chunk.offset, chunk.length] for chunk in unit.chunks] for unit in layouts]
        grain = "module" if any(unit.kind is UnitKind.MODULE for unit in layouts) else "block"
        return cls(_digest(parameters), _digest(chunks), str(form), directories, grain)

    def differences(self, other: Fingerprint) -> str:
        """What `other` has that this one has not, in words; empty where they are alike."""
        found = []
        if self.grain != other.grain:
            found.append(f'engine.grain "{other.grain}" instead of "{self.grain}"')
        elif self.model != other.model:
            found.append("another model, or other parameters of it trained")
        elif self.chunks != other.chunks:
            found.append("chunks of another size")
        if self.form != other.form:
            found.append(f"states in the form {other.form} instead of {self.form}")
        if self.directories != other.directories:
            found.append(f"{other.directories} state directories instead of {self.directories}")
        return ", ".join(found)


class RecordFile:
    """Reads and writes the record and the identities in `folders`, the state directories' own."""

    def __init__(self, folders: Sequence[Path], fingerprint: Fingerprint) -> None:
        self._folders, self._fingerprint = folders, fingerprint
        self.path = folders[0] / RECORD_FILE
        self._identity = ""
        self.epoch = 1

    def begin(self) -> None:
        """Forget an earlier run's record, before its files go, and mark the directories as this run's."""
        for folder in self._folders:
            for name in (RECORD_FILE, IDENTITY_FILE):
                (folder / name).unlink(missing_ok=True)
            _sync(folder)
        self._identity = uuid.uuid4().hex
        for index, folder in enumerate(self._folders):
            _replace(folder / IDENTITY_FILE, json.dumps({"states": self._identity, "directory": index}).encode())

    def files_made(self) -> None:
        """The data files are there: make their entries durable, which syncing the files does not."""
        for folder in self._folders:
            _sync(folder)

    def write(self, step: int, parts: Mapping[Part, tuple[int, int]], payload: Mapping[str, Any]) -> StepRecord:
        """Make this the record. When it returns, the record is durable.

        Raises:
            EngineError: `payload` is not made of JSON values.
            StorageError: the file system refused; which of the two records a reader will find is then open.
        """
        content: dict[str, Any] = {
            "version": RECORD_VERSION,
            "states": self._identity,
            "step": step,
            "epoch": self.epoch,
            "fingerprint": {name: getattr(self._fingerprint, name) for name in Fingerprint.__slots__},
            "parts": [[unit, chunk, str(stream), slot, total] for (unit, chunk, stream), (slot, total) in sorted(parts.items())],
            "payload": dict(payload),
        }
        try:
            text = json.dumps(content, separators=(",", ":"))
        except (TypeError, ValueError) as error:
            raise EngineError(f"the payload of step {step} cannot be written as JSON: {error}", place=str(self.path)) from error
        _replace(self.path, f"{_checksum(text):08x}\n{text}\n".encode())
        return StepRecord(step, content["payload"], self.epoch)

    def read(self) -> tuple[StepRecord, dict[Part, tuple[int, int]]]:
        """The record, its slots and its sums.

        Raises:
            ResumeError: there is none, it is damaged, or belongs to other states.
        """
        content = _read_content(self.path)
        if content is None:
            raise _refused(self.path, "there is no step record")
        try:
            theirs = Fingerprint(**content["fingerprint"])
            parts = {(unit, chunk, Stream(stream)): (slot, total) for unit, chunk, stream, slot, total in content["parts"]}
            record = StepRecord(content["step"], content["payload"], content["epoch"] + 1)
            self._identity = content["states"]
        except (KeyError, TypeError, ValueError) as error:
            raise _damaged(self.path, f"{type(error).__name__}: {error}") from error
        differences = theirs.differences(self._fingerprint)
        if differences:
            raise _refused(self.path, f"the states there belong to something else: this run has {differences}")
        self._check_identities()
        # A trainer that was killed between rename and sync leaves an entry that a power failure could still take back.
        _sync(self.path)
        _sync(self._folders[0])
        self.epoch = record.epoch
        return record, parts

    def _check_identities(self) -> None:
        for index, folder in enumerate(self._folders):
            try:
                found = json.loads((folder / IDENTITY_FILE).read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise ResumeError(
                    "the state directory has no identity: it is empty, or another one",
                    place=str(folder),
                    remedy="Name the directories that the run began with, in their order.",
                ) from error
            if found != {"states": self._identity, "directory": index}:
                raise ResumeError(
                    f"the state directory is not number {index + 1} of the states to resume",
                    place=str(folder),
                    remedy="Name the directories that the run began with, in their order.",
                )


def directory_number(folder: Path) -> int | None:
    """Which of its states' directories `folder` is, counted from 0; None where it does not say."""
    try:
        return int(json.loads((folder / IDENTITY_FILE).read_text(encoding="utf-8"))["directory"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_record(directories: Sequence[Path]) -> StepRecord | None:
    """The step record in these state directories; None where there is none. Whether the states can be used shows when they are opened.

    Raises:
        ResumeError: it is damaged, or of another version.
    """
    return read_record_file(directories[0] / FOLDER / RECORD_FILE)


def read_record_file(path: Path) -> StepRecord | None:
    """As `read_record`, of a record that lies anywhere."""
    content = _read_content(path)
    try:
        return None if content is None else StepRecord(content["step"], content["payload"], content["epoch"])
    except KeyError as error:
        raise _damaged(path, f"it has no {error}") from error


def _read_content(path: Path) -> dict[str, Any] | None:
    try:
        total, _, text = path.read_text(encoding="utf-8").partition("\n")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise _damaged(path, str(error)) from error
    text = text.removesuffix("\n")
    if total != f"{_checksum(text):08x}":
        raise _damaged(path, "its checksum does not fit its text")
    content = json.loads(text or "{}")
    if not isinstance(content, dict) or content.get("version") != RECORD_VERSION:
        raise _refused(path, f"the step record is not of version {RECORD_VERSION}, which this version of lohan reads")
    return content


def _checksum(text: str) -> int:
    return checksum(torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8), pool=ThreadPool(1)) if text else 0


def _damaged(path: Path, why: str) -> ResumeError:
    return _refused(path, f"the step record is damaged: {why}")


def _refused(path: Path, message: str) -> ResumeError:
    return ResumeError(message, place=str(path), remedy="Start the run from the beginning, or name its own state directories.")


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, separators=(",", ":")).encode()).hexdigest()


def _replace(path: Path, content: bytes) -> None:
    """Give `path` this content, durably and as a whole: it has the old one or the new one at any instant."""

    def replace() -> None:
        temporary = path.with_name(path.name + ".tmp")
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)

    _translated(path, replace)
    _sync(path.parent)


def _sync(path: Path) -> None:
    _translated(path, partial(sync, path))


def _translated(path: Path, action: Callable[[], None]) -> None:
    try:
        action()
    except OSError as error:
        remedy = "See to the drive and its free space; the run resumes from its last committed step."
        raise StorageError.of(error, "the step record cannot be made durable", place=path, remedy=remedy) from error
