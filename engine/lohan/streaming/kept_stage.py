"""Which decision about activations a session goes by, and the change to another between two steps."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from lohan.errors import LohanError
from lohan.planning.tiers import Tier
from lohan.streaming.kept import KeptActivations
from lohan.streaming.kept_decisions import BlockDecision, Limits
from lohan.streaming.kept_sizes import OutputSizes
from lohan.streaming.kept_tiers import KeptTiers

if TYPE_CHECKING:
    from lohan.memory.arena import Arena
    from lohan.memory.store import Store
    from lohan.streaming.pending import Failure
    from lohan.streaming.trace import Trace

_NOTHING = contextlib.nullcontext()


class KeptStage:
    """Used by the threads that run forward and backward, never two at once.

    Args:
        folders: where activations on the drives lie.
        check_sums: whether what is kept is compared with what it was (debug mode).
    """

    def __init__(
        self,
        arena: Arena,
        store: Store,
        folders: Sequence[Path],
        failure: Failure,
        *,
        device: torch.device,
        check_sums: bool,
        trace: Trace | None,
    ) -> None:
        self._arena, self._store, self._folders, self._failure = arena, store, folders, failure
        self._device, self._check_sums, self._trace = device, check_sums, trace
        self._tiers: KeptTiers | None = None
        self._blocks: Mapping[int, nn.Module] = {}
        self._sizes = OutputSizes(device)
        self.now: KeptActivations | None = None
        """What is kept; None while nothing is."""

    def attach(self, blocks: Mapping[int, nn.Module]) -> None:
        """The modules of all blocks, by unit."""
        self._blocks = blocks
        if self.now is not None:
            self.now.attach(blocks)

    def begin(self, decisions: Mapping[int, BlockDecision], limits: Limits) -> None:
        """Go by `decisions` (by unit; of units of which something is kept) from now on, where there were none.

        Raises:
            StorageError: a state directory cannot be used.
        """
        if decisions:
            folders = self._folders if any(Tier.SSD in decision.tiers for decision in decisions.values()) else None
            self.now = KeptActivations(decisions, self._open(folders), limits, device=self._device)
            if self._blocks:
                self.now.attach(self._blocks)

    def switch(self, decisions: Mapping[int, BlockDecision], limits: Limits) -> None:
        """Go by other decisions; no forward's graph is waiting for its backward.

        What the old ones had is given back first, so that both need not fit at once; then room is made for all that the new ones keep, as
        far as a forward has shown how much that is. If there is none the old ones hold again.

        Raises:
            CapacityError: there is too little host memory.
            StorageError: there is too little space in the state directories, or one cannot be used.
        """
        before = self.now
        if before is not None and (before.decisions, before.limits) == (decisions, limits):
            return
        self._end()
        try:
            self.begin(decisions, limits)
            if self.now is not None:
                self.now.make_room(self._sizes)
        except LohanError:
            self._end()
            if before is not None:
                self.begin(before.decisions, before.limits)
                assert self.now is not None, "something is kept again"
                self.now.sizes = before.sizes
            raise

    def noting(self, unit: int, hidden: torch.Tensor | None) -> contextlib.AbstractContextManager[None]:
        """Around a region's first run: the first one of a block shows how large its outputs are."""
        if self._sizes.are_known:
            return _NOTHING
        block = self._blocks.get(unit)
        # A module that torch compiles runs uncompiled, and hence otherwise, within a dispatch mode.
        if block is None or hidden is None or hidden.dim() < 3 or any(_is_compiled(module) for module in block.modules()):
            return _NOTHING
        return self._sizes.noting(block, hidden)

    def close(self) -> None:
        """Give all memory and the file back."""
        if self.now is not None:
            self.now.detach()
        if self._tiers is not None:
            self._tiers.close()

    def _end(self) -> None:
        if self.now is not None:
            self.now.let_go()
            self.now = None
        if self._tiers is not None:
            self._tiers.close()

    def _open(self, folders: Sequence[Path] | None) -> KeptTiers:
        if self._tiers is None:
            self._tiers = KeptTiers(
                self._arena,
                self._store,
                folders,
                self._failure,
                device=self._device,
                check_sums=self._check_sums,
                trace=self._trace,
            )
        else:
            self._tiers.reopen(folders)
        return self._tiers


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None  # noqa: SLF001 - what `nn.Module.compile` sets; there is no public way to ask
