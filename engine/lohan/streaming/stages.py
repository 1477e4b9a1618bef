"""A session's background stages: state store, parameter stream, gradient offload, optimizer; made together and closed together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch

from lohan.config import Durability, GradientBuffers, Precision, States, UnsafeFilesystems
from lohan.memory.arena import Arena, Paging
from lohan.memory.store import Store
from lohan.planning.footprint import HOST_GRADIENT_BUFFERS
from lohan.planning.operations import (
    ChunkShape,
    Operation,
    StepShape,
    UnitShape,
    UpdateSequence,
    Visit,
    access_order,
    step_operations,
)
from lohan.planning.schedule import speculated_order
from lohan.planning.state_form import StateForm
from lohan.planning.tiers import Tier
from lohan.states.record import FOLDER
from lohan.states.state_store import StateStore
from lohan.streaming.choices import member
from lohan.streaming.clipping import UpdateRules
from lohan.streaming.gradients import GradientOffload
from lohan.streaming.hyperparameters import StepCounts
from lohan.streaming.kept_decisions import BlockDecision, Limits
from lohan.streaming.kept_stage import KeptStage
from lohan.streaming.optimizer import OptimizerWorker
from lohan.streaming.parameters import DebugMode, ParameterStream
from lohan.streaming.pending import Failure, PendingUpdates

if TYPE_CHECKING:
    from lohan.planning.slots import SlotSizes
    from lohan.states.layout import UnitLayout
    from lohan.streaming.kept import KeptActivations
    from lohan.streaming.trace import Trace


def working_dtype(precision: Precision) -> torch.dtype:
    """What the device computes in, and what gradients leave it in."""
    return torch.bfloat16 if precision is Precision.BF16 else torch.float32


def _host_gradients(layouts: Sequence[UnitLayout], rules: UpdateRules) -> list[int]:
    """The host gradient buffers, in elements: one for each unit, or a few of the largest size."""
    sizes = [layout.trainable_elements for layout in layouts if layout.trainable_elements]
    return sizes if rules.order.gradients is GradientBuffers.ALL else [max(sizes)] * HOST_GRADIENT_BUFFERS


def _shape(layouts: Sequence[UnitLayout], visits: Sequence[Visit], states: StateStore, slots: SlotSizes, device: torch.device) -> StepShape:
    units = []
    for layout in layouts:
        tiers = [Tier.SSD if states.resident_weights(layout, chunk) is None else Tier.RAM for chunk in layout.chunks]
        chunks = [ChunkShape(chunk.length, chunk.trainable, tier) for chunk, tier in zip(layout.chunks, tiers, strict=True)]
        units.append(UnitShape(tuple(chunks)))
    where = Tier.GPU if device.type == "cuda" else Tier.RAM
    waiting = frozenset(range(len(units))) - states.units_with_spare if states.durability is not Durability.STEP else frozenset()
    return StepShape(tuple(units), tuple(visits), slots, states.form, states.durability, where, waiting_units=waiting)


@dataclass(frozen=True, slots=True)
class StateOptions:
    """What of a session's states is kept and where, and what they begin with; the fields are `StateStore`'s."""

    form: StateForm
    durability: Durability
    ram_bytes: int
    spare_bytes: int
    unsafe_filesystems: UnsafeFilesystems
    resume: bool
    resume_from: str | None

    @classmethod
    def of(
        cls,
        precision: Precision,
        states: str,
        durability: str,
        ram_bytes: int,
        spare_bytes: int,
        unsafe_filesystems: str,
        resume: bool,
        resume_from: str | None,
    ) -> Self:
        """From what `lohan.init` was told; raises ConfigError where that is another word."""
        return cls(
            StateForm.of(precision, member(States, states, "states")),
            member(Durability, durability, "durability"),
            ram_bytes,
            spare_bytes,
            member(UnsafeFilesystems, unsafe_filesystems, "unsafe_filesystems"),
            resume,
            resume_from,
        )

    def open(
        self,
        layouts: Sequence[UnitLayout],
        directories: Sequence[Path],
        store: Store,
        *,
        arena: Arena,
        threads: int,
        weights_paging: Paging,
    ) -> StateStore:
        return StateStore(
            layouts,
            directories,
            self.form,
            store,
            durability=self.durability,
            ram_bytes=self.ram_bytes,
            spare_bytes=self.spare_bytes,
            weights_paging=weights_paging,
            resume=self.resume,
            resume_from=self.resume_from,
            arena=arena,
            threads=threads,
            unsafe_filesystems=self.unsafe_filesystems,
        )


class Stages:
    """The background stages and what they share. They know neither model nor session, so that both can be garbage-collected.

    Args:
        visits: what a forward goes through; in which order everything else is done is `operations`.
        kept: what is kept of blocks' activations, by unit.
    """

    def __init__(
        self,
        layouts: Sequence[UnitLayout],
        visits: Sequence[Visit],
        directories: Sequence[Path],
        *,
        device: torch.device,
        precision: Precision,
        states: StateOptions,
        slots: SlotSizes,
        threads: int,
        debug: DebugMode,
        rules: UpdateRules,
        counts: StepCounts,
        host_budget_bytes: int | None,
        load: Callable[[StateStore], None],
        kept: Mapping[int, BlockDecision],
        limits: Limits,
        trace: Trace | None,
    ) -> None:
        self.device, self.precision, self.counts, self.trace = device, precision, counts, trace
        if trace is not None:
            trace.attach(device)
        working = working_dtype(precision)
        self.failure = Failure()
        self.pending = PendingUpdates(self.failure)
        with contextlib.ExitStack() as stack:
            self.arena = Arena(budget_bytes=host_budget_bytes)
            stack.callback(self.arena.close)
            store = Store.measured(directories)
            stack.callback(store.close)
            paging = Paging.for_copies_with(device)
            self.states = states.open(layouts, directories, store, arena=self.arena, threads=threads, weights_paging=paging)
            stack.callback(self.states.close)
            if self.states.record is None:
                load(self.states)
                self.states.commit(0, {})
            self._shape, self._rules = _shape(layouts, visits, self.states, slots, device), rules
            self._operations = step_operations(self._shape, rules.order)
            self.stream = self._make_stream(layouts, slots, debug)
            stack.callback(self.stream.close)
            self.offload = GradientOffload(
                self.arena,
                self.failure,
                elements=_host_gradients(layouts, rules),
                parts=max(len(layout.parameters) for layout in layouts),
                dtype=working,
                device=device,
                debug=debug,
                trace=trace,
            )
            stack.callback(self.offload.free)
            self.kept = self._make_kept([directory / FOLDER for directory in directories], store, debug)
            stack.callback(self.kept.close)
            self.kept.begin(kept, limits)
            self.worker = self._make_worker(layouts, rules, threads)
            stack.callback(self.worker.close)
            if self.resumed_step:
                assert self.states.record is not None
                self.worker.resume(self.resumed_step, self.states.record.payload)
            self._resources = stack.pop_all()

    def _make_stream(self, layouts: Sequence[UnitLayout], slots: SlotSizes, debug: DebugMode) -> ParameterStream:
        return ParameterStream(
            layouts,
            self.states,
            self.arena,
            self.pending,
            self.failure,
            access_order(self._operations),
            device=self.device,
            dtype=working_dtype(self.precision),
            slots=slots,
            debug=debug,
            trace=self.trace,
        )

    def _make_kept(self, folders: Sequence[Path], store: Store, debug: DebugMode) -> KeptStage:
        return KeptStage(
            self.arena,
            store,
            folders,
            self.failure,
            device=self.device,
            check_sums=debug is DebugMode.NAN_FILL,
            trace=self.trace,
        )

    def retain(self, kept: Mapping[int, BlockDecision], limits: Limits, visits: Sequence[Visit]) -> None:
        """Keep something else, or in other micro-batches, from the next step on; raises as `KeptStage.switch`.

        In which order units are read and updated does not depend on micro-batches: the stream and the optimizer go on as they do.

        Args:
            visits: in micro-batches of `limits`.
        """
        self.kept.switch(kept, limits)
        self._shape = replace(self._shape, visits=tuple(visits))
        self._operations = step_operations(self._shape, self._rules.order)

    def _make_worker(self, layouts: Sequence[UnitLayout], rules: UpdateRules, threads: int) -> OptimizerWorker:
        return OptimizerWorker(
            self.states,
            self.arena,
            self.pending,
            self.failure,
            self.offload.give_back,
            self.counts,
            rules,
            chunk_elements=max(chunk.length for layout in layouts for chunk in layout.chunks if chunk.trainable),
            threads=threads,
            can_roll_back=self.states.durability is Durability.STEP,
            sequence=UpdateSequence(self._operations),
            trace=self.trace,
        )

    @property
    def operations(self) -> tuple[Operation, ...]:
        """A step as it is scheduled; what moves of kept activations is in it once a forward has shown how large it is."""
        return self._operations if self.kept.now is None else step_operations(self._shape_with(self.kept.now), self._rules.order)

    def speculated_operations(self) -> tuple[Operation, ...]:
        """A step that is speculated, and stands."""
        shape = self._shape if self.kept.now is None else self._shape_with(self.kept.now)
        return step_operations(shape, speculated_order(self._rules.schedule))

    def _shape_with(self, kept: KeptActivations) -> StepShape:
        return replace(self._shape, kept=kept.shapes())

    @property
    def resumed_step(self) -> int:
        """The step that the states were at when they were opened; 0 where they are new."""
        return self.states.record.step if self.states.record is not None else 0

    def close(self) -> None:
        self._resources.close()
