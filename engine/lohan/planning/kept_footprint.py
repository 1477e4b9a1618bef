"""What kept activations take in each tier: exactly what the engine allocates (`lohan.streaming.kept_tiers`). Pure arithmetic."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from lohan.planning.footprint import KEPT_REGIONS_AHEAD, KEPT_STAGING_BUFFERS
from lohan.planning.plan import Holder
from lohan.planning.retention import BlockIndices, Kept
from lohan.planning.tiers import Tier
from lohan.units import format_bytes

KEPT = "kept activations"
KEPT_ON_THEIR_WAY = "kept activations on their way"


def whole_pages(size_bytes: int) -> int:
    """`size_bytes` rounded up to pages: of a buffer, and of a transfer that bypasses the page cache."""
    return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


class RegionBytes(NamedTuple):
    """Bytes that one thing takes in all micro-batches of a block."""

    regions: int
    """As many as micro-batches."""
    first: int
    """In the first, which is the largest."""
    total: int
    paged: int
    """With each micro-batch's rounded up to pages."""

    @classmethod
    def of(cls, sizes: Sequence[int]) -> RegionBytes:
        """Of its bytes in each micro-batch."""
        pages = {size: whole_pages(size) for size in set(sizes)}
        return cls(len(sizes), sizes[0], sum(sizes), sum(pages[size] for size in sizes))


def retention_items(retention: Kept, outputs: Mapping[str, RegionBytes], inputs: RegionBytes | None) -> Mapping[Tier, tuple[Holder, ...]]:
    """The holders of what `retention` keeps, by tier. `Tier.GPU` is the device: RAM where the CPU computes.

    Args:
        outputs: of an operator, by label; at least of those that are kept.
        inputs: of a block's input. Inputs that stay on the device are no holder here: every boundary is one already.
    """
    total, paged, count, widest = dict.fromkeys(Tier, 0), dict.fromkeys(Tier, 0), 0, 0
    together: dict[BlockIndices, int] = {}
    for sizes, tier, blocks in _kept(retention, outputs, inputs):
        total[tier] += sizes.total * len(blocks)
        paged[tier] += sizes.paged * len(blocks)
        count += sizes.regions * len(blocks)
        if tier is not Tier.GPU:
            together[blocks] = together.get(blocks, 0) + sizes.first
        if tier is Tier.SSD:
            widest = max(widest, whole_pages(sizes.first))
    leaving: dict[int, int] = {}
    for blocks, size in together.items():  # most operators leave in the same blocks
        for block in blocks:
            leaving[block] = leaving.get(block, 0) + size
    regions, largest = 1 + KEPT_REGIONS_AHEAD, max(leaving.values(), default=0)
    those = f"{count} outputs of regions, those"
    return {
        Tier.GPU: (
            *_item(KEPT, total[Tier.GPU], lambda: f"{those} that stay on the device"),
            *_item(KEPT_ON_THEIR_WAY, regions * largest, lambda: f"{regions} regions x {format_bytes(largest)} that the largest sends out"),
        ),
        Tier.RAM: (
            *_item(KEPT, paged[Tier.RAM], lambda: f"{those} that wait in RAM, each in whole pages"),
            *_item(
                KEPT_ON_THEIR_WAY,
                KEPT_STAGING_BUFFERS * widest,
                lambda: f"{KEPT_STAGING_BUFFERS} buffers x {format_bytes(widest)} of the largest output that goes to the drives",
            ),
        ),
        Tier.SSD: _item(KEPT, paged[Tier.SSD], lambda: f"{those} that wait on the drives, each in whole pages"),
    }


def _kept(
    retention: Kept, outputs: Mapping[str, RegionBytes], inputs: RegionBytes | None
) -> Iterator[tuple[RegionBytes, Tier, BlockIndices]]:
    """The bytes of what is kept in the micro-batches of a block, where, and of which blocks."""
    for operator in retention.operators:
        for tier, blocks in ((Tier.GPU, operator.gpu_blocks), (Tier.RAM, operator.ram_blocks), (Tier.SSD, operator.ssd_blocks)):
            if blocks:
                yield outputs[operator.label], tier, blocks
    for tier, blocks in ((Tier.RAM, retention.boundaries.ram_blocks), (Tier.SSD, retention.boundaries.ssd_blocks)):
        if blocks:
            assert inputs is not None, "a batch that is kept has inputs"
            yield inputs, tier, blocks


def _item(name: str, size_bytes: int, formula: Callable[[], str]) -> tuple[Holder, ...]:
    return (Holder(name, size_bytes, formula),) if size_bytes else ()
