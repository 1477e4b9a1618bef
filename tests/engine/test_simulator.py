"""Steps played: small ones by hand, whole ones by what must hold, and beside the cost model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lohan.config import Durability, GradientBuffers, UpdateSchedule
from lohan.planning.cost_model import Rates
from lohan.planning.kept_operations import KeptShape
from lohan.planning.operation_costs import OperationCost, Sharing, durations, even_regions
from lohan.planning.operations import (
    ChunkShape,
    Operation,
    OperationKind,
    Recompute,
    Resource,
    StepShape,
    UnitShape,
    Visit,
    expected_order,
    step_operations,
)
from lohan.planning.ram_states import chunks_in_ram
from lohan.planning.schedule import UPDATE_ORDERS, Begin, UpdateOrder
from lohan.planning.simulator import play
from lohan.planning.slots import size_slots
from lohan.planning.state_form import StateForm
from lohan.planning.step_cost import Amounts, StepCost, StepSetting
from lohan.planning.tiers import Tier

from .test_operations import BLOCKS, ORDERS, REGIONS, SHAPES, make_shape

KIND = OperationKind
FREE = Sharing()


def seconds(**by_kind: float) -> Callable[[Operation], OperationCost]:
    return lambda operation: OperationCost(by_kind.get(operation.kind.value, 0.0))


# ---------------------------------------------------------------- small ones


def test_an_update_delays_the_next_forward_through_its_units_weights():
    operations = (
        Operation(KIND.FORWARD, 0, slot=0),
        Operation(KIND.BACKWARD, 0, slot=0, after=(0,)),
        Operation(KIND.GRADIENTS_COPY, 0, after=(1,)),
        Operation(KIND.UPDATE, 0, 0, after=(2,)),
        Operation(KIND.WEIGHTS_COPY, 0, 0, slot=0, after=(3,)),
    )
    played = play(operations, seconds(forward=2, backward=3, gradients_copy=1, update=4, weights_copy=0.5))
    assert played.starts[0] == (0, 2, 5, 6, 10)
    assert played.starts[1] == (10.5, 12.5, 15.5, 16.5, 20.5)
    assert played.step_seconds == pytest.approx(10.5)
    assert (played.wait_seconds, played.forward_seconds, played.backward_seconds) == pytest.approx((5.5, 2, 3))
    assert played.busy[Resource.GPU] == pytest.approx(5 / 10.5)
    assert played.busy[Resource.CPU] == pytest.approx(4 / 10.5)
    assert played.binding is Resource.GPU


def test_an_update_of_another_unit_lies_under_the_next_forward():
    operations = (
        Operation(KIND.FORWARD, 0),
        Operation(KIND.WEIGHTS_COPY, 1, 0, slot=1),
        Operation(KIND.FORWARD, 1, slot=1, after=(0, 1)),
        Operation(KIND.BACKWARD, 1, slot=1, after=(2,)),
        Operation(KIND.UPDATE, 1, 0, after=(3,)),
    )
    played = play(operations, seconds(forward=5, weights_copy=1, backward=3, update=4))
    # The second forward waits for update (4) and copy (1), both under the first forward (5).
    assert played.step_seconds == pytest.approx(13)
    slow = play(operations, seconds(forward=5, weights_copy=2, backward=3, update=6))
    assert slow.step_seconds == pytest.approx(13 + (6 + 2) - 5)


def test_the_first_write_waits_for_the_commit_of_the_step_before():
    operations = (
        Operation(KIND.FORWARD),
        Operation(KIND.BACKWARD, after=(0,)),
        Operation(KIND.STATES_WRITE, 0, 0, after=(1,)),
        Operation(KIND.COMMIT, after=(2,)),
    )
    played = play(operations, seconds(forward=1, backward=1, states_write=1, commit=9))
    assert played.starts[1][2] == played.ends[0][3] == 12


def test_threads_of_one_resource_take_turns_by_what_was_ready_first():
    # States are read ahead of weights in the list, but are ready later.
    operations = (
        Operation(KIND.FORWARD),
        Operation(KIND.STATES_READ, 0, 0, after=(0,)),
        Operation(KIND.WEIGHTS_READ, 1, 0, slot=1),
        Operation(KIND.WEIGHTS_READ, 2, 0, slot=2),
        Operation(KIND.BACKWARD, after=(0,)),
    )
    played = play(operations, seconds(forward=3, backward=9, states_read=4, weights_read=2))
    assert [played.starts[0][index] for index in (2, 3, 1)] == [0, 2, 4]


def test_both_ways_slow_each_other_while_both_are_busy():
    operations = (
        Operation(KIND.FORWARD),
        Operation(KIND.WEIGHTS_COPY, 0, 0, slot=0, after=(0,)),
        Operation(KIND.GRADIENTS_COPY, 1, after=(0,)),
        Operation(KIND.BACKWARD, after=(1, 2)),
    )
    played = play(operations, seconds(weights_copy=3, gradients_copy=1), Sharing({Resource.M2G: 0.5, Resource.G2M: 0.5}))
    # Both at half their speed until the gradients are out after 2 s; 1 s of the weights is done, and 2 are left.
    assert (played.ends[0][2], played.ends[0][1]) == (2, 4)


def test_host_memory_is_divided_by_what_each_asks_for():
    operations = (
        Operation(KIND.FORWARD),
        Operation(KIND.UPDATE, 0, 0, after=(0,)),
        Operation(KIND.GRADIENTS_COPY, 1, after=(0,)),
        Operation(KIND.BACKWARD, after=(1, 2)),
    )
    costs = {KIND.UPDATE: OperationCost(2, 60), KIND.GRADIENTS_COPY: OperationCost(1, 10)}
    # 30 + 10 B/s are asked for, 20 are there: half speed. After 2 s the copy is done and 1 s of the update is left, at 20 / 30.
    played = play(operations, lambda operation: costs.get(operation.kind, OperationCost(0)), Sharing(host_memory=20))
    assert (played.ends[0][2], played.ends[0][1]) == (2, pytest.approx(3.5))
    assert played.host_memory_busy == pytest.approx(1)
    assert played.binding in (None, Resource.CPU)


def test_the_unit_that_is_needed_first_is_updated_first():
    operations = (
        *(Operation(KIND.FORWARD, unit) for unit in range(3)),
        *(Operation(KIND.BACKWARD, unit) for unit in (2, 1, 0)),
        *(Operation(KIND.UPDATE, unit, chunk, after=(5 - unit,)) for unit in (2, 1, 0) for chunk in range(2)),
    )
    played = play(operations, seconds(backward=1, update=4), needed_first=True)
    # Unit 2 is begun while the others are still computed; both chunks of it are finished before unit 0 overtakes unit 1.
    assert played.starts[0][6:] == (1, 5, 17, 21, 9, 13)
    assert play(operations, seconds(backward=1, update=4)).starts[0][6:] == (1, 5, 9, 13, 17, 21)


def test_kinds_that_are_not_known_go_by_their_resources_rate():
    cost = durations(RATES, StateForm.SPLIT, lambda _: 7.0)
    assert cost(Operation(KIND.ACTIVATIONS_OUT, 1, 0, bytes=500)) == OperationCost(500 / 10e3, 500)
    assert cost(Operation(KIND.ACTIVATIONS_WRITE, 1, 0, bytes=500)) == OperationCost(500 / 2e3, 500)
    assert cost(Operation(KIND.BACKWARD, 1)) == OperationCost(7.0)


# ---------------------------------------------------------------- whole steps

CASES = [(name, schedule) for name in SHAPES for schedule in ORDERS]
RATES = Rates(10e3, 10e3, 8e3, 4e3, 2e3, 4e3, 1e5, 2e3, 40e3, 50e3, 0.5)
FORWARD, BACKWARD = dict.fromkeys(range(BLOCKS + 2), 1.0), dict.fromkeys(range(BLOCKS + 2), 3.0)


def costs_of(operations: tuple[Operation, ...], rates: Rates = RATES) -> Callable[[Operation], OperationCost]:
    return durations(rates, StateForm.SPLIT, even_regions(operations, FORWARD, BACKWARD))


@pytest.mark.parametrize(("name", "schedule"), CASES)
def test_nothing_begins_too_early_and_every_resource_does_one_thing_at_a_time(name, schedule):
    operations = step_operations(SHAPES[name], ORDERS[schedule])
    cost = costs_of(operations)
    played = play(operations, cost, FREE)
    spans: dict[Resource, list[tuple[float, float]]] = {}
    for starts, ends in zip(played.starts, played.ends, strict=True):
        for operation, begin, end in zip(operations, starts, ends, strict=True):
            assert end - begin == pytest.approx(cost(operation).seconds)
            assert all(ends[earlier] <= begin + 1e-9 for earlier in operation.after)
            spans.setdefault(operation.resource, []).append((round(begin, 9), round(end, 9)))
    for resource, found in spans.items():
        found.sort()
        assert all(after[0] >= before[1] - 1e-9 for before, after in pairwise(found)), resource


@pytest.mark.parametrize("name", SHAPES)
def test_updates_may_be_left_for_the_next_forward(name):
    few, many = ORDERS["optimized"], replace(ORDERS["optimized"], gradients=GradientBuffers.ALL)
    slow = replace(RATES, update_elements=800)
    operations = {order: step_operations(SHAPES[name], order) for order in (few, many)}
    played = {order: play(found, costs_of(found, slow), needed_first=order.takes_needed_first) for order, found in operations.items()}
    assert played[many].step_seconds <= played[few].step_seconds * (1 + 1e-9)


@pytest.mark.parametrize(("name", "schedule"), CASES)
def test_busy_seconds_are_the_sum_of_what_each_takes(name, schedule):
    operations = step_operations(SHAPES[name], ORDERS[schedule])
    cost = costs_of(operations)
    played = play(operations, cost, FREE, steps=8)
    for resource, share in played.busy.items():
        total = sum(cost(operation).seconds for operation in operations if operation.resource is resource)
        assert share * played.step_seconds == pytest.approx(total, rel=0.05, abs=1e-9)
        assert share <= 1 + 1e-9


@pytest.mark.parametrize(("name", "schedule"), CASES)
def test_what_is_shared_makes_no_step_shorter_than_its_slowest_resource(name, schedule):
    operations = step_operations(SHAPES[name], ORDERS[schedule])
    cost = costs_of(operations)
    alone, shared = play(operations, cost, FREE, steps=8), play(operations, cost, Sharing.of(RATES), steps=8)
    longest = max(alone.busy.values()) * alone.step_seconds
    assert shared.step_seconds >= longest * 0.95
    assert shared.host_memory_busy <= 1 + 1e-9


def test_thousands_of_regions_are_played_as_one_run():
    shape = SHAPES["kept"]
    many = replace(shape, visits=tuple(replace(visit, regions=500) if visit.regions == 2 else visit for visit in shape.visits))
    few_operations, many_operations = step_operations(shape, ORDERS["optimized"]), step_operations(many, ORDERS["optimized"])
    few, lots = (play(operations, costs_of(operations), FREE) for operations in (few_operations, many_operations))
    assert len(many_operations) > 5000
    # What is loaded or sent waits for the last region, whose part of its unit's seconds is 1/500 instead of 1/2.
    assert lots.step_seconds == pytest.approx(few.step_seconds, rel=0.1)


@st.composite
def graphs(draw: st.DrawFn) -> tuple[tuple[Operation, ...], list[float]]:
    """One thread a resource, so that an order is never a choice."""
    kinds = (KIND.FORWARD, KIND.BACKWARD, KIND.UPDATE, KIND.GRADIENTS_COPY, KIND.STATES_READ, KIND.STATES_WRITE)
    count = draw(st.integers(1, 12))
    operations = []
    for index in range(count):
        after = draw(st.sets(st.integers(0, index - 1), max_size=3)) if index else ()
        operations.append(Operation(draw(st.sampled_from(kinds)), index % 3, index, after=tuple(after)))
    operations += [Operation(KIND.FORWARD, 9, count), Operation(KIND.BACKWARD, 9, count + 1, after=(count,))]
    return tuple(operations), [draw(st.floats(0, 10)) for _ in operations]


@settings(max_examples=100, deadline=None)
@given(graphs(), st.data())
def test_faster_operations_end_no_later(graph, data):
    operations, costs = graph
    faster = [cost * data.draw(st.floats(0, 1)) for cost in costs]
    slow, fast = (play(operations, lambda operation, of=of: OperationCost(of[operation.chunk])) for of in (costs, faster))
    for before, after in zip(slow.ends, fast.ends, strict=True):
        assert all(early <= late + 1e-6 for early, late in zip(after, before, strict=True))


# ---------------------------------------------------------------- beside the cost model


def setting_of(shape: StepShape, schedule: UpdateSchedule) -> StepSetting:
    elements = sum(chunk.elements for unit in shape.units for chunk in unit.chunks)
    return StepSetting(
        forward_seconds=sum(FORWARD.values()),
        backward_seconds=sum(BACKWARD[unit] for unit in range(1, BLOCKS + 2)),
        forward_weight_bytes=2 * elements,
        backward_weight_bytes=0,  # all units are kept or in working slots
        trainable_parameters=elements,
        form=shape.form,
        durability=Durability.NONE,
        order=UPDATE_ORDERS[schedule],
        read_share=0.0,
        written_share=0.0,
        trainable_units=len(shape.units),
        gradient_buffers=3,
        reorders_left=False,
        first_unit_share=1 / len(shape.units),
    )


FAST = Rates(1e9, 1e9, 1e9, 1e9, 1e9, 1e9, 1e12, 1e9, 1e9, 1e9)


@pytest.mark.parametrize("schedule", UpdateSchedule)
@pytest.mark.parametrize("slow", ["gpu", "m2g", "g2m", "update_elements"])
def test_both_agree_where_one_resource_is_slow(schedule, slow):
    """All but the device and at most one other are so fast that they take nothing. At every moment of a step something runs, and neither
    says less than the slow one takes: they differ by at most what the other, the device, takes."""
    shape = make_shape(in_ram=BLOCKS + 2, kept=5)
    rates = FAST if slow == "gpu" else replace(FAST, **{slow: 10.0})
    operations = step_operations(shape, ORDERS[schedule.value])
    device = sum(FORWARD.values()) + sum(BACKWARD.values())
    played = play(operations, costs_of(operations, rates), Sharing.of(rates), steps=8)
    predicted = StepCost(setting_of(shape, schedule), rates)(Amounts()).total
    assert abs(played.step_seconds - predicted) <= (BACKWARD[0] if slow == "gpu" else device) + 0.01


MEBI = 2**20
SERVER = Rates(24e9, 24e9, 20e9, 20e9, 10e9, 16e9, 120e9, 3e9, 40e9, 20e9, 0.05)
"""A consumer's machine with a few drives."""


