"""What the demonstration prints: progress as a bar in a terminal, and as plain lines elsewhere."""

from __future__ import annotations

from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID

from lohan.units import format_duration


def say(console: Console, text: str) -> None:
    """One line of the demonstration: never wrapped, so that addresses can be copied, and never read as markup."""
    console.print(f"demo: {text}", markup=False, highlight=False, soft_wrap=True)


class RunScreen:
    """Follows one run; call `show` with each answer of `GET /runs/{id}`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: tuple[Progress, TaskID] | None = None
        self._last: tuple[str, int] | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            columns = ("{task.description}", BarColumn(), "{task.completed:.0f}/{task.total:.0f}", "{task.fields[facts]}")
            progress = Progress(*columns, console=self._console)
            progress.start()
            self._bar = (progress, progress.add_task("queued", total=1, facts=""))
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar[0].stop()

    def show(self, run: dict[str, Any]) -> None:
        where = str(run.get("phase") or run["state"]).replace("_", " ")
        step, total = int(run.get("step") or 0), int(run.get("total_steps") or 0)
        if self._bar is not None:
            progress, task = self._bar
            # Before the first step the bar shows how far the phase is.
            done, of = (step, total) if step else (100 * float(run.get("phase_progress") or 0), 100)
            progress.update(task, description=where, completed=done, total=of, facts=_facts(run))
        elif self._last != (where, step):
            count = f"step {step}/{total} " if step else ""
            say(self._console, f"{where} {count}{_facts(run)}".rstrip())
        self._last = (where, step)


def _facts(run: dict[str, Any]) -> str:
    parts = []
    if run.get("loss") is not None:
        parts.append(f"loss {run['loss']:.4f}")
    if run.get("eta_seconds") is not None:
        parts.append(f"ETA {format_duration(run['eta_seconds'])}")
    return "  ".join(parts)
