"""What `lohan.init` promises beside right numbers: what it refuses, what it moves, how it fails, and that it cleans up."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from lohan.config import Precision
from lohan.errors import ConfigError, EngineError, ModelError, StorageError
from lohan.models.load import empty_model, load_config, open_weights
from lohan.planning.access import AccessOrder, Phase
from tests.engine.reference import VOCABULARY, adamw, make_batches, make_llama, open_session, twin
from tests.fixtures.tiny_model import VOCABULARY_SIZE, make_tiny_model
from tests.fixtures.waiting import wait_until


@pytest.fixture
def streamed(tmp_path):
    """(model, optimizer, session) over a small Llama."""
    model = make_llama()
    optimizer = adamw(model)
    session = open_session(model, optimizer, tmp_path / "states")
    yield model, optimizer, session
    session.close()


def our_threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("lohan-")]


# ---------------------------------------------------------------- loss
def test_evaluation_changes_nothing_and_equals_the_plain_model(tmp_path):
    model = make_llama()
    plain = twin(model)
    batch = make_batches(1, padded=True)[0]
    with open_session(model, adamw(model), tmp_path) as session:
        before = dict(session.named_weights())
        model.eval()
        with torch.no_grad():
            loss = model(**batch).loss
            logits = model(batch["input_ids"], batch["attention_mask"]).logits
            assert loss.item() == pytest.approx(plain(**batch).loss.item(), rel=1e-6)
            torch.testing.assert_close(logits, plain(batch["input_ids"], batch["attention_mask"]).logits, rtol=1e-5, atol=1e-6)
        assert not loss.requires_grad
        assert session.statistics.steps == 0
        assert all(torch.equal(tensor, before[name]) for name, tensor in session.named_weights())


def test_a_forward_that_is_thrown_away_does_not_delay_updates(streamed):
    """Its regions must not be waited for: the units' updates start during the next backward, not at its end."""
    model, _, session = streamed
    batch = make_batches(1)[0]
    model.eval()
    model(**batch)
    model.train()
    started_early = []
    close_step = session._driver.collector.close_step
    session._driver.collector.close_step = lambda: (started_early.append(True), close_step())[1]
    sent = []
    submit = session._stages.worker.submit
    session._stages.worker.submit = lambda update: (sent.append((update.layout.index, bool(started_early))), submit(update))[1]
    model(**batch).loss.backward()
    assert sorted(index for index, _ in sent) == [0, 1, 2, 3, 4]
    assert not any(late for _, late in sent)


def test_full_logits_never_exist_while_training(streamed):
    model, _, session = streamed
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            seen.extend(tensor.shape for tensor in (out if isinstance(out, tuple) else (out,)) if isinstance(tensor, torch.Tensor))
            return out

    batch = make_batches(1, padded=True)[0]
    with Watch():
        output = model(**batch)
    assert output.logits is None
    trained = int((batch["labels"][:, 1:] != -100).sum())
    rows = {shape[0] for shape in seen if len(shape) == 2 and shape[1] == VOCABULARY and shape not in ((VOCABULARY, 64), (64, VOCABULARY))}
    assert rows == {trained}, "the output projection runs on trained tokens only"
    assert not any(len(shape) == 3 and shape[2] == VOCABULARY for shape in seen)
    assert session.statistics.full_logits_fallbacks == 0


def test_the_loss_is_computed_in_chunks_of_tokens(streamed, monkeypatch):
    from lohan.streaming import loss_head

    model, _, _ = streamed
    batch = make_batches(1, padded=True)[0]
    whole = model(**batch).loss
    monkeypatch.setattr(loss_head, "loss_tokens", lambda *_: 7)
    in_chunks = model(**batch).loss
    assert in_chunks.item() == pytest.approx(whole.item(), rel=1e-6)


