"""A training run's states are read by its exports, and never while a trainer writes them: who waits for whom."""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy.orm import Session

from lohan_app.entities import Run, RunKind
from lohan_app.runs.states import ACTIVE_STATES
from lohan_app.settings import Settings
from lohan_app.worker.launcher import RunFiles
from lohan_app.worker.processes import holder_of, is_held


def why_it_waits(session: Session, settings: Settings, run: Run, exports: Mapping[str, Run]) -> str | None:
    """Why a queued run may not touch the states that it needs yet; None where it may.

    Args:
        exports: `repository.unfinished_exports`.
    """
    if run.kind is RunKind.EXPORT:
        source = session.get(Run, run.parent_id)
        if source is not None and source.state in ACTIVE_STATES:
            return f"Waits for {source.name!r}, which is at work on the states that are to be exported."
        lock = RunFiles(settings.run_folder(run.parent_id or "")).trainer_lock
        return f"Waits for process {holder_of(lock) or '(unknown)'}, which works with the states." if is_held(lock) else None
    if run.kind is not RunKind.TRAIN:
        return None
    # A retry that has not begun gets its parent's states.
    export = exports.get(run.id) or (exports.get(run.parent_id or "") if run.attempt == 0 else None)
    return None if export is None else f"Waits for {export.name!r} ({export.state}), which reads the states that it goes on from."
