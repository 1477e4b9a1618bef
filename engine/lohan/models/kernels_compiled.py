"""The fused operators compiled by torch for a GPU: each formula becomes one kernel, or two where it sums over tokens.

The same tensors must give the same bits whenever and wherever they are computed: a recomputation stands in for the first run, a resumed run
for one that was not interrupted. Therefore a formula is compiled once for widths and types, at a fixed number of tokens which any other
number then shares, whatever sizes a run comes to first; and nothing is chosen by timing that would change the order of a sum.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from lohan.models import kernel_formulas as formulas

_COMPILED_TOKENS = 2048
"""What the compiler takes for the number of tokens, from which it chooses in how many parts a sum is cut."""
_FEWEST_TOKENS = 2
"""The compiler takes a size of 1 for a constant."""

_compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    """As `kernel_formulas.rms_norm`."""
    output, scale = _run(formulas.rms_norm, [_rows(hidden)], weight, epsilon)
    return output.view(hidden.shape), scale.view(*hidden.shape[:-1], 1)


def rms_norm_backward(
    gradient: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `kernel_formulas.rms_norm_backward`."""
    of_hidden, of_weight = _run(_rms_norm_backward, [_rows(gradient), _rows(hidden), _rows(scale)], weight)
    return of_hidden.view(hidden.shape), of_weight


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """As `kernel_formulas.swiglu`."""
    output: torch.Tensor = _run(formulas.swiglu, [_rows(gate), _rows(up)])
    return output.view(gate.shape)


def swiglu_backward(gradient: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `kernel_formulas.swiglu_backward`."""
    of_gate, of_up = _run(formulas.swiglu_backward, [_rows(gradient), _rows(gate), _rows(up)])
    return of_gate.view(gate.shape), of_up.view(up.shape)


def rotary(query: torch.Tensor, key: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `kernel_formulas.rotary`."""
    return _turn(_rotary, query, key, cosines, sines)


def rotary_backward(
    of_query: torch.Tensor, of_key: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `kernel_formulas.rotary_backward`."""
    return _turn(_rotary_backward, of_query, of_key, cosines, sines)


def _rms_norm_backward(gradient: torch.Tensor, hidden: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor) -> Any:
    return formulas.rms_norm_backward(gradient, hidden, weight, scale)


def _rotary(query: torch.Tensor, key: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> Any:
    return formulas.rotary(query, key, cosines, sines)


def _rotary_backward(of_query: torch.Tensor, of_key: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> Any:
    return formulas.rotary_backward(of_query, of_key, cosines, sines)


def _turn(
    formula: Callable[..., Any], query: torch.Tensor, key: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`formula` over tokens whose heads lie beside each other in memory, as projections leave them, each with its own angles."""
    rows, _, length, width = query.shape
    angles = [tensor.expand(rows, length, width).reshape(-1, width) for tensor in (cosines, sines)]
    heads = [tensor.transpose(1, 2).reshape(rows * length, -1, width) for tensor in (query, key)]
    turned = _run(formula, [*heads, *angles])
    turned_query, turned_key = (tensor.view(rows, length, -1, width).transpose(1, 2) for tensor in turned)
    return turned_query, turned_key


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _run(formula: Callable[..., Any], by_token: Sequence[torch.Tensor], *others: Any) -> Any:
    """`formula(*by_token, *others)`, compiled.

    Args:
        by_token: tensors whose first dimension counts tokens.
        others: tensors and numbers, which every token shares.
    """
    # Modes that watch the operator from outside must not keep it from being compiled; nor does it concern autograd.
    with _disable_current_modes(), torch.no_grad():
        given = [tensor.detach() for tensor in by_token]
        shared = [value.detach() if isinstance(value, torch.Tensor) else value for value in others]
        if len(given[0]) < _FEWEST_TOKENS:
            return formula(*given, *shared)
        key = (formula, *(_form(tensor, skip=1) for tensor in given), *map(_form, shared), _state())
        function = _compiled.get(key)
        if function is None:
            function = _compiled[key] = _compile(formula)
            # What is compiled is what these ask for: tokens as `mark_dynamic` has it, everything else as in the key.
            examples = [_mark(tensor.new_zeros(_COMPILED_TOKENS, *tensor.shape[1:])) for tensor in given]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the compiler about its own code
                function(*examples, *shared)
        return function(*map(_mark, given), *shared)


def _compile(formula: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled copy of `formula`. What is compiled, and how often at most, is counted by code object: each copy has its own."""
    copy = types.FunctionType(formula.__code__.replace(), formula.__globals__, formula.__name__, formula.__defaults__)
    compiled: Callable[..., Any] = torch.compile(copy, fullgraph=True, options=_options())
    return compiled


def _options() -> dict[str, Any]:
    from torch._inductor import config

    return {"deterministic": True} if hasattr(config, "deterministic") else {}


def _mark(tensor: torch.Tensor) -> torch.Tensor:
    torch._dynamo.mark_dynamic(tensor, 0)  # noqa: SLF001 - documented under this name
    return tensor


def _form(value: Any, skip: int = 0) -> Any:
    """What of a value makes its kernel another one."""
    if not isinstance(value, torch.Tensor):
        return value
    return (value.dtype, value.device, value.shape[skip:], value.stride(), value.is_inference())


def _state() -> tuple[Any, ...]:
    """What torch's compiler asks about besides tensors; where it differs it would compile again, at whatever size is under way then."""
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()  # noqa: SLF001
    dispatch = (included.raw_repr(), excluded.raw_repr())
    deterministic = (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
    numbers = (torch.get_default_dtype(), torch.get_num_threads(), torch.get_float32_matmul_precision())
    return (*dispatch, *deterministic, *numbers)
