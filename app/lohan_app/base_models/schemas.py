"""What the API takes and gives about base models."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from lohan_app.entities import BaseModelSource, BaseModelState


class BaseModelRequest(BaseModel):
    """A model to register: one of `GET /base-models/available`."""

    model_config = ConfigDict(extra="forbid")

    source: BaseModelSource
    root: Annotated[str, Field(max_length=4096)] = ""
    """One of LOHAN_MODEL_DIRS, as `available` gives it; empty for the sample."""
    name: Annotated[str, Field(max_length=255)] = ""
    """A folder or GGUF file in `root`; empty for the sample."""


class BaseModelView(BaseModel):
    model_config = ConfigDict(from_attributes=True)

    id: str
    name: str
    source: BaseModelSource
    root: str
    path_in_root: str
    state: BaseModelState
    architecture: str
    parameters: int
    context_length: int
    """Tokens."""
    problem: dict[str, Any] | None
    """`{kind, message, place, remedy}` where the state is `invalid`."""
    created_at: datetime


class AvailableModel(BaseModel):
    """Something that can be registered."""

    source: BaseModelSource
    root: str
    name: str
    registered_id: str | None = None
    """Set where it is registered already."""
