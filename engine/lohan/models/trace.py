"""Measures, without weights or data, what autograd saves while one block is computed."""

# ruff: noqa: SLF001 - the only identity a storage on the meta device has is `_cdata`

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from lohan.models.block_inputs import block_arguments

TRACED_LENGTHS = (64, 128, 192)
"""Tokens. Three lengths tell the part that grows with the tokens from the part that grows with their square."""
CANNOT_RUN = (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError, KeyError)


def saved_elements_per_token(block: nn.Module, hidden_size: int, rotary: nn.Module | None) -> int:
    """Working-precision elements that `block` saves for its backward, per token; tensors held in fp32 count twice.

    The block runs on the meta device in bf16 at three lengths. Attention there takes the plain path, which saves the score matrix;
    the kernels in use do not, so the part that grows with the square of the length is left out. Where a block cannot run by itself,
    the figure is 2.5 times the inputs and outputs of its linear layers (measured: 2.2 for Llama, 2.6 for Qwen3 at toy widths, 3.0 for
    GPT-2, whose shares of norms fall as blocks widen).

    Args:
        block: one block of the model, its parameters on any device.
        hidden_size: width of the input of the block.
        rotary: the model's module for rotary positions, with real buffers; None if it has none.
    """
    try:
        return _part_linear_in_length([_run(block, [], hidden_size, rotary, length).saved[-1] for length in TRACED_LENGTHS])
    except CANNOT_RUN:
        return _linear_elements(block)


@dataclass(frozen=True, slots=True)
class PartsTrace:
    """A block whose modules are regions of their own."""

    saved_elements_per_token: tuple[int, ...]
    """By part, as `saved_elements_per_token` has it."""
    boundaries: int
    """Inputs of regions; a norm that the part's main module runs inside its own region has none."""


def trace_parts(block: nn.Module, parts: Sequence[Sequence[nn.Module]], hidden_size: int, rotary: nn.Module | None) -> PartsTrace:
    """Measure `block` cut into `parts`, each a main module and what goes with it; arguments as for `saved_elements_per_token`."""
    try:
        runs = [_run(block, parts, hidden_size, rotary, length) for length in TRACED_LENGTHS]
    except CANNOT_RUN:
        saved = tuple(sum(_linear_elements(module) for module in part) for part in parts)
        return PartsTrace(saved, sum(map(len, parts)))
    saved = tuple(_part_linear_in_length([run.saved[index] for run in runs]) for index in range(len(parts)))
    return PartsTrace(saved, runs[0].regions)


def _part_linear_in_length(sizes: Sequence[float]) -> int:
    """Of a size measured at `TRACED_LENGTHS`."""
    first, second, third = sizes
    step = TRACED_LENGTHS[1] - TRACED_LENGTHS[0]
    square = (third - 2 * second + first) / (2 * step * step)
    linear = (second - first) / step - square * (TRACED_LENGTHS[0] + TRACED_LENGTHS[1])
    return max(1, round(linear))


class _Run:
    """One forward of a block on the meta device, and what is saved while each part of it runs."""

    def __init__(self, parts: Sequence[Sequence[nn.Module]]) -> None:
        self._saved: list[dict[int, int]] = [{} for _ in (*parts, None)]  # the last one: outside all parts
        self._current = len(parts)
        self._kept: list[Any] = []
        self._outputs: dict[int, int] = {}
        self.regions = 0
        self._handles = [
            handle
            for index, part in enumerate(parts)
            for module in part
            for handle in (
                module.register_forward_pre_hook(partial(self._begin, index, part[0]), with_kwargs=True),
                module.register_forward_hook(partial(self._end, part[0])),
            )
        ]

    @property
    def saved(self) -> list[float]:
        return [sum(part.values()) / torch.bfloat16.itemsize for part in self._saved]

    def save(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._saved[self._current][storage._cdata] = storage.nbytes()
        self._kept.append(tensor)  # a freed storage's address would be given to the next one

    def remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _begin(self, part: int, main: nn.Module, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._current = part
        first = next(iter((*args, *kwargs.values())), None)
        # What a norm of the same part has just made is not kept: see `lohan.streaming.activations.PartForward`.
        self.regions += module is not main or self._outputs.get(id(first)) != part

    def _end(self, main: nn.Module, module: nn.Module, args: Any, output: Any) -> None:
        if module is not main and len(args) == 1:
            self._outputs[id(output)] = self._current
            self._kept.append(output)
        self._current = len(self._saved) - 1


def _run(block: nn.Module, parts: Sequence[Sequence[nn.Module]], hidden_size: int, rotary: nn.Module | None, length: int) -> _Run:
    def meta(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device="meta", dtype=torch.bfloat16, requires_grad=True)

    parameters = {name: meta(*tensor.shape) for name, tensor in block.named_parameters()}
    buffers = {name: torch.empty(tensor.shape, device="meta", dtype=tensor.dtype) for name, tensor in block.named_buffers()}
    hidden = meta(1, length, hidden_size)
    arguments = block_arguments(block, rotary, 1, length, device=hidden.device, dtype=hidden.dtype)
    weights = {tensor.untyped_storage()._cdata for tensor in (*parameters.values(), hidden)}
    run = _Run(parts)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage()._cdata not in weights:
            run.save(tensor)
        return tensor

    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            torch.func.functional_call(block, {**parameters, **buffers}, (hidden,), arguments)
    finally:
        run.remove_hooks()
    return run


def _linear_elements(block: nn.Module) -> int:
    total = 0
    for module in block.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.Tensor) and weight.dim() == 2:
            total += sum(weight.shape)
    return max(1, round(2.5 * total))
