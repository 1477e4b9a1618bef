"""Kernel sets: which can run on a device, and how one is put into a model's modules and taken out again.

Norms, gated MLPs and attention of the classes listed here compute the same with fused operators (`kernel_operators`) in place of some of
torch's. A module of another class stays as it is. What is installed is a subclass of the module's own class, in the module's `__class__`:
everything that asks for the class's forward finds it, and parameters, hooks and names stay where they are.
"""

from __future__ import annotations

import inspect
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from lohan.config import KernelSet
from lohan.errors import ConfigError
from lohan.models import kernel_formulas
from lohan.models.kernel_operators import OPERATORS
from lohan.planning.footprint import loss_bytes_per_logit, loss_chunk_tokens

NO_LABEL = torch.iinfo(torch.int64).min
"""Kept tokens all have a label; a batch without any keeps one token under this one, so that its loss is a 0 with a gradient of 0."""

_FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
_ROTATION = "apply_rotary_pos_emb"  # what an attention's forward calls, out of its Python module
_TRIED_SHAPE = (4, 64)
# The formula rounds silu below 4 to bf16 (by 2^-7, times 4) and the product below 16 (by 2^-5); kernels round the product alone (2^-5).
_TRIED_TOLERANCE = 3 * 2**-5


def _classes(part: str) -> frozenset[str]:
    return frozenset(f"transformers.models.{family}.modeling_{family}.{name}{part}" for family, name in _FAMILIES.items())


_NORMS, _MLPS, _ATTENTIONS = _classes("RMSNorm"), _classes("MLP"), _classes("Attention")
_SILUS = frozenset({"torch.nn.modules.activation.SiLU", "transformers.activations.SiLUActivation"})


def usable_kernels(device: torch.device) -> tuple[KernelSet, ...]:
    """The sets that make a difference on `device`, `torch` first. On a GPU the first call compiles something, for seconds."""
    if device.type != "cuda":
        return (KernelSet.TORCH,)
    return tuple(kernels for kernels in (KernelSet.TORCH, KernelSet.LIGER, KernelSet.COMPILED) if not why_unusable(kernels, device))


def resolve_kernels(kernels: KernelSet, device: torch.device, planned: str = KernelSet.AUTO) -> KernelSet:
    """The set to use; `auto` is the planned one, and without a plan `compiled` on a GPU that can compile, else `torch`.

    Raises:
        ConfigError: the set that was asked for, or planned, cannot run on `device`.
    """
    kernels = KernelSet(planned) if kernels is KernelSet.AUTO else kernels
    if kernels is KernelSet.AUTO:
        can_compile = device.type == "cuda" and not why_unusable(KernelSet.COMPILED, device)
        return KernelSet.COMPILED if can_compile else KernelSet.TORCH
    if reason := why_unusable(kernels, device):
        raise ConfigError(
            f"the kernel set {kernels} cannot be used: {reason}",
            place="kernels",
            remedy=f"Use one of {', '.join((KernelSet.AUTO, *usable_kernels(device)))}.",
        )
    return kernels


def cross_entropy_sum(logits: torch.Tensor, labels: torch.Tensor, kernels: KernelSet) -> torch.Tensor:
    """The sum, in fp32, of the cross-entropies of `logits` (N, V) with `labels` (N), but for those that are `NO_LABEL`.

    Where a GPU computes with fused kernels, logits are read once, and their gradient is written once: torch's own make five fp32 copies.
    """
    if kernels is KernelSet.TORCH:
        return functional.cross_entropy(logits.float(), labels, ignore_index=NO_LABEL, reduction="sum")
    total: torch.Tensor = OPERATORS.cross_entropy(logits, labels, NO_LABEL, str(kernels))[0]
    return total


def loss_tokens(states: torch.Tensor, vocabulary: int, kernels: KernelSet) -> int:
    """Of hidden `states` (N, H), how many the loss is computed of at a time: see `lohan.planning.footprint.loss_chunk_tokens`."""
    is_fused = states.is_cuda and kernels is not KernelSet.TORCH
    return loss_chunk_tokens(vocabulary, loss_bytes_per_logit(states.element_size(), is_fused=is_fused))


