"""The forms of an AdamW state: split master weights, 8-bit moments, old and new state apart; and what makes no state."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from lohan._native import (
    AdamSegment,
    AdamState,
    MomentCode,
    ThreadPool,
    adamw_update,
    available_instruction_sets,
    decode_moment,
    join_master,
    read_modify_write,
    split_master,
)

HYPER = {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "weight_decay": 0.01}
LENGTH = 10_000


@pytest.fixture(scope="module")
def pool() -> ThreadPool:
    return ThreadPool(2)


def zeros(dtype: torch.dtype, length: int = LENGTH) -> torch.Tensor:
    return torch.zeros(length, dtype=dtype)


def blocks(length: int = LENGTH) -> int:
    return -(-length // 256)


def moments(form: str, length: int = LENGTH) -> dict[str, torch.Tensor]:
    if form == "fp32":
        return {"first_moment": zeros(torch.float32, length), "second_moment": zeros(torch.float32, length)}
    scales = {f"{name}_scales": zeros(torch.float32, blocks(length)) for name in ("first", "second")}
    return {"first_moment": zeros(torch.uint8, length), "second_moment": zeros(torch.uint8, length), **scales}


def split(master: torch.Tensor, pool: ThreadPool) -> dict[str, torch.Tensor]:
    parts = {"weights": zeros(torch.bfloat16, master.numel()), "remainder": zeros(torch.int16, master.numel())}
    split_master(master, **parts, pool=pool)
    return parts


def joined(parts: dict[str, torch.Tensor], pool: ThreadPool) -> torch.Tensor:
    master = torch.empty(parts["weights"].numel())
    join_master(parts["weights"], parts["remainder"], master, pool=pool)
    return master


def segment(step: int, length: int = LENGTH) -> AdamSegment:
    return AdamSegment(offset=0, length=length, step=step, **HYPER)


def gradients_of(step: int, length: int = LENGTH) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(length, generator=generator).bfloat16()


@pytest.mark.parametrize("form", ["fp32", "8bit"])
def test_a_split_master_goes_the_way_of_an_fp32_one_bit_by_bit(pool, form):
    start = torch.randn(LENGTH, generator=torch.Generator().manual_seed(1)) * 0.02
    whole, parts = {"master": start.clone(), **moments(form)}, {**split(start, pool), **moments(form)}
    for step in range(1, 21):
        gradients = gradients_of(step)
        adamw_update([segment(step)], gradients, AdamState(**whole), pool=pool)
        adamw_update([segment(step)], gradients, AdamState(**parts), pool=pool)
    assert torch.equal(joined(parts, pool), whole["master"])
    for name in moments(form):
        assert torch.equal(parts[name], whole[name])


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("form", ["fp32", "8bit"])
@pytest.mark.parametrize("instruction_set", available_instruction_sets())
def test_a_new_state_apart_leaves_the_old_one_as_it_was(pool, form, instruction_set, offset):
    """Stored past the caches where the new arrays begin at cache lines, as torch's do, and not where they begin `offset` elements later."""
    old = {**split(torch.randn(LENGTH) * 0.02, pool), **moments(form)}
    adamw_update([segment(1)], gradients_of(1), AdamState(**old), pool=pool)
    before = {name: array.clone() for name, array in old.items()}
    new = {name: torch.cat([array[:offset], array])[offset:] for name, array in old.items()}
    assert all(array.data_ptr() % 64 == offset * array.itemsize for array in new.values())
    state, out = AdamState(**old), AdamState(**new)
    apart = adamw_update([segment(2)], gradients_of(2), state, out=out, pool=pool, instruction_set=instruction_set)
    assert all(torch.equal(old[name].view(torch.uint8), before[name].view(torch.uint8)) for name in old)
    in_place = adamw_update([segment(2)], gradients_of(2), state, pool=pool)
    assert all(torch.equal(old[name].view(torch.uint8), new[name].view(torch.uint8)) for name in old)
    assert (apart.squared_norm, apart.non_finite) == (in_place.squared_norm, in_place.non_finite)


def test_weights_are_the_nearest_bfloat16_with_ties_away_from_zero(pool):
    bits = torch.tensor([0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0x7F7FFFFF], dtype=torch.int32)
    values = torch.cat([bits, bits | torch.iinfo(torch.int32).min]).view(torch.float32)
    parts = split(values, pool)
    assert [value & 0xFFFF for value in parts["weights"].view(torch.int16).tolist()] == [
        0x3F81, 0x3F82, 0x3F80, 0x3F81, 0x7F80, 0xBF81, 0xBF82, 0xBF80, 0xBF81, 0xFF80,
    ]  # fmt: skip
    assert torch.equal(joined(parts, pool).view(torch.int32), values.view(torch.int32))


# ---------------------------------------------------------------- 8-bit moments against the literature's


