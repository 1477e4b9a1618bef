"""Runs code that reads foreign files in a child with limits: an uploaded file may crash, stall or starve the child, never the worker.

The child is its own session, sees no secret in its environment, and dies with its parent. It runs `main(arguments)` of one module and
hands back what that returns; a typed error raised there is raised here again.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any

from lohan import errors
from lohan.errors import CapacityError, EngineError, LohanError
from lohan.units import GIB, format_bytes, format_duration
from lohan_app.settings import Settings
from lohan_app.worker import confined
from lohan_app.worker.processes import clean_environment, command_with, python_module, read_json

logger = logging.getLogger(__name__)

MAX_OPEN_FILES = 1024  # a 175B model has about 100 weight files
# Token files hold 8 bytes a token; a token is one byte of text at least.
FILE_BYTES_PER_UPLOAD_BYTE = 8
WALL_SECONDS_PER_CPU_SECOND = 2.0
CPU_GRACE_SECONDS = 5
"""Between SIGXCPU, which names its cause, and the kernel's SIGKILL."""
# Each library would start a thread per core, with a stack and buffers that count against the limit.
_THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS", "MALLOC_ARENA_MAX"), "2")
_OUT_OF_MEMORY = (
    "memory allocation of",  # Rust
    "bad_alloc",
    "can't allocate memory",  # torch
    "Cannot allocate memory",
    "failed to map segment",  # the loader of shared libraries
    "MemoryError",
)


class AddressSpace(StrEnum):
    """What the memory limit counts."""

    LIMITED = "limited"
    """All of the address space: for parsers and tokenizers."""
    MAPS_FILES = "maps_files"
    """Memory that is written to, not mapped files: torch's libraries alone map several GiB, and weights are mapped whole."""


class LimitError(LohanError):
    """The child ran into one of its limits; the message names which, and its value."""


def run_limited(
    module: str,
    arguments: Sequence[str],
    settings: Settings,
    *,
    address_space: AddressSpace = AddressSpace.LIMITED,
    on_progress: Callable[[float], None] | None = None,
    timeout_seconds: float | None = None,
) -> Any:
    """Run `main(arguments: list[str])` of `module` in a limited child and return its JSON-ready return value.

    `on_progress` gets the fractions the child gives to `confined.report_progress`, about twice a second. The wall-clock limit is twice
    the CPU limit unless `timeout_seconds` says otherwise.

    Raises:
        LimitError: memory, CPU time, wall-clock time, file size or open files ran out.
        LohanError: the typed error that the module raised.
        EngineError: the child ended without a result; the message has its last words.
        OSError: a drive is full (ENOSPC), which is no fault of what was read: the work can be done again when there is room.
    """
    limit_seconds = timeout_seconds or WALL_SECONDS_PER_CPU_SECOND * settings.worker_cpu_seconds
    root = _scratch_root(settings)
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=root))
    try:
        result, output = scratch / "result.json", scratch / "output.log"
        command = python_module("lohan_app.worker.confined", str(result), module, *arguments)
        environment = clean_environment(**_THREADS, TMPDIR=str(scratch))
        with output.open("wb") as log:
            child = subprocess.Popen(
                command_with(_options(settings, address_space), command),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, cwd=scratch, start_new_session=True,
            )  # fmt: skip
        status = _wait(child, limit_seconds, result.with_name(result.name + confined.PROGRESS_SUFFIX), on_progress)
        return _outcome(status, result, output, settings, limit_seconds)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def sweep_scratch(settings: Settings) -> None:
    """Remove what killed workers have left: scratch folders that are older than any child may get."""
    oldest = time.time() - 2 * WALL_SECONDS_PER_CPU_SECOND * settings.worker_cpu_seconds
    for folder in _scratch_root(settings).glob("*"):
        with suppress(FileNotFoundError):
            if folder.stat().st_mtime < oldest:
                shutil.rmtree(folder, ignore_errors=True)


def _scratch_root(settings: Settings) -> Path:
    return settings.data_dir / "cache" / "limited"