@cache
def why_unusable(kernels: KernelSet, device: torch.device) -> str:
    """Why a set cannot run on `device`; empty where it can. On a GPU each set but torch's is tried once."""
    if kernels is KernelSet.LIGER:
        if device.type != "cuda":
            return f"Liger's kernels need a GPU, and the device is {device}"
        if find_spec("liger_kernel") is None:
            return "the package liger-kernel is not installed (pip install 'lohan[gpu]')"
        if reason := why_unusable(KernelSet.COMPILED, device):
            return f"torch's compiler makes its loss, and {reason}"
    if kernels is KernelSet.TORCH or device.type != "cuda":
        return ""
    try:
        gate = torch.linspace(-4, 4, 256, device=device, dtype=torch.bfloat16).view(_TRIED_SHAPE)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of packages about their own code, when they are first loaded
            fused = OPERATORS.swiglu(gate, gate, str(kernels))
    except Exception as error:  # noqa: BLE001 - compilers, their caches and drivers fail in ways of their own
        return f"a trial of it failed: {_causes(error)}"
    difference = (fused - kernel_formulas.swiglu(gate, gate)).abs().max().item()
    return "" if difference <= _TRIED_TOLERANCE else f"a trial of it was off by {difference}"


def _causes(error: BaseException | None) -> str:
    """What an error and those that led to it say, two lines of each: compilers wrap what went wrong."""
    said: dict[str, None] = {}
    while error is not None:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        said[": ".join((type(error).__name__, *lines[:2]))] = None
        error = error.__cause__ or error.__context__
    return "; from ".join(said)


@dataclass(frozen=True, slots=True)
class InstalledKernels:
    """What `install_kernels` changed."""

    kernels: KernelSet
    fused: tuple[str, ...]
    """Names of the modules that compute with fused operators now."""
    left_alone: tuple[str, ...]
    """Names of norms, MLPs and attentions of classes that are not known here, which compute as before."""
    _changed: tuple[tuple[nn.Module, type[nn.Module]], ...]

    def remove(self) -> None:
        """Give every module its own class back."""
        for module, own in self._changed:
            module.__class__ = own


def install_kernels(module: nn.Module, kernels: KernelSet) -> InstalledKernels:
    """Have all known modules inside `module`, and itself, compute with the fused operators of a set; `torch` changes nothing.

    Args:
        kernels: any but `auto`, usable on the device that the module will run on.
    """
    assert kernels is not KernelSet.AUTO, "resolved by the caller"
    if kernels is KernelSet.TORCH:
        return InstalledKernels(kernels, (), (), ())
    fused, left_alone = [], []
    changed: list[tuple[nn.Module, type[nn.Module]]] = []
    for name, part in module.named_modules():
        own: Any = type(part)  # a class is hashable, but mypy takes its instances' `__hash__` for its own
        replacement = _fused_class(own, kernels) if _can_be_fused(part) else None
        if replacement is not None:
            fused.append(name)
            changed.append((part, own))
            part.__class__ = replacement
        elif own.__name__.endswith(("RMSNorm", "MLP", "Attention")):
            left_alone.append(name)
    return InstalledKernels(kernels, tuple(fused), tuple(left_alone), tuple(changed))


def _path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _can_be_fused(module: nn.Module) -> bool:
    """Whether the module's class is known, and it computes what that class does by default."""
    if "forward" in vars(module):
        return False
    return _path(type(module)) in _NORMS | _ATTENTIONS or (
        _path(type(module)) in _MLPS and _path(type(getattr(module, "act_fn", None))) in _SILUS
    )


@cache
def _fused_class(own: type[nn.Module], kernels: KernelSet) -> type[nn.Module] | None:
    """A subclass of a known class with the set's forward; None where its attention rotates otherwise than was known."""
    path = _path(own)
    forward: Callable[..., Any] | None
    if path in _NORMS:
        forward = _norm_forward(kernels)
    elif path in _MLPS:
        forward = _mlp_forward(kernels)
    else:
        forward = _attention_forward(own, kernels)
    if forward is None:
        return None
    return type(own.__name__, (own,), {"forward": forward, "__module__": own.__module__, "__qualname__": own.__qualname__})


def _norm_forward(kernels: KernelSet) -> Callable[..., Any]:
    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = OPERATORS.rms_norm(hidden_states, self.weight, self.variance_epsilon, str(kernels))[0]
        return output

    return forward


def _mlp_forward(kernels: KernelSet) -> Callable[..., Any]:
    def forward(self: Any, x: torch.Tensor) -> Any:
        return self.down_proj(OPERATORS.swiglu(self.gate_proj(x), self.up_proj(x), str(kernels)))

    return forward


def _attention_forward(own: type[nn.Module], kernels: KernelSet) -> Callable[..., Any] | None:
    """The class's own forward, which finds our rotation under the name of its Python module's."""
    forward = inspect.unwrap(own.forward)
    if _ROTATION not in forward.__code__.co_names or _ROTATION not in forward.__globals__:
        return None

    def rotate(query: torch.Tensor, key: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> Any:
        return OPERATORS.rotary(query, key, cosines, sines, str(kernels))

    changed = types.FunctionType(
        forward.__code__, {**forward.__globals__, _ROTATION: rotate}, forward.__name__, forward.__defaults__, forward.__closure__
    )
    changed.__kwdefaults__ = forward.__kwdefaults__
    return changed
