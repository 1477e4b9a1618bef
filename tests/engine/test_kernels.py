"""Fused operators on a CPU: the bits of the model's own modules, one label each, and nothing left behind."""

from __future__ import annotations

import json
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from lohan.config import KernelSet, Precision
from lohan.errors import ConfigError, EngineError
from lohan.models import kernels_compiled
from lohan.models.blocks import trace_workload
from lohan.models.kernel_operators import OPERATORS
from lohan.models.kernels import NO_LABEL, cross_entropy_sum, install_kernels, resolve_kernels, usable_kernels
from lohan.models.operators import operator_name
from lohan.planning.footprint import measure
from lohan.planning.retention import BlockTiers, Retention
from lohan.streaming.parameters import DebugMode
from tests.engine.kept_runs import FUSED_GROUPS, in_tier, labels_of, spread, trained
from tests.engine.reference import (
    VOCABULARY,
    adamw,
    assert_bitwise_equal,
    assert_equal_training,
    make_batches,
    make_llama,
    open_session,
    train_plain,
    train_streamed,
)

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "mistral": MistralConfig(**SIZES, sliding_window=8),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
}
FUSED_MODULES = {"input_layernorm", "post_attention_layernorm", "self_attn", "mlp"}
FUSED_LABELS = [label for labels in FUSED_GROUPS.values() for label in labels]
BOTH = (KernelSet.TORCH, KernelSet.COMPILED)


def make(family: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(CONFIGS[family], dtype=dtype).train()
    return model


# ---------------------------------------------------------------- operators

ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "rms_norm": ((2, 5, 16), (16,), 1e-6),
    "rms_norm_backward": ((2, 5, 16), (2, 5, 16), (16,), (2, 5, 1)),
    "swiglu": ((2, 5, 16), (2, 5, 16)),
    "swiglu_backward": ((2, 5, 16), (2, 5, 16), (2, 5, 16)),
    "rotary": ((2, 5, 4, 8), (2, 5, 2, 8), (2, 5, 8), (2, 5, 8)),
    "rotary_backward": ((2, 5, 4, 8), (2, 5, 2, 8), (2, 5, 8), (2, 5, 8)),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_operators_keep_torchs_rules(name):
    """What an operator says of itself is so: it writes to nothing, its meta outputs are as its real ones, autograd knows it."""
    torch.manual_seed(0)
    arguments = [torch.randn(value) if isinstance(value, tuple) else value for value in ARGUMENTS[name]]
    if name.startswith("rotary"):
        arguments[:2] = [tensor.transpose(1, 2) for tensor in arguments[:2]]
    if not name.endswith("backward"):
        for tensor in arguments[:2]:
            tensor.requires_grad_()
    utils = (
        ("test_schema", "test_faketensor")
        if name.endswith("backward")
        else ("test_schema", "test_faketensor", "test_autograd_registration")
    )
    torch.library.opcheck(getattr(OPERATORS, name).default, (*arguments, "compiled"), test_utils=utils)


LABELS = torch.tensor([3, 0, NO_LABEL, 15, 7])


def test_the_loss_keeps_torchs_rules():
    logits, normalizers = torch.randn(5, 16, requires_grad=True), torch.randn(5)
    utils = ("test_schema", "test_faketensor")
    arguments = (logits, LABELS, NO_LABEL, "compiled")
    torch.library.opcheck(OPERATORS.cross_entropy.default, arguments, test_utils=(*utils, "test_autograd_registration"))
    backward = (torch.tensor(0.5), logits.detach(), LABELS, normalizers, NO_LABEL, "compiled")
    torch.library.opcheck(OPERATORS.cross_entropy_backward.default, backward, test_utils=utils)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_has_the_bits_of_torchs_own(dtype):
    torch.manual_seed(0)
    logits = torch.randn(5, 300).mul(4).to(dtype).requires_grad_()
    found = []
    for kernels in BOTH:
        loss = cross_entropy_sum(logits, LABELS, kernels)
        found.append((loss, *torch.autograd.grad(loss / 7, logits)))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert not found[0][1][2].any(), "a row without a label"


def test_what_is_compiled_for_the_loss_is_cross_entropy():
    """The formulas themselves, which only a GPU compiles."""
    torch.manual_seed(0)
    logits, counted, labels = torch.randn(5, 300).mul(4), LABELS != NO_LABEL, LABELS.clamp(min=0)
    losses, normalizers = kernels_compiled._losses(logits, labels, counted)
    exact = logits.double().requires_grad_()
    rows = torch.nn.functional.cross_entropy(exact, LABELS, ignore_index=NO_LABEL, reduction="none")
    torch.testing.assert_close(losses.double(), rows.detach(), rtol=1e-5, atol=1e-6)
    (expected,) = torch.autograd.grad(rows.sum() / 7, exact)
    gradient = kernels_compiled._of_losses(logits, labels, torch.where(counted, torch.tensor(1 / 7), 0.0), normalizers)
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-5, atol=1e-7)