@pytest.mark.parametrize(
    "make_arguments",
    [
        lambda labels: {"labels": labels, "num_items_in_batch": 17},
        lambda labels: {"labels": labels, "num_items_in_batch": torch.tensor(17)},
        lambda labels: {"labels": labels.masked_fill(labels == -100, 3), "ignore_index": 3},
        lambda labels: {"labels": labels, "shift_labels": functional.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()},
        lambda labels: {"labels": labels, "return_dict": False},
        lambda labels: {"labels": torch.full_like(labels, -100), "num_items_in_batch": 5},
    ],
    ids=["items", "items as a tensor", "ignore index", "shifted", "tuple", "nothing trained"],
)
def test_the_loss_takes_transformers_arguments(make_arguments, tmp_path):
    model = make_llama()
    plain = twin(model)
    batch = make_batches(1, padded=True)[0]
    arguments = {**batch, **make_arguments(batch["labels"])}

    def loss_of(output):
        return output[0] if isinstance(output, tuple) else output.loss

    expected = loss_of(plain(**arguments))
    expected.backward()
    squared_norm = sum(p.grad.double().pow(2).sum().item() for p in plain.parameters() if p.grad is not None)
    with open_session(model, adamw(model), tmp_path) as session:
        loss = loss_of(model(**arguments))
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
        loss.backward()
        session.wait()
        assert session.statistics.last_step.squared_gradient_norm == pytest.approx(squared_norm, rel=1e-5)


def test_a_batch_without_trained_tokens_is_refused(streamed):
    model, _, _ = streamed
    batch = make_batches(1)[0]
    with pytest.raises(EngineError, match="no token of the batch has a label"):
        model(**{**batch, "labels": torch.full_like(batch["labels"], -100)})


def test_other_losses_and_other_models_fall_back_to_full_logits(streamed, tmp_path):
    model, _, session = streamed
    batch = make_batches(1)[0]
    expected = model(**batch).loss.item()
    model.loss_function = lambda logits, labels, vocab_size, **_: (
        2 * functional.cross_entropy(logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].reshape(-1))
    )
    assert model(**batch).loss.item() == pytest.approx(2 * expected, rel=1e-5)
    assert session.statistics.full_logits_fallbacks == 1


# ---------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"slots": 1}, "slots"),
        ({"micro_batch_size": -1}, "micro_batch_size"),
        ({"state_directories": []}, "state_directories"),
        ({"chunk_parameters": 1000}, "chunk_parameters"),
        ({"device": "cuda:77"}, "engine.device"),
    ],
)
def test_settings_out_of_range_name_themselves(options, place, tmp_path):
    model = make_llama()
    with pytest.raises(ConfigError) as caught:
        open_session(model, adamw(model), tmp_path, **options)
    assert caught.value.place == place
    assert not our_threads()


def test_batches_beyond_what_was_planned_are_refused(streamed):
    model, _, _ = streamed
    for batch in (make_batches(1, batch=5)[0], make_batches(1, length=17)[0]):
        with pytest.raises(EngineError, match="the session was made for 4 rows of 16 tokens"):
            model(**batch)


def test_unfreezing_later_is_refused(tmp_path):
    model = make_llama()
    model.lm_head.weight.requires_grad_(requires_grad=False)
    with open_session(model, adamw(model), tmp_path):
        model.lm_head.weight.requires_grad_()
        with pytest.raises(EngineError, match=r"lm_head\.weight was frozen"):
            model(**make_batches(1)[0])


def test_a_directory_serves_one_session_at_a_time(streamed, tmp_path):
    with pytest.raises(StorageError, match="in use by another run"):
        other = make_llama()
        open_session(other, adamw(other), tmp_path / "states")
    assert len(our_threads()) == 2, "only the first session's"


def test_the_optimizer_object_has_no_states_to_give(streamed):
    _, optimizer, _ = streamed
    for use in (optimizer.state_dict, lambda: optimizer.load_state_dict({}), lambda: optimizer.add_param_group({"params": []})):
        with pytest.raises(EngineError, match="state store"):
            use()


def test_optimizer_step_takes_a_closure(streamed):
    model, optimizer, session = streamed

    def closure():
        loss = model(**make_batches(1)[0]).loss
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    assert session.statistics.steps == 1


