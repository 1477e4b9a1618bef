"""Names for the operators of a block's forward, the same on the meta device, a CPU and a GPU, in a trace, a profile and a run.

A label is `<module>:<operator>#<n>`: the path of the innermost module of the block that is computing (empty: the block itself), what the
operator does, and how many of the same name that module's call has dispatched before. Kernels that differ between devices have one name
(`attention`, `matmul`); operators that only look at a tensor in another way have none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload

_MATMULS = frozenset({"mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "_grouped_mm"})
_WITHOUT_A_NAME = frozenset({"detach", "_unsafe_view", "_reshape_alias", "lift_fresh", "alias"})


def operator_name(function: OpOverload) -> str | None:
    """What `function` does, whatever kernel does it; None where it only looks at a tensor in another way."""
    name = function._schema.name.rpartition("::")[2]  # noqa: SLF001 - public only as text
    if name in _WITHOUT_A_NAME or function.is_view:
        return None
    if "scaled_dot_product" in name or name.startswith(("_flash_attention", "_efficient_attention")):
        return "attention"
    return "matmul" if name in _MATMULS else name


class BlockOperators:
    """Follows which module of `block` computes. Hooks stay on its modules until `close`."""

    def __init__(self, block: nn.Module) -> None:
        self._path: list[str] = [""]
        self._counts: list[Counter[str]] = [Counter()]
        self._handles = []
        for path, module in block.named_modules():
            if module is not block:
                self._handles.append(module.register_forward_pre_hook(self._make_enter(path)))
                self._handles.append(module.register_forward_hook(self._leave, always_call=True))

    def begin(self) -> None:
        """A forward of the block begins, for the first time or as a recomputation; one that broke off leaves nothing behind."""
        self._path[1:] = []
        self._counts[:] = [Counter()]

    def label(self, function: OpOverload) -> str | None:
        """The label of `function`, which is being dispatched; each call counts it."""
        name = operator_name(function)
        if name is None:
            return None
        counts = self._counts[-1]
        label = f"{self._path[-1]}:{name}#{counts[name]}"
        counts[name] += 1
        return label

    def close(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _make_enter(self, path: str) -> Any:
        def enter(_module: nn.Module, _arguments: Any) -> None:
            self._path.append(path)
            self._counts.append(Counter())

        return enter

    def _leave(self, _module: nn.Module, _arguments: Any, _output: Any) -> None:
        self._path.pop()
        self._counts.pop()


def draws_random_numbers(function: OpOverload, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> bool:
    """Whether this call of `function` takes numbers from a generator: a kept output in its place would leave the generator behind, and
    what follows would draw others. Attention takes none where nothing is dropped, whatever its tag says."""
    if torch.Tag.nondeterministic_seeded not in function.tags:
        return False
    schema = function._schema.arguments  # noqa: SLF001 - public only as text
    for place, argument in enumerate(schema):
        if argument.name == "dropout_p":
            value = arguments[place] if place < len(arguments) else keywords.get("dropout_p", argument.default_value)
            return bool(value != 0.0)
    return True
