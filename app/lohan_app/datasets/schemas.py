"""What the API gives about datasets."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pydantic import BaseModel, ConfigDict

from lohan_app.entities import DatasetFormat, DatasetState


class _Reply(BaseModel):
    model_config = ConfigDict(from_attributes=True)


class DatasetView(_Reply):
    id: str
    owner_id: str
    name: str
    state: DatasetState
    format: DatasetFormat | None
    size_bytes: int
    sha256: str
    row_count: int
    """Rows that can be used."""
    bad_row_count: int
    problem: dict[str, Any] | None
    """`{kind, message, place, remedy}` where the state is `invalid`."""
    progress: float
    """How far the validation is, 0 to 1."""
    created_at: datetime
    validated_at: datetime | None


class DatasetDetail(DatasetView):
    preview: dict[str, Any] | None
    """`{"rows": [{"line", "messages": [{"role", "content"}]}]}`: the first usable rows."""


class RowErrorView(_Reply):
    """A row that cannot be used."""

    line: int
    """1-based line of the file."""
    message: str
    excerpt: str
    """The line's beginning."""
