"""What every benchmark writes: the machine, and one record a measurement. What could not run is a record with the reason."""

from __future__ import annotations

import datetime as dt
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

SCHEMA = 1
RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """What the figures were measured on; nothing that names a person or a host."""
    names = [line for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if line.startswith("model name")]
    return {
        "cpu": names[0].partition(":")[2].strip() if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "ram_bytes": psutil.virtual_memory().total,
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def interleaved(systems: Mapping[str, Callable[[], None]], *, rounds: int) -> dict[str, list[float]]:
    """Seconds of each call, taken in turns so that a machine that speeds up or slows down does so for all. One warm-up round is dropped."""
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    for turn in range(rounds + 1):
        for name, call in systems.items():
            begin = time.perf_counter()
            call()
            if turn:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def write(name: str, records: list[dict[str, Any]]) -> Path:
    """Write `results/<name>.json`."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    date = dt.datetime.now(dt.UTC).date().isoformat()
    path.write_text(json.dumps({"schema": SCHEMA, "name": name, "date": date, "machine": machine(), "records": records}, indent=1) + "\n")
    return path
