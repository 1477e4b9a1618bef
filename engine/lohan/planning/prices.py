"""What a plan foresees of the chosen step, and what the same step would be with other settings. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from lohan.config import ClipUpdate, Durability, GradientBuffers
from lohan.errors import ConfigError
from lohan.hardware.profile import HardwareProfile
from lohan.planning.choice import Choice, Chooser
from lohan.planning.cost_model import PhaseSeconds
from lohan.planning.fit import Fit
from lohan.planning.footprint import ssd_bytes_read, ssd_bytes_written
from lohan.planning.forecast import Forecast, PhaseForecast, SettingForecast, SweepForecast
from lohan.planning.schedule import DRIVES_CLIP_RATE, UpdateOrder, can_speculate, speculated_order, update_order
from lohan.planning.search import Chosen
from lohan.planning.step_cost import StepSeconds
from lohan.units import format_bytes

_DAY_SECONDS = 86400
MOST_CLIP_RATE = 0.75
"""Of steps, beyond which none is speculated."""
_HALVINGS = 20
"""To find a rate to a millionth."""


def foresee(chosen: Chosen, chooser: Chooser, profile: HardwareProfile) -> Forecast:
    """What a plan says of the chosen step."""
    choice = chosen.choice
    fit, decision = choice.fit, choice.decision
    seconds = decision.seconds
    batch, length = fit.training.batch_size, fit.training.sequence_length
    spared = max(0, round(chosen.shortest.moved_bytes - choice.moved_bytes))
    return Forecast(
        step_seconds=seconds.total,
        phases=_phases(seconds),
        binding=seconds.binding.value,
        case=decision.case.value if decision.case is not None else None,
        is_memory_bound=decision.memory_bound,
        updated_share=min(1.0, max(0.0, seconds.updated_share)),
        tokens_per_second=batch * length / seconds.total,
        flops_per_second=3 * fit.workload.forward_flops(batch, length) / seconds.total,
        sweep=tuple(
            SweepForecast(
                gpu_bytes=round(point.amounts.gpu_bytes),
                ram_bytes=round(point.amounts.ram_bytes),
                ssd_bytes=round(point.amounts.ssd_bytes),
                seconds=point.seconds,
            )
            for point in decision.points
        ),
        alternatives=chosen.alternatives,
        settings=(*_durabilities(choice, chooser), *_clip_updates(choice, chooser), *_weighed(chosen)),
        shortest_seconds=chosen.shortest.seconds if spared else None,
        spared_bytes=spared,
        profile_date=profile.date,
    )


def first_clip_update(forecast: Forecast | None) -> ClipUpdate:
    """What clipped runs begin with, before they have seen how often they are."""
    for priced in forecast.settings if forecast is not None else ():
        if priced.setting == _CLIP_UPDATES and priced.is_taken:
            return ClipUpdate(priced.value)
    return ClipUpdate.DEFER


def written_per_day(fit: Fit, seconds: float, written_bytes: int) -> float:
    """Terabytes (10^12) written to the drives in a day of steps, snapshots counted: they write what of the states lies in RAM."""
    daily = _DAY_SECONDS / seconds * written_bytes
    if fit.engine.durability is Durability.SNAPSHOT:
        daily += _DAY_SECONDS / max(seconds, 60 * fit.engine.snapshot_minutes) * fit.placement.ram_bytes
    return daily / 1e12


_CLIP_UPDATES = "engine.clip_updates"


def _priced(choice: Choice, setting: str, value: str, seconds: float, *, is_taken: bool, note: str = "") -> SettingForecast:
    fit, on_drives = choice.fit, round(choice.decision.amounts.ssd_bytes)
    written = ssd_bytes_written(fit.placement) + on_drives
    return SettingForecast(
        setting=setting,
        value=value,
        seconds=seconds,
        is_taken=is_taken,
        ssd_bytes_per_step=ssd_bytes_read(fit.sizes, fit.placement, choice.kept_units) + on_drives + written,
        ssd_bytes_written_per_step=written,
        terabytes_written_per_day=written_per_day(fit, seconds, written),
        note=note,
    )


def _durabilities(choice: Choice, chooser: Chooser) -> Iterator[SettingForecast]:
    """All else as chosen."""
    resumes = {
        Durability.STEP: "resumes from every step",
        Durability.SNAPSHOT: f"loses up to {choice.fit.engine.snapshot_minutes:g} minutes",
        Durability.NONE: "starts again",
    }
    for durability, note in resumes.items():
        fit = choice.fit.with_engine(durability=durability)
        try:
            seconds = chooser.cost(fit, choice.micro_batch, choice.kept_units)(choice.decision.amounts).total
        except ConfigError:  # it writes to drives, which were not measured
            continue
        is_taken = durability is choice.fit.engine.durability
        yield _priced(replace(choice, fit=fit), "engine.durability", str(durability), seconds, is_taken=is_taken, note=note)


def _clip_updates(choice: Choice, chooser: Chooser) -> Iterator[SettingForecast]:
    """Deferred and speculated updates, where both are possible, at the clip rate that is expected."""
    engine, prices = choice.fit.engine, ClipPrices.of(choice, chooser)
    if prices is None:
        return
    expected = choice.fit.clip_rate
    deferred, hoped = prices.deferred, prices.speculated(expected)
    faster = ClipUpdate.SPECULATE if hoped < deferred else ClipUpdate.DEFER
    taken = faster if engine.clip_updates is ClipUpdate.AUTO else engine.clip_updates
    rate = prices.break_even_rate()
    note = f"with {expected:.0%} of the steps clipped; faster below {rate:.0%}" if rate else "slower at any rate"
    for value, seconds, said in ((ClipUpdate.DEFER, deferred, ""), (ClipUpdate.SPECULATE, hoped, note)):
        yield _priced(choice, _CLIP_UPDATES, str(value), seconds, is_taken=value is taken, note=said)


@dataclass(frozen=True)
class ClipPrices:
    """A step with deferred updates, and with speculated ones at any rate of clipped steps."""

    deferred: float
    speculated: Callable[[float], float]

    @classmethod
    def of(cls, choice: Choice, chooser: Chooser) -> ClipPrices | None:
        """All else as chosen; None where updates cannot be taken back, or wait for no norm."""
        fit, engine, clip = choice.fit, choice.fit.engine, choice.fit.training.clip
        if not can_speculate(engine.schedule, clip, engine.durability, has_spare=bool(fit.spare_bytes)):
            return None

        def seconds(order: UpdateOrder, redone_share: float) -> float:
            cost = chooser.cost(fit, choice.micro_batch, choice.kept_units, order=order, redone_share=redone_share)
            return cost(choice.decision.amounts).total

        order = speculated_order(engine.schedule)
        if not fit.spare_bytes:
            return cls(choice.seconds, lambda rate: seconds(order, rate))
        deferred = seconds(update_order(engine.schedule, clip, engine.gradient_buffers), 0.0)
        return cls(deferred, lambda rate: seconds(order, rate * fit.spare_share))

    def break_even_rate(self) -> float:
        """Up to which part of the steps may be clipped for speculation to be as fast; 0 where it never is."""
        low, high = 0.0, 1.0
        if self.speculated(high) <= self.deferred:
            return high
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.speculated(middle) <= self.deferred else (low, middle)
        return high if low else 0.0


def speculated_clip_rate(choice: Choice, chooser: Chooser) -> float:
    """Up to which part of the last steps may have been clipped for the next to be speculated.

    Where what is taken back was written to drives, `lohan.streaming.speculation` derives a quarter. In second places in RAM nothing is
    written twice: there the break-even rate of the forecast counts, and no more than three quarters, beyond which there is little to gain.
    """
    prices = ClipPrices.of(choice, chooser) if choice.fit.spare_bytes else None
    return DRIVES_CLIP_RATE if prices is None else min(MOST_CLIP_RATE, prices.break_even_rate())


def _weighed(chosen: Chosen) -> Iterator[SettingForecast]:
    """The best of the ways with the chosen micro-batch: with the least, the most, the fastest and the chosen states in RAM, and with either
    number of gradient buffers."""
    taken = chosen.choice
    by_ram: dict[int, Choice] = {}
    by_buffers: dict[GradientBuffers, Choice] = {}
    for way in (taken, *sorted(chosen.ways, key=lambda way: way.seconds)):
        by_ram.setdefault(way.fit.placement.ram_bytes, way)
        by_buffers.setdefault(way.fit.order.gradients, way)
    shown = {min(by_ram), max(by_ram), chosen.shortest.fit.placement.ram_bytes, taken.fit.placement.ram_bytes}
    if len(by_ram) > 1:
        for size in sorted(shown):
            way = by_ram[size]
            yield _priced(way, "engine.ram_state_bytes", format_bytes(size), way.seconds, is_taken=way is taken)
    if len(by_buffers) > 1:
        for buffers, way in by_buffers.items():
            yield _priced(way, "engine.gradient_buffers", str(buffers), way.seconds, is_taken=way is taken)


def _phases(seconds: StepSeconds) -> tuple[PhaseForecast, ...]:
    def phase(name: str, part: PhaseSeconds) -> PhaseForecast:
        resources = {term.value: value for term, value in part.seconds.items()}
        return PhaseForecast(name=name, seconds=part.total, resources=resources, binding=part.binding.value)

    exposed = PhaseForecast(name="updates", seconds=seconds.exposed_seconds)
    return (phase("forward", seconds.forward), phase("backward", seconds.backward), exposed)
