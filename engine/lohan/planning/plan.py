"""The `Plan`: how a run's bytes are divided over GPU memory, RAM and SSD. One frozen, versioned value for page, CLI and run alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from lohan.planning.forecast import Forecast
from lohan.planning.retention import Retention
from lohan.planning.schedule import DRIVES_CLIP_RATE
from lohan.planning.tiers import Tier
from lohan.units import MIB

PLAN_VERSION = 1
CHUNK_PARAMETERS = 32 * MIB
"""Elements of a chunk at most; the grain of state I/O and of the optimizer."""


class PlanItem(BaseModel):
    """One holder of bytes in a tier."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    """Short name in the design's vocabulary, e.g. `parameter slots`."""
    bytes: Annotated[int, Field(ge=0)]
    formula: str
    """How the figure comes about, e.g. `3 slots x 28.3 M parameters x 2 B`."""


class Holder(NamedTuple):
    """A `PlanItem` in the making: a search looks at the bytes of thousands, and nobody reads how they come about."""

    name: str
    bytes: int
    formula: Callable[[], str]

    def item(self) -> PlanItem:
        return PlanItem(name=self.name, bytes=self.bytes, formula=self.formula())


@dataclass(frozen=True, slots=True)
class TierUse:
    """A `TierPlan` in the making."""

    tier: Tier
    capacity_bytes: int
    holders: tuple[Holder, ...]

    @property
    def used_bytes(self) -> int:
        return sum([holder.bytes for holder in self.holders])

    @property
    def left_bytes(self) -> int:
        """Below 0 where more is used than there is."""
        return self.capacity_bytes - self.used_bytes

    def plan(self) -> TierPlan:
        items = tuple(holder.item() for holder in self.holders)
        return TierPlan(tier=self.tier, capacity_bytes=self.capacity_bytes, items=items)


class TierPlan(BaseModel):
    """A tier's capacity and who uses it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tier: Tier
    capacity_bytes: Annotated[int, Field(ge=0)]
    """What the run may use: free memory or space, less the reserve, or the cap that was set."""
    items: tuple[PlanItem, ...]

    @property
    def used_bytes(self) -> int:
        return sum(item.bytes for item in self.items)


class Plan(BaseModel):
    """The planned memory split of one run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Annotated[int, Field(ge=1, le=PLAN_VERSION)] = PLAN_VERSION
    model: str
    parameters: int
    workload_digest: str
    settings_digest: str
    hardware_digest: str
    device: str
    precision: str
    states: str = "fp32"
    """The form of the model states, by `StateForm`'s values."""
    batch_size: int
    micro_batch_size: int
    sequence_length: int
    kernels: str = "auto"
    """The kernel set, by `lohan.config.KernelSet`'s values; `auto` leaves it to the run, which looks at its device."""
    grain: str = "block"
    """What a block moves as: `block` (whole) or `module`."""
    slots: int
    """Parameter slots on the device that units pass through."""
    kept_units: int = 0
    """Units whose weights stay on the device from forward to backward, in slots of their own."""
    policy: str = "recompute-all"
    """What decided what happens to a block's inner activations."""
    retention: Retention = Retention()
    """Which of them are kept, and where."""
    gradient_buffers: str = "few"
    """For how many units gradients find room in host memory: `few` or `all`, see `lohan.config.GradientBuffers`."""
    ram_state_bytes: int = 0
    """Host memory that the state store may take for states; padding included."""
    spare_state_bytes: int = 0
    """Host memory for second places of states in RAM, where speculated updates go of runs that commit no step."""
    chunk_parameters: int
    """Parameters in a chunk at most."""
    clip_updates: str = "defer"
    """When updates of clipped runs begin, before it was seen how often they are: `defer` or `speculate`."""
    speculated_clip_rate: float = DRIVES_CLIP_RATE
    """With `engine.clip_updates` auto, updates are speculated while a smaller part of the last steps was clipped."""
    schedule: str = "optimized"
    """When updates run: `serial`, `naive` or `optimized`, see `lohan.config.UpdateSchedule`."""
    durability: str = "none"
    """What a run can be resumed from; `step`: every step; `snapshot`: one every few minutes; `none`: the base model alone."""
    tiers: tuple[TierPlan, ...]
    ssd_bytes_per_step: int
    """Bytes read from and written to the state directories by one step, together."""
    ssd_bytes_written_per_step: int
    """Those of them that are written: what wears drives out."""
    forecast: Forecast | None = None
    """How long a step takes; None where the machine, or the model on it, was not measured."""
    notes: tuple[str, ...] = ()

    def tier(self, tier: Tier) -> TierPlan:
        return next(plan for plan in self.tiers if plan.tier is tier)