def test_a_fused_loss_makes_no_copies_of_the_logits(tmp_path):
    """As large as they are the projection's outputs (the recomputation's among them) and their gradient; nothing else."""
    made = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, tuple) else (result,):
                is_matrix = isinstance(tensor, torch.Tensor) and tensor.dim() == 2 and tensor.shape[1] == VOCABULARY
                if is_matrix and tensor.shape[0] != 64 and not function.is_view:
                    made.append((operator_name(function), tensor.dtype))
            return result

    model = make_llama()
    with open_session(model, adamw(model), tmp_path, kernels="compiled", precision=Precision.BF16), Watch():
        model(**make_batches(1)[0]).loss.backward()
    names = [name for name, _ in made if name]
    assert names == ["matmul", "matmul", "cross_entropy_backward"], made
    assert {dtype for _, dtype in made} == {torch.bfloat16}


def outputs_and_gradients(model: nn.Module, part: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The output of one module of the first block, and the gradients of its random input and of its parameters."""
    generator = torch.Generator().manual_seed(1)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator).to(dtype)

    module = model.model.layers[0].get_submodule(part)
    width = module.weight.shape[0] if part.endswith("norm") else 64
    hidden = random(2, 9, width).requires_grad_()
    angles = random(2, 9, 8).repeat(1, 1, 2)
    arguments = {"position_embeddings": (angles.cos(), angles.sin()), "attention_mask": None} if part == "self_attn" else {}
    result = module(hidden, **arguments)
    output = result[0] if isinstance(result, tuple) else result
    gradients = torch.autograd.grad(output, [hidden, *module.parameters()], random(*output.shape))
    names = ["hidden", *(name for name, _ in module.named_parameters())]
    return {"output": output, **dict(zip(names, gradients, strict=True))}


PARTS = [(family, part) for family in CONFIGS for part in sorted(FUSED_MODULES)] + [("qwen3", f"self_attn.{name}_norm") for name in "qk"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "part"), PARTS)
def test_modules_compute_the_same_bits(family, part, dtype):
    model = make(family, dtype)
    plain = outputs_and_gradients(model, part, dtype)
    installed = install_kernels(model, KernelSet.COMPILED)
    assert f"model.layers.0.{part}" in installed.fused
    fused = outputs_and_gradients(model, part, dtype)
    for name, expected in plain.items():
        # Autograd's sum over tokens and heads goes through memory in another order there; by itself each of the two norms is a case here.
        if name not in ("q_norm.weight", "k_norm.weight"):
            assert torch.equal(expected, fused[name]), name


@pytest.mark.parametrize("family", CONFIGS)
def test_all_of_a_block_that_can_be_fused_is(family):
    model = make(family)
    names = {name.rpartition(".")[2] for name in install_kernels(model, KernelSet.COMPILED).fused}
    assert names == FUSED_MODULES | {"norm"} | ({"q_norm", "k_norm"} if family == "qwen3" else set())


class Watching(TorchDispatchMode):
    """Under a mode torch's compiler runs nothing compiled."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.timeout(300)
def test_a_compiled_formula_is_compiled_once():
    """For every number of tokens, with gradients and without, under dispatch modes too; a single token is computed as it is written."""
    from torch._dynamo.utils import counters

    from lohan.models import kernel_formulas, kernels_compiled

    generator = torch.Generator().manual_seed(0)
    kernels_compiled._compiled.clear()
    graphs = counters["stats"]["unique_graphs"]
    for length in (7, 64, 2, 1):
        gate, up = (torch.randn(3 if length > 1 else 1, length, 48, generator=generator).requires_grad_() for _ in range(2))
        found = [kernels_compiled.swiglu(gate, up)]
        with Watching(), Watching():
            found.append(kernels_compiled.swiglu(gate.detach(), up))
        assert torch.equal(*found)
        expected = kernel_formulas.swiglu(gate, up)
        # The exponential is off by a few units, and products by half of one.
        assert ((found[0] - expected).abs() <= 16 * 2**-24 * expected.abs()).all()
        assert not found[0].requires_grad
    assert len(kernels_compiled._compiled) == 1
    assert counters["stats"]["unique_graphs"] == graphs + 1


# ---------------------------------------------------------------- what is changed, and what is not


def classes(model: nn.Module) -> list[tuple[str, type]]:
    return [(name, type(module)) for name, module in model.named_modules()]


def test_modules_are_their_own_again_afterwards(tmp_path):
    model = make_llama()
    before, forwards = classes(model), [dict(vars(module)).get("forward") for module in model.model.layers[0].modules()]
    with open_session(model, adamw(model), tmp_path, kernels="compiled") as session:
        changed = [name for (name, own), (_, now) in zip(before, classes(model), strict=True) if own is not now]
        assert changed == list(session.kernels.fused)
        assert [type(module).__name__ for module in model.modules()] == [own.__name__ for _, own in before]
        assert all(isinstance(module, own) for module, (_, own) in zip(model.modules(), before, strict=True))
    assert classes(model) == before
    assert [dict(vars(module)).get("forward") for module in list(model.model.layers[0].modules())[1:]] == forwards[1:]


def test_torchs_set_changes_nothing():
    model = make_llama()
    before = classes(model)
    installed = install_kernels(model, KernelSet.TORCH)
    assert classes(model) == before
    assert not installed.fused
    assert not installed.left_alone


def test_unknown_modules_stay_as_they_are_and_are_named():
    torch.manual_seed(0)
    gpt2 = AutoModelForCausalLM.from_config(GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=100))
    installed = install_kernels(gpt2, KernelSet.COMPILED)
    assert not installed.fused
    assert installed.left_alone == ("transformer.h.0.attn", "transformer.h.0.mlp")


