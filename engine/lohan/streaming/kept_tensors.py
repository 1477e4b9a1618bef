"""What an operator returned, taken apart into stretches of memory that can be moved, and put together again from them.

A stretch is moved in the order in which it lies in memory: the outputs of attention are not contiguous in their shape, and a copy in the
shape's order would gather single elements. Outputs that share memory share a stretch, and are moved once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

SMALL_ELEMENTS = 16
"""Tensors of at most so many elements stay where they are: seeds, counters, lengths."""
_CHECKSUM_WORDS = 1 << 18


@dataclass(slots=True)
class _Span:
    """A stretch of a storage, in bytes from its beginning."""

    storage: torch.UntypedStorage
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class _Piece:
    """A tensor inside a stretch; `offset` in elements from its beginning."""

    stretch: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def within(self, stretch: torch.Tensor) -> torch.Tensor:
        tensor = torch.empty(0, dtype=self.dtype, device=stretch.device)
        return tensor.set_(stretch.untyped_storage(), self.offset, self.size, self.stride)


@dataclass(slots=True)
class _Watched:
    """An alias of a tensor, and how often that had been written to."""

    alias: torch.Tensor
    writes: int = field(init=False)

    def __post_init__(self) -> None:
        self.writes = self.alias._version  # noqa: SLF001 - what autograd itself checks saved tensors by

    @property
    def was_written(self) -> bool:
        return self.alias._version != self.writes  # noqa: SLF001


class PackedOutputs:
    """The result of an operator: a tensor, or a tuple or list of tensors, numbers and None.

    Args:
        device: where the outputs that are worth moving lie; others are held as they are.
        movable: whether they will be moved; if not, all are held as they are.
    """

    def __init__(self, result: Any, device: torch.device, *, movable: bool) -> None:
        leaves, self._structure = tree_flatten(result)
        self._leaves: list[Any] = []
        self._held: list[_Watched] = []
        self._moved: list[_Watched] = []
        self._spans: list[_Span] = []
        by_storage: dict[int, int] = {}
        large = [leaf for leaf in leaves if _is_large(leaf, device)]
        for leaf in large:
            self._cover(leaf, by_storage)
        self.sizes = [span.high - span.low for span in self._spans]
        """Of the stretches, in bytes."""
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                self._leaves.append(leaf)
                continue
            watched = _Watched(_alias(leaf))
            if movable and _is_large(leaf, device):
                self._moved.append(watched)
                self._leaves.append(self._piece(leaf, by_storage))
            else:
                self._held.append(watched)
                self._leaves.append(watched.alias)

    @property
    def bytes(self) -> int:
        """Of all stretches."""
        return sum(self.sizes)

    @property
    def was_written(self) -> bool:
        """Whether a tensor that is still held here has been written to since."""
        return any(watched.was_written for watched in (*self._held, *self._moved))

    def lies_in(self, storage: torch.UntypedStorage) -> bool:
        """Whether a tensor that is still held here has its memory there."""
        return any(watched.alias.untyped_storage().data_ptr() == storage.data_ptr() for watched in (*self._held, *self._moved))

    def stretches(self) -> list[torch.Tensor]:
        """The memory that moves, as bytes, until `let_go`."""
        return [_bytes_of(span) for span in self._spans]

    def let_go(self) -> list[torch.Tensor]:
        """Hold what was moved no longer; returns it."""
        tensors = [watched.alias for watched in self._moved]
        self._moved.clear()
        self._spans.clear()
        return tensors

    def rebuild(self, stretches: Sequence[torch.Tensor]) -> Any:
        """The result over again: on the memory of `stretches`, of `sizes` bytes each, as far as it was moved."""
        leaves = [leaf.within(stretches[leaf.stretch]) if isinstance(leaf, _Piece) else leaf for leaf in self._leaves]
        return tree_unflatten(leaves, self._structure)

    def _cover(self, tensor: torch.Tensor, by_storage: dict[int, int]) -> None:
        """Widen the stretch of the tensor's storage to hold it."""
        storage = tensor.untyped_storage()
        reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
        low = int(tensor.storage_offset()) * tensor.itemsize
        high = low + reach * tensor.itemsize
        index = by_storage.setdefault(storage.data_ptr(), len(self._spans))
        if index == len(self._spans):
            self._spans.append(_Span(storage, low, high))
        else:
            span = self._spans[index]
            span.low, span.high = min(span.low, low), max(span.high, high)

    def _piece(self, tensor: torch.Tensor, by_storage: dict[int, int]) -> _Piece:
        index = by_storage[tensor.untyped_storage().data_ptr()]
        offset, rest = divmod(int(tensor.storage_offset()) * tensor.itemsize - self._spans[index].low, tensor.itemsize)
        assert rest == 0, "tensors of one storage are aligned to their elements"
        return _Piece(index, tensor.dtype, tensor.size(), tensor.stride(), offset)


def checksum(stretches: Sequence[torch.Tensor]) -> int:
    """A sum that differs, all but certainly, where a byte or the order of words does. Waits for the device."""
    total = 0
    for stretch in stretches:
        if stretch.storage_offset() % 4:
            stretch = stretch.clone()  # words begin on a boundary of theirs
        tail = stretch.numel() % 4
        words = stretch[: stretch.numel() - tail].view(torch.int32)
        weights = torch.arange(1, min(words.numel(), _CHECKSUM_WORDS) + 1, device=stretch.device)
        for number, part in enumerate(torch.split(words, _CHECKSUM_WORDS)):
            total += (number + 1) * int((part * weights[: part.numel()]).sum())
        total += int(stretch[stretch.numel() - tail :].sum())
    return total


def _is_large(leaf: Any, device: torch.device) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.device == device and leaf.numel() > SMALL_ELEMENTS


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory without a place in autograd's graph, which would otherwise be held as long as it is."""
    # Beneath autograd an alias counts writes for itself, unless the key that makes it share the count is let through.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):  # noqa: SLF001
        return tensor.detach()


def _bytes_of(span: _Span) -> torch.Tensor:
    target = torch.empty(0, dtype=torch.uint8, device=span.storage.device)
    return target.set_(span.storage, span.low, (span.high - span.low,), (1,))
