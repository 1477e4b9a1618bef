"""fio as the measure of file transfers: its arguments for LoHan's access pattern, and what it printed.

fio's buffers lie in huge pages where the system gives them, as LoHan's do. With pages of 4 KiB a block of 1 MiB is 256 pieces of memory,
which a drive may take only in several requests: on a virtio drive that takes 254, fio read 1.3 GB/s instead of 3.8, and LoHan would
have been compared with that.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lohan.hardware.transfers import Engine, Operation
from lohan.units import MIB

MISSING: Final = "fio is not installed: apt-get install fio (Debian, Ubuntu) or dnf install fio (Fedora)"
# fio's names. With io_uring one job keeps `depth` blocks in flight; with psync each of `depth` threads has one.
ENGINE_NAMES: Final = {Engine.URING: "io_uring", Engine.THREADS: "psync"}
READ_PERCENT_OF_MIXED: Final = 70
_MODES: Final = {Operation.READ: "read", Operation.WRITE: "write", Operation.MIXED: "rw"}
_TIMEOUT_SECONDS: Final = 600
# Lets glibc's malloc, fio's source of buffers, ask for huge pages.
_ENVIRONMENT: Final = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
# An allocation begins and ends somewhere in a huge page of 2 MiB, and those two parts are made of small ones: buffers keep clear of the
# first, and, since only the beginning of a large allocation is used, of the last.
_HUGE_PAGE_BYTES: Final = 2 * MIB
_LEAST_ALLOCATION_BYTES: Final = 8 * MIB


class FioError(Exception):
    """fio ended badly; the text is the reason it gave."""


@dataclass(frozen=True)
class FioJob:
    """Passes over files that exist with their full size."""

    paths: Sequence[Path]
    engine: Engine
    operation: Operation
    block_bytes: int
    depth: int
    """In each file."""
    bytes_per_path: int
    """What a pass moves in each file; a multiple of depth * block_bytes."""
    times: int
    """How many passes."""
    direct: bool
    """Whether to bypass the page cache (O_DIRECT), as LoHan's file does."""
    registered: bool
    """Whether the kernel pins the buffers once for all transfers, as it does LoHan's; io_uring only."""


def program() -> str | None:
    """Path of fio; None where it is not installed."""
    return shutil.which("fio")


def arguments(job: FioJob) -> list[str]:
    """fio's arguments, without its own name. The files are neither made, truncated nor laid out anew."""
    streams = 1 if job.engine is Engine.URING else job.depth
    region_bytes = job.bytes_per_path // streams
    result = [
        f"--ioengine={ENGINE_NAMES[job.engine]}",
        f"--rw={_MODES[job.operation]}",
        # All blocks are of the first size; the second, which none has, is what a buffer gets.
        f"--bssplit={job.block_bytes}/100:{_buffer_bytes(job, region_bytes)}/0",
        f"--iomem_align={_HUGE_PAGE_BYTES}",
        f"--iodepth={job.depth if job.engine is Engine.URING else 1}",
        f"--numjobs={streams}",
        f"--size={region_bytes}",
        f"--io_size={region_bytes * job.times}",
        f"--offset_increment={region_bytes}",  # from job to job
        f"--direct={int(job.direct)}",
        "--end_fsync=1",  # a write counts until it is durable
        "--overwrite=1",
        "--allow_file_create=0",
        "--fallocate=none",
        "--thread=1",
        "--group_reporting=1",
        "--output-format=json",
    ]
    if job.operation is Operation.MIXED:
        result.append(f"--rwmixread={READ_PERCENT_OF_MIXED}")
    if job.registered and job.engine is Engine.URING:
        result.append("--fixedbufs=1")
    # What stands before the first name holds for all; a colon would separate the files of one job.
    for index, path in enumerate(job.paths):
        escaped = str(path).replace(":", "\\:")
        result += [f"--name=states{index}", f"--filename={escaped}"]
    return result


def _buffer_bytes(job: FioJob, region_bytes: int) -> int:
    """Of each buffer; fio allocates all buffers of a job at once. One larger than the job's region would end it after one pass."""
    least = max(2 * job.block_bytes, _LEAST_ALLOCATION_BYTES) if job.engine is Engine.THREADS else _LEAST_ALLOCATION_BYTES // job.depth
    return min(max(job.block_bytes, least), region_bytes)


def run(job: FioJob, executable: str) -> float:
    """Bytes per second, reads and writes together, durable.

    Raises:
        FioError: it could not be started, failed, ran too long, or printed something else than expected.
    """
    try:
        done = subprocess.run(
            [executable, *arguments(job)],
            env={**os.environ, **_ENVIRONMENT},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise FioError(f"fio did not run to its end: {error}") from error
    if done.returncode != 0:
        lines = [line for line in (done.stderr + done.stdout).splitlines() if line.startswith("fio:")]
        raise FioError(lines[0] if lines else f"fio ended with code {done.returncode}: {done.stderr.strip()[:200]}")
    return bytes_per_second(done.stdout)


def bytes_per_second(output: str) -> float:
    """What fio's JSON says of a pass: all bytes over the time of the longer direction.

    Raises:
        FioError: it is no such JSON, or nothing was moved.
    """
    # Warnings may stand before the JSON.
    begin = output.find("{")
    try:
        result: dict[str, Any] = json.loads(output[begin:] if begin >= 0 else "")["jobs"][0]
        directions = [result["read"], result["write"]]
        moved = sum(int(direction["io_bytes"]) for direction in directions)
        milliseconds = max(float(direction["runtime"]) for direction in directions)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise FioError(f"fio printed what is not understood: {output.strip()[:200]!r}") from error
    if int(result.get("error", 0)) != 0 or moved == 0 or milliseconds == 0:
        raise FioError(f"fio moved {moved} bytes in {milliseconds:.0f} ms, error {result.get('error', 0)}")
    return moved / milliseconds * 1000
