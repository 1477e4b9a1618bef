"""Which systems are compared, what is known of them beforehand, and a task as a child process gets it. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Final

from pydantic import BaseModel, ConfigDict

from lohan.bench.step_options import StatesTier
from lohan.bench.step_shapes import SHAPES, Shape, ShapeName
from lohan.config import Precision
from lohan.units import format_bytes

LEARNING_RATE: Final = 1e-5
# bf16 weights, fp32 masters, gradients and moments; activations come on top.
TORCH_BYTES_PER_PARAMETER: Final = 18


class System(StrEnum):
    """Those that LoHan is compared with."""

    ROUNDPIPE = "roundpipe"
    DEEPSPEED_CPU = "deepspeed-cpu"
    DEEPSPEED_NVME = "deepspeed-nvme"
    TORCH = "torch"


@dataclass(frozen=True, slots=True)
class Traits:
    """What decides whether and with whom a system can run."""

    package: str
    host_bytes_per_parameter: int
    """An estimate from the systems' sources: weights, masters, moments, gradients, and what page-locking rounds up."""
    in_files: bool = False
    """Its states lie in files; else in host memory (`torch`: beside the model)."""
    variants: tuple[str, ...] = ("",)
    """Ways of computing that a tuned run chooses from."""

    @property
    def tiers(self) -> frozenset[StatesTier]:
        return frozenset({StatesTier.TMPFS, StatesTier.DISK} if self.in_files else {StatesTier.RAM})


TRAITS: Final = MappingProxyType(
    {
        System.ROUNDPIPE: Traits("roundpipe", 24, variants=("layer", "stage")),
        System.DEEPSPEED_CPU: Traits("deepspeed", 20, variants=("recompute", "keep")),
        System.DEEPSPEED_NVME: Traits("deepspeed", 10, in_files=True, variants=("recompute", "keep")),
        System.TORCH: Traits("torch", 4, variants=("recompute", "keep")),
    }
)


class PeerTask(BaseModel):
    """One system in one setting, ready to be run by a child."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    system: System
    tuned: bool
    shape_name: ShapeName
    tier: StatesTier
    batch: int
    sequence: int
    precision: Precision
    device: str
    """`cpu`, or a GPU's UUID."""
    gpu_cap_bytes: int | None
    directories: tuple[Path, ...]
    folders: tuple[Path, ...] = ()
    warmup: int = 0
    micro_batch: int
    """Rows that run through the model at once; divides the batch."""
    variant: str
    largest_norm: float = 1.0
    """Of gradients, that clipping leaves where the system is tuned."""

    @property
    def shape(self) -> Shape:
        return SHAPES[self.shape_name]

    @property
    def max_norm(self) -> float | None:
        """Clipping is part of how a system is tuned: as installed none of them clips."""
        return self.largest_norm if self.tuned else None

    @property
    def name(self) -> str:
        """As progress shows it."""
        return f"{self.system} {'tuned' if self.tuned else 'as installed'}, {self.shape_name} {self.tier} batch {self.batch}"


def micro_batches(batch: int) -> list[int]:
    """The batch and its halves: what a batch can be cut into in equal parts, largest first."""
    return [batch // parts for parts in (1 << power for power in range(batch.bit_length())) if batch % parts == 0]


def reason_not_to_run(task: PeerTask) -> str | None:
    """Why a system cannot run here, if that is known before it is started."""
    package = TRAITS[task.system].package
    if find_spec(package) is None:
        return f"{package} is not installed: pip install {package} (docs/development.md says how, without network too)"
    if task.system is not System.TORCH:
        return f"{task.system} needs a CUDA GPU, and there is none" if task.device == "cpu" else None
    if task.tuned and task.device != "cpu" and find_spec("liger_kernel") is None:
        return "liger_kernel is not installed: pip install liger-kernel"
    need = TORCH_BYTES_PER_PARAMETER * task.shape.parameters
    if task.device != "cpu" and task.gpu_cap_bytes is not None and need > task.gpu_cap_bytes:
        have = format_bytes(task.gpu_cap_bytes)
        return f"weights, masters, moments and gradients need {format_bytes(need)} of GPU memory, {have} may be used"
    return None
