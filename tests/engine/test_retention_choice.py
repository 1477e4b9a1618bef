"""Which outputs are kept, and where: the three cases, the tiers, the sweep, and where blocks lie."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lohan.errors import CapacityError
from lohan.planning.paper_model import Case
from lohan.planning.retention import Retention
from lohan.planning.retention_choice import ActivationProblem, Sweep, choose_retention, place_outputs, spread
from lohan.planning.step_cost import Amounts, StepCost
from lohan.planning.step_inputs import Candidate
from lohan.planning.tiers import Tier

from .test_cost_model import RATES, SETTING, rates_, settings_

CANDIDATES = (Candidate("q", 10, 0.8), Candidate("attention", 10, 3.0), Candidate("gate", 20, 1.5))


IN_RAM = replace(SETTING, backward_seconds=100, read_share=0.0, written_share=0.0)
SLOW_OUT = {"forward_seconds": 1, "g2m": 2, "both_ways": 1.6}
"""20 B of weights in take 2 s of the forward, and nothing else does; each byte out makes that 0.5 s longer."""


def problem(*, gpu: int = 0, ram: int = 10_000, ssd: int = 0, forward_seconds: float = 10, **rates: float) -> ActivationProblem:
    """8 blocks with inputs of 5 B; states in RAM, so that the device binds: 10 s of forward, 100 s of backward."""
    setting = replace(IN_RAM, forward_seconds=forward_seconds)
    return ActivationProblem(CANDIDATES, 8, 5, gpu, ram, ssd, StepCost(setting, replace(RATES, **rates)))


# ---------------------------------------------------------------- cases


def test_case_1_swaps_nothing_beyond_the_inputs_of_blocks():
    decision = choose_retention(problem(**SLOW_OUT))
    assert (decision.case, decision.memory_bound) == (Case.TRANSFER_BOUND, False)
    assert decision.retention.operators == ()
    assert decision.amounts == Amounts(0, 40, 0, 0)
    assert decision.retention.boundaries.ram_blocks == tuple(range(8))


def test_zero_swap_where_the_device_holds_the_inputs():
    decision = choose_retention(problem(gpu=40, **SLOW_OUT))
    assert (decision.case, decision.retention, decision.amounts) == (Case.TRANSFER_BOUND, Retention(), Amounts(40, 0, 0, 0))


def test_the_device_is_filled_even_where_nothing_is_worth_a_copy():
    decision = choose_retention(problem(gpu=40 + 35, **SLOW_OUT))
    assert decision.case is Case.TRANSFER_BOUND
    assert decision.amounts == Amounts(40 + 30, 0, 0, 9.0)
    assert [operator.label for operator in decision.retention.operators] == ["attention"]


def test_an_output_is_not_kept_for_the_part_of_it_that_would_be_free():
    # Half of the fourth output fits on the device, which the sweep counts: 5 B out for 3 s saved. Placed, it is 10 B out, which cost 5 s.
    sweep = Sweep(problem(gpu=40 + 35, **SLOW_OUT))
    assert sweep.counts(sweep.best()) == {"attention": 4}


def test_case_2_keeps_everything():
    decision = choose_retention(problem(m2g=1e6, g2m=1e6, both_ways=1e6))
    assert (decision.case, decision.memory_bound) == (Case.GPU_BOUND, False)
    assert decision.amounts == Amounts(0, 40 + 8 * 40, 0, pytest.approx(8 * 5.3))
    assert [operator.label for operator in decision.retention.operators] == ["q", "attention", "gate"]


def test_case_2_ends_where_the_tiers_are_full():
    decision = choose_retention(problem(ram=40 + 100, m2g=1e6, g2m=1e6, both_ways=1e6))
    assert (decision.case, decision.memory_bound) == (Case.GPU_BOUND, True)
    assert decision.amounts.kept_bytes == 40 + 80 + 20  # attention in all blocks, the next operator in one


def test_case_3_stops_within():
    decision = choose_retention(problem())
    assert decision.case is Case.INTERIOR
    # 10 s of forward hide 95 B out at 10 B/s, beside 20 B in, at 8 B/s both ways. Beyond them a byte costs 0.1 s; attention saves 0.3.
    assert decision.amounts == Amounts(0, 40 + 80, 0, 24.0)
    assert [operator.ram_blocks for operator in decision.retention.operators] == [tuple(range(8))]


def test_inputs_that_no_tier_holds_are_refused():
    with pytest.raises(CapacityError, match="the inputs of 8 blocks") as caught:
        choose_retention(problem(gpu=12, ram=13, ssd=9))
    assert (caught.value.need_bytes, caught.value.have_bytes) == (40, 34)


def test_an_input_lies_whole_in_one_tier():
    with pytest.raises(CapacityError):
        choose_retention(problem(gpu=19, ram=19, ssd=4))  # 42 B, but room for 3 + 3 + 0 inputs of 5 B


# ---------------------------------------------------------------- places


@pytest.mark.parametrize(("count", "blocks"), [(1, 9), (4, 26), (6, 26), (25, 26), (26, 26), (0, 5)])
def test_blocks_are_spread_evenly(count, blocks):
    found = spread(count, blocks)
    assert len(set(found)) == count
    assert all(0 <= block < blocks for block in found)
    gaps = {after - before for before, after in pairwise(found)}
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_what_the_device_cannot_hold_leaves_it_spread_evenly():
    retention, amounts = place_outputs(problem(gpu=40 + 45), {"attention": 8, "q": 4})
    attention, q = retention.operators[1], retention.operators[0]
    assert (attention.ram_blocks, q.ram_blocks) == ((0, 1, 2, 3, 4, 6), (5, 7))  # q is kept in 1, 3, 5, 7: each block sends 10 B out
    assert amounts == Amounts(80, 80, 0, pytest.approx(8 * 3.0 + 4 * 0.8))


@pytest.mark.parametrize("left", [0, 9, 100, 1000, 4000, 6800])
def test_no_block_sends_much_more_out_than_another(left):
    sizes = {"q": 30, "k": 30, "attention": 40, "gate": 80, "up": 81}
    whole = replace(problem(gpu=left), blocks=26, boundary_bytes=0, ram_bytes=10**6)
    whole = replace(whole, candidates=tuple(Candidate(label, size, size / 10) for label, size in sizes.items()))
    retention, amounts = place_outputs(whole, dict.fromkeys(sizes, 26))
    assert left - max(sizes.values()) < amounts.gpu_bytes <= left
    sent = [sum(sizes[operator.label] for operator in retention.operators if block in operator.ram_blocks) for block in range(26)]
    assert max(sent) - min(sent) <= 2 * max(sizes.values())


def test_drives_take_what_host_memory_cannot_hold_spread_evenly():
    retention, amounts = place_outputs(problem(gpu=40, ram=60, ssd=100), {"attention": 8})
    assert (amounts.ram_bytes, amounts.ssd_bytes) == (60, 20)
    first, second = retention.operators[0].ssd_blocks
    assert second - first == 4


def test_inputs_may_lie_on_drives():
    retention, amounts = place_outputs(problem(gpu=10, ram=10, ssd=20), {})
    assert (len(retention.boundaries.ram_blocks), len(retention.boundaries.ssd_blocks)) == (2, 4)
    assert retention.boundaries.gpu_blocks == ()
    assert amounts == Amounts(10, 10, 20, 0)


sizes = st.integers(1, 200)
problems = st.builds(
    lambda candidates, blocks, boundary, rooms, setting, rates: ActivationProblem(
        tuple(Candidate(str(number), size, seconds) for number, (size, seconds) in enumerate(candidates)),
        blocks,
        boundary,
        *rooms,
        StepCost(setting, rates),
    ),
    st.lists(st.tuples(sizes, st.floats(1e-3, 1)), max_size=5),
    st.integers(1, 30),
    st.integers(0, 10),
    st.tuples(st.integers(0, 3000), st.integers(300, 3000), st.integers(0, 3000)),
    settings_,
    rates_,
)


@settings(max_examples=150, deadline=None)
@given(problems)
def test_a_sweep_is_convex_and_its_best_is_chosen(problem):
    sweep = Sweep(problem)
    places = range(sweep.last + 1)
    seconds = [sweep.seconds(place) for place in places]
    kept = [sweep.amounts(place).kept_bytes for place in places]
    best = Sweep(problem).best()
    assert seconds[best] <= min(seconds) * (1 + 1e-6)
    for place in range(1, sweep.last):
        weight = (kept[place + 1] - kept[place]) / (kept[place + 1] - kept[place - 1])
        chord = weight * seconds[place - 1] + (1 - weight) * seconds[place + 1]
        assert seconds[place] <= chord * (1 + 1e-9)


@settings(max_examples=150, deadline=None)
@given(problems, st.data())
def test_every_output_is_in_one_tier_and_tiers_hold_what_they_are_given(problem, data):
    counts = {candidate.label: data.draw(st.integers(0, problem.blocks)) for candidate in problem.candidates}
    retention, amounts = place_outputs(problem, counts)
    assert amounts.gpu_bytes <= problem.gpu_bytes
    assert amounts.ram_bytes <= problem.ram_bytes
    assert amounts.ssd_bytes <= problem.ssd_bytes
    by_label = {candidate.label: candidate for candidate in problem.candidates}
    for operator in retention.operators:
        places = [*operator.gpu_blocks, *operator.ram_blocks, *operator.ssd_blocks]
        assert len(places) == len(set(places)) <= counts[operator.label]
        assert set(places) <= set(spread(counts[operator.label], problem.blocks))
    saved = sum(
        by_label[operator.label].seconds_per_block * len([*operator.gpu_blocks, *operator.ram_blocks, *operator.ssd_blocks])
        for operator in retention.operators
    )
    assert amounts.saved_seconds == pytest.approx(saved)
    inputs = [retention.checked().boundaries.tier(block) or Tier.GPU for block in range(problem.blocks)]
    outputs = [
        (tier, by_label[operator.label].bytes_per_block)
        for operator in retention.operators
        for tier, blocks in ((Tier.GPU, operator.gpu_blocks), (Tier.RAM, operator.ram_blocks), (Tier.SSD, operator.ssd_blocks))
        for _ in blocks
    ]
    by_tier = {tier: problem.boundary_bytes * inputs.count(tier) + sum(size for found, size in outputs if found is tier) for tier in Tier}
    assert by_tier == {Tier.GPU: amounts.gpu_bytes, Tier.RAM: amounts.ram_bytes, Tier.SSD: amounts.ssd_bytes}


@settings(max_examples=50, deadline=None)
@given(problems)
def test_what_is_placed_is_what_was_chosen_but_for_gaps(problem):
    decision = choose_retention(problem)
    sweep = Sweep(problem)
    placed = place_outputs(problem, sweep.counts(sweep.best()))[1]
    assert decision.seconds.total <= problem.evaluate(placed).total * (1 + 1e-9)
    largest = max((candidate.bytes_per_block for candidate in problem.candidates), default=0)
    assert sweep.amounts(sweep.best()).kept_bytes - placed.kept_bytes <= 3 * largest + 3 * problem.boundary_bytes
