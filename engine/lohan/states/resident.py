"""Chunks that live in host memory, as far as the run's budget for them goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from lohan.memory.arena import Arena, Paging
from lohan.memory.store import Transfer
from lohan.planning.ram_states import chunks_in_ram
from lohan.states.slots import Part
from lohan.states.streams import stored_bytes, streams_of, weights_stream

if TYPE_CHECKING:
    from collections.abc import Callable

    from lohan.planning.state_form import StateForm
    from lohan.states.layout import UnitLayout

HOLDER = "model states"


class ResidentChunks:
    """All streams of as many chunks as `budget_bytes` holds, spread as `lohan.planning.ram_states` says.

    Contents are undefined until they are filled.

    Args:
        directories: how many state directories there are.
        weights_paging: of the working copies, which a GPU may copy from; pinning the states that stay on the host as well would take
            half a second per GB for nothing.

    Raises:
        CapacityError: the arena has no room for them.
    """

    def __init__(
        self,
        layouts: Sequence[UnitLayout],
        form: StateForm,
        arena: Arena,
        budget_bytes: int,
        weights_paging: Paging = Paging.PAGEABLE,
        *,
        directories: int = 1,
    ) -> None:
        self._arena = arena
        self._slabs: list[torch.Tensor] = []
        self._parts: dict[Part, torch.Tensor] = {}
        self.chunks: set[tuple[int, int]] = set()
        places = [(layout.index, chunk) for layout in layouts for chunk in layout.chunks]
        sizes = [sum(stored_bytes(stream, chunk.length) for stream in streams_of(chunk, form)) for _, chunk in places]
        for number in sorted(chunks_in_ram(sizes, budget_bytes, directories)):
            unit, chunk = places[number]
            self.chunks.add((unit, chunk.index))
            for stream in streams_of(chunk, form):
                paging = weights_paging if stream is weights_stream(form) else Paging.PAGEABLE
                slab = arena.allocate(stored_bytes(stream, chunk.length), torch.uint8, holder=HOLDER, paging=paging)
                self._slabs.append(slab)
                self._parts[unit, chunk.index, stream] = slab[: stream.size_bytes(chunk.length)].view(stream.dtype)

    def get(self, part: Part) -> torch.Tensor | None:
        """The part's memory; None where it has none."""
        return self._parts.get(part)

    @property
    def parts(self) -> dict[Part, torch.Tensor]:
        return self._parts

    def free(self) -> None:
        """Give the memory back."""
        self._parts.clear()
        while self._slabs:
            self._arena.free(self._slabs.pop())


class Completed(Transfer):
    """A transfer within memory, which has ended when it is made."""

    __slots__ = ()

    def __init__(self) -> None:
        """Nothing is under way."""

    def wait(self) -> None:
        return None

    def done(self) -> bool:
        return True

    @property
    def times(self) -> None:
        return None

    def on_done(self, callback: Callable[[Transfer], object]) -> None:
        callback(self)


class Checked(Transfer):
    """A read whose bytes are compared with what they should be by whoever waits for it."""

    __slots__ = ("_verify",)

    def __init__(self, transfer: Transfer, verify: Callable[[], None]) -> None:
        super().__init__(transfer._ticket)  # noqa: SLF001 - of the base class
        self._verify = verify

    def wait(self) -> None:
        """As `Transfer.wait`; raises ResumeError where the bytes are others."""
        super().wait()
        self._verify()
