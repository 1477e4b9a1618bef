"""Keeps what a decision (`Retention`) names of each region's activations, so that the recomputation does without these operators.

`torch.utils.checkpoint` runs a region twice, and has a dispatch mode of ours around each run: the first hands the outputs of the chosen
operators to `KeptTiers`, the second returns them in place of computing. Operators are told apart by their labels. A region of a block of
which nothing is kept has no mode around it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from lohan.errors import EngineError
from lohan.models.operators import BlockOperators
from lohan.planning.footprint import KEPT_REGIONS_AHEAD
from lohan.planning.kept_operations import KeptShape
from lohan.planning.tiers import Tier
from lohan.streaming.device import Event
from lohan.streaming.kept_buffers import room_for
from lohan.streaming.kept_decisions import BlockDecision, Limits
from lohan.streaming.kept_modes import Call, Recorder, Replayer
from lohan.streaming.kept_sizes import OutputSizes
from lohan.streaming.kept_tensors import PackedOutputs
from lohan.streaming.kept_tiers import KeptOutput, KeptTiers, Key, refuse_write

if TYPE_CHECKING:
    from torch._ops import OpOverload


BOUNDARY = "the block's input"
"""Stands where messages have an operator's label."""


class RegionOutputs:
    """What is kept of one region, from its first run to the end of its backward; goes with the autograd graph at the latest."""

    def __init__(self, kept: KeptActivations, unit: int, number: int, step: int, forward: int, room: tuple[int, int]) -> None:
        self._kept = kept
        self._input: torch.Tensor | None = None
        self.decision = kept.decisions[unit]
        self.unit, self.number, self.step, self.forward, self.room = unit, number, step, forward, room
        self.outputs: dict[str, KeptOutput] = {}
        """By label, in the order in which they came."""
        self._calls: dict[str, Call] = {}

    def __del__(self) -> None:
        # The garbage collector may run in any thread and between any two lines of this module.
        left = [output for output in self.outputs.values() if output.tier is not Tier.GPU]
        if left and not self._kept.is_closed:
            self._kept.abandoned.append(left)

    @property
    def operators(self) -> BlockOperators:
        return self._kept.operators[self.unit]

    def modes(self) -> tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]:
        """Around the region's first run and around its recomputation."""
        return Recorder(self), Replayer(self)

    @property
    def context(self) -> dict[str, Any]:
        """For `checkpoint`: no mode where no operator's output is kept."""
        return {"context_fn": self.modes} if self.decision.operators else {}

    def keep(self, label: str, tier: Tier, result: Any, call: Call = ()) -> None:
        """Keep what the operator of this label has just returned to `call`; raises as `KeptTiers.keep`."""
        self._calls[label] = call
        self._kept.keep(self, label, tier, result)

    def take(self, label: str, call: Call = ()) -> Any:
        """What it returned.

        Raises:
            EngineError: it was called otherwise then; and as `KeptTiers.take`.
        """
        if call != self._calls[label]:
            raise EngineError(
                f"the recomputation of {self.decision.name} calls {label} otherwise than the forward did",
                place=self.decision.name,
                remedy="Keep nothing of this model's blocks: what they compute differs from call to call.",
            )
        return self._kept.tiers.take(self.outputs.pop(label))

    def check_writes(self, function: OpOverload, arguments: Sequence[Any], keywords: Mapping[str, Any], writer: str) -> None:
        """See that `function` writes to nothing that is kept.

        Counts of writes do not show it: the output of a linear layer is that of its product under another shape (`_unsafe_view`), which
        counts for itself.
        """
        for place, argument in enumerate(function._schema.arguments):  # noqa: SLF001 - public only as text
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = arguments[place] if place < len(arguments) else keywords.get(argument.name)
            for tensor in tree_leaves(value):
                if isinstance(tensor, torch.Tensor):
                    self._check_write(tensor.untyped_storage(), writer)

    def _check_write(self, storage: torch.UntypedStorage, writer: str) -> None:
        if not storage.nbytes():
            return
        for output in self.outputs.values():
            if output.packed.lies_in(storage):
                refuse_write(output, writer)

    @contextlib.contextmanager
    def boundary(self, hidden: torch.Tensor | None) -> Iterator[None]:
        """Around the region's checkpoint: what autograd saves for it is its input, `hidden`, which leaves the device if it is to."""
        if self.decision.boundary is None or hidden is None:
            yield
            return
        self._input = hidden
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            self._input = None

    def _pack(self, tensor: torch.Tensor) -> Any:
        hidden, tier = self._input, self.decision.boundary
        if hidden is None or tier is None or tensor.data_ptr() != hidden.data_ptr() or BOUNDARY in self.outputs:
            return tensor
        # Not `tensor`: an alias of its own that autograd makes for hooks does not count writes. One slice of a batch is all that is copied.
        self.keep(BOUNDARY, tier, hidden if hidden.is_contiguous() else hidden.contiguous())
        return None

    def _unpack(self, packed: Any) -> torch.Tensor:
        if packed is not None:
            return packed  # type: ignore[no-any-return]
        self._kept.backward_reaches(self)
        if BOUNDARY not in self.outputs:
            raise EngineError("second backward of one forward", remedy="Call backward() once per forward.")
        return self.take(BOUNDARY)  # type: ignore[no-any-return]


