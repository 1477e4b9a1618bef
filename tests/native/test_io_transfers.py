"""What goes beyond one read or write: batches, callbacks, stripes, pinned memory."""

from __future__ import annotations

import errno
import gc
import sys
import threading
import time
import weakref

import numpy as np
import pytest

from lohan._native import AlignedBuffer, IoEngine, IoError, io_uring_refusal
from tests.fixtures.waiting import wait_until
from tests.native.children import run_child
from tests.native.transfers import MIB, PAGE, PATIENCE_SECONDS, random_bytes

# ---------------------------------------------------------------- batches


def test_batches_round_trip(pool, tmp_path):
    file = pool.open(tmp_path / "file", size_bytes=4 * MIB)
    model = random_bytes(4 * MIB, 7)
    pieces = np.split(model, 64)
    offsets = [i * len(pieces[0]) for i in range(64)]
    for ticket in file.write_batch(list(zip(offsets, pieces, strict=True)), urgent=True):
        ticket.wait()
    targets = [np.zeros_like(piece) for piece in pieces]
    for ticket in file.read_batch(zip(offsets, targets, strict=True)):
        ticket.wait()
    assert np.array_equal(np.concatenate(targets), model)
    assert file.read_batch([]) == []


def test_a_batch_with_one_request_that_cannot_be_starts_nothing(pool, plan, tmp_path):
    file = pool.open(tmp_path / "file", size_bytes=PAGE)
    good = (0, bytearray(PAGE))
    for bad, kind, message in [
        ((1, bytearray(PAGE)), ValueError, "not within"),
        ((0, b"read-only"), ValueError, "target 1: .*read-only"),
        ((0, object()), TypeError, "target 1: expected a 1-D host array"),
        ((0.5, bytearray(1)), TypeError, "target 1: expected a tuple of an offset"),
        ((0,), TypeError, "target 1: expected a tuple of an offset"),
        (7, TypeError, "target 1: expected a tuple of an offset"),
    ]:
        with pytest.raises(kind, match=message):
            file.read_batch([good, bad])
    with pytest.raises(TypeError):
        file.read_batch(7)
    file.close()
    assert plan.operations == 0


def test_a_ticket_knows_when_its_calls_began_and_ended(pool, plan, tmp_path):
    file = pool.open(tmp_path / "file", size_bytes=9 * MIB)
    plan.hold(1)
    before = time.perf_counter()
    ticket = file.write(0, bytes(9 * MIB))  # in several calls
    wait_until(lambda: plan.held > 0)
    held = time.perf_counter()
    assert ticket.times is None, "it has not ended"
    plan.release()
    ticket.wait()
    began, ended = ticket.times
    assert before <= began <= held <= ended <= time.perf_counter()
    empty = file.read(0, bytearray(0))
    empty.wait()
    assert empty.times is None, "no call was made"


# ---------------------------------------------------------------- callbacks


def test_callbacks_run_once_each_in_one_other_thread(pool, plan, tmp_path):
    file = pool.open(tmp_path / "file", size_bytes=MIB)
    plan.fail(5, errno.EIO)
    seen, all_seen = [], threading.Event()

    def note(ticket):
        seen.append((ticket, ticket.done(), threading.current_thread()))
        if len(seen) == 51:
            all_seen.set()

    tickets = file.write_batch([(i * PAGE, bytes(PAGE)) for i in range(50)])
    for ticket in tickets:
        ticket.on_done(note)
    tickets[0].on_done(note)  # a second one, when the transfer may have ended
    assert all_seen.wait(PATIENCE_SECONDS)
    assert sorted(map(id, (ticket for ticket, _, _ in seen))) == sorted(map(id, [*tickets, tickets[0]]))
    assert all(done for _, done, _ in seen)
    assert threading.main_thread() not in {thread for _, _, thread in seen}


def test_a_callback_may_use_the_pool_and_raise(pool, tmp_path, monkeypatch):
    file = pool.open(tmp_path / "file", size_bytes=PAGE)
    target, ended = bytearray(5), threading.Event()
    unraisable = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: unraisable.append(args.exc_value))

    def read_back(_):
        file.read(0, target).on_done(lambda _: ended.set())
        raise LookupError("in a callback")

    file.write(0, b"bytes").on_done(read_back)
    assert ended.wait(PATIENCE_SECONDS)
    assert target == b"bytes"
    assert [str(error) for error in unraisable] == ["in a callback"]
    unraisable.clear()
    with pytest.raises(TypeError, match="callable"):
        file.read(0, target).on_done(7)


def test_a_callback_keeps_its_ticket_and_nothing_keeps_the_callback(pool, plan, tmp_path):
    file = pool.open(tmp_path / "file", size_bytes=PAGE)
    called = threading.Event()

    class Callback:
        def __call__(self, ticket):
            called.set()

    callback = Callback()
    gone = threading.Event()
    weakref.finalize(callback, gone.set)
    plan.hold(1)
    file.write(0, bytes(PAGE)).on_done(callback)
    del callback
    gc.collect()
    assert not gone.is_set()
    plan.release()
    assert called.wait(PATIENCE_SECONDS)
    assert gone.wait(PATIENCE_SECONDS)


