"""Kept activations on a GPU: copy streams that are delayed at random, kernels whose outputs are not contiguous, and memory that is free."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lohan.config import Precision
from lohan.planning.retention import BlockTiers, Retention
from lohan.streaming.parameters import DebugMode
from tests.engine.kept_runs import ATTENTION, GATE, GROUPS, in_tier, spread, trained
from tests.engine.reference import (
    adamw,
    assert_bitwise_equal,
    make_batches,
    make_llama,
    on_device_of,
    open_session,
    relative_difference,
    train_streamed,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("no_tf32")]
LABELS = [label for labels in GROUPS.values() for label in labels]
EAGER_LABELS = [label for label in LABELS if label != ATTENTION]
INPUTS = BlockTiers(ram_blocks=(0, 2), ssd_blocks=(1,))
WIDE = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 3, "num_attention_heads": 8}
WIDE_RUN = {"batch_size": 8, "seq_length": 128, "chunk_parameters": 1024 * 1024}


@pytest.mark.usefixtures("deterministic_on_gpu")
@pytest.mark.parametrize("debug", DebugMode)
@pytest.mark.parametrize("micro_batch_size", [4, 1])
@pytest.mark.parametrize(
    "retention",
    [
        in_tier("gpu", EAGER_LABELS),
        in_tier("ram", EAGER_LABELS, boundaries=True),
        in_tier("ssd", EAGER_LABELS, boundaries=True),
        spread(EAGER_LABELS).model_copy(update={"boundaries": INPUTS}),
    ],
    ids=["gpu", "ram", "ssd", "spread"],
)
def test_kept_activations_change_no_bit_on_a_gpu(retention, micro_batch_size, debug, tmp_path):
    """Eager attention, whose backward is deterministic."""
    options: dict[str, Any] = {"device": "cuda", "micro_batch_size": micro_batch_size, "steps": 4}
    again, kept = (
        trained(tmp_path / str(number), decision, model=make_llama(attention="eager"), debug=debug, **options)
        for number, decision in enumerate((Retention(), retention))
    )
    assert_bitwise_equal(again, kept)


@pytest.mark.usefixtures("deterministic_on_gpu")
@pytest.mark.parametrize("tier", ["ram", "ssd"])
def test_wide_blocks_and_few_slots(tier, tmp_path):
    """Outputs of some MB: copies take long enough that a missing wait between streams would show."""
    outcomes = [
        train_streamed(
            make_llama(attention="eager", **WIDE),
            make_batches(4, batch=8, length=128, padded=True),
            tmp_path / str(number),
            retention=retention,
            device="cuda",
            debug=DebugMode.NAN_FILL,
            slots=2,
            **WIDE_RUN,
        )
        for number, retention in enumerate((Retention(), in_tier(tier, EAGER_LABELS, boundaries=True)))
    ]
    assert_bitwise_equal(*outcomes)


@pytest.mark.parametrize("tier", ["gpu", "ram", "ssd"])
@pytest.mark.parametrize("precision", Precision)
def test_fused_attention_can_be_kept(precision, tier, tmp_path):
    """Its outputs are not contiguous, and come with seeds, numbers and None; its backward is not deterministic."""
    options: dict[str, Any] = {"device": "cuda", "precision": precision, "steps": 4, "debug": DebugMode.NAN_FILL}
    again, kept = (
        trained(tmp_path / str(number), decision, **options) for number, decision in enumerate((Retention(), in_tier(tier, [ATTENTION])))
    )
    assert again.losses[0] == kept.losses[0], "the forward is the same"
    assert relative_difference(kept, again) < (1e-3 if precision is Precision.FP32 else 0.2)


def test_what_has_left_the_device_is_not_held_there(tmp_path):
    """Between forward and backward, compared with keeping the same on the device."""
    held = {}
    for tier in ("gpu", "ram"):
        model = make_llama(**WIDE)
        options = {"retention": in_tier(tier, [GATE, "mlp:mul#0"]), "device": "cuda", "micro_batch_size": 2, **WIDE_RUN}
        with open_session(model, adamw(model), tmp_path / tier, **options):
            batch = on_device_of(model, make_batches(1, batch=8, length=128)[0])
            model(**batch).loss.backward()
            torch.cuda.synchronize()
            loss = model(**batch).loss
            torch.cuda.synchronize()
            held[tier] = torch.cuda.memory_allocated()
            loss.backward()
        del loss, model
    # Two outputs of 1,408 elements for each of 1,024 tokens in three blocks, less what one region may have on its way: a quarter of one.
    assert held["gpu"] - held["ram"] > 0.8 * 2 * 1408 * 1024 * 3 * 4 * (11 / 12)


def test_an_abandoned_forward_gives_its_memory_back(tmp_path):
    model = make_llama(**WIDE)
    options = {"retention": in_tier("ram", EAGER_LABELS, boundaries=True), "device": "cuda", **WIDE_RUN, "debug": DebugMode.NAN_FILL}
    with open_session(model, adamw(model), tmp_path, **options):
        batch = on_device_of(model, make_batches(1, batch=8, length=128)[0])
        model(**batch).loss.backward()
        sizes = []
        for _ in range(3):
            del_me = model(**batch).loss
            del del_me
            model(**batch).loss.backward()
            torch.cuda.synchronize()
            sizes.append(torch.cuda.memory_allocated())
        assert sizes[1] == sizes[2]