class KeptActivations:
    """All regions' kept activations. Used by the threads that run forward and backward, never two at once.

    Args:
        decisions: by unit.
        limits: rows of a batch and of a micro-batch, and tokens of a row, at most.
    """

    def __init__(self, decisions: Mapping[int, BlockDecision], tiers: KeptTiers, limits: Limits, *, device: torch.device) -> None:
        self.decisions, self.tiers, self.limits, self._device = decisions, tiers, limits, device
        self.operators: dict[int, BlockOperators] = {}
        self.abandoned: deque[list[KeptOutput]] = deque()
        """Of regions that are gone, to be released."""
        self._regions: list[weakref.ref[RegionOutputs]] = []  # of which something leaves the device, as they have run
        self._forward = 0
        self.is_closed = False
        self.sizes: dict[tuple[int, int], dict[int, int]] = {}
        """Of what has left the device, in bytes: by unit and place among what is kept of it, and region."""

    def attach(self, blocks: Mapping[int, nn.Module]) -> None:
        """Follow the modules of the blocks, by unit, of which operators' outputs are kept."""
        for unit, decision in self.decisions.items():
            if decision.operators:
                self.operators[unit] = BlockOperators(blocks[unit])

    def begin_forward(self) -> None:
        """A forward of the model begins."""
        self._forward += 1
        self._regions = [region for region in self._regions if region() is not None]

    def open(self, unit: int, number: int, step: int, hidden: torch.Tensor | None) -> RegionOutputs | None:
        """A region is about to run; None where nothing of it is kept.

        Args:
            number: of the region among the unit's in this forward.
            hidden: its input (B, S, H).
        """
        if unit not in self.decisions:
            return None
        self.release_abandoned()
        rows, tokens = hidden.shape[:2] if hidden is not None and hidden.dim() > 2 else (1, 1)
        region = RegionOutputs(self, unit, number, step, self._forward, self.limits.room(number, rows, tokens))
        if region.decision.tiers - {Tier.GPU, None}:
            self._regions.append(weakref.ref(region))
        return region

    def keep(self, region: RegionOutputs, label: str, tier: Tier, result: Any) -> None:
        """Keep an operator's `result`, or the region's input; raises as `KeptTiers.keep`."""
        packed = PackedOutputs(result, self._device, movable=tier is not Tier.GPU)
        labels = list(region.decision.operators)
        output = KeptOutput(
            label,
            region.decision.name,
            region.unit,
            region.number,
            labels.index(label) if label in labels else len(labels),
            region.step,
            tier if packed.sizes else Tier.GPU,
            packed,
            Event(self._device),
            Event(self._device),
        )
        region.outputs[label] = output
        if output.tier is not Tier.GPU:
            sizes = self.sizes.setdefault((region.unit, output.place), {})
            sizes[region.number] = max(packed.bytes, sizes.get(region.number, 0))
        now, most = region.room
        self.tiers.keep(output, room_for(packed.bytes, now, most))

    def ran(self, region: RegionOutputs) -> None:
        """The region's first run is over."""
        self.tiers.region_ended(sum(output.packed.bytes for output in region.outputs.values() if output.tier is not Tier.GPU))

    def backward_reaches(self, region: RegionOutputs | None) -> None:
        """A region's recomputation is about to begin (None: one of which nothing is kept): bring what it needs, and the next one's."""
        self.tiers.forward_ended()
        forward = self._forward if region is None else region.forward
        if region is not None:
            self._ask_for(region)
        ahead = 0
        for reference in reversed(self._regions):
            following = reference()
            if following is None or following is region or following.forward != forward:
                continue
            self._ask_for(following)
            ahead += 1
            if ahead == KEPT_REGIONS_AHEAD:
                return

    def finish(self, region: RegionOutputs) -> None:
        """The region's backward has run; what it did not need is let go."""
        for output in region.outputs.values():
            self.tiers.release(output)
        region.outputs.clear()
        for place in reversed(range(len(self._regions))):
            if self._regions[place]() is region:
                del self._regions[place]
                return

    def shapes(self) -> dict[int, tuple[KeptShape, ...]]:
        """What leaves the device, by unit, as far as forwards have shown: at its largest."""
        found: dict[int, tuple[KeptShape, ...]] = {}
        for (unit, place), sizes in self.sizes.items():  # in the order in which they came
            decision = self.decisions[unit]
            is_input = place == len(decision.operators)
            tier = decision.boundary if is_input else list(decision.operators.values())[place]
            assert tier is not None, "it has left the device"
            shape = KeptShape(place, tier, tuple(sizes[number] for number in sorted(sizes)), is_input)
            found[unit] = (*found.get(unit, ()), shape)
        return found

    def make_room(self, sizes: OutputSizes) -> None:
        """Make buffers and places for all that a whole batch keeps, as far as `sizes` are known; raises as `KeptTiers.make_room`."""
        rooms: dict[Tier | None, dict[Key, int]] = {Tier.RAM: {}, Tier.SSD: {}}
        for unit, decision in self.decisions.items():
            for number in range(self.limits.micro_batches):
                for place, (label, tier) in enumerate(decision.operators.items()):
                    size = sizes.output(label, number, self.limits)
                    if tier in rooms and size:
                        rooms[tier][unit, number, place] = size
                if decision.boundary in rooms and sizes.are_known:
                    rooms[decision.boundary][unit, number, len(decision.operators)] = sizes.input(number, self.limits)
        self.tiers.make_room(rooms[Tier.RAM], rooms[Tier.SSD])

    def let_go(self) -> None:
        """Give back everything, and `detach`; graphs that are alive have lost what was kept of them."""
        for reference in tuple(self._regions):
            region = reference()
            if region is not None:
                self.finish(region)
        self.release_abandoned()
        self.detach()

    def release_abandoned(self) -> None:
        """Give back what regions had whose autograd graph is gone."""
        while self.abandoned:
            for output in self.abandoned.popleft():
                self.tiers.release(output)

    def detach(self) -> None:
        """Take the hooks away; graphs that are alive give nothing back any more."""
        self.is_closed = True
        for operators in self.operators.values():
            operators.close()
        self._regions.clear()
        self.abandoned.clear()

    def _ask_for(self, region: RegionOutputs) -> None:
        for output in region.outputs.values():
            self.tiers.ask_for(output)
