"""The paper's time model as it is written: LoHan (arXiv 2403.06504), section IV-D, Equations 1 to 8 and Algorithm 1. Pure arithmetic.

What the engine plans with is `lohan.planning.cost_model`, which has more resources; this one stays as the reference that it is compared
with. Constants are given, nothing is measured here. P16 and G16 take 2 bytes a parameter; an update reads and writes 14 (P32 4, both
moments 8, P16 2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate
from math import inf

from lohan.errors import ConfigError

WEIGHT_BYTES = 2
"""Of a parameter's P16, and of its G16."""
STATE_BYTES = 14
"""Of a parameter's P32, moments and P16: read by an update, and written again."""


@dataclass(frozen=True, slots=True)
class PaperMachine:
    """What the paper's profiler measures of a server."""

    gpu_flops_per_second: float
    """THP_G."""
    pcie_bytes_per_second: float
    """BW_G: one way, while the other way may be as busy."""
    ssd_read_bytes_per_second: float
    """BW_S2M; reads and writes share the drives' time."""
    ssd_write_bytes_per_second: float
    """BW_M2S."""
    available_bytes: float
    """MEM_avail: host memory left for activations."""

    def __post_init__(self) -> None:
        rates = (self.gpu_flops_per_second, self.pcie_bytes_per_second, self.ssd_read_bytes_per_second, self.ssd_write_bytes_per_second)
        if min(rates) <= 0 or self.available_bytes < 0:
            raise ConfigError(f"a machine's rates are above 0, its memory is not below; found {self}", remedy="Correct the figures.")


@dataclass(frozen=True, slots=True)
class PaperLayer:
    """An operator, or several alike, of the whole model."""

    flops: float
    """To compute its activations once."""
    activation_bytes: float

    @property
    def benefit(self) -> float:
        """Equation 6: FLOPs saved per byte that is swapped."""
        return self.flops / self.activation_bytes if self.activation_bytes else inf


@dataclass(frozen=True, slots=True)
class PaperModel:
    """What the paper's profiler measures of a model at one batch size."""

    parameters: float
    """P."""
    forward_flops: float
    """FLOP_f: at least what the layers have together."""
    layers: tuple[PaperLayer, ...]
    inter_block_bytes: float
    """A_interBlock: the least that has to leave the GPU."""

    @property
    def activation_bytes(self) -> float:
        """A_all."""
        return sum(layer.activation_bytes for layer in self.layers)

    @property
    def by_benefit(self) -> tuple[PaperLayer, ...]:
        """The layers in descending offloading benefit; layers alike keep their order."""
        return tuple(sorted(self.layers, key=lambda layer: layer.benefit, reverse=True))


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """The four terms of a stage; they run side by side."""

    compute: float
    gpu_to_memory: float
    memory_to_gpu: float
    ssd: float

    @property
    def total(self) -> float:
        """Equation 2: the slowest of them."""
        return max(self.compute, self.gpu_to_memory, self.memory_to_gpu, self.ssd)

    @property
    def binding(self) -> str:
        """The name of the slowest."""
        return max(("compute", "gpu_to_memory", "memory_to_gpu", "ssd"), key=lambda name: float(getattr(self, name)))


def spilled_bytes(machine: PaperMachine, swapped_bytes: float) -> float:
    """Equation 3, alpha times A_G2M: what goes on from host memory to the drives."""
    return max(0.0, swapped_bytes - machine.available_bytes)


def spilled_share(machine: PaperMachine, swapped_bytes: float) -> float:
    """Equation 3, alpha; 0 where nothing is swapped."""
    return spilled_bytes(machine, swapped_bytes) / swapped_bytes if swapped_bytes else 0.0


def recomputed_flops(model: PaperModel, swapped_bytes: float) -> float:
    """Equation 7, FLOP_r: the forward's FLOPs less those of the layers swapped, in descending benefit.

    The layer that straddles the last byte counts by the fraction that is swapped.
    """
    left, flops = swapped_bytes, model.forward_flops
    for layer in model.by_benefit:
        if layer.activation_bytes > left:
            return flops - layer.benefit * left
        left -= layer.activation_bytes
        flops -= layer.flops
    return flops


