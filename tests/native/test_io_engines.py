"""Engines: the fallback from io_uring, the errors of transfers, and faults that strike all engines alike."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest

from lohan._native import IoEngine, IoError, IoErrorKind, IoPool, io_uring_refusal
from tests.native.children import run_child
from tests.native.transfers import MIB, PAGE, random_bytes, wait_until_held

# ---------------------------------------------------------------- choosing an engine


def test_auto_takes_io_uring_or_says_why_not():
    pool = IoPool()
    refusal = io_uring_refusal()
    assert pool.engine is (IoEngine.THREADS if refusal else IoEngine.URING)
    assert pool.engine_refusal == refusal
    pool.close()
    threads = IoPool(engine=IoEngine.THREADS)
    assert (threads.engine, threads.engine_refusal) == (IoEngine.THREADS, "")
    threads.close()


@pytest.mark.parametrize(("error", "cause"), [(errno.EPERM, "seccomp"), (errno.ENOSYS, "no io_uring")])
def test_where_io_uring_is_refused_threads_do_the_work(tmp_path, error, cause):
    out = run_child(
        """
        import sys
        from tests.native.children import forbid_io_uring
        from lohan._native import AlignedBuffer, IoEngine, IoPool, io_uring_refusal
        forbid_io_uring(int(sys.argv[2]))
        pool = IoPool()
        assert pool.engine is IoEngine.THREADS
        assert pool.engine_refusal == io_uring_refusal()
        print(pool.engine_refusal)
        file = pool.open(sys.argv[1] + "/file", size_bytes=9 << 20)
        file.write(0, bytes(range(256)) * (9 << 12)).wait()
        target = bytearray(9 << 20)
        file.read(0, target).wait()
        assert target == bytes(range(256)) * (9 << 12)
        assert "pread" in pool.register_memory(AlignedBuffer(4096)).refusal
        try:
            IoPool(engine=IoEngine.URING)
        except RuntimeError as refusal:
            assert pool.engine_refusal in str(refusal)
            print("explicit")
        """,
        tmp_path,
        error,
    )
    reason, explicit = out.splitlines()
    assert reason.startswith("io_uring_setup: ")
    assert os.strerror(error) in reason
    assert cause in reason
    assert explicit == "explicit"


@pytest.mark.parametrize(("arguments", "message"), [({"depth": 0}, "depth is 0"), ({"depth": 4097}, "depth is 4097")])
def test_depths_that_cannot_be(arguments, message):
    for engine in IoEngine:
        with pytest.raises(ValueError, match=message):
            IoPool(engine=engine, **arguments)
        with pytest.raises(ValueError, match="threads is 0"):
            IoPool(0, engine=engine)


# ---------------------------------------------------------------- errors and faults


@pytest.mark.parametrize(
    ("number", "kind", "remedy"),
    [
        (errno.EIO, IoErrorKind.DEVICE, "smartctl"),
        (errno.ENOSPC, IoErrorKind.NO_SPACE, "Free space"),
        (errno.EDQUOT, IoErrorKind.QUOTA, "quota"),
        (errno.EFBIG, IoErrorKind.FILE_TOO_LARGE, "ulimit -f"),
        (errno.ENODEV, IoErrorKind.OTHER, "connected"),
        (errno.EXDEV, IoErrorKind.OTHER, "Check the drive"),
    ],
)
def test_errors_are_told_apart_with_their_place_and_remedy(pool, plan, tmp_path, number, kind, remedy):
    file = pool.open(tmp_path / "file", size_bytes=2 * MIB)
    plan.fail(2, number)
    file.write(0, bytes(PAGE)).wait()
    ticket = file.write(MIB, bytes(PAGE))
    with pytest.raises(IoError, match=os.strerror(number)) as caught:
        ticket.wait()
    error = caught.value
    assert (error.errno, error.kind, error.offset, error.operation) == (number, kind, MIB, "write")
    assert error.filename == str(tmp_path / "file")
    assert remedy in error.remedy
    assert plan.struck == [("write", str(tmp_path / "file"), MIB)]
    assert plan.operations == 2


def test_errors_of_opening_have_kind_and_remedy_too(pool, tmp_path):
    with pytest.raises(IoError) as caught:
        pool.open(tmp_path / "missing")
    assert caught.value.kind is IoErrorKind.OTHER
    assert caught.value.remedy.startswith("Name an existing file")


def test_interrupted_short_and_refused_operations_are_completed(pool, plan, tmp_path):
    file = pool.open(tmp_path / "file", size_bytes=9 * MIB)
    source, target = random_bytes(9 * MIB, 1), np.zeros(9 * MIB, np.uint8)
    for nth in range(1, 28, 4):  # seven short ones: an eighth in a row on one operation is an error
        plan.fail(nth, errno.EINTR)
        plan.fail(nth + 1, errno.EAGAIN)
        plan.shorten(nth + 2, 5_000)
    file.write(0, source).wait()
    file.read(0, target).wait()
    assert np.array_equal(source, target)
    assert len(plan.struck) >= 3


def test_a_flipped_bit_is_reported_as_success(pool, plan, tmp_path):
    file = pool.open(tmp_path / "file", size_bytes=MIB)
    source, target = random_bytes(MIB, 1), np.zeros(MIB, np.uint8)
    file.write(0, source).wait()
    plan.flip_bit(1, 8 * 1234 + 5)
    file.read(0, target).wait()
    assert np.flatnonzero(source != target).tolist() == [1234]
    assert source[1234] ^ target[1234] == 1 << 5


def test_the_order_under_a_slow_operation(pool, plan, tmp_path):
    file = pool.open(tmp_path / "file", size_bytes=MIB)
    plan.hold(1)
    late = file.read(0, bytearray(PAGE))
    wait_until_held(plan, 1)
    file.read(PAGE, bytearray(PAGE)).wait()
    assert not late.done()
    plan.release()
    late.wait()
    assert plan.held == 0
    plan.slow(1, 0.001)
    file.read(0, bytearray(PAGE)).wait()


def test_faults_of_one_directory_leave_the_other_alone(pool, plan, tmp_path):
    files = {}
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        files[name] = pool.open(tmp_path / name / "file", size_bytes=MIB)
    plan.hold(1, count=1_000, path_prefix=tmp_path / "a")
    stuck = [files["a"].read(0, bytearray(PAGE)) for _ in range(10)]
    wait_until_held(plan, 2)
    for _ in range(10):
        files["b"].read(0, bytearray(PAGE)).wait()
    assert not any(ticket.done() for ticket in stuck)
    plan.release()
    for ticket in stuck:
        ticket.wait()


def test_rules_that_cannot_be(plan):
    for call in (
        lambda: plan.fail(0, errno.EIO),
        lambda: plan.fail(1, 0),
        lambda: plan.shorten(1, 0),
        lambda: plan.slow(1, -1.0),
        lambda: plan.flip_bit(1, -1),
        lambda: plan.hold(1, count=0),
        lambda: plan.limit_bandwidth("", 0),
    ):
        with pytest.raises(ValueError, match=r"is (0|-1)"):
            call()
