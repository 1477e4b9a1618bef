"""Shows a run in the terminal: a progress bar with the time left where there is one, else plain lines that a log can hold."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Protocol, Self

from lohan.events import EventType, ExitReason
from lohan.planning.operations import Resource
from lohan.planning.step_trace import Wait, mean_busy
from lohan.units import format_count, format_duration

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

    from lohan.config import RunConfig
    from lohan.training.tracing import TraceReport

_RESOURCE_NAMES = {
    Resource.GPU: "GPU",
    Resource.M2G: "M2G (host to GPU)",
    Resource.G2M: "G2M (GPU to host)",
    Resource.SSD_READ: "SSD read",
    Resource.SSD_WRITE: "SSD write",
    Resource.CPU: "CPU (optimizer)",
}


class Show(Protocol):
    """Takes the trainer's events as they come."""

    def event(self, type: EventType, fields: dict[str, Any]) -> None: ...

    def busy(self, report: TraceReport) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


def make_show(config: RunConfig) -> Show:
    """A progress bar on a terminal, else lines."""
    return ProgressShow(config) if sys.stdout.isatty() else LineShow(config)


class LineShow:
    """One line for every step, evaluation, warning and change of phase."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._phase = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def event(self, type: EventType, fields: dict[str, Any]) -> None:
        if type is EventType.PHASE:
            if fields["detail"] == self._phase:
                return
            self._phase = fields["detail"]
        print(describe(type, fields, self._config), flush=True)

    def busy(self, report: TraceReport) -> None:
        print_busy(report, make_console())


class ProgressShow:
    """A bar for the phase at work, and above it what stays worth knowing."""

    def __init__(self, config: RunConfig) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._config = config
        self._progress: Progress = Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}"), console=Console(highlight=False)
        )
        self._task: TaskID | None = None
        self._phase = ""

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def event(self, type: EventType, fields: dict[str, Any]) -> None:
        if type is EventType.PHASE:
            self._show_phase(fields)
        elif type is EventType.STEP:
            left = f"{format_duration(fields['eta_seconds'])} left" if fields["eta_seconds"] is not None else "time left unknown yet"
            state = f"step {fields['step']}/{fields['total_steps']}  loss {fields['loss']:.4f}  {left}"
            self._bar("Training", fields["step"] / fields["total_steps"], state)
            # The bar makes room for the next phase's; how the training ended stays.
            if fields["step"] == fields["total_steps"]:
                self._progress.console.print(describe(type, fields, self._config), markup=False)
        else:
            # Not as markup: messages quote file names and data.
            self._progress.console.print(describe(type, fields, self._config), markup=False)

    def busy(self, report: TraceReport) -> None:
        print_busy(report, self._progress.console)

    def _show_phase(self, fields: dict[str, Any]) -> None:
        if fields["detail"] != self._phase and self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None
        self._phase = fields["detail"]
        self._bar(fields["detail"].rstrip("."), fields["progress"], "")

    def _bar(self, description: str, done: float | None, state: str) -> None:
        from rich.markup import escape

        if self._task is None:
            self._task = self._progress.add_task("", total=1, state="")
        # Without a total the bar pulses.
        total, completed = (None, 0.0) if done is None else (1.0, done)
        self._progress.update(self._task, description=escape(description), total=total, completed=completed, state=state, refresh=True)


def describe(type: EventType, fields: dict[str, Any], config: RunConfig) -> str:
    """An event as a line for people."""
    if type is EventType.STARTED and "batch_size" not in fields:
        return f"started on {fields['device']}"
    if type is EventType.STARTED:
        resumed = f", resumed at step {fields['resumed_step']}" if fields["resumed_step"] else ""
        return (
            f"{format_count(fields['parameters'])} parameters in {fields['precision']} on {fields['device']}: {fields['total_steps']} steps"
            f" of {fields['batch_size']} rows ({fields['micro_batch_size']} at once), up to {fields['sequence_length']} tokens a row"
            f"{resumed}"
        )
    if type is EventType.STEP:
        norm = "unknown" if fields["gradient_norm"] is None else f"{fields['gradient_norm']:.3g}"
        if fields["skipped"]:
            norm = "not finite, step left out"
        elif fields["clipped"]:
            norm += " (clipped)"
        return (
            f"step {fields['step']}/{fields['total_steps']}  loss {fields['loss']:.4f}  gradient norm {norm}"
            f"  learning rate {fields['learning_rate']:.3g}  {fields['tokens_per_second']:.0f} tokens/s"
            f"  {fields['step_seconds']:.2f} s  time left {format_duration(fields['eta_seconds'])}"
        )
    if type is EventType.EVALUATION:
        return f"loss {fields['when']} the training: {fields['loss']:.4f} (mean over {fields['rows']} training rows)"
    if type is EventType.NOTE:
        return str(fields["message"])
    if type is EventType.WARNING:
        return f"warning: {fields['message']} {fields['remedy'] or ''}".rstrip()
    if type is EventType.EXIT:
        return _describe_exit(fields, config)
    return str(fields["detail"])  # a phase's, or a corrected plan's


def _describe_exit(fields: dict[str, Any], config: RunConfig) -> str:
    error = fields["error"]
    if error is None:
        result = f": the model is in {config.output.directory / 'export'}" if fields["reason"] == ExitReason.SUCCEEDED else ""
        early = f", stopped early at step {fields['stopped_step']}" if fields["stopped_step"] is not None else ""
        return f"{fields['reason']}{early}{result}"
    where = f"{error['place']}: " if error["place"] else ""
    remedy = f"\n  {error['remedy']}" if error["remedy"] else ""
    return f"{fields['reason']}: {where}{error['message']}{remedy}"


def make_console() -> Console:
    """With a width of its own where there is no terminal, so that a log keeps the rows whole."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else 140)


def print_busy(report: TraceReport, console: Console) -> None:
    """Print how busy each resource was in the recorded steps, and what the device waited for (the LoHan paper's Figure 1)."""
    from rich.table import Table

    steps = report.steps
    seconds = sum(step.seconds for step in steps) / len(steps)
    title = f"A step took {seconds:.3f} s (mean of {len(steps)}, from step {steps[0].step} on)"
    table = Table(title=title, title_justify="left")
    table.add_column("resource")
    for name in ("busy", "of the step", "moved", "while busy", "operations"):
        table.add_column(name, justify="right")
    for resource, busy in mean_busy(steps).items():
        moved = f"{busy.bytes / 1e9:.3g} GB" if busy.bytes else ""
        rate = f"{busy.bytes / 1e9 / busy.seconds:.3g} GB/s" if busy.bytes and busy.seconds else ""
        name = "computing CPU" if resource is Resource.GPU and not report.on_gpu else _RESOURCE_NAMES[resource]
        table.add_row(name, f"{busy.seconds:.3f} s", f"{busy.seconds / seconds:.1%}", moved, rate, str(busy.operations))
    console.print(table)
    waits = [(wait, sum(step.waits()[wait] for step in steps) / len(steps)) for wait in Wait]
    told = [f"{str(wait).removeprefix('wait ')} {waited:.3f} s ({waited / seconds:.1%})" for wait, waited in waits]
    console.print(f"{'The GPU' if report.on_gpu else 'Computing'} waited {', '.join(told)}.", markup=False)
    console.print(f"The trace is in {report.path}; open it in ui.perfetto.dev.", markup=False, soft_wrap=True)
