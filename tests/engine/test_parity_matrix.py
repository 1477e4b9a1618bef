"""Schedules x placements x durabilities of the states, for each clipping, accumulation, tying and precision: one result, and that of plain
PyTorch. On a GPU in the debug mode that fills released slots with NaN and delays the copy streams."""

from __future__ import annotations

import os
import statistics
from functools import partial
from itertools import cycle
from typing import Any

# For determinism on a GPU; read by cuBLAS when it is first used.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

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
IS_WHOLE = os.environ.get("LOHAN_PARITY") == "whole"
"""As `make test-parity` has it; else each combination takes every third variant, the next one the next third, so that each variant meets
five or six combinations."""
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PLACEMENTS = {"ssd": 0, "half": STATE_BYTES // 2, "ram": 4 * STATE_BYTES}


@pytest.fixture(autouse=True)
def _deterministic():
    tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.use_deterministic_algorithms(True, warn_only=torch.cuda.is_available())
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.matmul.allow_tf32 = tf32


def variants_of(device: str) -> list[dict[str, Any]]:
    """Every schedule in every placement, one with gradient buffers for all units too, one with second places of all states, and every
    durability in every placement with one schedule after the other; updates that may be speculated are."""
    none = [{"schedule": schedule, "ram_state_bytes": ram_bytes} for schedule in UpdateSchedule for ram_bytes in PLACEMENTS.values()]
    none += [{"gradient_buffers": "all", "ram_state_bytes": ram_bytes} for ram_bytes in PLACEMENTS.values()]
    in_ram = max(PLACEMENTS.values())
    none.append({"ram_state_bytes": in_ram, "spare_state_bytes": in_ram, "clip_updates": "speculate"})
    schedules, buffers = cycle(UpdateSchedule), cycle(("few", "all"))
    durable = [
        {
            "durability": durability,
            "ram_state_bytes": ram_bytes,
            "schedule": next(schedules),
            "commit_every": 2,
            "clip_updates": "speculate",
            "gradient_buffers": next(buffers),
        }
        for durability in (Durability.STEP, Durability.SNAPSHOT)
        for ram_bytes in PLACEMENTS.values()
    ]
    debug = {"unsafe_filesystems": UnsafeFilesystems.ALLOW, "device": device}
    if device == "cuda":
        return [{**variant, **debug, "debug": DebugMode.NAN_FILL} for variant in none + durable]
    return [{**variant, **debug} for variant in none + durable] + [{**durable[0], **debug, "debug": DebugMode.NAN_FILL}]


@pytest.mark.filterwarnings("ignore:.*deterministic")  # of a GPU's kernels; the comparison itself is what counts
@pytest.mark.parametrize("clip", ["none", "global"])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("device", DEVICES)
def test_parity_of_all_schedules_placements_and_durabilities(device, precision, tied, accumulation, clip, tmp_path):
    # PyTorch's fused attention has no deterministic backward on every GPU.
    model = partial(make_llama, tied=tied, attention="sdpa" if device == "cpu" else "eager")
    batches = make_batches(STEPS * accumulation, padded=True)
    train = train_plain if precision is Precision.FP32 else train_plain_bf16
    plain = train(model().to(device), batches, accumulation=accumulation)
    options: dict[str, Any] = {"precision": precision, "accumulation": accumulation}
    if clip == "global":
        limit = statistics.median(squared**0.5 for squared in plain.squared_norms)
        plain = train(model().to(device), batches, accumulation=accumulation, max_gradient_norm=limit)
        assert 0 < sum(squared**0.5 > limit for squared in plain.squared_norms) < STEPS, "both sides of the limit are needed"
        options |= {"clip": clip, "max_gradient_norm": limit}
    variants = variants_of(device)
    if not IS_WHOLE:
        combination = (accumulation == 3) + (clip == "global") * 2 + tied * 4 + (precision is Precision.FP32) * 8
        variants = variants[combination % 3 :: 3]
    first, *others = (
        train_streamed(model(), batches, tmp_path / str(number), **options, **variant) for number, variant in enumerate(variants)
    )
    for other in others:
        assert_bitwise_equal(first, other)
    if precision is Precision.FP32:
        assert_equal_training(first, plain)
    else:
        assert first.losses == pytest.approx(plain.losses, rel=1e-3)
