"""What kept activations take of each tier, as `lohan.streaming.kept` allocates it. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from lohan.planning.footprint import KEPT_REGIONS_AHEAD, KEPT_STAGING_BUFFERS
from lohan.planning.plan import PlanItem
from lohan.planning.retention import Retention
from lohan.planning.tiers import Tier
from lohan.units import format_bytes


@dataclass(frozen=True, slots=True)
class KeptBytes:
    """A retention, and the bytes of what it keeps; of one block and the whole batch."""

    retention: Retention
    blocks: int
    outputs: Mapping[str, int]
    """By the operators' labels."""
    input: int
    """A block's input; 0 where inputs stay on the device, and are counted there."""
    micro_share: float
    """The part of the batch that a region computes."""

    def pieces(self, block: int) -> Iterator[tuple[Tier, int]]:
        """What is kept of `block`, but for an input that stays on the device."""
        for label, tier in self.retention.kept(block).items():
            yield tier, self.outputs[label]
        tier_of_input = self.retention.boundaries.tier(block)
        if tier_of_input not in (None, Tier.GPU):
            yield tier_of_input, self.input

    def total(self, tier: Tier) -> int:
        return sum(size for block in range(self.blocks) for found, size in self.pieces(block) if found is tier)

    @property
    def moved_inputs(self) -> int:
        """Blocks whose inputs leave the device."""
        return len(self.retention.boundaries.ram_blocks) + len(self.retention.boundaries.ssd_blocks)

    @property
    def largest_swapped_region(self) -> int:
        """The most that leaves the device of one region."""
        swapped = (sum(size for tier, size in self.pieces(block) if tier is not Tier.GPU) for block in range(self.blocks))
        return round(self.micro_share * max(swapped, default=0))

    @property
    def largest_on_drive(self) -> int:
        """The largest output of one region that goes to the drives."""
        sizes = (size for block in range(self.blocks) for tier, size in self.pieces(block) if tier is Tier.SSD)
        return round(self.micro_share * max(sizes, default=0))


def kept_items(kept: KeptBytes) -> tuple[tuple[PlanItem, ...], tuple[PlanItem, ...], tuple[PlanItem, ...]]:
    """What lies on the device, in host memory and on the drives; on the CPU the device's is the host's too."""
    on_device, in_ram, on_drives = (kept.total(tier) for tier in Tier)
    passing, region, output = KEPT_REGIONS_AHEAD + 1, kept.largest_swapped_region, kept.largest_on_drive
    device = [
        PlanItem(name="kept activations", bytes=on_device, formula="outputs that stay on the device from forward to backward"),
        PlanItem(
            name="activations on their way",
            bytes=passing * region,
            formula=f"{passing} regions x {format_bytes(region)} that leave the device and come back",
        ),
    ]
    host = [
        PlanItem(name="kept activations", bytes=in_ram, formula="outputs and inputs of blocks that wait in host memory"),
        PlanItem(
            name="activation staging",
            bytes=KEPT_STAGING_BUFFERS * output,
            formula=f"{KEPT_STAGING_BUFFERS} buffers x {format_bytes(output)} of the largest output that goes to the drives",
        ),
    ]
    drives = [PlanItem(name="kept activations", bytes=on_drives, formula="outputs and inputs of blocks that wait on the drives")]
    filled = [tuple(item for item in items if item.bytes) for items in (device, host, drives)]
    return filled[0], filled[1], filled[2]
