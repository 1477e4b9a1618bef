"""What a plan says of itself in sentences."""

from __future__ import annotations

from lohan.config import Clip, ClipUpdate, Durability, EngineSection, TrainingSection, UnitGrain
from lohan.planning.fit import Fit
from lohan.planning.footprint import Placement, slot_sizes
from lohan.planning.forecast import Forecast
from lohan.planning.schedule import can_speculate
from lohan.units import format_bytes

_SECONDS_PER_STEP = 10  # an example, where there is no forecast of the time


def plan_notes(
    fit: Fit, micro_batch: int, kept_units: int, *, grain_asked: UnitGrain, forecast: Forecast | None, written_bytes: int
) -> list[str]:
    """All that is worth knowing beside the figures.

    Args:
        written_bytes: to the drives, by every step.
    """
    return [
        _micro_batch_note(fit, micro_batch, forecast),
        *_grain_notes(grain_asked, fit.grain),
        *_kept_notes(fit, kept_units),
        *_spared_notes(forecast),
        *_state_notes(fit.placement, written_bytes, forecast),
        *_resume_notes(fit.placement, fit.training, fit.engine),
        *_update_notes(fit.training, fit.engine, fit.spare_bytes),
    ]


def _micro_batch_note(fit: Fit, micro_batch: int, forecast: Forecast | None) -> str:
    if fit.engine.micro_batch_size is not None:
        return f"A micro-batch of {micro_batch} was asked for."
    if micro_batch == fit.training.batch_size:
        return "The whole batch runs through a block at once."
    return f"A micro-batch of {micro_batch} is the {'fastest' if forecast is not None else 'largest that fits'}."


def _grain_notes(asked: UnitGrain, grain: UnitGrain) -> list[str]:
    if grain is UnitGrain.BLOCK:
        return []
    why = "as was asked for" if asked is UnitGrain.MODULE else "since whole blocks do not fit"
    return [f"Attention and MLP of each block move one by one, {why}."]


def _kept_notes(fit: Fit, kept_units: int) -> list[str]:
    if not kept_units:
        return []
    sizes = fit.sizes
    size = format_bytes(slot_sizes(sizes, kept_units).kept_elements * sizes.itemsize)
    return [f"The weights of {kept_units} of {len(sizes.units)} units ({size}) stay on the GPU from forward to backward."]


def _spared_notes(forecast: Forecast | None) -> list[str]:
    if forecast is None or not forecast.spared_bytes or not forecast.shortest_seconds:
        return []
    gain = forecast.step_seconds / forecast.shortest_seconds - 1
    return [f"{format_bytes(forecast.spared_bytes)} a step is not moved that would make it {gain:.1%} shorter."]


def _state_notes(placement: Placement, written_bytes: int, forecast: Forecast | None) -> list[str]:
    notes, form = [], placement.form
    if written_bytes:
        seconds = forecast.step_seconds if forecast is not None else _SECONDS_PER_STEP
        daily = 86400 / seconds * written_bytes / 1e12
        pace = f"{seconds:.3g} seconds" if forecast is not None else f"a step every {_SECONDS_PER_STEP} seconds"
        notes.append(
            f"A step writes {format_bytes(written_bytes)} to the drives: {daily:.2g} TB a day at {pace}{' a step' if forecast else ''}."
            " Compare that with what the drives are rated for."
        )
    if form.is_split:
        notes.append("The device computes with the bf16 halves of the master weights; the remainders keep all 32 bits of them.")
    if form.has_8bit_moments:
        notes.append("Moments are kept in 8 bits: the updates are close to AdamW's, not equal.")
    return notes


def _resume_notes(placement: Placement, training: TrainingSection, engine: EngineSection) -> list[str]:
    """What snapshots cost and keep, and the space that named ones take besides."""
    notes = []
    if engine.durability is Durability.SNAPSHOT:
        of_ram = f", which writes another {format_bytes(placement.ram_bytes)} of states in RAM" if placement.ram_bytes else ""
        notes.append(
            f"A snapshot is made every {engine.snapshot_minutes:g} minutes and when the run stops{of_ram}:"
            " a run that is killed loses what it did since the last one."
        )
    if training.keep_steps:
        notes.append(
            f"{len(training.keep_steps)} named snapshots take {format_bytes(placement.total_bytes)} each, which is not counted here;"
            " there must be room when one is made, else the run goes on without it."
        )
    return notes


def _update_notes(training: TrainingSection, engine: EngineSection, spare_bytes: int) -> list[str]:
    largest = f"{training.max_gradient_norm:g}"
    match training.clip:
        case Clip.GLOBAL:
            begin = "updates begin after the backward"
            if can_speculate(engine.schedule, training.clip, engine.durability, has_spare=bool(spare_bytes)):
                begin = {
                    ClipUpdate.AUTO: f"{begin}, or before it ends while few steps are clipped",
                    ClipUpdate.DEFER: begin,
                    ClipUpdate.SPECULATE: "updates begin as gradients arrive, and are done again where a step is clipped",
                }[engine.clip_updates]
            place = f"; {format_bytes(spare_bytes)} of host memory hold their second places" if spare_bytes else ""
            return [f"Gradients are clipped to a common norm of {largest}: {begin}{place}."]
        case Clip.PER_UNIT:
            return [f"Each unit's gradients are clipped to a norm of {largest} by itself."]
        case Clip.NONE:
            return []
