"""Writes traced steps as Chrome trace events (JSON), which ui.perfetto.dev and chrome://tracing read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lohan.errors import StorageError
from lohan.planning.operations import Resource
from lohan.planning.step_trace import Span, StepTrace, Wait

if TYPE_CHECKING:
    from lohan.streaming.trace import Trace

_TRACKS = {
    Resource.GPU: "GPU",
    Resource.M2G: "M2G: host to GPU",
    Resource.G2M: "G2M: GPU to host",
    Resource.SSD_READ: "SSD read",
    Resource.SSD_WRITE: "SSD write",
    Resource.CPU: "CPU optimizer",
}
_PROCESS = 1
_LANES = 1000
"""Numbers that a track has for its lanes."""


def write_perfetto(trace: Trace, path: Path, names: Sequence[str]) -> None:
    """Write the recorded steps to `path`, in place of what it was: a track for each resource, one for waits and one for steps.

    Spans of a resource that overlap, as transfers do, lie in further lanes of its track.

    Args:
        names: of the units, by index.

    Raises:
        StorageError: the file cannot be written.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_text(json.dumps(_document(trace.steps, names), separators=(",", ":")) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise StorageError(
            f"the trace cannot be written: {error.strerror or error}",
            place=str(path),
            remedy="Name a file in a folder this user may write to.",
            errno=error.errno,
        ) from error


def _document(steps: Sequence[StepTrace], names: Sequence[str]) -> dict[str, Any]:
    zero = min((step.start_seconds for step in steps), default=0.0)
    events: list[dict[str, Any]] = [{"ph": "M", "pid": _PROCESS, "name": "process_name", "args": {"name": "LoHan"}}]

    def add_track(number: int, name: str, spans: Iterable[tuple[int, Span]]) -> None:
        lanes: list[float] = []
        for step, span in sorted(spans, key=lambda item: item[1].start_seconds):
            lane = next((lane for lane, end in enumerate(lanes) if end <= span.start_seconds), len(lanes))
            if lane == len(lanes):
                events.extend(_lane(number * _LANES + lane, name if lane == 0 else f"{name} ({lane + 1})"))
                lanes.append(0.0)
            lanes[lane] = span.end_seconds
            events.append(_event(number * _LANES + lane, step, span, names, zero))

    events.extend(_lane(0, "steps"))
    for step in steps:
        times = _times(step.start_seconds, step.end_seconds, zero)
        events.append({"ph": "X", "pid": _PROCESS, "tid": 0, "name": f"step {step.step}", "cat": "step", **times})
    spans = [(step.step, span) for step in steps for span in step.spans]
    for number, (resource, name) in enumerate(_TRACKS.items(), start=1):
        add_track(number, name, (item for item in spans if item[1].resource is resource and not isinstance(item[1].kind, Wait)))
    add_track(len(_TRACKS) + 1, "GPU waits", (item for item in spans if isinstance(item[1].kind, Wait)))
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _lane(number: int, name: str) -> list[dict[str, Any]]:
    lane = {"ph": "M", "pid": _PROCESS, "tid": number}
    return [{**lane, "name": "thread_name", "args": {"name": name}}, {**lane, "name": "thread_sort_index", "args": {"sort_index": number}}]


def _times(start_seconds: float, end_seconds: float, zero: float) -> dict[str, float]:
    """Microseconds since the first step's start."""
    return {"ts": round((start_seconds - zero) * 1e6, 3), "dur": round((end_seconds - start_seconds) * 1e6, 3)}


def _event(lane: int, step: int, span: Span, names: Sequence[str], zero: float) -> dict[str, Any]:
    arguments: dict[str, Any] = {"step": step}
    if span.unit is not None:
        arguments["unit"] = names[span.unit]
    for name in ("chunk", "micro_batch"):
        if (value := getattr(span, name)) is not None:
            arguments[name] = value
    if span.bytes:
        arguments["bytes"] = span.bytes
    kind = str(span.kind).replace("_", " ")
    label = f"{kind} {names[span.unit]}" if span.unit is not None else kind
    times = _times(span.start_seconds, span.end_seconds, zero)
    return {"ph": "X", "pid": _PROCESS, "tid": lane, "name": label, "cat": kind, "args": arguments, **times}
