"""Runs to plan, of many models on many machines, with block times by published peaks: for comparing plans and timing the planner."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Any, Final

from lohan.bench.step_shapes import SHAPES, Shape, ShapeName
from lohan.config import ActivationPolicy, EngineSection, KernelSet, TrainingSection
from lohan.errors import LohanError
from lohan.hardware.catalog import NAMED_MACHINES
from lohan.hardware.probe import HardwareFacts
from lohan.hardware.profile import BlockTimes, HardwareProfile, Measured
from lohan.planning.plan import Plan
from lohan.planning.planner import make_plan
from lohan.planning.workload import OperatorGroup, Workload
from lohan.units import GIB

LENGTH: Final = 1024
MODELS: Final = MappingProxyType(
    {
        "tiny": SHAPES[ShapeName.TINY],
        "3.43b": SHAPES[ShapeName.LLAMA_3_43B],
        "6.7b": SHAPES[ShapeName.LLAMA_6_7B],
        "13b": Shape(hidden=5120, intermediate=13824, layers=40, heads=40, key_value_heads=40, vocabulary=32000),
    }
)
MACHINES: Final = ("rtx-4090", "rtx-3090", "rtx-4080", "small")
"""Named ones; and an RTX 4090 with little host memory and two drives."""
STATES: Final = (
    {"durability": "none"},
    {"durability": "none", "ram_state_bytes": 10**12},
    {"durability": "none", "ram_state_bytes": 0},
    {"durability": "step"},
    {"durability": "snapshot"},
)
"""Where states lie: as chosen, all in RAM, all on drives; and committed ones."""
_KERNELS: Final = (KernelSet.TORCH, KernelSet.LIGER)
_FUSED_SHARE: Final = 0.5
"""Of what a norm, an activation or a rotation takes with torch's own kernels: any figure that tells the sets apart."""


@dataclass(frozen=True)
class Case:
    """One run to plan."""

    model: str
    machine: str
    batch: int
    engine: dict[str, Any] = field(hash=False)
    training: dict[str, Any] = field(hash=False, default_factory=dict)

    @property
    def name(self) -> str:
        settings = ", ".join(f"{name}={value}" for name, value in sorted({**self.training, **self.engine}.items()))
        return f"{self.model} on {self.machine}, {self.batch} x {LENGTH}: {settings}"

    def plan(self) -> Plan:
        """Raises: as `make_plan`."""
        workload = workload_of(self.model)
        facts, profile = machine_of(self.machine, self.model)
        return make_plan(
            workload,
            model_name=self.model,
            training=TrainingSection(batch_size=self.batch, sequence_length=LENGTH, **self.training),
            engine=EngineSection(**self.engine),
            hardware=facts,
            profile=profile,
        )

    def outcome(self) -> str:
        """The plan as JSON, or why there is none."""
        try:
            return self.plan().model_dump_json()
        except LohanError as error:
            return f"{type(error).__name__}: {error}"


@cache
def workload_of(model: str) -> Workload:
    """Traced; needs torch."""
    from lohan.bench.step_model import make_config
    from lohan.models.blocks import trace_workload

    return trace_workload(make_config(MODELS[model], LENGTH))


@cache
def machine_of(machine: str, model: str) -> tuple[HardwareFacts, HardwareProfile]:
    """A machine, and its profile with the model's block at several sizes."""
    named = NAMED_MACHINES["rtx-4090" if machine == "small" else machine]
    facts, profile = named.facts, named.profile
    if machine == "small":
        ram = facts.ram.model_copy(update={"total_bytes": 96 * GIB, "free_bytes": 96 * GIB})
        facts = facts.model_copy(update={"ram": ram, "state_directories": facts.state_directories[:2]})
        rates = {"ssd_read": 13e9, "ssd_write": 6.8e9, "ssd_mixed": 9e9, "host_memory": 60e9, "commit_seconds": 0.01}
        profile = profile.model_copy(update={name: Measured(value=rate) for name, rate in rates.items()})
    workload = workload_of(model)
    blocks = [
        _block(workload, profile, rows, kernels, precision)
        for kernels in _KERNELS
        for precision in ("bf16", "fp32")
        for rows in (1, 2, 4, 8, 16)
    ]
    return facts, profile.model_copy(update={"blocks": tuple(blocks)})


def _block(workload: Workload, profile: HardwareProfile, rows: int, kernels: KernelSet, precision: str) -> BlockTimes:
    width = 2 if precision == "bf16" else 4
    flops, memory = profile.matmul_flops_per_second.value, profile.device_memory.value
    operators: dict[str, float] = {}
    for operator in workload.operators_of(kernels):
        seconds = width * operator.traffic_elements.at(rows, LENGTH) / memory
        if operator.group is not OperatorGroup.OTHER:
            seconds = max(seconds, operator.flops.at(rows, LENGTH) / flops * width / 2)
        operators[operator.label] = seconds * (_FUSED_SHARE if operator.label.startswith("lohan") else 1.0)
    forward = sum(operators.values()) + 5e-5  # launches, which fewer rows feel
    head = Measured(value=4 * workload.head_forward_flops(rows, LENGTH) / flops)
    return BlockTimes(
        workload_digest=workload.digest,
        kernels=kernels.value,
        precision=precision,
        rows=rows,
        sequence_length=LENGTH,
        forward_seconds=Measured(value=forward),
        backward_seconds=Measured(value=2 * forward),
        operator_seconds=operators,
        head_seconds=head,
    )


def cases(models: Sequence[str] = tuple(MODELS)) -> Iterator[Case]:
    """The whole grid."""
    batches = (1, 4, 32, 128)
    for number, (model, machine, batch, states) in enumerate(itertools.product(models, MACHINES, batches, STATES)):
        clip = ("none", "global", "per_unit")[number % 3]
        kernels = ("auto", "torch", "liger", "compiled")[number // 3 % 4]
        yield Case(model, machine, batch, {**states, "kernels": kernels}, {"clip": clip})
    for model, machine, batch in itertools.product(models, ("rtx-4080", "small"), (8, 48)):
        for engine, training in _single_settings():
            yield Case(model, machine, batch, engine, training)


def _single_settings() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each differs in one thing from what is chosen by itself."""
    for policy in ActivationPolicy:
        if policy is not ActivationPolicy.CHECKMATE:  # which another package solves
            yield {"durability": "none", "policy": str(policy)}, {}
    for schedule in ("serial", "naive"):
        yield {"durability": "none", "schedule": schedule}, {}
    for buffers in ("few", "all"):
        yield {"durability": "none", "gradient_buffers": buffers}, {}
    yield {"durability": "step", "clip_updates": "speculate"}, {"clip": "global"}
    yield {"durability": "none", "swapped_activation_bytes": 8 * GIB}, {}
    yield {"durability": "none", "activation_ram_bytes": 4 * GIB, "activation_ssd_bytes": 32 * GIB}, {}
    yield {"durability": "none", "micro_batch_size": 3}, {}
    yield {"durability": "none", "states": "8bit"}, {}
    yield {"durability": "none", "gpu_memory_bytes": 8 * GIB, "host_memory_bytes": 48 * GIB}, {}
    yield {"durability": "none", "grain": "module"}, {}
    yield {"durability": "none", "device": "cpu"}, {}
    yield {"durability": "none"}, {"precision": "fp32"}
