"""The order of a step's updates as plain data: what the planner counts with, and what the engine's optimizer does. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType

from lohan.config import Clip, Durability, GradientBuffers, UpdateSchedule


class Begin(StrEnum):
    """When a unit's update may begin."""

    ON_ARRIVAL = "on_arrival"
    """As soon as its gradients are in host memory, while the backward goes on with other units."""
    AFTER_BACKWARD = "after_backward"
    """Once the backward has ended: every unit's gradients stay in host memory until then."""
    SPECULATED = "speculated"
    """On arrival, and every unit's gradients stay in host memory until the backward has ended: the update may have to be done again."""


@dataclass(frozen=True, slots=True)
class UpdateOrder:
    """One schedule. A chunk is read, updated and written; consecutive chunks overlap as far as `chunks_in_flight` lets them."""

    begin: Begin
    chunks_in_flight: int
    """1: a chunk is read after the one before it is written. 3: one is read, one updated and one written at a time."""
    gradients: GradientBuffers = GradientBuffers.ALL
    """FEW or ALL: host memory for gradients that wait. FEW only where updates begin on arrival."""

    @property
    def takes_needed_first(self) -> bool:
        """Whether a unit that the next forward needs earlier may overtake others that wait: which one is updated next then depends on how
        fast gradients come. Without it units are updated in the order in which their gradients come, or, after the backward, in the next
        forward's."""
        return self.begin is not Begin.AFTER_BACKWARD and self.gradients is GradientBuffers.ALL


UPDATE_ORDERS: Mapping[UpdateSchedule, UpdateOrder] = MappingProxyType(
    {
        UpdateSchedule.SERIAL: UpdateOrder(Begin.AFTER_BACKWARD, chunks_in_flight=3),
        UpdateSchedule.NAIVE: UpdateOrder(Begin.ON_ARRIVAL, chunks_in_flight=1, gradients=GradientBuffers.FEW),
        UpdateSchedule.OPTIMIZED: UpdateOrder(Begin.ON_ARRIVAL, chunks_in_flight=3, gradients=GradientBuffers.FEW),
    }
)
"""LoHan paper, section IV-C: `serial` is what its predecessors do, `naive` and `optimized` are its active gradient offloading."""


def update_order(schedule: UpdateSchedule, clip: Clip, gradients: GradientBuffers = GradientBuffers.FEW) -> UpdateOrder:
    """The order in which a step runs: a norm over all gradients is known only after the backward, whatever the schedule.

    Args:
        gradients: host memory for them where they do not all have to wait; AUTO counts as FEW.
    """
    order = UPDATE_ORDERS[schedule]
    if clip is Clip.GLOBAL:
        return UpdateOrder(Begin.AFTER_BACKWARD, order.chunks_in_flight)
    return replace(order, gradients=GradientBuffers.ALL) if gradients is GradientBuffers.ALL else order


def can_speculate(schedule: UpdateSchedule, clip: Clip, durability: Durability, *, has_spare: bool = False) -> bool:
    """Whether updates may begin before the common norm is known: where they can be taken back, and the schedule itself does not wait.

    Args:
        has_spare: whether states in RAM have second places; with durability `step` the last committed step is one.
    """
    return clip is Clip.GLOBAL and schedule is not UpdateSchedule.SERIAL and (durability is Durability.STEP or has_spare)


EXPECTED_CLIP_RATE = 0.5
"""Of steps, before any was seen: norms of fine-tuning lie on both sides of the usual limit of 1."""


DRIVES_CLIP_RATE = 0.25
"""Up to which part of the steps may be clipped where updates that are taken back were written to drives (`lohan.streaming.speculation`)."""


def speculated_order(schedule: UpdateSchedule) -> UpdateOrder:
    """The order of a step that is speculated, and stands."""
    return UpdateOrder(Begin.SPECULATED, UPDATE_ORDERS[schedule].chunks_in_flight)
