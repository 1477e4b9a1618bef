"""The fused operators by Liger's Triton kernels. Those that write over what they are given get a copy.

Its rotation writes into queries and keys, the gradient of its gated activation into gate and up: tensors that autograd or a plan may have
kept. A copy costs one more pass over them.

The loss is computed by what torch compiles, in this set too: Liger's kernel writes the gradient over the logits while it computes the loss,
which a recomputation would have to do for nothing, and scales it in a second pass.
"""

from __future__ import annotations

import torch
from liger_kernel.ops.rms_norm import rms_norm_backward as liger_rms_norm_backward
from liger_kernel.ops.rms_norm import rms_norm_forward
from liger_kernel.ops.rope import rope_backward, rope_forward
from liger_kernel.ops.swiglu import swiglu_backward as liger_swiglu_backward
from liger_kernel.ops.swiglu import swiglu_forward
from liger_kernel.ops.utils import calculate_settings

from lohan.models.kernels_compiled import cross_entropy as cross_entropy
from lohan.models.kernels_compiled import cross_entropy_backward as cross_entropy_backward

_CASTS = "llama"  # factors in fp32, products in the working precision: what the models' own norms do
_LLAMA_CASTS = 0  # the same, as the backward has it
_OFFSET = 0.0  # of weights; Gemma's are 1


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    """As `kernel_formulas.rms_norm`."""
    output, _, scale, *_ = rms_norm_forward(hidden.contiguous(), weight, epsilon, _OFFSET, _CASTS, None)
    return output, scale.view(*hidden.shape[:-1], 1)


def rms_norm_backward(
    gradient: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `kernel_formulas.rms_norm_backward`."""
    width = hidden.shape[-1]
    block_size, warps = calculate_settings(width)
    of_hidden, of_weight = liger_rms_norm_backward(
        gradient.contiguous(),
        hidden.reshape(-1, width),
        weight,
        scale.reshape(-1),
        _OFFSET,
        _LLAMA_CASTS,
        block_size,
        warps,
        False,  # in_place: the gradient may have other users, such as the residual's
        None,
    )
    return of_hidden, of_weight


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """As `kernel_formulas.swiglu`."""
    output: torch.Tensor = swiglu_forward(gate.contiguous(), up.contiguous())[2]
    return output


def swiglu_backward(gradient: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `kernel_formulas.swiglu_backward`."""
    of_gate, of_up = liger_swiglu_backward(_copy(gate), _copy(up), gradient.contiguous())
    return of_gate.view(gate.shape), of_up.view(up.shape)


def rotary(query: torch.Tensor, key: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `kernel_formulas.rotary`; sines and cosines of both halves are taken to be alike."""
    query, key, *_ = rope_forward(_copy_of_tokens(query), _copy_of_tokens(key), cosines, sines)
    return query, key


def rotary_backward(
    of_query: torch.Tensor, of_key: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `kernel_formulas.rotary_backward`."""
    of_query, of_key = rope_backward(_copy_of_tokens(of_query), _copy_of_tokens(of_key), cosines, sines)
    return of_query, of_key


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _copy_of_tokens(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of (rows, heads, tokens, D) with each token's heads beside each other in memory, as the kernel wants them."""
    return _copy(tensor.transpose(1, 2)).transpose(1, 2)
