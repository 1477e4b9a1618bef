"""What is kept of which unit's activations, from a decision (`Retention`) that speaks of blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lohan.errors import EngineError
from lohan.planning.tiers import Tier
from lohan.planning.workload import UnitKind

if TYPE_CHECKING:
    from lohan.models.blocks import Unit
    from lohan.planning.retention import BlockTiers, Retention

OTHER_MODEL = "The plan belongs to another model or version; make it anew."


@dataclass(frozen=True, slots=True)
class BlockDecision:
    """What is kept of one block."""

    name: str
    operators: Mapping[str, Tier]
    """By label, in the order in which the decision lists them."""
    boundary: Tier | None
    """Where the block's input goes; None where it stays."""

    @property
    def tiers(self) -> set[Tier | None]:
        return {*self.operators.values(), self.boundary}


def block_decisions(units: Sequence[Unit], retention: Retention) -> dict[int, BlockDecision]:
    """What is kept, by unit; only units of which something is.

    Raises:
        EngineError: blocks are named that the model does not have, or the units are modules.
    """
    named = {block for tiers in (*retention.operators, retention.boundaries) for block in _blocks_of(tiers)}
    if not named:
        return {}
    if any(unit.kind is UnitKind.MODULE for unit in units):
        raise EngineError(
            "kept activations were asked for where blocks are cut into modules",
            place="retention",
            remedy='Use grain "block", or keep nothing: an operator may then run outside every region.',
        )
    blocks = {int(unit.name.rpartition(".")[2]): index for index, unit in enumerate(units) if unit.kind is UnitKind.BLOCK}
    if unknown := named - blocks.keys():
        raise EngineError(
            f"activations are to be kept in block {min(unknown)}, and the model has {len(blocks)} blocks",
            place="retention",
            remedy=OTHER_MODEL,
        )
    decisions = {}
    for block, index in blocks.items():
        boundary = retention.boundaries.tier(block)
        decision = BlockDecision(units[index].name, retention.kept(block), None if boundary is Tier.GPU else boundary)
        if decision.operators or decision.boundary is not None:
            decisions[index] = decision
    return decisions


def _blocks_of(tiers: BlockTiers) -> set[int]:
    return {*tiers.gpu_blocks, *tiers.ram_blocks, *tiers.ssd_blocks}


@dataclass(frozen=True, slots=True)
class Limits:
    """What a session was made for."""

    batch_size: int
    sequence_length: int
    micro_batch_size: int

    @property
    def micro_batches(self) -> int:
        """Of a whole batch."""
        return -(-self.batch_size // self.micro_batch_size)

    def most_rows(self, number: int) -> int:
        """Of the micro-batch of this number."""
        return min(self.micro_batch_size, self.batch_size - number * self.micro_batch_size)

    def most_tokens(self, number: int) -> int:
        """Of the micro-batch of this number."""
        return self.most_rows(number) * self.sequence_length

    def room(self, number: int, rows: int, tokens: int) -> tuple[int, int]:
        """Tokens of a micro-batch of `rows` rows, and the most that the micro-batch of this number may have."""
        return rows * tokens, max(self.most_rows(number), rows) * max(self.sequence_length, tokens)
