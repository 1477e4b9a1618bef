"""Operators of a block as the meta device shows them: the same labels and sizes as in a run, and figures that closed formulas give."""

from __future__ import annotations

import functools
import inspect

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MistralConfig, MixtralConfig, PhiConfig, Qwen2Config, Qwen3Config

from lohan.bench.step_model import make_config
from lohan.bench.step_shapes import SHAPES, ShapeName, block_forward_flops, forward_flops
from lohan.errors import ModelError
from lohan.models.blocks import find_units, first_block, trace_workload
from lohan.models.operator_trace import trace_operators
from lohan.models.operators import BlockOperators
from lohan.planning.workload import Coefficients, OperatorGroup, Workload

SIZES = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 100}
GPT2 = {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 100, "bos_token_id": 0, "eos_token_id": 0}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "llama grouped": LlamaConfig(**SIZES, num_key_value_heads=2),
    "llama biased": LlamaConfig(**SIZES, num_key_value_heads=2, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "mistral": MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=8),
    "qwen2": Qwen2Config(**SIZES, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=16),
    "phi": PhiConfig(**SIZES, num_key_value_heads=4, bos_token_id=1, eos_token_id=2),
    "gpt2": GPT2Config(**GPT2, **NO_DROPOUT),
    "gpt2 dropout": GPT2Config(**GPT2),
}
ROWS, LENGTH = 5, 32


@functools.cache
def workload_of(name: str) -> Workload:
    return trace_workload(CONFIGS[name])


def by_label(workload: Workload):
    return {operator.label: operator for operator in workload.operators}


class Dispatched(TorchDispatchMode):
    """The labels of a block's operators as they are dispatched, with the bytes of their outputs."""

    def __init__(self, operators: BlockOperators) -> None:
        super().__init__()
        self.operators, self.bytes = operators, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        label = self.operators.label(func)
        if label is not None:
            outputs = result if isinstance(result, tuple | list) else (result,)
            outputs = outputs[:2] if "attention#" in label else outputs  # then come a GPU's random state and lengths
            self.bytes[label] = sum(output.nbytes for output in outputs if isinstance(output, torch.Tensor))
        return result


