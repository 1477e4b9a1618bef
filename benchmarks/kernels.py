"""`python -m benchmarks.kernels`: how fast one Llama block is with each kernel set, and each fused operator by itself.

All sets take turns, so that a GPU that speeds up or slows down does so for all. A pass is timed on the device, among others that follow it
without a wait; the median of the turns counts, and how far they lie apart. TFLOPS are three times the forward's FLOPs over the seconds of
forward and backward. On an H200 the whole takes less than a minute, most of it for compiling. `--tiny` runs on a CPU too.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from lohan.bench.records import Record, document, median, write_document
from lohan.bench.step_model import make_config, one_block
from lohan.bench.step_shapes import SHAPES, TRAINING_TO_FORWARD, Shape, ShapeName, block_forward_flops
from lohan.config import KernelSet
from lohan.models import kernel_formulas
from lohan.models.kernel_operators import OPERATORS
from lohan.models.kernels import install_kernels, why_unusable

_SHAPES = (ShapeName.LLAMA_3_43B, ShapeName.LLAMA_6_7B)
_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class Size:
    """What is measured, and how often."""

    shape: Shape
    rows: int
    length: int
    turns: int
    passes: int
    """In a row, in each turn."""


@dataclass(frozen=True, slots=True)
class Subject:
    """Something with a forward and a backward; `inputs` want gradients."""

    run: Callable[[], tuple[torch.Tensor, ...]]
    inputs: tuple[torch.Tensor, ...]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a block of 64 numbers a token: to try the command, on a CPU too")
    parser.add_argument("--output", type=Path, help="write the records to this JSON file")
    parser.add_argument("--kernels", action="append", choices=[*KernelSet], help="only this set; may be repeated")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not arguments.tiny:
        sys.stderr.write("kernels: torch sees no CUDA device; --tiny tries the command on a CPU.\n")
        return 2
    console = Console(stderr=True)
    every = [kernels for kernels in KernelSet if kernels is not KernelSet.AUTO and (not arguments.kernels or kernels in arguments.kernels)]
    sets = [kernels for kernels in every if not why_unusable(kernels, device)]
    records: list[Record] = [
        {"kernels": str(kernels), "skipped": why_unusable(kernels, device)} for kernels in every if kernels not in sets
    ]
    begin = time.perf_counter()
    for name in (ShapeName.TINY,) if arguments.tiny else _SHAPES:
        size = Size(SHAPES[name], 2, 32, turns=3, passes=1) if arguments.tiny else Size(SHAPES[name], 8, 1024, turns=7, passes=5)
        console.print(f"{name}: {size.rows} x {size.length} tokens of {size.shape.hidden}, {time.perf_counter() - begin:.0f} s")
        records += [{**_about(name, size, device), **record} for record in measure(size, sets, device)]
    _print_table(records)
    if arguments.output is not None:
        write_document(arguments.output, document("kernels", records))
    return 0


def measure(size: Size, sets: Sequence[KernelSet], device: torch.device) -> list[Record]:
    """A record for each set and subject."""
    records = []
    for what, make in {"block": _block, "rms_norm": _rms_norm, "swiglu": _swiglu, "rotary": _rotary}.items():
        subjects = {kernels: make(size, kernels, device) for kernels in sets}
        flops = TRAINING_TO_FORWARD * block_forward_flops(size.shape, size.rows, size.length) if what == "block" else None
        records += _compare(what, subjects, size, device, flops)
        del subjects
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return records


def _compare(what: str, subjects: dict[KernelSet, Subject], size: Size, device: torch.device, flops: int | None) -> list[Record]:
    first, peak = {}, {}
    for kernels, subject in subjects.items():
        begin = time.perf_counter()
        _both(subject)
        _wait(device)
        first[kernels] = time.perf_counter() - begin
        peak[kernels] = _peak_bytes(subject, device)
    seconds: dict[KernelSet, list[float]] = {kernels: [] for kernels in subjects}
    forward: dict[KernelSet, list[float]] = {kernels: [] for kernels in subjects}
    names = list(subjects)
    for turn in range(size.turns):
        for kernels in names[turn % len(names) :] + names[: turn % len(names)]:
            subject = subjects[kernels]
            forward[kernels].append(_seconds(subject.run, size.passes, device))
            seconds[kernels].append(_seconds(partial(_both, subject), size.passes, device))
    return [
        {
            "what": what,
            "kernels": str(kernels),
            "forward_seconds": median(forward[kernels]),
            "seconds": median(seconds[kernels]),
            "spread": (max(seconds[kernels]) - min(seconds[kernels])) / median(seconds[kernels]),
            "tflops": None if flops is None else flops / median(seconds[kernels]) / 1e12,
            "first_seconds": first[kernels],
            "peak_bytes": peak[kernels],
        }
        for kernels in names
    ]


def _both(subject: Subject) -> None:
    """Forward and backward; gradients are given back."""
    outputs = subject.run()
    torch.autograd.grad(outputs, subject.inputs, [torch.ones_like(output) for output in outputs])


def _seconds(run: Callable[[], Any], passes: int, device: torch.device) -> float:
    """Of one pass, after one that does not count."""
    run()
    if device.type != "cuda":
        begin = time.perf_counter()
        for _ in range(passes):
            run()
        return (time.perf_counter() - begin) / passes
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(passes):
        run()
    end.record()
    torch.cuda.synchronize(device)
    elapsed: float = start.elapsed_time(end)
    return elapsed / 1e3 / passes


def _peak_bytes(subject: Subject, device: torch.device) -> int | None:
    """What a forward and its backward take beyond weights and inputs; unknown on a CPU."""
    if device.type != "cuda":
        return None
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    _both(subject)
    return torch.cuda.max_memory_allocated(device) - before


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _random(*sizes: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(sizes, device=device, dtype=torch.bfloat16, generator=generator).requires_grad_()


def _block(size: Size, kernels: KernelSet, device: torch.device) -> Subject:
    block, rotary = one_block(make_config(size.shape, size.length), device, torch.bfloat16)
    install_kernels(block, kernels)
    hidden = _random(size.rows, size.length, size.shape.hidden, device=device)
    positions = rotary(hidden, torch.arange(size.length, device=device)[None])

    def run() -> tuple[torch.Tensor, ...]:
        output = block(hidden, position_embeddings=positions)
        return (output[0] if isinstance(output, tuple) else output,)

    return Subject(run, (hidden, *block.parameters()))


def _rms_norm(size: Size, kernels: KernelSet, device: torch.device) -> Subject:
    hidden, weight = _random(size.rows, size.length, size.shape.hidden, device=device), _random(size.shape.hidden, device=device)
    fused = partial(OPERATORS.rms_norm, kernels=str(kernels))
    return Subject(lambda: _function(kernels, kernel_formulas.rms_norm, fused)(hidden, weight, _EPSILON)[:1], (hidden, weight))


def _swiglu(size: Size, kernels: KernelSet, device: torch.device) -> Subject:
    gate, up = (_random(size.rows, size.length, size.shape.intermediate, device=device) for _ in range(2))
    fused = partial(OPERATORS.swiglu, kernels=str(kernels))
    return Subject(lambda: (_function(kernels, kernel_formulas.swiglu, fused)(gate, up),), (gate, up))


def _rotary(size: Size, kernels: KernelSet, device: torch.device) -> Subject:
    shape = size.shape
    query = _random(size.rows, size.length, shape.heads, shape.head_size, device=device)
    key = _random(size.rows, size.length, shape.key_value_heads, shape.head_size, device=device)
    angles = _random(1, size.length, shape.head_size // 2, device=device).detach().repeat(1, 1, 2)
    cosines, sines = angles.cos(), angles.sin()
    fused = partial(OPERATORS.rotary, kernels=str(kernels))

    def run() -> tuple[torch.Tensor, ...]:
        rotate = _function(kernels, kernel_formulas.rotary, fused)
        turned: tuple[torch.Tensor, ...] = rotate(query.transpose(1, 2), key.transpose(1, 2), cosines, sines)
        return turned

    return Subject(run, (query, key))


def _function(kernels: KernelSet, plain: Callable[..., Any], fused: Callable[..., Any]) -> Callable[..., Any]:
    """With torch's own operators a stretch is what autograd makes of its formula."""
    return plain if kernels is KernelSet.TORCH else fused


def _about(name: ShapeName, size: Size, device: torch.device) -> Record:
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {"shape": str(name), "rows": size.rows, "sequence": size.length, "precision": "bf16", "device": where}


def _print_table(records: Sequence[Record]) -> None:
    table = Table("shape", "what", "kernels", "forward ms", "forward + backward ms", "spread %", "TFLOPS", "peak MB", "first pass s")
    for record in records:
        if "skipped" in record:
            table.add_row("", "", record["kernels"], record["skipped"])
            continue
        table.add_row(
            record["shape"],
            record["what"],
            record["kernels"],
            f"{record['forward_seconds'] * 1e3:.3f}",
            f"{record['seconds'] * 1e3:.3f}",
            f"{record['spread'] * 100:.1f}",
            "" if record["tflops"] is None else f"{record['tflops']:.0f}",
            "" if record["peak_bytes"] is None else f"{record['peak_bytes'] / 1e6:.0f}",
            f"{record['first_seconds']:.1f}",
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    sys.exit(main())
