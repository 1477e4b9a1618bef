"""`python -m benchmarks.gpu_check`: does the engine compute on this GPU what plain PyTorch computes, and how fast is a step?

One call does everything: parity in fp32 (TF32 off) and bf16, in the debug mode that fills released slots with NaN and delays the copy
streams, then a 1.1B Llama for a few steps under a memory cap. Writes benchmarks/results/gpu_check.json, prints a table, and exits with 1
if a comparison failed. Needs a CUDA build of torch (2.11 or later); about 3 minutes and 16 GB in each states folder.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# For the repeatability check; read by cuBLAS when it is first used.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from tests.engine import reference
from transformers import LlamaConfig

import lohan
from lohan.bench.records import document, write_document
from lohan.bench.step_model import PooledWeights
from lohan.config import Precision
from lohan.streaming.parameters import DebugMode
from lohan.units import GIB, format_bytes

CHECK_STEPS = 20
SHAPES: dict[str, dict[str, int]] = {
    "1.1B": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4},
    "toy": {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4},
}
CAP_BYTES = 24 * GIB
DEVICE = "cuda"
Record = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__)
    parser.add_argument("--states", type=Path, action="append", default=None, help="states folder of the 1.1B run; may be repeated")
    parser.add_argument("--steps", type=int, default=4, help="steps of the 1.1B run")
    parser.add_argument("--batch", type=int, default=16, help="rows of 1024 tokens of the 1.1B run")
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=1024, help="tokens of a row of the 1.1B run")
    parser.add_argument("--shape", choices=SHAPES, default="1.1B")
    parser.add_argument("--only", choices=["parity", "steps"], help="leave the other part out")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu tries this script itself where there is no GPU")
    arguments = parser.parse_args()
    global DEVICE
    DEVICE = arguments.device
    if DEVICE == "cuda" and not torch.cuda.is_available():
        sys.stderr.write("gpu_check: torch sees no CUDA device; install a CUDA build of torch, or run it where a GPU is.\n")
        return 2
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    records: list[Record] = []
    if arguments.only != "steps":
        records += [_guarded(name, check) for name, check in CHECKS.items()]
    if arguments.only != "parity":
        for folder in arguments.states or [Path(tempfile.gettempdir()) / "lohan-gpu-check", Path("/dev/shm/lohan-gpu-check")]:  # noqa: S108
            records.append(_guarded(f"{arguments.shape} bf16, states in {folder}", lambda folder=folder: _steps(folder, arguments)))
    path = Path(__file__).parent / "results" / "gpu_check.json"
    write_document(path, document("gpu_check", records))
    sys.stdout.write(json.dumps(records, indent=1) + "\n")
    _print_table(records)
    sys.stdout.write(f"torch {torch.__version__}, {_device_name()}, written to {path}\n")
    return 0 if all(record["passed"] for record in records) else 1


def _guarded(name: str, check: Callable[[], Record]) -> Record:
    """One record, whatever happens: a check that breaks must not hide the others."""
    begin = time.perf_counter()
    sys.stdout.write(f"{name} …\n")
    sys.stdout.flush()
    try:
        record = check()
    except Exception as error:  # noqa: BLE001 - it becomes the record
        traceback.print_exc()
        record = {"passed": False, "error": f"{type(error).__name__}: {error}"[:500]}
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
    return {"check": name, "device": _device_name(), "seconds": round(time.perf_counter() - begin, 2), **record}


def _device_name() -> str:
    return torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"


def _finish_device_work() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


# ---------------------------------------------------------------- parity
def _compare(
    *,
    precision: Precision = Precision.FP32,
    tied: bool = False,
    model_options: dict[str, Any] | None = None,
    batch_options: dict[str, Any] | None = None,
    frozen: Sequence[str] = (),
    steps: int = CHECK_STEPS,
    loss_tolerance: float = 1e-6,
    weight_tolerance: float = 1e-4,
    **options: Any,
) -> Record:
    """Train twice on the GPU and compare losses and the way the weights went."""
    model = reference.make_llama(tied=tied, **(model_options or {}))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(tuple(frozen)) if frozen else True)
    batches = reference.make_batches(steps, padded=True, **(batch_options or {}))
    plain_model = reference.twin(model).to(DEVICE)
    if precision is Precision.BF16:
        plain = reference.train_plain_bf16(plain_model, batches)
    else:
        with reference.block_slices(plain_model, options.get("micro_batch_size", 2)):
            plain = reference.train_plain(plain_model, batches)
    streamed = _streamed(model, batches, precision=precision, **options)
    loss_error = max(abs(ours - theirs) / abs(theirs) for ours, theirs in zip(streamed.losses, plain.losses, strict=True))
    weight_error = reference.relative_difference(streamed, plain)
    norm_error = max(abs(a - b) / b for a, b in zip(streamed.squared_norms, plain.squared_norms, strict=True))
    return {
        "passed": loss_error <= loss_tolerance and weight_error < weight_tolerance,
        "steps": steps,
        "loss_error": loss_error,
        "loss_tolerance": loss_tolerance,
        "weight_error": weight_error,
        "weight_tolerance": weight_tolerance,
        "squared_norm_error": norm_error,
        "first_loss": streamed.losses[0],
        "last_loss": streamed.losses[-1],
    }


def _streamed(model: torch.nn.Module, batches: Sequence[reference.Batch], **options: Any) -> reference.Outcome:
    with tempfile.TemporaryDirectory() as folder:
        return reference.train_streamed(model, batches, Path(folder), device=DEVICE, threads=0, **options)


def _wide(**options: Any) -> Record:
    """Units of 13 MB: copies take long enough that a missing wait between streams would show."""
    return _compare(
        model_options={"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6, "num_attention_heads": 8},
        batch_options={"batch": 8, "length": 128},
        batch_size=8,
        seq_length=128,
        chunk_parameters=1024 * 1024,
        steps=6,
        **options,
    )


def _repeated() -> Record:
    """Two runs of the engine with deterministic kernels, and one more with other slots and the debug mode: equal bit for bit."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        variants: list[dict[str, Any]] = [{}, {}, {"slots": 2, "debug": DebugMode.NAN_FILL}]
        batches = reference.make_batches(5, padded=True)
        outcomes = [_streamed(reference.make_llama(tied=True, attention="eager"), batches, **options) for options in variants]
    finally:
        torch.use_deterministic_algorithms(False)
    first = outcomes[0]
    equal = [
        outcome.losses == first.losses and all(torch.equal(outcome.after[name], first.after[name]) for name in first.after)
        for outcome in outcomes
    ]
    return {"passed": all(equal), "steps": 5, "equal": equal}


