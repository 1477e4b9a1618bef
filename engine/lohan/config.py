"""The run's configuration: one frozen, typed tree, read from one TOML file (`lohan train RUN.toml`).

The service writes the same file (`runs/<id>/run.toml`) for every run it starts, so a run can always be repeated by hand.
"""

from __future__ import annotations

import tomllib
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from lohan.errors import ConfigError


class Precision(StrEnum):
    """How numbers are held while training; master weights have all 32 bits in both."""

    BF16 = "bf16"
    FP32 = "fp32"


class KernelSet(StrEnum):
    """What computes norms, gated activations, rotary positions and the loss: each is one operator, or several of torch's."""

    AUTO = "auto"
    """The fastest that was measured here; without a measurement `compiled` where a GPU can compile, else `torch`."""
    TORCH = "torch"
    """The model's own code, operator by operator."""
    LIGER = "liger"
    """Liger's Triton kernels, and for the loss what torch compiles; a GPU with the package `liger-kernel`."""
    COMPILED = "compiled"
    """The model's formulas, compiled by torch for a GPU. On a CPU each is still one operator, and computed as it is written."""


class States(StrEnum):
    """How the optimizer's moments are kept."""

    AUTO = "auto"
    """In fp32."""
    EIGHT_BIT = "8bit"
    """In 8 bits with a scale per 256: half the bytes of all states, and updates that are not exactly AdamW's."""


class Durability(StrEnum):
    """What a run can be resumed from."""

    STEP = "step"
    """Every step: the state files have two slots, and a step is committed as a whole. Twice the space, no further traffic."""
    SNAPSHOT = "snapshot"
    """A step every few minutes, and the last one before a stop: the same two slots, and states in RAM are written only then."""
    NONE = "none"
    """Nothing: states are updated in place, and a run that is interrupted starts again from the base model."""


class UnsafeFilesystems(StrEnum):
    """Whether states may lie on file systems that keep them in memory, copy on write, or go with a container."""

    REFUSE = "refuse"
    ALLOW = "allow"
    """For trials, tests and benchmarks."""


class Schedule(StrEnum):
    """How the learning rate moves over the steps, after the warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


class Clip(StrEnum):
    """What is done about gradients that are too large."""

    NONE = "none"
    PER_UNIT = "per_unit"
    """Each unit (a transformer block, the embedding, the head) is scaled down to the largest norm by itself, as it arrives."""
    GLOBAL = "global"
    """All gradients are scaled by one factor so that their common norm is at most the largest, as
    `torch.nn.utils.clip_grad_norm_` does. All gradients stay in host memory until the backward has ended; updates begin then, or before
    (`ClipUpdate`)."""


class ClipUpdate(StrEnum):
    """When updates begin whose factor only the backward's end can tell; the bits are the same."""

    AUTO = "auto"
    """After the backward, and on arrival while few enough of the last 32 steps were clipped or left out (`planning/prices.py`)."""
    DEFER = "defer"
    """After the backward."""
    SPECULATE = "speculate"
    """On arrival, as if nothing were clipped; where something is, the step is taken back and done again. Where nothing could be taken
    back (`lohan.planning.schedule.can_speculate`), after the backward."""


class UpdateSchedule(StrEnum):
    """When and how weights are updated; all give the same bits."""

    SERIAL = "serial"
    """After the backward's end; reading, updating and writing of consecutive chunks overlap. All gradients stay in host memory."""
    NAIVE = "naive"
    """As a unit's gradients arrive; a chunk is read after the one before it is written."""
    OPTIMIZED = "optimized"
    """As a unit's gradients arrive; the next chunk is read and the previous one written while one is updated."""


class GradientBuffers(StrEnum):
    """For how many units gradients find room in host memory while they wait for their update."""

    AUTO = "auto"
    """The plan chooses: `all` where a GPU computes, the schedule is `optimized` and host memory has room for it; else `few`."""
    FEW = "few"
    """Three, each as large as the largest unit's: a backward that is faster than the updates waits for them. Units are updated in the order
    in which their gradients arrive."""
    ALL = "all"
    """One for each unit: 2 bytes a parameter, 4 in fp32. The backward waits for no update, and of the units that wait the one that the next
    forward needs first is updated first, so that the rest lies under that forward."""


