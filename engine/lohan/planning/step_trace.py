"""What one step did when: spans on resources, how long each resource was busy, and what the device waited for. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from lohan.planning.operations import OperationKind, Resource


class Wait(StrEnum):
    """Why the thread that computes, and the device behind it, stood still."""

    WEIGHTS = "wait for weights"
    """A unit's copy to its slot was not there yet."""
    GRADIENT_BUFFER = "wait for a gradient buffer"
    """The optimizer had not read an earlier unit's gradients yet, or they had not left the device."""
    UPDATES = "wait for updates"
    """The step's, or of a unit that the next forward begins with."""
    ROOM_FOR_ACTIVATIONS = "wait for room for kept activations"
    """Earlier ones had not left the device yet, or not reached the drive."""
    ACTIVATIONS = "wait for kept activations"
    """They were not back on the device yet."""


@dataclass(frozen=True, slots=True)
class Span:
    """One operation, or a wait, as it was carried out; seconds are those of `time.perf_counter`."""

    kind: OperationKind | Wait
    resource: Resource
    """Of a wait: the one that waits."""
    unit: int | None
    chunk: int | None
    micro_batch: int | None
    bytes: int
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True)
class Busy:
    """What a resource did in a step."""

    seconds: float
    """In which at least one operation was under way."""
    bytes: int
    operations: int


@dataclass(frozen=True, slots=True)
class StepTrace:
    """One step: from where its forward begins to where the next one's does, or to where all it began was waited for, whichever is first;
    to its last span where there is neither."""

    step: int
    start_seconds: float
    end_seconds: float
    spans: tuple[Span, ...]
    """By their start. Loads for the next forward belong to the step whose end asks for them."""

    @property
    def seconds(self) -> float:
        return self.end_seconds - self.start_seconds

    def busy(self) -> Mapping[Resource, Busy]:
        """Every resource; waits do not count."""
        result = {}
        for resource in Resource:
            spans = [span for span in self.spans if span.resource is resource and not isinstance(span.kind, Wait)]
            result[resource] = Busy(union_seconds(spans), sum(span.bytes for span in spans), len(spans))
        return result

    def waits(self) -> Mapping[Wait, float]:
        """Seconds that the device stood still, by cause."""
        return {wait: union_seconds(span for span in self.spans if span.kind is wait) for wait in Wait}


def mean_busy(steps: Sequence[StepTrace]) -> Mapping[Resource, Busy]:
    """Seconds, bytes and operations of one step, averaged; `steps` is not empty."""
    each = [step.busy() for step in steps]
    return {
        resource: Busy(
            sum(busy[resource].seconds for busy in each) / len(each),
            sum(busy[resource].bytes for busy in each) // len(each),
            sum(busy[resource].operations for busy in each) // len(each),
        )
        for resource in Resource
    }


def union_seconds(spans: Iterable[Span]) -> float:
    """The length of the union of the spans."""
    total, reached = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start_seconds):
        total += max(0.0, span.end_seconds - max(span.start_seconds, reached))
        reached = max(reached, span.end_seconds)
    return total
