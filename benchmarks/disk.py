"""File transfers through `lohan._native.IoPool`, and through fio where it is installed, on the file system of the current folder."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.records import median
from lohan._native import AlignedBuffer, IoEngine, IoPool

FILE_BYTES = 512 * 1024**2
BLOCK_BYTES = 4 * 1024**2
THREADS = 4
ROUNDS = 3


def run() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as folder:
        path = Path(folder) / "states"
        ours = _ours(path)
        theirs = _fio(path)
    records = []
    for operation, rate in ours.items():
        ratio = rate / theirs[operation] if theirs else None
        records.append({"system": "lohan", "engine": "threads", "operation": operation, "block_bytes": BLOCK_BYTES,
                        "depth": THREADS, "bytes_per_second": rate, "ratio_to_fio": ratio})  # fmt: skip
    if not theirs:
        return [*records, {"system": "fio", "skipped": "fio is not installed"}]
    return [*records, *({"system": "fio", "engine": "psync", "operation": operation, "block_bytes": BLOCK_BYTES, "depth": THREADS,
                         "bytes_per_second": rate} for operation, rate in theirs.items())]  # fmt: skip


def _ours(path: Path) -> dict[str, float]:
    """Bytes per second, medians; a write is counted until its data is durable."""
    pool = IoPool(THREADS, engine=IoEngine.THREADS)
    file = pool.open(path, size_bytes=FILE_BYTES)
    buffer = AlignedBuffer(FILE_BYTES)
    data = torch.from_dlpack(buffer.array())
    seconds: dict[str, list[float]] = {"write": [], "read": []}
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        file.write(0, data).wait()
        file.sync()
        seconds["write"].append(time.perf_counter() - begin)
        begin = time.perf_counter()
        file.read(0, data).wait()
        seconds["read"].append(time.perf_counter() - begin)
    file.close()
    pool.close()
    return {operation: FILE_BYTES / median(values) for operation, values in seconds.items()}


def _fio(path: Path) -> dict[str, float]:
    program = shutil.which("fio")
    if program is None:
        return {}
    rates = {}
    for operation in ("write", "read"):
        command = [
            program, "--name=states", f"--filename={path}", f"--rw={operation}", f"--bs={BLOCK_BYTES}", f"--size={FILE_BYTES // THREADS}",
            f"--numjobs={THREADS}", f"--offset_increment={FILE_BYTES // THREADS}", "--direct=1", "--ioengine=psync", "--end_fsync=1",
            "--group_reporting", "--output-format=json",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        rates[operation] = float(json.loads(done.stdout)["jobs"][0][operation]["bw_bytes"])
    return rates
