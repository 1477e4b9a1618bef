"""Kept activations change no bit: whichever operators' outputs are kept, wherever they wait."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import lohan
from lohan.config import Precision
from lohan.planning.retention import BlockTiers, KeptOperator, Retention
from lohan.streaming.parameters import DebugMode
from tests.engine.kept_runs import ATTENTION, BLOCKS, GATE, GROUPS, in_tier, labels_of, spread, tiers_of, trained
from tests.engine.reference import Outcome, adamw, assert_bitwise_equal, make_batches, make_llama, open_session

ALL_GROUPS = [label for labels in GROUPS.values() for label in labels]
EVERYTHING = spread(ALL_GROUPS).model_copy(update={"boundaries": BlockTiers(ram_blocks=(0, 2), ssd_blocks=(1,))})
_computed_again: dict[tuple[Any, ...], Outcome] = {}


@pytest.fixture
def computed_again(tmp_path_factory):
    """Training of which nothing is kept, once for each setting."""

    def get(**options) -> Outcome:
        key = tuple(sorted(options.items()))
        if key not in _computed_again:
            _computed_again[key] = trained(tmp_path_factory.mktemp("again"), Retention(), **options)
        return _computed_again[key]

    return get


def test_every_operator_of_a_block_can_be_kept_in_every_tier(computed_again, tmp_path):
    labels = labels_of(make_llama(), tmp_path / "labels")
    assert len(labels) > 30 and set(ALL_GROUPS) < set(labels)
    for number, label in enumerate(labels):
        assert_bitwise_equal(trained(tmp_path / str(number), spread([label], shift=number), steps=1), computed_again(steps=1))


@pytest.mark.parametrize("count", range(1, len(GROUPS) + 1))
def test_all_subsets_of_the_groups(count, computed_again, tmp_path):
    for number, groups in enumerate(combinations(GROUPS, count)):
        labels = [label for group in groups for label in GROUPS[group]]
        kept = trained(tmp_path / str(number), spread(labels, shift=number), steps=1, debug=DebugMode.NAN_FILL)
        assert_bitwise_equal(kept, computed_again(steps=1))


@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("micro_batch_size", [1, 3, 4])
@pytest.mark.parametrize("tier", ["gpu", "ram", "ssd"])
def test_tiers_precisions_and_micro_batches(tier, micro_batch_size, precision, computed_again, tmp_path):
    """3 of 4 rows: the second micro-batch has one."""
    options = {"micro_batch_size": micro_batch_size, "precision": precision}
    kept = trained(tmp_path, in_tier(tier, ALL_GROUPS, boundaries=True), **options)
    assert_bitwise_equal(kept, computed_again(**options))


@pytest.mark.parametrize(
    "options",
    [
        {"slots": 2},
        {"kept_units": 4},
        {"schedule": "serial"},
        {"clip": "global", "max_gradient_norm": 0.5},
        {"micro_batch_size": 1, "debug": DebugMode.NAN_FILL},
    ],
    ids=["two slots", "kept units", "serial", "clipped", "debug"],
)
def test_everything_at_once_with_other_settings(options, computed_again, tmp_path):
    again = {name: value for name, value in options.items() if name != "debug"}
    assert_bitwise_equal(trained(tmp_path, EVERYTHING, steps=3, **options), computed_again(steps=3, **again))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_tied_embeddings_and_accumulation(attention, tmp_path):
    retention = in_tier("ram", [GATE, "mlp:mul#0"], boundaries=True)
    outcomes = [
        trained(tmp_path / str(number), kept, model=make_llama(tied=True, attention=attention), steps=6, accumulation=3)
        for number, kept in enumerate((Retention(), retention))
    ]
    assert_bitwise_equal(*outcomes)


def test_several_directories_share_the_file(computed_again, tmp_path):
    folders = [tmp_path / name for name in ("a", "b", "c")]
    kept = trained(tmp_path, in_tier("ssd", ALL_GROUPS, boundaries=True), state_directories=folders)
    assert_bitwise_equal(kept, computed_again())


def test_frozen_blocks(tmp_path):
    """The first block is then no region at all, the second one's only gradient is its input's."""
    outcomes = []
    for number, retention in enumerate((Retention(), EVERYTHING)):
        model = make_llama()
        model.model.embed_tokens.requires_grad_(requires_grad=False)
        model.model.layers[0].requires_grad_(requires_grad=False)
        model.model.layers[2].requires_grad_(requires_grad=False)
        outcomes.append(trained(tmp_path / str(number), retention, model=model))
    assert_bitwise_equal(*outcomes)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_dropout_draws_the_same_numbers(attention, tmp_path):
    """Everything is kept but what draws them: the recomputation then begins with the same generator and comes as far."""
    model = make_llama(attention=attention, attention_dropout=0.2)
    names = {label: label.rpartition(":")[2].partition("#")[0] for label in labels_of(model, tmp_path / "labels")}
    # On the CPU a mask is drawn into empty memory, and scaled there: none of the three can be kept.
    labels = [label for label, name in names.items() if "dropout" not in name and name != "empty_like" and not name.endswith("_")]
    assert len(labels) < len(names)
    outcomes = [
        trained(tmp_path / str(number), retention, model=make_llama(attention=attention, attention_dropout=0.2))
        for number, retention in enumerate((Retention(), spread(labels), spread(labels, shift=1)))
    ]
    assert_bitwise_equal(outcomes[0], outcomes[1])
    assert_bitwise_equal(outcomes[0], outcomes[2])


def test_batches_of_other_shapes_use_the_same_places(tmp_path):
    """Shorter rows and fewer of them, first and in between."""
    batches = [
        *make_batches(1, batch=3, length=10),
        *make_batches(1),
        *make_batches(1, batch=1, length=16, seed=2),
        *make_batches(1, seed=3),
    ]
    ends = []
    for number, retention in enumerate((Retention(), EVERYTHING)):
        model = make_llama()
        with open_session(model, adamw(model), tmp_path / str(number), retention=retention, debug=DebugMode.NAN_FILL) as session:
            losses = []
            for batch in batches:
                loss = model(**batch).loss
                loss.backward()
                losses.append(loss.item())
            session.wait()
            ends.append((losses, session.statistics.last_step.squared_gradient_norm))
    assert ends[0] == ends[1]


def test_two_forwards_may_share_a_backward(tmp_path):
    norms = []
    for number, retention in enumerate((Retention(), EVERYTHING)):
        model = make_llama()
        first, second = make_batches(2)
        with open_session(model, adamw(model), tmp_path / str(number), retention=retention) as session:
            (model(**first).loss + model(**second).loss).backward()
            session.wait()
            norms.append(session.statistics.last_step.squared_gradient_norm)
    assert norms[0] == norms[1]


class Counting(TorchDispatchMode):
    """What is dispatched inside the block, by operator."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))


