"""Chunks that live in host memory, as far as the run's budget for them goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from lohan.memory.arena import Arena, Paging
from lohan.memory.store import Transfer
from lohan.planning.footprint import RAM_STATES, SPARE_STATES
from lohan.planning.ram_states import chunks_in_ram, units_with_spare
from lohan.states.slots import Part
from lohan.states.streams import stored_bytes, streams_of, weights_stream

if TYPE_CHECKING:
    from collections.abc import Callable

    from lohan.planning.state_form import StateForm
    from lohan.states.layout import Chunk, UnitLayout
    from lohan.states.streams import Stream


class ResidentChunks:
    """All streams of as many chunks as `budget_bytes` holds, spread as `lohan.planning.ram_states` says.

    Contents are undefined until they are filled.

    Args:
        directories: how many state directories there are.
        weights_paging: of the working copies, which a GPU may copy from; pinning the states that stay on the host as well would take
            half a second per GB for nothing.
        spare_bytes: of host memory for second places (`lohan.planning.ram_states.units_with_spare`).

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
        spare_bytes: int = 0,
    ) -> None:
        self._arena, self._form, self._weights_paging = arena, form, weights_paging
        self._slabs: list[torch.Tensor] = []
        self._parts: dict[Part, torch.Tensor] = {}
        self._spare: dict[Part, torch.Tensor] = {}
        self._exchanged: set[Part] = set()
        self.chunks: set[tuple[int, int]] = set()
        places = [(layout.index, chunk) for layout in layouts for chunk in layout.chunks]
        sizes = [sum(stored_bytes(stream, chunk.length) for stream in streams_of(chunk, form)) for _, chunk in places]
        for number in sorted(chunks_in_ram(sizes, budget_bytes, directories)):
            unit, chunk = places[number]
            self.chunks.add((unit, chunk.index))
            for stream in streams_of(chunk, form):
                self._parts[unit, chunk.index, stream] = self._allocate(chunk, stream, RAM_STATES)
        self.units_with_spare = units_with_spare([self._trained_bytes(layout) for layout in layouts], spare_bytes)
        """Units whose updates may be written to their second place, and be taken back."""
        for unit in self.units_with_spare:
            for chunk in layouts[unit].chunks:
                for stream in streams_of(chunk, form) if chunk.trainable else ():
                    self._spare[unit, chunk.index, stream] = self._allocate(chunk, stream, SPARE_STATES)

    def _allocate(self, chunk: Chunk, stream: Stream, holder: str) -> torch.Tensor:
        paging = self._weights_paging if stream is weights_stream(self._form) else Paging.PAGEABLE
        slab = self._arena.allocate(stored_bytes(stream, chunk.length), torch.uint8, holder=holder, paging=paging)
        self._slabs.append(slab)
        return slab[: stream.size_bytes(chunk.length)].view(stream.dtype)

    def _trained_bytes(self, layout: UnitLayout) -> int | None:
        """What a second place for a unit takes; None where some of its trained chunks do not lie in RAM."""
        trained = [chunk for chunk in layout.chunks if chunk.trainable]
        if any((layout.index, chunk.index) not in self.chunks for chunk in trained):
            return None
        return sum(stored_bytes(stream, chunk.length) for chunk in trained for stream in streams_of(chunk, self._form))

    def get(self, part: Part) -> torch.Tensor | None:
        """The part's memory; None where it has none."""
        return self._parts.get(part)

    @property
    def parts(self) -> dict[Part, torch.Tensor]:
        return self._parts

    def spare(self, part: Part) -> torch.Tensor | None:
        """The part's second place, with whatever it holds; None where it has none."""
        return self._spare.get(part)

    def exchange(self, part: Part) -> None:
        """Let the part's second place be its memory from now on, and its memory the second place."""
        self._parts[part], self._spare[part] = self._spare[part], self._parts[part]
        self._exchanged ^= {part}

    def take_back(self) -> None:
        """Undo all exchanges since `settle`."""
        for part in list(self._exchanged):
            self.exchange(part)

    def settle(self) -> None:
        """What was exchanged stays so."""
        self._exchanged.clear()

    def free(self) -> None:
        """Give the memory back."""
        self._parts.clear()
        self._spare.clear()
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
