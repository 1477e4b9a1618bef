"""Queries on datasets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

from sqlalchemy import CursorResult, delete, select, update
from sqlalchemy.orm import Session, defer

from lohan_app.entities import TERMINAL_STATES, Dataset, DatasetRowError, DatasetState, Run


def get(session: Session, dataset_id: str) -> Dataset | None:
    """The dataset, unless it is deleted."""
    found = session.get(Dataset, dataset_id)
    return found if found is not None and found.deleted_at is None else None


def get_locked(session: Session, dataset_id: str) -> Dataset | None:
    """The same, held until the transaction ends: a submission and a deletion at once take turns (SQLite has one writer anyway)."""
    return session.scalar(select(Dataset).where(Dataset.id == dataset_id, Dataset.deleted_at.is_(None)).with_for_update())


def list_datasets(session: Session, *, owner_id: str | None, after: str | None, limit: int) -> Sequence[Dataset]:
    """Newest first, without their previews; of all owners where `owner_id` is None."""
    query = select(Dataset).options(defer(Dataset.preview)).where(Dataset.deleted_at.is_(None)).order_by(Dataset.id.desc()).limit(limit)
    if owner_id is not None:
        query = query.where(Dataset.owner_id == owner_id)
    if after is not None:
        query = query.where(Dataset.id < after)
    return session.scalars(query).all()


def row_errors(session: Session, dataset_id: str, *, after_line: int, limit: int) -> Sequence[DatasetRowError]:
    return session.scalars(
        select(DatasetRowError)
        .where(DatasetRowError.dataset_id == dataset_id, DatasetRowError.line > after_line)
        .order_by(DatasetRowError.line)
        .limit(limit)
    ).all()


def replace_row_errors(session: Session, dataset_id: str, errors: Iterable[dict[str, Any]]) -> None:
    session.execute(delete(DatasetRowError).where(DatasetRowError.dataset_id == dataset_id))
    session.add_all(DatasetRowError(dataset_id=dataset_id, **error) for error in errors)


def move(session: Session, dataset_id: str, *, source: DatasetState, **values: Any) -> bool:
    """Change a dataset that is still in `source` and not deleted; whether it was."""
    result = session.execute(
        update(Dataset).where(Dataset.id == dataset_id, Dataset.state == source, Dataset.deleted_at.is_(None)).values(**values)
    )
    return cast("CursorResult[Any]", result).rowcount == 1


def remove(session: Session, dataset_id: str) -> None:
    """Forget a dataset that never came to be: its upload did not finish."""
    session.execute(delete(Dataset).where(Dataset.id == dataset_id, Dataset.state == DatasetState.UPLOADING))


def unfinished_uploads(session: Session) -> Sequence[str]:
    return session.scalars(select(Dataset.id).where(Dataset.state == DatasetState.UPLOADING)).all()


def runs_using(session: Session, dataset_id: str) -> Sequence[str]:
    """Ids of the runs that still need the dataset."""
    return session.scalars(select(Run.id).where(Run.dataset_id == dataset_id, Run.state.not_in(TERMINAL_STATES))).all()
