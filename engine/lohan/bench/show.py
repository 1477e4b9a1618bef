"""Shows a benchmark in the terminal: how far it is and how long it still takes on stderr, its table on stdout."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from lohan.bench.records import Record, Watcher
from lohan.planning.operations import Resource
from lohan.planning.step_trace import Wait
from lohan.units import format_bytes, format_count

_WIDTH_WITHOUT_TERMINAL = 160
# The fields that say which measurement was skipped.
_NAMES = ("system", "case", "engine", "operation", "shape", "states_tier", "batch", "schedule")


@contextmanager
def watcher_on_stderr() -> Iterator[Watcher]:
    """A bar with the time left on a terminal, else one line a measurement."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield LineWatcher()
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        yield BarWatcher(progress)


class LineWatcher:
    """Plain lines, as a log can hold them."""

    def __init__(self) -> None:
        self._measurements = 0
        self._made = 0

    def expect(self, measurements: int) -> None:
        self._measurements += measurements

    def note(self, what: str) -> None:
        print(what, file=sys.stderr, flush=True)

    def done(self, what: str) -> None:
        self._made += 1
        print(f"[{self._made}/{self._measurements}] {what}", file=sys.stderr, flush=True)


class BarWatcher:
    """One bar; what was measured last stands before it."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._measurements = 0
        self._task = progress.add_task("", total=None)

    def expect(self, measurements: int) -> None:
        self._measurements += measurements
        self._progress.update(self._task, total=self._measurements)

    def note(self, what: str) -> None:
        self._progress.update(self._task, description=what)

    def done(self, what: str) -> None:
        self._progress.update(self._task, description=what, advance=1)


@contextmanager
def stdout_kept_clean() -> Iterator[None]:
    """While it lasts, what packages and their child processes print to standard output goes to standard error: a document follows."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def print_adam(records: Sequence[Record]) -> None:
    """One row a system and case."""
    _print(
        records,
        "AdamW on the CPU: elements a second, beside torch.optim.AdamW(fused=True) on the same job",
        {
            "system": ("system", str),
            "case": ("case", str),
            "elements": ("elements", format_count),
            "threads": ("threads", str),
            "elements/s": ("elements_per_second", lambda rate: format_count(round(rate))),
            "x torch": ("ratio_to_torch_fused", _ratio),
            "of bandwidth": ("memory_bandwidth_fraction", _percent),
            "x engine": ("ratio_to_engine", _ratio),
        },
    )


def print_io(records: Sequence[Record]) -> None:
    """One row a setting and system, then the choice."""
    _print(
        [record for record in records if not record.get("chosen") and "directory_limit_bytes_per_second" not in record],
        "File transfers: bytes a second, durable, beside fio on the same files",
        {
            "system": ("system", str),
            "engine": ("engine", str),
            "operation": ("operation", str),
            "block": ("block_bytes", format_bytes),
            "depth": ("depth", str),
            "folders": ("directories", str),
            "direct": ("direct", lambda direct: "yes" if direct else "no"),
            "GB/s": ("bytes_per_second", lambda rate: f"{rate / 1e9:.2f}"),
            "of fio": ("ratio_to_fio", _percent),
            "of uring": ("ratio_to_uring", _percent),
        },
    )
    for record in records:
        if record.get("ratio_to_one_directory") is not None and record["directories"] > 1:
            print(
                f"{record['directories']} folders held to {record['directory_limit_bytes_per_second'] / 1e6:.0f} MB/s each, "
                f"{record['operation']}: {record['ratio_to_one_directory']:.2f} times one."
            )
    for record in records:
        if record.get("chosen"):
            print(
                f"Chosen for the engine: {record['engine']} with blocks of {format_bytes(record['block_bytes'])}, "
                f"{record['depth']} in flight: {record['reason']}."
            )