def gpt_13b(in_ram: float, durability: Durability, kept: tuple[KeptShape, ...] = ()) -> StepShape:
    """40 blocks of 315 M parameters between an embedding and a head of 257 M; the part `in_ram` of the states in RAM, and of every block
    the same kept."""
    block, table, largest = 12 * 5120**2, 50257 * 5120, 32 * MEBI
    lengths = [[min(largest, elements - begin) for begin in range(0, elements, largest)] for elements in (table, *[block] * 40, table)]
    sizes = [StateForm.SPLIT.state_bytes(length) for unit in lengths for length in unit]
    taken = chunks_in_ram(sizes, round(in_ram * sum(sizes)))
    numbers = count()
    units = tuple(
        UnitShape(tuple(ChunkShape(length, True, Tier.RAM if next(numbers) in taken else Tier.SSD) for length in unit)) for unit in lengths
    )
    visits = (Visit(0, recompute=Recompute.NONE_SAVED), *(Visit(number, REGIONS) for number in range(1, 42)))
    sizes = [sum(chunk.elements for chunk in shape.chunks) for shape in units]
    slots = size_slots(sizes, expected_order(visits, range(42)).backward, working=3, kept=0)
    of_blocks = dict.fromkeys(range(1, 41), kept) if kept else {}
    return StepShape(units, visits, slots, StateForm.SPLIT, durability, kept=of_blocks)


