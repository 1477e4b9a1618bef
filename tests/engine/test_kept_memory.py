"""What kept activations take: exactly what is counted, the same in every step, and nothing that stays when it is no longer needed."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lohan.config import Durability, Precision
from lohan.errors import CapacityError, EngineError
from lohan.planning.footprint import KEPT_STAGING_BUFFERS
from lohan.planning.kept_footprint import RegionBytes, retention_items
from lohan.planning.retention import BlockTiers, KeptOperator, Retention
from lohan.planning.tiers import Tier
from lohan.streaming import kept_drive, kept_tiers
from lohan.streaming.kept_drive import FILE
from tests.engine.kept_runs import ATTENTION, GATE, held_bytes, in_tier, one_loss, tiers_of
from tests.engine.reference import adamw, make_batches, make_llama, open_session
from tests.engine.test_commits import fail_each_transfer
from tests.engine.test_streaming import our_threads

PAGE = 4096
GATE_BYTES = 2 * 16 * 160 * 4
"""Of two rows of 16 tokens, in fp32."""
ATTENTION_BYTES = 2 * 16 * 64 * 4 + 2 * 4 * 16 * 4
"""The output and the logarithms of its sums."""
BOUNDARY_BYTES = 2 * 16 * 64 * 4
MIXED = Retention(
    operators=(
        KeptOperator(label=ATTENTION, gpu_blocks=(0,), ram_blocks=(1,), ssd_blocks=(2,)),
        KeptOperator(label=GATE, ram_blocks=(0, 2), ssd_blocks=(1,)),
    ),
    boundaries=BlockTiers(gpu_blocks=(0,), ram_blocks=(1,), ssd_blocks=(2,)),
)


def pages(size_bytes: int) -> int:
    return -(-size_bytes // PAGE) * PAGE


def test_nothing_is_copied_twice_and_nothing_grows(tmp_path):
    model = make_llama()
    moved = 2 * (2 * ATTENTION_BYTES + 3 * GATE_BYTES + 2 * BOUNDARY_BYTES)
    stored = 2 * (ATTENTION_BYTES + GATE_BYTES + BOUNDARY_BYTES)
    with open_session(model, adamw(model), tmp_path, retention=MIXED) as session:
        tiers, sizes = tiers_of(session), []
        for step, batch in enumerate(make_batches(5), start=1):
            model(**batch).loss.backward()
            assert (tiers.bytes_out, tiers.bytes_in) == (step * moved, step * moved)
            assert (tiers.drive.bytes_written, tiers.drive.bytes_read) == (step * stored, step * stored)
            assert not tiers._leaving and not tiers._leaving_bytes
            sizes.append(
                (held_bytes(session), session.host_memory.idle_bytes, tiers.drive.size_bytes, len(session._stages.kept.now._regions))
            )
        assert len({str(entry) for entry in sizes[1:]}) == 1
        assert sizes[0][0] == sizes[-1][0] and sizes[-1][3] == 0


@pytest.mark.parametrize("micro_batch_size", [1, 3, 4])
@pytest.mark.parametrize("precision", Precision)
def test_the_ledger_is_the_plans(precision, micro_batch_size, tmp_path):
    model = make_llama()
    rows = [4] if micro_batch_size == 4 else [3, 1] if micro_batch_size == 3 else [1] * 4
    width = 4 if precision is Precision.FP32 else 2
    sizes = {label: [count * row for count in rows] for label, row in ((ATTENTION, 16 * 64 * width + 4 * 16 * 4), (GATE, 16 * 160 * width))}
    inputs = [count * 16 * 64 * width for count in rows]
    items = retention_items(MIXED, {label: RegionBytes.of(of_label) for label, of_label in sizes.items()}, RegionBytes.of(inputs))
    planned = {item.name: item.bytes for item in items[Tier.RAM]}
    with open_session(model, adamw(model), tmp_path, retention=MIXED, precision=precision, micro_batch_size=micro_batch_size) as session:
        for batch in make_batches(2):
            model(**batch).loss.backward()
        assert held_bytes(session) == planned
        assert {item.name: item.bytes for item in items[Tier.SSD]} == {"kept activations": tiers_of(session).drive.size_bytes}
    assert planned["kept activations on their way"] == KEPT_STAGING_BUFFERS * max(
        pages(size) for label in (GATE, ATTENTION) for size in sizes[label]
    )
    kept_on_device = {item.name: item.bytes for item in items[Tier.GPU]}
    assert kept_on_device["kept activations"] == sum(sizes[ATTENTION])


def test_a_decision_that_keeps_nothing_takes_nothing():
    assert retention_items(Retention(), {}, None) == {Tier.GPU: (), Tier.RAM: (), Tier.SSD: ()}


def test_the_inputs_of_blocks_that_leave_are_not_held(tmp_path):
    """The whole batch's tensor goes once its slices have been copied."""
    alive = []
    for number, retention in enumerate((Retention(), in_tier("ram", [], boundaries=True))):
        inputs: list[StorageWeakRef] = []
        model = make_llama()
        for layer in model.model.layers:
            layer.register_forward_pre_hook(lambda _module, arguments, to=inputs: to.append(StorageWeakRef(arguments[0].untyped_storage())))
        with open_session(model, adamw(model), tmp_path / str(number), retention=retention, micro_batch_size=1):
            loss = one_loss(model)
            assert loss.requires_grad
            alive.append([not reference.expired() for reference in inputs])
    # What is on its way out is held until it has left: as much as the largest region sends, here the last slice.
    assert alive == [[True, True, True], [False, False, True]]


