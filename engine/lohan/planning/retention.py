"""Which operators' outputs are kept from forward to backward, and where; the rest is computed again. Plain data."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from lohan.planning.tiers import Tier

BlockIndices = tuple[Annotated[int, Field(ge=0)], ...]
"""Blocks of the model by their place in its list, ascending."""


class BlockTiers(BaseModel):
    """The tier of something that every block has one of."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    gpu_blocks: BlockIndices = ()
    """Blocks in which it stays in the device's memory."""
    ram_blocks: BlockIndices = ()
    """Blocks in which it is copied to host memory, and back ahead of its use."""
    ssd_blocks: BlockIndices = ()
    """Blocks in which it goes on from host memory to the drives, and comes back."""

    def tier(self, block: int) -> Tier | None:
        """Where it lies for `block`; None where it does not stay."""
        places = ((Tier.GPU, self.gpu_blocks), (Tier.RAM, self.ram_blocks), (Tier.SSD, self.ssd_blocks))
        return next((tier for tier, blocks in places if block in blocks), None)


class KeptOperator(BlockTiers):
    """An operator of a block whose outputs are kept in some blocks, for every micro-batch."""

    label: str
    """As `OperatorWorkload.label` has it."""


class Retention(BaseModel):
    """What is kept of a block's inner activations, and where the inputs of blocks wait. Empty: everything is computed again.

    An operator is listed once, in the order of the block's forward; a block is in one tier at most.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    operators: tuple[KeptOperator, ...] = ()
    boundaries: BlockTiers = BlockTiers()
    """Of blocks' inputs, which are always kept: those of a block that no tier names stay on the device."""

    def kept(self, block: int) -> dict[str, Tier]:
        """The operators whose outputs are kept in `block`, and where."""
        places = ((operator.label, operator.tier(block)) for operator in self.operators)
        return {label: tier for label, tier in places if tier is not None}


class PlacedBlocks(NamedTuple):
    """As `BlockTiers`, unchecked: a search makes hundreds that nobody keeps."""

    gpu_blocks: BlockIndices = ()
    ram_blocks: BlockIndices = ()
    ssd_blocks: BlockIndices = ()


class PlacedOperator(NamedTuple):
    """As `KeptOperator`."""

    label: str
    gpu_blocks: BlockIndices = ()
    ram_blocks: BlockIndices = ()
    ssd_blocks: BlockIndices = ()


class Placed(NamedTuple):
    """As `Retention`."""

    operators: tuple[PlacedOperator, ...] = ()
    boundaries: PlacedBlocks = PlacedBlocks()

    def checked(self) -> Retention:
        """The same, as plans have it."""
        return Retention(
            operators=tuple(KeptOperator(**operator._asdict()) for operator in self.operators),
            boundaries=BlockTiers(**self.boundaries._asdict()),
        )


Kept = Retention | Placed
"""What is kept and where, checked or not."""
