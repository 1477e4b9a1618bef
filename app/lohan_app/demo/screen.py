"""What the demonstration prints: the plan as a table, progress as a bar in a terminal and as plain lines elsewhere."""

from __future__ import annotations

from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID
from rich.table import Table

from lohan.planning.plan import Plan
from lohan.units import format_bytes, format_count, format_duration


def say(console: Console, text: str) -> None:
    """One line of the demonstration: never wrapped, so that addresses can be copied, and never read as markup."""
    console.print(f"demo: {text}", markup=False, highlight=False, soft_wrap=True)


def print_plan(console: Console, plan: Plan) -> None:
    """Bytes per tier, and who uses them."""
    title = f"Plan: {plan.model}, {format_count(plan.parameters)} parameters, {plan.device}, {plan.precision}"
    table = Table(title=title, title_justify="left")
    table.add_column("tier")
    table.add_column("what")
    table.add_column("bytes", justify="right")
    table.add_column("how", overflow="fold")
    for tier in plan.tiers:
        for item in tier.items:
            table.add_row(tier.tier.upper(), item.name, format_bytes(item.bytes), item.formula)
        table.add_row(
            f"[bold]{tier.tier.upper()}[/]", "[bold]used[/]", f"[bold]{format_bytes(tier.used_bytes)}[/]",
            f"of {format_bytes(tier.capacity_bytes)}", end_section=True,
        )  # fmt: skip
    console.print(table)
    for note in plan.notes:
        say(console, f"note: {note}")


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
        where = str(run.get("phase") or run["state"])
        step, total = int(run.get("step") or 0), int(run.get("total_steps") or 0)
        facts = _facts(run)
        if self._bar is not None:
            progress, task = self._bar
            progress.update(task, description=where.replace("_", " "), completed=step, total=max(total, 1), facts=facts)
        elif self._last != (where, step):
            count = f" {step}/{total}" if total else ""
            say(self._console, f"{where.replace('_', ' ')}{count} {facts}".rstrip())
        self._last = (where, step)


def _facts(run: dict[str, Any]) -> str:
    parts = []
    if run.get("loss") is not None:
        parts.append(f"loss {run['loss']:.4f}")
    if run.get("eta_seconds") is not None:
        parts.append(f"ETA {format_duration(run['eta_seconds'])}")
    return "  ".join(parts)
