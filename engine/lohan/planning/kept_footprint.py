"""What kept activations take in each tier: exactly what the engine allocates (`lohan.streaming.kept_tiers`). Pure arithmetic."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lohan.planning.footprint import KEPT_REGIONS_AHEAD, KEPT_STAGING_BUFFERS
from lohan.planning.plan import PlanItem
from lohan.planning.retention import Retention
from lohan.planning.tiers import Tier
from lohan.units import format_bytes

KEPT = "kept activations"
KEPT_ON_THEIR_WAY = "kept activations on their way"


def whole_pages(size_bytes: int) -> int:
    """`size_bytes` rounded up to pages: of a buffer, and of a transfer that bypasses the page cache."""
    return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


@dataclass(frozen=True, slots=True)
class _Kept:
    """One thing that is kept of one region."""

    tier: Tier
    region: tuple[int, int]
    """Block and micro-batch."""
    bytes: int


def retention_items(
    retention: Retention, outputs: Mapping[tuple[str, int], Sequence[int]], inputs: Mapping[int, Sequence[int]]
) -> Mapping[Tier, tuple[PlanItem, ...]]:
    """The holders of what `retention` keeps, by tier. `Tier.GPU` is the device: RAM where the CPU computes.

    Args:
        outputs: bytes of an operator's outputs in each micro-batch of a block, by label and block; at least those that are kept.
        inputs: bytes of a block's input in each micro-batch, by block; at least of those whose boundaries go to RAM or the drives. Those
            that stay on the device are no holder here: every boundary is one already.
    """
    kept = list(_kept(retention, outputs, inputs))
    on_device = sum(item.bytes for item in kept if item.tier is Tier.GPU)
    in_ram = sum(whole_pages(item.bytes) for item in kept if item.tier is Tier.RAM)
    stored = [whole_pages(item.bytes) for item in kept if item.tier is Tier.SSD]
    leaving: dict[tuple[int, int], int] = {}
    for item in kept:
        if item.tier is not Tier.GPU:
            leaving[item.region] = leaving.get(item.region, 0) + item.bytes
    regions, largest, widest = 1 + KEPT_REGIONS_AHEAD, max(leaving.values(), default=0), max(stored, default=0)
    count = f"{len(kept)} outputs of regions, those"
    return {
        Tier.GPU: (
            *_item(KEPT, on_device, f"{count} that stay on the device"),
            *_item(KEPT_ON_THEIR_WAY, regions * largest, f"{regions} regions x {format_bytes(largest)} that the largest sends out"),
        ),
        Tier.RAM: (
            *_item(KEPT, in_ram, f"{count} that wait in RAM, each in whole pages"),
            *_item(
                KEPT_ON_THEIR_WAY,
                KEPT_STAGING_BUFFERS * widest,
                f"{KEPT_STAGING_BUFFERS} buffers x {format_bytes(widest)} of the largest output that goes to the drives",
            ),
        ),
        Tier.SSD: _item(KEPT, sum(stored), f"{count} that wait on the drives, each in whole pages"),
    }


def _kept(retention: Retention, outputs: Mapping[tuple[str, int], Sequence[int]], inputs: Mapping[int, Sequence[int]]) -> Iterator[_Kept]:
    for operator in retention.operators:
        for tier, blocks in ((Tier.GPU, operator.gpu_blocks), (Tier.RAM, operator.ram_blocks), (Tier.SSD, operator.ssd_blocks)):
            for block in blocks:
                yield from (_Kept(tier, (block, number), size) for number, size in enumerate(outputs[operator.label, block]))
    for tier, blocks in ((Tier.RAM, retention.boundaries.ram_blocks), (Tier.SSD, retention.boundaries.ssd_blocks)):
        for block in blocks:
            yield from (_Kept(tier, (block, number), size) for number, size in enumerate(inputs[block]))


def _item(name: str, size_bytes: int, formula: str) -> tuple[PlanItem, ...]:
    return (PlanItem(name=name, bytes=size_bytes, formula=formula),) if size_bytes else ()
