"""What a phase and a step take at least: by hand, by property, and beside a recorded measurement."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lohan.config import Clip, Durability, GradientBuffers, UpdateSchedule
from lohan.errors import ConfigError
from lohan.hardware.profile import HardwareProfile, Measured, UpdateRate
from lohan.planning.cost_model import Demand, Rates, Term, phase_seconds, two_way_seconds, update_traffic
from lohan.planning.schedule import UPDATE_ORDERS, Begin, UpdateOrder, update_order
from lohan.planning.state_form import StateForm
from lohan.planning.step_cost import Amounts, StepCost, StepSetting

RATES = Rates(
    m2g=10,
    g2m=10,
    both_ways=8,
    ssd_read=4,
    ssd_write=2,
    ssd_mixed=4,
    host_memory=100,
    update_elements=5,
    gradient_norm=40,
    checksum=50,
    commit_seconds=1,
)
OPTIMIZED = update_order(UpdateSchedule.OPTIMIZED, Clip.NONE, GradientBuffers.ALL)
SETTING = StepSetting(
    forward_seconds=10,
    backward_seconds=30,
    forward_weight_bytes=20,
    backward_weight_bytes=10,
    trainable_parameters=10,
    form=StateForm.SPLIT,
    durability=Durability.NONE,
    order=OPTIMIZED,
    read_share=0.5,
    written_share=0.5,
    trainable_units=10,
    gradient_buffers=10,
    first_unit_share=0.1,
)


def profile(**changes: object) -> HardwareProfile:
    facts: dict[str, object] = {
        "fingerprint": "f",
        "date": "2026-11-30T00:00:00Z",
        "device": "GPU",
        "host_to_device": Measured(value=54e9),
        "device_to_host": Measured(value=55e9),
        "both_ways": Measured(value=42e9),
        "device_memory": Measured(value=4e12),
        "matmul_flops_per_second": Measured(value=7e14),
        "host_memory": Measured(value=76e9),
        "updates": (UpdateRate(form="split", threads=8, elements_per_second=Measured(value=5.8e9)),),
        "gradient_norm": Measured(value=47e9),
    }
    return HardwareProfile.model_validate(facts | changes)


# ---------------------------------------------------------------- rates


def test_rates_of_a_profile():
    rates = Rates.of(profile(), StateForm.SPLIT)
    assert (rates.m2g, rates.g2m, rates.both_ways, rates.update_elements, rates.on_cpu) == (54e9, 55e9, 42e9, 5.8e9, False)
    assert (rates.ssd_read, rates.ssd_write, rates.ssd_mixed, rates.commit_seconds) == (None, None, None, 0)


def test_host_memory_gives_what_any_pass_over_it_gave():
    assert Rates.of(profile(), StateForm.SPLIT).host_memory == 5.8e9 * 26
    assert Rates.of(profile(host_memory=Measured(value=1e12)), StateForm.SPLIT).host_memory == 1e12


def test_weights_are_copied_within_host_memory_where_the_cpu_computes():
    rates = Rates.of(profile(host_to_device=None, device_to_host=None, both_ways=None), StateForm.SPLIT)
    assert (rates.on_cpu, rates.m2g) == (True, 38e9)


def test_a_form_without_a_rate_is_named():
    with pytest.raises(ConfigError, match=r"split-8bit.*only over: split"):
        Rates.of(profile(), StateForm.SPLIT_8BIT)


@pytest.mark.parametrize(("form", "bytes"), [(StateForm.SPLIT, 26), (StateForm.FP32, 28), (StateForm.SPLIT_8BIT, 14.0625)])
def test_an_update_reads_and_writes_all_states_and_reads_its_gradient(form, bytes):
    assert update_traffic(form) == bytes


# ---------------------------------------------------------------- phases


def test_a_phase_takes_as_long_as_its_slowest_resource():
    demand = Demand(gpu_seconds=3, m2g_bytes=40, g2m_bytes=20, ssd_read_bytes=8, ssd_written_bytes=2, host_memory_bytes=100, cpu_seconds=2)
    demand += Demand(launch_seconds=1.5)
    phase = phase_seconds(demand, RATES)
    assert phase.seconds == pytest.approx(
        # PCIe: 20 B both ways at 8 B/s, 20 B more at 10. Drives: 2 B each way at 2 B/s, 6 B more read at 4.
        {Term.GPU: 3, Term.M2G: 4, Term.G2M: 2, Term.PCIE: 4.5, Term.SSD: 2.5, Term.HOST_MEMORY: 1, Term.CPU: 2, Term.LAUNCH: 1.5}
    )
    assert (phase.total, phase.binding) == (pytest.approx(4.5), Term.PCIE)


def test_a_device_waits_for_its_kernels():
    setting = replace(SETTING, forward_launch_seconds=12, backward_launch_seconds=20)
    step = StepCost(setting, RATES)(Amounts(saved_seconds=15))
    assert (step.forward.seconds[Term.LAUNCH], step.backward.seconds[Term.LAUNCH]) == (12, 20)
    assert phase_seconds(Demand(gpu_seconds=10, launch_seconds=12), RATES).binding is Term.LAUNCH


def test_a_cpu_that_is_the_device_does_one_thing_after_the_other():
    phase = phase_seconds(Demand(gpu_seconds=3, cpu_seconds=2), replace(RATES, on_cpu=True))
    assert (phase.total, phase.binding) == (5, Term.GPU)


def test_drives_without_a_mixed_rate_take_turns():
    assert phase_seconds(Demand(ssd_read_bytes=8, ssd_written_bytes=2), replace(RATES, ssd_mixed=None)).total == 8 / 4 + 2 / 2


def test_a_rate_that_is_missing_is_named_where_it_is_needed():
    rates = replace(RATES, ssd_read=None, ssd_write=None, ssd_mixed=None)
    assert phase_seconds(Demand(gpu_seconds=1), rates).total == 1
    with pytest.raises(ConfigError, match="no rate for writes to drives"):
        phase_seconds(Demand(ssd_written_bytes=1), rates)


rate = st.floats(0.1, 100)
amount = st.floats(0, 1000)


@settings(max_examples=200, deadline=None)
@given(amount, amount, rate, rate, rate)
def test_two_ways_take_at_least_the_longer_and_at_most_their_sum(first, second, first_rate, second_rate, both):
    seconds = two_way_seconds(first, second, first_rate, second_rate, both)
    turns = first / first_rate + second / second_rate
    assert seconds <= turns * (1 + 1e-9)
    if both <= min(first_rate, second_rate):
        assert seconds >= max(first / first_rate, second / second_rate) * (1 - 1e-9)


@settings(max_examples=200, deadline=None)
@given(st.lists(amount, min_size=4, max_size=4), rate, rate, rate)
def test_two_ways_are_convex(sizes, first_rate, second_rate, both):
    a, b, c, d = sizes
    rates = first_rate, second_rate, both
    middle = two_way_seconds((a + c) / 2, (b + d) / 2, *rates)
    assert middle <= (two_way_seconds(a, b, *rates) + two_way_seconds(c, d, *rates)) / 2 * (1 + 1e-9) + 1e-12


# ---------------------------------------------------------------- steps


def test_demands_by_hand():
    cost = StepCost(replace(SETTING, durability=Durability.STEP, written_share=1.0), RATES)
    amounts = Amounts(gpu_bytes=7, ram_bytes=5, ssd_bytes=3, saved_seconds=4)
    # 20 B of weights less the first unit's 2, half from drives; 8 B of activations out, 3 of them on to the drives.
    assert cost.forward_demand(amounts) == Demand(10, 18, 8, 9, 3, 0, 18 + 8 + 9 + 3, 0)
    # 10 B of weights and 8 B of activations in, 3 B and half the weights from drives; 18 B of gradients out.
    assert cost.backward_demand(amounts) == Demand(26, 18, 18, 8, 0, 0, 18 + 18 + 8, 0)
    # 120 B of states, half read, all summed and written; 26 B of traffic a parameter. Reading half of them while it is written takes
    # 120 / 4 s, writing the rest 60 / 2: so long the thread waits for the drives.
    assert cost.update_demand() == Demand(0, 0, 0, 60, 120, 1, 260 + 60 + 120 + 120, 30 + 30)


def test_chunks_in_ram_are_updated_while_others_are_read():
    # 2 s of the CPU, half of it for what lies in RAM, under the drives' 120 / 4 s.
    assert StepCost(SETTING, RATES).update_demand().cpu_seconds == 30
    slow = replace(RATES, update_elements=0.2)
    assert StepCost(SETTING, slow).update_demand().cpu_seconds == 10 / 0.2, "or the other way round"


def test_updates_hide_under_a_long_backward():
    # Nine of ten units' updates take 27 s of the drives, and of the optimizer, which waits for them; weights 1.25 s of the drives more.
    step = StepCost(SETTING, RATES)(Amounts())
    assert step.backward.total == 30
    assert (step.backward.binding, step.updated_share) == (Term.GPU, 0.9)  # all but the last unit
    # Copying and reading weights is hidden. The first unit: 3 s; 2 B out, and in, of which 1 B is read at 4.
    assert step.exposed_seconds == pytest.approx(3 + 0.2 + 0.25)
    assert step.total == pytest.approx(30 + 10 + 3.45)


FEW = replace(SETTING, gradient_buffers=3, reorders_left=False, backward_seconds=10)


def test_few_gradient_buffers_hold_the_backward_back():
    few, many = (StepCost(setting, RATES)(Amounts()) for setting in (FEW, replace(FEW, gradient_buffers=10, reorders_left=True)))
    # A unit takes 3 s whether it is updated before the backward's end or after it, so that as many as can be are: 27 s of drives, which
    # read 5 B of weights besides.
    assert (few.updated_share, few.backward.total) == (0.9, pytest.approx(27 + 1.25))
    assert few.exposed_seconds == pytest.approx(3 + 0.2 + 0.25)
    # Else what is left lies under the forward, which itself reads and copies little.
    assert many.total < few.total
    assert many.backward.total < few.backward.total


def test_at_most_as_many_units_as_have_buffers_are_left_at_the_backwards_end():
    # Only the first 7 of 10 must be updated by then; the drives' 30 s for all would be 20 more than the backward without them.
    slow_forward = replace(FEW, backward_seconds=1, trainable_units=30, first_unit_share=1 / 30)
    assert StepCost(slow_forward, RATES)(Amounts()).updated_share >= 1 - 3 / 30


def test_updates_after_the_backward_lie_under_the_next_forward():
    serial = replace(SETTING, order=UPDATE_ORDERS[UpdateSchedule.SERIAL], forward_seconds=40)
    step = StepCost(serial, RATES)(Amounts())
    # All but the first unit's 3 s, and half of its weights read again.
    assert (step.updated_share, step.forward.total, step.backward.total) == (0, 40, 30)
    assert step.exposed_seconds == pytest.approx(3 + 0.25)


def test_one_chunk_in_flight_waits_for_its_reads_and_writes():
    naive = replace(SETTING, order=UPDATE_ORDERS[UpdateSchedule.NAIVE])
    assert StepCost(naive, RATES).update_demand().cpu_seconds == 10 / 5 + 60 / 4 + 60 / 2
    durable = replace(naive, durability=Durability.STEP, written_share=1.0)
    # What is in RAM is written too; sums are taken meanwhile, at 50 B/s.
    assert StepCost(durable, RATES).update_demand().cpu_seconds == 10 / 5 + 60 / 4 + 120 / 2


def test_speculation_that_fails_is_done_again():
    speculated = replace(SETTING, order=UpdateOrder(Begin.SPECULATED, 3), durability=Durability.STEP, written_share=1.0)
    sometimes = replace(speculated, redone_share=0.25)
    assert StepCost(sometimes, RATES)(Amounts()).total > StepCost(speculated, RATES)(Amounts()).total


def test_what_stays_on_the_device_costs_nothing():
    cost = StepCost(SETTING, RATES)
    assert cost(Amounts(gpu_bytes=1e9)) == cost(Amounts())


def test_on_the_cpu_weights_are_read_into_their_slot():
    cost = StepCost(SETTING, replace(RATES, on_cpu=True))
    demand = cost.forward_demand(Amounts())
    assert (demand.m2g_bytes, demand.ssd_read_bytes, demand.host_memory_bytes) == (9, 9, 2 * 9 + 9)


def test_on_the_cpu_norms_are_the_optimizers_work():
    demand = StepCost(SETTING, replace(RATES, on_cpu=True)).backward_demand(Amounts())
    assert demand.cpu_seconds == 18 / 40


share = st.floats(0, 1)
rates_ = st.builds(
    Rates,
    *[rate] * 6,
    st.floats(1, 1000),
    rate,
    rate,
    rate,
    st.floats(0, 5),
    st.booleans(),
)
settings_ = st.builds(
    StepSetting,
    forward_seconds=st.floats(0.1, 50),
    backward_seconds=st.floats(50, 200),
    forward_weight_bytes=amount,
    backward_weight_bytes=amount,
    trainable_parameters=st.integers(1, 1000),
    form=st.sampled_from(StateForm),
    durability=st.sampled_from(Durability),
    order=st.builds(UpdateOrder, st.sampled_from(Begin), st.sampled_from([1, 3])),
    read_share=share,
    written_share=share,
    trainable_units=st.integers(1, 100),
    gradient_buffers=st.integers(1, 100),
    reorders_left=st.booleans(),
    first_unit_share=share,
    redone_share=share,
)


@settings(max_examples=200, deadline=None)
@given(settings_, rates_)
def test_room_for_all_gradients_makes_no_step_longer(setting, rates):
    step = StepCost(setting, rates)(Amounts())
    assert 0 <= step.updated_share <= 1
    room = replace(setting, gradient_buffers=setting.trainable_units, reorders_left=True)
    assert StepCost(room, rates)(Amounts()).total <= step.total * (1 + 1e-9)


@settings(max_examples=200, deadline=None)
@given(settings_, rates_, st.floats(0, 50), st.floats(1, 4))
def test_a_faster_machine_is_no_slower(setting, rates, saved, factor):
    amounts = Amounts(0, 100, 50, saved)
    seconds = StepCost(setting, rates)(amounts).total
    for name in ("host_memory", "update_elements", "gradient_norm", "checksum"):
        faster = replace(rates, **{name: getattr(rates, name) * factor})
        assert StepCost(setting, faster)(amounts).total <= seconds * (1 + 1e-9)


@settings(max_examples=200, deadline=None)
@given(settings_, rates_, st.lists(st.tuples(amount, amount, st.floats(0, 50)), min_size=2, max_size=2), share)
def test_a_step_is_convex_in_its_activations(setting, rates, ends, weight):
    first, second = (Amounts(0, *end) for end in ends)
    mixed = (weight * a + (1 - weight) * b for a, b in zip(*ends, strict=True))
    cost = StepCost(setting, rates)
    chord = weight * cost(first).total + (1 - weight) * cost(second).total
    assert cost(Amounts(0, *mixed)).total <= chord * (1 + 1e-9)


def test_beside_a_recorded_measurement():
    """Prints (`pytest -s`) how far the model is from `benchmarks/results/step.json`: timings are recorded, not asserted.

    The rates are those of `benchmarks/results/adam.json` and of the machine's copies; the device's seconds follow from the record's block
    peak. The CPU took norms then (2 B a parameter at 47 GB/s): with `serial` under the backward, else between the updates, with which they
    are counted here.
    """
    records = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / "step.json").read_text())["records"]
    rates = Rates(54e9, 54e9, 42e9, None, None, None, 5.8e9 * 26, 5.8e9, 47e9, 20e9)
    with_norms = replace(rates, update_elements=1 / (1 / 5.8e9 + 2 / 47e9))
    for record in records:
        if record["system"] != "lohan" or record["shape"] != "3.43b" or record["states_tier"] != "ram" or record["clip"] != "none":
            continue
        forward = 2 * record["parameters"] * record["batch"] * record["sequence"] / (record["block_peak_tflops"] * 1e12)
        setting = replace(
            SETTING,
            forward_seconds=forward,
            backward_seconds=3 * forward,
            forward_weight_bytes=2 * record["parameters"],
            backward_weight_bytes=0,
            trainable_parameters=record["parameters"],
            order=UPDATE_ORDERS[UpdateSchedule(record["schedule"])],
            read_share=0.0,
            written_share=0.0,
            trainable_units=28,
            gradient_buffers=3,
            first_unit_share=1 / 33,
            reorders_left=False,
        )
        predicted = StepCost(setting, rates if record["schedule"] == "serial" else with_norms)(Amounts())
        assert predicted.total > 0
        print(f"{record['schedule']}: {predicted.total:.3f} s predicted ({predicted.binding}), {record['step_seconds']:.3f} s measured")
