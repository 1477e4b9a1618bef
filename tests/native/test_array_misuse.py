"""Arrays that cannot be used, and objects that only claim to be arrays: exceptions, never a crash and never a wrong number."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lohan._native import AlignedBuffer, ThreadPool, checksum, copy_with_checksum
from tests.native.children import run_child


@pytest.fixture(scope="module")
def pool() -> ThreadPool:
    return ThreadPool(1)


@pytest.mark.parametrize(
    ("array", "kind", "message"),
    [
        ([1, 2], TypeError, "array: expected a 1-D host array"),
        (np.ones((2, 3)), ValueError, "array: expected 1 dimension, got 2"),
        (np.ones(20)[::2], ValueError, "array: the array is not contiguous"),
        (torch.ones(3, device="meta"), ValueError, "array: "),
        (torch.ones(3, requires_grad=True), ValueError, "array: the tensor requires grad"),
    ],
)
def test_a_checksum_of_what_cannot_be_summed(pool, array, kind, message):
    with pytest.raises(kind, match=message):
        checksum(array, pool=pool)


@pytest.mark.parametrize(
    ("target", "source", "kind", "message"),
    [
        (bytearray(3), b"four", ValueError, "target has 3 bytes, source has 4"),
        (torch.ones(4), torch.ones(4, dtype=torch.bfloat16), ValueError, "target has 16 bytes, source has 8"),
        (b"read-only", bytearray(9), ValueError, "target: .* read-only"),
        (None, bytearray(9), TypeError, "incompatible function arguments"),
        (bytearray(9), "text", TypeError, "source: expected a 1-D host array"),
        (torch.ones(20)[::2], torch.ones(10), ValueError, "target: the array is not contiguous"),
    ],
)
def test_a_copy_that_cannot_be(pool, target, source, kind, message):
    with pytest.raises(kind, match=message):
        copy_with_checksum(target, source, pool=pool)


def test_a_copy_onto_itself_is_refused(pool):
    base = torch.arange(200, dtype=torch.uint8)
    for target, source in (((0, 100), (0, 100)), ((1, 101), (0, 100)), ((0, 100), (99, 199))):
        with pytest.raises(ValueError, match="target and source overlap in memory"):
            copy_with_checksum(base[slice(*target)], base[slice(*source)], pool=pool)
    assert torch.equal(base, torch.arange(200, dtype=torch.uint8))
    copy_with_checksum(base[100:], base[:100], pool=pool)
    assert torch.equal(base[100:], base[:100])


# ---------------------------------------------------------------- objects that lie about themselves
# One child process per function, so that a crash is a failed test and not the end of the test run. Each object must be refused with a
# TypeError or ValueError that says something, or be used as the array it is.
_NASTY = """
import array, ctypes, mmap, sys, warnings
import numpy as np, torch
from lohan._native import (
    AdamState, AlignedBuffer, IoPool, ThreadPool, checksum, copy_with_checksum, gradient_norm, read_modify_write, split_master
)

pool, io = ThreadPool(2), IoPool(1)
file = io.open(sys.argv[2], size_bytes=4096)

class Raises:
    def __dlpack__(self, **_): raise RuntimeError("boom")
    def __dlpack_device__(self): return (1, 0)

class GivesANumber(Raises):
    def __dlpack__(self, **_): return 3

class GivesOneCapsuleTwice(Raises):
    def __init__(self): self.capsule = torch.ones(5).__dlpack__()
    def __dlpack__(self, **_): return self.capsule

class HasABrokenProperty:
    @property
    def requires_grad(self): raise ValueError("broken")

def used(capsule):
    torch.from_dlpack(capsule)
    return capsule

def shrunk(bytes_left):
    tensor = torch.ones(300)
    tensor.untyped_storage().resize_(bytes_left)
    return tensor

def closed_map():
    memory = mmap.mmap(-1, 4096)
    memory.close()
    return memory