def test_nothing_of_a_transfer_is_kept(pool, tmp_path):
    file = pool.open(tmp_path / "file", size_bytes=MIB)
    array, ended = bytes(PAGE), threading.Semaphore(0)

    def callback(_):
        ended.release()

    def rounds(count: int) -> tuple[int, int]:
        for _ in range(count):
            for ticket in file.write_batch([(i * PAGE, array) for i in range(10)]):
                ticket.on_done(callback)
            file.write(0, array).wait()
            for _ in range(10):
                assert ended.acquire(timeout=PATIENCE_SECONDS)
        del ticket
        wait_until(lambda: "io-notifier" not in {thread.name for thread in threading.enumerate()}, interval_seconds=0.001)
        return sys.getrefcount(array), sys.getrefcount(callback)

    before = rounds(1)
    assert rounds(200) == before


def test_a_child_forked_with_callbacks_outstanding_ends(engine, tmp_path):
    out = run_child(
        """
        import os, sys
        from lohan._native import FaultPlan, IoEngine, IoPool
        plan, called = FaultPlan(), []
        pool = IoPool(engine=IoEngine[sys.argv[2]], faults=plan)
        file = pool.open(sys.argv[1] + "/file", size_bytes=4096)
        plan.hold(1)
        ticket = file.write(0, bytes(4096))
        ticket.on_done(called.append)
        child = os.fork()
        if child == 0:
            sys.exit(0)  # with all destructors, and no thread that could call back
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), called)
        plan.release()
        """,
        tmp_path,
        engine.name,
    )
    assert out.split() == ["0", "[]"]


def test_the_interpreter_ends_after_its_callbacks(engine, tmp_path):
    out = run_child(
        """
        import sys
        from lohan._native import IoEngine, IoPool
        pool = IoPool(engine=IoEngine[sys.argv[2]])
        file = pool.open(sys.argv[1] + "/file", size_bytes=64 << 20)
        file.write(0, bytes(64 << 20)).on_done(lambda ticket: print("called", ticket.done()))
        """,
        tmp_path,
        engine.name,
    )
    assert out.split() == ["called", "True"]


# ---------------------------------------------------------------- stripes


def test_a_striped_file_is_one_file(pool, plan, tmp_path):
    paths = [tmp_path / name / "part" for name in ("a", "b", "c")]
    for path in paths:
        path.parent.mkdir()
    size = 40 * PAGE + 77
    file = pool.open(paths, size_bytes=size, stripe_bytes=PAGE)
    assert (file.paths, file.path, file.size_bytes) == ([str(path) for path in paths], str(paths[0]), size)
    model = random_bytes(size, 3)
    file.write(0, model).wait()
    file.sync()
    plan.fail(1, errno.EIO, path_prefix=paths[1])
    with pytest.raises(IoError) as caught:
        file.read(0, np.zeros(size, np.uint8)).wait()
    assert (caught.value.filename, caught.value.offset) == (str(paths[1]), plan.struck[0][2])
    file.close()
    stripes = [model[begin : begin + PAGE] for begin in range(0, size, PAGE)]
    for i, path in enumerate(paths):
        assert path.read_bytes() == b"".join(stripe.tobytes() for stripe in stripes[i::3])
    again = pool.open(tuple(paths), stripe_bytes=PAGE)
    target = np.zeros(size - 5_000, np.uint8)
    again.read(5_000, target).wait()
    assert np.array_equal(target, model[5_000:])
    with pytest.raises(ValueError, match="name the files in the order"):
        pool.open([*paths[1:], paths[0]], stripe_bytes=PAGE)
    with pytest.raises(ValueError, match="paths is empty"):
        pool.open([])
    with pytest.raises(ValueError, match="stripe_bytes is 5"):
        pool.open(paths, stripe_bytes=5)


# ---------------------------------------------------------------- pinned memory


def test_pinned_memory_outlives_its_buffer_and_the_pool(pool, engine, tmp_path):
    file = pool.open(tmp_path / "file", size_bytes=4 * MIB)
    buffer = AlignedBuffer(4 * MIB)
    pinned = pool.register_memory(buffer)
    assert (pinned.refusal == "") is (engine is IoEngine.URING)
    array = np.from_dlpack(buffer.array())
    array[:] = random_bytes(4 * MIB, 4)
    file.write(0, array).wait()
    target = np.zeros(4 * MIB, np.uint8)
    file.read(0, target).wait()
    assert np.array_equal(target, array)
    del array, buffer
    gc.collect()
    file.close()
    pool.close()
    del pinned
    with pytest.raises(RuntimeError, match="is closed"):
        pool.register_memory(AlignedBuffer(1))


def test_a_limit_on_locked_memory_is_a_reason_not_a_failure(tmp_path):
    if io_uring_refusal():
        pytest.skip(f"no io_uring here: {io_uring_refusal()}")
    out = run_child(
        """
        import os, resource, sys
        from lohan._native import AlignedBuffer, IoEngine, IoPool
        import numpy as np
        pool = IoPool(engine=IoEngine.URING)
        file = pool.open(sys.argv[1] + "/file", size_bytes=4 << 20)
        del pool
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 16, 1 << 16))
        if os.getuid() == 0:
            os.setuid(65534)  # root may lock any amount: become nobody
        pool = IoPool(engine=IoEngine.URING)
        buffer = AlignedBuffer(4 << 20)
        pinned = pool.register_memory(buffer)
        print(pinned.refusal)
        file.write(0, buffer.array()).wait()
        """,
        tmp_path,
    )
    assert "pinning memory" in out
    assert "ulimit -l" in out
