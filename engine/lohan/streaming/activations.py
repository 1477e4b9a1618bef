"""The vertical schedule: a block runs as a loop over micro-batches, so that its weights are read once per pass for the whole batch.

Which arguments of a block are split along the batch is written down here by name. It is not guessed from shapes: a mask of shape
(4, 1, 4, 4) looks the same along two dimensions, and transformers' mask code depends on data, so it cannot be traced with two batch
sizes on the meta device either. An argument that is not listed is an error that names it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lohan.errors import EngineError
from lohan.planning.operations import Recompute
from lohan.streaming.regions import RegionRunner, UnitRuntime

HIDDEN_STATES = "hidden_states"
# The batch is dimension 0, or the tensor has size 1 there and is the same for every row; pairs and tuples hold such tensors.
# hidden_states (B, S, H); attention_mask (B, 1, S, S) or (B, S); position_ids (B, S); position_embeddings 2 x (B, S, D).
BATCHED_ARGUMENTS = frozenset(
    {HIDDEN_STATES, "attention_mask", "causal_mask", "position_ids", "position_embeddings", "shift_labels", "labels"}
)
# cache_position (S,) indexes positions and has no batch dimension.
SHARED_ARGUMENTS = frozenset({"cache_position"})
CACHE_ARGUMENTS = ("cache", "past_key_values", "past_key_value", "layer_past")


class BlockForward:
    """Takes the place of a block's `forward`."""

    _hidden_names: Sequence[str] = (HIDDEN_STATES,)

    def __init__(self, runner: RegionRunner, unit: UnitRuntime, name: str, block: nn.Module) -> None:
        self._runner, self._unit, self._name, self._block = runner, unit, name, block
        self._original = type(block).forward
        self._signature = inspect.signature(self._original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hidden, arguments = self._bind(args, kwargs)
        return self._run(self.compute, hidden, arguments)

    def compute(self, hidden: torch.Tensor, arguments: Mapping[str, Any]) -> Any:
        """The module's own forward, with whatever weights are in it."""
        return self._original(self._block, hidden, **arguments)

    def _run(self, call: Callable[..., Any], hidden: torch.Tensor, arguments: Mapping[str, Any]) -> Any:
        """`call(hidden, arguments)` as a region for each micro-batch."""
        sizes = micro_batch_sizes(hidden.shape[0], self._runner.micro_batch_size)
        parts = self._split(arguments, hidden.shape[0], sizes)
        with self._runner.held(self._unit):
            hiddens = torch.split(hidden, sizes) if len(sizes) > 1 else (hidden,)
            outputs = [self._runner.run(self._unit, call, rows, part) for rows, part in zip(hiddens, parts, strict=True)]
        return join(outputs, self._name)

    def _bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
        """The first argument, which gradients flow to, and all others by name; caches are refused and switched off."""
        bound = dict(self._signature.bind(self._block, *args, **kwargs).arguments)
        names = list(self._signature.parameters)
        bound.pop(names[0])
        arguments: dict[str, Any] = {}
        for name, value in bound.items():
            kind = self._signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_KEYWORD:
                arguments.update(value)
            elif kind is inspect.Parameter.VAR_POSITIONAL:
                raise EngineError(f"{self._name}.forward takes unnamed arguments (*{name})", place=self._name, remedy=_UNSUPPORTED)
            else:
                arguments[name] = value
        refuse_cache(arguments, self._name)
        if arguments.get("use_cache"):
            arguments["use_cache"] = False
        hidden = arguments.pop(names[1], None)
        if names[1] not in self._hidden_names or not isinstance(hidden, torch.Tensor):
            raise EngineError(
                f"the first argument of {self._name}.forward is {names[1]!r}, expected a tensor {' or '.join(self._hidden_names)}",
                place=self._name,
                remedy=_UNSUPPORTED,
            )
        return hidden, arguments

    def _split(self, arguments: Mapping[str, Any], batch: int, sizes: Sequence[int]) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = [{} for _ in sizes]
        for name, value in arguments.items():
            for part, piece in zip(parts, split_argument(name, value, batch, sizes, self._name), strict=True):
                part[name] = piece
        return parts


@dataclass(frozen=True, slots=True)
class _Normed:
    """How a tensor came about: `compute(hidden)`, and its version then (writing to it raises the version)."""

    part: PartForward
    hidden: torch.Tensor
    version: int


class PartForward(BlockForward):
    """Takes the place of the `forward` of a block's child, where these are units; the block's own forward runs around them.

    Each call is a region whose input is kept. A norm's output would be kept as the next region's input although a norm costs almost nothing
    to compute again: a main module that is given the very output of a norm of its own unit runs that norm inside its own region instead,
    from the norm's input, which is kept anyway. The norm's own region then has no user and is forgotten; where the block uses the output
    for something else too, gradients flow through that region as they should.

    Args:
        is_main: whether this is the unit's module that has matrices.
    """

    # hidden_states: attention, norms, MLPs of mixtures of experts; x: MLPs; input: torch's own modules.
    _hidden_names = (HIDDEN_STATES, "x", "input")

    def __init__(self, runner: RegionRunner, unit: UnitRuntime, name: str, module: nn.Module, *, is_main: bool) -> None:
        super().__init__(runner, unit, name, module)
        self._is_main = is_main

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hidden, arguments = self._bind(args, kwargs)
        if not self._is_main:
            output = self._run(self.compute, hidden, arguments)
            if not arguments and isinstance(output, torch.Tensor):
                setattr(output, _NORMED, _Normed(self, hidden, output._version))  # noqa: SLF001
            return output
        normed: _Normed | None = getattr(hidden, _NORMED, None)
        if normed is None or normed.part._unit is not self._unit or normed.version != hidden._version:  # noqa: SLF001
            return self._run(self.compute, hidden, arguments)
        norm = normed.part

        def call(hidden: torch.Tensor, arguments: Mapping[str, Any]) -> Any:
            return self.compute(norm.compute(hidden, {}), arguments)

        return self._run(call, normed.hidden, arguments)


_NORMED = "_lohan_normed"
_UNSUPPORTED = "Use a model of the Llama, Mistral or Qwen families, or ask for this one to be supported."


class RootForward:
    """Takes the place of the `forward` of a module beside the blocks: embedding, final norm, output projection."""

    def __init__(self, runner: RegionRunner, unit: UnitRuntime, name: str, module: nn.Module) -> None:
        self._runner, self._unit, self._name, self._module = runner, unit, name, module
        self._original = type(module).forward
        # An embedding saves its indices and no weights, so its backward need not read the (large) matrix again.
        self._recompute = Recompute.NONE_SAVED if is_plain_embedding(module) else Recompute.ALL
        # fp32 copies of the whole batch would be the largest tensors of a step.
        self._token_wise = is_token_wise(module)
        self.bypassed = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.bypassed:
            return args[0]
        hidden, *rest = args if args else (None,)
        if not (isinstance(hidden, torch.Tensor) and hidden.is_floating_point()):
            # Integer inputs go along as arguments: no gradient flows to them.
            return self._runner.run(
                self._unit, lambda _, *inputs: self._original(self._module, *inputs, **kwargs), None, *args, recompute=self._recompute
            )

        def call(hidden: torch.Tensor, *rest: Any) -> Any:
            return self._original(self._module, hidden, *rest, **kwargs)

        if not self._token_wise or rest or kwargs or hidden.dim() < 2:
            return self._runner.run(self._unit, call, hidden, *rest)
        sizes = micro_batch_sizes(hidden.shape[0], self._runner.micro_batch_size)
        with self._runner.held(self._unit):
            return join([self._runner.run(self._unit, call, rows) for rows in torch.split(hidden, sizes)], self._name)

    def apply(self, hidden: torch.Tensor, then: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
        """`then(module(hidden), *arguments)` as one region."""
        return self._runner.run(self._unit, lambda rows, *rest: then(self._original(self._module, rows), *rest), hidden, *arguments)  # type: ignore[no-any-return]


def is_plain_embedding(module: nn.Module) -> bool:
    """Whether the backward of `module` reads no weights."""
    return type(module) is nn.Embedding and module.max_norm is None


def is_token_wise(module: nn.Module) -> bool:
    """Whether `module` works on each token by itself, as norms do."""
    return isinstance(module, nn.LayerNorm | nn.RMSNorm) or type(module).__name__.endswith(("RMSNorm", "LayerNorm"))


def micro_batch_sizes(batch: int, micro_batch_size: int) -> list[int]:
    """Rows per micro-batch; the last one may be smaller."""
    whole, rest = divmod(batch, micro_batch_size)
    return [micro_batch_size] * whole + ([rest] if rest else [])


def split_argument(name: str, value: Any, batch: int, sizes: Sequence[int], place: str) -> list[Any]:
    """`value` for each micro-batch.

    Raises:
        EngineError: a tensor under a name that is not listed, or whose batch dimension is neither `batch` nor 1.
    """
    if not _holds_tensor(value) or name in SHARED_ARGUMENTS:
        return [value] * len(sizes)
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        return [value] * len(sizes)
    if name not in BATCHED_ARGUMENTS:
        raise EngineError(f"argument {name!r} of {place}.forward holds a tensor of unknown meaning", place=place, remedy=_UNSUPPORTED)
    if isinstance(value, tuple | list):
        pieces = [split_argument(name, item, batch, sizes, place) for item in value]
        return [type(value)(part) for part in zip(*pieces, strict=True)]
    if not isinstance(value, torch.Tensor) or value.shape[0] not in (1, batch):
        shape = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"type {type(value).__name__}"
        raise EngineError(
            f"argument {name!r} of {place}.forward has {shape}, expected {batch} or 1 rows along its first dimension",
            place=place,
            remedy="Pass one row per row of the batch.",
        )
    if value.shape[0] == 1:
        return [value] * len(sizes)
    return list(torch.split(value, list(sizes)))


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, Mapping):
        return any(_holds_tensor(item) for item in value.values())
    return isinstance(value, tuple | list) and any(_holds_tensor(item) for item in value)


def join(outputs: Sequence[Any], place: str) -> Any:
    """The micro-batches' outputs as one: tensors are concatenated along the batch, tuples item by item.

    Raises:
        EngineError: a block returned something else.
    """
    first = outputs[0]
    if len(outputs) == 1:
        return first
    if isinstance(first, torch.Tensor):
        return torch.cat(list(outputs))
    if isinstance(first, tuple):
        return tuple(join(items, place) for items in zip(*outputs, strict=True))
    if first is None:
        return None
    raise EngineError(f"{place} returned {type(first).__name__}, expected a tensor or a tuple of tensors", place=place, remedy=_UNSUPPORTED)


def refuse_cache(arguments: Mapping[str, Any], place: str) -> None:
    """Refuse a key/value cache: a second micro-batch would attend to the first one's keys.

    Raises:
        EngineError: one was passed.
    """
    for name in CACHE_ARGUMENTS:
        if arguments.get(name) is not None:
            raise EngineError(
                f"{place} was given a key/value cache ({name}), which training does not use",
                place=place,
                remedy="Call the model without it; to generate text, export the model and load it elsewhere.",
            )