DEBUG = {"debug": DebugMode.NAN_FILL}
CHECKS: dict[str, Callable[[], Record]] = {
    "fp32": lambda: _compare(),
    "fp32 tied, debug": lambda: _compare(tied=True, **DEBUG),
    "fp32 2 slots, debug": lambda: _compare(slots=2, micro_batch_size=3, **DEBUG),
    "fp32 dropout, debug": lambda: _compare(model_options={"attention_dropout": 0.2, "attention": "eager"}, **DEBUG),
    "fp32 frozen, debug": lambda: _compare(frozen=["model.embed_tokens", "model.layers.1"], **DEBUG),
    "fp32 wide": lambda: _wide(),
    "fp32 wide tied, debug": lambda: _wide(tied=True, **DEBUG),
    "bf16": lambda: _compare(precision=Precision.BF16, loss_tolerance=1e-3, weight_tolerance=0.2),
    "bf16 tied, debug": lambda: _compare(precision=Precision.BF16, tied=True, loss_tolerance=1e-3, weight_tolerance=0.2, **DEBUG),
    "bitwise repeatable": _repeated,
}


# ---------------------------------------------------------------- steps
def _steps(folder: Path, arguments: argparse.Namespace) -> Record:
    """A few steps of a 1.1B Llama; the first one includes warming up."""
    config = LlamaConfig(**SHAPES[arguments.shape], vocab_size=32000, max_position_embeddings=2048)
    batch, length = arguments.batch, arguments.sequence
    if DEVICE == "cuda":
        torch.cuda.set_per_process_memory_fraction(min(1.0, CAP_BYTES / torch.cuda.get_device_properties(0).total_memory))
        torch.cuda.reset_peak_memory_stats()
    model = lohan.empty_model(config, dtype=torch.bfloat16)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    seconds: list[dict[str, float]] = []
    try:
        begin = time.perf_counter()
        session = lohan.init(
            model,
            optimizer,
            batch_size=batch,
            seq_length=length,
            micro_batch_size=arguments.micro_batch,
            device=DEVICE,
            precision=Precision.BF16,
            state_directories=[folder],
            weights=PooledWeights(model, torch.bfloat16),
        )
        load_seconds = time.perf_counter() - begin
        with session:
            tokens = torch.randint(0, config.vocab_size, (batch, length), device=DEVICE)
            losses = []
            for _ in range(arguments.steps):
                before = session.statistics
                seconds.append(_time_step(model, session, tokens, losses))
            after = session.statistics
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if DEVICE == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0)
    step_seconds = sorted(step["step"] for step in seconds[1:])[(len(seconds) - 1) // 2]
    matrices = parameters - config.vocab_size * config.hidden_size  # the embedding multiplies nothing
    flops = 3 * (2 * matrices + 2 * config.num_hidden_layers * length * config.hidden_size) * batch * length
    moved = after.bytes_read + after.bytes_written - before.bytes_read - before.bytes_written
    return {
        "passed": all(loss == loss for loss in losses) and losses[-1] < losses[0],
        "system": "lohan",
        "parameters": parameters,
        "batch": batch,
        "micro_batch": arguments.micro_batch,
        "sequence": length,
        "precision": "bf16",
        "states": "fp32",
        "states_tier": "tmpfs" if folder.is_relative_to("/dev/shm") else "disk",  # noqa: S108
        "durability": "none",
        "policy": "recompute-all",
        "gpu_cap_bytes": CAP_BYTES,
        "load_seconds": load_seconds,
        "step_seconds": step_seconds,
        "step_seconds_all": seconds,
        "tflops": flops / step_seconds / 1e12,
        "gpu_peak_bytes": after.device_peak_bytes,
        "gpu_reserved_bytes": torch.cuda.max_memory_reserved() if DEVICE == "cuda" else 0,
        "host_peak_bytes": after.host_peak_bytes,
        "disk_bytes_per_second": moved / seconds[-1]["step"],
        "losses": losses,
    }


def _time_step(model: torch.nn.Module, session: lohan.Session, tokens: torch.Tensor, losses: list[float]) -> dict[str, float]:
    """Seconds of one step's parts; `wait` is what the updates need after the backward."""
    marks = [time.perf_counter()]
    loss = model(input_ids=tokens, labels=tokens).loss
    _finish_device_work()
    marks.append(time.perf_counter())
    loss.backward()  # type: ignore[no-untyped-call]
    _finish_device_work()
    marks.append(time.perf_counter())
    session.wait()
    marks.append(time.perf_counter())
    losses.append(loss.item())
    return {"forward": marks[1] - marks[0], "backward": marks[2] - marks[1], "wait": marks[3] - marks[2], "step": marks[3] - marks[0]}


def _print_table(records: Sequence[Record]) -> None:
    lines = [f"{'check':44} {'result':7} {'seconds':>8}  measured"]
    for record in records:
        if "error" in record:
            measured = record["error"].splitlines()[0][:90]
        elif "step_seconds" in record:
            last = record["step_seconds_all"][-1]
            measured = (
                f"step {record['step_seconds']:.2f} s "
                f"(forward {last['forward']:.2f}, backward {last['backward']:.2f}, wait {last['wait']:.2f}), "
                f"{record['tflops']:.0f} TFLOPS, files {record['disk_bytes_per_second'] / 1e9:.1f} GB/s, "
                f"peak GPU {format_bytes(record['gpu_peak_bytes'])}, host {format_bytes(record['host_peak_bytes'])}"
            )
        elif "loss_error" in record:
            measured = (
                f"loss {record['loss_error']:.1e} (allowed {record['loss_tolerance']:.0e}), "
                f"weights {record['weight_error']:.1e} (allowed {record['weight_tolerance']:.0e})"
            )
        else:
            measured = f"equal: {record.get('equal')}"
        lines.append(f"{record['check']:44} {'ok' if record['passed'] else 'FAILED':7} {record['seconds']:8.1f}  {measured}")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