def test_an_mlp_with_another_activation_stays_as_it_is():
    model = make_llama(hidden_act="gelu")
    installed = install_kernels(model, KernelSet.COMPILED)
    assert installed.left_alone == tuple(f"model.layers.{block}.mlp" for block in range(3))
    assert {name.rpartition(".")[2] for name in installed.fused} == FUSED_MODULES - {"mlp"} | {"norm"}


# ---------------------------------------------------------------- settings


def test_a_cpu_uses_torchs_operators_unless_it_is_told_otherwise():
    assert usable_kernels(CPU) == (KernelSet.TORCH,)
    assert resolve_kernels(KernelSet.AUTO, CPU) is KernelSet.TORCH
    assert resolve_kernels(KernelSet.COMPILED, CPU) is KernelSet.COMPILED


@pytest.mark.parametrize(
    ("kernels", "message"),
    [
        ("fast", "expected one of auto, torch, liger, compiled"),
        ("liger", "the kernel set liger cannot be used: Liger's kernels need a GPU"),
    ],
)
def test_sets_that_cannot_be_used_are_refused_before_anything_is_changed(kernels, message, tmp_path):
    model = make_llama()
    before = classes(model)
    with pytest.raises(ConfigError, match=message) as caught:
        open_session(model, adamw(model), tmp_path, kernels=kernels)
    assert caught.value.remedy
    assert classes(model) == before
    assert not any(parameter.isnan().any() for parameter in model.parameters())


# ---------------------------------------------------------------- training


@pytest.mark.parametrize("grain", ["block", "module"])
@pytest.mark.parametrize("family", CONFIGS)
def test_training_in_bf16_gives_the_same_bits(family, grain, tmp_path):
    options = {"grain": grain, "precision": Precision.BF16, "debug": DebugMode.NAN_FILL}
    outcomes = [trained(tmp_path / kernels, Retention(), model=make(family), kernels=kernels, **options) for kernels in BOTH]
    assert_bitwise_equal(*outcomes)


@pytest.mark.parametrize("family", CONFIGS)
def test_training_in_fp32_is_plain_training(family, tmp_path):
    """Not to the bit: autograd adds a norm's two gradients to the residual's one by one, and a fused norm's as one."""
    batches = make_batches(20, padded=True)
    plain = train_plain(make(family), batches)
    assert_equal_training(train_streamed(make(family), batches, tmp_path, kernels="compiled"), plain)


