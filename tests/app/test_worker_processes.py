"""Locks, process handles, the start program, kept children."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from fixtures.processes import is_alive, no_process_left
from fixtures.waiting import wait_until

from lohan_app.worker.children import Child, end_all
from lohan_app.worker.launcher import RunFiles, TrainerNote, start_trainer
from lohan_app.worker.processes import (
    FileLock,
    HeldError,
    Process,
    clean_environment,
    command_with,
    holder_of,
    holding,
    is_held,
    read_json,
    start_ticks,
    write_atomically,
)

SLEEP = (sys.executable, "-c", "import time; time.sleep(600)")


@pytest.fixture(autouse=True)
def _clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # marks what is started here
    with no_process_left(tmp_path):
        yield


# ---------------------------------------------------------------- locks
def test_a_lock_has_one_holder_and_names_it(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    assert not is_held(path)
    with holding(path) as lock:
        lock.write_note({"pid": 7, "url": "x" * 100})
        lock.write_note({"pid": 8})
        assert is_held(path)
        assert holder_of(path) == os.getpid()
        assert FileLock(path).read_note() == {"pid": 8}
        assert not FileLock(path).try_acquire()
        with pytest.raises(HeldError), holding(path):
            pass
    assert not is_held(path)
    assert holder_of(path) is None


def test_a_killed_holder_leaves_a_free_lock(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    code = (
        "import sys, time; from lohan_app.worker.processes import FileLock; from pathlib import Path\nlock = FileLock(Path(sys.argv[1]))\n"
    )
    code += "assert lock.try_acquire(); print('held', flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert is_held(path)
        assert holder_of(path) == holder.pid
        holder.kill()
    assert not is_held(path)


def test_looking_at_a_lock_does_not_keep_its_taker_out(tmp_path: Path) -> None:
    """`is_held` holds a shared lock for an instant; whoever takes the lock with a little patience gets it all the same."""
    path = tmp_path / "a.lock"
    path.touch()
    looker = multiprocessing.get_context("fork").Process(target=_look_for_ever, args=(path,))
    looker.start()
    try:
        for _ in range(50):
            lock = FileLock(path)
            assert lock.try_acquire(patience_seconds=5.0)
            lock.release()
    finally:
        looker.kill()
        looker.join()


def _look_for_ever(path: Path) -> None:
    while True:
        is_held(path)


def test_a_removed_lock_file_is_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    first, second = FileLock(path), FileLock(path)
    assert first.try_acquire()
    first.remove()
    assert second.try_acquire()
    assert is_held(path)
    second.release()


# ---------------------------------------------------------------- processes
def test_a_handle_never_reaches_another_process(tmp_path: Path) -> None:
    with subprocess.Popen(SLEEP) as child:
        started = start_ticks(child.pid)
        assert started is not None
        stranger = Process(child.pid, started + 1)
        assert not stranger.is_alive()
        stranger.send(signal.SIGKILL)
        handle = Process(child.pid, started)
        assert handle.is_alive()
        assert not handle.wait(0.0)
        handle.send(signal.SIGKILL)
        assert handle.wait(10)
        assert start_ticks(child.pid) is None, "a zombie counts as gone"
        child.wait()
        handle.send(signal.SIGKILL)
        handle.close()
        assert not handle.is_alive()


def test_a_command_name_with_brackets_is_read_right(tmp_path: Path) -> None:
    odd = tmp_path / "a) S 1 (b"
    odd.symlink_to("/bin/sleep")
    with subprocess.Popen([str(odd), "600"]) as child:
        wait_until(lambda: Path(f"/proc/{child.pid}/comm").read_text().startswith("a)"), what="its name")
        assert start_ticks(child.pid) == int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19])
        child.kill()


def test_a_child_dies_with_its_parent(tmp_path: Path) -> None:
    code = "import os, subprocess, sys, time; sys.path.insert(0, sys.argv[1])\nfrom lohan_app.worker.processes import command_with\n"
    code += "child = subprocess.Popen(command_with(['--parent', str(os.getpid())], ['/bin/sleep', '600']))\n"
    code += "print(child.pid, flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        wait_until(lambda: child.name() == "sleep", what="the child")
        parent.kill()
    wait_until(lambda: not is_alive(child), what="the child's end")


def test_a_child_of_a_dead_parent_does_not_start() -> None:
    done = subprocess.run(command_with(["--parent", "999999999"], ["/bin/echo", "ran"]), capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (125, b"")


def test_limits_are_set(tmp_path: Path) -> None:
    code = "import resource as r; print(r.getrlimit(r.RLIMIT_CPU), r.getrlimit(r.RLIMIT_NOFILE), r.getrlimit(r.RLIMIT_CORE))"
    options = ["--limit=cpu_seconds=5:9", "--limit=files=64", "--limit=core=0"]
    done = subprocess.run(command_with(options, [sys.executable, "-c", code]), capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "(5, 9) (64, 64) (0, 0)"


def test_a_trainer_is_known_before_it_runs_and_never_runs_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_children: Callable[[], list[psutil.Process]]
) -> None:
    """If the note cannot be written, the gate is never opened: nothing was started that a later supervisor would not find."""
    files = RunFiles(tmp_path)
    mark = tmp_path / "ran"
    code = f"from pathlib import Path; Path({str(mark)!r}).write_text(Path({str(files.trainer_note)!r}).read_text())"
    command = (sys.executable, "-c", code)
    child = start_trainer(files, attempt=3, device="cpu:0", command=command)
    child.wait()
    note = TrainerNote.read(files.trainer_note)
    assert note is not None
    assert (note.pid, note.attempt) == (child.pid, 3)
    assert read_json(mark) == read_json(files.trainer_note)
    mark.unlink()
    files.trainer_note.unlink()
    files.trainer_note.mkdir()
    (files.trainer_note / "in the way").touch()
    with pytest.raises(OSError, match=r"trainer\.json"):
        start_trainer(files, attempt=4, device="cpu:0", command=command)
    assert new_children() == []
    assert not mark.exists()


def test_the_environment_is_an_allow_list(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOHAN_DATABASE_URL", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "PGPASSWORD"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("CUDA_HOME", "/cuda")
    kept = clean_environment(EXTRA="1")
    assert "secret" not in kept.values()
    assert kept["CUDA_HOME"] == "/cuda"
    assert kept["EXTRA"] == "1"
    assert kept["HF_HUB_OFFLINE"] == "1"


def test_files_are_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "note.json"
    assert read_json(path) is None
    write_atomically(path, b'{"a": 1}')
    write_atomically(path, b'{"a": 2}')
    assert read_json(path) == {"a": 2}
    assert [entry.name for entry in tmp_path.iterdir()] == ["note.json"]
    for broken in (b"{", b"[]", b"\xff"):
        path.write_bytes(broken)
        assert read_json(path) is None


# ---------------------------------------------------------------- kept children
def test_a_child_is_started_again_with_growing_pauses() -> None:
    child = Child("crasher", ["/bin/false"])
    pauses = []
    while child.starts < 3:
        child.keep()
        if child.pid is None and child._pause_seconds not in pauses:
            pauses.append(child._pause_seconds)
    assert pauses == [1.0, 2.0]
    child.end()


def test_ending_takes_the_whole_group_along(tmp_path: Path) -> None:
    stubborn = "import signal, subprocess, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); subprocess.Popen(['/bin/sleep', '600']); "
    child = Child("stubborn", [sys.executable, "-c", stubborn + "time.sleep(600)"], patience_seconds=0.2)
    child.keep()
    pid = child.pid
    assert pid is not None
    wait_until(lambda: any(found.name() == "sleep" for found in psutil.Process(pid).children()), what="the grandchild")
    family = [psutil.Process(pid), *psutil.Process(pid).children()]
    before = time.monotonic()
    end_all([child])
    assert time.monotonic() - before < 60
    wait_until(lambda: not any(is_alive(found) for found in family), what="the end of all")
    assert child.pid is None
