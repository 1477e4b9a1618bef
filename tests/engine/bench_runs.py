"""What tests of commands that measure share: a watcher that remembers, tiny measurements, a filter of records, an end by a signal."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from lohan.bench import io as io_bench
from lohan.bench.step_options import StepOptions
from lohan.bench.step_shapes import ShapeName
from lohan.config import Precision
from lohan.units import KIB, MIB
from tests.fixtures.waiting import wait_until


class Notes:
    """A watcher that remembers."""

    def __init__(self) -> None:
        self.expected = 0
        self.made: list[str] = []

    def expect(self, measurements: int) -> None:
        self.expected += measurements

    def note(self, what: str) -> None:
        return

    def done(self, what: str) -> None:
        self.made.append(what)


def options(folder: Path, **changes: object) -> io_bench.IoOptions:
    values: dict = {"directories": (folder,), "size_bytes": 8 * MIB, "block_bytes": (256 * KIB,), "depths": (4,), "rounds": 2}
    values |= {"least_seconds": 0.0, "striping_bytes": 8 * MIB}
    return io_bench.IoOptions(**(values | changes))


def measured(found: list[dict], system: str = "") -> list[dict]:
    """Records of whole measurements: not what was skipped, chosen, or held to a rate."""
    return [
        record
        for record in found
        if not {"skipped", "chosen", "directory_limit_bytes_per_second"} & set(record) and record["system"].startswith(system)
    ]


def step_options(folder: Path, **changes: object) -> StepOptions:
    """Two steps of the tiny model on the CPU with each schedule, states in RAM."""
    values: dict = {"shape": ShapeName.TINY, "batches": (2,), "sequence": 16, "device": "cpu", "precision": Precision.FP32}
    return StepOptions(**{**values, "directories": (folder,), "steps": 2, **changes})


def assert_termination_leaves_no_file(command: Sequence[str], folder: Path) -> None:
    """A command that measures files in `folder` is sent SIGTERM once they are there."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: any(folder.glob("*/states")), timeout_seconds=120, what="the files")
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert list(folder.iterdir()) == []
