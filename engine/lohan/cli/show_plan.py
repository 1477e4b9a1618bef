"""Prints a plan: a bar for each tier, what lies in it, and how long a step takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lohan.cli.show import make_console
from lohan.planning.tiers import Tier
from lohan.units import format_bytes, format_count, format_duration

if TYPE_CHECKING:
    from rich.console import Console

    from lohan.planning.forecast import Forecast
    from lohan.planning.plan import Plan, TierPlan

_TIER_NAMES = {Tier.GPU: "GPU memory", Tier.RAM: "RAM", Tier.SSD: "SSD"}
_TERM_NAMES = {
    "gpu": "device",
    "m2g": "host to device",
    "g2m": "device to host",
    "pcie": "both ways",
    "ssd": "drives",
    "host_memory": "host memory",
    "cpu": "optimizer",
    "launch": "launching",
}
"""By `lohan.planning.cost_model.Term`'s values."""
_CASES = {
    1: "transfers bind: nothing is swapped but what has to leave the device (case 1)",
    2: "the device binds: all is kept that there is room for (case 2)",
    3: "the shortest step keeps a part, and computes the rest again (case 3)",
}
_BAR_WIDTH = 48


def print_plan(plan: Plan) -> None:
    """Print the memory split, a table a tier, and the forecast where there is one."""
    console = make_console()
    console.print(
        f"{plan.model}: {format_count(plan.parameters)} parameters, {plan.precision} on {plan.device};"
        f" batch {plan.batch_size} (micro-batch {plan.micro_batch_size}), {plan.sequence_length} tokens a row",
        markup=False,
    )
    _print_bars(plan, console)
    for tier in plan.tiers:
        if tier.items:
            _print_tier(tier, console)
    if plan.forecast is not None:
        _print_forecast(plan.forecast, console)
    if plan.retention.operators:
        _print_retention(plan, console)
    written = format_bytes(plan.ssd_bytes_written_per_step)
    traffic = f"SSD traffic: {format_bytes(plan.ssd_bytes_per_step)} a step, {written} of it written."
    console.print(f"{traffic} Durability: {plan.durability}. Activations: {plan.policy}. Kernels: {plan.kernels}.", markup=False)
    for note in plan.notes:
        console.print(note, markup=False)


def _print_bars(plan: Plan, console: Console) -> None:
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    bars = Table.grid(padding=(0, 2))
    for tier in plan.tiers:
        if tier.capacity_bytes:
            bars.add_row(
                _TIER_NAMES[tier.tier],
                ProgressBar(total=tier.capacity_bytes, completed=tier.used_bytes, width=_BAR_WIDTH),
                f"{format_bytes(tier.used_bytes)} of {format_bytes(tier.capacity_bytes)}",
            )
    console.print(bars)


def _print_tier(tier: TierPlan, console: Console) -> None:
    from rich.table import Table

    table = Table(
        title=f"{_TIER_NAMES[tier.tier]}: {format_bytes(tier.used_bytes)} of {format_bytes(tier.capacity_bytes)}", title_justify="left"
    )
    table.add_column("what")
    table.add_column("bytes", justify="right")
    table.add_column("from")
    for item in tier.items:
        table.add_row(item.name, format_bytes(item.bytes), item.formula)
    console.print(table)


def _print_forecast(forecast: Forecast, console: Console) -> None:
    from rich.table import Table

    terms = [term for term in _TERM_NAMES if any(phase.resources.get(term) for phase in forecast.phases)]
    table = Table(title=f"A step: {_seconds(forecast.step_seconds)}", title_justify="left")
    table.add_column("phase")
    for name in ("takes", "waits for", *(_TERM_NAMES[term] for term in terms)):
        table.add_column(name, justify="right")
    for phase in forecast.phases:
        busy = [_seconds(phase.resources[term]) if term in phase.resources else "" for term in terms]
        table.add_row(phase.name, _seconds(phase.seconds), _TERM_NAMES[phase.binding] if phase.binding else "", *busy)
    console.print(table)
    console.print(
        f"{forecast.tokens_per_second:,.0f} tokens a second, {forecast.flops_per_second / 1e12:.3g} TFLOPS; it waits longest for:"
        f" {_TERM_NAMES[forecast.binding]}.",
        markup=False,
    )
    if forecast.case is not None:
        more = " More would be kept if there were more memory." if forecast.is_memory_bound else ""
        console.print(f"Activations: {_CASES[forecast.case]}.{more}", markup=False)
    _print_alternatives(forecast, console)


def _print_alternatives(forecast: Forecast, console: Console) -> None:
    from rich.table import Table

    table = Table(title="Alternatives tried", title_justify="left")
    for name in ("micro-batch", "kept units", "gradient buffers", "states in RAM", "a step"):
        table.add_column(name, justify="right")
    for alternative in forecast.alternatives:
        if alternative.seconds is None:
            table.add_row(str(alternative.micro_batch_size), "", "", "", alternative.reason)
            continue
        in_ram = format_bytes(alternative.ram_state_bytes)
        buffers, takes = alternative.gradient_buffers, _seconds(alternative.seconds)
        table.add_row(str(alternative.micro_batch_size), str(alternative.kept_units), buffers, in_ram, takes)
    console.print(table)
    if not forecast.settings:
        return
    table = Table(title="With other settings", title_justify="left")
    for name in ("setting", "value"):
        table.add_column(name)
    for name in ("a step", "SSD a step", "written a day"):
        table.add_column(name, justify="right")
    table.add_column("")
    for priced in forecast.settings:
        table.add_row(
            priced.setting,
            f"{priced.value} (taken)" if priced.is_taken else priced.value,
            _seconds(priced.seconds),
            format_bytes(priced.ssd_bytes_per_step),
            f"{priced.terabytes_written_per_day:.3g} TB",
            priced.note,
        )
    console.print(table)


def _print_retention(plan: Plan, console: Console) -> None:
    from rich.table import Table

    table = Table(title="Outputs kept from forward to backward, in blocks", title_justify="left")
    table.add_column("operator")
    for tier in Tier:
        table.add_column(_TIER_NAMES[tier], justify="right")
    for kept in plan.retention.operators:
        table.add_row(kept.label, *(str(len(blocks)) if blocks else "" for blocks in (kept.gpu_blocks, kept.ram_blocks, kept.ssd_blocks)))
    console.print(table)


def _seconds(seconds: float) -> str:
    """As precise as a forecast is."""
    return f"{seconds:.3g} s" if seconds < 100 else format_duration(seconds)
