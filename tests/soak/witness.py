"""Watches what must never be, while it would be: two trainers on a run's folder, and a run that leaves or enters success twice."""

from __future__ import annotations

import threading
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Self

from sqlalchemy import Engine, text

from lohan_app.db import read_transaction, write_transaction
from lohan_app.worker.processes import start_ticks
from tests.soak.victims import run_id_in

LOOK_SECONDS = 0.1


class TrainerWitness:
    """Looks at the process table and at the trainers' lock files ten times a second, in a thread of its own."""

    def __init__(self, runs_folder: Path) -> None:
        self.meetings: list[str] = []
        """What it saw that must not be, in words."""
        self.looks = 0
        self._runs_folder = runs_folder
        self._locks: dict[str, int] = {}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._done.wait(LOOK_SECONDS):
            self._look()

    def _look(self) -> None:
        self.looks += 1
        for run_id, pids in self._trainers().items():
            # Between the first and the last that was read one may have ended: only those that live at one moment have met.
            alive = [pid for pid in pids if start_ticks(pid) is not None]
            if len(alive) > 1:
                self.meetings.append(f"{run_id}: processes {alive} train at the same time")
        for lock in self._runs_folder.glob("*/trainer.lock"):
            with suppress(FileNotFoundError):
                inode, run_id = lock.stat().st_ino, lock.parent.name
                if self._locks.setdefault(run_id, inode) != inode:
                    self.meetings.append(f"{run_id}: its trainer.lock was replaced")

    def _trainers(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = defaultdict(list)
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with suppress(OSError):
                command = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                if "--attempt" in command and any(word.startswith(str(self._runs_folder)) for word in command):
                    found[run_id_in(command) or "?"].append(int(entry.name))
        return found

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        has_looked_on = self._thread.is_alive()
        self._done.set()
        self._thread.join()
        assert has_looked_on, "the witness fell over; its traceback is above"


_INSERT = "INSERT INTO soak_transitions (run_id, source, target) VALUES (NEW.id, OLD.state, NEW.state)"
_COLUMNS = "run_id TEXT, source TEXT, target TEXT"
_CHANGE = "AFTER UPDATE OF state ON runs"
_AUDIT = {
    "sqlite": (
        f"CREATE TABLE soak_transitions (number INTEGER PRIMARY KEY AUTOINCREMENT, {_COLUMNS})",
        f"CREATE TRIGGER soak_transition {_CHANGE} WHEN OLD.state <> NEW.state BEGIN {_INSERT}; END",
    ),
    "postgresql": (
        f"CREATE TABLE soak_transitions (number BIGSERIAL PRIMARY KEY, {_COLUMNS})",
        f"CREATE FUNCTION soak_transition() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {_INSERT}; RETURN NULL; END $$",
        f"CREATE TRIGGER soak_transition {_CHANGE} FOR EACH ROW WHEN (OLD.state <> NEW.state) EXECUTE FUNCTION soak_transition()",
    ),
}


def audit_transitions(engine: Engine) -> None:
    """Have the database itself write down every change of a run's state, in the transaction that makes it."""
    with write_transaction(engine) as session:
        for statement in _AUDIT[engine.dialect.name]:
            session.execute(text(statement))


def transitions(engine: Engine) -> dict[str, list[tuple[str, str]]]:
    """(source, target) of each change, by run, in order."""
    found: dict[str, list[tuple[str, str]]] = defaultdict(list)
    with read_transaction(engine) as session:
        for run_id, source, target in session.execute(text("SELECT run_id, source, target FROM soak_transitions ORDER BY number")):
            found[run_id].append((source, target))
    return found
