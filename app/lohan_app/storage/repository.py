"""Queries on what holds space: the rows behind the folders."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from datetime import datetime

from sqlalchemy import select
from sqlalchemy.orm import Session, defer

from lohan_app.entities import TERMINAL_STATES, BaseModel, Dataset, DatasetState, PauseCause, Run, RunKind, RunState, User
from lohan_app.runs.states import ACTIVE_STATES

IDS_PER_QUERY = 500  # both databases bound the number of parameters


def _chunks(ids: Collection[str]) -> Iterator[list[str]]:
    ordered = sorted(ids)
    for start in range(0, len(ordered), IDS_PER_QUERY):
        yield ordered[start : start + IDS_PER_QUERY]


def runs_by_id(session: Session, ids: Collection[str]) -> dict[str, Run]:
    """Those of the runs that the database knows, deleted ones too, without their plans."""
    return {run.id: run for chunk in _chunks(ids) for run in session.scalars(select(Run).options(defer(Run.plan)).where(Run.id.in_(chunk)))}


def datasets_by_id(session: Session, ids: Collection[str]) -> dict[str, Dataset]:
    """Those of the datasets that the database knows, deleted ones too, without their previews."""
    query = select(Dataset).options(defer(Dataset.preview))
    return {dataset.id: dataset for chunk in _chunks(ids) for dataset in session.scalars(query.where(Dataset.id.in_(chunk)))}


def model_names(session: Session) -> dict[str, str]:
    """Names of all base models, deleted ones too, by id."""
    return {row[0]: row[1] for row in session.execute(select(BaseModel.id, BaseModel.name))}


def user_names(session: Session) -> dict[str, str]:
    return {row[0]: row[1] for row in session.execute(select(User.id, User.name))}


def users(session: Session, user_id: str | None = None) -> Sequence[User]:
    """One user, or all."""
    query = select(User)
    return session.scalars(query if user_id is None else query.where(User.id == user_id)).all()


def deletions(session: Session, ids: Collection[str]) -> dict[str, datetime]:
    """When those of the runs and datasets that are deleted were."""
    found: dict[str, datetime] = {}
    for entity in (Run, Dataset):
        for chunk in _chunks(ids):
            rows = session.execute(select(entity.id, entity.deleted_at).where(entity.id.in_(chunk), entity.deleted_at.is_not(None)))
            found |= {row[0]: row[1] for row in rows if row[1] is not None}
    return found


def deleted_runs(session: Session, ids: Collection[str], owner_id: str | None) -> list[tuple[Run, str]]:
    """Those of the runs that are deleted, deleted last first, without their plans, with their owners' names; of all owners for None."""
    query = select(Run, User.name).join(User, User.id == Run.owner_id).options(defer(Run.plan)).where(Run.deleted_at.is_not(None))
    if owner_id is not None:
        query = query.where(Run.owner_id == owner_id)
    found = [(row[0], row[1]) for chunk in _chunks(ids) for row in session.execute(query.where(Run.id.in_(chunk)))]
    return sorted(found, key=lambda pair: (pair[0].deleted_at or pair[0].created_at, pair[0].id), reverse=True)


def unfinished_uploads(session: Session) -> set[str]:
    return set(session.scalars(select(Dataset.id).where(Dataset.state == DatasetState.UPLOADING)))


def waiting_for_states(session: Session, run_ids: Collection[str], *kinds: RunKind) -> set[str]:
    """Those of the runs whose states a retry that has not begun is to be given, or an export has yet to read.

    Args:
        kinds: TRAIN for retries, EXPORT for exports; both where none is named.
    """
    has_not_begun = (Run.attempt == 0) & Run.state.in_([RunState.QUEUED, RunState.PAUSED, RunState.STARTING])
    waits = {RunKind.TRAIN: has_not_begun, RunKind.EXPORT: Run.state.not_in(TERMINAL_STATES)}
    found: set[str] = set()
    for chunk in _chunks(run_ids):
        for kind in kinds or waits:
            query = select(Run.parent_id).where(Run.parent_id.in_(chunk), Run.kind == kind, waits[kind])
            found |= {parent for parent in session.scalars(query) if parent is not None}
    return found


def is_anybody_short_of_space(session: Session, waiting_words: str) -> bool:
    """Whether a full drive has paused a run, or a queued one says `waiting_words`: that it waits for space."""
    paused = (Run.state == RunState.PAUSED) & (Run.pause_cause == PauseCause.DISK_FULL)
    queued = (Run.state == RunState.QUEUED) & Run.state_reason.startswith(waiting_words, autoescape=True)
    return session.scalars(select(Run.id).where(paused | queued).limit(1)).first() is not None


def active_runs(session: Session) -> Sequence[Run]:
    return session.scalars(select(Run).options(defer(Run.plan)).where(Run.state.in_(ACTIVE_STATES))).all()


def owned(session: Session, owner_id: str) -> tuple[Sequence[Run], Sequence[Dataset]]:
    """The user's runs and datasets that are not deleted."""
    runs = session.scalars(select(Run).where(Run.owner_id == owner_id, Run.deleted_at.is_(None))).all()
    datasets = session.scalars(
        select(Dataset).options(defer(Dataset.preview)).where(Dataset.owner_id == owner_id, Dataset.deleted_at.is_(None))
    ).all()
    return runs, datasets
