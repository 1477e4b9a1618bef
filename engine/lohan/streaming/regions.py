"""Runs a module of a unit with streamed weights: the weights are put in for the call, and autograd sees them through one function."""

# ruff: noqa: SLF001 - `_parameters` is what torch.func.functional_call swaps too

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint

from lohan.planning.access import Phase
from lohan.planning.operations import OperationKind, Recompute
from lohan.streaming.gradients import Region, RegionParameters
from lohan.streaming.parameters import ParameterStream

if TYPE_CHECKING:
    from lohan.models.blocks import UnitParameter
    from lohan.states.layout import UnitLayout
    from lohan.streaming.kept_stage import KeptStage
    from lohan.streaming.steps import StepDriver
    from lohan.streaming.trace import Trace


@dataclass(slots=True, eq=False)
class UnitRuntime:
    """A unit as it is run. `parameters` follows `layout.parameters`."""

    layout: UnitLayout
    parameters: tuple[UnitParameter, ...]

    @property
    def index(self) -> int:
        return self.layout.index

    def views(self, weights: torch.Tensor) -> list[torch.Tensor]:
        """The parameters inside the unit's flat `weights`."""
        return [weights[place.offset : place.offset + place.elements].view(place.shape) for place in self.layout.parameters]

    def trainable(self) -> list[bool]:
        """Which parameters get a gradient now: a parameter can be frozen for some steps, and keeps its moments meanwhile."""
        return [
            place.trainable and entry.parameter.requires_grad for place, entry in zip(self.layout.parameters, self.parameters, strict=True)
        ]

    @contextlib.contextmanager
    def in_place_of_parameters(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Inside the block the modules of the unit see `tensors` as their parameters, at every place a parameter hangs."""
        sites = [(site.module._parameters, site.attribute) for entry in self.parameters for site in entry.sites]
        values = [tensor for entry, tensor in zip(self.parameters, tensors, strict=True) for _ in entry.sites]
        before = [owner[attribute] for owner, attribute in sites]
        try:
            for (owner, attribute), value in zip(sites, values, strict=True):
                owner[attribute] = value  # type: ignore[assignment]
            yield
        finally:
            for (owner, attribute), parameter in zip(sites, before, strict=True):
                owner[attribute] = parameter


_NO_SPAN = _NO_BOUNDARY = contextlib.nullcontext()


class RegionRunner:
    """Runs regions of all units."""

    def __init__(
        self,
        stream: ParameterStream,
        driver: StepDriver,
        *,
        device: torch.device,
        micro_batch_size: int,
        kept: KeptStage,
        trace: Trace | None,
    ) -> None:
        self._stream, self.driver, self._kept, self._trace = stream, driver, kept, trace
        self.micro_batch_size = micro_batch_size
        self._anchor = torch.zeros((), device=device, requires_grad=True)

    def run(
        self,
        unit: UnitRuntime,
        call: Callable[..., Any],
        hidden: torch.Tensor | None,
        *arguments: Any,
        recompute: Recompute = Recompute.ALL,
    ) -> Any:
        """`call(hidden, *arguments)` with the unit's weights in its modules.

        Args:
            hidden: the input that gradients flow to; None where there is none. `call` receives an alias of it.
            arguments: further arguments; no gradient flows to them.
        """
        self.driver.check()
        # As everywhere in PyTorch the grad mode decides, not `model.training`: eval() alone only switches dropout off.
        trainable = unit.trainable()
        wants_gradient = torch.is_grad_enabled() and (any(trainable) or (hidden is not None and hidden.requires_grad))
        number = self.driver.next_number(unit.index) if torch.is_grad_enabled() else 0
        if not wants_gradient:
            with self.held(unit) as weights, unit.in_place_of_parameters(unit.views(weights)), self._forward_span(unit, number):
                return call(hidden, *arguments)
        region = self.driver.new_region(unit.index, number)
        self.driver.collector.open(region)

        def body(hidden: torch.Tensor | None, *arguments: Any) -> Any:
            return self._body(region, unit, trainable, call, hidden, *arguments)

        if recompute is Recompute.NONE_SAVED:
            output = body(hidden, *arguments)
            if self._trace is not None and isinstance(output, torch.Tensor) and output.requires_grad:
                # Nothing is recomputed, where a backward begins otherwise.
                output.register_hook(lambda _: self._begin_backward(region))  # type: ignore[no-untyped-call]  # torch declares it without
            return output
        if self._kept.now is not None:
            region.kept = self._kept.now.open(unit.index, number, region.step + 1, hidden)
        with region.kept.boundary(hidden) if region.kept is not None else _NO_BOUNDARY:
            context = region.kept.context if region.kept is not None else {}
            output = checkpoint(body, hidden, *arguments, use_reentrant=False, preserve_rng_state=True, early_stop=True, **context)
        if self._kept.now is not None and region.kept is not None:
            self._kept.now.ran(region.kept)
        return output

    def begin_forward(self) -> None:
        """A forward of the model begins: raise what keeps the session from running; see `StepDriver.check`."""
        self.driver.check()
        kept = self._kept.now
        if kept is not None:
            kept.release_abandoned()
        if torch.is_grad_enabled():
            self.driver.begin_forward()
            if kept is not None:
                kept.begin_forward()

    @contextlib.contextmanager
    def held(self, unit: UnitRuntime) -> Iterator[torch.Tensor]:
        """Hold the unit's flat weights for a stretch of the forward."""
        weights = self._stream.acquire(unit.index, Phase.FORWARD if torch.is_grad_enabled() else Phase.EVALUATION)
        try:
            yield weights
        finally:
            self._stream.release(unit.index)

    def _body(
        self,
        region: Region,
        unit: UnitRuntime,
        trainable: Sequence[bool],
        call: Callable[..., Any],
        hidden: torch.Tensor | None,
        *rest: Any,
    ) -> Any:
        recomputing, region.ran = region.ran, True
        if recomputing and self._kept.now is not None:
            self._kept.now.backward_reaches(region.kept)
        weights = self._stream.acquire(unit.index, Phase.BACKWARD if recomputing else Phase.FORWARD)
        if self._trace is not None and recomputing:
            self._begin_backward(region)
        span = _NO_SPAN if recomputing else self._forward_span(unit, region.number)
        noting = _NO_SPAN if recomputing else self._kept.noting(unit.index, hidden)
        try:
            # A list, not arguments: autograd must not take the slot's views for inputs of the function.
            passed, *tensors = RegionParameters.apply(self._anchor, hidden, region, unit.views(weights), trainable)  # type: ignore[no-untyped-call]
            with unit.in_place_of_parameters(tensors), span, noting:
                return call(passed, *rest)
        finally:
            if recomputing:
                region.holds_weights = True  # until the region's backward has run
            else:
                self._stream.release(unit.index)

    def _forward_span(self, unit: UnitRuntime, number: int) -> contextlib.AbstractContextManager[None]:
        """Traces the block's work as a region's forward."""
        if self._trace is None or not torch.is_grad_enabled():
            return _NO_SPAN
        return self._traced(self._trace, unit.index, number)

    @staticmethod
    @contextlib.contextmanager
    def _traced(trace: Trace, unit: int, number: int) -> Iterator[None]:
        step = trace.step
        begun = trace.mark(step)
        yield
        trace.add(step, OperationKind.FORWARD, unit, begun, trace.mark(step), micro_batch=number)

    def _begin_backward(self, region: Region) -> None:
        assert self._trace is not None, "only traced backwards are told"
        region.backward_begun = self._trace.mark(region.step + 1)
