"""Compares what a step did with what its operations say. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from lohan.planning.operations import Operation, OperationKind
from lohan.planning.step_trace import Span, StepTrace, Wait

_Key = tuple[str, int | None, int | None, int | None]


class DifferenceKind(StrEnum):
    MISSING = "missing"
    """An operation that was not carried out."""
    UNEXPECTED = "unexpected"
    """A span that no operation asks for."""
    TOO_EARLY = "too early"
    """It began before what it waits for had ended."""
    OTHER_BYTES = "other bytes"


@dataclass(frozen=True, slots=True)
class Difference:
    """`operation` is None where there is none, and so is `span`; `awaited` is what a span that came too early should have waited for."""

    kind: DifferenceKind
    operation: Operation | None
    span: Span | None
    awaited: Operation | None = None

    def __str__(self) -> str:
        if self.operation is None:
            assert self.span is not None, "a difference has an operation or a span"
            span = self.span
            return f"{self.kind}: {Operation(_kind_of(span), span.unit, span.chunk, span.micro_batch)} of {span.bytes} bytes"
        if self.kind is DifferenceKind.OTHER_BYTES and self.span is not None:
            return f"{self.operation}: {self.span.bytes} bytes instead of {self.operation.bytes}"
        return f"{self.kind}: {self.operation}" + (f", before the end of {self.awaited}" if self.awaited is not None else "")


def compare(operations: Sequence[Operation], trace: StepTrace, *, tolerance_seconds: float = 0.0) -> list[Difference]:
    """How a step differs from its `operations`; empty if it did each of them once, with its bytes, after what it waits for.

    Of several alike (a unit is read in the forward and in the backward) the first to begin is taken for the first in the list.

    Args:
        tolerance_seconds: by which a span may begin before the end of what it waits for. On one clock none is needed; times on a GPU are
            mapped onto the host's, which is exact to some 20 microseconds.
    """
    spans: dict[_Key, list[Span]] = defaultdict(list)
    for found in sorted(trace.spans, key=lambda span: span.start_seconds, reverse=True):
        if not isinstance(found.kind, Wait):
            spans[found.kind, found.unit, found.chunk, found.micro_batch].append(found)
    differences: list[Difference] = []
    matched: list[Span | None] = []
    for operation in operations:
        candidates = spans[operation.kind, operation.unit, operation.chunk, operation.micro_batch]
        span = candidates.pop() if candidates else None
        matched.append(span)
        if span is None:
            differences.append(Difference(DifferenceKind.MISSING, operation, None))
            continue
        if span.bytes != operation.bytes:
            differences.append(Difference(DifferenceKind.OTHER_BYTES, operation, span))
        for index in operation.after:
            awaited = matched[index]
            if awaited is not None and span.start_seconds < awaited.end_seconds - tolerance_seconds:
                differences.append(Difference(DifferenceKind.TOO_EARLY, operation, span, operations[index]))
    left = [kept for remaining in spans.values() for kept in reversed(remaining)]
    return differences + [Difference(DifferenceKind.UNEXPECTED, None, kept) for kept in left]


def _kind_of(span: Span) -> OperationKind:
    assert not isinstance(span.kind, Wait), "waits are not compared"
    return span.kind
