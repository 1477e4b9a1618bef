"""What the fused operators compute, written in torch's own operators: forwards as transformers' models have them, and their gradients.

On a CPU these are the operators' implementation, and give what the models' own modules give, bit for bit: backwards take the very steps
that autograd would. On a GPU they are what is compiled (`kernels_compiled`).
"""

from __future__ import annotations

import torch
from torch.nn import functional

_SUM = 2
"""Of a loss over its rows, as torch's operators number it."""


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    """`hidden` (…, H) over the root of its rows' mean square, times `weight` (H); and the fp32 factor of each row (…, 1)."""
    working = hidden.to(torch.float32)
    scale = torch.rsqrt(working.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * (working * scale).to(hidden.dtype), scale


def rms_norm_backward(
    gradient: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of `hidden` and `weight`, from that of the output."""
    working = hidden.to(torch.float32)
    of_weight = (gradient * (working * scale).to(hidden.dtype)).sum_to_size(weight.shape)
    of_normed = (gradient * weight).to(torch.float32)
    of_scale = (of_normed * working).sum(-1, keepdim=True)
    of_mean = -0.5 * of_scale * scale.pow(3)
    of_hidden = of_normed * scale + of_mean / hidden.shape[-1] * (2.0 * working)
    return of_hidden.to(hidden.dtype), of_weight


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(`gate`) times `up`."""
    return functional.silu(gate) * up


def swiglu_backward(gradient: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of `gate` and `up`."""
    return torch.ops.aten.silu_backward(gradient * up, gate), gradient * functional.silu(gate)


def rotary(query: torch.Tensor, key: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys (rows, heads, tokens, D), turned by their positions' angles (rows or 1, tokens, D)."""
    cosines, sines = cosines.unsqueeze(1), sines.unsqueeze(1)
    return _rotate(query, cosines, sines), _rotate(key, cosines, sines)


def rotary_backward(
    of_query: torch.Tensor, of_key: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of queries and keys, from those of the turned ones."""
    cosines, sines = cosines.unsqueeze(1), sines.unsqueeze(1)
    return _rotate_back(of_query, cosines, sines), _rotate_back(of_key, cosines, sines)


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, ignored: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of -log softmax(`logits`) (N, V) at `labels` (N) but those that are `ignored`, and the log of each row's sum of exponentials
    (N); both in fp32."""
    working = logits.float()
    return functional.cross_entropy(working, labels, ignore_index=ignored, reduction="sum"), torch.logsumexp(working, -1)


def cross_entropy_backward(
    gradient: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor, normalizers: torch.Tensor, ignored: int
) -> torch.Tensor:
    """The gradient of `logits`, from that of the sum.

    Args:
        normalizers: the rows' logs of sums; autograd's steps take softmax's own instead, and so does this.
    """
    chances = torch.log_softmax(logits.float(), -1)
    of_chances = torch.ops.aten.nll_loss_backward(gradient, chances, labels, None, _SUM, ignored, normalizers.new_ones(()))
    of_working: torch.Tensor = torch.ops.aten._log_softmax_backward_data(of_chances, chances, -1, torch.float32)  # noqa: SLF001
    return of_working.to(logits.dtype)


def _rotate(tensor: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    first, second = _halves(tensor)
    return tensor * cosines + torch.cat((-second, first), dim=-1) * sines


def _rotate_back(gradient: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    first, second = _halves(gradient * sines)
    return gradient * cosines + torch.cat((second, -first), dim=-1)


def _halves(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    middle = tensor.shape[-1] // 2
    return tensor[..., :middle], tensor[..., middle:]
