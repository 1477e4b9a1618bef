"""`lohan.init` and the session it returns: the engine is put under a model, after which each backward is one optimizer step."""

from __future__ import annotations

import resource
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch
from torch import nn

from lohan.config import Durability, Precision, States, UnsafeFilesystems
from lohan.errors import ConfigError
from lohan.models.blocks import find_units
from lohan.planning.plan import Tier
from lohan.states.layout import DEFAULT_CHUNK_PARAMETERS
from lohan.streaming import installation
from lohan.streaming.device import resolve_device
from lohan.streaming.optimizer import StepCounts, StepStatistics
from lohan.streaming.parameters import DebugMode
from lohan.streaming.regions import RegionRunner, UnitRuntime
from lohan.streaming.stages import Stages, working_dtype
from lohan.streaming.steps import StepDriver

if TYPE_CHECKING:
    from lohan.memory.arena import Ledger
    from lohan.models.blocks import Unit
    from lohan.models.weights import WeightSource
    from lohan.planning.plan import Plan


@dataclass(frozen=True, slots=True)
class Statistics:
    """What a session has done so far; `last_step` is complete once `Session.wait` has returned."""

    steps: int
    last_step: StepStatistics | None
    bytes_read: int
    """From the state files."""
    bytes_written: int
    """To the state files, the initial load included."""
    unit_loads: int
    """Units copied into a parameter slot."""
    full_logits_fallbacks: int
    """Losses that were computed through a tensor of batch x sequence x vocabulary."""
    device_peak_bytes: int
    """Most GPU memory that tensors held at once; 0 on the CPU, where `host_peak_bytes` counts everything."""
    host_peak_bytes: int
    """Most memory the process held at once."""


class Session:
    """The engine under one model: made by `lohan.init`, closed by `close` or by leaving its `with` block.

    It lives as long as the model does, so it need not be kept where only its effect is wanted.
    """

    def __init__(self, model: nn.Module, units: Sequence[UnitRuntime], stages: Stages, driver: StepDriver, micro_batch_size: int) -> None:
        self._model, self._units, self._stages, self._driver = model, units, stages, driver
        self.device = stages.device
        self.precision = stages.precision
        self.micro_batch_size = micro_batch_size
        self._fallbacks = 0
        self._use_cache = installation.switch_caches_off(model)
        # Not a method of the session: that would keep it alive.
        self._finalizer = weakref.finalize(self, stages.close)

    def wait(self) -> None:
        """Block until every update is done.

        Raises:
            EngineError: a background stage failed; its error is the cause.
        """
        self._driver.check()
        self._stages.pending.wait_all()

    @property
    def tied_names(self) -> dict[str, str]:
        """Further names of shared parameters, and the name under which `named_weights` yields each."""
        return {alias: entry.name for unit in self._units for entry in unit.parameters for alias in entry.names[1:]}

    def named_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every parameter once, under its first name, then the persistent buffers; each is read as it is asked for.

        Args:
            dtype: of the tensors; None gives fp32 (the master), and frozen parameters in the working precision.

        Raises:
            EngineError: the session is closed, or a background stage failed.
        """
        for unit in self._units:
            self._driver.check()
            self._stages.pending.wait(unit.index)
            for place in unit.layout.parameters:
                tensor = self._stages.states.read_parameter(unit.layout, place)
                yield place.name, tensor if dtype is None else tensor.to(dtype)
        for prefix, module in self._model.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:  # noqa: SLF001 - state_dict() is refused
                    yield f"{prefix}.{name}" if prefix else name, buffer.detach().cpu()

    @property
    def host_memory(self) -> Ledger:
        """Who holds how much of the session's host memory, now and at most."""
        return self._stages.arena.ledger

    @property
    def statistics(self) -> Statistics:
        steps, stages = self._driver.steps, self._stages
        on_gpu = self.device.type == "cuda"
        return Statistics(
            steps=steps,
            last_step=stages.worker.statistics(),
            bytes_read=stages.states.bytes_read,
            bytes_written=stages.states.bytes_written,
            unit_loads=stages.stream.loads,
            full_logits_fallbacks=self._fallbacks,
            device_peak_bytes=torch.cuda.max_memory_allocated(self.device) if on_gpu else 0,
            host_peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        )

    def close(self) -> None:
        """Finish the updates under way, end all threads and close the files. The model holds no weights and refuses to run."""
        self._finalizer()
        self._driver.close()
        for config, value in self._use_cache:
            config.use_cache = value

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None and self._finalizer.alive:
                self.wait()
        finally:
            self.close()

    def count_fallback(self) -> None:
        """The model's loss was computed through full logits."""
        self._fallbacks += 1


