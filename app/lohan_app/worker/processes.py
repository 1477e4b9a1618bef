"""Locks and processes: who holds a lock, whether a process still lives, how it is signalled without hitting another one.

On one host "alive" means "holds its lock": no lease, no clock. The kernel drops a lock when its holder dies, however it dies.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lohan.errors import EngineError

START_PROGRAM = Path(__file__).with_name("start.py")
# What a program needs to find its files, its GPU and its language. The rest stays out: database and broker addresses carry passwords.
ENVIRONMENT_NAMES = frozenset(
    {"PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "XDG_CACHE_HOME"}
)
ENVIRONMENT_PREFIXES = ("LC_", "CUDA_", "NVIDIA_", "OMP_", "MKL_", "KMP_", "PYTORCH_", "TORCH", "TRITON_")


class HeldError(EngineError):
    """Another process holds the lock."""


class FileLock:
    """An exclusive `flock` on a file that is created where missing; the descriptor is close-on-exec, so no child inherits it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def try_acquire(self, *, patience_seconds: float = 0.0) -> bool:
        """Take the lock; waits `patience_seconds` at most, because `is_held` of somebody else may hold it for an instant."""
        deadline = time.monotonic() + patience_seconds
        while True:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_same_file(descriptor, self.path):
                    self._descriptor = descriptor
                    return True
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    os.close(descriptor)
                    return False
                time.sleep(0.02)
            os.close(descriptor)

    def write_note(self, note: Mapping[str, Any]) -> None:
        """Leave a note for those who find the lock held."""
        assert self._descriptor is not None, "only the holder writes the note"
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps(note).encode(), 0)

    def read_note(self) -> dict[str, Any]:
        """The holder's note; empty where it has left none."""
        return read_json(self.path) or {}

    def remove(self) -> None:
        """Delete the file and release the lock."""
        self.path.unlink(missing_ok=True)
        self.release()

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _is_same_file(descriptor: int, path: Path) -> bool:
    """False where the holder before has removed the file: a lock on a file without a name guards nothing."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


@contextmanager
def holding(path: Path, *, patience_seconds: float = 0.0) -> Iterator[FileLock]:
    """Hold the lock at `path` for the body.

    Raises:
        HeldError: somebody else holds it.
    """
    lock = FileLock(path)
    if not lock.try_acquire(patience_seconds=patience_seconds):
        raise HeldError("another process holds this lock", place=str(path), remedy="Wait for it to end.")
    try:
        yield lock
    finally:
        lock.release()


def is_held(path: Path) -> bool:
    """Whether some process holds the lock at `path`; holds a shared lock for an instant to find out."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def holder_of(path: Path) -> int | None:
    """Process id of the holder of the lock at `path`, from /proc/locks; None where there is none, or it is not visible from here."""
    try:
        found = path.stat()
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        # `1: FLOCK  ADVISORY  WRITE 4321 08:01:1311 0 EOF`; blocked waiters have `->` in the second column.
        words = line.split()
        if words[1] != "FLOCK" or words[3] != "WRITE":
            continue
        major, minor, inode = words[5].split(":")
        if os.makedev(int(major, 16), int(minor, 16)) == found.st_dev and int(inode) == found.st_ino:
            return int(words[4]) or None
    return None


# ---------------------------------------------------------------- processes
def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None where it is gone or a zombie. With it a reused id is told apart."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the command's name, in brackets, may hold spaces and brackets itself
    return None if fields[0] in "ZX" else int(fields[19])


class Process:
    """A process that may not be our child, held by a pidfd: a signal can never reach a later process with the same id."""

    def __init__(self, pid: int, started: int) -> None:
        self.pid = pid
        self.start_ticks = started
        self._descriptor: int | None = None
        with suppress(ProcessLookupError):
            self._descriptor = os.pidfd_open(pid)
        if self._descriptor is not None and start_ticks(pid) != started:
            self.close()

    def is_alive(self) -> bool:
        return self._descriptor is not None and not select.select([self._descriptor], [], [], 0)[0]

    def send(self, number: signal.Signals) -> None:
        """Signal it; nothing happens where it has ended."""
        if self._descriptor is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, number)

    def wait(self, seconds: float) -> bool:
        """Whether it has ended, after `seconds` at most."""
        return self._descriptor is None or bool(select.select([self._descriptor], [], [], seconds)[0])

    def kill_group(self) -> None:
        """SIGKILL to whatever is left of the process group it led."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def kill_session_with(path: Path, *, session: int) -> None:
    """SIGKILL to the processes of a session that have `path` open, and wait for each: a child that an old trainer has left behind
    may have inherited its lock. A process that merely reuses the id does not have the file open."""
    for pid in _processes_with(path):
        started = start_ticks(pid)
        with suppress(ProcessLookupError):
            if started is not None and os.getsid(pid) == session:
                process = Process(pid, started)
                process.send(signal.SIGKILL)
                process.wait(30.0)
                process.close()


def _processes_with(path: Path) -> list[int]:
    """Ids of the processes that have `path` open, as far as this user may see."""
    found = []
    wanted = path.stat()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError):
            for descriptor in (entry / "fd").iterdir():
                with suppress(OSError):
                    if os.path.samestat(descriptor.stat(), wanted):
                        found.append(int(entry.name))
                        break
    return found


def command_with(options: Sequence[str], command: Sequence[str]) -> list[str]:
    """`command` started through `start.py` with `options`."""
    return [sys.executable, "-I", "-S", str(START_PROGRAM), *options, "--", *command]


def python_module(module: str, *arguments: str) -> list[str]:
    """`python -m module`, without the current folder on the import path (`-P`)."""
    return [sys.executable, "-P", "-m", module, *arguments]


def clean_environment(**extra: str) -> dict[str, str]:
    """The environment of a program that must see no secret: an allow-list of this process's, and `extra`."""
    kept = {name: value for name, value in os.environ.items() if name in ENVIRONMENT_NAMES or name.startswith(ENVIRONMENT_PREFIXES)}
    return kept | {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"} | extra


def kill_group_of(leader: subprocess.Popen[bytes]) -> None:
    """SIGKILL to a child, which leads its own process group, and to what is left of that group; returns when the child is gone."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader.pid, signal.SIGKILL)
    leader.wait()


def oom_kill_count() -> int | None:
    """How many processes the kernel has killed for want of memory: in our control group (version 2), else on the host."""
    for path, separator in ((_cgroup_events(), " "), (Path("/proc/vmstat"), " ")):
        with suppress(OSError, ValueError):
            for line in path.read_text(encoding="ascii").splitlines():
                name, _, count = line.partition(separator)
                if name == "oom_kill":
                    return int(count)
    return None


def _cgroup_events() -> Path:
    relative = ""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            if line.startswith("0::"):
                relative = line[3:].strip("/")
    return Path("/sys/fs/cgroup") / relative / "memory.events"


# ---------------------------------------------------------------- small files
def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a small JSON file; None where it is missing, unreadable or not an object."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def write_atomically(path: Path, content: bytes) -> None:
    """Replace `path`: readers see the old file or the new one, also after a power cut (fsync, rename, fsync of the folder)."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
