"""`python -m benchmarks.planner.speed`: how long plans take, on the processor, of a few models on a named machine.

`--plans FILE` writes the plans of the whole grid as JSON instead, or why there is none: for comparing them before and after a change.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Final

from benchmarks.planner.grid import LENGTH, Case, cases
from lohan.bench import records
from lohan.config import ActivationPolicy

RESULTS: Final = Path(__file__).parents[1] / "results"
_BATCH: Final = 32
_POLICIES: Final = tuple(policy for policy in ActivationPolicy if policy is not ActivationPolicy.CHECKMATE)  # which another package solves


def timed() -> list[Case]:
    """The runs whose plans are timed: one batch of three models on two machines, and each policy of one of them."""
    found = [
        Case(model, machine, _BATCH, {"durability": "none"}) for model in ("3.43b", "6.7b", "13b") for machine in ("rtx-4090", "small")
    ]
    return found + [Case("3.43b", "rtx-4090", _BATCH, {"durability": "none", "policy": str(policy)}) for policy in _POLICIES]


def measure(case: Case, repetitions: int) -> records.Record:
    """Processor seconds of one plan; the model is traced, and everything is imported, before."""
    case.outcome()
    seconds = []
    for _ in range(repetitions):
        begin = time.process_time()
        outcome = case.outcome()
        seconds.append(time.process_time() - begin)
    return {
        "system": "lohan",
        "model": case.model,
        "machine": case.machine,
        "batch": case.batch,
        "sequence": LENGTH,
        **case.engine,
        "planned": outcome.startswith("{"),
        "cpu_seconds": statistics.median(seconds),
        "cpu_seconds_all": seconds,
    }


def main(arguments: list[str] | None = None) -> int:
    """Measure, or write plans; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner.speed", description=__doc__)
    parser.add_argument("--repetitions", type=int, default=9, help="of each plan (%(default)s)")
    parser.add_argument("--output", type=Path, default=RESULTS / "planner_speed.json", metavar="FILE", help="%(default)s")
    parser.add_argument("--plans", type=Path, metavar="FILE", help="write the grid's plans there, and time nothing")
    parsed = parser.parse_args(arguments)
    if parsed.plans is not None:
        parsed.plans.write_text(json.dumps({case.name: case.outcome() for case in cases()}), encoding="utf-8")
        return 0
    found = [measure(case, parsed.repetitions) for case in timed()]
    for record in found:
        settings = f"{record['model']} on {record['machine']}, {record.get('policy', 'holistic')}"
        sys.stdout.write(f"{settings}: {1000 * record['cpu_seconds']:.1f} ms\n")
    records.write_document(parsed.output, records.document("planner_speed", found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
