"""Schedules x placements of the states, for each clipping, accumulation, tying and precision: one result, and that of plain PyTorch."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch

from lohan.config import Durability, Precision, UnsafeFilesystems, UpdateSchedule
from lohan.streaming.parameters import DebugMode
from tests.engine.reference import (
    assert_bitwise_equal,
    assert_equal_training,
    make_batches,
    make_llama,
    train_plain,
    train_plain_bf16,
    train_streamed,
)

STEPS = 4
STATE_BYTES = 12 * 140_000
PLACEMENTS = {"ssd": 0, "half": STATE_BYTES // 2, "ram": 4 * STATE_BYTES}


@pytest.fixture(autouse=True)
def _deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("clip", ["none", "global"])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("precision", Precision)
def test_parity_of_all_schedules_and_placements(precision, tied, accumulation, clip, tmp_path):
    batches = make_batches(STEPS * accumulation, padded=True)
    train = train_plain if precision is Precision.FP32 else train_plain_bf16
    plain = train(make_llama(tied=tied), batches, accumulation=accumulation)
    options: dict[str, Any] = {"precision": precision, "accumulation": accumulation}
    if clip == "global":
        limit = statistics.median(squared**0.5 for squared in plain.squared_norms)
        plain = train(make_llama(tied=tied), batches, accumulation=accumulation, max_gradient_norm=limit)
        assert 0 < sum(squared**0.5 > limit for squared in plain.squared_norms) < STEPS, "both sides of the limit are needed"
        options |= {"clip": clip, "max_gradient_norm": limit}
    variants: list[dict[str, Any]] = [
        {"schedule": schedule, "ram_state_bytes": ram_bytes} for schedule in UpdateSchedule for ram_bytes in PLACEMENTS.values()
    ]
    durable = {"durability": Durability.STEP, "unsafe_filesystems": UnsafeFilesystems.ALLOW}
    variants += [{**durable, "ram_state_bytes": PLACEMENTS["half"]}, {**durable, "schedule": "naive", "debug": DebugMode.NAN_FILL}]
    first, *others = (
        train_streamed(make_llama(tied=tied), batches, tmp_path / str(number), **options, **variant)
        for number, variant in enumerate(variants)
    )
    for other in others:
        assert_bitwise_equal(first, other)
    if precision is Precision.FP32:
        assert_equal_training(first, plain)
    else:
        assert first.losses == pytest.approx(plain.losses, rel=1e-3)
