"""The engine learns what plain PyTorch learns: the same model, batches and torch.optim.AdamW, 20 steps, fp32 on the CPU.

The engine keeps all states on disk, streams weights through slots, recomputes every block and splits each batch in two.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lohan.streaming.parameters import DebugMode
from tests.engine.reference import (
    assert_equal_training,
    block_slices,
    make_batches,
    make_llama,
    relative_difference,
    train_plain,
    train_streamed,
    twin,
    two_groups,
)

STEPS = 20


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_parity_over_20_steps(tied, tmp_path):
    model = make_llama(tied=tied)
    assert model.config.use_cache, "transformers' default, which the engine has to switch off"
    plain = train_plain(twin(model), make_batches(STEPS))
    streamed = train_streamed(model, make_batches(STEPS), tmp_path)
    assert_equal_training(streamed, plain)
    for ours, theirs in zip(streamed.squared_norms, plain.squared_norms, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
    assert plain.losses[-1] != plain.losses[0]


def test_parity_with_padding_and_untrained_tokens(tmp_path):
    model = make_llama()
    plain = train_plain(twin(model), make_batches(STEPS, padded=True))
    assert_equal_training(train_streamed(model, make_batches(STEPS, padded=True), tmp_path), plain)


def test_parity_in_debug_mode(tmp_path):
    """Released slots are NaN: weights read at the wrong time would show in the loss."""
    model = make_llama(tied=True)
    plain = train_plain(twin(model), make_batches(STEPS, padded=True))
    streamed = train_streamed(model, make_batches(STEPS, padded=True), tmp_path, debug=DebugMode.NAN_FILL)
    assert_equal_training(streamed, plain)


def test_parity_with_two_slots_and_uneven_micro_batches(tmp_path):
    model = make_llama()
    plain = train_plain(twin(model), make_batches(STEPS, padded=True))
    streamed = train_streamed(model, make_batches(STEPS, padded=True), tmp_path, slots=2, micro_batch_size=3)
    assert_equal_training(streamed, plain)


def test_parity_with_an_unused_parameter(tmp_path):
    """torch.optim.AdamW leaves a parameter without gradient alone, its weight decay included."""
    model = make_llama()
    model.model.layers[1].mlp.register_parameter("spare", nn.Parameter(torch.full((70,), 0.5)))
    plain = train_plain(twin(model), make_batches(STEPS))
    streamed = train_streamed(model, make_batches(STEPS), tmp_path)
    assert_equal_training(streamed, plain)
    assert torch.equal(streamed.after["model.layers.1.mlp.spare"], torch.full((70,), 0.5))


FROZEN = ["model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"]


@pytest.mark.parametrize("names", [FROZEN, ["model.layers.1"]], ids=["single parameters", "a whole block"])
def test_parity_with_frozen_parameters(names, tmp_path):
    model = make_llama()
    for name, parameter in model.named_parameters():
        if name.startswith(tuple(names)):
            parameter.requires_grad_(requires_grad=False)
    plain = train_plain(twin(model), make_batches(STEPS))
    streamed = train_streamed(model, make_batches(STEPS), tmp_path)
    assert_equal_training(streamed, plain)
    for name in streamed.after:
        if name.startswith(tuple(names)):
            assert torch.equal(streamed.after[name], streamed.before[name])


def test_parity_when_a_parameter_is_frozen_for_some_steps(tmp_path):
    """Its moments and its own step count wait for it, as they do in torch.optim.AdamW."""

    def freeze(step: int, model: nn.Module) -> None:
        model.model.layers[1].mlp.up_proj.weight.requires_grad_(not 5 <= step < 12)

    model = make_llama()
    plain = train_plain(twin(model), make_batches(STEPS), on_step=freeze)
    assert_equal_training(train_streamed(model, make_batches(STEPS), tmp_path, on_step=freeze), plain)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("micro_batch_size", [4, 2])
def test_parity_with_dropout(attention, micro_batch_size, tmp_path):
    """Recomputation draws the mask of the forward again. The plain model runs the same slices, hence draws the same masks."""
    model = make_llama(attention=attention, attention_dropout=0.2)
    plain_model = twin(model)
    with block_slices(plain_model, micro_batch_size):
        plain = train_plain(plain_model, make_batches(STEPS, padded=True))
    streamed = train_streamed(model, make_batches(STEPS, padded=True), tmp_path, micro_batch_size=micro_batch_size)
    assert_equal_training(streamed, plain)
    without = train_plain(make_llama(attention=attention), make_batches(STEPS, padded=True))
    assert relative_difference(without, plain) > 1e-2, "dropout made no difference: nothing was tested"


def test_parity_with_param_groups_and_a_scheduler(tmp_path):
    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[3e-3, 5e-3], total_steps=STEPS, cycle_momentum=False)

    model = make_llama(tied=True)
    plain = train_plain(twin(model), make_batches(STEPS), make_optimizer=two_groups, make_scheduler=schedule)
    streamed = train_streamed(model, make_batches(STEPS), tmp_path, make_optimizer=two_groups, make_scheduler=schedule)
    assert_equal_training(streamed, plain)


def test_parity_over_two_state_directories(tmp_path):
    model = make_llama()
    plain = train_plain(twin(model), make_batches(STEPS))
    streamed = train_streamed(model, make_batches(STEPS), tmp_path, state_directories=[tmp_path / "a", tmp_path / "b"])
    assert_equal_training(streamed, plain)
    sizes = [sum(file.stat().st_size for file in (tmp_path / name).rglob("*.bin")) for name in "ab"]
    assert min(sizes) > 0.3 * sum(sizes), "the chunks were not spread over both"


def test_parity_runs_are_bitwise_repeatable(tmp_path):
    first, second = (train_streamed(make_llama(), make_batches(5, padded=True), tmp_path / name) for name in "ab")
    assert first.losses == second.losses
    assert first.squared_norms == second.squared_norms
    assert all(torch.equal(first.after[name], second.after[name]) for name in first.after)


def test_parity_does_not_depend_on_slots_chunks_or_debug_mode(tmp_path):
    """Where bytes lie and when they move must not change one bit."""
    variants: list[dict[str, Any]] = [{}, {"slots": 2}, {"chunk_parameters": 2048}, {"debug": DebugMode.NAN_FILL}, {"threads": 2}]
    outcomes = [train_streamed(make_llama(tied=True), make_batches(4), tmp_path / str(i), **options) for i, options in enumerate(variants)]
    for outcome in outcomes[1:]:
        assert outcome.losses == outcomes[0].losses
        assert all(torch.equal(outcome.after[name], outcomes[0].after[name]) for name in outcome.after)


def test_the_comparison_sees_a_wrong_learning_rate(tmp_path):
    """The tolerances are not so wide that they would pass anything."""
    model = make_llama()
    plain = train_plain(twin(model), make_batches(3))
    other = train_streamed(model, make_batches(3), tmp_path, make_optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1.001e-3))
    assert relative_difference(other, plain) > 1e-4
