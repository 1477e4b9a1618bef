"""`lohan.accumulate`: several backwards, one update."""

from __future__ import annotations

import pytest
import torch

import lohan
from lohan.errors import EngineError
from tests.engine.reference import (
    Outcome,
    adamw,
    assert_equal_training,
    make_batches,
    make_llama,
    open_session,
    relative_difference,
    train_plain,
    train_streamed,
    twin,
    weights_of,
)


@pytest.mark.parametrize("accumulation", [2, 3])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_parity_with_accumulation(accumulation, tied, tmp_path):
    """Batches of different numbers of tokens: the step's loss is the mean over all of them."""
    batches = make_batches(12, padded=True)
    model = make_llama(tied=tied)
    plain = train_plain(twin(model), batches, accumulation=accumulation)
    streamed = train_streamed(model, batches, tmp_path, accumulation=accumulation)
    assert len(streamed.losses) == 12 // accumulation
    assert_equal_training(streamed, plain)


def test_parity_with_accumulation_and_global_clipping(tmp_path):
    model = make_llama()
    batches = make_batches(12, padded=True)
    plain = train_plain(twin(model), batches, accumulation=3, max_gradient_norm=0.5)
    assert_equal_training(train_streamed(model, batches, tmp_path, accumulation=3, clip="global", max_gradient_norm=0.5), plain)


def test_a_parameter_that_only_an_earlier_backward_uses_is_updated(tmp_path):
    """Each backward leaves out another block, the final one too: its unit is updated from the sums of the others."""

    def freeze(model, step, which):
        for number, block in enumerate(model.model.layers):
            block.requires_grad_(number != which)

    model = make_llama()
    plain = twin(model)
    batches = make_batches(6)
    theirs, ours = adamw(plain), adamw(model)
    for number, batch in enumerate(batches):
        freeze(plain, number, number % 2)
        plain(**batch).loss.backward()
        if number % 3 == 2:
            theirs.step()
            theirs.zero_grad()
    before = weights_of(model)
    losses = []
    with open_session(model, ours, tmp_path) as session:
        for number, batch in enumerate(batches):
            freeze(model, number, number % 2)
            if number % 3 == 2:
                model(**batch).loss.backward()
            else:
                with lohan.accumulate():
                    losses.append(model(**batch).loss)
                    losses[-1].backward()
        session.wait()
        assert session.statistics.steps == 2
        after = {name: tensor.float() for name, tensor in session.named_weights()}
    assert relative_difference(Outcome([], before, after, []), Outcome([], before, weights_of(plain), [])) < 1e-4


def test_a_forward_has_one_backward_inside_accumulate_too(tmp_path):
    model = make_llama()
    with open_session(model, adamw(model), tmp_path):
        loss = model(**make_batches(1)[0]).loss
        with lohan.accumulate():
            loss.backward(retain_graph=True)
            with pytest.raises(EngineError, match="second backward"):
                loss.backward()


def test_weights_stay_while_gradients_are_added_up(tmp_path):
    model = make_llama()
    with open_session(model, adamw(model), tmp_path) as session:
        before = dict(session.named_weights())
        with lohan.accumulate():
            model(**make_batches(1)[0]).loss.backward()
        session.wait()
        assert session.statistics.steps == 0
        assert all(torch.equal(tensor, before[name]) for name, tensor in session.named_weights())
