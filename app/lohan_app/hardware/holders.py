"""Who has memory on a GPU: trainers of our own runs, told by the sessions they lead, and everybody else."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from lohan.units import format_bytes
from lohan_app.hardware.schemas import GpuUser, GpuUserKind
from lohan_app.settings import Settings
from lohan_app.worker.launcher import RunFiles, TrainerNote

if TYPE_CHECKING:
    from lohan.hardware.probe import GpuFacts, GpuHolder


def run_of(settings: Settings, pid: int) -> str | None:
    """Id of the run whose trainer has started the process, or is it; None for a stranger's.

    A trainer leads a session of its own. What its command line names is believed only where the run's folder names the process too.
    """
    try:
        leader = os.getsid(pid)
        words = psutil.Process(leader).cmdline()
    except (OSError, psutil.Error):
        return None
    for path in map(Path, words):  # the run's configuration, or what is no training gets its folder
        folder = path.parent if path.name == "run.toml" else path
        files = RunFiles(settings.run_folder(folder.name))
        note = TrainerNote.read(files.trainer_note) if folder == files.folder else None
        if note is not None and note.pid == leader:
            return folder.name
    return None


def describe(holder: GpuHolder) -> str:
    """The process in words: its id, and of its program, user and memory what may be seen."""
    known = [holder.name, f"of {holder.user}" if holder.user else "", format_bytes(holder.bytes) if holder.bytes else ""]
    details = ", ".join(part for part in known if part)
    return f"process {holder.pid}" + (f" ({details})" if details else "")


def users_of(settings: Settings, gpu: GpuFacts, reserved: Mapping[str, str]) -> list[GpuUser]:
    """Who uses the GPU; `reserved` has the names of the active runs that have it reserved, by id."""
    found = []
    for holder in gpu.holders:
        run_id = run_of(settings, holder.pid)
        kind = GpuUserKind.OTHER if run_id is None else GpuUserKind.RUN if run_id in reserved else GpuUserKind.ENDING
        name = reserved.get(run_id or "")
        found.append(GpuUser(kind=kind, run_id=run_id, run_name=name, pid=holder.pid, process=describe(holder)))
    at_work = {user.run_id for user in found}
    return found + [GpuUser(kind=GpuUserKind.RUN, run_id=id_, run_name=name) for id_, name in reserved.items() if id_ not in at_work]
