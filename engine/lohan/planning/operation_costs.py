"""What an operation takes by itself, and how operations that run at once slow each other down. Pure arithmetic, no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from lohan.planning.cost_model import Rates, update_traffic
from lohan.planning.operations import Operation, OperationKind, Resource
from lohan.planning.state_form import SCALE_BLOCK, StateForm


@dataclass(frozen=True, slots=True)
class OperationCost:
    """What one operation takes by itself."""

    seconds: float
    host_memory_bytes: float = 0.0
    """Read and written there."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """How operations that run at once slow each other down; by default not at all."""

    slowed: Mapping[Resource, float] = field(default_factory=dict)
    """The part of its speed that a resource keeps while its opposite is busy."""
    host_memory: float | None = None
    """Bytes a second, read and written together; None: without end."""

    @classmethod
    def of(cls, rates: Rates) -> Sharing:
        """As a machine was measured; drives without a mixed rate take turns."""
        slowed = {}
        for resource, rate in ((Resource.M2G, rates.m2g), (Resource.G2M, rates.g2m)):
            if rate and rates.both_ways:
                slowed[resource] = min(1.0, rates.both_ways / rate)
        if rates.ssd_read and rates.ssd_write:
            each = rates.ssd_mixed / 2 if rates.ssd_mixed else 1 / (1 / rates.ssd_read + 1 / rates.ssd_write)
            slowed[Resource.SSD_READ] = min(1.0, each / rates.ssd_read)
            slowed[Resource.SSD_WRITE] = min(1.0, each / rates.ssd_write)
        return cls(slowed, rates.host_memory)


def durations(rates: Rates, form: StateForm, regions: Callable[[Operation], float]) -> Callable[[Operation], OperationCost]:
    """What an operation takes on a machine: the device's by `regions`, all others by their bytes. Kinds that are not known here go by their
    resource's rate.

    Args:
        regions: seconds of a forward, a backward or another operation of the device.
    """
    passes = 2 if rates.on_cpu else 1
    state_bytes = form.state_bytes(SCALE_BLOCK) / SCALE_BLOCK
    by_kind: dict[OperationKind, tuple[float, float]] = {  # seconds, and bytes of host memory, for each byte of the operation
        OperationKind.UPDATE: (1 / (state_bytes * rates.update_elements), update_traffic(form) / state_bytes),
        OperationKind.GRADIENT_NORM: (1 / rates.gradient_norm, 1),
        OperationKind.CHECKSUM: (1 / rates.checksum, 1),
    }
    pace = {Resource.M2G: (rates.m2g, passes), Resource.G2M: (rates.g2m, passes)}
    pace |= {Resource.SSD_READ: (rates.ssd_read, 1), Resource.SSD_WRITE: (rates.ssd_write, 1), Resource.CPU: (rates.host_memory, 1)}

    def cost(operation: Operation) -> OperationCost:
        if operation.resource is Resource.GPU:
            return OperationCost(regions(operation))
        if operation.kind is OperationKind.COMMIT:
            return OperationCost(rates.commit_seconds)
        if operation.kind in by_kind:
            seconds, traffic = by_kind[operation.kind]
            return OperationCost(operation.bytes * seconds, operation.bytes * traffic)
        rate, traffic = pace[operation.resource]
        assert rate or not operation.bytes, f"the machine has no rate for {operation.resource}"
        return OperationCost(operation.bytes / rate if rate else 0.0, operation.bytes * traffic)

    return cost


def even_regions(
    operations: Sequence[Operation], forward_seconds: Mapping[int, float], backward_seconds: Mapping[int, float]
) -> Callable[[Operation], float]:
    """A unit's seconds, divided evenly over its regions; adding up a region's gradients counts with its backward.

    Args:
        forward_seconds: of a step, by unit; what is not named takes none.
        backward_seconds: recomputation included.
    """
    seconds = {OperationKind.FORWARD: forward_seconds, OperationKind.BACKWARD: backward_seconds}
    counts: dict[tuple[OperationKind, int | None], int] = {}
    for operation in operations:
        counts[operation.kind, operation.unit] = counts.get((operation.kind, operation.unit), 0) + 1

    def region(operation: Operation) -> float:
        of_unit = seconds.get(operation.kind, {}).get(-1 if operation.unit is None else operation.unit, 0.0)
        return of_unit / counts[operation.kind, operation.unit]

    return region
