"""The dispatch modes around a region's two runs: the first hands outputs over, the second returns them in place of computing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lohan.errors import EngineError
from lohan.models.operators import draws_random_numbers
from lohan.streaming.kept_decisions import OTHER_MODEL

if TYPE_CHECKING:
    from torch._ops import OpOverload

    from lohan.streaming.kept import RegionOutputs

_MOST_LABELS_NAMED = 60

Call = tuple[Any, ...]
"""An operator, and shape and dtype of the tensors that it is given."""


def call_of(function: OpOverload, arguments: Sequence[Any]) -> Call:
    """By which a recomputation is known to call what the first run did."""
    tensors = (leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor))
    return (function, *((tensor.shape, tensor.dtype) for tensor in tensors))


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A region's first run."""

    def __init__(self, region: RegionOutputs) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._region = region
        self._seen: dict[str, None] = {}

    def __enter__(self) -> Any:
        self._region.operators.begin()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        if kind is None:
            self._check_all_seen()

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        label = self._region.operators.label(func)
        if func._schema.is_mutable:  # noqa: SLF001 - public only as text
            self._region.check_writes(func, args, keywords, label or str(func))
        result = func(*args, **keywords)
        if label is not None:
            self._seen[label] = None
            tier = self._region.decision.operators.get(label)
            if tier is not None:
                _check_can_be_kept(func, args, keywords, label, self._region.decision.name)
                self._region.keep(label, tier, result, call_of(func, args))
        return result

    def _check_all_seen(self) -> None:
        decision = self._region.decision
        missing = [label for label in decision.operators if label not in self._seen]
        if missing:
            labels = list(self._seen)
            more = f" and {len(labels) - _MOST_LABELS_NAMED} more" if len(labels) > _MOST_LABELS_NAMED else ""
            raise EngineError(
                f"there is no operator {missing[0]} in {decision.name}; there are {', '.join(labels[:_MOST_LABELS_NAMED])}{more}",
                place=decision.name,
                remedy=OTHER_MODEL,
            )


class Replayer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A region's recomputation."""

    def __init__(self, region: RegionOutputs) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._region = region

    def __enter__(self) -> Any:
        self._region.operators.begin()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        label = self._region.operators.label(func)
        if label is not None and label in self._region.outputs:
            return self._region.take(label, call_of(func, args))
        return func(*args, **(kwargs or {}))


def _check_can_be_kept(function: OpOverload, arguments: Sequence[Any], keywords: Mapping[str, Any], label: str, block: str) -> None:
    reason = ""
    if draws_random_numbers(function, arguments, keywords):
        reason = "it draws random numbers, and what follows would draw others if it did not run again"
    elif any(value.alias_info is not None for value in function._schema.returns):  # noqa: SLF001 - public only as text
        reason = "it returns memory that it was given"
    if reason:
        raise EngineError(f"the output of {label} in {block} cannot be kept: {reason}", place=block, remedy="Leave it out of the plan.")