def test_every_fused_operator_can_be_kept_in_every_tier(tmp_path):
    again = trained(tmp_path / "again", Retention(), steps=1, kernels="compiled")
    labels = labels_of(make_llama(), tmp_path / "labels", kernels="compiled")
    assert set(FUSED_LABELS) < set(labels)
    for number, label in enumerate(labels):
        kept = trained(tmp_path / str(number), spread([label], shift=number), steps=1, kernels="compiled", debug=DebugMode.NAN_FILL)
        assert_bitwise_equal(kept, again)


def test_all_subsets_of_the_fused_groups(tmp_path):
    again = trained(tmp_path / "again", Retention(), steps=1, kernels="compiled")
    for count in range(1, len(FUSED_GROUPS) + 1):
        for number, groups in enumerate(combinations(FUSED_GROUPS, count)):
            labels = [label for group in groups for label in FUSED_GROUPS[group]]
            retention = spread(labels, shift=number).model_copy(update={"boundaries": BlockTiers(ram_blocks=(0, 2), ssd_blocks=(1,))})
            folder = tmp_path / f"{count} {number}"
            assert_bitwise_equal(trained(folder, retention, steps=1, kernels="compiled", debug=DebugMode.NAN_FILL), again)


@pytest.mark.parametrize("family", CONFIGS)
def test_the_workload_has_the_labels_that_a_run_has(family, tmp_path):
    """Beside those that attention with a mask and grouped heads adds on a CPU."""
    labels = labels_of(make(family), tmp_path, kernels="compiled")
    workload = trace_workload(CONFIGS[family])
    traced = [operator.label for operator in workload.fused_operators]
    assert traced == [label for label in labels if label in traced]
    assert {label.partition(":")[0] for label in labels if label not in traced} == {"self_attn"}
    assert workload.operators_of(KernelSet.COMPILED) == workload.operators_of(KernelSet.LIGER) == workload.fused_operators
    assert workload.operators_of(KernelSet.TORCH) == workload.operators
    assert workload.block_forward_flops(2, 64) == sum(operator.flops.at(2, 64) for operator in workload.fused_operators)


def test_a_plan_counts_what_the_kernel_set_saves():
    """A norm saves the roots in place of six tensors of its width, a gated MLP no silu, and rotations no halves."""
    workload = trace_workload(CONFIGS["llama"])
    torchs, fused = workload.saved_elements_of(KernelSet.TORCH), workload.saved_elements_of(KernelSet.LIGER)
    assert 0 < fused < torchs
    assert workload.saved_elements_of(KernelSet.COMPILED) == fused
    assert workload.saved_elements_of(KernelSet.AUTO) == torchs, "the run may decide for any"
    sizes = {kernels: measure(workload, Precision.BF16, kernels=kernels) for kernels in KernelSet}
    assert [sizes[kernels].saved_per_token for kernels in (KernelSet.TORCH, KernelSet.LIGER)] == [torchs, fused]
    without = workload.model_copy(update={"fused_saved_elements_per_token": 0})
    assert without.saved_elements_of(KernelSet.LIGER) == torchs


def test_a_label_of_the_other_set_is_refused(tmp_path):
    with pytest.raises(EngineError, match="there is no operator mlp:mul#0"):
        trained(tmp_path, in_tier("gpu", ["mlp:mul#0"]), kernels="compiled")


# ---------------------------------------------------------------- the benchmark


def test_the_benchmark_compares_all_sets(tmp_path, monkeypatch):
    """On a CPU: the smallest shape, and no Liger."""
    from benchmarks import kernels as benchmark

    output = tmp_path / "kernels.json"
    monkeypatch.setattr("sys.argv", ["kernels", "--tiny", "--output", str(output)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert benchmark.main() == 0
    content = json.loads(output.read_text())
    skipped, *records = content["records"]
    assert (content["name"], skipped["kernels"]) == ("kernels", "liger")
    assert "need a GPU" in skipped["skipped"]
    subjects = ("block", "rms_norm", "swiglu", "rotary")
    assert [(record["what"], record["kernels"]) for record in records] == [(what, kernels) for what in subjects for kernels in BOTH]
    assert all((record["tflops"] is not None) is (record["what"] == "block") for record in records)
