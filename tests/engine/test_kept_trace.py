"""Kept activations in the step as data, and in the trace of a step that did what it says."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from lohan.config import Precision
from lohan.planning.comparison import DifferenceKind, compare
from lohan.planning.kept_operations import KeptShape
from lohan.planning.operations import OperationKind, Resource, StepShape, step_operations
from lohan.planning.retention import BlockTiers, Retention
from lohan.planning.schedule import UPDATE_ORDERS
from lohan.planning.step_trace import Wait
from lohan.planning.tiers import Tier
from lohan.streaming import kept_drive
from lohan.streaming import trace as tracing
from tests.engine.kept_runs import ATTENTION, GATE, GROUPS, in_tier, spread
from tests.engine.reference import make_llama
from tests.engine.test_kept_memory import ATTENTION_BYTES, BOUNDARY_BYTES, GATE_BYTES, MIXED
from tests.engine.test_operations import BLOCKS, REGIONS, everything_before, make_shape, of_kind
from tests.engine.test_trace import assert_as_scheduled, traced

MOVES = (OperationKind.ACTIVATIONS_OUT, OperationKind.ACTIVATIONS_WRITE, OperationKind.ACTIVATIONS_READ, OperationKind.ACTIVATIONS_IN)
ORDERED = spread(["input_layernorm:mul#1", "self_attn:add#0", ATTENTION, GATE, "mlp:mul#0"])
ORDERED_WITH_INPUTS = ORDERED.model_copy(update={"boundaries": BlockTiers(ram_blocks=(0,), ssd_blocks=(1, 2))})


@pytest.mark.parametrize("micro_batch_size", [4, 1])
@pytest.mark.parametrize(
    "retention",
    [MIXED, ORDERED, ORDERED_WITH_INPUTS, in_tier("ram", GROUPS["attention"], boundaries=True), in_tier("ssd", [GATE], blocks=(1,))],
    ids=["mixed", "all tiers", "all tiers and inputs", "RAM", "one block on the drive"],
)
def test_a_step_moves_exactly_what_its_operations_say(retention, micro_batch_size, tmp_path):
    assert_as_scheduled(*traced(make_llama(), tmp_path, retention=retention, micro_batch_size=micro_batch_size))


@pytest.mark.parametrize(
    "options",
    [{"schedule": "serial"}, {"slots": 2, "kept_units": 2}, {"precision": Precision.BF16}, {"clip": "global"}],
    ids=["serial", "kept units", "bf16", "clipped"],
)
def test_so_it_does_with_other_settings(options, tmp_path):
    assert_as_scheduled(*traced(make_llama(tied=True), tmp_path, retention=MIXED, **options))


def test_so_it_does_where_the_first_blocks_are_frozen(tmp_path):
    model = make_llama()
    model.model.embed_tokens.requires_grad_(requires_grad=False)
    model.model.layers[0].requires_grad_(requires_grad=False)
    assert_as_scheduled(*traced(model, tmp_path, retention=ORDERED_WITH_INPUTS))


def test_bytes_lie_on_the_resources_that_move_them(tmp_path):
    _, steps = traced(make_llama(), tmp_path, retention=MIXED)
    moved = 2 * (2 * ATTENTION_BYTES + 3 * GATE_BYTES + 2 * BOUNDARY_BYTES)
    stored = 2 * (ATTENTION_BYTES + GATE_BYTES + BOUNDARY_BYTES)
    for step in steps:
        sums = Counter({kind: sum(span.bytes for span in step.spans if span.kind is kind) for kind in MOVES})
        assert [sums[kind] for kind in MOVES] == [moved, stored, stored, moved]
        resources = [next(span.resource for span in step.spans if span.kind is kind) for kind in MOVES]
        assert resources == [Resource.G2M, Resource.SSD_WRITE, Resource.SSD_READ, Resource.M2G]


@pytest.mark.parametrize(("transfer", "wait"), [("write", Wait.ROOM_FOR_ACTIVATIONS), ("read", Wait.ACTIVATIONS)])
def test_waits_for_the_drive_have_their_cause(transfer, wait, tmp_path, monkeypatch):
    """Each transfer ends only when somebody waits for it, or a little later."""
    original, held = kept_drive.KeptDrive._transfer, threading.Event()

    def slow(drive, output, buffer, kind):
        if kind.value.endswith(transfer):
            held.wait(0.02)
        original(drive, output, buffer, kind)

    monkeypatch.setattr(kept_drive.KeptDrive, "_transfer", slow)
    monkeypatch.setattr(tracing, "_LEAST_WAIT_SECONDS", 1e-3)
    _, steps = traced(make_llama(), tmp_path, retention=in_tier("ssd", [ATTENTION, GATE]))
    assert all(step.waits()[wait] > 0.02 for step in steps)


def test_what_comes_too_early_is_found(tmp_path):
    """The comparison would see a read before its write, or a copy back before the device has room for it."""
    operations, steps = traced(make_llama(), tmp_path, retention=in_tier("ssd", [GATE]))
    (step, _) = steps
    late = max(span.end_seconds for span in step.spans)
    spans = tuple(
        span if span.kind is not OperationKind.ACTIVATIONS_WRITE else type(span)(*(*astuple_of(span)[:-1], late)) for span in step.spans
    )
    found = {
        (difference.kind, difference.operation.kind)
        for difference in compare(operations, type(step)(step.step, step.start_seconds, late, spans))
    }
    assert (DifferenceKind.TOO_EARLY, OperationKind.ACTIVATIONS_READ) in found


def astuple_of(span):
    return tuple(getattr(span, name) for name in type(span).__dataclass_fields__)


# ---------------------------------------------------------------- the operations by themselves
def kept_shape(tier: Tier, *, units=range(1, BLOCKS + 1)) -> StepShape:
    from dataclasses import replace

    shapes = (KeptShape(1, tier, (50, 50), is_input=True), KeptShape(0, tier, (100, 100)))
    return replace(make_shape(), kept=dict.fromkeys(units, shapes))


@pytest.mark.parametrize("order", UPDATE_ORDERS.values(), ids=UPDATE_ORDERS)
@pytest.mark.parametrize("tier", [Tier.RAM, Tier.SSD])
def test_what_leaves_comes_back_before_it_is_needed(tier, order):
    operations = step_operations(kept_shape(tier), order)
    before = everything_before(operations)
    counts = Counter(operation.kind for operation in operations)
    stored = tier is Tier.SSD
    assert [counts[kind] for kind in MOVES] == [2 * REGIONS * BLOCKS, *[2 * REGIONS * BLOCKS * stored] * 2, 2 * REGIONS * BLOCKS]
    place = {
        (operation.kind, operation.unit, operation.chunk, operation.micro_batch): number for number, operation in enumerate(operations)
    }
    for unit in range(1, BLOCKS + 1):
        for region in range(REGIONS):
            backward = place[OperationKind.BACKWARD, unit, None, region]
            for kept in (0, 1):
                out, write, read, back = (place.get((kind, unit, kept, region)) for kind in MOVES)
                assert back > out and out in before[back]
                assert not stored or (out in before[write] and write in before[read] and read in before[back])
                assert (
                    place[OperationKind.GRADIENT_SUM, unit, None, region]
                    and back in before[place[OperationKind.GRADIENT_SUM, unit, None, region]]
                )
            assert place[OperationKind.ACTIVATIONS_IN, unit, 1, region] in before[backward], "the input is there when the region begins"


def test_what_is_on_its_way_out_is_bounded_by_one_region():
    operations = step_operations(kept_shape(Tier.RAM), next(iter(UPDATE_ORDERS.values())))
    before = everything_before(operations)
    outs = [number for number, operation in enumerate(operations) if operation.kind is OperationKind.ACTIVATIONS_OUT]
    forwards = [
        number
        for number, operation in enumerate(operations)
        if operation.kind is OperationKind.FORWARD and operation.unit in range(1, BLOCKS + 1)
    ]
    for region, forward in enumerate(forwards[2:], start=2):
        assert set(outs[: 2 * (region - 1)]) <= before[forward], "all but the region's before this one have left"
    assert len(of_kind(operations, OperationKind.ACTIVATIONS_OUT)) == len(outs)


@pytest.mark.gpu
@pytest.mark.parametrize("retention", [MIXED, ORDERED_WITH_INPUTS, Retention()], ids=["mixed", "all tiers", "none"])
def test_so_it_does_on_a_gpu(retention, tmp_path):
    # In fp32 a GPU has no kernel for grouped attention, whose output `retention` names.
    operations, steps = traced(make_llama(), tmp_path, retention=retention, device="cuda", precision=Precision.BF16)
    assert steps
    for step in steps:
        differences = compare(operations, step, tolerance_seconds=2e-4)
        assert not differences, "\n".join(map(str, differences[:20]))
