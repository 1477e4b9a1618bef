"""Uploaded datasets and the rows of them that cannot be used."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import BigInteger, ForeignKey, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from lohan_app.entities.base import Entity, Id, new_id, now, text_enum


class DatasetFormat(StrEnum):
    MESSAGES = "messages"
    ALPACA = "alpaca"
    PROMPT_COMPLETION = "prompt_completion"


class DatasetState(StrEnum):
    UPLOADING = "uploading"
    VALIDATING = "validating"
    READY = "ready"
    """Every row can be used."""
    HAS_BAD_ROWS = "has_bad_rows"
    """Some rows cannot be used; a run takes the others only where its owner says so."""
    INVALID = "invalid"
    """No row can be used, or the file is not JSONL; `problem` says why."""


class Dataset(Entity):
    """A file under `<data>/datasets/<id>/rows.jsonl`."""

    __tablename__ = "datasets"

    id: Mapped[str] = mapped_column(Id, primary_key=True, default=lambda: new_id("dataset"))
    owner_id: Mapped[str] = mapped_column(ForeignKey("users.id"), index=True)
    name: Mapped[str] = mapped_column(String(255))
    state: Mapped[DatasetState] = mapped_column(text_enum(DatasetState))
    format: Mapped[DatasetFormat | None] = mapped_column(text_enum(DatasetFormat))
    size_bytes: Mapped[int] = mapped_column(BigInteger, default=0)
    sha256: Mapped[str] = mapped_column(String(64), default="")
    row_count: Mapped[int] = mapped_column(default=0)
    bad_row_count: Mapped[int] = mapped_column(default=0)
    problem: Mapped[dict[str, Any] | None]
    """`LohanError.to_dict()` where the state is `invalid`."""
    preview: Mapped[dict[str, Any] | None]
    """`{"rows": [{"line": int, "messages": [{"role", "content"}]}]}`: the first usable rows, as the model sees them."""
    progress: Mapped[float] = mapped_column(default=0.0)
    created_at: Mapped[datetime] = mapped_column(default=now)
    validated_at: Mapped[datetime | None]
    deleted_at: Mapped[datetime | None]


class DatasetRowError(Entity):
    """One bad row; the first 1,000 of a dataset are kept, `bad_row_count` counts all."""

    __tablename__ = "dataset_row_errors"

    dataset_id: Mapped[str] = mapped_column(ForeignKey("datasets.id", ondelete="CASCADE"), primary_key=True)
    line: Mapped[int] = mapped_column(primary_key=True)
    message: Mapped[str] = mapped_column(Text)
    excerpt: Mapped[str] = mapped_column(Text, default="")