class ActivationPolicy(StrEnum):
    """What decides which of a block's inner activations are kept from forward to backward, and in which tier; the others are computed
    again. All give the same bits. What each is after, and how it is expressed here, stands in `lohan.planning.policies`."""

    HOLISTIC = "holistic"
    """Algorithm 1 over all tiers: the shortest step that the cost model finds."""
    ZERO_INFINITY = "zero-infinity"
    """Inputs of blocks in host memory, everything else computed again."""
    CAPUCHIN = "capuchin"
    """Each output by itself: kept, in host memory at the furthest, where its copy is hidden or shorter than its recomputation."""
    G10 = "g10"
    """Everything leaves the device, and nothing is computed again."""
    CHECKMATE = "checkmate"
    """The least recomputation within the memory, solved for as a mixed-integer linear program; needs SciPy."""
    FLASHNEURON = "flashneuron"
    """Activations on the drives, all model states in the device's memory."""
    COLOSSAL = "colossal"
    """Inputs of blocks on the device, everything else computed again."""
    CPU_ACTIVATIONS = "cpu-activations"
    """As `holistic`, but nothing goes to the drives."""
    KEEP_ALL = "keep-all"
    """Nothing is computed again; the device is filled first, then host memory, then the drives."""
    RECOMPUTE_ALL = "recompute-all"
    """Inputs of blocks in the same order of tiers, everything else computed again."""


class UnitGrain(StrEnum):
    """What a block moves as: whole, or module by module."""

    AUTO = "auto"
    """The plan chooses: `block` where that fits."""
    BLOCK = "block"
    """A transformer block is one unit."""
    MODULE = "module"
    """Attention and MLP are units of their own: slots and gradient buffers are as large as the larger of them, and the inputs of both are
    kept from forward to backward."""


class RamStates(StrEnum):
    """In place of a number of bytes."""

    AUTO = "auto"


def _check_ram_states(value: Any, check: ValidatorFunctionWrapHandler) -> int | RamStates:
    """One sentence, where a union would have one for each of its members."""
    try:
        found: int | RamStates = check(value)
    except ValidationError:
        raise ValueError('it must be "auto", or bytes from 0') from None
    return found


