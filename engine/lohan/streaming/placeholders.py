"""What stands in for a parameter while its values are elsewhere, and the guards that keep anybody from reading it as a weight.

A placeholder is NaN with stride 0: it has the parameter's shape, dtype and device and costs one element. Whatever is computed from
it is NaN, and whatever would copy it (state_dict, save_pretrained, deepcopy, pickle) is refused, because a file of placeholders
looks like a valid model.
"""

# ruff: noqa: SLF001 - module internals (`_apply`, `_parameters`) are where PyTorch lets itself be extended

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import nn

from lohan.errors import EngineError

_READ_REMEDY = "Read weights with Session.named_weights(), or save them with lohan.models.export.save_pretrained()."


def make_placeholder(shape: torch.Size | tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A NaN tensor of `shape` that holds one element of memory."""
    return torch.full((1,) * len(shape), math.nan, dtype=dtype, device=device).expand(shape)


class StreamedGradient(torch.Tensor):
    """What `parameter.grad` is after a backward: the gradient itself has gone to the optimizer.

    Shape, dtype and device can be read. Anything that would compute with it, such as `clip_grad_norm_`, raises an EngineError: with
    `None` in its place clipping would return 0.0 and do nothing.
    """

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "__get__" or func in _DESCRIBING:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if func in _RESETTING:
            return args[0]
        raise EngineError(
            f"a parameter's gradient was used after backward ({getattr(func, '__name__', func)}), but it has already gone to the optimizer",
            remedy="Read the squared gradient norm from Session.statistics.last_step; gradients are not kept.",
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"StreamedGradient(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


_DESCRIBING = {torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.is_floating_point, torch.Tensor.__len__}
# What zero_grad(set_to_none=False) calls: there is nothing to reset, and training loops may call it.
_RESETTING = {torch.Tensor.zero_, torch.Tensor.detach_, torch.Tensor.requires_grad_}


def make_streamed_gradient(parameter: nn.Parameter) -> torch.Tensor:
    """The sentinel for `parameter.grad`."""
    return make_placeholder(parameter.shape, parameter.dtype, parameter.device).as_subclass(StreamedGradient)


def _refuse(action: str) -> NoReturn:
    raise EngineError(f"{action} would read placeholders: the weights are streamed and not in the model", remedy=_READ_REMEDY)


def _refuse_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:  # noqa: ARG001
    _refuse("state_dict()")


def _refuse_load(module: nn.Module, *_: Any) -> None:  # noqa: ARG001
    _refuse("load_state_dict()")


def _refuse_deepcopy(memo: Any) -> None:  # noqa: ARG001
    _refuse("copy.deepcopy()")


def _refuse_pickle(protocol: Any) -> None:  # noqa: ARG001
    _refuse("pickling the model")


def guard(modules: Iterable[nn.Module], parameters: Iterable[nn.Parameter]) -> None:
    """Make every reader of `parameters` through `modules` (their owners) raise an EngineError; never undone.

    The guards hold no reference to the session, so that a model that outlives it keeps refusing and keeps nothing alive.
    """
    for module in modules:
        module.register_state_dict_pre_hook(_refuse_state_dict)  # type: ignore[no-untyped-call]
        module.register_load_state_dict_pre_hook(_refuse_load)  # type: ignore[no-untyped-call]
        module._apply = _guarded_apply(module)  # type: ignore[method-assign]
    for parameter in parameters:
        parameter.__deepcopy__ = _refuse_deepcopy  # type: ignore[method-assign]
        parameter.__reduce_ex__ = _refuse_pickle  # type: ignore[method-assign]


def _guarded_apply(module: nn.Module) -> Callable[..., nn.Module]:
    """`model.to(...)` to where the model is stays harmless; one that would change a placeholder's dtype or device is refused."""
    original: Callable[..., nn.Module] = type(module)._apply

    def apply(fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        sample = next(iter(module._parameters.values()))
        if sample is not None:
            moved = fn(torch.empty(0, dtype=sample.dtype, device=sample.device))
            if moved.dtype != sample.dtype or moved.device != sample.device:
                raise EngineError(
                    f"the model cannot become {moved.dtype} on {moved.device}: it is streamed in {sample.dtype} on {sample.device}",
                    remedy="Choose device and precision in lohan.init.",
                )
        return original(module, fn, recurse)

    return apply