def dynamic_map(*, signed: bool) -> np.ndarray:
    """The 256 values of dynamic quantization in bitsandbytes (arXiv:2110.02861): decades from 1e-7 to 1, twice the cells in each."""
    values = [0.0, 1.0]
    for decade in range(7):
        edges = np.linspace(0.1, 1.0, 2 ** (decade + (not signed)) + 1)
        centres = 10.0 ** (decade - 6) * (edges[:-1] + edges[1:]) / 2
        values += [*centres, *(-centres if signed else ())]
    assert len(values) == 256
    return np.sort(np.array(values, np.float32))


class LiteratureMoment:
    """One moment, in blocks of 256 with the largest magnitude as scale, rounded to the nearest value of the map."""

    def __init__(self, length: int, *, signed: bool) -> None:
        self._values = dynamic_map(signed=signed)
        self._borders = (self._values[:-1] + self._values[1:]) / 2
        self._normed, self._scales = np.zeros((blocks(length), 256), np.float32), np.zeros((blocks(length), 1), np.float32)

    def read(self) -> np.ndarray:
        return (self._normed * self._scales).reshape(-1)

    def write(self, moment: np.ndarray) -> None:
        rows = moment.reshape(-1, 256)
        self._scales = np.abs(rows).max(axis=1, keepdims=True)
        scaled = np.divide(rows, self._scales, out=np.zeros_like(rows), where=self._scales > 0)
        self._normed = self._values[np.searchsorted(self._borders, scaled)]


def adamw(master: np.ndarray, gradient: np.ndarray, first: np.ndarray, second: np.ndarray, step: int) -> tuple[np.ndarray, ...]:
    """One step in the arrays' own precision."""
    b1, b2 = HYPER["beta1"], HYPER["beta2"]
    first = b1 * first + (1 - b1) * gradient
    second = b2 * second + (1 - b2) * gradient**2
    denominator = np.sqrt(second) / math.sqrt(1 - b2**step) + HYPER["epsilon"]
    decayed = master * (1 - HYPER["learning_rate"] * HYPER["weight_decay"])
    return decayed - HYPER["learning_rate"] / (1 - b1**step) * first / denominator, first, second


def noise(generator: np.random.Generator, step: int, signal: np.ndarray) -> np.ndarray:
    return generator.standard_normal(signal.size)


def noise_over_a_direction(generator: np.random.Generator, step: int, signal: np.ndarray) -> np.ndarray:
    return signal + generator.standard_normal(signal.size)


def magnitudes_far_apart(generator: np.random.Generator, step: int, signal: np.ndarray) -> np.ndarray:
    """Neighbours whose gradients differ by up to 10^4, as embeddings and norms show beside each other."""
    return 10.0 ** (-4 * np.abs(np.sin(np.arange(signal.size)))) * (0.3 * signal + generator.standard_normal(signal.size))


def rare(generator: np.random.Generator, step: int, signal: np.ndarray) -> np.ndarray:
    """Nine gradients of ten are zero, as in an embedding's rows."""
    return generator.standard_normal(signal.size) * (generator.random(signal.size) < 0.1)


@pytest.mark.parametrize("make", [noise, noise_over_a_direction, magnitudes_far_apart, rare])
def test_8_bit_moments_err_no_more_than_the_literatures_on_the_same_trajectory(pool, make: Callable[..., np.ndarray]):
    """100 steps of the same gradients: how far from exact moments' weights, in units of the way those went."""
    length, steps = 64 * 256, 100
    generator = np.random.default_rng(5)
    signal = generator.standard_normal(length)
    start = (0.02 * generator.standard_normal(length)).astype(np.float32)
    ours = torch.from_numpy(start.copy())
    state = AdamState(master=ours, **moments("8bit", length))
    exact = (start.astype(np.float64), np.zeros(length), np.zeros(length))
    theirs, first, second = start.astype(np.float64), LiteratureMoment(length, signed=True), LiteratureMoment(length, signed=False)
    for step in range(1, steps + 1):
        gradient = make(generator, step, signal).astype(np.float32)
        adamw_update([segment(step, length)], gradient, state, pool=pool)
        exact = adamw(exact[0], gradient.astype(np.float64), exact[1], exact[2], step)
        theirs, new_first, new_second = adamw(theirs, gradient, first.read(), second.read(), step)
        first.write(new_first.astype(np.float32))
        second.write(new_second.astype(np.float32))
    way = np.linalg.norm(exact[0] - start)
    our_error = np.linalg.norm(ours.numpy() - exact[0]) / way
    their_error = np.linalg.norm(theirs - exact[0]) / way
    print(f"{make.__name__}: ours {our_error:.4f}, the literature's {their_error:.4f} of the way")
    assert our_error <= their_error


