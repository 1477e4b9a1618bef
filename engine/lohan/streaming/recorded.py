"""Reads the weights of a run that is at rest from the step that its states recorded last; nothing is computed, and nothing written."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch

from lohan.config import Durability, Precision, States, UnitGrain, UnsafeFilesystems
from lohan.memory.store import Store
from lohan.models.blocks import find_units
from lohan.planning.state_form import StateForm
from lohan.states.state_store import StateStore
from lohan.streaming import installation

if TYPE_CHECKING:
    from torch import nn

    from lohan.states.layout import UnitLayout


def read_weights(
    layouts: Sequence[UnitLayout],
    states: StateStore,
    model: nn.Module,
    dtype: torch.dtype | None,
    *,
    before_unit: Callable[[int], None] = lambda _index: None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter once, under its first name, then the persistent buffers of `model`; each is read as it is asked for.

    Args:
        dtype: of the parameters; None gives fp32 (the master), and frozen parameters in the working precision.
        before_unit: is called with a unit's index before it is read.
    """
    for layout in layouts:
        before_unit(layout.index)
        for place in layout.parameters:
            tensor = states.read_parameter(layout, place)
            yield place.name, tensor if dtype is None else tensor.to(dtype)
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:  # noqa: SLF001 - state_dict() is refused
                yield f"{prefix}.{name}" if prefix else name, buffer.detach().cpu()


class RecordedWeights:
    """What `lohan.models.export.save_pretrained` takes in place of a session.

    Args:
        model: of placeholders (`lohan.empty_model`), with what is trained as in the run.
        optimizer: over its parameters, as in the run.
        directories: the run's state directories, in the run's order; they are locked while this is open.
        precision, states, grain, chunk_parameters, durability: the run's.
        unsafe_filesystems: whether the directories' file systems are checked.

    Raises:
        ResumeError: there are no recorded states, they are damaged, or belong to another model.
        StorageError: a directory is in use by another run, or cannot be read.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.AdamW,
        directories: Sequence[Path],
        *,
        precision: Precision,
        states: States,
        grain: UnitGrain,
        chunk_parameters: int,
        durability: Durability,
        unsafe_filesystems: UnsafeFilesystems,
    ) -> None:
        self.precision, self._model = precision, model
        runtimes, _ = installation.lay_out(find_units(model, grain), optimizer, chunk_parameters)
        self._layouts = [unit.layout for unit in runtimes]
        with contextlib.ExitStack() as stack:
            store = Store.measured(directories)
            stack.callback(store.close)
            self._states = StateStore(
                self._layouts,
                directories,
                StateForm.of(precision, states),
                store,
                durability=durability,
                resume=True,
                unsafe_filesystems=unsafe_filesystems,
            )
            stack.callback(self._states.close)
            self._resources = stack.pop_all()

    def wait(self) -> None:
        """Nothing is under way."""

    def named_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """See `read_weights`.

        Raises:
            ResumeError: bytes are not those that were recorded.
        """
        return read_weights(self._layouts, self._states, self._model, dtype)

    def close(self) -> None:
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
