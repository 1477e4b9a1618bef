"""One backward is one step, or adds to one: collects gradients, hands units on as they complete, and closes the step when autograd is
done."""

# ruff: noqa: SLF001 - the end of a backward is only told to `_execution_engine.queue_callback`

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from lohan.errors import EngineError
from lohan.streaming.accumulation import accumulating
from lohan.streaming.chunk_pipeline import UnitUpdate
from lohan.streaming.gradients import GradientCollector, HostGradient, Region, check_step
from lohan.streaming.hyperparameters import Hyperparameters, read_groups
from lohan.streaming.placeholders import make_streamed_gradient

if TYPE_CHECKING:
    from lohan.streaming.regions import UnitRuntime
    from lohan.streaming.stages import Stages


class StepDriver:
    """Knows which step it is. Its methods run in the threads that run forward and backward, never two at once."""

    def __init__(self, units: Sequence[UnitRuntime], optimizer: torch.optim.Optimizer, stages: Stages) -> None:
        self._units, self._optimizer = units, optimizer
        self._stream, self._offload, self._worker, self._failure = stages.stream, stages.offload, stages.worker, stages.failure
        self._kept, self._trace = stages.kept, stages.trace
        self._numbers: dict[int, int] = {}
        self.collector = GradientCollector([unit.layout for unit in units], self._send, device=stages.device, trace=stages.trace)
        self.steps = stages.resumed_step
        """Updates so far, skipped ones included."""
        self._adds_only = False
        self._added: set[int] = set()
        self._groups: list[Hyperparameters] = []
        self._in_backward = False
        self._closed = False
        self._sentinels = [
            (entry.parameter, make_streamed_gradient(entry.parameter))
            for unit in units
            for entry, place in zip(unit.parameters, unit.layout.parameters, strict=True)
            if place.trainable
        ]
        self._frozen = [
            entry for unit in units for entry, place in zip(unit.parameters, unit.layout.parameters, strict=True) if not place.trainable
        ]

    def check(self) -> None:
        """Raise what keeps a forward from running.

        Raises:
            EngineError: a background stage failed, the last backward did, or the session is closed.
        """
        self._failure.check()
        if self._closed:
            raise EngineError(
                "the session is closed, and the model holds no weights", remedy="Export the model before closing, and load the export."
            )
        if self._in_backward:
            raise EngineError(
                f"the backward of step {self.steps + 1} did not finish: some units are updated and others are not",
                remedy="Mend what it raised and start the run again.",
            )

    def check_between_steps(self) -> None:
        """Raise what keeps the way a step is done from being changed now.

        Raises:
            EngineError: a step is under way; and as `check`.
        """
        self.check()
        if self._added or self.collector.is_waiting:
            what = "some of its backwards are done" if self._added else "a forward waits for its backward"
            raise EngineError(
                f"step {self.steps + 1} has begun: {what}",
                remedy="Change what is kept between two steps; drop the loss of a forward that nobody will go back through.",
            )

    @property
    def is_between_steps(self) -> bool:
        """Whether there was a step and the next one has not begun."""
        return self.steps > 0 and not self._in_backward and not self._added

    def new_region(self, unit: int, number: int) -> Region:
        """A region of the current step; `number` is `next_number`'s."""
        for entry in self._frozen:
            if entry.parameter.requires_grad:
                raise EngineError(
                    f"parameter {entry.name} was frozen when the session was made and requires grad now",
                    place=entry.name,
                    remedy="Call lohan.init after unfreezing it; it has no optimizer states.",
                )
        return Region(unit, self.steps, self._finish, number)

    def begin_forward(self) -> None:
        """A forward begins."""
        self._numbers.clear()
        if self._trace is not None:
            self._trace.begin_step(self.steps + 1)

    def next_number(self, unit: int) -> int:
        """How many regions the unit has had in this forward."""
        number = self._numbers.get(unit, 0)
        self._numbers[unit] = number + 1
        return number

    def close(self) -> None:
        """Refuse everything from now on, and give the gradient sums back."""
        self._closed = True
        self.collector.free()

    def _finish(self, region: Region, gradients: Sequence[torch.Tensor | None]) -> None:
        """The backward of `region` has run."""
        self._failure.check()
        check_step(region, self.steps)
        if not self._in_backward:
            self._groups = read_groups(self._optimizer)
            self._adds_only = accumulating()
            self._in_backward = True
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._end)
        if region.holds_weights:
            region.holds_weights = False
            self._stream.release(region.unit)
        if self._kept.now is not None and region.kept is not None:
            self._kept.now.finish(region.kept)
        self.collector.add(region, gradients)

    def _send(self, index: int, gradients: torch.Tensor, touched: frozenset[int]) -> None:
        """A unit's gradients of this backward are complete."""
        places = [self._units[index].layout.parameters[parameter] for parameter in sorted(touched)]
        self._submit(index, self._offload.send(index, gradients, [(place.offset, place.elements) for place in places]), touched)

    def _submit(self, index: int, host: HostGradient | None, touched: frozenset[int]) -> None:
        """Start the unit's update, or have its gradients added up."""
        update = UnitUpdate(self._units[index].layout, self.steps + 1, host, touched, self._groups, adds_only=self._adds_only)
        self._worker.submit(update)
        if self._adds_only:
            self._added.add(index)
        else:
            self._added.discard(index)
            self._stream.invalidate(index)

    def _end(self) -> None:
        """Autograd has run every node of this backward."""
        self.collector.close_step()
        self._in_backward = False
        self._numbers.clear()
        if not self._adds_only:
            for index in sorted(self._added, reverse=True):  # units that only earlier backwards of the step gave gradients
                self._submit(index, None, frozenset())
            self.steps += 1
            self._worker.end_step(self.steps)
            if self._trace is not None:
                self._trace.end_step()
            self._optimizer._opt_called = True  # type: ignore[attr-defined]  # what lr schedulers look for before they step
        for parameter, sentinel in self._sentinels:
            parameter.grad = sentinel
        self._stream.prefetch_forward()
