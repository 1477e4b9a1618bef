"""What each operator of a block computes, reads, writes and leaves behind, traced without weights or data.

The block runs on the meta device at three pairs of rows and length, from which every quantity's three coefficients follow exactly; a
fourth pair checks them. Operators are those that a GPU is sent: attention is one operator with the outputs of flash attention (the result
and the logarithms of the softmax's sums), dropout is one too. Causal attention counts half of the score matrix, since flash attention
leaves out what is masked and benchmarks count it so; a block that computes attention by plain matrix products counts them whole.

Runs differ from that in two ways. With a mask attention computes the whole score matrix, a GPU pads its logarithms to 32 tokens, and
grouped keys and values are copied for it first, by operators that no workload has. In fp32 no GPU has a kernel for grouped attention,
which becomes products and a softmax under other labels.
"""

# ruff: noqa: SLF001 - schemas are public only as text, and the only identity a storage on the meta device has is `_cdata`

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from lohan.errors import ModelError
from lohan.models.block_inputs import Mask, block_arguments
from lohan.models.operators import BlockOperators, draws_random_numbers, operator_name
from lohan.models.trace import CANNOT_RUN
from lohan.planning.workload import Coefficients, OperatorGroup, OperatorWorkload

FITTED_SHAPES = ((2, 64), (4, 64), (2, 128))
"""(Rows, tokens a row). More rows tell what grows with the tokens, longer rows what grows with tokens x length."""
CHECKED_SHAPE = (3, 96)
_SINGLE_ROW = (1, 64)  # some copies are not made of a single row
_ITEM_BYTES = torch.bfloat16.itemsize
_META = torch.device("meta")
# What a block that cannot run by itself, or not without data, fails with.


def trace_operators(block: nn.Module, hidden_size: int, rotary: nn.Module | None) -> tuple[OperatorWorkload, ...]:
    """The labelled operators of the forward of `block`, in its order.

    Sizes are those of a bf16 run; in fp32 those of tensors that are fp32 in both are half as many elements. What can be kept has the same
    label and the same outputs in both precisions, with a mask and without.

    Args:
        block: one block of the model, its parameters on any device.
        hidden_size: width of the input of the block.
        rotary: the model's module for rotary positions, with real buffers; None if it has none.

    Raises:
        ModelError: the block cannot run by itself, or its operators are others at other lengths, or grow otherwise than with tokens and
            with tokens x length.
    """
    operators = BlockOperators(block)
    run = partial(_run, block, operators, hidden_size, rotary)
    try:
        runs = [run(shape) for shape in (*FITTED_SHAPES, CHECKED_SHAPE)]
        others = [run(FITTED_SHAPES[0], dtype=torch.float32), run(FITTED_SHAPES[0], mask=Mask.DENSE)]
        single_row = run(_SINGLE_ROW)
    except CANNOT_RUN as error:
        raise _untraceable(block, f"it cannot run by itself: {error}") from error
    finally:
        operators.close()
    if any(list(calls) != list(runs[0]) for calls in runs):
        raise _untraceable(block, "its operators depend on the number of tokens")
    workloads = []
    for label, first in runs[0].items():
        workload = _fit_operator(block, label, [calls[label] for calls in runs])
        same = all(_keeps_the_same(calls.get(label), first.output_shapes) for calls in others)
        single_bytes = workload.output_elements.at(*_SINGLE_ROW) * _ITEM_BYTES
        same &= label in single_row and single_row[label].can_be_kept and single_row[label].output_bytes == single_bytes
        workloads.append(workload.model_copy(update={"can_be_kept": workload.can_be_kept and same}))
    return tuple(workloads)


def _untraceable(block: nn.Module, reason: str) -> ModelError:
    return ModelError(
        f"the operators of {type(block).__name__} cannot be counted: {reason}",
        place=type(block).__name__,
        remedy="The model can be trained with all activations recomputed.",
    )


