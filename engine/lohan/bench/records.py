"""What every benchmark writes: the machine, and one record a measurement. What could not run is a record with the reason."""

from __future__ import annotations

import datetime as dt
import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from lohan.errors import ConfigError, StorageError
from lohan.hardware.probe import probe
from lohan.profiling.timing import PAUSE_SECONDS

SCHEMA = 1

Record = dict[str, Any]


class Watcher(Protocol):
    """Is told how far a benchmark is."""

    def expect(self, measurements: int) -> None:
        """So many measurements are still to come."""

    def note(self, what: str) -> None:
        """Something that takes long begins."""

    def done(self, what: str) -> None:
        """One of them has been made; `what` says which, and what came out."""


def machine(directories: Sequence[Path] = ()) -> Record:
    """What the figures were measured on; nothing that names a person, a host or a folder.

    Args:
        directories: those that were written to; their file systems are named.
    """
    facts = probe(directories)
    result: Record = {
        "cpu": facts.cpu.name,
        "cores": facts.cpu.usable_cores,
        "ram_bytes": facts.ram.total_bytes,
        "gpus": [gpu.name for gpu in facts.gpus],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
    }
    if directories:
        result["filesystems"] = [directory.filesystem for directory in facts.state_directories]
    return result


def document(name: str, records: Sequence[Record], *, directories: Sequence[Path] = ()) -> Record:
    """The JSON document of a benchmark: schema, name, date, machine, records."""
    return {
        "schema": SCHEMA,
        "name": name,
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "machine": machine(directories),
        "records": list(records),
    }


def as_json(content: Record) -> str:
    """A document as text, ending with a newline."""
    return json.dumps(content, indent=1) + "\n"


def write_document(path: Path, content: Record) -> None:
    """Write a document to a file, and make its folder.

    Raises:
        StorageError: the folder or the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(as_json(content), encoding="utf-8")
    except OSError as error:
        remedy = "Name a file in a folder this user may write to."
        raise StorageError.of(error, "the results cannot be written", place=path, remedy=remedy) from error


# What of a machine makes figures of two documents comparable.
_SAME_MACHINE = ("cpu", "cores", "gpus", "python", "torch")


def appended(path: Path, content: Record, *, key: Sequence[str]) -> Record:
    """`content` joined to the document in `path`: its records behind those that are there, in place of those with the same `key` fields.

    Raises:
        ConfigError: what is there is no such document, or was measured on another machine.
    """
    if not path.exists():
        return content
    place = f"--output {path}"
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        there, machine = before["records"], before["machine"]
        same_kind = (before["schema"], before["name"]) == (content["schema"], content["name"])
    except (OSError, ValueError, TypeError, KeyError):
        same_kind = False
    if not same_kind:
        raise ConfigError(
            f"it holds no results of bench {content['name']}", place=place, remedy="Name another file, or leave --append out."
        )
    other = [name for name in _SAME_MACHINE if machine.get(name) != content["machine"].get(name)]
    if other:
        raise ConfigError(
            f"its results are of another machine: {', '.join(other)} differ", place=place, remedy="Name another file for this machine."
        )
    new = {tuple(record.get(name) for name in key) for record in content["records"]}
    kept = [record for record in there if tuple(record.get(name) for name in key) not in new]
    filesystems = dict.fromkeys([*machine.get("filesystems", []), *content["machine"].get("filesystems", [])])
    joined = {**content["machine"], **({"filesystems": list(filesystems)} if filesystems else {})}
    return {**content, "machine": joined, "records": [*kept, *content["records"]]}


def interleaved(systems: Mapping[str, Callable[[], object]], *, rounds: int, watcher: Watcher) -> dict[str, list[float]]:
    """Seconds of each call, `rounds` of them, taken in turns so that a machine that speeds up or slows down does so for all.

    One warm-up round is dropped. Each round begins with another system, so that none always runs after the same one.
    """
    names = list(systems)
    watcher.expect(len(names) * (rounds + 1))
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        first = turn % len(names) if names else 0
        for name in names[first:] + names[:first]:
            time.sleep(PAUSE_SECONDS)
            begin = time.perf_counter()
            systems[name]()
            elapsed = time.perf_counter() - begin
            if turn:
                seconds[name].append(elapsed)
            watcher.done(f"{name}, {f'round {turn} of {rounds}' if turn else 'warm-up'}: {elapsed:.3f} s")
    return seconds


def median(values: Sequence[float]) -> float:
    return statistics.median(values)