def init(
    model: nn.Module,
    optimizer: torch.optim.AdamW,
    *,
    batch_size: int,
    seq_length: int,
    state_directories: Sequence[Path | str],
    micro_batch_size: int | None = None,
    device: str = "auto",
    precision: Precision = Precision.BF16,
    states: States = States.AUTO,
    durability: Durability = Durability.NONE,
    ram_state_bytes: int = 0,
    unsafe_filesystems: UnsafeFilesystems = UnsafeFilesystems.REFUSE,
    resume: bool = False,
    weights: WeightSource | None = None,
    plan: Plan | None = None,
    slots: int | None = None,
    threads: int = 0,
    chunk_parameters: int = DEFAULT_CHUNK_PARAMETERS,
    debug: DebugMode = DebugMode.OFF,
) -> Session:
    """Put the engine under `model`: afterwards `model(input_ids=…, labels=…).loss.backward()` updates it, one backward being one step.

    Nothing about the model or the optimizer is changed when this raises.

    Args:
        model: a decoder-only transformers model; with real weights, or from `lohan.empty_model` together with `weights`.
        optimizer: a new torch.optim.AdamW over the model's parameters. Its param groups are read at the start of every backward, so
            learning-rate schedulers work; its `step()` does nothing but raise pending errors.
        batch_size: rows of a batch at most.
        seq_length: tokens of a row at most.
        state_directories: one folder per drive for the model states; overwritten.
        micro_batch_size: rows that run through a block at once; None takes the plan's, else all rows.
        device: auto, cpu, cuda, cuda:N or a GPU's UUID.
        precision: bf16 computes in bf16 with fp32 master weights; fp32 computes in fp32.
        states: moments in fp32, or in 8 bits.
        durability: whether every step can be resumed, for twice the space, or none can.
        ram_state_bytes: host memory for model states; the rest lies in the state directories.
        unsafe_filesystems: whether the directories may lie on file systems that are no place for states.
        resume: go on from the step record in the state directories; `weights` are then not read.
        weights: where the weights come from; None takes those in the model.
        plan: gives micro-batch and slots where they are None, and bounds the host memory for slots, gradients and states.
        slots: parameter buffers on the device, at least 2; None takes the plan's, else 3.
        threads: for the optimizer; 0 means all CPUs this process may use.
        chunk_parameters: grain of state I/O, a multiple of 2048.
        debug: how the engine helps to find its own faults.

    Raises:
        ConfigError: a number is out of range, or there is no such device.
        EngineError: model or optimizer are in a state the engine cannot honour.
        ModelError: no blocks were found, or `weights` do not fit.
        CapacityError, StorageError: the state directories cannot hold the states.
        ResumeError: there is no state to resume, it is damaged, or belongs to another model.
        CapacityError: host memory cannot hold what moves through it.
    """
    _check_ranges(batch_size=batch_size, seq_length=seq_length, state_directories=len(state_directories))
    micro_batch_size, slots = _choose(micro_batch_size, slots, batch_size, plan)
    torch_device = resolve_device(device)
    units = find_units(model)
    installation.check_model(model, units, weights)
    runtimes, group_of = installation.lay_out(units, optimizer, chunk_parameters)
    stages = Stages(
        [unit.layout for unit in runtimes],
        installation.access_order(model, units),
        [Path(directory) for directory in state_directories],
        device=torch_device,
        precision=precision,
        states=states,
        durability=durability,
        ram_state_bytes=ram_state_bytes,
        unsafe_filesystems=unsafe_filesystems,
        resume=resume,
        slots=slots,
        threads=threads,
        debug=debug,
        host_budget_bytes=plan.tier(Tier.RAM).capacity_bytes if plan is not None else None,
        load=lambda states: installation.load(states, runtimes, weights),
    )
    installation.replace_parameters(model, runtimes, working_dtype(precision), torch_device)
    driver = StepDriver(runtimes, optimizer, StepCounts([unit.layout for unit in runtimes], group_of), stages)
    return _install(model, optimizer, units, runtimes, driver, stages, micro_batch_size, limits=(batch_size, seq_length))


def _install(
    model: nn.Module,
    optimizer: torch.optim.AdamW,
    units: Sequence[Unit],
    runtimes: Sequence[UnitRuntime],
    driver: StepDriver,
    stages: Stages,
    micro_batch_size: int,
    *,
    limits: tuple[int, int],
) -> Session:
    """Let the model compute through the stages and the optimizer belong to them; `limits` are rows and tokens of a batch."""
    session = Session(model, runtimes, stages, driver, micro_batch_size)
    runner = RegionRunner(stages.stream, driver, device=stages.device, micro_batch_size=micro_batch_size)
    installation.wrap(model, units, runtimes, runner, limits, session.count_fallback)
    installation.take_over(optimizer, driver.check)
    stages.stream.prefetch_forward()
    return session


def _choose(micro_batch_size: int | None, slots: int | None, batch_size: int, plan: Plan | None) -> tuple[int, int]:
    """Micro-batch and number of slots: what was asked for, else the plan's, else all rows and 3 slots."""
    if micro_batch_size is None:
        micro_batch_size = plan.micro_batch_size if plan is not None else batch_size
    if slots is None:
        slots = plan.slots if plan is not None else 3
    _check_ranges(micro_batch_size=micro_batch_size)
    if slots < 2:
        raise ConfigError(f"slots is {slots}, expected at least 2", place="slots", remedy="One unit is loaded while another is used.")
    return micro_batch_size, slots


def _check_ranges(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ConfigError(f"{name} is {value}, expected at least 1", place=name, remedy="Correct the value.")
