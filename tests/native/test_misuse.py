"""Every misuse is a Python exception that says what was wrong, and changes nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lohan._native import (
    AdamSegment,
    AdamState,
    InstructionSet,
    IoPool,
    ThreadPool,
    adamw_update,
    available_instruction_sets,
    gradient_norm,
)
from tests.native.children import run_child

GOOD = {"offset": 0, "length": 10, "learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "weight_decay": 0.0, "step": 1}


@pytest.fixture(scope="module")
def pool() -> ThreadPool:
    return ThreadPool(1)


def arrays() -> dict[str, object]:
    names = ("gradients", "master", "first_moment", "second_moment")
    return {**{name: torch.ones(10) for name in names}, "weights": torch.ones(10, dtype=torch.bfloat16)}


def update(segments: list[AdamSegment], given: dict[str, object], pool: ThreadPool, **options: object) -> None:
    states = {name: array for name, array in given.items() if name != "gradients"}
    adamw_update(segments, given["gradients"], AdamState(**states), pool=pool, **options)


def read_only() -> np.ndarray:
    array = np.ones(10, np.float32)
    array.flags.writeable = False
    return array


def odd_address() -> np.ndarray:
    return np.frombuffer(bytearray(41), np.uint8)[1:].view(np.float32)


@pytest.mark.parametrize(
    ("name", "value", "kind", "message"),
    [
        ("gradients", torch.ones(10, dtype=torch.float16), TypeError, "gradients: expected float32 or bfloat16 elements, got float16"),
        ("master", torch.ones(10, dtype=torch.float64), TypeError, "master: expected float32 elements, got float64"),
        ("first_moment", torch.ones(10, dtype=torch.bfloat16), TypeError, "first_moment: expected float32 elements, got bfloat16"),
        ("second_moment", np.ones(10, np.int32), TypeError, "second_moment: expected float32 elements, got int32"),
        ("weights", torch.ones(10), TypeError, "weights: expected bfloat16 elements, got float32"),
        ("gradients", [1.0] * 10, TypeError, "gradients: expected a 1-D host array"),
        ("gradients", None, TypeError, "incompatible function arguments(.|\n)*Invoked with types: list, NoneType"),
        ("master", "text", TypeError, "master: expected a 1-D host array"),
        ("gradients", torch.ones(20)[::2], ValueError, "gradients: the array is not contiguous"),
        ("master", torch.ones(2, 5), ValueError, "master: expected 1 dimension, got 2"),
        ("master", torch.ones(11), ValueError, "weights has 10 elements; master 11"),
        ("weights", torch.ones(9, dtype=torch.bfloat16), ValueError, "weights has 9 elements; master 10"),
        ("master", torch.ones(10, requires_grad=True), ValueError, "master: the tensor requires grad"),
        ("master", torch.ones(10, device="meta"), ValueError, "master: "),
        ("master", read_only(), ValueError, "master: .* read-only"),
        ("gradients", odd_address(), ValueError, "gradients: the memory is not aligned"),
    ],
)
def test_an_array_that_does_not_fit_is_named(pool, name, value, kind, message):
    given = {**arrays(), name: value}
    before = {key: item.clone() for key, item in given.items() if isinstance(item, torch.Tensor) and not item.is_meta}
    with pytest.raises(kind, match=message):
        update([AdamSegment(**GOOD)], given, pool)
    for key, item in before.items():
        assert torch.equal(given[key], item)


def test_arrays_that_share_memory_are_refused(pool):
    base = torch.ones(19)
    for names in (("gradients", "master"), ("first_moment", "second_moment"), ("master", "second_moment")):
        given = {**arrays(), names[0]: base[:10], names[1]: base[9:]}
        with pytest.raises(ValueError, match=f"{names[0]} and {names[1]} overlap|{names[1]} and {names[0]} overlap"):
            update([AdamSegment(**GOOD)], given, pool)
    # Neighbours that only touch do not overlap.
    base = torch.ones(20)
    update([AdamSegment(**GOOD)], {**arrays(), "gradients": base[:10], "master": base[10:]}, pool)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("offset", -1),
        ("length", -1),
        ("learning_rate", -1e-3),
        ("learning_rate", math.nan),
        ("learning_rate", math.inf),
        ("beta1", 1.0),
        ("beta1", -0.1),
        ("beta2", 1.0),
        ("beta2", math.nan),
        ("epsilon", -1e-8),
        ("weight_decay", -0.1),
        ("weight_decay", math.inf),
        ("step", 0),
        ("step", -3),
    ],
)
def test_a_segment_with_a_bad_value_cannot_be_made(name, value):
    with pytest.raises(ValueError, match=f"{name} is "):
        AdamSegment(**{**GOOD, name: value})


def test_segment_values_are_read_only():
    segment = AdamSegment(**GOOD)
    assert {name: getattr(segment, name) for name in GOOD} == GOOD
    with pytest.raises(AttributeError):
        segment.step = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ([(0, 11)], "ends beyond the arrays' 10 elements"),
        ([(11, 0)], "ends beyond"),
        ([(2**62, 2**62)], "ends beyond"),
        ([(0, 5), (4, 2)], "overlaps"),
    ],
)
def test_segments_that_do_not_fit_the_arrays(pool, ranges, message):
    segments = [AdamSegment(**{**GOOD, "offset": offset, "length": length}) for offset, length in ranges]
    with pytest.raises(ValueError, match=message):
        update(segments, arrays(), pool)


@pytest.mark.parametrize("scale", [math.nan, math.inf, 1e300])
def test_a_scale_that_is_not_finite(pool, scale):
    with pytest.raises(ValueError, match="gradient_scale"):
        update([AdamSegment(**GOOD)], arrays(), pool, gradient_scale=scale)
    with pytest.raises(ValueError, match="gradient_scale"):
        gradient_norm(torch.ones(3), gradient_scale=scale, pool=pool)


def test_an_instruction_set_the_processor_lacks(pool):
    lacking = set(InstructionSet) - {InstructionSet.AUTO, *available_instruction_sets()}
    if not lacking:
        pytest.skip("this processor has every instruction set there is a build for")
    for instruction_set in lacking:
        with pytest.raises(ValueError, match=f"does not have the instruction set {instruction_set.name}"):
            gradient_norm(torch.ones(3), pool=pool, instruction_set=instruction_set)


def test_pool_sizes():
    for threads in (-1, 1025):
        with pytest.raises(ValueError, match=f"threads is {threads}"):
            ThreadPool(threads)
    for threads in (0, -1, 257):
        with pytest.raises(ValueError, match=f"threads is {threads}"):
            IoPool(threads)
    assert ThreadPool(3).threads == 3


def test_zero_threads_takes_the_affinity_mask():
    out = run_child(
        """
        import os
        from lohan._native import ThreadPool
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        print(ThreadPool().threads)
        """
    )
    assert out.strip() == "1"


def test_a_thread_pool_in_a_forked_child_says_so():
    out = run_child(
        """
        import os, sys
        import numpy as np
        from lohan._native import ThreadPool, gradient_norm
        pool = ThreadPool(2)
        child = os.fork()
        if child == 0:
            try:
                gradient_norm(np.ones(5, np.float32), pool=pool)
            except RuntimeError as error:
                assert "fork" in str(error)
                del pool
                assert gradient_norm(np.ones(5, np.float32), pool=ThreadPool(2)).squared_norm == 5
                sys.exit(0)
            os._exit(3)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), gradient_norm(np.ones(7, np.float32), pool=pool).squared_norm)
        """
    )
    assert out.split() == ["0", "7.0"]


@pytest.mark.parametrize(
    ("offset", "array", "kind", "message"),
    [
        (-1, bytearray(1), ValueError, "not within the 100 bytes"),
        (100, bytearray(1), ValueError, "not within the 100 bytes"),
        (1, bytearray(100), ValueError, "not within the 100 bytes"),
        (2**63 - 1, bytearray(1), ValueError, "not within the 100 bytes"),
        (0, np.ones((2, 3)), ValueError, "target: expected 1 dimension"),
        (0, np.ones(20)[::2], ValueError, "target: the array is not contiguous"),
        (0, b"read-only", ValueError, "target: .* read-only"),
        (0, torch.ones(3, requires_grad=True), ValueError, "target: the tensor requires grad"),
        (0, object(), TypeError, "target: expected a 1-D host array"),
        (0.5, bytearray(1), TypeError, "incompatible function arguments"),
        (2**63, bytearray(1), TypeError, "incompatible function arguments"),
    ],
)
def test_reads_that_cannot_be(tmp_path, offset, array, kind, message):
    pool = IoPool(1)
    file = pool.open(tmp_path / "file", size_bytes=100)
    with pytest.raises(kind, match=message):
        file.read(offset, array)
    pool.close()