@pytest.mark.parametrize("retention", [MIXED, in_tier("gpu", [GATE])], ids=["mixed", "gpu"])
def test_an_abandoned_forward_leaves_nothing(retention, tmp_path):
    model = make_llama()
    first, *others = make_batches(4)
    with open_session(model, adamw(model), tmp_path, retention=retention) as session:
        model(**first).loss.backward()
        before = held_bytes(session), tiers_of(session).drive.size_bytes if tiers_of(session).drive else 0
        kept = session._stages.kept.now
        for batch in others:
            loss = model(**batch).loss
            regions = [reference for reference in kept._regions if reference() is not None]
            del loss
            gc.collect()
            assert all(reference() is None for reference in regions)
        model(**first).loss.backward()
        assert not kept._regions
        kept.begin_forward()
        assert not kept.abandoned and not tiers_of(session)._leaving
        assert (held_bytes(session), tiers_of(session).drive.size_bytes if tiers_of(session).drive else 0) == before


def test_two_forwards_at_once_have_their_own_buffers_for_as_long(tmp_path):
    model = make_llama()
    first, second, third = make_batches(3)
    with open_session(model, adamw(model), tmp_path, retention=in_tier("ram", [GATE])) as session:
        model(**first).loss.backward()
        before = held_bytes(session)
        (model(**second).loss + model(**third).loss).backward()
        assert held_bytes(session) == before == {"kept activations": 6 * pages(GATE_BYTES)}
        peak = {holding.holder: holding.peak_bytes for holding in session.host_memory.holdings}
        assert peak["kept activations"] == 2 * before["kept activations"]


def test_a_forward_that_breaks_off_leaves_nothing(tmp_path):
    model = make_llama()
    hook = None
    with open_session(model, adamw(model), tmp_path, retention=MIXED) as session:
        one_loss(model).backward()
        before = held_bytes(session)

        def break_off(_module, _arguments):
            raise ValueError("broken off")

        hook = model.model.layers[2].mlp.register_forward_pre_hook(break_off)
        with pytest.raises(ValueError, match="broken off"):
            one_loss(model)
        hook.remove()
        gc.collect()
        one_loss(model).backward()
        assert held_bytes(session) == before and not session._stages.kept.now._regions


def files(folder: Path) -> list[Path]:
    return list(folder.rglob(FILE))


