"""Collects the weight gradients of a unit's regions in fp32 on the device and hands them over when the last one has come.

A *region* is one call of a unit's module on one micro-batch. Inside it the weights enter autograd through one function,
`RegionParameters`, whose backward runs once, after everything else in the region: it receives all weight gradients of the region
together (None for a weight that was not used). Nothing is counted per parameter and nothing is summed in bf16.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from lohan.errors import EngineError
from lohan.memory.arena import Arena, Paging
from lohan.planning.operations import OperationKind
from lohan.planning.step_trace import Wait
from lohan.streaming.device import Event, delay, make_stream, on_stream
from lohan.streaming.parameters import DebugMode
from lohan.streaming.pending import Failure

if TYPE_CHECKING:
    from lohan.states.layout import UnitLayout
    from lohan.streaming.kept import RegionOutputs
    from lohan.streaming.trace import Mark, Trace


class Region:
    """One call of a unit whose backward is awaited; lives as long as the autograd graph that it belongs to."""

    def __init__(self, unit: int, step: int, finish: Callable[[Region, Sequence[torch.Tensor | None]], None], number: int = 0) -> None:
        self.unit = unit
        self.step = step
        self.number = number
        """Which of the unit's regions in this forward."""
        self.kept: RegionOutputs | None = None
        """What is kept of its activations."""
        self.backward_begun: Mark | None = None
        self.ran = False
        self.finished = False
        self.holds_weights = False
        self.finish = finish


