"""AlignedBuffer, and the store of lohan.memory on top of the native core."""

from __future__ import annotations

import errno
import gc
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from lohan._native import AlignedBuffer
from lohan.errors import LohanError, StorageError
from lohan.memory.store import Store
from tests.native.children import run_child

MIB = 1 << 20


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 2 * MIB - 1, 2 * MIB, 3 * MIB + 1])
def test_a_buffer_has_exactly_its_size_aligned_and_zero(size):
    buffer = AlignedBuffer(size)
    view = torch.from_dlpack(buffer.array())
    assert (buffer.size_bytes, view.shape, view.dtype) == (size, (size,), torch.uint8)
    assert view.data_ptr() == buffer.address
    assert buffer.address % (2 * MIB if size >= 2 * MIB else 4096) == 0
    assert not view.any()
    view.fill_(255)
    assert int(np.from_dlpack(buffer.array()).sum()) == 255 * size


def is_mapped(address: int) -> bool:
    """Whether this process has memory at `address`."""
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in ranges)


def test_the_memory_lives_as_long_as_its_last_view():
    buffer = AlignedBuffer(64 * MIB)
    inside = buffer.address + 32 * MIB
    view = torch.from_dlpack(buffer.array())[100:200]
    del buffer
    gc.collect()
    view.fill_(3)
    assert view.tolist() == [3] * 100
    assert is_mapped(inside)
    del view
    gc.collect()
    assert not is_mapped(inside)


def test_sizes_that_cannot_be():
    for size in (0, -1):
        with pytest.raises(ValueError, match=f"size_bytes is {size}"):
            AlignedBuffer(size)
    with pytest.raises(MemoryError, match="cannot map"):
        AlignedBuffer(1 << 60)
    with pytest.raises(TypeError):
        AlignedBuffer(1.5)  # type: ignore[arg-type]


# ---------------------------------------------------------------- store


def test_the_store_moves_tensors(tmp_path):
    values = torch.randn(10_001)
    with Store(threads=2) as store, store.open(tmp_path / "file", size_bytes=values.nbytes) as file:
        assert (file.path, file.size_bytes) == (tmp_path / "file", values.nbytes)
        file.write(0, values, urgent=True).wait()
        file.sync()
        part = torch.empty(501)
        transfer = file.read(4 * 500, part)
        transfer.wait()
        assert transfer.done()
    assert torch.equal(part, values[500:1_001])


def test_importing_the_store_and_the_arena_loads_no_torch():
    assert run_child("import sys, lohan.memory.arena, lohan.memory.store; print('torch' in sys.modules)").strip() == "False"


@pytest.mark.parametrize(
    ("name", "options", "number", "remedy"),
    [
        ("missing", {}, errno.ENOENT, "Name an existing file"),
        (".", {}, errno.EISDIR, "name a file"),
        ("x" * 300, {}, errno.ENAMETOOLONG, "Check the drive"),
    ],
)
def test_what_the_system_refuses_comes_with_place_and_remedy(tmp_path, name, options, number, remedy):
    with Store() as store, pytest.raises(StorageError) as caught:
        store.open(tmp_path / name, **options)
    error = caught.value
    assert isinstance(error, LohanError)
    assert isinstance(error, OSError)
    assert (error.errno, error.offset, error.place) == (number, None, str(tmp_path / name))
    assert error.message == f"open failed: {os.strerror(number)}"
    assert error.remedy is not None
    assert remedy in error.remedy


def test_a_failed_transfer_names_its_offset(tmp_path):
    with Store() as store, store.open(tmp_path / "file", size_bytes=2 * MIB) as file:
        os.truncate(tmp_path / "file", MIB)
        with pytest.raises(StorageError, match=f"read at byte {MIB} failed") as caught:
            file.read(0, torch.empty(2 * MIB, dtype=torch.uint8)).wait()
    assert (caught.value.errno, caught.value.offset) == (errno.ENODATA, MIB)
    assert "leave a run's files alone" in str(caught.value)


def test_no_room_says_how_much_there_is(tmp_path):
    free = os.statvfs(tmp_path)
    with Store() as store, pytest.raises(StorageError) as caught:
        store.open(tmp_path / "file", size_bytes=free.f_bavail * free.f_frsize + 512 * MIB)
    if caught.value.errno == errno.EFBIG:
        pytest.skip("this file system allows no file as large as its free space")
    assert caught.value.errno == errno.ENOSPC
    assert "are free" in caught.value.message
    assert "another" in (caught.value.remedy or "")
    assert not (tmp_path / "file").exists()
