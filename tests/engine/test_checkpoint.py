"""What a step boundary holds: through JSON and back, the next step draws the same numbers and takes the same rows at the same rate."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import nn

from lohan.config import TrainingSection, UnitGrain
from lohan.data.pack import BatchSampler
from lohan.errors import ResumeError
from lohan.training.checkpoint import PAYLOAD_KEY, PAYLOAD_VERSION, Checkpoint, RandomStates, SchedulerState, finite_metrics
from lohan.training.metrics import learning_rate_factor

CPU = torch.device("cpu")
TRAINING = TrainingSection(schedule="cosine", warmup_steps=3, learning_rate=1e-3, batch_size=4)
SAMPLER = BatchSampler(rows=10, batch_size=4, seed=0)


def scheduled() -> tuple[torch.optim.AdamW, torch.optim.lr_scheduler.LambdaLR]:
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW([{"params": [layer.weight]}, {"params": [layer.bias], "lr": 3e-4}], lr=1e-3)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(TRAINING, step, 12))


def checkpoint(step: int = 7, **changed: Any) -> Checkpoint:
    _, scheduler = scheduled()
    values = {
        "step": step,
        "total_steps": 12,
        "training": TRAINING.model_dump(mode="json"),
        "micro_batch_size": 2,
        "grain": UnitGrain.BLOCK,
        "chunk_parameters": 4096,
        "data_digest": "d",
        "data": SAMPLER.position(step),
        "random": RandomStates.capture(CPU),
        "scheduler": SchedulerState.capture(scheduler),
        "tokens_seen": 99,
        "evaluation_seconds": 0.1,
        "metrics": finite_metrics(loss=0.1 + 0.2, gradient_norm=math.nan),
    }
    return Checkpoint(**(values | changed))


def through_json(point: Checkpoint) -> Checkpoint:
    return Checkpoint.from_payload(json.loads(json.dumps(point.to_payload(), allow_nan=False)))


def test_a_boundary_comes_back_as_it_was():
    point = checkpoint()
    assert through_json(point) == point
    assert point.metrics == {"loss": 0.30000000000000004, "gradient_norm": None}


def test_the_generator_goes_on_where_it_was():
    torch.manual_seed(3)
    torch.rand(17)
    torch.randn(3)  # leaves a second normal number in the generator, which is part of its state
    point = through_json(checkpoint())
    expected = torch.randn(9), torch.nn.functional.dropout(torch.ones(64))
    torch.manual_seed(4)
    point.random.restore(CPU)
    for value, again in zip(expected, (torch.randn(9), torch.nn.functional.dropout(torch.ones(64))), strict=True):
        assert torch.equal(value, again)


def test_what_is_no_state_of_a_generator_is_refused():
    before = torch.get_rng_state()
    for text in ("!", "AAAA", ""):
        with pytest.raises(ResumeError, match="generators"):
            RandomStates(cpu=text).restore(CPU)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_state_without_the_gpus_generator_does_not_fit_a_gpu():
    states = RandomStates.capture(CPU)
    assert states.fits(CPU)
    assert not states.fits(torch.device("cuda", 0))


@pytest.mark.parametrize("steps", [1, 3, 8])
def test_the_scheduler_goes_on_where_it_was(steps):
    optimizer, scheduler = scheduled()
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
    state = through_json(checkpoint(scheduler=SchedulerState.capture(scheduler))).scheduler
    new_optimizer, new_scheduler = scheduled()
    state.restore(new_scheduler)
    for _ in range(4):
        assert [group["lr"] for group in new_optimizer.param_groups] == [group["lr"] for group in optimizer.param_groups]
        for one, other in ((optimizer, scheduler), (new_optimizer, new_scheduler)):
            one.step()
            other.step()


def test_a_scheduler_of_other_groups_is_refused():
    _, scheduler = scheduled()
    other = torch.optim.AdamW(nn.Linear(2, 2).parameters())
    with pytest.raises(ResumeError, match="2 param groups, the optimizer has 1"):
        SchedulerState.capture(scheduler).restore(torch.optim.lr_scheduler.LambdaLR(other, lambda _step: 1.0))


def test_positions_run_through_the_epochs():
    assert [(SAMPLER.position(steps).epoch, SAMPLER.position(steps).index) for steps in (0, 1, 2, 3, 5)] == [
        (0, 0),
        (0, 4),
        (0, 8),
        (1, 2),
        (2, 0),
    ]


@pytest.mark.parametrize("version", [None, 0, PAYLOAD_VERSION + 1, "1"])
def test_another_version_is_named(version):
    payload = {PAYLOAD_KEY: checkpoint().to_payload()[PAYLOAD_KEY] | {"version": version}}
    with pytest.raises(ResumeError, match="version") as caught:
        Checkpoint.from_payload(payload)
    assert repr(version) in caught.value.message
    assert "remove the run's state directories" in (caught.value.remedy or "")


def test_an_empty_payload_is_refused():
    with pytest.raises(ResumeError, match="version None"):
        Checkpoint.from_payload({})


def test_missing_and_wrong_fields_are_named():
    payload = checkpoint().to_payload()
    del payload[PAYLOAD_KEY]["random"]
    payload[PAYLOAD_KEY]["step"] = -1
    with pytest.raises(ResumeError, match=r"step: .*random: Field required"):
        Checkpoint.from_payload(payload)


def check(point: Checkpoint, training: TrainingSection = TRAINING, **changed: Any) -> None:
    values: dict[str, Any] = {"total_steps": 12, "data_digest": "d", "position": SAMPLER.position(point.step)}
    point.check(training, **(values | changed))


def test_the_same_run_fits_and_the_evaluation_may_change():
    check(checkpoint())
    check(checkpoint(), TRAINING.model_copy(update={"evaluation_rows": 3}))


def test_every_difference_is_named():
    with pytest.raises(ResumeError, match="from step 7") as caught:
        check(checkpoint(), TRAINING.model_copy(update={"learning_rate": 0.5, "seed": 9}), total_steps=13, data_digest="e")
    for part in ("training.learning_rate is 0.5, before it was 0.001", "training.seed is 9", "13 steps, before it had 12", "rows"):
        assert part in caught.value.message
