"""The store: the system's errors as the user's, stripes, batches and callbacks, on every engine."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator

import pytest
import torch

from lohan._native import FaultPlan, IoEngine, io_uring_refusal
from lohan.errors import StorageError
from lohan.memory.store import Store

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture
def plan() -> FaultPlan:
    return FaultPlan()


@pytest.fixture(params=[IoEngine.THREADS, IoEngine.URING], ids=lambda engine: engine.name)
def store(request, plan) -> Iterator[Store]:
    if request.param is IoEngine.URING and io_uring_refusal():
        pytest.skip(f"no io_uring here: {io_uring_refusal()}")
    with Store(engine=request.param, faults=plan) as store:
        assert store.engine is request.param
        yield store


def test_the_engine_and_the_reason_for_it():
    with Store() as store:
        assert store.engine is (IoEngine.THREADS if io_uring_refusal() else IoEngine.URING)
        assert store.engine_refusal == io_uring_refusal()


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EIO, "smartctl"),
        (errno.ENOSPC, "Free space"),
        (errno.EDQUOT, "quota"),
        (errno.EFBIG, "ulimit -f"),
        (errno.EXDEV, "Check the drive"),
    ],
)
def test_a_failed_transfer_says_where_why_and_what_to_do(store, plan, tmp_path, number, remedy):
    with store.open(tmp_path / "file", size_bytes=MIB) as file:
        plan.fail(1, number)
        transfer = file.write(64 * KIB, torch.ones(4 * KIB, dtype=torch.uint8))
        with pytest.raises(StorageError, match="write at byte 65536 failed: ") as caught:
            transfer.wait()
    error = caught.value
    assert (error.errno, error.offset, error.place) == (number, 64 * KIB, str(tmp_path / "file"))
    assert remedy in str(error.remedy)
    assert ("are free" in error.message) is (number in (errno.ENOSPC, errno.EDQUOT))


def test_a_missing_file_has_its_remedy(store, tmp_path):
    with pytest.raises(StorageError, match="open failed") as caught:
        store.open(tmp_path / "missing")
    assert (caught.value.errno, caught.value.place) == (errno.ENOENT, str(tmp_path / "missing"))
    assert str(caught.value.remedy).startswith("Name an existing file")


def test_striped_batches_round_trip_and_name_the_member_that_fails(store, plan, tmp_path):
    paths = [tmp_path / name / "states" for name in ("a", "b")]
    for path in paths:
        path.parent.mkdir()
    source = torch.randint(0, 256, (64 * 4 * KIB,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    target = torch.zeros_like(source)
    with store.open(paths, size_bytes=source.nbytes, stripe_bytes=4 * KIB) as file:
        assert (file.paths, file.path, file.size_bytes) == (paths, paths[0], source.nbytes)
        for transfer in file.write_batch([(i * 16 * KIB, piece) for i, piece in enumerate(source.split(16 * KIB))]):
            transfer.wait()
        file.sync()
        for transfer in file.read_batch([(i * 16 * KIB, piece) for i, piece in enumerate(target.split(16 * KIB))], urgent=True):
            transfer.wait()
        assert torch.equal(source, target)
        plan.fail(1, errno.EIO, path_prefix=paths[1])
        with pytest.raises(StorageError) as caught:
            file.read(0, target).wait()
        assert caught.value.place == str(paths[1])
        assert caught.value.offset == plan.struck[-1][2]


def test_a_callback_gets_the_transfer(store, tmp_path):
    called: list[object] = []
    ended = threading.Event()
    with store.open(tmp_path / "file", size_bytes=MIB) as file:
        transfer = file.write(0, torch.ones(MIB, dtype=torch.uint8))
        transfer.on_done(lambda done: (called.append(done), ended.set()))
        assert ended.wait(60)
    assert called == [transfer]
