"""A plan's forecast in words and rows: how long a step and the run take, what they wait for, what is kept, what else was tried."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from pydantic import ValidationError

from lohan.config import TrainingSection
from lohan.planning.forecast import Forecast
from lohan.planning.kept_footprint import KEPT
from lohan.planning.retention import BlockTiers, Retention
from lohan.planning.tiers import Tier
from lohan.units import format_bytes
from lohan_app.templating import MISSING, format_seconds

TERM_NAMES = {
    "gpu": "{device}",
    "m2g": "RAM to {device}",
    "g2m": "{device} to RAM",
    "pcie": "Both ways",
    "ssd": "Drives",
    "host_memory": "RAM traffic",
    "cpu": "Optimizer",
    "launch": "Launching kernels",
}
"""By `lohan.planning.cost_model.Term`'s values, in the order in which pages list them; `device` is the GPU or the CPU."""
CPU_TERM_NAMES = TERM_NAMES | {"gpu": "CPU", "cpu": "CPU, with updates"}
"""Where the CPU is the device, its cores do the updates too."""
PHASE_NAMES = {"forward": "Forward", "backward": "Backward", "updates": "Updates after"}
CASES = {
    1: "Transfers bind: nothing leaves the {device} but what has to (case 1).",
    2: "The {device} binds: all is kept that there is room for (case 2).",
    3: "The shortest step keeps a part and computes the rest again (case 3).",
}
"""Of the paper's Algorithm 1."""
SWEEP_ROWS = 12
SETTING_NAMES = {
    "engine.durability": "Durability",
    "engine.clip_updates": "Clipped updates",
    "engine.ram_state_bytes": "States in RAM",
    "engine.gradient_buffers": "Gradient buffers",
}


