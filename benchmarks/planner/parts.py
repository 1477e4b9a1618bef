"""What is measured for each question about the planner, as options of `lohan bench step`. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lohan.bench.step_options import StateKind, StatesTier, StepOptions
from lohan.bench.step_shapes import ShapeName
from lohan.config import ActivationPolicy, Clip, Precision, UpdateSchedule
from lohan.units import GIB, MIB


class Question(StrEnum):
    """What a part's records answer."""

    PREDICTION = "prediction"
    """How far forecasts lie from what steps take."""
    CONVEXITY = "convexity"
    """How a step's time goes with the amount of activations that leaves the device, and where the planner's choice lies (Figure 9b)."""
    ABLATION = "ablation"
    """How other systems' rules about activations do on the same engine (Figures 8 and 9a)."""
    PEAK = "peak"
    """How near whole steps, clipped to a common norm, come to what one block does by itself."""


@dataclass(frozen=True)
class Machine:
    """Where it is measured."""

    device: str
    precision: Precision
    gpu_cap_bytes: int | None
    directory: Path
    """A folder on a drive, for tier disk."""
    tmpfs_directory: Path
    profiles: Path


@dataclass(frozen=True)
class Part:
    """One comparison: settings that differ in what `options` lists several of."""

    question: Question
    options: Mapping[str, Any]
    """Of `StepOptions`, beside those of the machine."""

    def step_options(self, machine: Machine) -> StepOptions:
        return StepOptions(
            device=machine.device,
            precision=machine.precision,
            gpu_cap_bytes=machine.gpu_cap_bytes,
            directories=(machine.directory.absolute(),),
            tmpfs_directory=machine.tmpfs_directory,
            profiles=machine.profiles,
            schedules=(UpdateSchedule.OPTIMIZED,),
            **self.options,
        )

    def directory(self, machine: Machine) -> Path:
        """Whose profile its plans go by."""
        in_memory = StatesTier.TMPFS in self.options.get("tiers", ())
        return machine.tmpfs_directory if in_memory else machine.directory.absolute()

    @property
    def shape(self) -> ShapeName:
        shape: ShapeName = self.options["shape"]
        return shape

    @property
    def sequence(self) -> int:
        return int(self.options.get("sequence", 1024))

    @property
    def batches(self) -> tuple[int, ...]:
        batches: tuple[int, ...] = self.options["batches"]
        return batches


def _swept(*sizes: int) -> tuple[int | None, ...]:
    """The planner's own choice, and forced amounts."""
    return (None, *sizes)


def _prediction(shape: ShapeName, sequence: int, batches: tuple[int, ...], tier: StatesTier, **more: Any) -> Part:
    options = {"shape": shape, "sequence": sequence, "batches": batches, "tiers": (tier,), **more}
    return Part(Question.PREDICTION, MappingProxyType({"steps": 3, **options}))


# Of a seeded 3.43B model's first steps, 32 seeded rows each, seven in eight have a norm above 5.640, three in eight above 5.648.
_MEDIAN_NORM = 5.645
_NEVER_REACHED = 1e9


def _peak(batch: int, states: StateKind, max_norm: float, **more: Any) -> Part:
    options = {"shape": ShapeName.LLAMA_3_43B, "batches": (batch,), "states": states, "clip": Clip.GLOBAL, "max_norm": max_norm, "steps": 6}
    return Part(Question.PEAK, MappingProxyType({**options, **more}))


def _peak_parts() -> dict[str, Part]:
    """Clipping is on in all; a run learns from its first steps where none is ever clipped, as `clip_rate` says here."""
    parts: dict[str, Part] = {}
    for states in (StateKind.SPLIT, StateKind.EIGHT_BIT):
        for batch in (8, 32):
            parts[f"peak-{states}-{batch}"] = _peak(batch, states, _NEVER_REACHED, clip_rate=0.0)
        parts[f"peak-{states}-32-clipped"] = _peak(32, states, _MEDIAN_NORM)
    return parts


def _large_parts() -> dict[str, Part]:
    small, middle = ShapeName.LLAMA_1_1B, ShapeName.LLAMA_3_43B
    parts = {
        f"prediction-1.1b-{tier}-{sequence}": _prediction(small, sequence, batches, tier)
        for tier in (StatesTier.RAM, StatesTier.TMPFS)
        for sequence, batches in ((512, (16, 64)), (1024, (8, 32, 64)), (2048, (4, 16)))
    }
    parts["prediction-1.1b-disk-1024"] = _prediction(small, 1024, (8, 64), StatesTier.DISK, steps=1)
    parts["prediction-3.43b-ram-1024"] = _prediction(middle, 1024, (8, 16, 32, 48), StatesTier.RAM)
    parts["prediction-3.43b-tmpfs-1024"] = _prediction(middle, 1024, (8, 32, 64), StatesTier.TMPFS)
    parts["prediction-3.43b-disk-1024"] = _prediction(middle, 1024, (32,), StatesTier.DISK, steps=1)
    sweep = _swept(*(amount * GIB for amount in (0, 4, 8, 16, 24, 32, 48)))
    for batch in (8, 16, 32, 48):
        options = {"shape": middle, "batches": (batch,), "swapped_bytes": sweep, "steps": 3}
        parts[f"convexity-{batch}"] = Part(Question.CONVEXITY, MappingProxyType(options))
    for ram in (0, 8, 32):
        options = {"shape": middle, "batches": (32,), "policies": tuple(ActivationPolicy), "activation_ram_bytes": ram * GIB, "steps": 3}
        parts[f"ablation-{ram}"] = Part(Question.ABLATION, MappingProxyType(options))
    return parts | _peak_parts()


def _tiny_parts() -> dict[str, Part]:
    tiny = ShapeName.TINY
    sweep = {"shape": tiny, "sequence": 64, "batches": (4,), "swapped_bytes": _swept(0, MIB // 2, MIB), "steps": 1}
    policies = {**sweep, "swapped_bytes": _swept(), "policies": tuple(ActivationPolicy), "activation_ram_bytes": MIB}
    return {
        "prediction": _prediction(tiny, 64, (2, 4), StatesTier.RAM, steps=1),
        "convexity": Part(Question.CONVEXITY, MappingProxyType(sweep)),
        "ablation": Part(Question.ABLATION, MappingProxyType(policies)),
    }


PARTS: Mapping[str, Part] = MappingProxyType(_large_parts())
"""For a GPU of which 24 GiB count: 24 predictions, four sweeps, three ablations, and six settings beside the block's peak."""
TINY_PARTS: Mapping[str, Part] = MappingProxyType(_tiny_parts())
"""The same questions on any machine, to try the command."""


def to_profile(parts: Mapping[str, Part], machine: Machine) -> dict[tuple[Path, ShapeName, int], tuple[int, ...]]:
    """Rows of micro-batches whose blocks the parts' plans need, by state directory, shape and sequence: powers of two, from the largest
    batch down to an eighth of it. With fewer rows the kernels' queueing binds, which hardly depends on them."""
    largest: dict[tuple[Path, ShapeName, int], int] = {}
    for part in parts.values():
        place = (part.directory(machine), part.shape, part.sequence)
        largest[place] = max(largest.get(place, 1), *part.batches)
    return {place: _powers_of_two(most) for place, most in largest.items()}


def _powers_of_two(most: int) -> tuple[int, ...]:
    exponents = range(most.bit_length())
    return tuple(1 << exponent for exponent in exponents[-4:])