def _options(settings: Settings, address_space: AddressSpace) -> list[str]:
    limits = {
        "data": str(settings.worker_memory_bytes),
        "cpu_seconds": f"{settings.worker_cpu_seconds}:{settings.worker_cpu_seconds + CPU_GRACE_SECONDS}",
        "file_bytes": str(FILE_BYTES_PER_UPLOAD_BYTE * settings.upload_limit_bytes + GIB),
        "files": str(MAX_OPEN_FILES),
        "core": "0",  # a core dump would hold the user's data
    }
    if address_space is AddressSpace.LIMITED:
        limits["address_space"] = str(settings.worker_memory_bytes)
    options = ["--parent", str(os.getpid()), "--death-signal", "SIGKILL"]
    return options + [f"--limit={name}={value}" for name, value in limits.items()]


def _wait(child: subprocess.Popen[bytes], limit_seconds: float, progress: Path, on_progress: Callable[[float], None] | None) -> int | None:
    """The child's exit status, or None where it was killed for taking too long. Whatever it has started is killed with it."""
    deadline, seen = time.monotonic() + limit_seconds, None
    try:
        while time.monotonic() < deadline:
            try:
                return child.wait(min(0.5, limit_seconds))
            except subprocess.TimeoutExpired:
                value = (read_json(progress) or {}).get("progress")
                if on_progress is not None and isinstance(value, int | float) and value != seen:
                    seen = value
                    on_progress(float(value))
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _outcome(status: int | None, result: Path, output: Path, settings: Settings, limit_seconds: float) -> Any:
    if status == confined.OUT_OF_SPACE_STATUS:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(settings.data_dir))
    words = output.read_bytes()[-4000:].decode(errors="replace").strip()
    if status is None:
        raise LimitError(f"the work took longer than {format_duration(limit_seconds)}", remedy="Use a smaller file.")
    found = _read_result(result)
    if "limit" in found:
        raise _limit(found["limit"], settings)
    if "error" in found:
        raise _typed_error(found["error"], found.get("numbers", {}))
    if "result" in found:
        return found["result"]
    if status == -signal.SIGXCPU:
        raise _limit("cpu", settings)
    if any(pattern in words for pattern in _OUT_OF_MEMORY):
        raise _limit(confined.MEMORY, settings)
    ending = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit code {status}"
    last_line = words.splitlines()[-1] if words else "it printed nothing"
    logger.warning("a limited child ended with %s; its last words:\n%s", ending, words)
    raise EngineError(f"reading the file ended with {ending}: {last_line}", remedy="The worker's log has the details.")


def _read_result(path: Path) -> dict[str, Any]:
    """Not `read_json`: a result cut short by a full disk must not pass for no result."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    assert isinstance(value, dict)
    return value


def _limit(name: str, settings: Settings) -> LimitError:
    message, remedy = {
        confined.MEMORY: (
            f"the work needs more than the {format_bytes(settings.worker_memory_bytes)} of memory it may use",
            "Raise LOHAN_WORKER_MEMORY_BYTES, or use a smaller file.",
        ),
        "cpu": (
            f"the work needs more than the {format_duration(settings.worker_cpu_seconds)} of CPU time it may use",
            "Raise LOHAN_WORKER_CPU_SECONDS, or use a smaller file.",
        ),
        confined.FILE_SIZE: ("the work wrote a file larger than it may", "Raise LOHAN_UPLOAD_LIMIT_BYTES, or use a smaller file."),
        confined.FILE_COUNT: (f"the work needs more than {MAX_OPEN_FILES} open files", "Merge the model's weight files."),
    }[name]
    return LimitError(message, remedy=remedy)


def _typed_error(error: dict[str, Any], numbers: dict[str, int]) -> LohanError:
    """The error as the class it had in the child, where that is one of the engine's."""
    found = getattr(errors, str(error["kind"]), EngineError)
    texts = {"place": error.get("place"), "remedy": error.get("remedy")}
    if isinstance(found, type) and issubclass(found, CapacityError):
        return found(error["message"], need_bytes=numbers["need_bytes"], have_bytes=numbers["have_bytes"], **texts)
    if not (isinstance(found, type) and issubclass(found, LohanError)):
        found = EngineError
    return found(error["message"], **texts)
