"""Who has memory on a GPU: trainers of our own runs, told by the sessions they lead, and everybody else."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from lohan.hardware.probe import GpuHolder
from lohan.units import format_bytes
from lohan_app.settings import Settings
from lohan_app.worker.launcher import RunFiles, TrainerNote


def run_of(settings: Settings, pid: int) -> str | None:
    """Id of the run whose trainer has started the process, or is it; None for a stranger's.

    A trainer leads a session of its own. What its command line names is believed only where the run's folder names the process too.
    """
    try:
        leader = os.getsid(pid)
        words = psutil.Process(leader).cmdline()
    except (OSError, psutil.Error):
        return None
    for folder in (Path(word).parent for word in words if Path(word).name == "run.toml"):
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