def print_step(records: Sequence[Record]) -> None:
    """One row a setting; then how busy each resource was in the last step of each."""
    _print(
        records,
        "Training steps: medians; TFLOPS count three times the forward",
        {
            "shape": ("shape", str),
            "tier": ("states_tier", str),
            "states": ("states", str),
            "durability": ("durability", str),
            "batch": ("batch", str),
            "micro": ("micro_batch", str),
            "schedule": ("schedule", str),
            "s/step": ("step_seconds", lambda seconds: f"{seconds:.3f}"),
            "TFLOPS": ("tflops", lambda rate: f"{rate:.3g}"),
            "of peak": ("fraction_of_peak", _percent),
            "GPU": ("gpu_peak_bytes", format_bytes),
            "GPU plan": ("plan_gpu_bytes", format_bytes),
            "host": ("host_peak_bytes", format_bytes),
            "host plan": ("plan_host_bytes", format_bytes),
            "files GB/s": ("disk_bytes_per_second", lambda rate: f"{rate / 1e9:.2f}"),
            "mixed GB/s": ("disk_mixed_bytes_per_second", lambda rate: f"{rate / 1e9:.2f}"),
        },
    )
    shares = [{**record, **record["busy"], **record["waits"]} for record in records if record.get("busy")]
    if shares:
        columns: dict[str, tuple[str, Callable[[Any], str]]] = {"tier": ("states_tier", str), "batch": ("batch", str)}
        columns["schedule"] = ("schedule", str)
        columns |= {str(resource).replace("_", " "): (str(resource), _percent) for resource in Resource}
        columns |= {str(wait): (str(wait), _percent) for wait in Wait}
        _print(shares, "The last step of each: for what part of it each resource was busy, and the device waited", columns)


def print_peers(records: Sequence[Record]) -> None:
    """One row a system and setting; ratios are those of one run, in which the two took steps in turns or in rounds."""
    _print(
        records,
        "Training steps beside other systems: medians; a ratio is a system's seconds over LoHan's in the same run",
        {
            "system": ("system", str),
            "tuned": ("tuned", lambda tuned: "yes" if tuned else "no"),
            "shape": ("shape", str),
            "tier": ("states_tier", str),
            "batch": ("batch", str),
            "micro": ("micro_batch", str),
            "policy": ("policy", str),
            "clip": ("clip", str),
            "kernels": ("kernels", str),
            "s/step": ("step_seconds", lambda seconds: f"{seconds:.3f}"),
            "TFLOPS": ("tflops", lambda rate: f"{rate:.3g}"),
            "x LoHan": ("ratio_to_lohan", _ratio),
            "in turns": ("in_turns", lambda in_turns: "yes" if in_turns else "no"),
            "GPU": ("gpu_peak_bytes", format_bytes),
            "host": ("host_peak_bytes", format_bytes),
        },
    )


def _ratio(value: float) -> str:
    return f"{value:.2f}"


def _percent(value: float) -> str:
    return f"{value:.0%}"


def _print(records: Sequence[Record], title: str, columns: dict[str, tuple[str, Callable[[Any], str]]]) -> None:
    skipped = [record for record in records if "skipped" in record]
    # A width of its own where there is no terminal, so that a log keeps the rows whole.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH_WITHOUT_TERMINAL)
    table = Table(title=title, title_justify="left")
    measured = [record for record in records if "skipped" not in record]
    shown = {name: column for name, column in columns.items() if any(record.get(column[0]) is not None for record in measured)}
    for name, (key, _) in shown.items():
        table.add_column(name, justify="left" if all(isinstance(record.get(key), str) for record in measured) else "right")
    for record in measured:
        table.add_row(*("-" if record.get(key) is None else text(record[key]) for key, text in shown.values()))
    if measured:
        console.print(table)
    for record in skipped:
        what = " ".join(str(record[key]) for key in _NAMES if key in record)
        console.print(f"skipped {what}: {record['skipped']}", markup=False)
