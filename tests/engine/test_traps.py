"""Ways in which an engine like this one silently computes something else, one test each (numbers as in the engine's design notes)."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn

from lohan.errors import EngineError
from lohan.planning.workload import UnitKind
from lohan.states.layout import ParameterSpecification, layout_unit
from lohan.streaming.gradients import GradientCollector, Region
from lohan.streaming.parameters import DebugMode
from tests.engine.reference import (
    adamw,
    assert_equal_training,
    make_batches,
    make_llama,
    open_session,
    train_plain,
    train_streamed,
    twin,
)


@pytest.fixture
def streamed(tmp_path):
    """(model, optimizer, session) over a small Llama."""
    model = make_llama(tied=True)
    optimizer = adamw(model)
    with open_session(model, optimizer, tmp_path) as session:
        yield model, optimizer, session


def test_trap_2_a_cache_is_switched_off_or_refused(streamed):
    from transformers import DynamicCache

    model, _, _ = streamed
    batch = make_batches(1)[0]
    expected = model(**batch).loss.item()
    assert model.config.use_cache is False
    assert model(**batch, use_cache=True).loss.item() == expected
    with pytest.raises(EngineError, match="cache"):
        model(**batch, past_key_values=DynamicCache(config=model.config))


def test_trap_2_use_cache_is_given_back(tmp_path):
    model = make_llama()
    open_session(model, adamw(model), tmp_path).close()
    assert model.config.use_cache is True


def test_trap_2_transformers_own_checkpointing_is_off(tmp_path):
    model = make_llama()
    plain = train_plain(twin(model), make_batches(3))
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()  # renamed in transformers 5.2x
    assert_equal_training(train_streamed(model, make_batches(3), tmp_path), plain)
    assert not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"attention_mask": torch.zeros(3, 1, 16, 16)}, "attention_mask"),
        ({"position_ids": torch.zeros(2, 16, dtype=torch.long)}, "position_ids"),
        ({"head_bias": torch.zeros(4)}, "head_bias"),
    ],
)
def test_trap_2_arguments_are_split_by_name_never_by_shape(streamed, arguments, name):
    model, _, _ = streamed
    block = model.model.layers[0]
    hidden = torch.zeros(4, 16, 64)
    rotation = (torch.ones(1, 16, 16), torch.zeros(1, 16, 16))
    with pytest.raises(EngineError, match=name):
        block(hidden, position_embeddings=rotation, **arguments)


def test_trap_4_regions_are_summed_in_fp32():
    """64 micro-batches of bf16 gradients: their sum is the fp32 sum, bit for bit. A running sum in bf16 is off by about 1 %."""
    layout = layout_unit(0, "unit", UnitKind.BLOCK, [ParameterSpecification("weight", (40, 50), trainable=True)])
    sent = []
    collector = GradientCollector([layout], lambda *unit: sent.append(unit[1].clone()), device=torch.device("cpu"))
    rows = list(torch.randn(64, 40, 50, generator=torch.Generator().manual_seed(0)).bfloat16())
    regions = [Region(0, 0, lambda *_: None) for _ in rows]
    for region in regions:
        collector.open(region)
    for region, row in zip(regions, rows, strict=True):
        assert not sent, "complete before the last region"
        collector.add(region, [row])
    exact, in_bf16 = rows[0].float(), rows[0]
    for row in rows[1:]:
        exact, in_bf16 = exact + row, in_bf16 + row
    assert torch.equal(sent[0][: exact.numel()].view(40, 50), exact)
    assert (in_bf16.float() - exact).norm() > 3e-3 * exact.norm()


def test_trap_5_nobody_reads_placeholders(streamed, tmp_path):
    model, _, session = streamed
    for read in (
        model.state_dict,
        model.model.layers[1].state_dict,
        lambda: model.load_state_dict({}),
        lambda: model.save_pretrained(tmp_path / "saved"),
        lambda: copy.deepcopy(model),
        lambda: copy.deepcopy(model.lm_head),
        lambda: pickle.dumps(model),
        lambda: torch.save(model, io.BytesIO()),
        model.half,
    ):
        with pytest.raises(EngineError, match="streamed"):
            read()
    model.to("cpu")
    assert not list((tmp_path / "saved").glob("*.safetensors"))
    assert all(parameter.isnan().all() for parameter in model.parameters())
    assert all(tensor.isfinite().all() for _, tensor in session.named_weights())


def test_trap_5_clipping_by_hand_fails_loudly(streamed):
    model, optimizer, _ = streamed
    model(**make_batches(1)[0]).loss.backward()
    with pytest.raises(EngineError, match="already gone to the optimizer"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert all(parameter.grad.shape == parameter.shape for parameter in model.parameters())
    optimizer.zero_grad(set_to_none=False)
    model.zero_grad(set_to_none=False)
    model.zero_grad()


def test_trap_6_autocast_keeps_no_old_weights(tmp_path):
    """fp32 weights under bf16 autocast: autocast's cache of cast weights must not outlive an update."""

    def losses(model, step):
        values = []
        for batch in make_batches(1) * 4:
            with torch.autocast("cpu", torch.bfloat16):
                for _ in range(2):  # a cached cast would be used by the second forward at the latest
                    loss = model(**batch).loss
            loss.backward()
            step()
            values.append(loss.item())
        return values

    model = make_llama()
    plain = twin(model)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    expected = losses(plain, lambda: (plain_optimizer.step(), plain_optimizer.zero_grad()))
    with open_session(model, torch.optim.AdamW(model.parameters(), lr=1e-2), tmp_path) as session:
        assert losses(model, session.wait) == pytest.approx(expected, rel=2e-3)
    assert abs(expected[1] - expected[0]) > 2e-2 * expected[0], "the weights hardly moved: an old weight would not show"


