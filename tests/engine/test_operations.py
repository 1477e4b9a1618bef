"""The step as data, by itself: what waits for what, which slot holds what, and how many bytes move."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from lohan.config import Clip, Durability, GradientBuffers, UpdateSchedule
from lohan.planning.access import Phase
from lohan.planning.footprint import HOST_GRADIENT_BUFFERS
from lohan.planning.operations import (
    ChunkShape,
    Operation,
    OperationKind,
    Recompute,
    Resource,
    StepShape,
    UnitShape,
    UpdateSequence,
    Visit,
    access_order,
    expected_order,
    step_operations,
)
from lohan.planning.schedule import Begin, update_order
from lohan.planning.slots import size_slots
from lohan.planning.state_form import StateForm
from lohan.planning.tiers import Tier

CHUNK = 1024
BLOCKS = 6
REGIONS = 2


def make_shape(
    *,
    tied: bool = False,
    working: int = 3,
    kept: int = 0,
    in_ram: int = 0,
    frozen: frozenset[int] = frozenset(),
    device: Tier = Tier.GPU,
    durability: Durability = Durability.NONE,
) -> StepShape:
    """Embedding, blocks of two chunks and head; the first `in_ram` units in RAM."""
    units = tuple(
        UnitShape(tuple(ChunkShape(CHUNK, unit not in frozen, Tier.RAM if unit < in_ram else Tier.SSD) for _ in range(2)))
        for unit in range(BLOCKS + 2)
    )
    visits = [Visit(0, recompute=Recompute.NONE_SAVED), *(Visit(unit, REGIONS) for unit in range(1, BLOCKS + 2))]
    visits.append(Visit(0 if tied else BLOCKS + 1))
    trainable = [unit for unit in range(len(units)) if unit not in frozen]
    slots = size_slots([2 * CHUNK] * len(units), expected_order(visits, trainable).backward, working=working, kept=kept)
    return StepShape(units, tuple(visits), slots, StateForm.SPLIT, durability, device)


SHAPES = {
    "untied": make_shape(),
    "tied": make_shape(tied=True),
    "two slots": make_shape(working=2),
    "kept": make_shape(kept=3),
    "all kept": make_shape(kept=BLOCKS + 2),
    "half in RAM": make_shape(in_ram=4, durability=Durability.STEP),
    "in RAM": make_shape(in_ram=BLOCKS + 2),
    "on the CPU": make_shape(in_ram=4, device=Tier.RAM),
    "frozen": make_shape(frozen=frozenset({0, 1, 4})),
}
ORDERS = {schedule.value: update_order(schedule, Clip.NONE) for schedule in UpdateSchedule}
ORDERS["optimized with all gradients"] = update_order(UpdateSchedule.OPTIMIZED, Clip.NONE, GradientBuffers.ALL)


def of_kind(operations: tuple[Operation, ...], kind: OperationKind) -> list[Operation]:
    return [operation for operation in operations if operation.kind is kind]


def everything_before(operations: tuple[Operation, ...]) -> list[set[int]]:
    """For each operation all that has ended when it begins."""
    before: list[set[int]] = []
    for operation in operations:
        before.append(set(operation.after).union(*(before[index] for index in operation.after)))
    return before


@pytest.fixture(params=[(shape, order) for shape in SHAPES for order in ORDERS], ids=lambda pair: ", ".join(pair))
def case(request):
    shape, order = SHAPES[request.param[0]], ORDERS[request.param[1]]
    return shape, order, step_operations(shape, order)


def test_operations_wait_for_earlier_ones_only(case):
    _, _, operations = case
    assert all(index < number for number, operation in enumerate(operations) for index in operation.after)
    assert len({(operation.kind, operation.unit, operation.chunk, operation.micro_batch) for operation in operations}) > 50


def test_a_slot_holds_what_is_read_and_is_not_overwritten_before(case):
    """However operations overlap: a copy waits for the slot's last reader, a reader for the copy."""
    shape, _, operations = case
    before = everything_before(operations)
    fills = {OperationKind.WEIGHTS_READ, OperationKind.WEIGHTS_COPY} if shape.device is Tier.RAM else {OperationKind.WEIGHTS_COPY}
    holds: dict[int, int] = {}
    filled: dict[int, set[int]] = {}
    readers: dict[int, int] = {}
    for number, operation in enumerate(operations):
        if operation.slot is None:
            continue
        if operation.kind in fills:
            if holds.get(operation.slot) != operation.unit:
                holds[operation.slot], filled[operation.slot] = operation.unit, set()
            filled.setdefault(operation.slot, set()).add(number)
            assert operation.slot not in readers or readers[operation.slot] in before[number]
        elif operation.resource is Resource.GPU:
            # What is there from the step before has no operation here.
            assert holds.setdefault(operation.slot, operation.unit) == operation.unit
            assert filled.get(operation.slot, set()) <= before[number]
            readers[operation.slot] = number


