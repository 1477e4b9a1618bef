"""Removes what has expired and measures what is left; the reconciler and `lohan gc` call it.

What a run has left is only touched under its row's lock, and only by a rename on its own drive; the slow part, removing what was renamed,
needs no lock, may be killed at any point and is gone on with at the next call. Doing it twice changes nothing.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from lohan_app.db import read_transaction, write_transaction
from lohan_app.entities import Run
from lohan_app.entities.base import now
from lohan_app.runs.repository import forget_words, lock_run
from lohan_app.settings import Settings
from lohan_app.storage import repository
from lohan_app.storage.report import DATASET_ID, PART, RUN_ID, TRASH_ID, Kind, StorageReport, measure, named, report_path
from lohan_app.storage.retention import Rules, rules_of, states_expiry, trash_expiry
from lohan_app.worker.launcher import RunFiles
from lohan_app.worker.processes import is_held, write_atomically
from lohan_app.worker.reservations import WAITS_FOR_SPACE
from lohan_app.worker.run_files import move_deleted_to_trash, put_aside_states, put_aside_trash, remove_put_aside
from lohan_app.worker.waiting import HEADROOM_BYTES

logger = logging.getLogger(__name__)

MEASURE_SECONDS = 60.0
"""How old a measurement may get: walking over tens of thousands of files takes a fraction of a second."""
UPLOAD_GRACE = timedelta(days=1)
"""A file that arrives is written to all the time; one that nobody has touched for so long, and no row waits for, was left over."""


@dataclass(frozen=True, slots=True)
class Due:
    """Something that has expired."""

    kind: Kind
    id: str
    paths: tuple[Path, ...]
    """States lie on several drives."""
    why: str


def remove_path(path: Path) -> None:
    """A file, or a folder with all in it; what is left of a folder is gone on with another time."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


class Housekeeper:
    """Its `remove_due` costs a look at a few folders' names and one query where nothing has expired."""

    def __init__(self, settings: Settings, engine: Engine) -> None:
        self._settings, self._engine = settings, engine
        self._rules: Rules = rules_of(settings)
        self._measured_at: float | None = None
        self._has_looked_for_leftovers = False

    # ------------------------------------------------------------ what has expired
    def due(self) -> list[Due]:
        """What may be removed now, in the order in which it is; nothing is changed."""
        moment = now()
        with read_transaction(self._engine) as session:
            return [*self._due_states(session, moment), *self._due_trash(session, moment), *self._due_uploads(session, moment)]

    def _due_states(self, session: Session, moment: datetime) -> Iterator[Due]:
        found: dict[str, list[Path]] = {}
        for folder in self._settings.state_folders:
            for run_id, path in named(folder, RUN_ID):
                found.setdefault(run_id, []).append(path)
        runs = repository.runs_by_id(session, found)
        promised = repository.waiting_for_states(session, runs)
        for run_id, run in runs.items():
            expiry = states_expiry(run, self._rules)
            if expiry is not None and expiry.is_due(moment) and run_id not in promised:
                yield Due(Kind.STATES, run_id, tuple(found[run_id]), expiry.why)

    def _due_trash(self, session: Session, moment: datetime) -> Iterator[Due]:
        found = list(named(self._settings.data_dir / "trash", TRASH_ID))
        if not found:
            return
        deleted = repository.deletions(session, {item_id for item_id, _ in found})
        gives_way = repository.is_anybody_short_of_space(session, WAITS_FOR_SPACE) or self._is_data_folder_short()
        for item_id, path in found:
            if item_id not in deleted:
                continue  # unknown: reported, and left alone
            if DATASET_ID.fullmatch(item_id):
                yield Due(Kind.TRASH, item_id, (path,), "the dataset was deleted")
            elif gives_way:
                yield Due(Kind.TRASH, item_id, (path,), "its room is needed")
            elif trash_expiry(deleted[item_id], self._rules).is_due(moment):
                yield Due(Kind.TRASH, item_id, (path,), "the run was deleted")

    def _due_uploads(self, session: Session, moment: datetime) -> Iterator[Due]:
        found = list(named(self._settings.data_dir / "uploads", PART))
        expected = repository.unfinished_uploads(session) if found else set()
        for dataset_id, path in found:
            with suppress(FileNotFoundError):
                touched = datetime.fromtimestamp(path.stat().st_mtime, tz=moment.tzinfo)
                if dataset_id not in expected and touched < moment - UPLOAD_GRACE:
                    yield Due(Kind.UPLOAD, dataset_id, (path,), "its upload did not finish")

    def _is_data_folder_short(self) -> bool:
        return shutil.disk_usage(self._settings.data_dir).free < HEADROOM_BYTES

    # ------------------------------------------------------------ removing it
    def remove_due(self) -> list[Due]:
        """Remove what has expired; what was removed."""
        if not self._has_looked_for_leftovers:
            self._move_deleted_to_trash()
            self._has_looked_for_leftovers = True
        removed = [thing for thing in self.due() if self._remove(thing)]
        for thing in removed:
            logger.info("%s of %s removed: %s", thing.kind, thing.id, thing.why)
        if remove_put_aside(self._settings) or removed:
            self._measured_at = None
        return removed

    def _remove(self, thing: Due) -> bool:
        if thing.kind is Kind.STATES:
            return self._put_aside(thing.id)
        if thing.kind is Kind.TRASH and RUN_ID.fullmatch(thing.id):
            return self._put_trash_aside(thing.id)
        for path in thing.paths:
            remove_path(path)
        return True

    def _put_aside(self, run_id: str) -> bool:
        """Asked again under the row's lock: a retry that came meanwhile gets the states, and nothing goes that is in use."""
        if is_held(RunFiles(self._settings.run_folder(run_id)).trainer_lock):
            return False
        with write_transaction(self._engine) as session:
            run = lock_run(session, run_id)
            if run is None or not self._is_still_due(session, run):
                return False
            return put_aside_states(self._settings, run_id)

    def _put_trash_aside(self, run_id: str) -> bool:
        """Asked again under the row's lock: a run that was restored meanwhile keeps what it has."""
        with write_transaction(self._engine) as session:
            run = lock_run(session, run_id)
            if run is None or run.deleted_at is None or not put_aside_trash(self._settings, run_id):
                return False
            forget_words(session, run)
            return True

    def _is_still_due(self, session: Session, run: Run) -> bool:
        expiry = states_expiry(run, self._rules)
        return expiry is not None and expiry.is_due(now()) and not repository.waiting_for_states(session, [run.id])

    def _move_deleted_to_trash(self) -> None:
        """Whoever deleted a run may have been killed before it came to the folder."""
        found = {run_id for run_id, _ in named(self._settings.data_dir / "runs", RUN_ID)}
        with read_transaction(self._engine) as session:
            deleted = repository.deletions(session, found)
        for run_id in deleted:
            with write_transaction(self._engine) as session:
                move_deleted_to_trash(session, self._settings, run_id)

    # ------------------------------------------------------------ measuring
    def measure_when_old(self) -> None:
        """Write down how much lies where, if that is not known or a minute old."""
        if self._measured_at is None or time.monotonic() >= self._measured_at + MEASURE_SECONDS:
            self.measure()

    def measure(self) -> StorageReport:
        report = measure(self._settings)
        write_atomically(report_path(self._settings), report.model_dump_json().encode())
        self._measured_at = time.monotonic()
        return report
