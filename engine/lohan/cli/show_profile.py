"""Shows a profile in the terminal: how far it is on stderr, its figures on stdout."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING

from lohan.cli.show import make_console
from lohan.units import format_count, format_duration

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    from lohan.hardware.profile import HardwareProfile, Measured
    from lohan.profiling.progress import OnProgress, ProfileProgress

_RATES = (
    ("host to GPU", "host_to_device"),
    ("GPU to host", "device_to_host"),
    ("each way while both go on", "both_ways"),
    ("device memory copy", "device_memory"),
    ("host memory copy", "host_memory"),
    ("state directories read", "ssd_read"),
    ("state directories written", "ssd_write"),
    ("state directories half read half written", "ssd_mixed"),
    ("gradient norm", "gradient_norm"),
    ("checksum", "checksum"),
)
# A quiet machine repeats most figures within a tenth; a single repetition that was disturbed makes a quarter.
_UNSTEADY = 0.5


@contextmanager
def shown_progress() -> Iterator[OnProgress]:
    """A bar with the time left on a terminal, else one line a measurement."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield _LineProgress()
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.fields[left]}", markup=False))
    with Progress(*columns, console=console, transient=True) as progress:
        yield _BarProgress(progress)


def _left(progress: ProfileProgress) -> str:
    return "time left unknown yet" if progress.seconds_left is None else f"about {format_duration(progress.seconds_left)} left"


class _LineProgress:
    """Plain lines, as a log can hold them: one when a measurement begins, one for a note."""

    def __init__(self) -> None:
        self._what = ""

    def __call__(self, progress: ProfileProgress) -> None:
        if progress.note:
            print(progress.note, file=sys.stderr, flush=True)
        elif progress.what and progress.what != self._what:
            print(f"[{progress.fraction:4.0%}] {progress.what}, {_left(progress)}", file=sys.stderr, flush=True)
        self._what = progress.what


class _BarProgress:
    """One bar; notes stay above it."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._task = bars.add_task("", total=1.0, left="")

    def __call__(self, progress: ProfileProgress) -> None:
        if progress.note:
            self._bars.console.print(progress.note, markup=False)
        self._bars.update(self._task, description=progress.what, completed=progress.fraction, left=_left(progress), refresh=True)


def print_profile(profile: HardwareProfile, *, is_new: bool, models: Mapping[str, str] = MappingProxyType({})) -> None:
    """One row a figure, with how far its repetitions lie apart.

    Args:
        is_new: whether the machine was measured just now.
        models: names of models by their workload's digest; others are shown by that.
    """
    console = make_console()
    console.print(_machine_table(profile))
    if profile.blocks:
        console.print(_block_table(profile, models))
    figures = list(_figures(profile))
    missing = [name for name, figure, _ in figures if figure is None]
    if missing:
        console.print(f"Not measured: {', '.join(missing)}.", markup=False)
    unsteady = [name for name, figure, _ in figures if figure is not None and figure.spread > _UNSTEADY]
    if unsteady:
        told = f"Repetitions lie far apart in: {', '.join(unsteady)}."
        _print_plain(console, f"{told} Something else was at work; `--again` measures once it is done.")
    when = "just now" if is_new else profile.date
    _print_plain(console, f"Measured {when}, {'and kept' if is_new else '`--again` measures anew'}: {profile.fingerprint[:12]}.")


def _print_plain(console: Console, text: str) -> None:
    console.print(text, markup=False, soft_wrap=True)


def _figures(profile: HardwareProfile) -> Iterator[tuple[str, Measured | None, str]]:
    """Name, figure, and its median in words."""
    for name, field in _RATES:
        figure: Measured | None = getattr(profile, field)
        yield name, figure, "" if figure is None else f"{figure.value / 1e9:.3g} GB/s"
    matmul = profile.matmul_flops_per_second
    yield "matrix product", matmul, f"{matmul.value / 1e12:.3g} TFLOPS"
    for update in profile.updates:
        rate = update.elements_per_second
        yield f"AdamW on {update.form} states", rate, f"{format_count(round(rate.value))} parameters/s"
    commit = profile.commit_seconds
    yield "commit", commit, "" if commit is None else _seconds(commit)


def _machine_table(profile: HardwareProfile) -> Table:
    from rich.table import Table

    threads = f", {profile.updates[0].threads} CPU threads" if profile.updates else ""
    table = Table(title=f"{profile.device}{threads}", title_justify="left")
    table.add_column("what")
    for name in ("median", "spread", "repetitions"):
        table.add_column(name, justify="right")
    for name, figure, text in _figures(profile):
        if figure is not None:
            table.add_row(name, text, f"{figure.spread:.0%}", str(figure.repetitions))
    return table


def _block_table(profile: HardwareProfile, models: Mapping[str, str]) -> Table:
    from rich.table import Table

    table = Table(title="One block, its weights on the device", title_justify="left")
    for name in ("model", "kernels", "precision"):
        table.add_column(name)
    for name in ("rows", "tokens", "forward", "backward", "spread", "head and loss", "launching"):
        table.add_column(name, justify="right")
    for block in profile.blocks:
        head = block.head_seconds
        table.add_row(
            models.get(block.workload_digest, block.workload_digest[:12]),
            block.kernels,
            block.precision,
            str(block.rows),
            str(block.sequence_length),
            _seconds(block.forward_seconds),
            _seconds(block.backward_seconds),
            f"{max(block.forward_seconds.spread, block.backward_seconds.spread):.0%}",
            "-" if head is None else _seconds(head),
            " + ".join(_seconds(figure) for figure in (block.forward_launch_seconds, block.backward_launch_seconds) if figure) or "-",
        )
    return table


def _seconds(figure: Measured) -> str:
    return f"{figure.value:.3g} s" if figure.value >= 1 else f"{1e3 * figure.value:.3g} ms"
