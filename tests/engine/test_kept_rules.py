"""What may be kept, what may be done to it meanwhile, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from lohan.errors import EngineError
from lohan.planning.retention import BlockTiers, KeptOperator, Retention
from lohan.streaming.kept_tensors import PackedOutputs, checksum
from lohan.streaming.parameters import DebugMode
from tests.engine.kept_runs import ATTENTION, GATE, in_tier, one_loss, tiers_of
from tests.engine.reference import adamw, make_batches, make_llama, open_session

CPU = torch.device("cpu")


# ---------------------------------------------------------------- labels
@pytest.mark.parametrize("tier", ["gpu", "ram", "ssd"])
def test_a_label_that_does_not_occur_is_named_with_those_that_do(tier, tmp_path):
    model = make_llama()
    with (
        pytest.raises(EngineError, match=r"no operator mlp.gate_proj:matmul#1 in model.layers.1; there are .*mlp.gate_proj:matmul#0"),
        open_session(model, adamw(model), tmp_path, retention=in_tier(tier, [GATE, "mlp.gate_proj:matmul#1"], blocks=(1,))),
    ):
        model(**make_batches(1)[0])


@pytest.mark.parametrize(
    ("retention", "message"),
    [
        (in_tier("ram", [GATE], blocks=(0, 3)), "block 3, and the model has 3 blocks"),
        (in_tier("ssd", [], blocks=(7,), boundaries=True), "block 7"),
    ],
    ids=["operators", "inputs"],
)
def test_a_block_that_is_not_there_is_refused_before_anything_is_changed(retention, message, tmp_path):
    model = make_llama()
    with pytest.raises(EngineError, match=message):
        open_session(model, adamw(model), tmp_path, retention=retention)
    assert "forward" not in vars(model)
    assert not list(tmp_path.rglob("*"))


def test_blocks_that_are_cut_into_modules_keep_nothing(tmp_path):
    model = make_llama()
    with pytest.raises(EngineError, match="cut into modules"):
        open_session(model, adamw(model), tmp_path, retention=in_tier("gpu", [GATE]), grain="module")
    with open_session(model, adamw(model), tmp_path, retention=Retention(), grain="module"):
        one_loss(model).backward()


def test_hooks_are_taken_away_with_the_session(tmp_path):
    model = make_llama()
    with open_session(model, adamw(model), tmp_path, retention=in_tier("gpu", [GATE], blocks=(1,))):
        assert model.model.layers[1].mlp._forward_pre_hooks
        assert not model.model.layers[0].mlp._forward_pre_hooks, "nothing is kept of this block"
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


class Changing(nn.Module):
    """Another operator each time it is called."""

    calls = 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return hidden * 2 if self.calls % 2 else (hidden.unsqueeze(0) * 2).squeeze(0)


def test_a_recomputation_that_takes_another_way_is_found(tmp_path):
    """What is returned in place of an operator must be that operator's."""
    model = make_llama()
    model.model.layers[1].mlp.act_fn = Changing()
    options = {"retention": in_tier("gpu", ["mlp.act_fn:mul#0"], blocks=(1,)), "micro_batch_size": 4}
    with pytest.raises(EngineError, match=r"calls mlp\.act_fn:mul#0 otherwise"), open_session(model, adamw(model), tmp_path, **options):
        one_loss(model).backward()


# ---------------------------------------------------------------- what cannot be kept
@pytest.mark.parametrize(
    ("label", "reason"),
    [
        ("self_attn:bernoulli_#0", "draws random numbers"),
        ("self_attn:div_#0", "memory that it was given"),
        ("self_attn:empty_like#0", "written to"),
    ],
)
@pytest.mark.parametrize("tier", ["gpu", "ram", "ssd"])
def test_dropout_and_what_it_writes_to_cannot_be_kept(tier, label, reason, tmp_path):
    """As eager attention does it on the CPU: a mask is drawn into empty memory, and scaled there."""
    model = make_llama(attention="eager", attention_dropout=0.2)
    with pytest.raises(EngineError, match=reason) as caught, open_session(model, adamw(model), tmp_path, retention=in_tier(tier, [label])):
        one_loss(model).backward()
    assert label in caught.value.message and caught.value.place.startswith("model.layers.")


class Writing(nn.Module):
    """A gate whose output is written to behind its back or before everybody's eyes."""

    def __init__(self, inner: nn.Module, *, counted: bool) -> None:
        super().__init__()
        self.inner, self.counted = inner, counted

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output = functional.silu(hidden)
        target = hidden.detach() if self.counted else hidden.detach().numpy()
        target *= 2  # as a kernel of another library does, which autograd does not hear of
        return output


@pytest.mark.parametrize("tier", ["gpu", "ram", "ssd"])
@pytest.mark.parametrize("debug", DebugMode)
def test_trap_1_a_write_to_what_is_kept_is_found(debug, tier, tmp_path):
    """Through torch it is counted."""
    model = make_llama()
    model.model.layers[1].mlp.act_fn = Writing(model.model.layers[1].mlp.act_fn, counted=True)
    with (
        pytest.raises(EngineError, match=f"kept output of {GATE} in model.layers.1 was written to"),
        open_session(model, adamw(model), tmp_path, retention=in_tier(tier, [GATE]), debug=debug),
    ):
        one_loss(model).backward()


