"""A session's background stages: state store, parameter stream, gradient offload, optimizer; made together and closed together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lohan.config import Durability, Precision, States, UnsafeFilesystems
from lohan.memory.arena import Arena
from lohan.memory.store import Store
from lohan.planning.state_form import StateForm
from lohan.states.state_store import StateStore
from lohan.streaming.gradients import GradientOffload
from lohan.streaming.optimizer import OptimizerWorker
from lohan.streaming.parameters import AccessOrder, DebugMode, ParameterStream
from lohan.streaming.pending import Failure, PendingUpdates

if TYPE_CHECKING:
    from lohan.states.layout import UnitLayout

_HOST_GRADIENTS = 3  # one arriving, one waiting, one being read by the optimizer


def working_dtype(precision: Precision) -> torch.dtype:
    """What the device computes in, and what gradients leave it in."""
    return torch.bfloat16 if precision is Precision.BF16 else torch.float32


class Stages:
    """The background stages and what they share. They know neither model nor session, so that both can be garbage-collected."""

    def __init__(
        self,
        layouts: Sequence[UnitLayout],
        order: AccessOrder,
        directories: Sequence[Path],
        *,
        device: torch.device,
        precision: Precision,
        states: States,
        durability: Durability,
        ram_state_bytes: int,
        unsafe_filesystems: UnsafeFilesystems,
        resume: bool,
        slots: int,
        threads: int,
        debug: DebugMode,
        host_budget_bytes: int | None,
        load: Callable[[StateStore], None],
    ) -> None:
        self.device, self.precision = device, precision
        working = working_dtype(precision)
        self.failure = Failure()
        self.pending = PendingUpdates(self.failure)
        trainable_chunks = [chunk.length for layout in layouts for chunk in layout.chunks if chunk.trainable]
        with contextlib.ExitStack() as stack:
            self.arena = Arena(budget_bytes=host_budget_bytes)
            stack.callback(self.arena.close)
            store = Store.measured(directories)
            stack.callback(store.close)
            self.states = StateStore(
                layouts,
                directories,
                StateForm.of(precision, states),
                store,
                durability=durability,
                ram_bytes=ram_state_bytes,
                resume=resume,
                arena=self.arena,
                threads=threads,
                unsafe_filesystems=unsafe_filesystems,
            )
            stack.callback(self.states.close)
            if self.states.record is None:
                load(self.states)
                self.states.commit(0, {})
            self.stream = ParameterStream(
                layouts, self.states, self.arena, self.pending, self.failure, order, device=device, dtype=working, slots=slots, debug=debug
            )
            stack.callback(self.stream.close)
            self.offload = GradientOffload(
                self.arena,
                self.failure,
                elements=max(layout.trainable_elements for layout in layouts),
                dtype=working,
                device=device,
                buffers=_HOST_GRADIENTS,
                debug=debug,
            )
            stack.callback(self.offload.free)
            self.worker = OptimizerWorker(
                self.states,
                self.arena,
                self.pending,
                self.failure,
                self.offload.give_back,
                chunk_elements=max(trainable_chunks),
                threads=threads,
            )
            stack.callback(self.worker.close)
            self._resources = stack.pop_all()

    def close(self) -> None:
        self._resources.close()