def run_first_block(config, dtype, device, *, padded: bool) -> list[dict[str, int]]:
    """What the first block of a real model dispatches: in the forward of a batch, and in its recomputation."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).train().to(device)
    block, _ = first_block(model, find_units(model))
    original, operators, runs = block.forward, BlockOperators(block), []

    def body(hidden, *args, **kwargs):
        operators.begin()
        with Dispatched(operators) as dispatched:
            runs.append(dispatched.bytes)
            return original(hidden, *args, **kwargs)

    def forward(hidden, *args, **kwargs):
        return checkpoint(body, hidden, *args, use_reentrant=False, **kwargs)

    forward.__signature__ = inspect.signature(original)
    block.forward = forward
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long, device=device)
    if padded:
        mask[0, LENGTH // 2 :] = 0
    model(torch.zeros_like(mask), attention_mask=mask, use_cache=False).logits.sum().backward()
    assert len(runs) == 2
    return runs


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("padded", [False, True], ids=["no mask", "mask"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_what_can_be_kept_is_what_a_run_dispatches(name, dtype, padded, device):
    workload = workload_of(name)
    run, recomputation = run_first_block(CONFIGS[name], dtype, device, padded=padded)
    can_be_kept = {label: operator for label, operator in by_label(workload).items() if operator.can_be_kept}
    assert can_be_kept
    if device == "cuda" and dtype == torch.float32 and "self_attn:attention#0" not in run:
        can_be_kept.pop("self_attn:attention#0", None)  # grouped: there is no such kernel
    assert set(can_be_kept) <= set(run)
    for label, operator in can_be_kept.items():
        predicted = operator.output_elements.at(ROWS, LENGTH) * dtype.itemsize
        # In fp32, what is fp32 in a bf16 run too has half the elements that the workload counts.
        low = predicted if dtype == torch.bfloat16 else predicted / 2
        if label.endswith("native_layer_norm#0"):
            low -= ROWS * LENGTH * 2 * 2  # a CPU's mean and deviation are bf16
        assert low <= run[label] <= predicted, label
        if operator.group is OperatorGroup.MATMUL:
            assert run[label] == predicted
    assert {label for label, operator in can_be_kept.items() if operator.is_recomputed} == set(can_be_kept) & set(recomputation)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_run_dispatches_what_was_traced_in_its_order(name):
    """On a CPU all of it in bf16 without a mask, but for dropout, which a GPU does in one operator."""
    traced = [operator.label for operator in workload_of(name).operators if operator.can_be_kept or "_to_copy" in operator.label]
    run, _ = run_first_block(CONFIGS[name], torch.bfloat16, "cpu", padded=False)
    assert [label for label in run if label in set(traced)] == traced


# ---------------------------------------------------------------- what can be kept, and what is computed again
def test_the_recomputation_ends_before_the_last_product_of_a_llama():
    operators = by_label(workload_of("llama grouped"))
    assert [label for label, operator in operators.items() if not operator.is_recomputed] == ["mlp.down_proj:matmul#0", ":add#1"]
    attention = operators["self_attn:attention#0"]
    assert attention.group is OperatorGroup.ATTENTION
    assert attention.can_be_kept
    assert attention.output_elements == Coefficients(per_token=64 + 2 * 4)  # the result, and a logarithm for each head in fp32


def test_dropout_is_never_kept_and_needs_what_went_before():
    operators = by_label(workload_of("gpt2 dropout"))
    assert not any(operator.can_be_kept for label, operator in operators.items() if "dropout" in label or "attention" in label)
    assert operators["mlp.c_proj:matmul#0"].is_recomputed  # dropout saves its mask, which is made after the product


class OddBlock(nn.Module):
    """A block of one linear layer, with something in it that `then` does."""

    def __init__(self, then) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.then = then

    def forward(self, hidden):
        return self.then(self.linear(hidden))


def test_what_is_written_to_later_is_not_kept():
    def write(hidden):
        hidden[..., 0] = 0.0  # through a view
        return functional.relu(functional.relu(hidden), inplace=True)

    operators = {operator.label: operator for operator in trace_operators(OddBlock(write), 8, None)}
    assert not any(operators[label].can_be_kept for label in ("linear:matmul#0", ":relu#0", ":relu_#0"))


def test_an_operator_of_a_module_that_runs_twice_is_counted_twice_and_not_kept():
    block = OddBlock(lambda hidden: block.linear(hidden))
    (linear,) = trace_operators(block, 8, None)
    assert linear.flops == Coefficients(per_token=2 * 2 * 8 * 8)
    assert not linear.can_be_kept


@pytest.mark.parametrize(
    ("then", "message"),
    [
        (lambda hidden: hidden + torch.arange(hidden.shape[1], device=hidden.device)[:, None], "grows otherwise"),
        (lambda hidden: hidden + 1 if hidden.shape[1] > 100 else hidden, "depend on the number of tokens"),
        (lambda hidden: hidden if hidden.sum() > 0 else -hidden, "cannot run by itself"),
    ],
    ids=["growing with the length alone", "other operators in long rows", "depending on data"],
)
def test_blocks_that_cannot_be_counted_are_refused(then, message):
    with pytest.raises(ModelError, match=message):
        trace_operators(OddBlock(then), 8, None)


def test_a_model_whose_operators_cannot_be_counted_is_registered_without():
    workload = trace_workload(MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=2))
    assert workload.operators == ()
    assert workload.block_forward_flops(1, 64) == 0
    assert workload.forward_flops(1, 64) == workload.head_forward_flops(1, 64) == 64 * 2 * 64 * 100


# ---------------------------------------------------------------- closed formulas
@pytest.mark.parametrize(("rows", "length"), [(1, 1024), (8, 1024), (3, 777)])
@pytest.mark.parametrize("name", ShapeName)
def test_flops_of_llamas_are_those_that_benchmarks_count(name, rows, length):
    shape = SHAPES[name]
    workload = trace_workload(make_config(shape, 1024))
    assert workload.blocks == shape.layers
    assert workload.block_forward_flops(rows, length) == block_forward_flops(shape, rows, length)
    assert workload.forward_flops(rows, length) == forward_flops(shape, rows, length)


def test_outputs_of_a_grouped_llama_are_as_wide_as_its_layers():
    shape = SHAPES[ShapeName.LLAMA_1_1B]
    operators = by_label(trace_workload(make_config(shape, 1024)))
    key_value = shape.key_value_heads * shape.head_size
    widths = {
        "self_attn.q_proj": shape.hidden,
        "self_attn.k_proj": key_value,
        "self_attn.v_proj": key_value,
        "self_attn.o_proj": shape.hidden,
        "mlp.gate_proj": shape.intermediate,
        "mlp.up_proj": shape.intermediate,
        "mlp.down_proj": shape.hidden,
    }
    for name, width in widths.items():
        operator = operators[f"{name}:matmul#0"]
        assert operator.output_elements == Coefficients(per_token=width)
        given = shape.intermediate if name == "mlp.down_proj" else shape.hidden
        assert operator.flops == Coefficients(per_token=2 * given * width)
        assert operator.traffic_elements == Coefficients(fixed=given * width, per_token=given + width)


def test_all_outputs_of_the_benchmarks_llama():
    """Shape of 3.43 billion parameters. Widths of a token, in units of the working precision:"""
    shape = SHAPES[ShapeName.LLAMA_3_43B]
    hidden, inner, heads = shape.hidden, shape.intermediate, shape.heads
    norm = 2 * 3 * hidden + 3 * 2 + 2 * hidden  # three fp32 tensors, three fp32 numbers, the rounded and the weighted result
    rotation = 4 * hidden + hidden // 2  # cosine product, negated half, rotated, sine product, sum
    attention = 3 * hidden + 2 * rotation + (hidden + 2 * heads) + hidden
    mlp = 4 * inner + hidden  # gate, activation, up, their product, and down
    block = 2 * norm + attention + mlp + 2 * hidden
    workload = trace_workload(make_config(shape, 1024))
    assert workload.block_output_elements(8, 1024) == 8 * 1024 * block
    assert workload.activation_elements(8, 1024) == 26 * 8 * 1024 * block


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_flops_of_a_gpt2(attention):
    """Attention by plain products computes the whole score matrix."""
    hidden, layers, vocabulary, rows, length = 128, 2, 500, 4, 256
    options = {"bos_token_id": 0, "eos_token_id": 0, "attn_implementation": attention}
    config = GPT2Config(n_embd=hidden, n_layer=layers, n_head=4, vocab_size=vocabulary, **options)
    tokens = rows * length
    scores = 4 * tokens * length * hidden // (2 if attention == "sdpa" else 1)
    block = 2 * tokens * 12 * hidden * hidden + scores
    workload = trace_workload(config)
    assert workload.block_forward_flops(rows, length) == block
    assert workload.forward_flops(rows, length) == layers * block + 2 * tokens * hidden * vocabulary
