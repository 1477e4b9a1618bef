"""What `lohan bench step` is asked to measure, checked; and one setting of it, as a child process gets it. No torch."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, ValidationError

from lohan.bench.step_shapes import SHAPES, Shape, ShapeName
from lohan.config import (
    ActivationPolicy,
    Clip,
    Durability,
    EngineSection,
    GradientBuffers,
    KernelSet,
    Precision,
    States,
    TrainingSection,
    UnsafeFilesystems,
    UpdateSchedule,
)
from lohan.errors import ConfigError
from lohan.hardware.probe import IN_MEMORY_FILESYSTEMS, filesystem_type
from lohan.planning.plan import Plan
from lohan.planning.retention import Retention
from lohan.planning.schedule import EXPECTED_CLIP_RATE
from lohan.planning.state_form import StateForm
from lohan.units import GIB, format_bytes

DEFAULT_STEPS: Final = 3
DEFAULT_WARMUP: Final = 1
SETTING_FIELDS: Final = (
    *("system", "tuned", "schedule", "policy", "shape", "batch", "sequence", "precision", "states", "states_tier", "durability", "clip"),
    *("max_norm", "expected_clip_rate", "kernels", "gpu_cap_bytes", "host_cap_bytes", "activation_ram_bytes"),
    *("swapped_activation_bytes", "gradient_buffers"),
)
"""Records that agree in these are measurements of the same."""
_LEARNING_RATE: Final = 1e-5
_LEAST_CAP_BYTES: Final = GIB
# The states are padded to whole blocks of the drives: 0.06 % at the most for these shapes. Twice is enough for any.
_ALL_STATES: Final = 2


class StateKind(StrEnum):
    """How a trainable parameter's states are kept."""

    FP32 = "fp32"
    """fp32 master and moments, 12 bytes; what training in fp32 keeps."""
    SPLIT = "split"
    """The fp32 master as bf16 and a 16-bit remainder, fp32 moments, 12 bytes; what training in bf16 keeps."""
    EIGHT_BIT = "8bit"
    """8-bit moments, 6.03 bytes."""


class StatesTier(StrEnum):
    """Where the states lie."""

    RAM = "ram"
    """In host memory; with durability, in the state directories as well."""
    TMPFS = "tmpfs"
    """In files that are memory: the file path of the engine without a drive."""
    DISK = "disk"


class StepChoice(BaseModel):
    """What settings may differ in that one process takes in turns."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    retention: Retention
    micro_batch_size: int
    trace_path: Path | None = None
    """As `StepTask.trace_path`."""


class StepTask(BaseModel):
    """One setting, ready to be run by a child: what was asked for, and the plan it got."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    shape_name: ShapeName
    tier: StatesTier
    states: StateKind
    training: TrainingSection
    engine: EngineSection
    """`state_directories` are those that were named; a child works in `folders`."""
    plan: Plan
    folders: tuple[Path, ...] = ()
    """Empty folders of this setting alone."""
    warmup: int = 0
    """How many of the first timed steps are warm-up, during which no other setting's process comes or goes."""
    trace_step: int = 1
    """Which step is recorded, counted from 1 over all that are taken."""
    trace_path: Path | None = None
    """Where the recorded step is written for ui.perfetto.dev."""
    others: tuple[StepChoice, ...] = ()
    """What the child goes on with by `use 1` and so on; `use 0` is the plan's own. Warm-up and recorded step are each one's."""

    @property
    def choice(self) -> StepChoice:
        """What of the task a process can change between two steps."""
        return StepChoice(retention=self.plan.retention, micro_batch_size=self.plan.micro_batch_size, trace_path=self.trace_path)

    @property
    def shape(self) -> Shape:
        return SHAPES[self.shape_name]

    @property
    def directories(self) -> tuple[Path, ...]:
        """Those that were named."""
        return self.engine.state_directories

    @property
    def name(self) -> str:
        """As progress shows it."""
        swapped = self.engine.swapped_activation_bytes
        parts = [str(self.shape_name), str(self.tier), f"batch {self.training.batch_size}", str(self.engine.schedule)]
        parts += [self.plan.policy] if self.plan.forecast is not None else []
        parts += [f"swapping {format_bytes(swapped)}"] if swapped is not None else []
        parts += [str(self.engine.kernels)] if self.engine.kernels is not KernelSet.AUTO else []
        return " ".join(parts)


@dataclass(frozen=True, slots=True)
class StepSetting:
    """One setting before it is planned."""

    schedule: UpdateSchedule
    batch: int
    tier: StatesTier
    policy: ActivationPolicy = ActivationPolicy.HOLISTIC
    swapped_bytes: int | None = None
    """Of activations, that leave the device whatever the plan would choose."""
    kernels: KernelSet = KernelSet.AUTO