@dataclass(slots=True)
class _Call:
    """An operator at one shape; where a module is called twice, both calls' operators have one label and are added up."""

    group: OperatorGroup
    flops: int
    output_bytes: int
    traffic_bytes: int
    output_shapes: tuple[tuple[int, ...], ...]
    can_be_kept: bool
    is_recomputed: bool = False

    def add(self, other: _Call) -> None:
        self.flops += other.flops
        self.output_bytes += other.output_bytes
        self.traffic_bytes += other.traffic_bytes
        self.can_be_kept = False  # one label cannot say which


def _fit_operator(block: nn.Module, label: str, calls: Sequence[_Call]) -> OperatorWorkload:
    try:
        flops = _fit([Fraction(call.flops) for call in calls])
        output = _fit([Fraction(call.output_bytes, _ITEM_BYTES) for call in calls])
        traffic = _fit([Fraction(call.traffic_bytes, _ITEM_BYTES) for call in calls])
    except ArithmeticError as error:
        raise _untraceable(block, f"{label} grows otherwise than with tokens and tokens x length") from error
    return OperatorWorkload(
        label=label,
        group=calls[0].group,
        flops=flops,
        output_elements=output,
        traffic_elements=traffic,
        can_be_kept=calls[0].can_be_kept,
        is_recomputed=calls[0].is_recomputed,
    )


def _keeps_the_same(call: _Call | None, output_shapes: tuple[tuple[int, ...], ...]) -> bool:
    """Whether a run that has `call` under a label could keep outputs of these shapes there."""
    return call is not None and call.can_be_kept and call.output_shapes == output_shapes


def _fit(values: Sequence[Fraction]) -> Coefficients:
    """The coefficients of a quantity that is `values` at `FITTED_SHAPES` and at `CHECKED_SHAPE`.

    Raises:
        ArithmeticError: the last value is another.
    """
    (rows, length), (twice_the_rows, same), (_, twice_the_length) = FITTED_SHAPES
    assert (twice_the_rows, same, twice_the_length) == (2 * rows, length, 2 * length), "the solution below is of such shapes"
    first, more_rows, longer, checked = values
    tokens = rows * length
    per_token_and_length = (longer - more_rows) / (2 * tokens * length)  # as many tokens, in rows of 2 x length
    per_token = (more_rows - first) / tokens - per_token_and_length * length
    fixed = 2 * first - more_rows
    rows, length = CHECKED_SHAPE
    if fixed + rows * length * (per_token + per_token_and_length * length) != checked:
        raise ArithmeticError(f"{checked} at {CHECKED_SHAPE}")
    return Coefficients(fixed=float(fixed), per_token=float(per_token), per_token_and_length=float(per_token_and_length))


