"""What a block of a Hugging Face model is called with, where it runs by itself."""

from __future__ import annotations

import inspect
from enum import Enum
from typing import Any

import torch
from torch import nn


class Mask(Enum):
    """How a block is told which tokens see which."""

    NONE = "none"
    """By no mask: every token sees those before it, as packed rows and rows of one length have it."""
    DENSE = "dense"
    """By a tensor of booleans (rows, 1, length, length), as the model makes of padded rows."""


def block_arguments(
    block: nn.Module,
    rotary: nn.Module | None,
    rows: int,
    length: int,
    *,
    device: torch.device,
    dtype: torch.dtype,
    mask: Mask = Mask.NONE,
) -> dict[str, Any]:
    """The arguments of `block.forward` besides its input.

    Rotary positions are those of rows that have positions of their own, (rows, length, width): what a packed batch has, and the most that
    is read.

    Args:
        block: one block of the model.
        rotary: the model's module for rotary positions, its buffers on the CPU; None if it has none.
        rows: of the block's input.
        length: tokens a row.
        device: of the arguments; the meta device too.
        dtype: of the block's input.
        mask: whether the block gets one.
    """
    parameters = inspect.signature(block.forward).parameters
    arguments: dict[str, Any] = {}
    if rotary is not None and "position_embeddings" in parameters:
        # Of its first argument a rotary module reads dtype and device only.
        positions = torch.arange(length).expand(rows, length)
        cosines, sines = rotary(torch.empty(1, 1, 1, dtype=dtype), positions)
        arguments["position_embeddings"] = (cosines.to(device), sines.to(device))
    if mask is Mask.DENSE and "attention_mask" in parameters:
        seen = torch.ones(length, length, device=device, dtype=torch.bool).tril()
        arguments["attention_mask"] = seen.expand(rows, 1, length, length)
    return arguments
