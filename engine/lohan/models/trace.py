"""Measures, without weights or data, what autograd saves while one block is computed."""

# ruff: noqa: SLF001 - the only identity a storage on the meta device has is `_cdata`

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

TRACED_LENGTHS = (64, 128, 192)
"""Tokens. Three lengths tell the part that grows with the tokens from the part that grows with their square."""


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
        sizes = [_saved_elements(block, hidden_size, rotary, length) for length in TRACED_LENGTHS]
    except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError, KeyError):
        return _linear_elements(block)
    first, second, third = sizes
    step = TRACED_LENGTHS[1] - TRACED_LENGTHS[0]
    square = (third - 2 * second + first) / (2 * step * step)
    linear = (second - first) / step - square * (TRACED_LENGTHS[0] + TRACED_LENGTHS[1])
    return max(1, round(linear))


def _saved_elements(block: nn.Module, hidden_size: int, rotary: nn.Module | None, length: int) -> float:
    def meta(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device="meta", dtype=torch.bfloat16, requires_grad=True)

    parameters = {name: meta(*tensor.shape) for name, tensor in block.named_parameters()}
    buffers = {name: torch.empty(tensor.shape, device="meta", dtype=tensor.dtype) for name, tensor in block.named_buffers()}
    hidden = meta(1, length, hidden_size)
    weights = {tensor.untyped_storage()._cdata for tensor in (*parameters.values(), hidden)}
    saved: dict[int, int] = {}
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            saved[storage._cdata] = storage.nbytes()
            kept.append(tensor)  # a freed storage's address would be given to the next one
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        torch.func.functional_call(block, {**parameters, **buffers}, (hidden,), _arguments(block, rotary, length))
    return sum(saved.values()) / torch.bfloat16.itemsize


def _arguments(block: nn.Module, rotary: nn.Module | None, length: int) -> dict[str, Any]:
    if rotary is None or "position_embeddings" not in inspect.signature(block.forward).parameters:
        return {}
    # Of its first argument a rotary module reads dtype and device only.
    cosines, sines = rotary(torch.empty(1, 1, 1, dtype=torch.bfloat16), torch.arange(length)[None])
    return {"position_embeddings": (cosines.to("meta"), sines.to("meta"))}


def _linear_elements(block: nn.Module) -> int:
    total = 0
    for module in block.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.Tensor) and weight.dim() == 2:
            total += sum(weight.shape)
    return max(1, round(2.5 * total))