def predicted_and_played(
    shape: StepShape, order: UpdateOrder, rows: int, amounts: Amounts, *, predicted_by: Rates = SERVER
) -> tuple[float, float]:
    """Seconds of a step by the formulas and by its operations, on a card with 150 TFLOPS."""
    elements = [sum(chunk.elements for chunk in unit.chunks) for unit in shape.units]
    in_ram = sum(chunk.elements for unit in shape.units for chunk in unit.chunks if chunk.tier is Tier.RAM)
    seconds = {unit: 2 * elements[unit] * rows * 1024 / 150e12 for unit in range(1, 42)}
    backward = {unit: 3 * of_unit for unit, of_unit in seconds.items()}
    operations = step_operations(shape, order)
    cost = durations(SERVER, shape.form, even_regions(operations, seconds, backward))
    played = play(operations, cost, Sharing.of(SERVER), needed_first=order.takes_needed_first)
    on_drives = 1 - in_ram / sum(elements)
    setting = StepSetting(
        forward_seconds=sum(seconds.values()),
        backward_seconds=sum(backward.values()),
        forward_weight_bytes=2 * sum(elements),
        backward_weight_bytes=2 * sum(elements[1:39]),
        trainable_parameters=sum(elements),
        form=shape.form,
        durability=shape.durability,
        order=order,
        read_share=on_drives,
        written_share=on_drives if shape.durability is Durability.NONE else 1.0,
        trainable_units=42,
        gradient_buffers=42 if order.gradients is GradientBuffers.ALL else 3,
        first_unit_share=elements[0] / sum(elements),
        reorders_left=order.takes_needed_first or order.begin is Begin.AFTER_BACKWARD,
    )
    return StepCost(setting, predicted_by)(amounts).total, played.step_seconds


