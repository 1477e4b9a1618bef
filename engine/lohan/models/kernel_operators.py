"""Fused operators for norms, gated activations, rotary positions and the loss, each with its gradient: `rms_norm`, `swiglu`, `rotary` and
`cross_entropy`.

Each is one operator to whatever watches a model compute: traces, plans and kept outputs name it by one label, whichever kernels do its
work. None writes to what it is given or returns memory of it. Autograd saves inputs and outputs alone, so a recomputation whose outputs
were kept has all that a backward needs.

On a CPU, and on the meta device, the kernel set makes no difference.
"""

from __future__ import annotations

from typing import Any, Protocol, cast

import torch

from lohan.config import KernelSet
from lohan.models import kernel_formulas

_TAGS = (torch.Tag.pt2_compliant_tag,)


class _Kernels(Protocol):
    """A module that computes the operators; see `kernel_formulas`."""

    def rms_norm(self, hidden: torch.Tensor, weight: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]: ...

    def rms_norm_backward(
        self, gradient: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def swiglu(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor: ...

    def swiglu_backward(self, gradient: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...

    def rotary(
        self, query: torch.Tensor, key: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def rotary_backward(
        self, of_query: torch.Tensor, of_key: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def cross_entropy(self, logits: torch.Tensor, labels: torch.Tensor, ignored: int) -> tuple[torch.Tensor, torch.Tensor]: ...

    def cross_entropy_backward(
        self, gradient: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor, normalizers: torch.Tensor, ignored: int
    ) -> torch.Tensor: ...


def _kernels(tensor: torch.Tensor, kernels: str) -> _Kernels:
    """Those of the set, where a GPU computes."""
    if tensor.device.type == "cuda" and kernels == KernelSet.COMPILED:
        from lohan.models import kernels_compiled

        return cast(_Kernels, kernels_compiled)
    if tensor.device.type == "cuda" and kernels == KernelSet.LIGER:
        from lohan.models import kernels_liger

        return cast(_Kernels, kernels_liger)
    return cast(_Kernels, kernel_formulas)


torch.library.define("lohan::rms_norm", "(Tensor hidden, Tensor weight, float epsilon, str kernels) -> (Tensor, Tensor)", tags=_TAGS)
torch.library.define(
    "lohan::rms_norm_backward",
    "(Tensor gradient, Tensor hidden, Tensor weight, Tensor scale, str kernels) -> (Tensor, Tensor)",
    tags=_TAGS,
)
torch.library.define("lohan::swiglu", "(Tensor gate, Tensor up, str kernels) -> Tensor", tags=_TAGS)
torch.library.define("lohan::swiglu_backward", "(Tensor gradient, Tensor gate, Tensor up, str kernels) -> (Tensor, Tensor)", tags=_TAGS)
torch.library.define(
    "lohan::rotary", "(Tensor query, Tensor key, Tensor cosines, Tensor sines, str kernels) -> (Tensor, Tensor)", tags=_TAGS
)
torch.library.define(
    "lohan::rotary_backward",
    "(Tensor of_query, Tensor of_key, Tensor cosines, Tensor sines, str kernels) -> (Tensor, Tensor)",
    tags=_TAGS,
)
torch.library.define("lohan::cross_entropy", "(Tensor logits, Tensor labels, int ignored, str kernels) -> (Tensor, Tensor)", tags=_TAGS)
torch.library.define(
    "lohan::cross_entropy_backward",
    "(Tensor gradient, Tensor logits, Tensor labels, Tensor normalizers, int ignored, str kernels) -> Tensor",
    tags=_TAGS,
)


@torch.library.impl("lohan::rms_norm", "default")
def _rms_norm(hidden: torch.Tensor, weight: torch.Tensor, epsilon: float, kernels: str) -> tuple[torch.Tensor, torch.Tensor]:
    return _kernels(hidden, kernels).rms_norm(hidden, weight, epsilon)


@torch.library.impl("lohan::rms_norm_backward", "default")
def _rms_norm_backward(
    gradient: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, kernels: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return _kernels(hidden, kernels).rms_norm_backward(gradient, hidden, weight, scale)


@torch.library.impl("lohan::swiglu", "default")
def _swiglu(gate: torch.Tensor, up: torch.Tensor, kernels: str) -> torch.Tensor:
    return _kernels(gate, kernels).swiglu(gate, up)


@torch.library.impl("lohan::swiglu_backward", "default")
def _swiglu_backward(gradient: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, kernels: str) -> tuple[torch.Tensor, torch.Tensor]:
    return _kernels(gate, kernels).swiglu_backward(gradient, gate, up)


@torch.library.impl("lohan::rotary", "default")
def _rotary(
    query: torch.Tensor, key: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, kernels: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return _kernels(query, kernels).rotary(query, key, cosines, sines)


@torch.library.impl("lohan::rotary_backward", "default")
def _rotary_backward(
    of_query: torch.Tensor, of_key: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, kernels: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return _kernels(of_query, kernels).rotary_backward(of_query, of_key, cosines, sines)


@torch.library.impl("lohan::cross_entropy", "default")
def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor, ignored: int, kernels: str) -> tuple[torch.Tensor, torch.Tensor]:
    return _kernels(logits, kernels).cross_entropy(logits, labels, ignored)


@torch.library.impl("lohan::cross_entropy_backward", "default")
def _cross_entropy_backward(
    gradient: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor, normalizers: torch.Tensor, ignored: int, kernels: str
) -> torch.Tensor:
    return _kernels(logits, kernels).cross_entropy_backward(gradient, logits, labels, normalizers, ignored)


def _like_tokens(tensor: torch.Tensor) -> torch.Tensor:
    """An empty tensor with (rows, heads, tokens, D) laid out token by token, as all implementations return it."""
    rows, heads, length, width = tensor.shape
    return tensor.new_empty(rows, length, heads, width).transpose(1, 2)


def _fake_rms_norm(hidden: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(hidden), hidden.new_empty(*hidden.shape[:-1], 1, dtype=torch.float32)


def _fake_rotary(query: torch.Tensor, key: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _like_tokens(query), _like_tokens(key)


torch.library.register_fake("lohan::rms_norm", _fake_rms_norm)
torch.library.register_fake("lohan::rms_norm_backward", lambda _, hidden, weight, *__: (torch.empty_like(hidden), torch.empty_like(weight)))
torch.library.register_fake("lohan::swiglu", lambda gate, *_: torch.empty_like(gate))
torch.library.register_fake("lohan::swiglu_backward", lambda _, gate, up, *__: (torch.empty_like(gate), torch.empty_like(up)))
torch.library.register_fake("lohan::rotary", _fake_rotary)
torch.library.register_fake("lohan::rotary_backward", _fake_rotary)


def _fake_cross_entropy(logits: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return logits.new_empty((), dtype=torch.float32), logits.new_empty(logits.shape[0], dtype=torch.float32)


torch.library.register_fake("lohan::cross_entropy", _fake_cross_entropy)
torch.library.register_fake("lohan::cross_entropy_backward", lambda _, logits, *__: torch.empty_like(logits))


def _save_rms_norm(ctx: Any, inputs: Any, output: Any) -> None:
    hidden, weight, _, ctx.kernels = inputs
    scale = output[1]
    ctx.mark_non_differentiable(scale)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(hidden, weight, scale)


def _backward_rms_norm(ctx: Any, gradient: torch.Tensor, _: None) -> Any:
    of_hidden, of_weight = torch.ops.lohan.rms_norm_backward(gradient, *ctx.saved_tensors, ctx.kernels)
    return of_hidden, of_weight, None, None


def _save_swiglu(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG001 - called by name
    gate, up, ctx.kernels = inputs
    ctx.save_for_backward(gate, up)


def _backward_swiglu(ctx: Any, gradient: torch.Tensor) -> Any:
    return *torch.ops.lohan.swiglu_backward(gradient, *ctx.saved_tensors, ctx.kernels), None


def _save_rotary(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG001 - called by name
    _, _, cosines, sines, ctx.kernels = inputs
    ctx.save_for_backward(cosines, sines)


def _backward_rotary(ctx: Any, of_query: torch.Tensor, of_key: torch.Tensor) -> Any:
    of_query, of_key = torch.ops.lohan.rotary_backward(of_query, of_key, *ctx.saved_tensors, ctx.kernels)
    return of_query, of_key, None, None, None


def _save_cross_entropy(ctx: Any, inputs: Any, output: Any) -> None:
    logits, labels, ctx.ignored, ctx.kernels = inputs
    normalizers = output[1]
    ctx.mark_non_differentiable(normalizers)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, labels, normalizers)


def _backward_cross_entropy(ctx: Any, gradient: torch.Tensor, _: None) -> Any:
    of_logits = torch.ops.lohan.cross_entropy_backward(gradient, *ctx.saved_tensors, ctx.ignored, ctx.kernels)
    return of_logits, None, None, None


torch.library.register_autograd("lohan::rms_norm", _backward_rms_norm, setup_context=_save_rms_norm)
torch.library.register_autograd("lohan::swiglu", _backward_swiglu, setup_context=_save_swiglu)
torch.library.register_autograd("lohan::rotary", _backward_rotary, setup_context=_save_rotary)
torch.library.register_autograd("lohan::cross_entropy", _backward_cross_entropy, setup_context=_save_cross_entropy)

OPERATORS: Any = torch.ops.lohan
"""The operators; the last argument of each is the kernel set."""