def released_view():
    view = memoryview(bytearray(10))
    view.release()
    return view

twice = GivesOneCapsuleTwice()
objects = {
    "None": lambda: None, "a number": lambda: 3, "text": lambda: "text", "a list": lambda: [1.0, 2.0], "a class": lambda: np.ndarray,
    "__dlpack__ raises": Raises, "__dlpack__ gives a number": GivesANumber,
    "a capsule": lambda: torch.ones(5).__dlpack__(), "a used capsule": lambda: used(torch.ones(5).__dlpack__()),
    "a capsule given once": lambda: twice, "a capsule given twice": lambda: twice, "a broken property": HasABrokenProperty,
    "no dimension": lambda: torch.tensor(1.0), "two dimensions": lambda: memoryview(bytearray(12)).cast("B", (3, 4)),
    "negative stride": lambda: np.ones(5)[::-1], "zero stride": lambda: torch.ones(1).expand(5), "stride two": lambda: torch.ones(9)[::2],
    "objects": lambda: np.array([object()] * 3), "strings": lambda: np.array(["a", "b"]), "empty strings": lambda: np.zeros(3, "S0"),
    "no bytes": lambda: np.zeros(3, "V0"), "dates": lambda: np.array([1, 2], "M8[s]"), "records": lambda: np.zeros(3, "i4,f4"),
    "foreign byte order": lambda: np.zeros(3, ">f4"), "bool": lambda: torch.ones(3, dtype=torch.bool),
    "complex": lambda: torch.ones(3, dtype=torch.complex64), "conjugated": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "negated": lambda: torch.ones(3, dtype=torch.complex64).conj().imag, "sparse": lambda: torch.ones(3).to_sparse(),
    "meta": lambda: torch.ones(3, device="meta"), "freed": lambda: shrunk(0), "shrunk": lambda: shrunk(1196),
    "requires grad": lambda: torch.ones(3, requires_grad=True),
    "an odd address": lambda: np.frombuffer(bytearray(41), np.uint8)[1:].view(np.float32),
    "array.array": lambda: array.array("d", [1.0, 2.0]), "ctypes": lambda: (ctypes.c_int * 4)(), "bytes": lambda: b"bytes",
    "mmap": lambda: mmap.mmap(-1, 4096), "closed mmap": closed_map, "released view": released_view, "empty": bytearray,
    "a buffer never made": lambda: AlignedBuffer.__new__(AlignedBuffer), "a buffer, not its array": lambda: AlignedBuffer(8),
    "a buffer's array": lambda: AlignedBuffer(8).array(),
}
functions = {
    "checksum": lambda nasty: checksum(nasty, pool=pool),
    "copy target": lambda nasty: copy_with_checksum(nasty, b"1234567890" * 2, pool=pool),
    "copy source": lambda nasty: copy_with_checksum(bytearray(20), nasty, pool=pool),
    "gradient norm": lambda nasty: gradient_norm(nasty, pool=pool),
    "state": lambda nasty: AdamState(master=nasty, first_moment=torch.zeros(3), second_moment=torch.zeros(3)),
    "split": lambda nasty: split_master(nasty, torch.zeros(3, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.int16), pool=pool),
    "stream": lambda nasty: read_modify_write(torch.zeros(3), torch.zeros(3), torch.zeros(3), nasty, pool=pool),
    "file read": lambda nasty: file.read(0, nasty).wait(),
    "file write": lambda nasty: file.write(0, nasty).wait(),
}
warnings.simplefilter("ignore")
for name, make in objects.items():
    print("made", name, flush=True)
    nasty = make()
    try:
        functions[sys.argv[1]](nasty)
        print(name, "used", sep=": ", flush=True)
    except (TypeError, ValueError) as error:
        assert len(str(error)) > 10, error
        print(name, type(error).__name__, sep=": ", flush=True)