RamStateBytes = Annotated[Annotated[int, Field(ge=0)] | RamStates, WrapValidator(_check_ram_states)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ModelSection(_Section):
    path: Path
    """A Hugging Face model folder (config.json, tokenizer.json, *.safetensors), or a GGUF file."""


class DataSection(_Section):
    path: Path
    """A JSONL file (OpenAI messages, Alpaca, or prompt/completion), or a token file that `lohan.data.pack` wrote (*.safetensors)."""
    skip_bad_rows: bool = False
    """Whether rows that cannot be used are left out; by default they stop the run, with their line numbers."""


class TrainingSection(_Section):
    batch_size: Annotated[int, Field(ge=1, le=4096)] = 8
    """Rows per step."""
    sequence_length: Annotated[int, Field(ge=8, le=131072)] = 512
    """Tokens per row at most; longer rows are cut, and the cut is counted."""
    epochs: Annotated[FiniteFloat, Field(gt=0, le=1000)] = 1.0
    """Passes over the data; `max_steps` wins where both are given."""
    max_steps: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    """Optimizer updates."""
    learning_rate: Annotated[FiniteFloat, Field(gt=0, le=1)] = 2e-5
    schedule: Schedule = Schedule.COSINE
    warmup_steps: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Updates over which the learning rate rises linearly from 0."""
    beta1: Annotated[FiniteFloat, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[FiniteFloat, Field(ge=0, lt=1)] = 0.999
    epsilon: Annotated[FiniteFloat, Field(gt=0, le=1)] = 1e-8
    weight_decay: Annotated[FiniteFloat, Field(ge=0, le=1)] = 0.0
    """Decoupled weight decay (AdamW); not applied to one-dimensional parameters (norms and biases)."""
    clip: Clip = Clip.NONE
    """What is done about gradients that are too large: `none`, `per_unit` or `global`."""
    max_gradient_norm: Annotated[FiniteFloat, Field(gt=0)] = 1.0
    """The largest norm that clipping leaves."""
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    precision: Precision = Precision.BF16
    evaluation_rows: Annotated[int, Field(ge=0, le=4096)] = 64
    """Training rows, in the order in which they are trained, whose mean loss is measured before the first and after the last step; 0
    measures none."""
    keep_steps: tuple[Annotated[int, Field(ge=1, le=10_000_000)], ...] = ()
    """Steps whose states are kept as named snapshots (`step-000100`), from which `lohan train --resume-from` begins again."""


class EngineSection(_Section):
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cpu:\d+|cuda|cuda:\d+|GPU-[0-9a-f-]+)$")] = "auto"
    """`auto` takes the first GPU, or the CPU where there is none; GPU UUIDs are accepted."""
    micro_batch_size: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Rows of the batch that run through a block at once; None lets the plan choose."""
    kernels: KernelSet = KernelSet.AUTO
    """What computes norms, gated activations and rotary positions: `torch` the model's own code, `liger` or `compiled` fused kernels, on a
    GPU. `auto` takes the fastest that `lohan profile` measured, else `compiled` on a GPU that can compile, and `torch` otherwise. The same
    set gives the same bits again, another one others."""
    grain: UnitGrain = UnitGrain.AUTO
    """`block` moves transformer blocks whole, `module` attention and MLP one by one, for blocks that are too large for the GPU; `auto`
    takes modules where blocks do not fit. A run is resumed with the grain it began with."""
    state_directories: tuple[Path, ...] = ()
    """Where master weights and moments live, one folder per drive; none means `states/` in the run's folder."""
    states: States = States.AUTO
    """`auto` keeps moments in fp32 (12 bytes a parameter with the master weights), `8bit` in 8 bits (6.03 bytes)."""
    durability: Durability = Durability.STEP
    """`step` commits every step, for twice the space on the drives; `snapshot` one every `snapshot_minutes`, for the same space and without
    writing states in RAM at every step; `none` keeps nothing to resume from."""
    snapshot_minutes: Annotated[FiniteFloat, Field(gt=0, le=10080)] = 10.0
    """With durability `snapshot`, the time between two snapshots: as much work may be lost."""
    ram_state_bytes: RamStateBytes = RamStates.AUTO
    """Host memory for model states, spread over all units; the others lie on the drives, where all have a place unless durability is
    `none`. `auto` lets the plan choose: where the machine was measured as much as makes the step shortest, else what is left, and either
    way no more than leaves a quarter of host memory to others (`lohan.planning.fit`)."""
    chunk_parameters: Annotated[int, Field(ge=2048, multiple_of=2048)] | None = None
    """Parameters in a chunk, the grain of reading, updating and writing states; None lets the plan choose. A run is resumed with the chunks
    it began with."""
    unsafe_filesystems: UnsafeFilesystems = UnsafeFilesystems.REFUSE
    """`allow` takes state directories on tmpfs, and for durable states on btrfs or a container's layer: for trials and benchmarks."""
    gpu_memory_bytes: Annotated[int, Field(ge=1)] | None = None
    """Cap on the GPU's memory; None means what is free."""
    host_memory_bytes: Annotated[int, Field(ge=1)] | None = None
    """Cap on the host memory the run may hold; None means what is free."""
    schedule: UpdateSchedule = UpdateSchedule.OPTIMIZED
    """When weights are updated: `serial`, `naive` or `optimized`; the results are the same."""
    profiles: Path | None = None
    """Where `lohan profile` keeps what it measured of this machine. With a profile of machine and model the plan foresees a step's time and
    chooses by it; without, every block is computed again in the backward."""
    policy: ActivationPolicy = ActivationPolicy.HOLISTIC
    """What decides about blocks' inner activations where the machine was measured: `holistic` is the fastest, the others are what other
    systems do, for comparisons."""
    activation_ram_bytes: Annotated[int, Field(ge=0)] | None = None
    """Host memory for activations at most; None means what is left."""
    activation_ssd_bytes: Annotated[int, Field(ge=0)] | None = None
    """Space on the drives for activations at most, which every step writes; None means what is left, 0 keeps them off the drives."""
    swapped_activation_bytes: Annotated[int, Field(ge=0)] | None = None
    """With policy `holistic`: so much leaves the GPU instead of what the plan would choose, as near as whole outputs come to it; for
    measurements."""
    gradient_buffers: GradientBuffers = GradientBuffers.AUTO
    """Host memory for gradients that wait for their update: `few` units', or `all`, so that the backward never waits for updates; `auto`
    takes `all` on a GPU where there is room. Where updates begin after the backward it is always `all`."""
    clip_updates: ClipUpdate = ClipUpdate.AUTO
    """With `training.clip = "global"`: `defer` updates after the backward, `speculate` on arrival, and again with the right factor where
    gradients are clipped, which takes durability `step` or, where all states lie in RAM, room for a second place of theirs; `auto`
    speculates while fewer of the last 32 steps would be done again than pay: a quarter, or what the plan says of states in RAM."""
    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """CPU threads for the optimizer and for `device = "cpu"`; 0 means one for each CPU this process may use, and for the optimizer, of 8 or
    more, two fewer: those are for the threads that launch the GPU's work."""


class OutputSection(_Section):
    directory: Path
    """The run's folder: events.jsonl, trainer.log, export/ are written here."""


class RunConfig(_Section):
    """A whole run."""

    version: Annotated[int, Field(ge=1, le=1)] = 1
    model: ModelSection
    data: DataSection
    training: TrainingSection = TrainingSection()
    engine: EngineSection = EngineSection()
    output: OutputSection

    @model_validator(mode="after")
    def _steps_that_are_kept_are_recorded(self) -> RunConfig:
        if self.training.keep_steps and self.engine.durability is Durability.NONE:
            raise ValueError("training.keep_steps names steps to keep, and engine.durability is none; use step or snapshot")
        return self

    @model_validator(mode="after")
    def _micro_batch_within_batch(self) -> RunConfig:
        micro, batch = self.engine.micro_batch_size, self.training.batch_size
        if micro is not None and micro > batch:
            raise ValueError(f"engine.micro_batch_size is {micro}, above training.batch_size {batch}")
        return self


def parse_run_config(values: dict[str, object], *, place: str) -> RunConfig:
    """Check `values` against the tree.

    Raises:
        ConfigError: every fault at once, each with its field path, its value and what is allowed.
    """
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        faults = "; ".join(_describe(fault) for fault in error.errors())
        raise ConfigError(faults, place=place, remedy="Correct the fields named above.") from error


def _describe(fault: object) -> str:
    assert isinstance(fault, dict)
    path = ".".join(str(part) for part in fault["loc"]) or "file"
    shown = "" if fault["type"] in ("missing", "extra_forbidden") or isinstance(fault["input"], dict) else f" (found {fault['input']!r})"
    return f"{path}: {fault['msg']}{shown}"


def load_run_config(path: Path) -> RunConfig:
    """Read a run's TOML file; relative paths in it are taken from the file's own folder.

    Raises:
        ConfigError: the file is missing, is not TOML, or has a field or value that is not allowed.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError("no such file", place=str(path), remedy="Name an existing run file.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"not valid TOML: {error}", place=str(path), remedy="Correct the line named above.") from error
    config = parse_run_config(values, place=str(path))
    base = path.resolve().parent
    return config.model_copy(
        update={
            "model": config.model.model_copy(update={"path": base / config.model.path}),
            "data": config.data.model_copy(update={"path": base / config.data.path}),
            "output": config.output.model_copy(update={"directory": base / config.output.directory}),
            "engine": config.engine.model_copy(
                update={
                    "state_directories": tuple(base / directory for directory in config.engine.state_directories),
                    "profiles": base / config.engine.profiles if config.engine.profiles is not None else None,
                }
            ),
        }
    )