def test_the_file_goes_with_the_session(tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    model = make_llama()
    with open_session(model, adamw(model), tmp_path, retention=MIXED, state_directories=folders):
        one_loss(model).backward()
        assert len(files(tmp_path)) == 2
    assert not files(tmp_path) and not our_threads()
    left = folders[0] / "lohan-states" / FILE
    left.write_bytes(b"of a trainer that was killed")
    model = make_llama()
    with open_session(model, adamw(model), tmp_path, retention=MIXED, state_directories=folders):
        assert not files(tmp_path)


# ---------------------------------------------------------------- failures
def fail_once(original, *, after: int):
    calls = []

    def failing(self, *arguments, **options):
        calls.append(1)
        if len(calls) > after:
            raise RuntimeError("injected")
        return original(self, *arguments, **options)

    return failing


@pytest.mark.parametrize("stage", ["copy out", "copy in", "write", "read", "room in RAM"])
def test_a_failing_stage_stops_the_step_and_leaves_the_last_one(stage, tmp_path, monkeypatch):
    """Two steps are committed, the third fails: what is resumed is the second."""
    target, method, good = {
        "copy out": (kept_tiers.KeptTiers, "_copy_out", 1),
        "copy in": (kept_tiers.KeptTiers, "_copy_in", 1),
        "write": (kept_drive.KeptDrive, "_transfer", 1),
        "read": (kept_drive.KeptDrive, "_transfer", 7),  # six outputs are written first
        "room in RAM": (kept_tiers.KeptTiers, "_host_buffer", 1),
    }[stage]
    model, batches = make_llama(), make_batches(3)
    options = {"retention": MIXED, "durability": Durability.STEP}
    with (
        pytest.raises((EngineError, RuntimeError), match="injected") as caught,
        open_session(model, adamw(model), tmp_path, **options) as session,
    ):
        for batch in batches[:2]:
            model(**batch).loss.backward()
            session.commit({})
            session.wait()
        expected = dict(session.named_weights())
        monkeypatch.setattr(target, method, fail_once(getattr(target, method), after=good))
        model(**batches[2]).loss.backward()
        session.wait()
    if stage in ("write", "read"):
        assert isinstance(caught.value, EngineError) and "kept activations failed" in caught.value.message
        assert isinstance(caught.value.__cause__, RuntimeError)
    monkeypatch.undo()
    assert not files(tmp_path) and not our_threads()
    again = make_llama(seed=1)
    with open_session(again, adamw(again), tmp_path, durability=Durability.STEP, resume=True, retention=MIXED) as session:
        assert session.steps == 2
        assert all(torch.equal(tensor, expected[name]) for name, tensor in session.named_weights())
        again(**batches[2]).loss.backward()


@pytest.mark.parametrize("options", [{}, {"durability": Durability.STEP}], ids=["none", "step"])
def test_whichever_transfer_fails_the_step_stops_with_its_cause(options, tmp_path, monkeypatch):
    retention = in_tier("ssd", [ATTENTION, GATE], blocks=(0,), boundaries=True)
    assert list(fail_each_transfer(tmp_path, monkeypatch, stride=7, retention=retention, **options))


def test_too_little_host_memory_names_the_holder(tmp_path):
    from tests.engine.test_host_memory import plan_of

    model = make_llama()
    plan = plan_of(model, tmp_path, Precision.FP32)
    with open_session(model, adamw(model), tmp_path / "measure") as session:
        needed = session.host_memory.peak_bytes
    ram = plan.tier(Tier.RAM).model_copy(update={"capacity_bytes": needed + 20_000})
    small = plan.model_copy(update={"tiers": (*(tier for tier in plan.tiers if tier.tier is not Tier.RAM), ram)})
    model = make_llama()
    options = {"plan": small, "retention": in_tier("ram", [GATE]), "slots": 3, "kept_units": 0}
    with pytest.raises(CapacityError, match="kept activations needs"), open_session(model, adamw(model), tmp_path / "run", **options):
        one_loss(model)
