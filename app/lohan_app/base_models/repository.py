"""Queries on base models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from sqlalchemy import CursorResult, select, update
from sqlalchemy.orm import Session, defer

from lohan_app.entities import TERMINAL_STATES, BaseModel, BaseModelSource, BaseModelState, Run


def get(session: Session, base_model_id: str) -> BaseModel | None:
    """The model, unless it is deleted."""
    found = session.get(BaseModel, base_model_id)
    return found if found is not None and found.deleted_at is None else None


def get_locked(session: Session, base_model_id: str) -> BaseModel | None:
    """The same, held until the transaction ends: a submission and a deletion at once take turns."""
    return session.scalar(select(BaseModel).where(BaseModel.id == base_model_id, BaseModel.deleted_at.is_(None)).with_for_update())


def list_models(session: Session, *, with_workloads: bool = False) -> Sequence[BaseModel]:
    """Newest first; their workloads are loaded only where they are asked for."""
    query = select(BaseModel).where(BaseModel.deleted_at.is_(None)).order_by(BaseModel.id.desc())
    return session.scalars(query if with_workloads else query.options(defer(BaseModel.workload))).all()


def find(session: Session, *, source: BaseModelSource, root: str, path_in_root: str) -> BaseModel | None:
    return session.scalar(
        select(BaseModel).where(
            BaseModel.source == source, BaseModel.root == root, BaseModel.path_in_root == path_in_root, BaseModel.deleted_at.is_(None)
        )
    )


def name_is_taken(session: Session, name: str) -> bool:
    return session.scalar(select(BaseModel.id).where(BaseModel.name == name, BaseModel.deleted_at.is_(None))) is not None


def finish_inspection(session: Session, base_model_id: str, **values: Any) -> bool:
    """Store the verdict on a model that is still being inspected; whether it was."""
    result = session.execute(
        update(BaseModel)
        .where(BaseModel.id == base_model_id, BaseModel.state == BaseModelState.INSPECTING, BaseModel.deleted_at.is_(None))
        .values(**values)
    )
    return cast("CursorResult[Any]", result).rowcount == 1


def runs_using(session: Session, base_model_id: str) -> Sequence[str]:
    """Ids of the runs that still need the model."""
    return session.scalars(select(Run.id).where(Run.base_model_id == base_model_id, Run.state.not_in(TERMINAL_STATES))).all()