def count_steps(training: TrainingSection, rows: int) -> int | None:
    """Steps of a run over so many rows, as `lohan.data.pack.BatchSampler.steps` counts them; None where there are no rows."""
    if training.max_steps:
        return training.max_steps
    return max(1, -(-round(training.epochs * rows) // training.batch_size)) if rows else None


def forecast_fields(plan: Mapping[str, Any] | None, total_steps: int | None, *, corrected_seconds: float | None = None) -> dict[str, Any]:
    """What pages show of a plan's time.

    Args:
        plan: as JSON; those that were stored by an earlier version have no forecast, or a form of it that is not known here.
        total_steps: of the run, where they are known.
        corrected_seconds: what a step is foreseen to take since the first ones were measured; the plan's parts stay as they were foreseen.
    """
    forecast = _forecast(plan or {})
    if plan is None or forecast is None:
        return {"forecast": None, "why_no_forecast": _why_none(plan or {}), "plan_notes": _other_notes(plan or {})}
    on_cpu = str(plan.get("device", "")).startswith("cpu")
    device = "CPU" if on_cpu else "GPU"
    names = {term: name.format(device=device) for term, name in (CPU_TERM_NAMES if on_cpu else TERM_NAMES).items()}
    terms = [term for term in TERM_NAMES if any(phase.resources.get(term) for phase in forecast.phases)]
    more = " More would be kept if there were more memory." if forecast.is_memory_bound else ""
    seconds = corrected_seconds or forecast.step_seconds
    ratio = forecast.step_seconds / seconds if seconds else 1.0
    shown = {
        "step_seconds": seconds,
        "speed_text": f"{_figure(forecast.tokens_per_second * ratio)} tokens/s",
        "flops_text": _flops(forecast.flops_per_second * ratio),
        "total_seconds": total_steps * seconds if total_steps else None,
        "total_steps": total_steps,
        "binding": names.get(forecast.binding, forecast.binding),
        "updated_share": forecast.updated_share,
        "case": f"{CASES.get(forecast.case, '').format(device=device)}{more}" if forecast.case is not None else "",
        "phases": [{"name": PHASE_NAMES.get(phase.name, phase.name), "seconds": phase.seconds} for phase in forecast.phases],
        "resources": [
            {
                "name": names[term],
                "phases": [{"seconds": phase.resources.get(term), "is_binding": phase.binding == term} for phase in forecast.phases],
            }
            for term in terms
        ],
        "kept": _kept(plan, on_cpu=on_cpu),
        "operators": _operators(plan, on_cpu=on_cpu),
        "alternatives": [
            alternative.model_dump()
            | {"is_taken": (alternative.micro_batch_size, alternative.kept_units) == (plan.get("micro_batch_size"), plan.get("kept_units"))}
            for alternative in forecast.alternatives
        ],
        "settings": [priced.model_dump() | {"name": SETTING_NAMES.get(priced.setting, priced.setting)} for priced in forecast.settings],
        "stays_in": "Kept in RAM" if on_cpu else "Kept on GPU",
        "sweep": _sweep(forecast),
        "measured_at": _moment(forecast.profile_date),
    }
    return {"forecast": shown, "why_no_forecast": "", "plan_notes": list(plan.get("notes", ()))}


def forecast_history(
    plan: Mapping[str, Any] | None, started: Mapping[str, Any] | None, corrected_seconds: float | None
) -> list[tuple[str, float]]:
    """What a step was foreseen to take, when: as planned, as the run began, and since its first steps; those that are known."""
    known = [("Planned", _forecast(plan or {})), ("At the start", _forecast(started or {}))]
    told = [(label, found.step_seconds) for label, found in known if found is not None]
    return told + ([("Corrected by the first steps", corrected_seconds)] if corrected_seconds is not None else [])


def plan_changes(plan: Mapping[str, Any] | None, started: Mapping[str, Any] | None) -> list[tuple[str, str, str]]:
    """What is different in the plan that a run began with: what, as it was queued, as it began."""
    if not plan or not started:
        return []
    before, after = _telling(plan), _telling(started)
    return [(name, before.get(name, MISSING), after.get(name, MISSING)) for name in before | after if before.get(name) != after.get(name)]


def _telling(plan: Mapping[str, Any]) -> dict[str, str]:
    """The decisions of a plan, in words. Its device is none: which of the suitable ones is free is known at the start alone."""
    told = {
        "Rows at once": str(plan.get("micro_batch_size", "")),
        "Blocks move": {"block": "whole", "module": "module by module"}.get(str(plan.get("grain")), str(plan.get("grain", ""))),
        "Parameter slots": str(plan.get("slots", "")),
        "Units kept on the device": str(plan.get("kept_units", "")),
        "Gradient buffers": str(plan.get("gradient_buffers", "")),
        "States in RAM, at most": format_bytes(int(plan.get("ram_state_bytes", 0))),
        "Kernels": str(plan.get("kernels", "")),
    }
    names = {Tier.GPU: "GPU memory", Tier.RAM: "RAM", Tier.SSD: "SSD"}
    for tier in plan.get("tiers", ()):
        told[names[Tier(tier["tier"])]] = format_bytes(sum(item["bytes"] for item in tier["items"]))
    forecast = _forecast(plan)
    return told | ({} if forecast is None else {"A step, about": format_seconds(forecast.step_seconds)})


def _forecast(plan: Mapping[str, Any]) -> Forecast | None:
    try:
        return Forecast.model_validate(plan["forecast"]) if plan.get("forecast") else None
    except ValidationError:
        return None


def _is_about_time(note: str) -> bool:
    return "forecast of the time" in note


def _why_none(plan: Mapping[str, Any]) -> str:
    """The plan's own reason where it has another than that nothing was measured."""
    reasons = [note for note in plan.get("notes", ()) if _is_about_time(note) and "was not measured" not in note]
    return reasons[0] if reasons else ""


def _other_notes(plan: Mapping[str, Any]) -> list[str]:
    return [note for note in plan.get("notes", ()) if not _is_about_time(note)]


def _flops(flops_per_second: float) -> str:
    """Empty for a model whose operators are unknown."""
    if not flops_per_second:
        return ""
    scale, unit = (1e12, "TFLOPS") if flops_per_second >= 1e12 else (1e9, "GFLOPS")
    return f"{_figure(flops_per_second / scale)} {unit}"


def _figure(value: float) -> str:
    """As precise as a forecast is, with thousands separated."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _tier_names(on_cpu: bool) -> dict[Tier, str]:
    """What stays on the CPU's device lies in RAM."""
    return {Tier.GPU: "RAM" if on_cpu else "GPU", Tier.RAM: "RAM", Tier.SSD: "SSD"}


def _kept(plan: Mapping[str, Any], *, on_cpu: bool) -> str:
    """One line: how much is kept from forward to backward, by tier."""
    names = _tier_names(on_cpu)
    kept = {
        names[Tier(tier["tier"])]: sum(item["bytes"] for item in tier["items"] if item["name"] == KEPT) for tier in plan.get("tiers", ())
    }
    places = {"GPU": "on the GPU", "RAM": "in RAM", "SSD": "on SSD"}
    parts = [f"{format_bytes(size)} {places[name]}" for name, size in kept.items() if size]
    if not parts:
        return "No outputs of operators are kept: the backward computes them again."
    return f"Kept from forward to backward: {', '.join(parts)}."


def _operators(plan: Mapping[str, Any], *, on_cpu: bool) -> dict[str, Any] | None:
    """In how many blocks each operator's outputs are kept, and where; columns are tiers that hold some."""
    try:
        retention = Retention.model_validate(plan.get("retention") or {})
    except ValidationError:
        return None
    rows: list[tuple[str, BlockTiers]] = [(kept.label, kept) for kept in retention.operators]
    if retention.boundaries.ram_blocks or retention.boundaries.ssd_blocks:
        rows.append(("inputs of blocks", retention.boundaries))
    counts = [(label, (len(kept.gpu_blocks), len(kept.ram_blocks), len(kept.ssd_blocks))) for label, kept in rows]
    used = [index for index in range(len(Tier)) if any(found[index] for _, found in counts)]
    if not used:
        return None
    names = list(_tier_names(on_cpu).values())
    return {"tiers": [names[index] for index in used], "rows": [(label, [found[index] for index in used]) for label, found in counts]}


def _sweep(forecast: Forecast) -> list[dict[str, Any]]:
    """The sweep, thinned to what a table can hold; the shortest step and both ends stay."""
    points = forecast.sweep
    shortest = min(range(len(points)), key=lambda index: points[index].seconds, default=0)
    stride = max(1, -(-len(points) // SWEEP_ROWS))
    shown = sorted({*range(0, len(points), stride), shortest, len(points) - 1} if points else ())
    return [points[index].model_dump() | {"is_shortest": index == shortest} for index in shown]


def _moment(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None
