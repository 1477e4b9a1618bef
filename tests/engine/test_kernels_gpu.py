"""Fused operators on a GPU: within rounding of fp64, out of place, the same bits again, and kept without changing any."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

# For determinism; read by cuBLAS when it is first used.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
from torch._dynamo.utils import counters

from lohan.config import KernelSet, Precision
from lohan.models.block_times import measure_block
from lohan.models.blocks import trace_workload
from lohan.models.kernel_operators import OPERATORS
from lohan.models.kernels import NO_LABEL, cross_entropy_sum, usable_kernels, why_unusable
from lohan.planning.retention import BlockTiers, Retention
from lohan.streaming.kept_tensors import checksum
from lohan.streaming.parameters import DebugMode
from tests.engine.kept_runs import ATTENTION, GROUPS_OF, in_tier, labels_of, spread, trained
from tests.engine.reference import assert_bitwise_equal, assert_equal_training, make_batches, make_llama, train_plain, train_streamed
from tests.engine.test_kernels import CONFIGS, make

# The warnings are of triton and what brings it.
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("no_tf32"), pytest.mark.filterwarnings("ignore::DeprecationWarning")]
FUSED = (KernelSet.LIGER, KernelSet.COMPILED)
UNIT = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}
"""The most that rounding to a type is off, relatively."""
SHAPES = [(2, 7, 256), (3, 129, 3200), (1, 2, 64)]
"""Rows, tokens, width."""


@pytest.fixture(params=FUSED)
def kernels(request) -> KernelSet:
    if request.param is KernelSet.LIGER and find_spec("liger_kernel") is None:
        pytest.skip("the package liger-kernel is not installed")
    reason = why_unusable(request.param, torch.device("cuda"))
    assert not reason, f"a GPU with triton and a compiler for C can run all sets: {reason}"
    return request.param


def random(*sizes: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(sizes, device="cuda", dtype=torch.float32, generator=generator).to(dtype)


def call(operator: Any, inputs: Sequence[torch.Tensor], *others: Any) -> tuple[torch.Tensor, ...]:
    """What it returns for each of two calls, the same bits, having written to none of its inputs and returned none of their memory."""
    before = [checksum([tensor.contiguous().view(-1).view(torch.uint8)]) for tensor in inputs]
    results = []
    for _ in range(2):
        result = operator(*inputs, *others)
        results.append(result if isinstance(result, tuple) else (result,))
    assert [checksum([tensor.contiguous().view(-1).view(torch.uint8)]) for tensor in inputs] == before
    storages = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    assert all(output.untyped_storage().data_ptr() not in storages for output in results[0])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    return results[0]


def assert_within(found: torch.Tensor, exact: torch.Tensor, size: torch.Tensor, bound: float) -> None:
    """`size` is what the terms of `exact` add up to without their signs; `bound` how far each may be off, relatively."""
    excess = (found.double() - exact).abs() - bound * size.abs()
    assert excess.max().item() <= 2.0**-126, f"off by {(excess + bound * size.abs()).max().item()}"


@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm(shape, dtype, kernels):
    """Roundings: of the normed values and of the product; in the backward of gradient x weight, of the sum, and of what is multiplied for
    the weight; sums over a row or over tokens are fp32's."""
    width, unit = shape[-1], UNIT[dtype]
    tokens = shape[0] * shape[1]
    hidden, weight, gradient = random(*shape, dtype=dtype), random(width, dtype=dtype, seed=1), random(*shape, dtype=dtype, seed=2)
    output, scale = call(OPERATORS.rms_norm, [hidden, weight], 1e-6, str(kernels))
    of_hidden, of_weight = call(OPERATORS.rms_norm_backward, [gradient, hidden, weight, scale], str(kernels))
    x, w, g = hidden.double(), weight.double(), gradient.double()
    s = (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
    row, column = (width + 16) * 2.0**-24, (tokens + 16) * 2.0**-24
    assert output.dtype is dtype
    assert scale.shape == (*shape[:-1], 1)
    assert_within(scale, s, s, row)
    assert_within(output, x * s * w, x * s * w, 2 * unit + row)
    mean = (g * w * x).mean(-1, keepdim=True)
    size = (g * w * s).abs() + (x * s.pow(3)).abs() * (g * w * x).abs().mean(-1, keepdim=True)
    assert_within(of_hidden, g * w * s - x * s.pow(3) * mean, size, 3 * unit + 4 * row)
    terms = (g * x * s).view(-1, width)
    assert_within(of_weight, terms.sum(0), terms.abs().sum(0), 3 * unit + row + column)


@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize("shape", SHAPES)
def test_swiglu(shape, dtype, kernels):
    """Roundings: of silu or its slope, of a product, and of the result; exponentials are off by a few units of fp32."""
    bound = 3 * UNIT[dtype] + 32 * 2.0**-24
    gate, up, gradient = (random(*shape, dtype=dtype, seed=seed) for seed in range(3))
    (output,) = call(OPERATORS.swiglu, [gate, up], str(kernels))
    of_gate, of_up = call(OPERATORS.swiglu_backward, [gradient, gate, up], str(kernels))
    a, b, g = gate.double(), up.double(), gradient.double()
    sigmoid = a.sigmoid()
    assert_within(output, a * sigmoid * b, a * sigmoid * b, bound)
    assert_within(of_up, g * a * sigmoid, g * a * sigmoid, bound)
    assert_within(of_gate, g * b * sigmoid * (1 + a * (1 - sigmoid)), g * b * sigmoid * (1 + a.abs() * (1 - sigmoid)), bound)


@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize("positions", ["shared", "own"])
@pytest.mark.parametrize(("heads", "width"), [((4, 2), 64), ((32, 32), 100), ((3, 1), 128)])
def test_rotary(heads, width, positions, dtype, kernels):
    """Roundings: of two products and of their sum."""
    rows, length = 3, 37
    query, key = (random(rows, length, count, width, dtype=dtype, seed=count).transpose(1, 2) for count in heads)
    angles = random(1 if positions == "shared" else rows, length, width // 2, dtype=torch.float32).repeat(1, 1, 2)
    cosines, sines = angles.cos().to(dtype), angles.sin().to(dtype)
    c, s = cosines.double().unsqueeze(1), sines.double().unsqueeze(1)
    for operator, sign in ((OPERATORS.rotary, 1), (OPERATORS.rotary_backward, -1)):
        for found, given in zip(call(operator, [query, key, cosines, sines], str(kernels)), (query, key), strict=True):
            first, second = given.double().chunk(2, -1)
            turned = sign * torch.cat((-second, first), -1)
            exact, size = given.double() * c + turned * s, (given.double() * c).abs() + (turned * s).abs()
            assert found.shape == given.shape
            assert_within(found, exact, size, 3 * UNIT[dtype])


@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize("shape", [(1, 300), (2, 1000), (37, 32000), (1048, 32001)])
def test_cross_entropy(shape, dtype, kernels):
    """Roundings: of the gradient; sums over a row and over tokens are fp32's, and so is the difference whose exponential is taken."""
    tokens, width = shape
    logits = (4 * random(*shape, dtype=torch.float32)).to(dtype)
    labels = torch.randint(width, (tokens,), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    if tokens > 1:
        labels[tokens // 2] = NO_LABEL
    gradient = torch.tensor(1 / 7, device="cuda")
    total, normalizers = call(OPERATORS.cross_entropy, [logits, labels], NO_LABEL, str(kernels))
    (of_logits,) = call(OPERATORS.cross_entropy_backward, [gradient, logits, labels, normalizers], NO_LABEL, str(kernels))
    x, counted = logits.double(), labels != NO_LABEL
    exact = x.logsumexp(-1)
    at_label = x.gather(1, labels.clamp(min=0).unsqueeze(1)).squeeze(1)
    losses = torch.where(counted, exact - at_label, 0.0)
    row = (width + 256) * 2.0**-24
    assert (total.dtype, of_logits.dtype, of_logits.shape) == (torch.float32, dtype, logits.shape)
    assert_within(normalizers, exact, exact.abs() + 1, row)
    assert_within(total, losses.sum(), (exact.abs() + at_label.abs() + 1).sum(), row + (tokens + 16) * 2.0**-24)
    chances = (x - exact.unsqueeze(1)).exp()
    is_label = torch.arange(width, device="cuda") == labels.unsqueeze(1)
    scale = torch.where(counted, gradient.double(), 0.0).unsqueeze(1)
    assert_within(of_logits, (chances - is_label.double()) * scale, (chances + is_label) * scale, 2 * UNIT[dtype] + 2 * row)


def test_the_loss_of_a_chunk_takes_its_logits_and_their_gradient(kernels):
    """What the plan counts: two copies of a chunk's logits in their own type."""
    logits = random(512, 32000, dtype=torch.bfloat16).requires_grad_()
    labels = torch.arange(512, device="cuda")
    torch.autograd.grad(cross_entropy_sum(logits, labels, kernels), logits)  # compiled before it is measured
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(cross_entropy_sum(logits, labels, kernels), logits)
    taken = torch.cuda.max_memory_allocated() - before
    assert taken <= 1.1 * 2 * logits.numel(), "the gradient alone: the logits were there before"


@pytest.mark.parametrize("first", [(2, 2), (2000, 50)])
def test_the_chunk_that_comes_first_changes_no_bit_of_the_loss(first):
    from lohan.models import kernels_compiled

    def results(tokens: int) -> list[torch.Tensor]:
        logits, labels = random(tokens, 1000, dtype=torch.bfloat16), torch.arange(tokens, device="cuda") % 1000
        total, normalizers = OPERATORS.cross_entropy(logits, labels, NO_LABEL, "compiled")
        return [total, normalizers, OPERATORS.cross_entropy_backward(total, logits, labels, normalizers, NO_LABEL, "compiled")]

    kernels_compiled._compiled.clear()
    expected = results(777)
    kernels_compiled._compiled.clear()
    for tokens in first:
        results(tokens)
    assert all(torch.equal(one, other) for one, other in zip(expected, results(777), strict=True))


@pytest.mark.parametrize("first", [(1, 2), (3, 50), (2, 5000)])
def test_what_was_computed_before_changes_no_bit(first):
    """A compiled kernel is the same whatever size comes first."""
    from lohan.models import kernels_compiled

    def results() -> list[torch.Tensor]:
        hidden, weight = random(2, 777, 512, dtype=torch.bfloat16), random(512, dtype=torch.bfloat16)
        output, scale = OPERATORS.rms_norm(hidden, weight, 1e-6, "compiled")
        return [output, *OPERATORS.rms_norm_backward(output, hidden, weight, scale, "compiled")]

    kernels_compiled._compiled.clear()
    expected = results()
    kernels_compiled._compiled.clear()
    other = random(*first, 512, dtype=torch.bfloat16)
    weight = random(512, dtype=torch.bfloat16)
    _, scale = OPERATORS.rms_norm(other, weight, 1e-6, "compiled")
    OPERATORS.rms_norm_backward(other, other, weight, scale, "compiled")
    compiled, graphs = len(kernels_compiled._compiled), counters["stats"]["unique_graphs"]
    assert all(torch.equal(one, other) for one, other in zip(expected, results(), strict=True))
    assert (len(kernels_compiled._compiled), counters["stats"]["unique_graphs"]) == (compiled, graphs), "nothing was compiled again"


# ---------------------------------------------------------------- in the engine


def run_of(kernels: KernelSet, retention: Retention, folder: Any, **options: Any) -> Any:
    """Eager attention, whose backward is deterministic; released slots are NaN, and kept tensors have checksums."""
    model = make_llama(attention="eager")
    settings = {"device": "cuda", "kernels": kernels, "debug": DebugMode.NAN_FILL, "steps": 1}
    return trained(folder, retention, model=model, **{**settings, **options})


@pytest.mark.usefixtures("deterministic_on_gpu")
def test_every_operator_can_be_kept(kernels, tmp_path):
    labels = labels_of(make_llama(attention="eager"), tmp_path / "labels", device="cuda", kernels=kernels)
    again = run_of(kernels, Retention(), tmp_path / "again")
    assert {label for group in GROUPS_OF[kernels].values() for label in group} - {ATTENTION} <= set(labels)
    for number, label in enumerate(labels):
        assert_bitwise_equal(run_of(kernels, spread([label], shift=number), tmp_path / str(number)), again)


@pytest.mark.usefixtures("deterministic_on_gpu")
@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("micro_batch_size", [1, 3])
@pytest.mark.parametrize("tier", ["gpu", "ram", "ssd"])
def test_all_groups_can_be_kept_in_every_tier(tier, micro_batch_size, precision, kernels, tmp_path):
    labels = [label for group in GROUPS_OF[kernels].values() for label in group if label != ATTENTION]
    inputs = BlockTiers() if tier == "gpu" else BlockTiers(**{f"{tier}_blocks": (0, 1, 2)})
    retention = in_tier(tier, labels).model_copy(update={"boundaries": inputs})
    options = {"micro_batch_size": micro_batch_size, "precision": precision, "steps": 4}
    again, kept = (run_of(kernels, kept, tmp_path / str(number), **options) for number, kept in enumerate((Retention(), retention)))
    assert_bitwise_equal(again, kept)


@pytest.mark.usefixtures("deterministic_on_gpu")
def test_two_runs_are_the_same_bit_for_bit(kernels, tmp_path):
    assert_bitwise_equal(*(run_of(kernels, Retention(), tmp_path / name, steps=4) for name in ("first", "second")))


@pytest.mark.parametrize("family", CONFIGS)
def test_training_in_fp32_is_plain_training(family, kernels, tmp_path):
    batches = make_batches(20, padded=True)
    plain = train_plain(make(family).to("cuda"), batches)
    assert_equal_training(train_streamed(make(family), batches, tmp_path, device="cuda", kernels=kernels), plain)


def test_blocks_are_timed_with_every_set():
    device = torch.device("cuda")
    workload = trace_workload(CONFIGS["qwen3"])
    for kernels in usable_kernels(device):
        times = measure_block(CONFIGS["qwen3"], rows=2, length=24, precision=Precision.BF16, device=device, kernels=kernels, repetitions=1)
        assert times.kernels == kernels
        assert list(times.operator_seconds) == [operator.label for operator in workload.operators_of(kernels)]
        assert all(times.operator_seconds.values())