def test_decoded_moments_are_the_fp32_ones_to_half_a_cell(pool):
    """After one step from zero the first moment is (1 - beta1) g and the second (1 - beta2) g^2; the widest cells, 7/512 and
    7/1024 of 1, are scaled so that the block's largest value (of its root for the second moment) lies half a cell below 1. Half a cell, and
    2^-22 for the roundings of scale and product."""
    gradients = torch.randn(LENGTH, generator=torch.Generator().manual_seed(3))
    arrays = moments("8bit")
    adamw_update([segment(1)], gradients, AdamState(master=zeros(torch.float32), **arrays), pool=pool)
    decoded = {}
    for code, name in ((MomentCode.FIRST, "first"), (MomentCode.SECOND, "second")):
        decoded[name] = torch.empty(LENGTH)
        decode_moment(code, arrays[f"{name}_moment"], arrays[f"{name}_scales"], decoded[name], pool=pool)
    for values, exact, cell in (
        (decoded["first"], 0.1 * gradients.double(), 7 / 512),
        (decoded["second"].sqrt(), math.sqrt(1 - 0.999) * gradients.double().abs(), 7 / 1024),
    ):
        padded = torch.nn.functional.pad(exact.abs(), (0, -LENGTH % 256)).view(-1, 256)
        bound = (padded.max(dim=1).values * (cell / 2 / (1 - cell / 2) + 2.0**-22)).repeat_interleave(256)[:LENGTH]
        assert bool(((values.double() - exact).abs() <= bound).all())


# ---------------------------------------------------------------- misuse


def states(**changes: object) -> dict[str, object]:
    arrays = {"master": torch.ones(300), "first_moment": torch.ones(300), "second_moment": torch.ones(300)}
    return {name: array for name, array in {**arrays, **changes}.items() if array is not None}


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        (states(master=None), ValueError, "either master .* or remainder"),
        (states(remainder=torch.ones(300, dtype=torch.int16)), ValueError, "not both"),
        (states(master=None, remainder=torch.ones(300, dtype=torch.int16)), ValueError, "needs weights"),
        (states(first_scales=torch.ones(2)), ValueError, "scales of both moments"),
        (states(first_scales=torch.ones(2), second_scales=torch.ones(2)), TypeError, "first_moment: expected uint8 elements, got float32"),
        (states(first_moment=torch.ones(300, dtype=torch.uint8)), TypeError, "first_moment: expected float32 elements, got uint8"),
        (states(second_moment=torch.ones(299)), ValueError, "second_moment has 299 elements; master 300"),
        (
            states(**{**moments("8bit", 300), "second_scales": torch.ones(3)}),
            ValueError,
            "second_scales has 3 elements; one per 256 elements makes 2",
        ),
    ],
)
def test_arrays_that_make_no_state(given, kind, message):
    with pytest.raises(kind, match=message):
        AdamState(**given)


def test_a_new_state_of_another_form_or_place(pool):
    length = 300
    whole = AdamState(master=torch.ones(length), **moments("fp32", length))
    parts = AdamState(**split(torch.ones(length), pool), **moments("fp32", length))
    coded = AdamState(master=torch.ones(length), **moments("8bit", length))
    short = AdamState(master=torch.ones(10), **moments("fp32", 10))
    shared = torch.ones(length)
    overlapping = [AdamState(master=shared, **moments("fp32", length)) for _ in range(2)]
    gradients = torch.ones(length)
    for out, message in ((parts, "form of their master"), (coded, "form of their moments"), (short, "out has 10 elements")):
        with pytest.raises(ValueError, match=message):
            adamw_update([segment(1, 1)], gradients, whole, out=out, pool=pool)
    with pytest.raises(ValueError, match="master and master overlap"):
        adamw_update([segment(1, 1)], gradients, overlapping[0], out=overlapping[1], pool=pool)
    with pytest.raises(ValueError, match="gradients has 10 elements"):
        adamw_update([segment(1, 1)], torch.ones(10), whole, pool=pool)


def test_8_bit_segments_own_their_blocks(pool):
    state = AdamState(master=torch.ones(1024), **moments("8bit", 1024))
    for ranges in ([(1, 5)], [(0, 100), (100, 10)], [(256, 300), (700, 5)]):
        segments = [AdamSegment(offset, length, step=1, **HYPER) for offset, length in ranges]
        with pytest.raises(ValueError, match="begins at a multiple of 256, past the last block"):
            adamw_update(segments, torch.ones(1024), state, pool=pool)


def test_read_modify_write_adds_and_checks(pool):
    a, b, c, source = (torch.full((1000,), value) for value in (1.0, 2.0, 3.0, 0.5))
    read_modify_write(a, b, c, source, pool=pool)
    assert (a[999], b[0], c[500]) == (1.5, 2.5, 3.5)
    with pytest.raises(ValueError, match="a and b overlap"):
        read_modify_write(a, a, c, source, pool=pool)
    with pytest.raises(ValueError, match="source has 3 elements"):
        read_modify_write(a, b, c, torch.ones(3), pool=pool)
