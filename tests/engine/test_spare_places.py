"""Second places of states in RAM: which units have them, what the store does with them, and what plans make of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lohan.config import Durability, EngineSection, TrainingSection
from lohan.errors import EngineError
from lohan.hardware.profile import HardwareProfile
from lohan.planning import correction
from lohan.planning.correction import Factors, MeasuredStep, Running, correct
from lohan.planning.footprint import RAM_STATES, SPARE_STATES
from lohan.planning.plan import Plan
from lohan.planning.ram_states import units_with_spare
from lohan.planning.schedule import DRIVES_CLIP_RATE, EXPECTED_CLIP_RATE
from lohan.planning.tiers import Tier
from lohan.states.streams import streams_of
from lohan.training.plan_run import PlannedRun
from lohan.units import GIB
from tests.engine.state_files import change, contents, make_layouts, opened
from tests.engine.test_forecast import LENGTH, profile, workload
from tests.engine.test_planner import items, machine, plan_of

EVERYTHING = 1 << 30


@given(sizes=st.lists(st.one_of(st.none(), st.integers(1, 1000)), max_size=40), share=st.floats(0, 1.2))
def test_units_have_second_places_from_both_ends_on_within_the_budget(sizes, share):
    budget = int(share * sum(size or 0 for size in sizes))
    taken = units_with_spare(sizes, budget)
    held = sum(sizes[unit] for unit in taken)
    assert held <= budget
    assert all(sizes[unit] is not None for unit in taken)
    last = len(sizes) - 1

    def comes_before(other, unit):
        mine, others = min(unit, last - unit), min(other, last - other)
        return others < mine or (others == mine and other > unit)

    for unit, size in enumerate(sizes):
        if size is not None and unit not in taken:
            assert size > budget - sum(sizes[other] for other in taken if comes_before(other, unit))


def test_units_without_second_places_lie_in_the_middle():
    assert units_with_spare([1] * 7, 4) == {6, 0, 5, 1}
    assert units_with_spare([1] * 7, 1) == {6}
    assert units_with_spare([1] * 7, 9) == set(range(7))


# ---------------------------------------------------------------- the store
def _change_in_second_places(states, step: int) -> None:
    for layout in make_layouts():
        for chunk in (chunk for chunk in layout.chunks if chunk.trainable):
            spare = states.spare(layout, chunk)
            assert spare is not None
            for stream in streams_of(chunk, states.form):
                spare[stream].view(torch.uint8).fill_(step + 7 * chunk.index)
                states.write(layout, chunk, stream, spare[stream]).wait()


@pytest.mark.parametrize("durability", [Durability.NONE, Durability.SNAPSHOT])
def test_what_went_to_second_places_is_taken_back_until_the_next_step_begins(durability, tmp_path):
    with opened([tmp_path], durability=durability, ram_bytes=EVERYTHING, spare_bytes=EVERYTHING) as states:
        states.begin_step(1)
        before = contents(states)
        _change_in_second_places(states, 1)
        assert any(not now.equal(before[part]) for part, now in contents(states).items())
        states.rollback()
        assert all(now.equal(before[part]) for part, now in contents(states).items())
        change(states, 1, in_place=True)  # done again
        first = contents(states)
        states.begin_step(2)
        _change_in_second_places(states, 2)
        states.rollback()
        assert all(now.equal(first[part]) for part, now in contents(states).items()), "only the open step's"
        _change_in_second_places(states, 3)
        second = contents(states)
        states.commit(2, {})
        states.begin_step(3)
        states.rollback()
        assert all(now.equal(second[part]) for part, now in contents(states).items()), "nothing was written yet"


def test_a_snapshot_holds_what_lies_in_second_places(tmp_path):
    with opened([tmp_path], durability=Durability.SNAPSHOT, ram_bytes=EVERYTHING, spare_bytes=EVERYTHING) as states:
        states.begin_step(1)
        _change_in_second_places(states, 1)
        states.commit(1, {})
        committed = contents(states)
        states.begin_step(2)
        _change_in_second_places(states, 2)
    with opened([tmp_path], durability=Durability.SNAPSHOT, resume=True) as states:
        assert all(now.equal(committed[part]) for part, now in contents(states).items())


def test_without_second_places_there_is_nothing_to_go_back_to(tmp_path):
    with opened([tmp_path], durability=Durability.NONE, ram_bytes=EVERYTHING) as states:
        assert not states.units_with_spare
        states.begin_step(1)
        with pytest.raises(EngineError, match="there is no step to go back to"):
            states.rollback()


@pytest.mark.parametrize(("durability", "ram_bytes"), [(Durability.STEP, EVERYTHING), (Durability.NONE, 0)])
def test_states_that_are_committed_or_on_drives_have_none(durability, ram_bytes, tmp_path):
    with opened([tmp_path], durability=durability, ram_bytes=ram_bytes, spare_bytes=EVERYTHING) as states:
        assert not states.units_with_spare
        assert all(states.spare(layout, chunk) is None for layout in make_layouts() for chunk in layout.chunks)


# ---------------------------------------------------------------- plans
def _plan(*, ram_gib: float = 512, batch: int = 8, rates: HardwareProfile | None = None, **engine: object) -> Plan:
    return plan_of(
        workload(),
        hardware=machine(gpu_gib=24, ram_gib=ram_gib),
        engine=EngineSection(**{"durability": "none", **engine}),
        batch_size=batch,
        sequence_length=LENGTH,
        profile=rates or profile(),
        clip="global",
    )


def test_a_plan_takes_second_places_where_updates_are_longer_than_a_forward():
    result = _plan()
    states = items(result, Tier.RAM)[RAM_STATES]
    assert states <= result.spare_state_bytes == items(result, Tier.RAM)[SPARE_STATES] <= result.ram_state_bytes
    assert result.tier(Tier.RAM).used_bytes <= result.tier(Tier.RAM).capacity_bytes
    assert (result.clip_updates, result.gradient_buffers) == ("speculate", "all")
    assert any("before it ends while few steps are clipped; " in note and "second places" in note for note in result.notes)
    priced = {row.value: row for row in result.forecast.settings if row.setting == "engine.clip_updates"}
    assert priced["speculate"].is_taken
    assert priced["speculate"].seconds == pytest.approx(result.forecast.step_seconds)
    assert priced["speculate"].seconds < priced["defer"].seconds
    assert result.forecast.updated_share > 0
    assert EXPECTED_CLIP_RATE <= result.speculated_clip_rate <= 0.75


def test_where_host_memory_has_little_left_some_units_have_them():
    plans = [_plan(host_memory_bytes=size * GIB) for size in (60, 72, 500)]
    assert 0 < plans[0].spare_state_bytes < plans[1].spare_state_bytes < plans[2].spare_state_bytes
    assert all(one.tier(Tier.RAM).used_bytes <= one.tier(Tier.RAM).capacity_bytes for one in plans)
    seconds = [one.forecast.step_seconds for one in plans]
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.parametrize(
    "engine",
    [{"clip_updates": "defer"}, {"durability": "step"}, {"schedule": "serial"}, {"ram_state_bytes": 8 * GIB}],
    ids=["deferred", "committed", "serial", "not all in RAM"],
)
def test_no_second_places_without_use(engine):
    result = _plan(**engine)
    assert result.spare_state_bytes == 0
    assert SPARE_STATES not in items(result, Tier.RAM)
    assert result.speculated_clip_rate == DRIVES_CLIP_RATE


def test_a_forward_that_hides_all_updates_needs_none():
    assert _plan(batch=48).spare_state_bytes == 0
    assert _plan(batch=48, clip_updates="speculate").spare_state_bytes > 0, "it was asked for"


def test_drives_that_were_not_measured_leave_a_forecast_of_states_in_ram():
    unmeasured = profile(ssd_read=None, ssd_write=None, ssd_mixed=None)
    result = _plan(rates=unmeasured, ram_state_bytes=10**12)
    assert result.forecast.step_seconds == pytest.approx(_plan(ram_state_bytes=10**12).forecast.step_seconds)
    assert not [item for item in result.tier(Tier.SSD).items if "activation" in item.name]
    durabilities = {row.value for row in result.forecast.settings if row.setting == "engine.durability"}
    assert "none" in durabilities
    assert "step" not in durabilities, "what it writes to drives has no price"


def test_steps_are_held_against_what_clipped_and_other_ones_take():
    result = _plan(batch=4)
    training = TrainingSection(batch_size=4, sequence_length=LENGTH, clip="global")
    planned = PlannedRun(result, workload(), training, EngineSection(durability="none"), machine(gpu_gib=24, ram_gib=512), profile())
    run = planned.running
    assert run.decision.total == pytest.approx(result.forecast.step_seconds)
    other, clipped = (run.of(MeasuredStep(2, 4, LENGTH, 1.0, clipped)).decision.total for clipped in (False, True))
    assert other < result.forecast.step_seconds < clipped
    steps = [MeasuredStep(2 + number, 4, LENGTH, other, clipped=False) for number in range(3)]
    assert correct(run, steps, []) is None, "unclipped steps took what such steps take"
    slow = [MeasuredStep(2 + number, 4, LENGTH, 1.5 * clipped, clipped=True) for number in range(3)]
    found = correct(run, slow, [])
    assert found.ratio == pytest.approx(1.5)
    often = replace(run, fit=replace(run.fit, clip_rate=0.8)).decision.total
    assert found.corrected_seconds == pytest.approx(1.5 * often), "four in five are expected to be clipped, now that three of three were"


@pytest.mark.parametrize(("clipped", "expected"), [(0, 0.2), (1, 0.4), (3, 0.8)])
def test_what_is_known_of_clipping_decides_again_where_the_forecast_was_right(clipped, expected, monkeypatch):
    result = _plan(batch=4)
    training = TrainingSection(batch_size=4, sequence_length=LENGTH, clip="global")
    run = PlannedRun(result, workload(), training, EngineSection(durability="none"), machine(gpu_gib=24, ram_gib=512), profile()).running
    steps = [MeasuredStep(2 + number, 4, LENGTH, 1.0, clipped=number < clipped) for number in range(3)]
    steps = [replace(step, seconds=run.of(step).decision.total) for step in steps]
    asked: list[tuple[Running, float]] = []
    better = object()

    def decide(now: Running, seconds: float) -> object:
        asked.append((now, seconds))
        return better

    monkeypatch.setattr(correction, "_better", decide)
    found = correct(run, steps, [])
    assert (found.ratio, found.factors, found.better) == (pytest.approx(1.0), Factors(), better)
    ((now, seconds),) = asked
    assert found.running is now
    assert now.fit.clip_rate == pytest.approx(expected)
    assert found.corrected_seconds == seconds == now.decision.total
    better = None
    assert correct(run, steps, []) is None, "nothing is said where nothing else is better"
