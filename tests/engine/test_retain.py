"""`Session.retain`: what is kept changes between two steps, and changes no bit; what cannot be changed leaves everything as it was."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import lohan
from lohan.config import Durability, Precision, UnsafeFilesystems
from lohan.errors import CapacityError, ConfigError, EngineError
from lohan.planning.comparison import compare
from lohan.planning.operations import OperationKind, UpdateSequence, access_order
from lohan.planning.retention import BlockTiers, KeptOperator, Retention
from lohan.planning.tiers import Tier
from lohan.streaming.kept_drive import FILE
from lohan.streaming.parameters import DebugMode
from lohan.streaming.trace import Trace
from tests.engine.kept_runs import ATTENTION, GATE, GROUPS, held_bytes, in_tier, one_loss, spread, tiers_of
from tests.engine.reference import (
    Outcome,
    adamw,
    assert_bitwise_equal,
    make_batches,
    make_llama,
    on_device_of,
    open_session,
    train_streamed,
    weights_of,
)
from tests.engine.test_kept_memory import MIXED
from tests.engine.test_streaming import our_threads

LABELS = [label for labels in GROUPS.values() for label in labels]
EAGER_LABELS = [label for label in LABELS if label != ATTENTION]
NOTHING = Retention()
SWITCHES: Mapping[int, Retention] = {
    1: in_tier("ram", [GATE, "mlp:mul#0"], boundaries=True),
    2: MIXED,
    3: NOTHING,
    4: in_tier("ssd", LABELS, blocks=(0, 2), boundaries=True),
    5: spread(LABELS).model_copy(update={"boundaries": BlockTiers(ram_blocks=(0,), ssd_blocks=(1, 2))}),
    6: in_tier("gpu", LABELS),
}
"""By the step before which they come."""
STEPS = 8


def switching(
    folder: Path, switches: Mapping[int, Retention], *, first: Retention = NOTHING, model: Any = None, steps: int = STEPS, **options: Any
) -> Outcome:
    """As `train_streamed`, changing what is kept."""
    model = model or make_llama()
    before = weights_of(model)
    optimizer = adamw(model)
    losses, norms = [], []
    with open_session(model, optimizer, folder, retention=first, **options) as session:
        torch.manual_seed(7)
        for step, batch in enumerate(make_batches(steps, padded=True)):
            if step in switches:
                session.retain(switches[step])
            loss = model(**on_device_of(model, batch)).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            session.wait_gradients()
            norms.append(session.statistics.last_step.squared_gradient_norm)
        after = {name: tensor.float() for name, tensor in session.named_weights()}
    assert not list(folder.rglob(FILE)) and not our_threads()
    return Outcome(losses, before, after, norms)


DURABLE = {"durability": Durability.STEP, "unsafe_filesystems": UnsafeFilesystems.ALLOW}


@pytest.mark.parametrize("debug", DebugMode)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clip": "global", "max_gradient_norm": 0.5},
        {"schedule": "optimized", "gradient_buffers": "all", **DURABLE},
        {"clip": "global", "clip_updates": "speculate", "max_gradient_norm": 0.5, **DURABLE, "ram_state_bytes": 10**6},
        {"precision": Precision.BF16, "micro_batch_size": 1, "slots": 2},
    ],
    ids=["plain", "clipped", "durable", "speculated", "bf16"],
)
def test_switching_changes_no_bit(options, debug, tmp_path):
    found = switching(tmp_path / "switching", SWITCHES, debug=debug, **options)
    for name, retention in (("nothing", NOTHING), ("mixed", MIXED)):
        expected = train_streamed(make_llama(), make_batches(STEPS, padded=True), tmp_path / name, retention=retention, **options)
        assert_bitwise_equal(found, expected)


def test_a_session_that_kept_something_from_the_start_can_keep_nothing_and_again(tmp_path):
    found = switching(tmp_path / "switching", {2: NOTHING, 4: MIXED, 5: MIXED}, first=MIXED)
    expected = train_streamed(make_llama(), make_batches(STEPS, padded=True), tmp_path / "mixed", retention=MIXED)
    assert_bitwise_equal(found, expected)


def test_before_the_first_step_too(tmp_path):
    found = switching(tmp_path / "switching", {0: MIXED})
    assert_bitwise_equal(found, train_streamed(make_llama(), make_batches(STEPS, padded=True), tmp_path / "mixed", retention=MIXED))


def test_what_is_held_and_moved_is_the_new_decisions(tmp_path):
    """To the byte what a session holds that had it from the start, and nothing beyond it."""
    model = make_llama()
    with open_session(model, adamw(model), tmp_path / "fresh", retention=MIXED) as session:
        for _ in range(2):
            one_loss(model).backward()
        expected = held_bytes(session), tiers_of(session).drive.size_bytes
        operations = session.operations
    model = make_llama()
    with open_session(model, adamw(model), tmp_path / "switched", retention=in_tier("ram", LABELS, boundaries=True)) as session:
        one_loss(model).backward()
        session.retain(MIXED)
        assert (held_bytes(session), tiers_of(session).drive.size_bytes) == expected, "room is made at once"
        for _ in range(2):
            one_loss(model).backward()
        assert (held_bytes(session), tiers_of(session).drive.size_bytes) == expected
        assert session.operations == operations
        tiers = tiers_of(session)
        session.retain(NOTHING)
        assert not any(held_bytes(session).values()) and not list(tmp_path.rglob(FILE))
        assert not any(operation.kind is OperationKind.ACTIVATIONS_OUT for operation in session.operations)
        assert not {"lohan-kept-writer", "lohan-kept-reader"} & set(our_threads())
        session.retain(MIXED)
        assert tiers_of(session) is tiers, "streams are made once"
        kept = session._stages.kept.now
        session.retain(MIXED)
        assert session._stages.kept.now is kept, "there is nothing to change"


def test_many_switches_leave_nothing_behind(tmp_path):
    model = make_llama()
    with open_session(model, adamw(model), tmp_path) as session:
        one_loss(model).backward()
        sizes = []
        for _ in range(4):
            for retention in (MIXED, NOTHING):
                session.retain(retention)
                one_loss(model).backward()
            memory, waiters = session.host_memory, session._stages.failure._waiters
            sizes.append((memory.held_bytes, memory.idle_bytes, len(waiters), len(our_threads())))
        assert len(set(sizes)) == 1
        hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
        assert not any(hooks)


# ---------------------------------------------------------------- when it may be asked for
def test_not_while_a_step_is_under_way(tmp_path):
    model = make_llama()
    with open_session(model, adamw(model), tmp_path, retention=MIXED) as session:
        one_loss(model).backward()
        loss = one_loss(model)
        with pytest.raises(EngineError, match="step 2 has begun: a forward waits for its backward"):
            session.retain(NOTHING)
        loss.backward()
        session.retain(NOTHING)
        with lohan.accumulate():
            one_loss(model).backward()
        with pytest.raises(EngineError, match="step 3 has begun: some of its backwards are done"):
            session.retain(MIXED)
        one_loss(model).backward()
        session.retain(MIXED)
        loss = one_loss(model)
        del loss
        gc.collect()
        session.retain(in_tier("ssd", [GATE]))
        one_loss(model).backward()
    with pytest.raises(EngineError, match="the session is closed"):
        session.retain(NOTHING)


def test_a_graph_that_outlived_its_step_gives_everything_back_and_cannot_be_gone_through(tmp_path):
    model = make_llama()
    with open_session(model, adamw(model), tmp_path, retention=MIXED) as session:
        left = one_loss(model)
        one_loss(model).backward()
        session.retain(NOTHING)
        assert not any(held_bytes(session).values())
        with pytest.raises(EngineError):
            left.backward()


@pytest.mark.parametrize("retention", [in_tier("ram", [GATE], blocks=(7,)), in_tier("gpu", ["?"])], ids=["block", "operator"])
def test_what_the_model_does_not_have_is_said_and_loses_nothing(retention, tmp_path):
    """A block at once, an operator in the next forward, after which there is the way back."""
    model = make_llama()
    batches = make_batches(2)
    with open_session(model, adamw(model), tmp_path / "wrong", retention=MIXED) as session:
        model(**batches[0]).loss.backward()
        with pytest.raises(EngineError, match=r"in block 7, and the model has 3 blocks|there is no operator \?"):
            session.retain(retention)
            model(**batches[1])
        gc.collect()
        session.retain(MIXED)
        model(**batches[1]).loss.backward()
        found = dict(session.named_weights())
    expected = train_streamed(make_llama(), batches, tmp_path / "right", retention=MIXED)
    assert all(torch.equal(found[name].float(), expected.after[name]) for name in found)


def test_a_compiled_block_is_not_watched_for_its_sizes(tmp_path):
    """It would run uncompiled then. Room is made in the next forward instead."""
    model = make_llama()
    mlp = model.model.layers[0].mlp
    mlp._compiled_call_impl = mlp._call_impl  # as `Module.compile` sets it, without a compiler
    for layer in model.model.layers[1:]:
        layer._compiled_call_impl = layer._call_impl
    with open_session(model, adamw(model), tmp_path) as session:
        one_loss(model).backward()
        session.retain(in_tier("ram", [ATTENTION]))
        assert not held_bytes(session)
        one_loss(model).backward()
        assert held_bytes(session)["kept activations"]


# ---------------------------------------------------------------- room
def small_plan(model: Any, folder: Path, capacity_bytes: int) -> Any:
    from tests.engine.test_host_memory import plan_of

    plan = plan_of(model, folder, Precision.FP32)
    ram = plan.tier(Tier.RAM).model_copy(update={"capacity_bytes": capacity_bytes})
    return plan.model_copy(update={"tiers": (*(tier for tier in plan.tiers if tier.tier is not Tier.RAM), ram)})


@pytest.mark.parametrize("first", [in_tier("ram", [GATE]), MIXED, NOTHING], ids=["ram", "mixed", "nothing"])
def test_what_there_is_no_room_for_leaves_the_old_as_it_was(first, tmp_path):
    model = make_llama()
    with open_session(model, adamw(model), tmp_path / "measure", retention=first, slots=3) as session:
        one_loss(model).backward()
        needed, operations = session.host_memory.peak_bytes, session.operations
    plan = small_plan(make_llama(), tmp_path, needed + 10_000)
    model, batches = make_llama(), make_batches(3, padded=True)
    with open_session(model, adamw(model), tmp_path / "run", plan=plan, retention=first, slots=3, kept_units=0) as session:
        model(**batches[0]).loss.backward()
        held = held_bytes(session)
        with pytest.raises(CapacityError, match="kept activations needs"):
            session.retain(in_tier("ram", LABELS, boundaries=True))
        assert session.operations == operations
        for batch in batches[1:]:
            model(**batch).loss.backward()
        assert +Counter(held_bytes(session)) == held
        found = dict(session.named_weights())
    expected = train_streamed(make_llama(), batches, tmp_path / "expected", retention=first)
    assert all(torch.equal(found[name].float(), expected.after[name]) for name in found)


def test_what_replaces_the_old_need_not_fit_beside_it(tmp_path):
    """Two decisions that fill the budget, one after the other."""
    decisions = [in_tier("ram", LABELS), in_tier("ram", LABELS[:-2], boundaries=True)]
    model = make_llama()
    with open_session(model, adamw(model), tmp_path / "measure", retention=decisions[0], slots=3) as session:
        one_loss(model).backward()
        needed = session.host_memory.peak_bytes
    plan = small_plan(make_llama(), tmp_path, needed + 200_000)
    model = make_llama()
    with open_session(model, adamw(model), tmp_path / "run", plan=plan, retention=decisions[0], slots=3, kept_units=0) as session:
        for retention in (*decisions, *decisions):
            session.retain(retention)
            one_loss(model).backward()
        assert session.host_memory.peak_bytes <= needed + 200_000


# ---------------------------------------------------------------- micro-batches
def test_another_micro_batch_is_that_of_a_session_made_with_it(tmp_path):
    """Nothing else of the stream or the optimizer depends on it."""
    batches = make_batches(3, padded=True)
    model = make_llama(tied=True)
    trace = Trace(first_step=2, steps=2)
    with open_session(model, adamw(model), tmp_path / "switched", micro_batch_size=4, trace=trace) as session:
        session.retain(MIXED, micro_batch_size=1)
        assert session.micro_batch_size == 1
        for batch in batches:
            model(**batch).loss.backward()
            session.wait()
        operations, found = session.operations, dict(session.named_weights())
        assert not [difference for step in trace.steps for difference in compare(operations, step)]
        session.retain(MIXED)
        assert session.micro_batch_size == 1
        with pytest.raises(ConfigError, match="micro_batch_size is 0"):
            session.retain(MIXED, micro_batch_size=0)
    model = make_llama(tied=True)
    with open_session(model, adamw(model), tmp_path / "made", micro_batch_size=1, retention=MIXED) as session:
        for batch in batches:
            model(**batch).loss.backward()
        assert session.operations == operations
        assert all(torch.equal(tensor, found[name]) for name, tensor in session.named_weights())


@pytest.mark.parametrize("options", [{}, {"grain": "module"}, {"kept_units": 2, "slots": 2}, {"schedule": "serial"}])
def test_the_order_of_units_does_not_depend_on_micro_batches(options, tmp_path):
    model = make_llama(tied=True)
    with open_session(model, adamw(model), tmp_path, micro_batch_size=4, **options) as session:
        orders = []
        for micro_batch in (4, 3, 1):
            session.retain(NOTHING, micro_batch_size=micro_batch)
            updates = UpdateSequence(session.operations)
            access = access_order(session.operations)
            orders.append((access._sequences, updates._chunks, updates._places))
        assert orders[0] == orders[1] == orders[2]


# ---------------------------------------------------------------- on a GPU
def without_attention(retention: Retention) -> Retention:
    """Eager attention has no such operator."""
    operators = tuple(operator for operator in retention.operators if operator.label != ATTENTION)
    return retention.model_copy(update={"operators": operators})


@pytest.mark.gpu
@pytest.mark.usefixtures("no_tf32", "deterministic_on_gpu")
@pytest.mark.parametrize("options", [{}, {"clip": "global", "max_gradient_norm": 0.5, **DURABLE}], ids=["plain", "clipped"])
def test_switching_changes_no_bit_on_a_gpu(options, tmp_path):
    """Copy streams delayed at random, and NaN in whatever was given back."""
    switches = {step: without_attention(retention) for step, retention in SWITCHES.items()}
    settings: dict[str, Any] = {"device": "cuda", "debug": DebugMode.NAN_FILL, **options}
    found = switching(tmp_path / "switching", switches, model=make_llama(attention="eager"), **settings)
    for name, retention in (("nothing", NOTHING), ("all", in_tier("ram", EAGER_LABELS, boundaries=True))):
        model = make_llama(attention="eager")
        expected = train_streamed(model, make_batches(STEPS, padded=True), tmp_path / name, retention=retention, **settings)
        assert_bitwise_equal(found, expected)


@pytest.mark.gpu
def test_switches_leave_no_memory_on_a_gpu(tmp_path):
    model = make_llama(attention="eager")
    with open_session(model, adamw(model), tmp_path, device="cuda") as session:
        sizes = []
        for _ in range(4):
            for retention in (in_tier("gpu", EAGER_LABELS), KEPT_OUTSIDE, NOTHING):
                session.retain(retention)
                model(**on_device_of(model, make_batches(1)[0])).loss.backward()
            session.wait()
            torch.cuda.synchronize()
            sizes.append((torch.cuda.memory_allocated(), session.host_memory.held_bytes))
        assert len(set(sizes[1:])) == 1


KEPT_OUTSIDE = Retention(operators=(KeptOperator(label=GATE, ram_blocks=(0, 2), ssd_blocks=(1,)),))