"""

_NASTY_REFUSED = {
    *("None", "a number", "text", "a list", "a class", "__dlpack__ raises", "__dlpack__ gives a number", "a used capsule"),
    *("a capsule given twice", "a broken property", "no dimension", "two dimensions", "negative stride", "zero stride", "stride two"),
    *("objects", "strings", "empty strings", "no bytes", "dates", "records", "foreign byte order", "conjugated", "negated", "sparse"),
    *("meta", "freed", "shrunk", "requires grad", "closed mmap", "released view", "a buffer never made", "a buffer, not its array"),
}


_FUNCTIONS = ["checksum", "copy target", "copy source", "gradient norm", "state", "split", "stream", "file read", "file write"]


@pytest.mark.parametrize("function", _FUNCTIONS)
def test_no_object_crashes_the_core(tmp_path, function):
    lines = run_child(_NASTY, function, tmp_path / "file").splitlines()
    outcomes = dict(line.split(": ") for line in lines if not line.startswith("made "))
    assert len(outcomes) == 44
    assert {name for name in _NASTY_REFUSED if outcomes[name] == "used"} == set()
    if function in ("checksum", "file write"):  # these take any array
        assert {name for name, outcome in outcomes.items() if outcome != "used"} == _NASTY_REFUSED


def test_objects_made_without_their_constructor_are_refused():
    out = run_child(
        """
        from lohan import _native
        for name in ("AlignedBuffer", "ThreadPool", "AdamSegment", "UpdateResult", "IoPool", "IoFile", "IoTicket"):
            empty = getattr(_native, name).__new__(getattr(_native, name))
            members = [member for member in dir(empty) if not member.startswith("_")]
            assert members, name
            for member in members:
                try:
                    getattr(empty, member)()
                except TypeError:
                    print(name, member)
        try:
            _native.checksum(b"1", pool=_native.ThreadPool.__new__(_native.ThreadPool))
        except TypeError:
            print("end")
        """
    )
    assert out.splitlines()[-1] == "end"
    assert "AlignedBuffer array" in out.splitlines()


def test_one_array_can_be_imported_again_and_again():
    buffer = AlignedBuffer(100)
    array = buffer.array()
    views = [torch.from_dlpack(array), np.from_dlpack(array), torch.from_dlpack(array), np.asarray(memoryview(array))]
    views[0].fill_(7)
    assert all(int(view.sum()) == 700 for view in views)
    capsule = array.__dlpack__()
    assert torch.equal(torch.from_dlpack(capsule), views[0])
    with pytest.raises(RuntimeError, match="consumed only once"):
        torch.from_dlpack(capsule)


def test_copies_of_random_slices_are_exact_or_refused(pool):
    """2,000 pairs of slices of one array: refused exactly when sizes differ, a slice is not contiguous, or the two overlap."""
    generator = np.random.default_rng(3)
    copied = 0
    for _ in range(2_000):
        base = generator.integers(0, 256, 64, np.uint8)
        begins, lengths = generator.integers(0, 64, 2), generator.integers(0, 20, 2)
        lengths[1] = lengths[0] if generator.random() < 0.8 else lengths[1]
        steps = generator.choice([1, 1, 1, 1, 1, 2], 2)
        target, source = (base[begin : begin + length * step : step] for begin, length, step in zip(begins, lengths, steps, strict=True))
        expected = base.copy()
        allowed = target.size == source.size and not np.shares_memory(target, source)
        allowed = allowed and all(part.flags.c_contiguous for part in (target, source))
        wanted = source.copy()
        if allowed:
            assert copy_with_checksum(target, source, pool=pool) == checksum(wanted, pool=pool)
            assert np.array_equal(target, wanted)
            copied += 1
        else:
            with pytest.raises(ValueError, match=r"bytes, source has|not contiguous|overlap"):
                copy_with_checksum(target, source, pool=pool)
            assert np.array_equal(base, expected)
    assert 300 < copied < 1_700