def test_every_unit_is_computed_updated_and_moved_once(case):
    shape, _, operations = case
    regions = Counter(operation.unit for operation in of_kind(operations, OperationKind.FORWARD))
    assert regions == Counter(visit.unit for visit in shape.visits for _ in range(visit.regions))
    updated = [(operation.unit, operation.chunk) for operation in of_kind(operations, OperationKind.UPDATE)]
    assert sorted(updated) == [(unit, chunk) for unit in shape.trainable for chunk in range(2)]
    sent = of_kind(operations, OperationKind.GRADIENTS_COPY)
    assert [operation.bytes for operation in sent] == [2 * 2 * CHUNK] * len(shape.trainable)
    on_drive = [(unit, chunk) for unit, chunk in updated if shape.units[unit].chunks[chunk].tier is Tier.SSD]
    reads = of_kind(operations, OperationKind.STATES_READ)
    assert [(operation.unit, operation.chunk, operation.bytes) for operation in reads] == [(*place, 12 * CHUNK) for place in on_drive]
    written = updated if shape.durability is Durability.STEP else on_drive
    assert [(operation.unit, operation.chunk) for operation in of_kind(operations, OperationKind.STATES_WRITE)] == written
    durable = shape.durability is Durability.STEP
    assert len(of_kind(operations, OperationKind.COMMIT)) == durable
    assert [(operation.unit, operation.chunk) for operation in of_kind(operations, OperationKind.CHECKSUM)] == (written if durable else [])


def test_gradients_precede_updates_and_updates_the_next_forwards_reads(case):
    shape, order, operations = case
    before = everything_before(operations)
    last_backward = max(number for number, operation in enumerate(operations) if operation.kind is OperationKind.BACKWARD)
    for number, operation in enumerate(operations):
        if operation.kind is OperationKind.UPDATE:
            measured = OperationKind.GRADIENTS_COPY if shape.device is Tier.GPU else OperationKind.GRADIENT_NORM
            assert operation.unit in {operations[index].unit for index in before[number] if operations[index].kind is measured}
            assert order.begin is Begin.ON_ARRIVAL or last_backward in before[number]
    # Behind the last computation only the next forward's units are loaded.
    ends = {operation.unit: number for number, operation in enumerate(operations) if operation.kind is OperationKind.UPDATE}
    for number in range(last_backward, len(operations)):
        if operations[number].kind.value.startswith("weights") and operations[number].unit in shape.trainable:
            assert ends[operations[number].unit] in before[number]


def test_buffers_bound_what_is_in_flight(case):
    _, order, operations = case
    before = everything_before(operations)
    jobs = [number for number, operation in enumerate(operations) if operation.kind is OperationKind.UPDATE]
    written = [number for number, operation in enumerate(operations) if operation.kind is OperationKind.STATES_WRITE]
    writes = {(operations[number].unit, operations[number].chunk): number for number in written}
    if order.takes_needed_first:  # what is known of units that may overtake each other is the order of their own chunks
        same_unit = [(earlier, later) for earlier, later in pairwise(jobs) if operations[earlier].unit == operations[later].unit]
        assert all(earlier in before[later] for earlier, later in same_unit)
        assert not any(other in before[number] for number in jobs for other in jobs if operations[other].unit != operations[number].unit)
        return
    for place, number in enumerate(jobs):
        earlier = [operations[job] for job in jobs[:place]]
        of_earlier = [writes[job.unit, job.chunk] for job in earlier if (job.unit, job.chunk) in writes]
        assert before[number].issuperset(of_earlier[: len(of_earlier) - order.chunks_in_flight + 1])
    assert all(earlier in before[later] for earlier, later in pairwise(jobs)), "one thread updates"
    sends = [number for number, operation in enumerate(operations) if operation.kind is OperationKind.GRADIENTS_COPY]
    if order.begin is Begin.ON_ARRIVAL:
        for earlier, later in zip(sends, sends[HOST_GRADIENT_BUFFERS:], strict=False):
            read = max(number for number in jobs if operations[number].unit == operations[earlier].unit)
            assert read in before[later]


def test_the_engines_orders_are_those_of_the_operations(case):
    shape, _, operations = case
    access, expected = access_order(operations), expected_order(shape.visits, shape.trainable)
    assert list(access.backward) == list(expected.backward)
    assert access.first(99) == expected.first(99)
    assert access.after(0, Phase.FORWARD, 99) == expected.after(0, Phase.FORWARD, 99)
    sequence = UpdateSequence(operations)
    assert sorted(shape.trainable, key=sequence.place) == sorted(shape.trainable), "as the next forward needs them"
    assert all(list(sequence.chunks(unit)) == [0, 1] for unit in shape.trainable)


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize(("working", "kept"), [(2, 0), (3, 0), (3, 2), (2, 5), (3, BLOCKS + 2)])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_loads_of_a_step_are_as_derived(tied, working, kept, order):
    """`lohan.planning.slots` derives them: n + b - k - s."""
    operations = step_operations(make_shape(tied=tied, working=working, kept=kept), order)
    units, backward = BLOCKS + 2, BLOCKS + 2 if tied else BLOCKS + 1
    again = 1 if tied and kept == 0 else 0
    assert len(of_kind(operations, OperationKind.WEIGHTS_COPY)) == 2 * (units + again + backward - min(kept + working, backward))


def test_frozen_units_at_the_front_have_no_backward():
    operations = step_operations(make_shape(frozen=frozenset({0, 1})), ORDERS["optimized"])
    assert {operation.unit for operation in of_kind(operations, OperationKind.BACKWARD)} == set(range(2, BLOCKS + 2))
    middle = step_operations(make_shape(frozen=frozenset({3})), ORDERS["optimized"])
    assert 3 in {operation.unit for operation in of_kind(middle, OperationKind.BACKWARD)}
    assert 3 not in {operation.unit for operation in of_kind(middle, OperationKind.GRADIENT_SUM)}
