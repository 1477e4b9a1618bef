"""Schedules, clipping, skipped steps, accumulation and commits: what becomes of a step's gradients."""

from __future__ import annotations

import pytest
import torch

from lohan.config import Clip, Precision, UpdateSchedule
from lohan.errors import ConfigError
from tests.engine.reference import (
    Outcome,
    adamw,
    assert_equal_training,
    make_batches,
    make_llama,
    open_session,
    train_plain,
    train_streamed,
    twin,
)


def assert_bitwise_equal(one: Outcome, other: Outcome) -> None:
    assert one.losses == other.losses
    assert one.squared_norms == other.squared_norms
    assert all(torch.equal(one.after[name], other.after[name]) for name in one.after)


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


# ---------------------------------------------------------------- schedules
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("clip", [Clip.NONE, Clip.PER_UNIT])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("precision", Precision)
def test_parity_of_schedules_bit_for_bit(precision, tied, clip, tmp_path):
    options = {"precision": precision, "clip": clip, "max_gradient_norm": 0.5}
    batches = make_batches(4, padded=True)
    serial, *others = (
        train_streamed(make_llama(tied=tied), batches, tmp_path / schedule, schedule=schedule, **options) for schedule in UpdateSchedule
    )
    for other in others:
        assert_bitwise_equal(serial, other)


@pytest.mark.parametrize("schedule", UpdateSchedule)
def test_parity_with_plain_training(schedule, tmp_path):
    model = make_llama(tied=True)
    plain = train_plain(twin(model), make_batches(20, padded=True))
    assert_equal_training(train_streamed(model, make_batches(20, padded=True), tmp_path, schedule=schedule), plain)


@pytest.mark.parametrize(
    ("options", "place"),
    [({"schedule": "eager"}, "schedule"), ({"clip": "value"}, "clip"), ({"max_gradient_norm": 0.0}, "max_gradient_norm")],
)
def test_wrong_rules_are_refused(options, place, tmp_path):
    model = make_llama()
    with pytest.raises(ConfigError) as caught:
        open_session(model, adamw(model), tmp_path, **options)
    assert caught.value.place == place
