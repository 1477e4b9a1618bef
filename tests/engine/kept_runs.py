"""Training with kept activations, and what of it the tests ask for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lohan
from lohan.config import KernelSet
from lohan.errors import EngineError
from lohan.planning.retention import BlockTiers, KeptOperator, Retention
from lohan.streaming.kept_tiers import KeptTiers
from tests.engine.reference import Outcome, adamw, make_batches, make_llama, on_device_of, open_session, train_streamed

BLOCKS = (0, 1, 2)
ATTENTION = "self_attn:attention#0"
GATE = "mlp.gate_proj:matmul#0"
GROUPS = {
    "matmuls": [*(f"self_attn.{name}_proj:matmul#0" for name in "qkvo"), *(f"mlp.{name}_proj:matmul#0" for name in ("gate", "up", "down"))],
    "attention": [ATTENTION],
    "rotated q and k": ["self_attn:add#0", "self_attn:add#1"],
    "silu * up": ["mlp.act_fn:silu#0", "mlp:mul#0"],
    "norms": ["input_layernorm:mul#1", "post_attention_layernorm:rsqrt#0", "post_attention_layernorm:mul#1"],
}
"""Of a Llama's block with torch's own operators."""
FUSED_GROUPS = {
    **{name: GROUPS[name] for name in ("matmuls", "attention")},
    "rotated q and k": ["self_attn:rotary#0"],
    "silu * up": ["mlp:swiglu#0"],
    "norms": ["input_layernorm:rms_norm#0", "post_attention_layernorm:rms_norm#0"],
}
"""Of one with fused operators."""
GROUPS_OF = {KernelSet.TORCH: GROUPS, KernelSet.LIGER: FUSED_GROUPS, KernelSet.COMPILED: FUSED_GROUPS}


def spread(labels: Iterable[str], *, shift: int = 0) -> Retention:
    """Each of `labels` kept in all three blocks, every time in another tier."""
    operators = []
    for place, label in enumerate(labels, start=shift):
        gpu, ram, ssd = (((tier + place) % 3,) for tier in range(3))
        operators.append(KeptOperator(label=label, gpu_blocks=gpu, ram_blocks=ram, ssd_blocks=ssd))
    return Retention(operators=tuple(operators))


def in_tier(tier: str, labels: Iterable[str], *, blocks: Sequence[int] = BLOCKS, boundaries: bool = False) -> Retention:
    """All of `labels`, and the inputs of blocks where they are asked for, in one tier."""
    where: dict[str, Any] = {f"{tier}_blocks": tuple(blocks)}
    operators = tuple(KeptOperator(label=label, **where) for label in labels)
    return Retention(operators=operators, boundaries=BlockTiers(**where) if boundaries else BlockTiers())


def trained(folder: Path, retention: Retention, *, steps: int = 2, model: nn.Module | None = None, **options: Any) -> Outcome:
    """What training leaves; two micro-batches unless `options` say otherwise."""
    return train_streamed(model or make_llama(), make_batches(steps, padded=True), folder, retention=retention, **options)


def tiers_of(session: lohan.Session) -> KeptTiers:
    kept = session._stages.kept.now
    assert kept is not None
    return kept.tiers


def held_bytes(session: lohan.Session) -> dict[str, int]:
    return {holding.holder: holding.bytes for holding in session.host_memory.holdings if "kept" in holding.holder}


def labels_of(model: nn.Module, folder: Path, **options: Any) -> list[str]:
    """Of a block's operators, as the engine's own message has them."""
    try:
        with open_session(model, adamw(model), folder, retention=in_tier("gpu", ["?"]), **options):
            model(**on_device_of(model, make_batches(1, padded=True)[0]))
    except EngineError as error:
        return error.message.partition("; there are ")[2].split(", ")
    raise AssertionError("there is such an operator")


def one_loss(model: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(**make_batches(1)[0]).loss
    return loss
