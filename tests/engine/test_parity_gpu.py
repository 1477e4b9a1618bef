"""Parity on a GPU, in the debug mode that fills released slots with NaN and delays the copy streams at random."""

from __future__ import annotations

import statistics

import pytest
import torch

from lohan.config import Precision, UpdateSchedule
from lohan.streaming.parameters import DebugMode
from lohan.units import MIB
from tests.engine.reference import (
    assert_bitwise_equal,
    assert_equal_training,
    block_slices,
    make_batches,
    make_llama,
    relative_difference,
    train_plain,
    train_plain_bf16,
    train_streamed,
    twin,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("no_tf32")]
STEPS = 20


@pytest.mark.parametrize("debug", DebugMode)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_parity_gpu_fp32(tied, debug, tmp_path):
    model = make_llama(tied=tied)
    plain = train_plain(twin(model).cuda(), make_batches(STEPS, padded=True))
    assert_equal_training(train_streamed(model, make_batches(STEPS, padded=True), tmp_path, device="cuda", debug=debug), plain)


@pytest.mark.parametrize(
    "options",
    [{"slots": 2}, {"slots": 2, "kept_units": 3}, {"grain": "module"}, {"grain": "module", "slots": 2, "kept_units": 5}],
    ids=["two slots", "three units kept", "modules", "modules, five units kept"],
)
def test_parity_gpu_wide_units_and_few_slots(options, tmp_path):
    """Units of 13 MB: copies take long enough that a missing wait between streams would show."""
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6, "num_attention_heads": 8}
    model = make_llama(**sizes)
    batches = make_batches(6, batch=8, length=128, padded=True)
    plain = train_plain(twin(model).cuda(), batches)
    options = {"batch_size": 8, "seq_length": 128, "chunk_parameters": 1024 * 1024, "debug": DebugMode.NAN_FILL, **options}
    assert_equal_training(train_streamed(model, batches, tmp_path, device="cuda", **options), plain)


def test_parity_gpu_dropout(tmp_path):
    model = make_llama(attention="eager", attention_dropout=0.2)
    plain_model = twin(model).cuda()
    with block_slices(plain_model, 2):
        plain = train_plain(plain_model, make_batches(STEPS, padded=True))
    assert_equal_training(train_streamed(model, make_batches(STEPS, padded=True), tmp_path, device="cuda"), plain)


def test_parity_gpu_bf16(tmp_path):
    model = make_llama(tied=True)
    plain = train_plain_bf16(twin(model).cuda(), make_batches(STEPS, padded=True))
    streamed = train_streamed(
        model, make_batches(STEPS, padded=True), tmp_path, device="cuda", precision=Precision.BF16, debug=DebugMode.NAN_FILL
    )
    for step, (ours, theirs) in enumerate(zip(streamed.losses, plain.losses, strict=True)):
        assert abs(ours - theirs) <= 1e-3 * abs(theirs), f"loss of step {step + 1}: {ours} != {theirs}"
    assert relative_difference(streamed, plain) < 0.2


@pytest.mark.parametrize("schedule", UpdateSchedule)
@pytest.mark.parametrize("clip", ["none", "global"])
def test_parity_gpu_schedules_with_clipping_and_accumulation(schedule, clip, tmp_path):
    model, batches = make_llama(tied=True), make_batches(12, padded=True)
    limit = {"max_gradient_norm": 0.5} if clip == "global" else {}
    plain = train_plain(twin(model).cuda(), batches, accumulation=3, **limit)
    options = {"schedule": schedule, "clip": clip, "accumulation": 3, "debug": DebugMode.NAN_FILL, **limit}
    assert_equal_training(train_streamed(model, batches, tmp_path, device="cuda", **options), plain)


@pytest.mark.parametrize(
    "states",
    [{"durability": "step"}, {"ram_state_bytes": 1 << 30, "spare_state_bytes": 1 << 30}],
    ids=["committed steps", "second places"],
)
def test_parity_gpu_of_speculated_and_deferred_steps_bit_for_bit(states, tmp_path):
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        options = {"device": "cuda", "clip": "global", "debug": DebugMode.NAN_FILL, "kept_units": 2, **states}
        batches = make_batches(12, padded=True)
        limit = statistics.median(squared**0.5 for squared in train_plain(make_llama(attention="eager").cuda(), batches).squared_norms)
        deferred, speculated = (
            train_streamed(
                make_llama(attention="eager"), batches, tmp_path / updates, clip_updates=updates, max_gradient_norm=limit, **options
            )
            for updates in ("defer", "speculate")
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert_bitwise_equal(deferred, speculated)


def test_a_sessions_gpu_memory_has_no_rests_between_segments(tmp_path):
    """What the allocator holds beyond what tensors took at most is less than a page of its own for each of its streams' pools."""
    model = make_llama(hidden_size=512, intermediate_size=1408, num_hidden_layers=6, num_attention_heads=8)
    batches = make_batches(3, batch=8, length=512, padded=True)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    train_streamed(model, batches, tmp_path, device="cuda", batch_size=8, seq_length=512)
    settings = torch.cuda.memory._snapshot()["allocator_settings"]
    assert settings["expandable_segments"], settings
    assert torch.cuda.max_memory_reserved() - before <= torch.cuda.max_memory_allocated() + 256 * MIB
