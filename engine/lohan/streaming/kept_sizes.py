"""How large the outputs of a block's operators are, as the first region that runs shows, so that room can be made before any is kept."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lohan.models.operators import BlockOperators
from lohan.streaming.kept_buffers import room_for
from lohan.streaming.kept_tensors import PackedOutputs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch._ops import OpOverload

    from lohan.streaming.kept_decisions import Limits


class OutputSizes:
    """Of one region of one block, in bytes; blocks of a model are alike, and outputs grow with the tokens."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._outputs: dict[str, int] = {}
        self._input_bytes = self._tokens = 0

    @property
    def are_known(self) -> bool:
        """Whether a region has run."""
        return self._tokens > 0

    @contextlib.contextmanager
    def noting(self, block: nn.Module, hidden: torch.Tensor) -> Iterator[None]:
        """Around a region's first run on `hidden` (B, S, H); one that breaks off teaches nothing."""
        operators = BlockOperators(block)
        try:
            with _Noting(operators, self._device) as mode:
                yield
        finally:
            operators.close()
        self._outputs = mode.sizes
        self._input_bytes = hidden.numel() * hidden.itemsize
        self._tokens = hidden.shape[0] * hidden.shape[1]

    def output(self, label: str, number: int, limits: Limits) -> int | None:
        """Of the operator, in the micro-batch of this number at its largest; None where there was no such operator."""
        size = self._outputs.get(label)
        return None if size is None else room_for(size, self._tokens, limits.most_tokens(number))

    def input(self, number: int, limits: Limits) -> int:
        """Of the block's input, in the micro-batch of this number at its largest."""
        return room_for(self._input_bytes, self._tokens, limits.most_tokens(number))


class _Noting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, operators: BlockOperators, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operators, self._device = operators, device
        self.sizes: dict[str, int] = {}

    def __enter__(self) -> Any:
        self._operators.begin()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        label = self._operators.label(func)
        result = func(*args, **(kwargs or {}))
        if label is not None:
            self.sizes[label] = PackedOutputs(result, self._device, movable=True).bytes
        return result