class RegionParameters(torch.autograd.Function):
    """Identity on the region's input and on its weights; its backward ends the region.

    Taking the input through as well makes this the last node of the region's backward, also where weights are frozen: all reads of
    the weights lie behind it, so the slot can be given back.
    """

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,  # noqa: ARG004 - a scalar that requires grad: without it autograd would skip a region on integer inputs
        hidden: torch.Tensor | None,
        region: Region,
        weights: Sequence[torch.Tensor],
        trainable: Sequence[bool],
    ) -> tuple[torch.Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        ctx.region = region
        outputs = [weight.detach() for weight in weights]
        without_gradient = [output for output, wanted in zip(outputs, trainable, strict=True) if not wanted]
        passed = None
        if hidden is not None:
            passed = hidden.detach()
            if not ctx.needs_input_grad[1]:
                without_gradient.append(passed)
        ctx.mark_non_differentiable(*without_gradient)
        return (passed, *outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, hidden_gradient: torch.Tensor | None, *gradients: torch.Tensor | None) -> Any:
        ctx.region.finish(ctx.region, gradients)
        return None, hidden_gradient, None, None, None


@dataclass(slots=True)
class _UnitGradients:
    """The gradients of one unit in the current backward."""

    open_regions: weakref.WeakSet[Region] = field(default_factory=weakref.WeakSet)
    sum: torch.Tensor | None = None
    touched: set[int] = field(default_factory=set)


class GradientCollector:
    """Sums region gradients per unit. Used by the thread that runs forward and the one that runs backward, never both at once.

    Args:
        send: takes a complete unit: (unit index, fp32 gradients of its trainable part on the device, indices of the parameters that
            have one). What it is given may be overwritten by work queued on the current stream after it returns.
    """

    def __init__(
        self,
        layouts: Sequence[UnitLayout],
        send: Callable[[int, torch.Tensor, frozenset[int]], None],
        *,
        device: torch.device,
        trace: Trace | None = None,
    ) -> None:
        self._layouts, self._send, self._device, self._trace = layouts, send, device, trace
        self._units = [_UnitGradients() for _ in layouts]
        self._free: list[torch.Tensor] = []

    def open(self, region: Region) -> None:
        """Expect `region`'s gradients."""
        self._units[region.unit].open_regions.add(region)

    def add(self, region: Region, gradients: Sequence[torch.Tensor | None]) -> None:
        """Add the gradients of `region`, one per parameter of the unit; the last open region of a unit completes it."""
        unit, layout = self._units[region.unit], self._layouts[region.unit]
        begun = self._trace.mark(region.step + 1) if self._trace is not None else None
        for index, (gradient, place) in enumerate(zip(gradients, layout.parameters, strict=True)):
            if gradient is None or not place.trainable:
                continue
            if unit.sum is None:
                unit.sum = self._buffer(layout.trainable_elements)
            target = unit.sum[place.offset : place.offset + place.elements].view(place.shape)
            if index in unit.touched:
                target.add_(gradient)
            else:
                target.copy_(gradient)
                unit.touched.add(index)
        if self._trace is not None:
            self._add_spans(region, begun)
        unit.open_regions.discard(region)
        if not unit.open_regions:
            self._complete(region.unit)

    def _add_spans(self, region: Region, begun: Mark | None) -> None:
        """Trace a region's backward, which ended where adding its gradients has `begun`."""
        assert self._trace is not None, "spans are told to a trace only"
        step, unit, number = region.step + 1, region.unit, region.number
        self._trace.add(step, OperationKind.BACKWARD, unit, region.backward_begun, begun, micro_batch=number)
        if self._layouts[unit].trainable_elements:
            self._trace.add(step, OperationKind.GRADIENT_SUM, unit, begun, self._trace.mark(step), micro_batch=number)

    @property
    def is_waiting(self) -> bool:
        """Whether a forward's graph is alive that a backward may come through."""
        return any(unit.open_regions for unit in self._units)

    def close_step(self) -> None:
        """Complete units whose remaining regions got no gradient in this backward, and expect nothing more."""
        for index in reversed(range(len(self._units))):
            self._units[index].open_regions.clear()
            self._complete(index)

    def free(self) -> None:
        """Give the buffers back."""
        self._free.clear()
        self._units.clear()

    def _complete(self, index: int) -> None:
        unit = self._units[index]
        if unit.sum is None:
            return
        gradients, touched = unit.sum, frozenset(unit.touched)
        unit.sum = None
        unit.touched.clear()
        self._send(index, gradients[: self._layouts[index].trainable_elements], touched)
        self._free.append(gradients)

    def _buffer(self, elements: int) -> torch.Tensor:
        """The smallest free buffer that is large enough, else a new one: one exists per unit that is open at a time."""
        fitting = [buffer for buffer in self._free if buffer.numel() >= elements]
        if not fitting:
            return torch.empty(elements, dtype=torch.float32, device=self._device)
        best = min(fitting, key=torch.Tensor.numel)
        self._free = [buffer for buffer in self._free if buffer is not best]
        return best


class HostGradient:
    """A unit's gradients in host memory; `ready` must be waited for before they are read.

    Args:
        norms: room for the norms of a unit's parameters, fp32 in host memory; None on the CPU.
    """

    def __init__(self, buffer: torch.Tensor, norms: torch.Tensor | None, device: torch.device) -> None:
        self.buffer, self._norms = buffer, norms
        self._parts = 0
        self.ready = Event(device)

    def take_norms(self, of_parts: torch.Tensor) -> None:
        """Begin to copy the parts' norms (fp32, on the device) beside the gradients, on the current stream."""
        assert self._norms is not None, "norms come from a device of its own"
        self._parts = of_parts.numel()
        self._norms[: self._parts].copy_(of_parts, non_blocking=True)

    @property
    def squared_norm(self) -> float | None:
        """Sum of squares over the parts that were sent, once `ready` lies behind: NaN or infinite if any of them is, or their squares are
        beyond fp32. None where the device did not measure it."""
        if self._norms is None:
            return None
        return float(self._norms[: self._parts].double().square().sum())


def measure_parts(gradients: torch.Tensor, parts: Sequence[tuple[int, int]], norms: torch.Tensor) -> torch.Tensor:
    """The Euclidean norms of stretches of a unit's `gradients`, summed in fp32 where they are.

    Args:
        gradients: flat, in the precision they are updated from.
        parts: offset and elements of each stretch.
        norms: fp32 on the same device, at least as many; overwritten.

    Returns:
        What was filled of `norms`.
    """
    for place, (offset, elements) in enumerate(parts):
        torch.linalg.vector_norm(gradients[offset : offset + elements], dtype=torch.float32, out=norms[place])
    return norms[: len(parts)]


class GradientOffload:
    """Moves complete units' gradients from the device to one of a few host buffers, in the precision they are updated from.

    Args:
        elements: of each host buffer; the largest holds the largest unit's trainable part. When all that are large enough are waiting
            for the optimizer, `send` blocks (back-pressure).
        parts: parameters of a unit at most.
        dtype: of the host buffers: torch.bfloat16 or torch.float32.
    """

    def __init__(
        self,
        arena: Arena,
        failure: Failure,
        *,
        elements: Sequence[int],
        parts: int,
        dtype: torch.dtype,
        device: torch.device,
        debug: DebugMode,
        trace: Trace | None,
    ) -> None:
        self._device, self._failure, self._debug, self._trace = device, failure, debug, trace
        paging = Paging.for_copies_with(device)
        on_gpu = device.type == "cuda"

        def make(length: int) -> HostGradient:
            allocate = partial(arena.allocate, holder="host gradient buffers", paging=paging)
            return HostGradient(allocate(length, dtype), allocate(parts, torch.float32) if on_gpu else None, device)

        self._free = [make(length) for length in elements]
        self._changed = threading.Condition()
        failure.wake(self._changed)
        self._stream = make_stream(device)
        self._staging = torch.empty(max(elements), dtype=dtype, device=device) if on_gpu else None
        self._norms = torch.empty(parts, dtype=torch.float32, device=device) if on_gpu else None
        self._staged, self._copied = Event(device), Event(device)

    def send(self, unit: int, gradients: torch.Tensor, parts: Sequence[tuple[int, int]]) -> HostGradient:
        """Start moving a unit's `gradients` (flat fp32 on the device); they may be overwritten by later work of the current stream.

        Args:
            parts: offset and elements of the stretches that hold gradients; what lies between them is undefined.

        Raises:
            EngineError: a background stage failed.
        """
        step = self._trace.step if self._trace is not None else 0
        waiting = self._trace.mark(step) if self._trace is not None else None
        with self._changed:
            self._changed.wait_for(lambda: self._fitting(gradients.numel()) or self._failure.failed)
            self._failure.check()
            # The smallest that fits: where there is one for each unit, each then finds its own.
            host = min(self._fitting(gradients.numel()), key=lambda host: host.buffer.numel())
            self._free.remove(host)
        target = host.buffer[: gradients.numel()]
        self._copied.wait()
        begun = self._trace.mark(step) if self._trace is not None else None
        if self._trace is not None:
            self._trace.add(step, Wait.GRADIENT_BUFFER, unit, waiting, begun)
        if self._staging is None or self._norms is None:
            target.copy_(gradients)
            self._add_copy(step, unit, target, begun, None)
            return host
        staging = self._staging[: gradients.numel()]
        staging.copy_(gradients)
        # A few hundredths of the time of the copy to the host, whose CPU would read the gradients once more for it.
        norms = measure_parts(staging, parts, self._norms)
        self._staged.record()
        if self._debug is DebugMode.NAN_FILL:
            delay(self._stream, 1_000_000)
        self._staged.wait(self._stream)
        with on_stream(self._stream):
            begun = self._trace.mark(step, self._stream) if self._trace is not None else None
            target.copy_(staging, non_blocking=True)
            host.take_norms(norms)
            self._add_copy(step, unit, target, begun, self._stream)
        self._copied.record(self._stream)
        host.ready.record(self._stream)
        return host

    def give_back(self, host: HostGradient) -> None:
        """`host` has been read."""
        with self._changed:
            self._free.append(host)
            self._changed.notify_all()

    def _add_copy(self, step: int, unit: int, target: torch.Tensor, begun: Mark | None, stream: Any) -> None:
        if self._trace is not None:
            self._trace.add(step, OperationKind.GRADIENTS_COPY, unit, begun, self._trace.mark(step, stream), bytes=target.nbytes)

    def _fitting(self, elements: int) -> list[HostGradient]:
        return [host for host in self._free if host.buffer.numel() >= elements]

    def free(self) -> None:
        """Give the buffers back."""
        if self._stream is not None:
            self._stream.synchronize()
        with self._changed:
            self._free.clear()
            self._staging = self._norms = None


def check_step(region: Region, step: int) -> None:
    """Refuse the backward of a forward that ran before the last update, and a second backward of one forward.

    Raises:
        EngineError: `region` belongs to an earlier step, whose weights are gone, or its backward has run.
    """
    if region.step != step:
        raise EngineError(
            f"backward of a forward that ran before the last update (step {region.step + 1}, now {step + 1})",
            remedy="Call backward() once per forward: with streamed weights each backward is one optimizer step.",
        )
    if region.finished:
        raise EngineError("second backward of one forward", remedy="Call backward() once per forward.")
    region.finished = True