@dataclass(frozen=True)
class StepOptions:
    """What is measured: every schedule with every batch in every tier.

    Raises:
        ConfigError: an option's value is out of range, two options contradict each other, or a folder is missing or of the wrong kind.
    """

    shape: ShapeName = ShapeName.LLAMA_3_43B
    batches: tuple[int, ...] = (8,)
    sequence: int = 1024
    schedules: tuple[UpdateSchedule, ...] = tuple(UpdateSchedule)
    states: StateKind | None = None
    """None: what `precision` keeps."""
    tiers: tuple[StatesTier, ...] = (StatesTier.RAM,)
    directories: tuple[Path, ...] = (Path(),)
    tmpfs_directory: Path = Path("/dev/shm")  # noqa: S108 - a file system that is memory is what is asked for
    durability: Durability = Durability.NONE
    clip: Clip = Clip.NONE
    max_norm: float = 1.0
    clip_rate: float = EXPECTED_CLIP_RATE
    """The part of the steps that plans expect to be clipped; a run learns it from its first steps."""
    gpu_cap_bytes: int | None = None
    host_cap_bytes: int | None = None
    micro_batch: int | None = None
    device: str = "auto"
    precision: Precision = Precision.BF16
    profiles: Path | None = None
    """Where `lohan profile` keeps what it measured of this machine and shape; None: plans without a forecast."""
    policies: tuple[ActivationPolicy, ...] = (ActivationPolicy.HOLISTIC,)
    swapped_bytes: tuple[int | None, ...] = (None,)
    """Forced amounts of activations that leave the device; None lets the policy choose."""
    activation_ram_bytes: int | None = None
    """Host memory for activations at most."""
    gradient_buffers: GradientBuffers = GradientBuffers.AUTO
    kernels: tuple[KernelSet, ...] = (KernelSet.AUTO,)
    steps: int = DEFAULT_STEPS
    warmup: int = DEFAULT_WARMUP
    rounds: int = 1
    trace: Path | None = None
    """Where a step of each setting is written for ui.perfetto.dev; with several settings their names are joined to it."""

    def __post_init__(self) -> None:
        if not self.batches or not self.schedules or not self.tiers:
            raise ConfigError("nothing to measure", place="--batch", remedy="Name at least one batch, schedule and tier.")
        for name, value, least in (("--steps", self.steps, 1), ("--warmup", self.warmup, 0), ("--rounds", self.rounds, 1)):
            if value < least:
                raise ConfigError(f"{value} is less than {least}", place=name, remedy=f"Give at least {least}.")
        for name, cap in (("--gpu-cap", self.gpu_cap_bytes), ("--host-cap", self.host_cap_bytes)):
            if cap is not None and cap < _LEAST_CAP_BYTES:
                raise ConfigError(
                    f"{format_bytes(cap)} holds no training", place=name, remedy=f"Give at least {format_bytes(_LEAST_CAP_BYTES)}."
                )
        if not 0 <= self.clip_rate <= 1:
            raise ConfigError(f"{self.clip_rate} is no part of the steps", place="--clip-rate", remedy="Give 0 to 1.")
        if self.micro_batch is not None and self.micro_batch > min(self.batches):
            raise ConfigError(
                f"{self.micro_batch} is more than the smallest batch, {min(self.batches)}", place="--micro-batch", remedy="Give less."
            )
        if self.profiles is None and (self.policies != (ActivationPolicy.HOLISTIC,) or self.swapped_bytes != (None,)):
            raise ConfigError(
                "activations are decided about by what was measured of this machine",
                place="--profiles",
                remedy="Measure with `lohan profile MODEL`, and name the folder.",
            )
        self._check_states()
        self._check_folders()
        for setting in self.settings:
            self.training(setting)
            self.engine(setting)

    def _check_states(self) -> None:
        plain = StateKind.FP32 if self.precision is Precision.FP32 else StateKind.SPLIT
        if self.states not in (None, plain, StateKind.EIGHT_BIT):
            raise ConfigError(
                f"training in {self.precision} keeps {plain} or 8bit states, not {self.states}",
                place="--states",
                remedy="Give --precision fp32 for fp32 states, and --precision bf16 for split ones.",
            )

    def _check_folders(self) -> None:
        for tier, option in ((StatesTier.DISK, "--directory"), (StatesTier.TMPFS, "--tmpfs-directory")):
            for folder in self.named_directories(tier) if tier in self.tiers else ():
                if not folder.is_dir():
                    raise ConfigError("there is no such folder", place=f"{option} {folder}", remedy="Name a folder that exists.")
                filesystem = filesystem_type(folder)
                if (filesystem in IN_MEMORY_FILESYSTEMS) is not (tier is StatesTier.TMPFS):
                    raise ConfigError(
                        f"it is on {filesystem or 'an unknown file system'}, which is not what tier {tier} measures",
                        place=f"{option} {folder}",
                        remedy="Name a folder on a drive for disk, and one on a tmpfs for tmpfs.",
                    )

    @property
    def settings(self) -> list[StepSetting]:
        """All of them; those of one tier and batch follow each other. Amounts are forced upon the policy `holistic` only."""
        decisions = [(policy, None) for policy in self.policies if policy is not ActivationPolicy.HOLISTIC]
        forced = [(ActivationPolicy.HOLISTIC, swapped) for swapped in self.swapped_bytes if ActivationPolicy.HOLISTIC in self.policies]
        product = itertools.product(self.tiers, self.batches, self.schedules, [*forced, *decisions], self.kernels)
        return [StepSetting(schedule, batch, tier, *decision, kernels) for tier, batch, schedule, decision, kernels in product]

    @property
    def state_kind(self) -> StateKind:
        if self.states is not None:
            return self.states
        return StateKind.FP32 if self.precision is Precision.FP32 else StateKind.SPLIT

    def named_directories(self, tier: StatesTier) -> tuple[Path, ...]:
        """Where the files of a tier lie."""
        return (self.tmpfs_directory,) if tier is StatesTier.TMPFS else self.directories

    def trace_path(self, setting: StepSetting) -> Path | None:
        """Of one setting."""
        if self.trace is None or len(self.settings) == 1:
            return self.trace
        parts = [self.trace.stem, setting.tier, setting.batch, setting.schedule]
        parts += [setting.policy] if len(self.policies) > 1 else []
        parts += [setting.swapped_bytes] if setting.swapped_bytes is not None else []
        parts += [setting.kernels] if len(self.kernels) > 1 else []
        return self.trace.with_stem("-".join(map(str, parts)))

    @property
    def used_directories(self) -> tuple[Path, ...]:
        """Those of all tiers that are measured in files."""
        tiers = [tier for tier in self.tiers if tier is not StatesTier.RAM or self.durability is not Durability.NONE]
        return tuple(dict.fromkeys(folder for tier in tiers for folder in self.named_directories(tier)))

    def training(self, setting: StepSetting) -> TrainingSection:
        """As a run's configuration would have it.

        Raises:
            ConfigError: a value is out of range.
        """
        try:
            return TrainingSection(
                batch_size=setting.batch,
                sequence_length=self.sequence,
                learning_rate=_LEARNING_RATE,
                clip=self.clip,
                max_gradient_norm=self.max_norm,
                precision=self.precision,
            )
        except ValidationError as error:
            names = {"batch_size": "--batch", "sequence_length": "--sequence", "max_gradient_norm": "--max-norm"}
            raise _named(error, names) from error

    def engine(self, setting: StepSetting) -> EngineSection:
        """As a run's configuration would have it.

        Raises:
            ConfigError: a value is out of range.
        """
        states = States.EIGHT_BIT if self.state_kind is StateKind.EIGHT_BIT else States.AUTO
        all_bytes = _ALL_STATES * StateForm.of(self.precision, states).state_bytes(SHAPES[self.shape].parameters)
        try:
            return EngineSection(
                device=self.device,
                micro_batch_size=self.micro_batch,
                state_directories=self.named_directories(setting.tier),
                states=states,
                durability=self.durability,
                ram_state_bytes=all_bytes if setting.tier is StatesTier.RAM else 0,
                unsafe_filesystems=UnsafeFilesystems.ALLOW,
                gpu_memory_bytes=self.gpu_cap_bytes,
                host_memory_bytes=self.host_cap_bytes,
                schedule=setting.schedule,
                profiles=self.profiles,
                policy=setting.policy,
                swapped_activation_bytes=setting.swapped_bytes,
                activation_ram_bytes=self.activation_ram_bytes,
                gradient_buffers=self.gradient_buffers,
                kernels=setting.kernels,
            )
        except ValidationError as error:
            raise _named(error, {"device": "--device", "micro_batch_size": "--micro-batch"}) from error


def _named(error: ValidationError, names: dict[str, str]) -> ConfigError:
    """The first fault, under the option's name."""
    fault = error.errors()[0]
    field = str(fault["loc"][0])
    return ConfigError(f"{fault['msg']} (found {fault['input']!r})", place=names.get(field, field), remedy="Correct the value.")
