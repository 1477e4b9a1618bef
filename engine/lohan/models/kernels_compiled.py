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
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

from lohan.models import kernel_formulas as formulas

_EXAMPLE_SIZES = {1: (2048,), 2: (4, 512)}
"""What the compiler takes for the number of tokens, or of rows and of tokens in each; in how many parts a sum is cut follows from it."""
_EXAMPLE_LOGITS = 2**23
"""Where each token has as many elements as the vocabulary, there are so many of both together: a quarter of a chunk of the loss head."""
_FEWEST_TOKENS = 2
"""The compiler takes a size of 1 for a constant."""
_MOST_ELEMENTS = 2**31 - 1
"""The compiler counts in 32 bits where the example allows that."""

_compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    """As `kernel_formulas.rms_norm`."""
    output, scale = _run(formulas.rms_norm, 1, [_rows(hidden)], weight, epsilon)
    return output.view(hidden.shape), scale.view(*hidden.shape[:-1], 1)


def rms_norm_backward(
    gradient: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `kernel_formulas.rms_norm_backward`."""
    of_hidden, of_weight = _run(_rms_norm_backward, 1, [_rows(gradient), _rows(hidden), _rows(scale)], weight)
    return of_hidden.view(hidden.shape), of_weight


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """As `kernel_formulas.swiglu`."""
    output: torch.Tensor = _run(formulas.swiglu, 1, [_rows(gate), _rows(up)])
    return output.view(gate.shape)


def swiglu_backward(gradient: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `kernel_formulas.swiglu_backward`."""
    of_gate, of_up = _run(formulas.swiglu_backward, 1, [_rows(gradient), _rows(gate), _rows(up)])
    return of_gate.view(gate.shape), of_up.view(up.shape)


def rotary(query: torch.Tensor, key: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `kernel_formulas.rotary`."""
    turned: tuple[torch.Tensor, torch.Tensor] = _run(_rotary, 2, [query.transpose(1, 2), key.transpose(1, 2), cosines, sines])
    return turned


def rotary_backward(
    of_query: torch.Tensor, of_key: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `kernel_formulas.rotary_backward`."""
    turned: tuple[torch.Tensor, torch.Tensor] = _run(
        _rotary_backward, 2, [of_query.transpose(1, 2), of_key.transpose(1, 2), cosines, sines]
    )
    return turned


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, ignored: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `kernel_formulas.cross_entropy`; logits are read once, in their own type, and nothing as large is written."""
    counted = labels != ignored
    losses, normalizers = _run(_losses, 1, [logits, torch.where(counted, labels, 0), counted], example_tokens=_example_tokens(logits))
    return losses.sum(), normalizers


def cross_entropy_backward(
    gradient: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor, normalizers: torch.Tensor, ignored: int
) -> torch.Tensor:
    """As `kernel_formulas.cross_entropy_backward`; logits are read once, and their gradient is written once."""
    counted = labels != ignored
    given = [logits, torch.where(counted, labels, 0), torch.where(counted, gradient, 0.0), normalizers]
    of_logits: torch.Tensor = _run(_of_losses, 1, given, example_tokens=_example_tokens(logits))
    return of_logits


def _example_tokens(logits: torch.Tensor) -> int:
    return max(_FEWEST_TOKENS, _EXAMPLE_LOGITS // logits.shape[-1])


# The formulas of `kernel_formulas` go through torch's own operators, which make fp32 copies of all logits.
def _losses(logits: torch.Tensor, labels: torch.Tensor, counted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each row, 0 where it is not counted; and its log of the sum of exponentials."""
    working = logits.float()
    normalizers = torch.logsumexp(working, -1)
    at_label = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1).float()
    return torch.where(counted, normalizers - at_label, 0.0), normalizers


def _of_losses(logits: torch.Tensor, labels: torch.Tensor, gradients: torch.Tensor, normalizers: torch.Tensor) -> torch.Tensor:
    """The gradient of the logits from those of the rows' losses."""
    chances = torch.exp(logits.float() - normalizers.unsqueeze(-1))
    is_label = torch.arange(logits.shape[-1], device=logits.device) == labels.unsqueeze(-1)
    return (torch.where(is_label, chances - 1.0, chances) * gradients.unsqueeze(-1)).to(logits.dtype)


def _rms_norm_backward(gradient: torch.Tensor, hidden: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor) -> Any:
    return formulas.rms_norm_backward(gradient, hidden, weight, scale)


# Of (rows, tokens, heads, D): heads beside each other in memory, as projections leave them.
def _rotary(query: torch.Tensor, key: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> Any:
    return formulas.rotary(query.transpose(1, 2), key.transpose(1, 2), cosines, sines)


def _rotary_backward(of_query: torch.Tensor, of_key: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> Any:
    return formulas.rotary_backward(of_query.transpose(1, 2), of_key.transpose(1, 2), cosines, sines)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _run(
    formula: Callable[..., Any], leading: int, by_token: Sequence[torch.Tensor], *others: Any, example_tokens: int | None = None
) -> Any:
    """`formula(*by_token, *others)`, compiled.

    Args:
        leading: how many dimensions of `by_token` count tokens: 1, or 2, rows and tokens in each.
        by_token: tensors of any number of tokens.
        others: tensors and numbers, which every token shares.
        example_tokens: in place of the usual number; always the same for tensors of one form.
    """
    sizes = _EXAMPLE_SIZES[leading] if example_tokens is None else (example_tokens,)
    given = [tensor.contiguous() for tensor in by_token]
    with torch.no_grad():
        if given[0].shape[leading - 1] < _FEWEST_TOKENS or max(tensor.numel() for tensor in given) > _MOST_ELEMENTS:
            return formula(*given, *others)
        key = (formula, *[_form(tensor, leading) for tensor in given], *[_form(value, 0) for value in others])
        if _get_current_dispatch_mode() is None:
            return _function(key, sizes, given, others)(*given, *others)
        # Modes that watch the operator from outside would keep it from being compiled.
        with _disable_current_modes():
            return _function(key, sizes, given, others)(*given, *others)


def _function(key: tuple[Any, ...], sizes: Sequence[int], given: Sequence[torch.Tensor], others: Sequence[Any]) -> Callable[..., Any]:
    """What `key`, the formula first, is compiled to."""
    function = _compiled.get(key)
    if function is None:
        function = _compile(key[0])
        examples = [_example(tensor, sizes) for tensor in given]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the compiler about its own code
            function(*examples, *[value.detach() if isinstance(value, torch.Tensor) else value for value in others])
        _compiled[key] = function
    return function


def _compile(formula: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled copy of `formula`, which takes whatever has the form of its first arguments.

    What is compiled is looked up by code object: each copy has its own. It is kept from asking whether arguments and torch's state are
    those it was compiled for: the form is looked at here, and for another state it would compile again, at whatever size is under way.
    """
    from torch._inductor import config

    copy = types.FunctionType(formula.__code__.replace(), formula.__globals__, formula.__name__, formula.__defaults__)
    options: dict[str, Any] = {"guard_filter_fn": lambda guards: [False] * len(guards)}
    if hasattr(config, "deterministic"):
        options["deterministic"] = True
    compiled: Callable[..., Any] = torch.compile(copy, fullgraph=True, options=options)
    return compiled


def _example(tensor: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
    """Zeros in the form of `tensor`, with any number of tokens."""
    sizes = [1 if size == 1 else example for size, example in zip(tensor.shape, tokens, strict=False)]
    example = tensor.new_zeros(*sizes, *tensor.shape[len(tokens) :])
    for place, size in enumerate(sizes):
        if size > 1:
            torch._dynamo.mark_dynamic(example, place)  # noqa: SLF001 - documented under this name
    return example


def _form(value: Any, leading: int) -> Any:
    """What of a value makes its kernel another one; of the sizes along `leading` dimensions only whether they are 1."""
    if not isinstance(value, torch.Tensor):
        return value
    return (value.dtype, value.device, *[size == 1 for size in value.shape[:leading]], *value.shape[leading:])
