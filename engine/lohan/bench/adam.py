"""`lohan bench adam`: the CPU optimizer beside torch's, DeepSpeed's and bitsandbytes', and all of them against the memory's own speed.

Four cases. `plain-fp32`: fp32 gradient, master and moments. `engine`: what a training step needs, a bf16 gradient in, its norm and
finite check, the update of exact fp32 masters, bf16 weights out; LoHan keeps such a master as bf16 weights and a 16-bit remainder.
`second-place`: the engine's job with the new state in other arrays than the old one, as for an update that may be taken back.
`8bit`: the engine's job with blockwise 8-bit moments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

import psutil

from lohan._native import AdamSegment, InstructionSet, ThreadPool, adamw_update, available_instruction_sets, read_modify_write
from lohan.bench.records import Record, Watcher, interleaved, median
from lohan.errors import CapacityError
from lohan.units import format_bytes, format_count

if TYPE_CHECKING:
    from lohan.bench.adam_arrays import Arrays

# Arrays of 200 MB: far beyond any cache, and a size that a small machine holds.
DEFAULT_ELEMENTS: Final = 50_000_000
DEFAULT_ROUNDS: Final = 7
# Nine arrays of fp32 (four of plain-fp32, two of second-place, three of the reference), five of 16 bits (three of engine, two of
# second-place), four of 8 (ours and bitsandbytes'), rounded up.
BYTES_HELD_PER_ELEMENT: Final = 52
REFERENCE: Final = "reference"


class Case(StrEnum):
    """What is computed."""

    PLAIN_FP32 = "plain-fp32"
    ENGINE = "engine"
    SECOND_PLACE = "second-place"
    EIGHT_BIT = "8bit"


# What a case must read and write at the least, by LoHan's formats; every system's bandwidth is counted so.
BYTES_PER_ELEMENT: Final = {
    Case.PLAIN_FP32: 28.0,  # gradient 4; master, first and second moment 8 each
    Case.ENGINE: 26.0,  # gradient 2; weights and remainder 4 each; moments 8 each
    Case.SECOND_PLACE: 26.0,  # as in place, if nothing of the new place is read
    Case.EIGHT_BIT: 14.0 + 16 / 256,  # gradient 2; weights and remainder 4 each; moments 2 each; two fp32 scales for each 256, in and out
}
REFERENCE_BYTES_PER_ELEMENT: Final = 28.0
# torch has no 8-bit AdamW: what its users would run for the job is its path with fp32 moments.
# Nor does it write to another place.
TORCH_CASE: Final = {
    Case.PLAIN_FP32: Case.PLAIN_FP32,
    Case.ENGINE: Case.ENGINE,
    Case.SECOND_PLACE: Case.ENGINE,
    Case.EIGHT_BIT: Case.ENGINE,
}


@dataclass(frozen=True)
class Job:
    """One call is one step of one system over all elements."""

    system: str
    case: Case
    step: Callable[[], object]

    @property
    def name(self) -> str:
        return f"{self.system} {self.case}"


def choose_elements(wanted: int | None, available_bytes: int) -> int:
    """The number of elements to measure with.

    Args:
        wanted: by the user; None takes `DEFAULT_ELEMENTS`, or what half of the free memory holds where that is less.
        available_bytes: of memory that is free.

    Raises:
        CapacityError: the memory does not hold `wanted`.
    """
    if wanted is None:
        return max(1, min(DEFAULT_ELEMENTS, available_bytes // (2 * BYTES_HELD_PER_ELEMENT)))
    need_bytes = wanted * BYTES_HELD_PER_ELEMENT
    if need_bytes > available_bytes:
        raise CapacityError(
            f"{format_count(wanted)} elements need {format_bytes(need_bytes)} of memory for all systems, "
            f"{format_bytes(available_bytes)} are free",
            need_bytes=need_bytes,
            have_bytes=available_bytes,
            place="--elements",
            remedy=f"Give --elements {available_bytes // (2 * BYTES_HELD_PER_ELEMENT)} or fewer.",
        )
    return wanted


def run(*, elements: int | None, rounds: int, threads: int, watcher: Watcher) -> list[Record]:
    """Measure every system on the same arrays, in turns.

    Args:
        elements: see `choose_elements`.
        rounds: counted rounds; one more is a warm-up.
        threads: of every system; 0 takes one for each CPU this process may use.

    Raises:
        CapacityError: the memory does not hold the arrays.
    """
    import torch

    from lohan.bench import peers
    from lohan.bench.adam_arrays import Arrays

    count = choose_elements(elements, psutil.virtual_memory().available)
    pool = ThreadPool(threads)
    before = torch.get_num_threads()
    torch.set_num_threads(pool.threads)
    try:
        arrays = Arrays.allocate(count)
        jobs, skipped = peers.jobs(arrays, watcher)
        jobs = [*_lohan_jobs(arrays, pool), *jobs]
        calls: dict[str, Callable[[], object]] = {job.name: job.step for job in jobs}
        calls[REFERENCE] = lambda: read_modify_write(*arrays.reference, arrays.gradient, pool=pool)
        seconds = interleaved(calls, rounds=rounds, watcher=watcher)
    finally:
        torch.set_num_threads(before)
    return [*make_records(jobs, seconds, elements=count, threads=pool.threads), *skipped]


def _lohan_jobs(arrays: Arrays, pool: ThreadPool) -> list[Job]:
    segments = [AdamSegment(0, arrays.elements, step=1, **arrays.HYPERPARAMETERS)]

    def job(case: Case) -> Job:
        gradient = arrays.gradient if case is Case.PLAIN_FP32 else arrays.half_gradient
        state, out = arrays.state(case), arrays.second_place() if case is Case.SECOND_PLACE else None
        return Job("lohan", case, lambda: adamw_update(segments, gradient, state, out=out, pool=pool))

    return [job(case) for case in Case]


def make_records(jobs: Sequence[Job], seconds: dict[str, list[float]], *, elements: int, threads: int) -> list[Record]:
    """Records from the seconds of each job (by its name) and of the bandwidth reference."""
    rates = {name: elements / median(values) for name, values in seconds.items()}
    reference_bytes_per_second = rates[REFERENCE] * REFERENCE_BYTES_PER_ELEMENT
    instruction_set = _widest_instruction_set()
    records = []
    for job in jobs:
        rate, torch_rate, engine_rate = rates[job.name], rates.get(f"torch {TORCH_CASE[job.case]}"), rates.get(f"lohan {Case.ENGINE}")
        record: Record = {
            "system": job.system,
            "case": str(job.case),
            "elements": elements,
            "threads": threads,
            "instruction_set": instruction_set if job.system == "lohan" else None,
            "elements_per_second": rate,
            "ratio_to_torch_fused": None if torch_rate is None else rate / torch_rate,
            "memory_bandwidth_fraction": rate * BYTES_PER_ELEMENT[job.case] / reference_bytes_per_second,
            "seconds_all": seconds[job.name],
        }
        if job.system == "lohan" and job.case in (Case.SECOND_PLACE, Case.EIGHT_BIT) and engine_rate is not None:
            record["ratio_to_engine"] = rate / engine_rate
        records.append(record)
    records.append(
        {
            "system": REFERENCE,
            "case": "read-modify-write",
            "elements": elements,
            "threads": threads,
            "elements_per_second": rates[REFERENCE],
            "bytes_per_second": reference_bytes_per_second,
            "memory_bandwidth_fraction": 1.0,
            "seconds_all": seconds[REFERENCE],
        }
    )
    return records


def _widest_instruction_set() -> str:
    widest: InstructionSet = available_instruction_sets()[-1]
    return widest.name.lower()
