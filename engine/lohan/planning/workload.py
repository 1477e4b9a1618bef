"""What a model asks for, as data: units, their parameters, and the bytes one token keeps alive.

A `Workload` is traced once, when a model is registered (`lohan.models.blocks.trace_workload`), and stored as JSON, so that planning
needs neither torch nor the model.
"""

from __future__ import annotations

import hashlib
from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

WORKLOAD_VERSION = 1


class UnitKind(StrEnum):
    EMBEDDING = "embedding"
    """The input embedding; with tied weights it is the head's matrix too."""
    BLOCK = "block"
    MODULE = "module"
    """A part of a block, where blocks are cut into their modules."""
    HEAD = "head"
    """Final norm and output projection (the norm alone where the projection is tied)."""


class UnitWorkload(BaseModel):
    """Parameters that move together."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    kind: UnitKind
    parameters: Annotated[int, Field(ge=1)]
    elements: Annotated[int, Field(ge=0)] = 0
    """In a slot, the padding between parameters included; 0 in workloads that were traced before it was counted."""

    @property
    def slot_elements(self) -> int:
        return self.elements or self.parameters


class ModuleWorkload(BaseModel):
    """The model cut at its blocks' modules."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    units: tuple[UnitWorkload, ...]
    saved_elements_per_token: Annotated[int, Field(ge=1)]
    """Of the part of a block that saves most while it is recomputed."""
    boundaries_per_block: Annotated[int, Field(ge=1)]
    """Inputs of regions, each as large as the block's input."""


class Workload(BaseModel):
    """A model's needs. Sizes are in elements; bytes follow from the precision a plan chooses."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Annotated[int, Field(ge=1, le=WORKLOAD_VERSION)] = WORKLOAD_VERSION
    architecture: str
    """`model_type` of the Hugging Face config."""
    units: tuple[UnitWorkload, ...]
    hidden_size: Annotated[int, Field(ge=1)]
    vocabulary_size: Annotated[int, Field(ge=1)]
    context_length: Annotated[int, Field(ge=1)]
    tied_embeddings: bool
    block_saved_elements_per_token: Annotated[int, Field(ge=1)]
    """Elements autograd saves for one token while one block is recomputed: the peak between two boundaries."""
    modules: ModuleWorkload | None = None
    """None where the blocks cannot be cut, and in workloads that were traced before they could."""

    @property
    def parameters(self) -> int:
        return sum(unit.parameters for unit in self.units)

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()
