"""Finds the processes of an appliance by what they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from fixtures.processes import commands_of, processes_of

from tests.soak.schedule import Victim

_BROKERS = ("valkey-server", "redis-server")


@dataclass(frozen=True, slots=True)
class Found:
    """A living process."""

    victim: Victim
    process: psutil.Process
    run_id: str | None = None
    """Whose supervisor or trainer it is."""


def find(folder: Path, victim: Victim) -> list[Found]:
    """Those of the appliance on the data folder `folder`, oldest first."""
    if victim is Victim.BROKER:
        # It writes its title over its command line and environment; its working folder stays.
        found = [Found(victim, process) for process in processes_of(folder) if _name(process) in _BROKERS]
    else:
        found = list(_by_command(folder, victim))
    return sorted(found, key=lambda one: one.process.pid)


def _by_command(folder: Path, victim: Victim) -> Iterator[Found]:
    for process in commands_of(folder):
        with suppress(psutil.Error):
            command = process.cmdline()
            if _kind(command, process) is victim:
                yield Found(victim, process, run_id_in(command))


def _kind(command: list[str], process: psutil.Process) -> Victim | None:
    words = set(command)
    if {"train", "--attempt"} <= words:
        return Victim.TRAINER
    if "lohan_app.worker.supervisor" in words:
        return Victim.SUPERVISOR
    if any("spawn_main" in word for word in command):
        return Victim.POOL_CHILD if _is_celery(process.parent()) else None
    if "celery" in words:
        return Victim.CELERY
    if "lohan_app.worker.web" in words or {"lohan_app.cli", "web"} <= words:
        return Victim.WEB
    if "lohan_app.worker.main" in words or {"lohan_app.cli", "worker"} <= words:
        return Victim.WORKER
    return Victim.UP if {"lohan_app.cli", "up"} <= words else None


def _is_celery(process: psutil.Process | None) -> bool:
    with suppress(psutil.Error):
        return process is not None and "celery" in process.cmdline()
    return False


def run_id_in(command: list[str]) -> str | None:
    """The run that a supervisor's or trainer's command line names."""
    for word in reversed(command):
        for part in Path(word).parts:
            if part.startswith("run_"):
                return part
    return None


def _name(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return process.name()
    return ""
