"""What a model asks for, as data: units, their parameters, and the bytes one token keeps alive.

A `Workload` is traced once, when a model is registered (`lohan.models.blocks.trace_workload`), and stored as JSON, so that planning
needs neither torch nor the model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from enum import StrEnum
from functools import cached_property
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from lohan.config import KernelSet

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
    """In a slot, the padding between parameters included; 0: as many as parameters."""

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


class Coefficients(BaseModel):
    """A quantity of one block that depends on the rows and their length: fixed + per_token x T + per_token_and_length x T x length, where
    T = rows x length."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    fixed: FiniteFloat = 0.0
    per_token: FiniteFloat = 0.0
    per_token_and_length: FiniteFloat = 0.0

    def at(self, rows: int, length: int) -> float:
        """The quantity for `rows` rows of `length` tokens."""
        tokens = rows * length
        return self.fixed + self.per_token * tokens + self.per_token_and_length * tokens * length


class OperatorGroup(StrEnum):
    """What an operator's time depends on."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    OTHER = "other"
    """Its traffic with the device's memory."""


class OperatorWorkload(BaseModel):
    """One operator of a block's forward, as it is dispatched to the device."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    label: str
    """What plan, engine and profile call it: see `lohan.models.operators`."""
    group: OperatorGroup
    flops: Coefficients
    """Of its forward; a multiplication and an addition are two."""
    output_elements: Coefficients
    """Of all its outputs that a backward may need, in the working precision: fp32 counts twice."""
    traffic_elements: Coefficients
    """Read and written, in the working precision."""
    can_be_kept: bool
    """Whether its outputs may stand in for it: it draws no random numbers, its outputs are no views, nothing writes to them, and it is in
    runs of both precisions, with a mask and without. Keeping them saves its own time and no other's: its inputs are computed again where
    anything else uses them, its backward included. Autograd need not save them for that."""
    is_recomputed: bool = True
    """Whether a recomputation gets as far as this operator: it ends when autograd has all that it saved."""


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

    operators: tuple[OperatorWorkload, ...] = ()
    """Of one block as the model has it, in the order of its forward; none in workloads that were traced before they were counted, or whose
    block cannot be traced by itself."""
    fused_operators: tuple[OperatorWorkload, ...] = ()
    """The same with the fused operators of the other kernel sets; none where those change nothing."""
    fused_saved_elements_per_token: Annotated[int, Field(ge=0)] = 0
    """`block_saved_elements_per_token` with fused operators; 0 where those change nothing."""
    head_flops_per_token: Annotated[FiniteFloat, Field(ge=0)] = 0.0
    """Of the output projection's forward."""

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """As pydantic's; what was derived from this one is derived again."""
        copied = super().model_copy(update=update, deep=deep)
        for name in ("parameters", "blocks", "digest"):
            copied.__dict__.pop(name, None)
        return copied

    @cached_property
    def parameters(self) -> int:
        return sum(unit.parameters for unit in self.units)

    @cached_property
    def blocks(self) -> int:
        """How many blocks the model has."""
        return sum(unit.kind is UnitKind.BLOCK for unit in self.units)

    def operators_of(self, kernels: str) -> tuple[OperatorWorkload, ...]:
        """Of one block that computes with this kernel set."""
        return self.operators if kernels == KernelSet.TORCH else self.fused_operators or self.operators

    def saved_elements_of(self, kernels: str) -> int:
        """That a block which computes with this kernel set saves, per token; of `auto`, which may become any, the most."""
        if kernels in (KernelSet.TORCH, KernelSet.AUTO):
            return self.block_saved_elements_per_token
        return self.fused_saved_elements_per_token or self.block_saved_elements_per_token

    def block_forward_flops(self, rows: int, length: int) -> float:
        """Of one block's forward; 0 where its operators are unknown, as in the two below."""
        return sum(operator.flops.at(rows, length) for operator in self.operators)

    def block_output_elements(self, rows: int, length: int) -> float:
        """Of all operators of one block, in the working precision: what there would be to keep, had every operator its outputs kept."""
        return sum(operator.output_elements.at(rows, length) for operator in self.operators)

    def activation_elements(self, rows: int, length: int) -> float:
        """Of all blocks: `block_output_elements`, the block's input among them as the output of the block before it."""
        return self.blocks * self.block_output_elements(rows, length)

    def head_forward_flops(self, rows: int, length: int) -> float:
        """Of the output projection over all tokens."""
        return self.head_flops_per_token * rows * length

    def forward_flops(self, rows: int, length: int) -> float:
        """Of the whole model: blocks and output projection. Norms, rotations, softmax and activations are left out, as usual; the
        embedding only looks rows up. A training step's TFLOPS count three times this, however much is recomputed."""
        return self.blocks * self.block_forward_flops(rows, length) + self.head_forward_flops(rows, length)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()