def test_trap_1_a_write_past_torch_is_found_by_its_sum(tmp_path):
    model = make_llama()
    model.model.layers[1].mlp.act_fn = Writing(model.model.layers[1].mlp.act_fn, counted=False)
    options = {"retention": in_tier("gpu", [GATE]), "debug": DebugMode.NAN_FILL}
    with (
        pytest.raises(EngineError, match=f"kept output of {GATE} in model.layers.1 was written to"),
        open_session(model, adamw(model), tmp_path, **options),
    ):
        one_loss(model).backward()


def test_trap_1_what_was_copied_before_the_write_is_right(tmp_path):
    """The copy holds what the operator returned; the recomputation then writes to a copy of it, as the first run did to the original."""
    norms = []
    for number, retention in enumerate((Retention(), in_tier("ram", [GATE]))):
        model = make_llama()
        model.model.layers[1].mlp.act_fn = Writing(model.model.layers[1].mlp.act_fn, counted=False)
        with open_session(model, adamw(model), tmp_path / str(number), retention=retention, debug=DebugMode.NAN_FILL) as session:
            one_loss(model).backward()
            session.wait()
            norms.append(session.statistics.last_step.squared_gradient_norm)
    assert norms[0] == norms[1]


def test_what_was_changed_on_its_way_is_found_by_its_sum(tmp_path):
    model = make_llama()
    message, options = (
        f"kept output of {ATTENTION} in model.layers.0",
        {"retention": in_tier("ram", [ATTENTION]), "debug": DebugMode.NAN_FILL},
    )
    with pytest.raises(EngineError, match=message), open_session(model, adamw(model), tmp_path, **options) as session:
        loss = one_loss(model)
        output = next(output for region in session._stages.kept.now._regions for output in region().outputs.values())
        output.buffer.memory[100] += 1
        loss.backward()


def test_a_blocks_input_that_is_written_to_is_found(tmp_path):
    model = make_llama()

    def write(_module, inputs):
        inputs[0].detach().mul_(2)

    model.model.layers[1].input_layernorm.register_forward_pre_hook(write)
    options = {"retention": in_tier("ram", [], boundaries=True), "micro_batch_size": 4}
    with (
        pytest.raises(EngineError, match=r"the block's input in model\.layers\.1 was written to"),
        open_session(model, adamw(model), tmp_path, **options),
    ):
        one_loss(model).backward()


def test_a_second_backward_of_one_forward_is_refused(tmp_path):
    import lohan

    model = make_llama()
    with open_session(model, adamw(model), tmp_path, retention=in_tier("ram", [GATE], boundaries=True)):
        loss = one_loss(model)
        with lohan.accumulate():
            loss.backward(retain_graph=True)
        with pytest.raises(EngineError, match="second backward"):
            loss.backward()


# ---------------------------------------------------------------- taking outputs apart
def rebuilt(result, device=CPU):
    packed = PackedOutputs(result, device, movable=True)
    stretches = [stretch.clone() for stretch in packed.stretches()]
    assert [stretch.numel() for stretch in stretches] == packed.sizes
    packed.let_go()
    return packed, packed.rebuild(stretches)


def test_outputs_keep_their_order_in_memory():
    """Attention returns (B, H, S, D) that lies as (B, S, H, D)."""
    attention = torch.randn(2, 16, 4, 8).transpose(1, 2)
    packed, (again, log_sum, seed, number, nothing) = rebuilt((attention, torch.randn(2, 4, 16), torch.tensor([5, 7]), 3, None))
    assert torch.equal(again, attention) and again.stride() == attention.stride()
    assert log_sum.shape == (2, 4, 16) and seed.tolist() == [5, 7] and (number, nothing) == (3, None)
    assert packed.sizes == [attention.nbytes, log_sum.nbytes], "the seed stays where it is"


def test_what_shares_memory_is_moved_once():
    joined = torch.randn(3, 64)
    packed, (first, last, other) = rebuilt([joined[0], joined[2, 10:], torch.randn(5, 5)])
    assert torch.equal(first, joined[0]) and torch.equal(last, joined[2, 10:])
    assert packed.sizes == [joined.nbytes, other.nbytes]


def test_a_slice_takes_only_its_own_memory():
    rows = torch.split(torch.randn(8, 4, 16), 2)[1]
    packed, again = rebuilt(rows)
    assert torch.equal(again, rows)
    assert packed.sizes == [rows.nbytes] and again.untyped_storage().nbytes() == rows.nbytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.uint8, torch.bool])
def test_sums_differ_where_a_byte_or_the_order_does(dtype):
    values = (torch.rand(1031) * 100 - 50).clamp(0).to(dtype)
    bytes_of = lambda tensor: [tensor.clone().view(torch.uint8)]  # noqa: E731
    before = checksum(bytes_of(values))
    assert before == checksum(bytes_of(values))
    for place in (0, 515, values.nbytes - 1):
        changed = bytes_of(values)
        changed[0][place] ^= 1
        assert checksum(changed) != before
    assert checksum(bytes_of(values.flip(0))) != before


def test_an_operator_is_in_one_tier_of_a_block(tmp_path):
    operators = (KeptOperator(label=GATE, ram_blocks=(0,)), KeptOperator(label=ATTENTION, ssd_blocks=(0,)))
    retention = Retention(operators=operators, boundaries=BlockTiers(ram_blocks=(0,)))
    model = make_llama()
    with open_session(model, adamw(model), tmp_path, retention=retention) as session:
        one_loss(model).backward()
        assert session._stages.kept.now.decisions.keys() == {1}
        assert tiers_of(session).bytes_in == tiers_of(session).bytes_out