def counts_in_backward(folder, retention: Retention) -> Counter[str]:
    model = make_llama()
    with open_session(model, adamw(model), folder, retention=retention):
        loss = model(**make_batches(1)[0]).loss
        with Counting() as counting:
            loss.backward()
    return counting.counts


@pytest.mark.parametrize("tier", ["gpu", "ram", "ssd"])
def test_what_is_kept_is_not_computed_again(tier, tmp_path):
    """Seven matmuls a block, of which the recomputation stops before the last; two micro-batches."""
    again = counts_in_backward(tmp_path / "again", Retention())
    matmuls = counts_in_backward(tmp_path / "matmuls", in_tier(tier, GROUPS["matmuls"]))
    assert again["aten.mm"] - matmuls["aten.mm"] == 2 * len(BLOCKS) * 6
    assert again["aten.silu"] == matmuls["aten.silu"]
    attention = counts_in_backward(tmp_path / "attention", in_tier(tier, [ATTENTION], blocks=(0, 2)))
    name = next(name for name in again if "attention" in name and "backward" not in name)
    assert (again[name], attention[name]) == (2 * 3, 2)
    assert attention["aten.mm"] == again["aten.mm"]


def test_a_block_of_which_nothing_is_kept_has_no_mode(tmp_path, monkeypatch):
    from torch.utils import checkpoint

    contexts = []
    original = checkpoint._checkpoint_without_reentrant_generator

    def noting(fn, preserve, context_fn, *arguments, **options):
        contexts.append(context_fn is not checkpoint.noop_context_fn)
        return original(fn, preserve, context_fn, *arguments, **options)

    monkeypatch.setattr(checkpoint, "_checkpoint_without_reentrant_generator", noting)
    model = make_llama()
    with open_session(model, adamw(model), tmp_path, retention=in_tier("gpu", [GATE], blocks=(1,))):
        model(**make_batches(1)[0])
    # Two micro-batches of three blocks and the norm, and the head.
    assert contexts == [False] * 2 + [True] * 2 + [False] * 5


def test_without_gradients_nothing_is_kept(tmp_path):
    model = make_llama()
    with open_session(model, adamw(model), tmp_path, retention=EVERYTHING) as session:
        with torch.no_grad():
            model(**make_batches(1)[0])
        assert tiers_of(session).bytes_out == 0
        assert not tiers_of(session).drive.size_bytes


@pytest.mark.usefixtures("deterministic")
def test_two_runs_are_the_same_bit_for_bit(tmp_path):
    options = {"steps": 4, "micro_batch_size": 1}
    assert_bitwise_equal(*(trained(tmp_path / name, EVERYTHING, **options) for name in ("first", "second")))


def test_the_plan_says_what_is_kept_unless_it_is_asked_for(tmp_path):
    from tests.engine.test_host_memory import plan_of

    model = make_llama()
    plan = plan_of(model, tmp_path, Precision.FP32).model_copy(update={"retention": in_tier("ram", [GATE])})
    for given, copied in ((None, True), (Retention(), False)):
        model = make_llama()
        with open_session(model, adamw(model), tmp_path / str(copied), plan=plan, retention=given, micro_batch_size=None) as session:
            model(**make_batches(1)[0]).loss.backward()
            assert (session._stages.kept.now is not None and tiers_of(session).bytes_out > 0) is copied


def test_accumulated_backwards_keep_each_forwards_own(tmp_path):
    """The first forward's activations are taken before the second's come, and both are right."""
    norms = []
    for number, retention in enumerate((Retention(), in_tier("ssd", [ATTENTION, GATE], boundaries=True))):
        model = make_llama()
        first, second = make_batches(2)
        with open_session(model, adamw(model), tmp_path / str(number), retention=retention) as session:
            loss = model(**first).loss
            with lohan.accumulate():
                loss.backward()
            model(**second).loss.backward()
            session.wait()
            norms.append(session.statistics.last_step.squared_gradient_norm)
    assert norms[0] == norms[1]


def test_an_operator_may_lie_in_different_tiers():
    operator = KeptOperator(label=GATE, gpu_blocks=(0,), ssd_blocks=(2,))
    assert Retention(operators=(operator,)).kept(2) == {GATE: "ssd"}