# ---------------------------------------------------------------- weights in and out
@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("tied", [True, False])
def test_weights_stream_from_a_model_folder(precision, tied, tmp_path):
    folder = make_tiny_model(tmp_path / "model", tied=tied, shards=2)
    model = empty_model(load_config(folder), dtype=torch.float32)
    with open_weights(folder) as weights, open_session(model, adamw(model), tmp_path, precision=precision, weights=weights) as session:
        streamed = dict(session.named_weights())
        assert session.tied_names == ({"lm_head.weight": "model.embed_tokens.weight"} if tied else {})
        for name in weights.names:
            assert torch.equal(streamed[session.tied_names.get(name, name)], weights.read(name).float())
        assert streamed.keys() == {name for name, _ in model.named_parameters()}
        assert all(tensor.dtype is torch.bfloat16 for _, tensor in session.named_weights(torch.bfloat16))
        tokens = torch.randint(0, VOCABULARY_SIZE, (2, 16))
        model(input_ids=tokens, labels=tokens).loss.backward()


def test_weights_that_do_not_fit_are_refused_before_anything_is_written(tmp_path):
    folder = make_tiny_model(tmp_path / "model", layers=1)
    model = empty_model(load_config(make_tiny_model(tmp_path / "larger", layers=2)))
    with open_weights(folder) as weights, pytest.raises(ModelError, match="missing"):
        open_session(model, adamw(model), tmp_path / "states", weights=weights)
    assert not (tmp_path / "states").exists()


def test_frozen_parameters_have_no_states(tmp_path):
    model = make_llama()
    for parameter in model.model.layers.parameters():
        parameter.requires_grad_(requires_grad=False)
    with open_session(model, adamw(model), tmp_path, precision=Precision.BF16):
        sizes = {file.stem: file.stat().st_size for file in (tmp_path / "lohan-states").glob("*.bin")}
    elements = sum(parameter.numel() for parameter in model.parameters())
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert sizes["weights"] >= 2 * elements
    for stream, itemsize in (("remainder", 2), ("first_moment", 4), ("second_moment", 4)):
        assert itemsize * trainable <= sizes[stream] < itemsize * elements
    assert "master" not in sizes


# ---------------------------------------------------------------- bytes
def test_a_step_moves_each_state_once_and_weights_once_per_pass(streamed):
    """24 bytes of states per parameter: master and two moments in and out; weights come in for each pass."""
    model, _, session = streamed
    elements = sum(unit.layout.elements for unit in session._units)
    first, second = make_batches(2)
    model(**first).loss.backward()
    session.wait()
    before = session.statistics
    model(**second).loss.backward()
    session.wait()
    after = session.statistics
    assert after.bytes_written - before.bytes_written == 12 * elements
    states, weights = 12 * elements, after.bytes_read - before.bytes_read - 12 * elements
    assert states + weights == after.bytes_read - before.bytes_read
    # Forward and backward read every unit at most once (the embedding's backward reads none; the turn in the middle reuses slots;
    # the next step's first units may be under way), whatever the number of micro-batches.
    assert weights <= 4 * 2 * elements


def test_access_order_runs_forward_then_backward():
    order = AccessOrder([0, 1, 2, 3, 0], [0, 3, 2, 1])
    assert order.first(3) == [0, 1, 2]
    assert order.after(0, Phase.FORWARD, 2) == [1, 2]
    assert order.after(1, Phase.FORWARD, 2) == [2, 3]
    assert order.after(3, Phase.FORWARD, 2) == [0, 2]
    assert order.after(0, Phase.FORWARD, 2) == [3, 2]
    assert order.after(0, Phase.BACKWARD, 2) == [3, 2]
    assert order.after(1, Phase.BACKWARD, 2) == [], "the next forward's weights are not updated yet"
    assert order.after(3, Phase.EVALUATION, 2) == [0, 1]
    assert order.after(9, Phase.EVALUATION, 2) == [], "an unexpected unit is loaded, and nothing guessed"