def forward_seconds(machine: PaperMachine, model: PaperModel, swapped_bytes: float) -> StageSeconds:
    """Equation 4."""
    weights = WEIGHT_BYTES * model.parameters
    return StageSeconds(
        compute=model.forward_flops / machine.gpu_flops_per_second,
        gpu_to_memory=swapped_bytes / machine.pcie_bytes_per_second,
        memory_to_gpu=weights / machine.pcie_bytes_per_second,
        ssd=weights / machine.ssd_read_bytes_per_second + spilled_bytes(machine, swapped_bytes) / machine.ssd_write_bytes_per_second,
    )


def backward_seconds(machine: PaperMachine, model: PaperModel, swapped_bytes: float) -> StageSeconds:
    """Equation 5: updates included, which end with the backward."""
    weights, states = WEIGHT_BYTES * model.parameters, STATE_BYTES * model.parameters
    recomputed = recomputed_flops(model, swapped_bytes)
    return StageSeconds(
        compute=(2 * model.forward_flops + recomputed) / machine.gpu_flops_per_second,
        gpu_to_memory=weights / machine.pcie_bytes_per_second,
        memory_to_gpu=(weights + swapped_bytes) / machine.pcie_bytes_per_second,
        ssd=(states + spilled_bytes(machine, swapped_bytes)) / machine.ssd_read_bytes_per_second
        + states / machine.ssd_write_bytes_per_second,
    )


def iteration_seconds(machine: PaperMachine, model: PaperModel, swapped_bytes: float) -> float:
    """Equation 1; convex in `swapped_bytes` (Equation 8)."""
    return forward_seconds(machine, model, swapped_bytes).total + backward_seconds(machine, model, swapped_bytes).total


class Case(IntEnum):
    """How the time of a step depends on the bytes that are swapped: the three cases of section IV-D."""

    TRANSFER_BOUND = 1
    """It rises from the start: nothing is swapped but what has to be."""
    GPU_BOUND = 2
    """It falls to the end: everything is kept."""
    INTERIOR = 3
    """It falls, and rises again."""


@dataclass(frozen=True, slots=True)
class PaperDecision:
    """What Algorithm 1 chooses."""

    case: Case
    swapped_bytes: float
    seconds: float
    """Of an iteration."""
    swapped_layers: tuple[PaperLayer, ...]
    """Its swap list, in descending benefit; in case 1 the bytes may end within a layer."""


def choose_swapped(machine: PaperMachine, model: PaperModel) -> PaperDecision:
    """Algorithm 1: add layers in descending benefit until a step no longer gets shorter, but never less than the inter-block activations.

    The first layer is always added there, since it is compared with infinity. Where the step rises from the start, case 1 takes that back:
    A_interBlock is chosen, and Equation 7 counts the layer that it ends in by its fraction.
    """
    layers = model.by_benefit
    least, count = inf, 0
    sizes = list(accumulate((layer.activation_bytes for layer in layers), initial=0.0))
    for size in sizes[1:]:
        seconds = iteration_seconds(machine, model, size)
        if seconds >= least and size >= model.inter_block_bytes:
            break
        least, count = seconds, count + 1
    chosen, floor = sizes[count], min(model.inter_block_bytes, sizes[-1])
    at_floor = iteration_seconds(machine, model, floor)
    if chosen <= floor or at_floor <= least:
        falls_to_the_end = count == len(layers) and least < iteration_seconds(machine, model, 0.0)
        case = Case.GPU_BOUND if falls_to_the_end and chosen == floor else Case.TRANSFER_BOUND
        return PaperDecision(case, floor, at_floor, _within(layers, sizes, floor))
    case = Case.GPU_BOUND if count == len(layers) else Case.INTERIOR
    return PaperDecision(case, chosen, least, layers[:count])


def _within(layers: Sequence[PaperLayer], sizes: Sequence[float], size: float) -> tuple[PaperLayer, ...]:
    """The layers that the first `size` bytes touch."""
    return tuple(layer for layer, begin in zip(layers, sizes, strict=False) if begin < size)
