"""The CPU optimizer: `lohan._native.adamw_update` against `torch.optim.AdamW(fused=True)`, and both against the memory's own speed."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.records import interleaved, median
from lohan._native import AdamSegment, AdamState, ThreadPool, adamw_update

# 4 arrays of 200 MB: far beyond any cache, and a size that a small machine holds twice.
ELEMENTS = 50_000_000
ROUNDS = 7
# Both cases read and write 28 bytes an element: fp32 gradient, master and two moments; or bf16 gradient in and bf16 copy out.
BYTES_PER_ELEMENT = 28
COPY_BYTES_PER_ELEMENT = 8
HYPER = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "weight_decay": 0.01}


def run() -> list[dict[str, Any]]:
    threads = torch.get_num_threads()
    pool = ThreadPool(threads)
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(ELEMENTS, generator=generator)
    gradient = torch.randn(ELEMENTS, generator=generator) * 1e-3
    moments = (torch.zeros(ELEMENTS), torch.zeros(ELEMENTS))
    half_gradient, weights = gradient.bfloat16(), torch.empty(ELEMENTS, dtype=torch.bfloat16)
    parameter = torch.nn.Parameter(master.clone())
    parameter.grad = gradient.clone()
    optimizer = torch.optim.AdamW([parameter], lr=1e-4, weight_decay=0.01, fused=True)
    target = torch.empty_like(master)
    segments = [AdamSegment(offset=0, length=ELEMENTS, step=1, **HYPER)]
    state = AdamState(master=master, first_moment=moments[0], second_moment=moments[1])
    state_with_copy = AdamState(master=master, weights=weights, first_moment=moments[0], second_moment=moments[1])
    seconds = interleaved(
        {
            "torch": lambda: optimizer.step(),
            "plain-fp32": lambda: adamw_update(segments, gradient, state, pool=pool),
            "engine": lambda: adamw_update(segments, half_gradient, state_with_copy, pool=pool),
            "copy": lambda: target.copy_(master),
        },
        rounds=ROUNDS,
    )
    copy_bytes_per_second = ELEMENTS * COPY_BYTES_PER_ELEMENT / median(seconds["copy"])
    fused = ELEMENTS / median(seconds["torch"])

    def record(system: str, case: str, key: str) -> dict[str, Any]:
        rate = ELEMENTS / median(seconds[key])
        return {
            "system": system, "case": case, "threads": threads, "elements": ELEMENTS, "elements_per_second": rate,
            "ratio_to_torch_fused": rate / fused, "memory_bandwidth_fraction": rate * BYTES_PER_ELEMENT / copy_bytes_per_second,
        }  # fmt: skip

    return [record("torch", "plain-fp32", "torch"), record("lohan", "plain-fp32", "plain-fp32"), record("lohan", "engine", "engine")]
