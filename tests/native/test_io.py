"""The read/write pool on real files: ranges that straddle pages, failures with their place, lifetimes, descriptors."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from lohan._native import IoError, IoFile, IoPool
from tests.native.children import run_child

PAGE = 4096
MIB = 1 << 20


@pytest.fixture
def pool(engine) -> Iterator[IoPool]:
    pool = IoPool(3, engine=engine)
    yield pool
    pool.close()


def random_bytes(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)


def descriptors() -> set[tuple[str, str]]:
    """The open ones: number and what it leads to."""
    gc.collect()  # earlier tests' pools and files may hang on caught exceptions, whose frames are cycles
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that lists the folder
            found.add((link.name, str(link.readlink())))
    return found


OFFSETS = [0, 1, 511, 512, PAGE - 1, PAGE, PAGE + 1, MIB - 1, MIB]
LENGTHS = [0, 1, 511, 512, 513, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, MIB + 1, 4 * MIB + PAGE + 5]


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("length", LENGTHS)
def test_a_range_round_trips_and_its_neighbours_keep_their_bytes(pool, tmp_path, offset, length):
    size = offset + length + 5_000
    model = random_bytes(size, 1)
    with_neighbours = pool.open(tmp_path / "file", size_bytes=size)
    with_neighbours.write(0, model).wait()
    for shift in (0, 1, 8):
        source = np.concatenate([np.zeros(shift, np.uint8), random_bytes(length, offset + shift)])[shift:]
        with_neighbours.write(offset, source).wait()
        model[offset : offset + length] = source
        target = np.zeros(length + shift, np.uint8)[shift:]
        with_neighbours.read(offset, target).wait()
        assert np.array_equal(target, source)
    with_neighbours.close()
    assert (tmp_path / "file").read_bytes() == model.tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.bool])
def test_tensors_of_any_dtype_are_bytes(pool, tmp_path, dtype):
    source = torch.arange(10_000).to(dtype)
    file = pool.open(tmp_path / "file", size_bytes=source.nbytes)
    file.write(0, source).wait()
    target = torch.empty_like(source)
    file.read(0, target).wait()
    assert torch.equal(source, target)


def test_read_only_sources_are_fine(pool, tmp_path):
    file = pool.open(tmp_path / "file", size_bytes=5)
    file.write(0, b"bytes").wait()
    target = bytearray(5)
    file.read(0, target).wait()
    assert target == b"bytes"


def test_many_transfers_at_once(pool, tmp_path):
    chunk, count = 300_007, 40
    file = pool.open(tmp_path / "file", size_bytes=chunk * count)
    model = random_bytes(chunk * count, 5)
    pieces = np.split(model, count)
    tickets = [file.write(i * chunk, piece, urgent=i % 3 == 0) for i, piece in enumerate(pieces)]
    for ticket in tickets:
        ticket.wait()
    targets = [np.zeros(chunk, np.uint8) for _ in range(count)]
    tickets = [file.read(i * chunk, target) for i, target in enumerate(targets)]
    for ticket in tickets:
        ticket.wait()
        assert ticket.done()
    assert np.array_equal(np.concatenate(targets), model)


def test_size_bytes_creates_a_private_allocated_file_and_keeps_what_fits(pool, tmp_path):
    path = tmp_path / "file"
    with pytest.raises(IoError):
        pool.open(path)
    file = pool.open(path, size_bytes=MIB)
    assert (file.size_bytes, file.path) == (MIB, str(path))
    status = path.stat()
    assert status.st_mode & 0o777 == 0o600
    assert status.st_blocks * 512 >= MIB
    file.write(0, b"kept").wait()
    file.close()
    assert pool.open(path, size_bytes=2 * MIB).size_bytes == 2 * MIB
    assert pool.open(path, size_bytes=10).size_bytes == 10
    assert path.read_bytes()[:4] == b"kept"


def test_paths_may_be_any_that_the_system_takes(pool, tmp_path):
    path = os.fsencode(tmp_path) + b"/\xff name"
    file = pool.open(os.fsdecode(path), size_bytes=1)
    assert os.fsencode(file.path) == path
    with pytest.raises(ValueError, match="null"):
        pool.open("a\0b", size_bytes=1)
    with pytest.raises(TypeError):
        pool.open(7, size_bytes=1)


def test_direct_or_the_reason_why_not(pool, tmp_path):
    file = pool.open(tmp_path / "file", size_bytes=PAGE)
    assert file.direct is (file.direct_refusal == "")
    assert file.alignment_bytes % PAGE == 0 if file.direct else file.alignment_bytes == 1


# ---------------------------------------------------------------- failures


def failure(call) -> IoError:
    with pytest.raises(IoError) as caught:
        call()
    return caught.value


def test_a_missing_file_names_itself(pool, tmp_path):
    error = failure(lambda: pool.open(tmp_path / "missing"))
    assert isinstance(error, OSError)
    assert (error.errno, error.filename, error.offset, error.operation) == (errno.ENOENT, str(tmp_path / "missing"), None, "open")
    assert failure(lambda: pool.open(tmp_path / "no" / "folder", size_bytes=1)).errno == errno.ENOENT
    assert failure(lambda: pool.open(tmp_path)).errno == errno.EISDIR
    with pytest.raises(ValueError, match="/dev/null is not a regular file"):
        pool.open("/dev/null", size_bytes=1)


def test_a_file_that_shrank_is_reported_where_it_ends(pool, tmp_path):
    file = pool.open(tmp_path / "file", size_bytes=3 * MIB)
    os.truncate(tmp_path / "file", MIB)
    error = failure(file.read(0, bytearray(3 * MIB)).wait)
    assert (error.errno, error.offset, error.operation) == (errno.ENODATA, MIB, "read")


def test_no_permission(tmp_path):
    out = run_child(
        """
        import os, sys
        from lohan._native import IoError, IoPool
        if os.getuid() == 0:
            os.chmod(sys.argv[1], 0o700)
            os.setuid(65534)  # root may do anything: become nobody
        else:
            os.chmod(sys.argv[1], 0)
        try:
            IoPool(1).open(sys.argv[1] + "/file", size_bytes=1)
        except IoError as error:
            print(error.errno, error.operation)
        """,
        tmp_path,
    )
    tmp_path.chmod(0o700)
    assert out.split() == [str(errno.EACCES), "open"]


def test_the_file_size_limit(engine, tmp_path):
    """RLIMIT_FSIZE, met while allocating and while writing; SIGXFSZ does not end the process."""
    out = run_child(
        """
        import os, resource, sys
        from lohan._native import IoEngine, IoError, IoPool
        folder, pool = sys.argv[1], IoPool(2, engine=IoEngine[sys.argv[2]])
        with open(folder + "/sparse", "wb") as sparse:
            sparse.truncate(4 << 20)
        file = pool.open(folder + "/sparse")
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        for call in (lambda: pool.open(folder + "/new", size_bytes=2 << 20), lambda: file.write(0, bytes(4 << 20)).wait()):
            try:
                call()
            except IoError as error:
                print(error.errno, error.operation, error.offset)
        print(os.path.exists(folder + "/new"))
        """,
        tmp_path,
        engine.name,
    )
    assert out.splitlines() == [f"{errno.EFBIG} allocate None", f"{errno.EFBIG} write {MIB}", "False"]


def tool(name: str) -> str:
    """Path of a system tool, or a skip that names it."""
    path = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    return path or pytest.skip(f"no {name} on PATH")


@pytest.fixture(params=["tmpfs", "ext4"])
def small_drive(request, tmp_path) -> Iterator[Path]:
    """A file system of 8 MiB: in memory, and a real one (O_DIRECT) in an image."""
    folder = tmp_path / "drive"
    folder.mkdir()
    if request.param == "tmpfs":
        options = ["-t", "tmpfs", "-o", "size=8m", "none"]
    else:
        image = tmp_path / "image"
        with image.open("wb") as stream:
            stream.truncate(8 * MIB)
        subprocess.run([tool("mkfs.ext4"), "-q", "-O", "^has_journal", str(image)], check=True, capture_output=True)
        options = ["-o", "loop", str(image)]
    mounted = subprocess.run([tool("mount"), *options, str(folder)], capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"this user or container may not mount: {mounted.stderr.strip()}")
    yield folder
    subprocess.run([tool("umount"), str(folder)], check=True)


def test_a_full_drive(pool, small_drive):
    error = failure(lambda: pool.open(small_drive / "too_large", size_bytes=100 * MIB))
    assert (error.errno, error.operation, error.filename) == (errno.ENOSPC, "allocate", str(small_drive / "too_large"))
    assert not (small_drive / "too_large").exists()
    with (small_drive / "sparse").open("wb") as sparse:
        sparse.truncate(64 * MIB)
    file = pool.open(small_drive / "sparse")
    error = failure(file.write(0, bytes(64 * MIB)).wait)
    assert (error.errno, error.operation) == (errno.ENOSPC, "write")
    assert 0 <= error.offset < 64 * MIB
    file.close()


def test_a_file_in_memory_is_not_called_direct(pool, small_drive):
    file = pool.open(small_drive / "file", size_bytes=MIB)
    in_memory = any(line.split()[1:3] == [str(small_drive), "tmpfs"] for line in Path("/proc/self/mounts").read_text().splitlines())
    assert file.direct is not in_memory
    assert ("tmpfs" in file.direct_refusal) is in_memory
    source, target = random_bytes(MIB, 9), np.zeros(MIB, np.uint8)
    file.write(0, source).wait()
    file.read(0, target).wait()
    assert np.array_equal(source, target)
    file.close()


def test_a_filesystem_in_memory_that_needs_no_mount(pool):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        file = pool.open(f"{folder}/file", size_bytes=9 * MIB + 5)
        assert (file.direct, file.alignment_bytes) == (False, 1)
        assert "tmpfs" in file.direct_refusal
        source, target = random_bytes(9 * MIB, 2), np.zeros(9 * MIB, np.uint8)
        file.write(3, source).wait()
        file.read(3, target).wait()
        assert np.array_equal(source, target)
        file.close()


# ---------------------------------------------------------------- lifetimes


def test_a_dropped_ticket_still_writes_and_its_array_lives_as_long(pool, tmp_path):
    file = pool.open(tmp_path / "file", size_bytes=32 * MIB)
    for i in range(8):
        file.write(4 * i * MIB, np.full(4 * MIB, i + 1, np.uint8))
    file.close()
    written = np.fromfile(tmp_path / "file", np.uint8)
    assert np.array_equal(written, np.repeat(np.arange(1, 9, dtype=np.uint8), 4 * MIB))


def test_waiting_twice_and_after_close(pool, tmp_path):
    file = pool.open(tmp_path / "file", size_bytes=MIB)
    ticket = file.write(0, bytes(MIB))
    empty = file.write(0, b"")
    file.sync()
    file.close()
    pool.close()
    ticket.wait()
    ticket.wait()
    assert ticket.done()
    empty.wait()


def test_closed_files_and_pools_say_so(pool, tmp_path):
    file = pool.open(tmp_path / "file", size_bytes=MIB)
    other = pool.open(tmp_path / "other", size_bytes=MIB)
    file.close()
    file.close()
    for call in (lambda: file.read(0, bytearray(1)), lambda: file.write(0, b"x"), file.sync):
        with pytest.raises(ValueError, match="file is closed"):
            call()
    pool.close()
    pool.close()
    for call in (lambda: other.read(0, bytearray(1)), lambda: other.write(0, b"x"), lambda: pool.open(tmp_path / "file")):
        with pytest.raises(RuntimeError, match="the I/O pool is closed"):
            call()
    other.close()


def test_dropping_everything_in_any_order_is_safe(engine, tmp_path):
    pool = IoPool(2, engine=engine)
    file = pool.open(tmp_path / "file", size_bytes=16 * MIB)
    tickets = [file.write(i * 4 * MIB, bytes([i]) * (4 * MIB)) for i in range(4)]
    del pool, file
    tickets[2].wait()
    del tickets
    assert (tmp_path / "file").read_bytes() == b"".join(bytes([i]) * (4 * MIB) for i in range(4))


def test_descriptors_do_not_grow(pool, tmp_path):
    file = pool.open(tmp_path / "file", size_bytes=MIB)
    before = descriptors()
    target = bytearray(5_000)
    for i in range(1_000):
        file.write(i, b"some bytes").wait()
        file.read(i, target).wait()
    for i in range(100):
        opened: IoFile = pool.open(tmp_path / "another", size_bytes=10)
        with pytest.raises(IoError):
            pool.open(tmp_path / "missing")
        if i % 2:
            opened.close()
    del opened
    assert not descriptors() - before  # others' may go meanwhile: threads of earlier tests end when they end


def test_a_forked_child_is_told_and_both_processes_go_on(engine, tmp_path):
    out = run_child(
        """
        import os, sys
        from lohan._native import IoEngine, IoPool, ThreadPool
        pool, threads = IoPool(2, engine=IoEngine[sys.argv[2]]), ThreadPool(2)
        file = pool.open(sys.argv[1] + "/file", size_bytes=64 << 20)
        ticket = file.write(0, bytes(64 << 20))
        child = os.fork()
        if child == 0:
            calls = (ticket.wait, lambda: ticket.on_done(print), lambda: file.read(0, bytearray(1)), file.sync, file.close, pool.close)
            for call in calls:
                try:
                    call()
                except RuntimeError as error:
                    assert "fork" in str(error)
                else:
                    os._exit(3)
            sys.exit(0)  # with all destructors
        _, status = os.waitpid(child, 0)
        ticket.wait()
        file.close()
        pool.close()
        print(os.waitstatus_to_exitcode(status))
        """,
        tmp_path,
        engine.name,
    )
    assert out.strip() == "0"
