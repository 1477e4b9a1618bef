"""adamw_update against torch.optim.AdamW, and against itself: builds, threads, lengths and alignments must not show."""

from __future__ import annotations

import math
import struct
import sys
import threading

import pytest
import torch

from lohan._native import AdamSegment, AdamState, InstructionSet, ThreadPool, adamw_update, available_instruction_sets, gradient_norm

UNIT_ROUNDOFF = 2.0**-24
# A square is rounded once and then added up to 16 times in fp32; the sums are added in float64.
NORM_TOLERANCE = 17 * UNIT_ROUNDOFF
HYPER = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "weight_decay": 0.1}


@pytest.fixture(scope="module")
def pool() -> ThreadPool:
    return ThreadPool(2)


def segment(offset: int, length: int, step: int = 1, **changes: float) -> AdamSegment:
    return AdamSegment(offset, length, step=step, **{**HYPER, **changes})


class States:
    """fp32 master weights and moments with values spread over 2^-10 to 2^10, and gradients to match."""

    def __init__(self, length: int, seed: int = 0, offset: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def values() -> torch.Tensor:
            # A slice that starts `offset` elements into its storage, so that the memory is misaligned for vectors.
            full = torch.randn(length + offset, generator=generator) * torch.exp2(
                torch.randint(-10, 11, (length + offset,), generator=generator)
            )
            return full[offset:]

        self.gradients, self.master, self.first, self.second = values(), values(), values() * 0.1, values().square()
        self.weights = torch.full((length + offset,), 7, dtype=torch.bfloat16)[offset:]

    def clone(self, offset: int = 0) -> States:
        copy = States(0)
        for name, value in vars(self).items():
            moved = torch.empty(value.numel() + offset, dtype=value.dtype)[offset:]
            setattr(copy, name, moved.copy_(value))
        return copy

    def update(self, segments: list[AdamSegment], pool: ThreadPool, **options: object):
        return adamw_update(segments, self.gradients, self.state(), pool=pool, **options)

    def state(self, *, copy_out: bool = True) -> AdamState:
        weights = self.weights if copy_out else None
        return AdamState(master=self.master, weights=weights, first_moment=self.first, second_moment=self.second)

    def bits(self) -> bytes:
        return b"".join(
            value.contiguous().view(torch.uint8).numpy().tobytes() for value in (self.master, self.first, self.second, self.weights)
        )


def torch_step(states: States, dtype: torch.dtype, step: int, gradients: torch.Tensor, *, fused: bool = False):
    """One step of torch.optim.AdamW from these states; returns parameter and moments."""
    parameter = states.master.to(dtype).clone().requires_grad_()
    parameter.grad = gradients.to(dtype)
    optimizer = torch.optim.AdamW(
        [parameter],
        lr=HYPER["learning_rate"],
        betas=(HYPER["beta1"], HYPER["beta2"]),
        eps=HYPER["epsilon"],
        weight_decay=HYPER["weight_decay"],
        fused=fused,
        foreach=False,
    )
    optimizer.state[parameter] = {
        "step": torch.tensor(float(step - 1)),
        "exp_avg": states.first.to(dtype).clone(),
        "exp_avg_sq": states.second.to(dtype).clone(),
    }
    optimizer.step()
    state = optimizer.state[parameter]
    return parameter.detach(), state["exp_avg"], state["exp_avg_sq"]


def error_bounds(states: States, gradients: torch.Tensor, step: int, exact: tuple[torch.Tensor, torch.Tensor, torch.Tensor]):
    """First-order bounds on the rounding of one fp32 step, per element; 5 % covers the second order.

    With u = 2^-24: the difference g - m, the weight 1 - beta1 and their product each round once, and so does the sum, so
    |dm| <= u |m'| + 3u |w (g - m)|. Both terms of v are positive and round at most three times before the sum: |dv| <= 4u v'.
    sqrt halves that and rounds (3u), the correction's inverse and its product add 2u, epsilon and its sum 1u: it is good to 6u.
    The quotient then carries |dm| / denominator + 7u |q|; the step size and its product add 2u, the decay 2u |p|, the difference u |p'|.
    """
    u = UNIT_ROUNDOFF
    parameter, first, second = exact
    denominator = second.sqrt() / math.sqrt(1 - HYPER["beta2"] ** step) + HYPER["epsilon"]
    step_size = HYPER["learning_rate"] / (1 - HYPER["beta1"] ** step)
    first_error = u * first.abs() + 3 * u * ((1 - HYPER["beta1"]) * (gradients.double() - states.first.double())).abs()
    moved = step_size * (first_error / denominator + 9 * u * (first / denominator).abs())
    parameter_error = u * parameter.abs() + 2 * u * states.master.double().abs() + moved
    return 1.05 * parameter_error, 1.05 * first_error, 1.05 * 4 * u * second


@pytest.mark.parametrize("gradient_dtype", [torch.float32, torch.bfloat16])
def test_every_step_stays_within_the_rounding_bound_of_float64(pool, gradient_dtype):
    states = States(20_001)
    for step in range(1, 13):
        states.gradients = States(20_001, seed=step).gradients.to(gradient_dtype)
        exact = torch_step(states, torch.float64, step, states.gradients)
        bounds = error_bounds(states, states.gradients, step, exact)
        states.update([segment(0, 20_001, step)], pool)
        for actual, expected, bound in zip((states.master, states.first, states.second), exact, bounds, strict=True):
            assert bool(((actual.double() - expected).abs() <= bound).all())


def test_torch_fused_in_fp32_is_within_twice_the_bound(pool):
    states = States(20_001)
    for step in (1, 2, 10, 1000):
        exact = torch_step(states, torch.float64, step, states.gradients)
        bounds = error_bounds(states, states.gradients, step, exact)
        fused = torch_step(states, torch.float32, step, states.gradients, fused=True)
        ours = states.clone()
        ours.update([segment(0, 20_001, step)], pool)
        for actual, expected, bound in zip((ours.master, ours.first, ours.second), fused, bounds, strict=True):
            assert bool(((actual.double() - expected.double()).abs() <= 2 * bound).all())


LENGTHS = [0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65, 2047, 2048, 2049, 4095, 4097, 32767, 32768, 32769, 70_001]


@pytest.mark.parametrize("length", LENGTHS)
def test_builds_threads_and_alignments_give_the_same_bits(length):
    start = States(length, seed=length)
    start.gradients = start.gradients.bfloat16()
    results = set()
    for threads in (1, 2, 3, 4):
        own = ThreadPool(threads)
        for instruction_set in available_instruction_sets():
            for offset in (0, 1, 3):
                states = start.clone(offset)
                result = states.update([segment(0, length, 3)], own, instruction_set=instruction_set, gradient_scale=0.3)
                norm = gradient_norm(states.gradients, pool=own, instruction_set=instruction_set, gradient_scale=0.3)
                assert (norm.squared_norm, norm.non_finite) == (result.squared_norm, result.non_finite)
                results.add((states.bits(), struct.pack("d", result.squared_norm), result.non_finite))
    assert len(results) == 1


def test_automatic_choice_is_among_the_available_and_portable_always_is():
    available = available_instruction_sets()
    assert available[0] is InstructionSet.PORTABLE
    assert InstructionSet.AUTO not in available


def test_segments_keep_their_own_hyper_parameters_and_the_rest_is_untouched(pool):
    start = States(10_000, seed=1)
    segments = [
        segment(6_000, 1_234, step=7, learning_rate=0.5, weight_decay=0.0),
        segment(3, 4_000, step=1),
        segment(4_003, 1, step=100, beta1=0.0, beta2=0.5, epsilon=1e-3),
        segment(9_999, 1, step=2),
    ]
    together = start.clone()
    result = together.update(segments, pool)
    expected = start.clone()
    covered = torch.zeros(10_000, dtype=torch.bool)
    for part in segments:
        covered[part.offset : part.offset + part.length] = True
        expected.update([part], pool)
    assert together.bits() == expected.bits()
    for name in ("master", "first", "second", "weights"):
        assert torch.equal(getattr(together, name)[~covered], getattr(start, name)[~covered])
        assert not torch.equal(getattr(together, name)[covered], getattr(start, name)[covered])
    assert result.squared_norm == pytest.approx(start.gradients[covered].double().square().sum().item(), rel=NORM_TOLERANCE)


def test_the_norm_is_that_of_the_scaled_gradients(pool):
    gradients = States(100_003).gradients
    result = gradient_norm(gradients, gradient_scale=0.125, pool=pool)
    assert result.squared_norm == pytest.approx(math.fsum((gradients.double() * 0.125).square().tolist()), rel=NORM_TOLERANCE)
    assert result.non_finite == 0


def test_non_finite_gradients_are_counted_after_scaling(pool):
    gradients = torch.ones(5_000)
    gradients[[0, 17, 2048, 4999]] = torch.tensor([math.inf, -math.inf, math.nan, 3e38])
    states = States(5_000)
    states.gradients = gradients
    assert states.clone().update([segment(0, 5_000)], pool).non_finite == 3
    result = states.update([segment(0, 5_000)], pool, gradient_scale=2.0)
    assert result.non_finite == 4
    assert math.isnan(result.squared_norm)
    assert gradient_norm(gradients[:2048], pool=pool).squared_norm == math.inf
    # Elements outside the segments are not looked at.
    assert states.update([segment(1, 16)], pool).non_finite == 0


def bfloat16_bits(value: float) -> int:
    """Round to nearest, ties to even, by the definition; NaN is 0x7FC0."""
    if math.isnan(value):
        return 0x7FC0
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    low, high = bits & 0xFFFF, bits >> 16
    return high + (low > 0x8000 or (low == 0x8000 and high % 2 == 1))


SPECIAL_BITS = [0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0x7F800001, 0x7F7FFFFF, 0x7F7F8000, 0x7F7F7FFF, 0x80000000, 0x00000001]
TIE_BITS = [high << 16 | low for high in (0x3F80, 0x3F81, 0xBF80, 0xBF81, 0x0080, 0x0000) for low in (0, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]


@pytest.mark.parametrize("instruction_set", available_instruction_sets())
def test_the_bfloat16_copy_rounds_to_nearest_even(pool, instruction_set):
    values = torch.tensor([bits - (1 << 32) if bits >> 31 else bits for bits in SPECIAL_BITS + TIE_BITS], dtype=torch.int32)
    length = values.numel() * 5  # the same values at several places of the vectors
    states = States(length)
    states.master = values.repeat(5).view(torch.float32).clone()
    for zeros in (states.gradients, states.first, states.second):
        zeros.zero_()
    # Without gradient, moments and learning rate the master stays as it is, so only the rounding is seen.
    states.update([segment(0, length, learning_rate=0.0)], pool, instruction_set=instruction_set)
    expected = [bfloat16_bits(value) for value in states.master.tolist()]
    assert [bits & 0xFFFF for bits in states.weights.view(torch.int16).tolist()] == expected


def test_bfloat16_gradients_equal_the_same_values_in_fp32(pool):
    narrow = States(5_001, seed=3)
    narrow.gradients = narrow.gradients.bfloat16()
    narrow.gradients[:4] = torch.tensor([math.inf, -math.inf, math.nan, -0.0]).bfloat16()
    wide = narrow.clone()
    wide.gradients = narrow.gradients.float()
    first, second = narrow.update([segment(0, 5_001)], pool), wide.update([segment(0, 5_001)], pool)
    assert narrow.bits() == wide.bits()
    assert first.non_finite == second.non_finite == 3


def test_without_a_copy_out_the_states_are_the_same(pool):
    with_copy, without = States(3_000), States(3_000)
    with_copy.update([segment(0, 3_000)], pool)
    adamw_update([segment(0, 3_000)], without.gradients, without.state(copy_out=False), pool=pool)
    assert torch.equal(with_copy.master, without.master)


def test_the_interpreter_runs_while_an_update_does(pool):
    """With a switch interval far above the test's duration, another thread runs only if the call itself lets go of the GIL."""
    calls = 2_000
    made = 0
    states = States(65_536)

    def work() -> None:
        nonlocal made
        for _ in range(calls):
            states.update([segment(0, 65_536)], pool)
            made += 1

    interval = sys.getswitchinterval()
    worker = threading.Thread(target=work)
    sys.setswitchinterval(1_000)
    try:
        worker.start()
        seen = made
        worker.join()
    finally:
        sys.setswitchinterval(interval)
    assert seen < calls
    assert made == calls
