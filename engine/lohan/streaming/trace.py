"""Records what the steps of a session did when, for a table of busy resources and for ui.perfetto.dev.

Times of host work are `time.perf_counter`; file transfers bring their own, of the same clock, from the native core. On a GPU, times are
pairs of CUDA events on the stream that does the work, read once the step has ended and mapped onto the host's clock by an event that the
host has waited for at the step's start: that wait is what tracing costs. The thread that computes begins steps; any thread adds spans.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lohan.errors import ConfigError, EngineError
from lohan.planning.operations import RESOURCES, OperationKind, Resource
from lohan.planning.step_trace import Busy, Span, StepTrace, Wait
from lohan.streaming.perfetto import write_perfetto

if TYPE_CHECKING:
    from lohan.memory.store import Transfer

__all__ = ["Busy", "Mark", "Resource", "Span", "StepTrace", "Trace", "Wait", "write_perfetto"]

MOST_SPANS = 500_000
"""That a trace keeps: about 150 MB."""
_REFERENCE_TRIES = 5
_LEAST_WAIT_SECONDS = 2e-5
"""Of a wait that is told: what lies between two CUDA events anyway."""


@dataclass(frozen=True, slots=True)
class _Reference:
    """A CUDA event and when the host saw it."""

    event: Any
    seconds: float


@dataclass(frozen=True, slots=True)
class _StreamMark:
    event: Any
    reference: _Reference


Mark = float | _StreamMark
"""A point in time: of the host's clock, or of a stream's work."""


@dataclass(frozen=True, slots=True)
class _Raw:
    """A span whose ends may not have been reached yet."""

    kind: OperationKind | Wait
    unit: int | None
    chunk: int | None
    micro_batch: int | None
    bytes: int
    start: Mark
    end: Mark


class Trace:
    """Spans of a few steps of one session: `lohan.init(…, trace=Trace())`.

    Args:
        first_step: the first one that is recorded, counted as `Session.steps` does from 1; the first steps of a session are slower.
        steps: how many are.

    Raises:
        ConfigError: a number is below 1.
    """

    def __init__(self, first_step: int = 2, steps: int = 3) -> None:
        for name, value in (("first_step", first_step), ("steps", steps)):
            if value < 1:
                raise ConfigError(f"{name} is {value}, expected at least 1", place=name, remedy="Correct the value.")
        self._first, self._last = first_step, first_step + steps - 1
        self._device: torch.device | None = None
        self._reference: _Reference | None = None
        self._lock = threading.Lock()
        self._raw: dict[int, list[_Raw]] = defaultdict(list)
        self._spans: dict[int, list[Span]] = defaultdict(list)
        self._starts: dict[int, float] = {}
        self._settled: dict[int, float] = {}
        self._ended = 0
        self._count = 0
        self.dropped_spans = 0
        """Beyond `MOST_SPANS`, or of a device that failed before their end."""
        self.step = 0
        """The one that is under way."""

    def record(self, first_step: int, steps: int) -> None:
        """Record these steps next, which lie ahead, instead of those asked for before; what was recorded is forgotten."""
        with self._lock:
            self._first, self._last = first_step, first_step + steps - 1
            self._raw.clear()
            self._spans.clear()
            self._starts.clear()
            self._settled.clear()
            self._count = self.dropped_spans = 0

    @property
    def is_complete(self) -> bool:
        """Whether a step behind the last one to be recorded has begun: how long that was is known then."""
        return self.step > self._last

    @property
    def steps(self) -> Sequence[StepTrace]:
        """The recorded steps whose backward has ended. A step's spans are complete once `Session.wait` has returned; its commit follows."""
        with self._lock:
            raw, self._raw = self._raw, defaultdict(list)
        for step, entries in raw.items():
            spans = [span for entry in entries if (span := self._resolve(entry)) is not None]
            with self._lock:
                self._spans[step].extend(spans)
        with self._lock:
            ended = [step for step in sorted(self._starts) if step <= min(self._ended, self._last)]
            return [self._step_trace(step) for step in ended]

    # ---------------------------------------------------------------- for the engine

    def attach(self, device: torch.device) -> None:
        """Record a session that computes on `device`.

        Raises:
            EngineError: the trace belongs to another session.
        """
        if self._device is not None:
            raise EngineError("the trace belongs to another session", place="trace", remedy="Make a new Trace for each session.")
        self._device = device

    def begin_step(self, step: int) -> None:
        """A forward of `step` begins; a later one of the same step changes nothing."""
        if step == self.step:
            return
        self.step = step
        if self._first <= step <= self._last:
            self._reference = self._make_reference()
        if self._first <= step <= self._last + 1:
            self._starts[step] = time.perf_counter()

    def end_step(self) -> None:
        """The backward of the step under way has ended."""
        self._ended = self.step

    def settle(self) -> None:
        """All that was begun is done: where the session pauses behind a step's end, the pause is not the step's."""
        if self._ended == self.step:
            self._settled.setdefault(self.step, time.perf_counter())

    def mark(self, step: int, stream: Any = None) -> Mark | None:
        """Now, or when the stream's work so far is done; None where `step` is not recorded."""
        if not self._first <= step <= self._last:
            return None
        if self._reference is None or self._device is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(stream or torch.cuda.current_stream(self._device))
        return _StreamMark(event, self._reference)

    def host_mark(self, step: int) -> float | None:
        """Now, on the host, also where the device is a GPU; None where `step` is not recorded."""
        return time.perf_counter() if self._first <= step <= self._last else None

    def add(
        self,
        step: int,
        kind: OperationKind | Wait,
        unit: int | None,
        start: Mark | None,
        end: Mark | None,
        *,
        chunk: int | None = None,
        micro_batch: int | None = None,
        bytes: int = 0,
    ) -> None:
        """Record a span of `step` between two marks; nothing where there is none."""
        if start is None or end is None:
            return
        with self._lock:
            if self._count >= MOST_SPANS:
                self.dropped_spans += 1
                return
            self._count += 1
            self._raw[step].append(_Raw(kind, unit, chunk, micro_batch, bytes, start, end))

    def add_transfers(
        self,
        step: int,
        kind: OperationKind,
        unit: int,
        chunk: int,
        transfers: Sequence[Transfer],
        *,
        bytes: int,
        micro_batch: int | None = None,
    ) -> None:
        """Record file transfers that have ended as one span; nothing where all were within memory."""
        if not self._first <= step <= self._last:
            return
        times = [times for transfer in transfers if (times := transfer.times) is not None]
        if times:
            start, end = min(start for start, _ in times), max(end for _, end in times)
            self.add(step, kind, unit, start, end, chunk=chunk, micro_batch=micro_batch, bytes=bytes)

    def _make_reference(self) -> _Reference | None:
        if self._device is None or self._device.type != "cuda":
            return None
        tries = []
        for _ in range(_REFERENCE_TRIES):
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            before = time.perf_counter()
            event.record(torch.cuda.current_stream(self._device))
            event.synchronize()
            after = time.perf_counter()
            # The first waits for what is queued; of the others the quickest says best when it was.
            tries.append((after - before, _Reference(event, (before + after) / 2)))
        return min(tries, key=lambda item: item[0])[1]

    def _resolve(self, raw: _Raw) -> Span | None:
        try:
            start, end = _seconds(raw.start), _seconds(raw.end)
        except RuntimeError:  # the device has failed: the run says why
            self.dropped_spans += 1
            return None
        if isinstance(raw.kind, Wait):
            if end - start < _LEAST_WAIT_SECONDS:
                return None
            return Span(raw.kind, Resource.GPU, raw.unit, raw.chunk, raw.micro_batch, raw.bytes, start, end)
        return Span(raw.kind, RESOURCES[raw.kind], raw.unit, raw.chunk, raw.micro_batch, raw.bytes, start, end)

    def _step_trace(self, step: int) -> StepTrace:
        spans = tuple(sorted(self._spans[step], key=lambda span: (span.start_seconds, span.end_seconds)))
        start = self._starts[step]
        ends = [seconds for seconds in (self._starts.get(step + 1), self._settled.get(step)) if seconds is not None]
        end = min(ends) if ends else max((span.end_seconds for span in spans), default=start)
        return StepTrace(step, start, end, spans)


def _seconds(mark: Mark) -> float:
    """The mark on the host's clock; waits until it is reached."""
    if isinstance(mark, float):
        return mark
    mark.event.synchronize()
    return mark.reference.seconds + float(mark.reference.event.elapsed_time(mark.event)) / 1000