@pytest.mark.parametrize("in_ram", [0, 0.25, 0.5, 0.75, 0.9, 1])
@pytest.mark.parametrize("durability", [Durability.NONE, Durability.STEP])
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_both_agree_on_a_large_model(in_ram, durability, order):
    """13B parameters, 16 rows, within a twentieth. The formulas leave out how pipelines fill at the begin of a phase.

    They also take drives to read and write at the same time for as long as there is something of both. Where units overtake each other,
    and part of every one lies in RAM, that is not always so: the step then lies between that and drives that take turns.
    """
    shape = gpt_13b(in_ram, durability)
    predicted, played = predicted_and_played(shape, order, 16, Amounts())
    if order.takes_needed_first and 0 < in_ram < 1:
        turns, _ = predicted_and_played(shape, order, 16, Amounts(), predicted_by=replace(SERVER, ssd_mixed=None))
        assert predicted * 0.95 <= played <= turns * 1.05
    else:
        assert predicted == pytest.approx(played, rel=0.05)


@pytest.mark.parametrize("schedule", ["optimized", "serial"])
def test_spread_states_keep_drives_and_optimizer_busy_together(schedule):
    """Half of 13B parameters in RAM: with the first units whole, drives and optimizer wait for each other in turns."""
    spread = gpt_13b(0.5, Durability.NONE)
    tiers = [chunk.tier for unit in spread.units for chunk in unit.chunks]
    in_ram = tiers.count(Tier.RAM)
    number = count()
    first = replace(
        spread,
        units=tuple(
            UnitShape(tuple(replace(chunk, tier=Tier.RAM if next(number) < in_ram else Tier.SSD) for chunk in unit.chunks))
            for unit in spread.units
        ),
    )
    played = [predicted_and_played(shape, ORDERS[schedule], 16, Amounts())[1] for shape in (spread, first)]
    assert played[0] < 0.92 * played[1]


