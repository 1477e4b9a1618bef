"""`lohan.init` and the session it returns: the engine is put under a model, after which each backward is one optimizer step."""

from __future__ import annotations

import resource
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from lohan.config import (
    Clip,
    ClipUpdate,
    Durability,
    GradientBuffers,
    KernelSet,
    Precision,
    States,
    UnitGrain,
    UnsafeFilesystems,
    UpdateSchedule,
)
from lohan.errors import EngineError
from lohan.models.blocks import find_units
from lohan.models.kernels import InstalledKernels, install_kernels, resolve_kernels
from lohan.planning.operations import expected_order
from lohan.planning.retention import Retention
from lohan.planning.slots import size_slots
from lohan.planning.step_trace import Wait
from lohan.planning.tiers import Tier
from lohan.planning.workload import UnitKind
from lohan.streaming import installation
from lohan.streaming.choices import (
    check_ranges,
    choose,
    choose_grain,
    choose_retention,
    choose_rules,
    choose_states,
    choose_threads,
    member,
)
from lohan.streaming.device import resolve_device
from lohan.streaming.hyperparameters import StepCounts
from lohan.streaming.kept_decisions import Limits, block_decisions
from lohan.streaming.parameters import DebugMode
from lohan.streaming.recorded import read_weights
from lohan.streaming.regions import RegionRunner, UnitRuntime
from lohan.streaming.stages import Stages, StateOptions, working_dtype
from lohan.streaming.statistics import Statistics
from lohan.streaming.steps import StepDriver

if TYPE_CHECKING:
    from lohan.memory.arena import Ledger
    from lohan.models.blocks import Unit
    from lohan.models.weights import WeightSource
    from lohan.planning.operations import Operation
    from lohan.planning.plan import Plan
    from lohan.streaming.trace import Trace


