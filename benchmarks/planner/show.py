"""Verdicts as tables and as a chart."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.chart import Panel, Series, svg
from benchmarks.planner.verdicts import Ablation, OfPeak, Prediction, Setting, Sweep, summary
from lohan.units import GIB, format_bytes

MEASURED, PREDICTED, CHOICE = "#0072B2", "#999999", "#D55E00"  # told apart by people who see few colours (Okabe and Ito)


def words(setting: Setting) -> str:
    shape, batch, sequence, tier = setting
    return f"{shape}, {batch} x {sequence}, states in {tier}"


def print_predictions(found: Sequence[Prediction], console: Console) -> None:
    if not found:
        return
    table = Table("setting", "forecast s", "measured s", "error", "GPU bytes", "host bytes", "binding", title="Forecasts and measurements")
    for one in found:
        gpu = "" if one.gpu_bytes_error is None else f"{one.gpu_bytes_error:+.1%}"
        seconds = (f"{one.predicted_seconds:.3f}", f"{one.measured_seconds:.3f}", f"{one.seconds_error:+.1%}")
        table.add_row(words(one.setting), *seconds, gpu, f"{one.host_bytes_error:+.1%}", one.binding)
    console.print(table)
    total = summary(found)
    gpu = f", GPU bytes {total['gpu_bytes_worst']:.1%}" if "gpu_bytes_worst" in total else ""
    console.print(
        f"{total['settings']:g} settings: step time off by {total['seconds_median']:.1%} in the median and {total['seconds_worst']:.1%} at "
        f"the worst; at the worst host bytes {total['host_bytes_worst']:.1%}{gpu}"
    )


def print_of_peak(found: Sequence[OfPeak], console: Console) -> None:
    if not found:
        return
    columns = ("setting", "kind of states", "largest norm", "clipped", "forecast s", "measured s", "of the block's peak")
    table = Table(*columns, title="Whole steps beside one block")
    for one in found:
        seconds = (f"{one.predicted_seconds:.3f}", f"{one.seconds:.3f}")
        table.add_row(words(one.setting), one.states, f"{one.max_norm:g}", f"{one.clip_rate:.0%}", *seconds, f"{one.fraction:.1%}")
    console.print(table)


def print_sweeps(found: Sequence[Sweep], console: Console) -> None:
    for sweep in found:
        table = Table("swapped", "measured s", "forecast s", title=f"Forced amounts: {words(sweep.setting)}")
        for size, seconds, predicted in zip(sweep.swapped_bytes, sweep.seconds, sweep.predicted_seconds, strict=True):
            table.add_row(format_bytes(size), f"{seconds:.3f}", f"{predicted:.3f}")
        table.add_row(f"chosen: {format_bytes(sweep.chosen_bytes)}", f"{sweep.chosen_seconds:.3f}", "")
        console.print(table)
        console.print(f"the planner's choice is {sweep.behind_best:.1%} behind the fastest")


def print_ablations(found: Sequence[Ablation], console: Console) -> None:
    for ablation in found:
        title = f"Policies: {words(ablation.setting)}, {format_bytes(ablation.ram_bytes)} of host memory for activations"
        table = Table("policy", "s/step", "", title=title)
        for policy, seconds in sorted(ablation.seconds.items(), key=lambda item: item[1]):
            table.add_row(policy, f"{seconds:.3f}", "")
        for policy, reason in ablation.refused.items():
            table.add_row(policy, "-", reason)
        console.print(table)
        if ablation.ahead is not None:
            console.print(f"holistic against the best other: {ablation.ahead:+.1%}")


def sweep_chart(found: Sequence[Sweep]) -> str:
    """A panel for each setting: measured, forecast, and the planner's choice as a point on its own."""
    panels = []
    for sweep in found:
        sizes = [size / GIB for size in sweep.swapped_bytes]
        chosen = sweep.chosen_bytes / GIB
        width = max(*sizes, chosen, 1e-3) / 100
        series = [
            Series("measured", sizes, sweep.seconds, MEASURED),
            Series("forecast", sizes, sweep.predicted_seconds, PREDICTED, "7 4"),
            Series("the planner's choice", [chosen - width, chosen + width], [sweep.chosen_seconds] * 2, CHOICE, ""),
        ]
        panels.append(Panel(words(sweep.setting), "activations that leave the GPU, GiB", "seconds a step", series))
    return svg(panels)
