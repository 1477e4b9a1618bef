"""`lohan gc`: who holds what on the drives, what has expired, and its removal; the same that the worker does by itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from enum import StrEnum
from pathlib import Path

from sqlalchemy.exc import DBAPIError

from lohan.units import format_bytes
from lohan_app.db import create_db_engine, read_transaction
from lohan_app.entities.base import now
from lohan_app.errors import Unavailable
from lohan_app.settings import Settings
from lohan_app.storage import repository
from lohan_app.storage.holdings import drives, holdings
from lohan_app.storage.report import Kind, StorageReport
from lohan_app.storage.schemas import Drive, Holding
from lohan_app.worker.housekeeping import Due, Housekeeper, remove_path
from lohan_app.worker.launcher import RunFiles
from lohan_app.worker.processes import is_held

IDLE = timedelta(hours=1)
"""Something unknown that was written to within this time belongs to somebody, perhaps to another installation on the same drive."""


class Mode(StrEnum):
    LOOK = "look"
    """Say what would be removed."""
    REMOVE = "remove"


def run_gc(settings: Settings, mode: Mode, *, with_unknown: bool, as_json: bool, say: Callable[[str], None] = print) -> None:
    """Measure, remove what has expired unless only looking, and print who holds what.

    Raises:
        Unavailable: the database does not answer, or has not been made; nothing was removed.
    """
    settings.make_folders()
    engine = create_db_engine(settings)
    try:
        housekeeper = Housekeeper(settings, engine)
        report = housekeeper.measure()
        sizes = {item.path: item.bytes for item in report.items}
        due = housekeeper.due() if mode is Mode.LOOK else housekeeper.remove_due()
        with read_transaction(engine) as session:
            unknown = _idle_unknown(settings, holdings(session, settings, report), report) if with_unknown else []
        for _, path in unknown if mode is Mode.REMOVE else ():
            remove_path(path)
        with read_transaction(engine) as session:
            found = holdings(session, settings, housekeeper.measure())
            drive_list = drives(settings, repository.active_runs(session))
    except DBAPIError as error:
        first_line = (str(error.orig).splitlines() or [""])[0]
        remedy = "Start it, or run `lohan migrate` where it has not been made; `lohan doctor` says more."
        raise Unavailable(f"the database does not answer: {first_line}", remedy=remedy) from error
    finally:
        engine.dispose()
    removed = [_line(thing, sizes) for thing in due] + [
        {"kind": item.kind, "id": item.id, "bytes": item.bytes, "why": "the database does not know it"} for item, _ in unknown
    ]
    if as_json:
        say(_json(mode, removed, found, drive_list))
        return
    for line in _text(mode, removed, found, drive_list):
        say(line)


def _line(thing: Due, sizes: dict[str, int]) -> dict[str, object]:
    size = sum(sizes.get(str(path), 0) for path in thing.paths)
    return {"kind": thing.kind, "id": thing.id, "bytes": size, "why": thing.why}


def _idle_unknown(settings: Settings, found: Sequence[Holding], report: StorageReport) -> list[tuple[Holding, Path]]:
    """What the database does not know, except models, which take little, and what is in use: written to lately, or held by a trainer."""
    unknown = {(item.kind, item.id, item.place): item for item in found if not item.is_known and item.kind is not Kind.MODEL}
    pairs = [(unknown[key], Path(held.path)) for held in report.items if (key := (held.kind, held.id, held.place)) in unknown]
    locks = {item.id: RunFiles(settings.run_folder(item.id)).trainer_lock for item, _ in pairs}
    return [(item, path) for item, path in pairs if _is_idle(path) and not is_held(locks[item.id])]


def _is_idle(path: Path) -> bool:
    before = (now() - IDLE).timestamp()
    try:
        return all(each.lstat().st_mtime < before for each in (path, *path.rglob("*")))
    except OSError:
        return False


def _json(mode: Mode, removed: list[dict[str, object]], found: Sequence[Holding], drive_list: Sequence[Drive]) -> str:
    document = {
        "mode": mode,
        "removed" if mode is Mode.REMOVE else "would_remove": removed,
        "drives": [drive.model_dump(mode="json") for drive in drive_list],
        "holdings": [item.model_dump(mode="json") for item in found],
    }
    return json.dumps(document, indent=2)


def _text(mode: Mode, removed: list[dict[str, object]], found: Sequence[Holding], drive_list: Sequence[Drive]) -> list[str]:
    lines = []
    for drive in drive_list:
        names = ", ".join(drive.directories)
        room = f"{format_bytes(drive.free_bytes)} free of {format_bytes(drive.total_bytes)}, {format_bytes(drive.reserved_bytes)} promised"
        lines.append(f"{names}: {drive.problem or room}")
    lines += ["", "Held:" if found else "Nothing is held."]
    lines += [f"  {format_bytes(item.bytes):>10}  {item.kind:<9}  {_whose(item)}" for item in found]
    verb = "Removed" if mode is Mode.REMOVE else "Would remove"
    lines += ["", f"{verb}:" if removed else f"{verb} nothing: nothing has expired."]
    lines += [f"  {format_bytes(int(str(line['bytes']))):>10}  {line['kind']:<9}  {line['id']}: {line['why']}" for line in removed]
    return lines


def _whose(item: Holding) -> str:
    if not item.is_known:
        return f"{item.id}, unknown to the database, in {item.place} (lohan gc --unknown removes it)"
    until = f", until {item.expires_at:%Y-%m-%d %H:%M} UTC" if item.expires_at is not None else ""
    why = f": {item.why}" if item.why else ""
    name = ascii(item.name) if item.name else item.id
    owner = f" of {item.owner_name}" if item.owner_name else ""
    state = f", {item.state}" if item.state else ""
    return f"{name}{owner}{state} ({item.id}){until}{why}"
