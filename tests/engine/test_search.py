"""The joint choice: what is left out changes nothing, and of steps alike the one that moves least is taken."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lohan.config import EngineSection, TrainingSection
from lohan.errors import CapacityError
from lohan.hardware.profile import HardwareProfile
from lohan.planning.choice import Choice, Chooser
from lohan.planning.fit import Fit, choose_gpu
from lohan.planning.plan import Plan
from lohan.planning.schedule import EXPECTED_CLIP_RATE
from lohan.planning.search import MARGIN, SHORTER, Search, ram_sizes
from lohan.planning.tiers import Tier
from lohan.units import GIB
from tests.engine.test_forecast import LENGTH, plan, profile, workload
from tests.engine.test_planner import items, machine


def fit_of(*, gpu_gib: float, ram_gib: float, batch: int, **engine) -> Fit:
    hardware, section = machine(gpu_gib=gpu_gib, ram_gib=ram_gib), EngineSection(kernels="torch", **engine)  # what `profile` measured
    training = TrainingSection(batch_size=batch, sequence_length=LENGTH)
    return Fit(workload(), training, section, hardware, choose_gpu(section, hardware))


def exhaustive(fit: Fit, rates: HardwareProfile, micro_batches: list[int]) -> Choice:
    """Every way counted out, by the rules that the search states."""
    chooser = Chooser(fit, rates, fit.engine.policy)
    search = Search(fit, chooser)
    best: Choice | None = None
    ways: list[Choice] = []
    for micro_batch in micro_batches:
        found = []
        for way, kept_units in search.ways(micro_batch):
            try:
                choice = chooser.decide(way, micro_batch, kept_units)
            except CapacityError:
                continue
            assert choice is not None
            found.append(choice)
        shortest = min(found, key=lambda choice: choice.seconds, default=None)
        if shortest is not None and (best is None or shortest.seconds < best.seconds * SHORTER):
            best, ways = shortest, found
    assert best is not None
    longest = best.seconds * MARGIN
    lean = [chooser.decide(way.fit, way.micro_batch, way.kept_units, longest_seconds=longest) for way in ways if way.seconds <= longest]
    return min((choice for choice in (best, *lean) if choice is not None), key=lambda choice: (choice.moved_bytes, choice.seconds))


drives = st.sampled_from([(20e9, 12e9, 14e9), (3e9, 1.5e9, 2e9), (400e9, 400e9, 400e9)])
links = st.sampled_from([(25e9, 20e9), (3e9, 2e9), (200e9, 150e9)])


@settings(max_examples=15, deadline=None)
@given(
    gpu_gib=st.sampled_from([8, 12, 24, 48]),
    ram_gib=st.sampled_from([16, 32, 64, 96, 256]),
    batch=st.sampled_from([2, 16, 48]),
    durability=st.sampled_from(["none", "step", "snapshot"]),
    drives=drives,
    links=links,
)
def test_what_is_left_out_changes_nothing(gpu_gib, ram_gib, batch, durability, drives, links):
    rates = profile(
        **dict(zip(("ssd_read", "ssd_write", "ssd_mixed"), drives, strict=True)),
        host_to_device=links[0],
        device_to_host=links[0],
        both_ways=links[1],
        host_memory=4 * links[0],
    )
    fit = fit_of(gpu_gib=gpu_gib, ram_gib=ram_gib, batch=batch, durability=durability)
    sizes = [size for size in (16, 8, 4, 2, 1) if size <= batch]
    chooser = Chooser(fit, rates, fit.engine.policy)
    try:
        chosen = Search(fit, chooser).choose(sizes)
    except CapacityError:
        return  # no way at all: the exhaustive search has none either
    assert chosen is not None
    expected = exhaustive(fit, rates, sizes)
    assert chosen.choice.micro_batch == expected.micro_batch
    assert (chosen.choice.moved_bytes, chosen.choice.seconds) == (expected.moved_bytes, expected.seconds)


@pytest.mark.parametrize("ram_gib", [32, 96, 160])
def test_host_memory_is_divided_by_what_it_saves(ram_gib):
    """Between states and activations: neither extreme is shorter."""
    free = plan(ram_gib=ram_gib, durability="none")
    held = items(free, Tier.RAM).get("model states", 0)
    assert free.tier(Tier.RAM).used_bytes <= free.tier(Tier.RAM).capacity_bytes
    for fixed in (0, held // 2, min(2 * held, 12 * workload().parameters)):
        try:
            other = plan(ram_gib=ram_gib, durability="none", ram_state_bytes=fixed)
        except CapacityError:
            continue
        assert free.forecast.shortest_seconds or free.forecast.step_seconds
        assert free.forecast.step_seconds <= other.forecast.step_seconds * MARGIN / SHORTER


def test_slow_drives_put_states_in_ram_and_none_are_put_where_it_is_forbidden():
    slow = profile(ssd_read=2e9, ssd_write=1e9, ssd_mixed=1.5e9)
    states = 12 * workload().parameters
    chosen = plan(rates=slow, ram_gib=256)
    assert items(chosen, Tier.RAM)["model states"] == states
    assert chosen.ssd_bytes_per_step == 0
    assert plan(rates=slow, ram_gib=256, ram_state_bytes=0).ssd_bytes_per_step > 2 * states


def test_what_gains_less_than_a_hundredth_is_not_moved():
    """Taken, never slower than the shortest by more than the margin; and it says what it saved."""
    spared = 0
    for gpu_gib, ram_gib, link in ((24, 160, 25e9), (24, 256, 25e9), (16, 128, 12e9), (24, 256, 50e9)):
        result = plan(gpu_gib=gpu_gib, ram_gib=ram_gib, rates=profile(host_to_device=link, device_to_host=link, both_ways=0.8 * link))
        foreseen = result.forecast
        if foreseen.spared_bytes:
            assert foreseen.step_seconds <= foreseen.shortest_seconds * MARGIN
            assert any("is not moved" in note for note in result.notes)
        spared = max(spared, foreseen.spared_bytes)
    assert spared > GIB


def settings_of(result: Plan, name: str) -> dict:
    return {priced.value: priced for priced in result.forecast.settings if priced.setting == name}


@pytest.mark.parametrize("durability", ["none", "step", "snapshot"])
def test_every_durability_is_priced(durability):
    half = 6 * workload().parameters
    result = plan(durability=durability, ram_state_bytes=half, ram_gib=160, snapshot_minutes=5)
    priced = settings_of(result, "engine.durability")
    assert priced.keys() == {"none", "step", "snapshot"}
    assert [value for value, row in priced.items() if row.is_taken] == [durability]
    assert priced[durability].seconds == pytest.approx(result.forecast.step_seconds)
    assert priced[durability].ssd_bytes_written_per_step == result.ssd_bytes_written_per_step
    assert priced[durability].ssd_bytes_per_step == pytest.approx(result.ssd_bytes_per_step, abs=10)
    assert priced["none"].seconds <= priced["snapshot"].seconds <= priced["step"].seconds
    assert priced["step"].ssd_bytes_written_per_step == pytest.approx(priced["none"].ssd_bytes_written_per_step + half, abs=10)
    snapshots = 86400 / 300 * half / 1e12
    every_step = 86400 / priced["snapshot"].seconds * priced["snapshot"].ssd_bytes_written_per_step / 1e12
    assert priced["snapshot"].terabytes_written_per_day == pytest.approx(every_step + snapshots)


def clipped(**engine) -> Plan:
    from tests.engine.test_planner import plan_of

    return plan_of(
        workload(),
        hardware=machine(gpu_gib=24, ram_gib=256),
        engine=EngineSection(**({"durability": "step"} | engine)),
        batch_size=32,
        sequence_length=LENGTH,
        profile=profile(),
        clip="global",
    )


def test_deferred_and_speculated_updates_are_priced_at_the_expected_clip_rate():
    result = clipped()
    priced = settings_of(result, "engine.clip_updates")
    assert priced.keys() == {"defer", "speculate"}
    faster = min(priced.values(), key=lambda row: row.seconds)
    assert result.clip_updates == faster.value
    assert faster.is_taken
    assert f"{EXPECTED_CLIP_RATE:.0%} of the steps" in priced["speculate"].note or "slower" in priced["speculate"].note
    assert clipped(clip_updates="speculate").clip_updates == "speculate"
    assert clipped(clip_updates="defer").clip_updates == "defer"
    assert not settings_of(clipped(durability="none"), "engine.clip_updates"), "the forward hides them all"
    assert clipped(durability="none").clip_updates == "defer"


def test_parts_of_ram_are_a_few_and_end_at_what_is_asked_for():
    fit = fit_of(gpu_gib=24, ram_gib=64, batch=8)
    sizes = ram_sizes(fit, 1)
    assert sizes == sorted(sizes, reverse=True)
    assert (len(sizes), sizes[-1]) == (5, 0)
    asked = fit_of(gpu_gib=24, ram_gib=64, batch=8, ram_state_bytes=7 * GIB)
    assert ram_sizes(asked, 1) == [7 * GIB]
