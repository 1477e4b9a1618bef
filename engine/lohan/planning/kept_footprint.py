"""What kept activations take in each tier: exactly what the engine allocates (`lohan.streaming.kept_tiers`). Pure arithmetic."""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from lohan.planning.footprint import KEPT_REGIONS_AHEAD, KEPT_STAGING_BUFFERS
from lohan.planning.plan import PlanItem
from lohan.planning.retention import BlockIndices, Retention
from lohan.planning.tiers import Tier
from lohan.units import format_bytes

KEPT = "kept activations"
KEPT_ON_THEIR_WAY = "kept activations on their way"


def whole_pages(size_bytes: int) -> int:
    """`size_bytes` rounded up to pages: of a buffer, and of a transfer that bypasses the page cache."""
    return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def retention_items(
    retention: Retention, outputs: Mapping[str, Sequence[int]], inputs: Sequence[int]
) -> Mapping[Tier, tuple[PlanItem, ...]]:
    """The holders of what `retention` keeps, by tier. `Tier.GPU` is the device: RAM where the CPU computes.

    Blocks are alike, and the first micro-batch is the largest.

    Args:
        outputs: bytes of an operator's outputs in each micro-batch of a block, by label; at least of those that are kept.
        inputs: bytes of a block's input in each micro-batch. Inputs that stay on the device are no holder here: every boundary is one
            already.
    """
    total, paged, count, widest = Counter[Tier](), Counter[Tier](), 0, 0
    leaving: Counter[int] = Counter()
    for sizes, tier, blocks in _kept(retention, outputs, inputs):
        total[tier] += sum(sizes) * len(blocks)
        paged[tier] += sum(map(whole_pages, sizes)) * len(blocks)
        count += len(sizes) * len(blocks)
        if tier is not Tier.GPU:
            leaving.update(dict.fromkeys(blocks, sizes[0]))
        if tier is Tier.SSD:
            widest = max(widest, whole_pages(sizes[0]))
    regions, largest = 1 + KEPT_REGIONS_AHEAD, max(leaving.values(), default=0)
    those = f"{count} outputs of regions, those"
    return {
        Tier.GPU: (
            *_item(KEPT, total[Tier.GPU], f"{those} that stay on the device"),
            *_item(KEPT_ON_THEIR_WAY, regions * largest, f"{regions} regions x {format_bytes(largest)} that the largest sends out"),
        ),
        Tier.RAM: (
            *_item(KEPT, paged[Tier.RAM], f"{those} that wait in RAM, each in whole pages"),
            *_item(
                KEPT_ON_THEIR_WAY,
                KEPT_STAGING_BUFFERS * widest,
                f"{KEPT_STAGING_BUFFERS} buffers x {format_bytes(widest)} of the largest output that goes to the drives",
            ),
        ),
        Tier.SSD: _item(KEPT, paged[Tier.SSD], f"{those} that wait on the drives, each in whole pages"),
    }


def _kept(
    retention: Retention, outputs: Mapping[str, Sequence[int]], inputs: Sequence[int]
) -> Iterator[tuple[Sequence[int], Tier, BlockIndices]]:
    """The bytes of what is kept in each micro-batch, where, and of which blocks."""
    for operator in retention.operators:
        for tier, blocks in ((Tier.GPU, operator.gpu_blocks), (Tier.RAM, operator.ram_blocks), (Tier.SSD, operator.ssd_blocks)):
            if blocks:
                yield outputs[operator.label], tier, blocks
    for tier, blocks in ((Tier.RAM, retention.boundaries.ram_blocks), (Tier.SSD, retention.boundaries.ssd_blocks)):
        if blocks:
            yield inputs, tier, blocks


def _item(name: str, size_bytes: int, formula: str) -> tuple[PlanItem, ...]:
    return (PlanItem(name=name, bytes=size_bytes, formula=formula),) if size_bytes else ()