# ---------------------------------------------------------------- failures
def test_a_failing_read_stops_the_step_and_names_its_cause(streamed, tmp_path):
    model, optimizer, session = streamed
    batch = make_batches(1)[0]
    model(**batch).loss.backward()
    session.wait()
    file = tmp_path / "states" / "lohan-states" / "second_moment.bin"
    os.truncate(file, 4096)  # another process spoils the file
    with pytest.raises(EngineError, match="the optimizer failed") as caught:
        model(**batch).loss.backward()
        session.wait()
    assert isinstance(caught.value.__cause__, StorageError)
    assert str(file) in str(caught.value)
    for use in (lambda: model(**batch), optimizer.step, session.wait, lambda: list(session.named_weights())):
        with pytest.raises(EngineError, match="the optimizer failed"):
            use()
    session.close()
    assert not our_threads()


def test_failing_weights_stop_the_forward(streamed, tmp_path):
    model, _, session = streamed
    batch = make_batches(1)[0]
    model(**batch).loss.backward()
    session.wait()
    os.truncate(tmp_path / "states" / "lohan-states" / "master.bin", 4096)
    with pytest.raises(EngineError, match="failed"):
        for _ in range(2):
            model(**batch).loss.backward()
            session.wait()
    session.close()
    assert not our_threads()


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_non_finite_gradients_are_refused_and_counted(streamed, factor):
    model, _, session = streamed
    before = dict(session.named_weights())
    with pytest.raises(EngineError, match="NaN or infinite in step 1"):
        (model(**make_batches(1)[0]).loss * factor).backward()
        session.wait()
    assert session.statistics.last_step.non_finite > 0
    for unit in session._units:
        for place in unit.layout.parameters:
            assert torch.equal(session._stages.states.read_parameter(unit.layout, place), before[place.name])
    session.close()


def test_a_backward_that_breaks_off_ends_the_run(streamed):
    """Units behind the break are updated, those before it are not: going on would train from two steps at once."""
    model, _, session = streamed

    def spoil(_module, _inputs, output):
        output.register_hook(lambda _gradient: (_ for _ in ()).throw(ValueError("broken off")))

    hook = model.model.layers[0].register_forward_hook(spoil)
    loss = model(**make_batches(1)[0]).loss
    hook.remove()
    with pytest.raises(ValueError, match="broken off"):
        loss.backward()
    with pytest.raises(EngineError, match="the backward of step 1 did not finish"):
        model(**make_batches(1)[0])
    session.close()


# ---------------------------------------------------------------- the end
def test_closing_ends_threads_files_and_the_model(tmp_path):
    model = make_llama()
    session = open_session(model, adamw(model), tmp_path)
    model(**make_batches(1)[0]).loss.backward()
    session.close()
    session.close()
    assert not our_threads()
    assert not [link for link in Path("/proc/self/fd").iterdir() if str(tmp_path) in _target(link)]
    for use in (lambda: model(**make_batches(1)[0]), lambda: list(session.named_weights()), session.wait):
        with pytest.raises(EngineError, match="closed"):
            use()
    other = make_llama()
    with open_session(other, adamw(other), tmp_path):
        pass


def _target(link):
    try:
        return str(link.readlink())
    except OSError:  # the descriptor that lists the folder is gone by now
        return ""


def test_a_forgotten_session_lives_as_long_as_its_model_and_then_goes(tmp_path):
    model = make_llama()
    open_session(model, adamw(model), tmp_path)  # the result is not kept
    gc.collect()
    model(**make_batches(1)[0]).loss.backward()
    assert our_threads()
    del model
    gc.collect()
    wait_until(lambda: not our_threads(), what="the session's threads end")


def test_errors_of_the_last_step_surface_when_the_session_is_left(tmp_path):
    model = make_llama()
    with pytest.raises(EngineError, match="NaN or infinite"), open_session(model, adamw(model), tmp_path):
        (model(**make_batches(1)[0]).loss * float("nan")).backward()
    assert not our_threads()