def _run(
    block: nn.Module,
    operators: BlockOperators,
    hidden_size: int,
    rotary: nn.Module | None,
    shape: tuple[int, int],
    *,
    dtype: torch.dtype = torch.bfloat16,
    mask: Mask = Mask.NONE,
) -> dict[str, _Call]:
    """One forward on the meta device: by label, in order."""

    def meta(*sizes: int) -> torch.Tensor:
        return torch.empty(sizes, device=_META, dtype=dtype, requires_grad=True)

    rows, length = shape
    tensors = {name: meta(*tensor.shape) for name, tensor in block.named_parameters()}
    tensors |= {name: torch.empty(tensor.shape, device=_META, dtype=tensor.dtype) for name, tensor in block.named_buffers()}
    arguments = block_arguments(block, rotary, rows, length, device=_META, dtype=dtype, mask=mask)
    hidden = meta(rows, length, hidden_size)
    operators.begin()
    recorder = _Recorder(operators)
    with torch.autograd.graph.saved_tensors_hooks(recorder.save, lambda tensor: tensor), _DeviceKernels(), recorder:
        torch.func.functional_call(block, tensors, (hidden,), arguments)
    return recorder.calls()


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch declares it without
    """Writes down what is dispatched, and how far autograd had come when it saved its last tensor."""

    def __init__(self, operators: BlockOperators) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operators = operators
        self._calls: list[tuple[str, _Call]] = []
        self._recomputed = 0
        self._makers: dict[int, _Call] = {}
        self._alive: list[torch.Tensor] = []  # a freed storage's identity would be given to the next one

    def calls(self) -> dict[str, _Call]:
        """By label, in order."""
        calls: dict[str, _Call] = {}
        for place, (label, call) in enumerate(self._calls):
            call.is_recomputed = place < self._recomputed
            if label in calls:
                calls[label].is_recomputed |= call.is_recomputed
                calls[label].add(call)
            else:
                calls[label] = call
        return calls

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        """A pack hook. Inputs are saved before their operator is dispatched, outputs after it: the recomputation, which ends with the last
        of them, dispatches as many operators as have been until then."""
        self._recomputed = len(self._calls)
        return tensor

    def __torch_dispatch__(self, function: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        inputs, outputs = _tensors((args, kwargs)), _tensors(result)
        self._alive += [*inputs, *outputs]
        for storage in _written_storages(function, args, kwargs):
            if storage in self._makers:
                self._makers[storage].can_be_kept = False
        label = self._operators.label(function)
        if label is not None:
            call = _describe(function, args, kwargs, result, inputs, outputs)
            self._calls.append((label, call))
            self._makers |= {_storage(output): call for output in outputs if _storage(output) not in self._makers}
        return result


def _describe(
    function: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    result: Any,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
) -> _Call:
    flops, group = 0, OperatorGroup.OTHER
    if operator_name(function) == "attention":
        flops, group = _attention_flops(function, args, kwargs), OperatorGroup.ATTENTION
        outputs = outputs[:2]  # the result and the logarithms; what else kernels return is a few numbers
    elif function.overloadpacket in flop_registry:
        flops, group = flop_registry[function.overloadpacket](*args, **kwargs, out_val=result), OperatorGroup.MATMUL
    elif operator_name(function) == "matmul":
        raise NotImplementedError(f"the FLOPs of {function}")
    given = {_storage(tensor) for tensor in inputs}
    fresh = all(_storage(output) not in given for output in outputs)
    return _Call(
        group=group,
        flops=flops,
        output_bytes=sum(output.numel() * output.itemsize for output in outputs),
        traffic_bytes=sum(_read_bytes(tensor) for tensor in inputs) + sum(output.numel() * output.itemsize for output in outputs),
        output_shapes=tuple(tuple(output.shape) for output in outputs),
        can_be_kept=bool(outputs) and fresh and not draws_random_numbers(function, args, kwargs),
    )


def _attention_flops(function: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Two products over the score matrix, of which causal attention needs half."""
    given = dict(zip((argument.name for argument in function._schema.arguments), args, strict=False)) | dict(kwargs)
    query, key, value = given["query"], given["key"], given["value"]
    scores = math.prod(query.shape[:-1]) * key.shape[-2]
    flops: int = 2 * scores * (query.shape[-1] + value.shape[-1])
    return flops // 2 if given.get("is_causal") else flops


def _read_bytes(tensor: torch.Tensor) -> int:
    """A dimension along which a tensor is repeated is read once."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return math.prod(sizes) * tensor.itemsize


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    identity: int = tensor.untyped_storage()._cdata
    return identity


def _written_storages(function: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[int]:
    for place, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from map(_storage, _tensors(value))


class _DeviceKernels(TorchFunctionMode):
    """Puts the operators that a GPU is sent in place of those that the meta device would take apart."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        if func is functional.dropout:
            return _dropout(*args, **kwargs)
        return func(*args, **kwargs)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **keywords: Any,
) -> torch.Tensor:
    """The kernels that a GPU takes: with a mask, or values of another width, the memory-efficient one; else flash attention, whose outputs
    on a CPU are those that a GPU's backward needs too, and whose keys and values may have fewer heads. The mask itself changes no size.
    """
    scale = keywords.get("scale")
    if attn_mask is not None or query.shape[-1] != value.shape[-1]:
        result = torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, None, True, dropout_p, is_causal, scale=scale)
    else:
        result = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout_p, is_causal, scale=scale)
    output: torch.Tensor = result[0]
    return output


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    if not training or p == 0:
        return input
    if inplace:
        return functional.dropout(input, p, training, inplace)
    output: torch.Tensor = torch.native_dropout(input, p, True)[0]
    return output