def test_a_chunk_on_the_drives_is_read_ahead_past_those_in_ram():
    """Its read waits for no update of the chunks in RAM before it, as far as another on the drives is still to be updated."""
    spread = gpt_13b(0.75, Durability.NONE)
    operations = step_operations(spread, ORDERS["serial"])
    tiers = {(unit, number): chunk.tier for unit, shape in enumerate(spread.units) for number, chunk in enumerate(shape.chunks)}
    updates = [operation for operation in operations if operation.kind is KIND.UPDATE]
    places = {(operation.unit, operation.chunk): place for place, operation in enumerate(updates)}
    waits = 0
    for operation in operations:
        if operation.kind is KIND.STATES_READ:
            awaited = [operations[index] for index in operation.after if operations[index].kind is KIND.UPDATE]
            assert all(tiers[other.unit, other.chunk] is Tier.SSD for other in awaited)
            between = [places[operation.unit, operation.chunk] - places[other.unit, other.chunk] for other in awaited]
            assert not between or min(between) > 2, "three in RAM lie between two on the drives"
            waits += bool(between)
    assert waits > 50


@pytest.mark.parametrize("in_ram", [0, 1])
@pytest.mark.parametrize(("ram_gb", "ssd_gb"), [(100, 0), (200, 0), (50, 60), (0, 80)])
def test_both_agree_on_what_swapped_activations_cost(in_ram, ram_gb, ssd_gb):
    """32 rows: 100 GB are free; 200 are not, and 80 on drives cost the forward its writes, and the backward its reads where states lie
    there too."""
    each = [int(size * 1e9 / 40 / REGIONS) for size in (ram_gb, ssd_gb)]
    kept = tuple(
        KeptShape(place, tier, (size,) * REGIONS) for place, (tier, size) in enumerate(zip((Tier.RAM, Tier.SSD), each, strict=True)) if size
    )
    amounts = Amounts(0, ram_gb * 1e9, ssd_gb * 1e9)
    predicted, played = predicted_and_played(gpt_13b(in_ram, Durability.NONE, kept), ORDERS["optimized"], 32, amounts)
    assert predicted == pytest.approx(played, rel=0.03)