def test_trap_7_root_modules_are_regions_too(tmp_path):
    """With two slots and NaN in every released one, final norm and head would be read stale if they were saved outside a region."""
    model = make_llama()
    plain = train_plain(twin(model), make_batches(5, padded=True))
    assert_equal_training(train_streamed(model, make_batches(5, padded=True), tmp_path, slots=2, debug=DebugMode.NAN_FILL), plain)


def _refused(reason, directory, *, change_model=None, make_optimizer=adamw):
    model = make_llama()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = make_optimizer(model)
    if change_model is not None:
        model = change_model(model) or model
    with pytest.raises(EngineError, match=reason):
        open_session(model, optimizer, directory)
    if change_model is None:
        assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters()), "a refused init changed the model"
        assert "forward" not in vars(model)


def test_trap_10_meta_parameters_are_refused(tmp_path):
    _refused("meta device", tmp_path, change_model=lambda model: model.to("meta"))


def test_trap_10_placeholders_without_weights_are_refused(tmp_path):
    from lohan.models.load import empty_model

    _refused("placeholder", tmp_path, change_model=lambda model: empty_model(model.config, dtype=torch.float32))


def test_trap_10_mixed_dtypes_are_refused(tmp_path):
    _refused("bfloat16", tmp_path, change_model=lambda model: model.lm_head.to(torch.bfloat16) and None)


@pytest.mark.parametrize("option", ["amsgrad", "maximize", "differentiable"])
def test_trap_10_options_of_adamw_are_refused(option, tmp_path):
    _refused(option, tmp_path, make_optimizer=lambda model: torch.optim.AdamW(model.parameters(), **{option: True}))


def test_trap_10_other_optimizers_are_refused(tmp_path):
    class OurAdamW(torch.optim.AdamW):
        pass

    _refused("SGD", tmp_path, make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-3))
    _refused("OurAdamW", tmp_path, make_optimizer=lambda model: OurAdamW(model.parameters()))


def test_trap_10_unknown_and_missing_parameters_are_refused(tmp_path):
    foreign = nn.Parameter(torch.zeros(3, 5))
    _refused(r"\(3, 5\)", tmp_path, make_optimizer=lambda model: torch.optim.AdamW([*model.parameters(), foreign]))
    _refused("no param group", tmp_path, make_optimizer=lambda model: torch.optim.AdamW(list(model.parameters())[:-1]))


def test_trap_10_a_used_optimizer_is_refused(tmp_path):
    def used(model):
        optimizer = adamw(model)
        model(**make_batches(1)[0]).loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = 0.0  # the model must stay as it was
        optimizer.step()
        return optimizer

    _refused("already made steps", tmp_path, make_optimizer=used)


def test_trap_11_each_backward_is_a_step_and_belongs_to_one_forward(streamed):
    model, _, session = streamed
    first, second = make_batches(2)
    loss = model(**first).loss
    late = model(**second).loss
    loss.backward()
    with pytest.raises(EngineError, match="before the last update"):
        late.backward()
    assert session.statistics.steps == 1


def test_trap_11_a_second_backward_of_one_forward_is_refused(streamed):
    model, _, session = streamed
    loss = model(**make_batches(1)[0]).loss
    loss.backward(retain_graph=True)
    with pytest.raises(EngineError, match="before the last update"):
        loss.backward()
    assert session.statistics.steps == 1


def test_trap_11_two_forwards_may_share_a_backward(tmp_path):
    model = make_llama()
    plain = twin(model)
    first, second = make_batches(2)
    sum_of_losses = plain(**first).loss + plain(**second).loss
    sum_of_losses.backward()
    expected = sum(parameter.grad.double().pow(2).sum().item() for parameter in plain.parameters())
    with open_session(model, adamw(model), tmp_path) as session:
        (model(**first).loss + model(**second).loss).backward()
        session.wait()
        assert session.statistics.last_step.squared_gradient_norm == pytest.approx(expected, rel=1e-5)
        assert session.statistics.steps == 1


@pytest.mark.parametrize("made", ["before", "after"])
def test_trap_11_schedulers_do_not_warn(made, tmp_path):
    model = make_llama()
    optimizer = adamw(model)
    make = lambda: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)  # noqa: E731
    scheduler = make() if made == "before" else None
    with open_session(model, optimizer, tmp_path), warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = scheduler or make()
        for batch in make_batches(3):
            model(**batch).loss.backward()  # without optimizer.step(): it is optional
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3 / 8)


def test_trap_11_hyperparameters_are_read_when_the_backward_begins(tmp_path):
    """A learning rate of 0 set after the forward counts; one set after the backward does not, though updates may still be running."""
    model = make_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with open_session(model, optimizer, tmp_path) as session:
        loss = model(**make_batches(1)[0]).loss
        optimizer.param_groups[0]["lr"] = 0.0
        loss.backward()
        optimizer.param_groups[0]["lr"] = 1.0
        assert all(torch.equal(tensor, before[name]) for name, tensor in session.named_weights())
