"""What the tests of `lohan bench` share: a watcher that remembers, tiny measurements of transfers and steps, a filter of records."""

from __future__ import annotations

from pathlib import Path

from lohan.bench import io as io_bench
from lohan.bench.step_options import StepOptions
from lohan.bench.step_shapes import ShapeName
from lohan.config import Precision
from lohan.units import KIB, MIB


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
