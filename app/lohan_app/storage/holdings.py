"""The measured folders with the rows behind them: whose each is, and when it expires."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from sqlalchemy.orm import Session

from lohan_app.entities import TERMINAL_STATES, Dataset, Run, RunKind
from lohan_app.settings import Settings
from lohan_app.storage import repository
from lohan_app.storage.report import RUN_ID, Held, Kind, StorageReport, named
from lohan_app.storage.retention import Rules, rules_of, states_expiry, trash_expiry
from lohan_app.storage.schemas import Drive, Holding, TrashedRun


def trashed(session: Session, settings: Settings, report: StorageReport | None, owner_id: str | None) -> list[TrashedRun]:
    """Deleted runs whose folders are in the trash, of one owner or of all: one look at the trash, no walk."""
    ids = {run_id for run_id, _ in named(settings.data_dir / "trash", RUN_ID)}
    sizes = {item.id: item.bytes for item in (report.items if report is not None else ()) if item.kind is Kind.TRASH}
    rules = rules_of(settings)
    return [
        TrashedRun(
            id=run.id,
            name=run.name,
            owner_id=run.owner_id,
            owner_name=owner_name,
            state=str(run.state),
            deleted_at=run.deleted_at,
            emptied_at=trash_expiry(run.deleted_at, rules).at,
            bytes=sizes.get(run.id),
        )
        for run, owner_name in repository.deleted_runs(session, ids, owner_id)
        if run.deleted_at is not None and not (run.kind is RunKind.CHAT and run.parent_id in ids)  # those are restored with it
    ]


@dataclass(frozen=True, slots=True)
class _Rows:
    """What the database knows of the measured ids."""

    runs: Mapping[str, Run]
    datasets: Mapping[str, Dataset]
    models: Mapping[str, str]
    users: Mapping[str, str]
    promised: frozenset[str]
    """Runs whose states a retry is about to get."""


def holdings(session: Session, settings: Settings, report: StorageReport) -> list[Holding]:
    """Everything that was measured, largest first. States that are gone since are left out: one look each, no walk."""
    items = [item for item in report.items if item.bytes and (item.kind is not Kind.STATES or Path(item.path).is_dir())]
    ids = {item.id for item in items}
    runs = repository.runs_by_id(session, ids)
    rows = _Rows(
        runs=runs,
        datasets=repository.datasets_by_id(session, ids),
        models=repository.model_names(session),
        users=repository.user_names(session),
        promised=frozenset(repository.waiting_for_states(session, runs)),
    )
    rules = rules_of(settings)
    return sorted((_holding(item, rows, rules) for item in items), key=lambda holding: (-holding.bytes, holding.id, holding.place))


def _holding(item: Held, rows: _Rows, rules: Rules) -> Holding:
    plain = Holding(kind=item.kind, id=item.id, place=item.place, bytes=item.bytes)
    if item.kind is Kind.MODEL:
        name = rows.models.get(item.id)
        return plain.model_copy(update={"name": name, "is_known": name is not None})
    row = rows.runs.get(item.id) or rows.datasets.get(item.id)
    if row is None:
        return plain.model_copy(update={"is_known": False})
    owned = {"name": row.name, "owner_id": row.owner_id, "owner_name": rows.users.get(row.owner_id), "state": str(row.state)}
    return plain.model_copy(update=owned | _fate(item.kind, row, rows, rules))


def _fate(kind: Kind, row: Run | Dataset, rows: _Rows, rules: Rules) -> dict[str, datetime | str | bool | None]:
    if kind is Kind.TRASH and row.deleted_at is not None and isinstance(row, Run):
        expiry = trash_expiry(row.deleted_at, rules)
        return {"expires_at": expiry.at, "why": expiry.why}
    if kind is not Kind.STATES or not isinstance(row, Run):
        return {}
    if row.id in rows.promised:
        return {"why": "a retry or an export that waits needs them"}
    states = states_expiry(row, rules)
    if states is None:
        return {"why": "the run goes on from them"}
    return {"expires_at": states.at, "why": states.why, "can_free": row.state in TERMINAL_STATES}


def drives(settings: Settings, active: Iterable[Run]) -> list[Drive]:
    """Every file system once, as it is now; one that cannot be looked at says why."""
    folders = [*settings.state_folders, settings.data_dir]
    promised = [run.reserved_space for run in active if run.step == 0]
    found: dict[object, Drive] = {}
    for index, folder in enumerate(folders):
        holds_states = index < len(settings.state_folders)
        drive = found.setdefault(_device(folder), _look(folder))
        if str(folder) not in drive.directories:
            drive.directories.append(str(folder))
        drive.reserve_bytes = settings.state_reserve_bytes
        drive.reserved_bytes += sum(space.get(str(folder), 0) for space in promised) if holds_states else 0
    return list(found.values())


def _device(folder: Path) -> object:
    try:
        return os.stat(folder).st_dev  # noqa: PTH116 - a name that is not there is a place of its own
    except OSError:
        return folder


def _look(folder: Path) -> Drive:
    empty = Drive(directories=[str(folder)], total_bytes=0, free_bytes=0, reserve_bytes=0, reserved_bytes=0)
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        return empty.model_copy(update={"problem": f"{error.strerror}: is the drive mounted?"})
    return empty.model_copy(update={"total_bytes": usage.total, "free_bytes": usage.free})