class Session:
    """The engine under one model: made by `lohan.init`, closed by `close` or by leaving its `with` block.

    It lives as long as the model does, so it need not be kept where only its effect is wanted.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        runtimes: Sequence[UnitRuntime],
        stages: Stages,
        runner: RegionRunner,
        limits: Limits,
        kernels: InstalledKernels,
    ) -> None:
        self.kernels = kernels
        self._model, self._found, self._units, self._stages, self._runner, self._limits = model, units, runtimes, stages, runner, limits
        self._driver = runner.driver
        self.device = stages.device
        self.precision = stages.precision
        self._fallbacks = 0
        self._use_cache = installation.switch_caches_off(model)
        # Not a method of the session: that would keep it alive.
        self._finalizer = weakref.finalize(self, stages.close)

    def wait(self) -> None:
        """Block until every update is done and every record that was asked for is written.

        Raises:
            EngineError: a background stage failed; its error is the cause.
        """
        self._driver.check()
        trace = self._stages.trace
        begun = trace.mark(trace.step) if trace is not None else None
        self._stages.pending.wait_all()
        if trace is not None:
            trace.add(trace.step, Wait.UPDATES, None, begun, trace.mark(trace.step))
            trace.settle()

    def wait_gradients(self) -> None:
        """Block until all gradients of the newest step have been looked at, so that `Statistics.last_step` is its.

        Where updates begin after the backward they go on meanwhile, under the next forward.

        Raises:
            EngineError: a background stage failed; its error is the cause.
        """
        self._driver.check()
        self._stages.pending.wait_judged(self._driver.steps)

    def commit(self, payload: Mapping[str, Any]) -> None:
        """Have the step just finished recorded with `payload` (JSON-ready), which a resumed session finds again. Does not wait.

        With durability `step`, a step whose payload has not come when the next one's first gradients do is recorded without; with
        `snapshot` no step is recorded but those this is called for.

        Raises:
            EngineError: there was no step yet, the next one has begun, a background stage failed, or the session is closed.
            NamedSnapshotError: as `wait_kept`; the step is recorded nevertheless.
        """
        self._driver.check()
        if not self._driver.is_between_steps:
            raise EngineError("there is no finished step to record", remedy="Call commit after the step's last backward.")
        self._stages.worker.commit(self._driver.steps, payload)
        self._stages.states.named.check()

    def keep(self, name: str) -> None:
        """Keep the states of the step just finished, for which `commit` was called, under `name`. Does not wait.

        Its states are cloned where the file systems can do that, else copied while training goes on, into `named/<name>` in each state
        directory; `lohan.init(…, resume_from=name)` begins there again. One is kept at a time: the next one's step waits.

        Raises:
            ConfigError: the name has other characters than letters, digits and `.-_`, or durability is `none`.
            NamedSnapshotError: there is one of that name already.
            CapacityError: there is too little space.
            EngineError: the step is not recorded, a background stage failed, or the session is closed.
        """
        self._driver.check()
        self._stages.states.named.check_room(name)
        if not self._driver.is_between_steps or not self._stages.pending.has_record(self._driver.steps):
            raise EngineError("the step just finished is not recorded, and cannot be kept", remedy="Call commit before keep.")
        self._stages.worker.keep(name)

    def retain(self, retention: Retention, micro_batch_size: int | None = None) -> None:
        """Keep something else of activations from the next step on, or elsewhere; states and weights stay where they are.

        What was kept is given back before room is made for the new: in host memory within the plan's budget, and in the state directories.
        Results are those of a session that had this retention from the start. Before the first forward nobody knows how large a block's
        outputs are; what there is no room for then comes up in that forward.

        Args:
            retention: empty: every block is computed again.
            micro_batch_size: rows that run through a block at once from now on; None changes nothing. Another one adds gradients in
                another order, hence rounds otherwise.

        Raises:
            ConfigError: micro_batch_size is below 1.
            EngineError: a step is under way, a background stage failed, the session is closed, or the model has no such blocks.
            CapacityError: there is no room; what was kept before is kept on.
            StorageError: the same of the state directories.
        """
        self._driver.check_between_steps()
        if micro_batch_size is not None:
            check_ranges(micro_batch_size=micro_batch_size)
        limits = replace(self._limits, micro_batch_size=micro_batch_size or self.micro_batch_size)
        decisions = block_decisions(self._found, retention)
        self._stages.retain(decisions, limits, installation.visits(self._model, self._found, limits.micro_batches))
        self._limits, self._runner.micro_batch_size = limits, limits.micro_batch_size

    def wait_kept(self) -> None:
        """Block until every named snapshot is whole.

        Raises:
            NamedSnapshotError: one could not be made, of which nothing is left; training is not affected.
            EngineError: a background stage failed.
        """
        self._stages.pending.wait_all()
        self._stages.states.named.finish()

    @property
    def micro_batch_size(self) -> int:
        """Rows that run through a block at once."""
        return self._runner.micro_batch_size

    @property
    def operations(self) -> Sequence[Operation]:
        """A step of a whole batch as it is scheduled: what a traced step is compared with."""
        return self._stages.operations

    @property
    def speculated_operations(self) -> Sequence[Operation]:
        """The same of a step whose updates are speculated (`ClipUpdate`) and stand."""
        return self._stages.speculated_operations()

    @property
    def unit_names(self) -> list[str]:
        """By index."""
        return [unit.layout.name for unit in self._units]

    @property
    def grain(self) -> UnitGrain:
        """What a block moves as."""
        return UnitGrain.MODULE if any(unit.layout.kind is UnitKind.MODULE for unit in self._units) else UnitGrain.BLOCK

    @property
    def chunk_parameters(self) -> int:
        """In a chunk at most."""
        return self._units[0].layout.chunk_parameters

    @property
    def durability(self) -> Durability:
        """What the session's states can be resumed from."""
        return self._stages.states.durability

    @property
    def steps(self) -> int:
        """Steps done, skipped ones and those before a resumption included."""
        return self._driver.steps

    @property
    def step_counts(self) -> tuple[tuple[int, ...], ...]:
        """Updates that each parameter has had, by unit and parameter; complete once `wait` has returned."""
        return self._stages.counts.values

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

        def ready(index: int) -> None:
            self._driver.check()
            self._stages.pending.wait(index)

        layouts = [unit.layout for unit in self._units]
        return read_weights(layouts, self._stages.states, self._model, dtype, before_unit=ready)

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
            committed_steps=stages.worker.committed_step,
            last_step=stages.worker.last_step,
            clipped_steps=stages.worker.clipped_steps,
            skipped_steps=stages.worker.skipped_steps,
            speculated_steps=stages.worker.speculation.speculated_steps,
            redone_steps=stages.worker.speculation.redone_steps,
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
        self.kernels.remove()
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
    grain: UnitGrain | str = UnitGrain.AUTO,
    device: str = "auto",
    precision: Precision | str = Precision.BF16,
    kernels: KernelSet | str = KernelSet.AUTO,
    states: States | str = States.AUTO,
    schedule: UpdateSchedule | str = UpdateSchedule.OPTIMIZED,
    clip: Clip | str = Clip.NONE,
    max_gradient_norm: float = 1.0,
    clip_updates: ClipUpdate | str = ClipUpdate.AUTO,
    gradient_buffers: GradientBuffers | str = GradientBuffers.AUTO,
    durability: Durability | str = Durability.NONE,
    ram_state_bytes: int | None = None,
    spare_state_bytes: int | None = None,
    unsafe_filesystems: UnsafeFilesystems | str = UnsafeFilesystems.REFUSE,
    resume: bool = False,
    resume_from: str | None = None,
    weights: WeightSource | None = None,
    plan: Plan | None = None,
    slots: int | None = None,
    kept_units: int | None = None,
    retention: Retention | None = None,
    threads: int = 0,
    chunk_parameters: int | None = None,
    debug: DebugMode | str = DebugMode.OFF,
    trace: Trace | None = None,
) -> Session:
    """Put the engine under `model`: afterwards `model(input_ids=…, labels=…).loss.backward()` updates it, one backward being one step.

    A backward inside `lohan.accumulate()` only adds to the step's gradients. Nothing about the model or the optimizer is changed when this
    raises.

    Args:
        model: a decoder-only transformers model; with real weights, or from `lohan.empty_model` together with `weights`.
        optimizer: a new torch.optim.AdamW over the model's parameters. Its param groups are read at the start of every backward, so
            learning-rate schedulers work; its `step()` does nothing but raise pending errors.
        batch_size: rows of a batch at most.
        seq_length: tokens of a row at most.
        state_directories: one folder per drive for the model states; overwritten unless `resume`. Named snapshots in them stay.
        micro_batch_size: rows that run through a block at once; None takes the plan's, else all rows.
        grain: block moves blocks whole, module attention and MLP one by one, where blocks are too large; auto takes the plan's, else block.
        device: auto, cpu, cuda, cuda:N or a GPU's UUID.
        precision: bf16 computes in bf16 with fp32 master weights; fp32 computes in fp32.
        kernels: what computes norms, gated activations and rotary positions: torch, liger, compiled, or auto, which takes the plan's, else
            compiled where a GPU can compile, else torch. The same set gives the same bits again, another one others.
        states: moments in fp32, or in 8 bits.
        schedule: when updates run: serial, naive or optimized; the results are the same. serial keeps all gradients in host memory.
        clip: none, per_unit, or global, which is torch.nn.utils.clip_grad_norm_ and keeps all gradients in host memory.
        max_gradient_norm: what clipping scales larger norms down to.
        clip_updates: with clip global, when updates run: defer, speculate, or auto, which goes by how often gradients are clipped.
        gradient_buffers: host memory for gradients that wait for their update: few units', or all; auto takes the plan's, else few.
        durability: whether every step can be resumed, the steps that `Session.commit` is called for, or none. All but none take twice the
            space.
        ram_state_bytes: host memory for model states, spread over all units; the rest lies in the state directories. None takes the plan's,
            else none.
        spare_state_bytes: host memory for second places of states in RAM. Where no step is committed, updates that are speculated go there,
            as far as it reaches, and are taken back by taking the first places again. None takes the plan's, else none.
        unsafe_filesystems: whether the directories may lie on file systems that are no place for states.
        resume: go on from the step record in the state directories; `weights` are then not needed.
        resume_from: go on from the named snapshot (`Session.keep`) in the state directories instead; it stays as it is.
        weights: where the weights come from; None takes those in the model.
        plan: gives micro-batch, grain, slots, kept units, gradient buffers, states in RAM and their second places, chunks, what clipped
            runs begin with, and retention where they are left open, and bounds the host memory for slots, gradients, states and kept
            activations.
        slots: parameter buffers on the device that units pass through, at least 2; None takes the plan's, else 3.
        kept_units: how many units' weights stay on the device from forward to backward, in buffers of their own, which saves their second
            load; None takes the plan's, else 0.
        retention: which operators' outputs are kept from forward to backward, and where; None takes the plan's, else none are, and every
            block is computed again.
        threads: for the optimizer; 0 means all CPUs this process may use, from 8 on but two, which launch kernels.
        chunk_parameters: grain of state I/O, a multiple of 2048; None takes the plan's, else 32 Mi. States are resumed with their own.
        debug: how the engine helps to find its own faults.
        trace: records some of the steps.

    Raises:
        ConfigError: a number is out of range, an option has no such value, there is no such device, or the kernel set cannot run on it.
        EngineError: model or optimizer are in a state the engine cannot honour.
        ModelError: no blocks were found, or `weights` do not fit.
        CapacityError: the state directories cannot hold the states, or host memory what moves through it.
        StorageError: a state directory cannot be used.
        ResumeError: there is no state to resume, it is damaged, or belongs to another model.
    """
    check_ranges(batch_size=batch_size, seq_length=seq_length, state_directories=len(state_directories))
    micro_batch_size, slots, kept_units = choose(micro_batch_size, slots, kept_units, batch_size, plan)
    rules = choose_rules(schedule, clip, max_gradient_norm, clip_updates, gradient_buffers, plan)
    precision, debug = member(Precision, precision, "precision"), member(DebugMode, debug, "debug")
    torch_device = resolve_device(device)
    kernels = resolve_kernels(member(KernelSet, kernels, "kernels"), torch_device, plan.kernels if plan is not None else KernelSet.AUTO)
    units = find_units(model, choose_grain(member(UnitGrain, grain, "grain"), plan))
    installation.check_model(model, units)
    chunk_parameters, ram_bytes, spare_bytes = choose_states(chunk_parameters, ram_state_bytes, spare_state_bytes, plan)
    if not resume and resume_from is None:
        installation.check_weights(model, units, weights)
    runtimes, group_of = installation.lay_out(units, optimizer, chunk_parameters)
    layouts = [unit.layout for unit in runtimes]
    limits = Limits(batch_size, seq_length, micro_batch_size)
    visits = installation.visits(model, units, limits.micro_batches)
    order = expected_order(visits, [layout.index for layout in layouts if layout.trainable_elements])
    stages = Stages(
        layouts,
        visits,
        [Path(directory) for directory in state_directories],
        device=torch_device,
        precision=precision,
        states=StateOptions.of(precision, states, durability, ram_bytes, spare_bytes, unsafe_filesystems, resume, resume_from),
        slots=size_slots([layout.elements for layout in layouts], order.backward, working=slots, kept=kept_units),
        threads=choose_threads(threads),
        debug=debug,
        rules=rules,
        counts=StepCounts(layouts, group_of),
        host_budget_bytes=plan.tier(Tier.RAM).capacity_bytes if plan is not None else None,
        load=lambda states: installation.load(states, runtimes, weights),
        kept=block_decisions(units, choose_retention(retention, plan)),
        limits=limits,
        trace=trace,
    )
    installation.replace_parameters(model, runtimes, working_dtype(precision), torch_device)
    return _install(model, optimizer, units, runtimes, stages, limits, install_kernels(model, kernels))


def _install(
    model: nn.Module,
    optimizer: torch.optim.AdamW,
    units: Sequence[Unit],
    runtimes: Sequence[UnitRuntime],
    stages: Stages,
    limits: Limits,
    kernels: InstalledKernels,
) -> Session:
    """Let the model compute through the stages and the optimizer belong to them."""
    driver = StepDriver(runtimes, optimizer, stages)
    runner = RegionRunner(
        stages.stream, driver, device=stages.device, micro_batch_size=limits.micro_batch_size, kept=stages.kept, trace=stages.trace
    )
    session = Session(model, units, runtimes, stages, runner, limits, kernels)
    stages.kept.attach({index: unit.modules[0][1] for index, unit in enumerate(units) if unit.kind is UnitKind.BLOCK})
    installation.wrap(model, units, runtimes, runner, (limits.batch_size, limits.sequence_length), session.count_fallback, kernels.kernels)
    installation.take_over(optimizer, driver.check)
    stages.stream.prefetch_forward()
    return session
