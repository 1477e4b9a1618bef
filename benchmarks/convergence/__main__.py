"""`python -m benchmarks.convergence`: the engine and plain PyTorch fine-tune the same model on the same batches.

By default SmolLM2-135M-Instruct on the English dialogs of the chatterbot corpus, 200 steps, once with split and once with 8-bit states, and
plain PyTorch in the device's memory with the batch in 1, 2 and 4 micro-batches. The held-out loss of a run is the mean of those measured
after each of its last ten steps. Plain PyTorch's three differ by nothing but the order of sums: their largest distance is the spread, and
the engine's runs are to lie within twice the spread of their mean. Writes benchmarks/convergence/<name>.json with all curves and a chart
beside it; exits with 1 where a run lies outside.

A machine without the sample packages takes the files by path. Here: `python -m benchmarks.convergence --write-data rows.jsonl`; there:
`python -m benchmarks.convergence --model SmolLM2-135M-Instruct.Q4_1.gguf --data rows.jsonl`. (Where a transfer takes no file of 94 MiB:
`split -b 60M FILE part.` here, `cat part.* > FILE` there.)
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.chart import Panel, Series, svg
from benchmarks.convergence.data import open_corpus, sample_model, write_sample_rows
from benchmarks.convergence.runs import FINAL_STEPS, Curve, Setup, train_engine, train_plain
from lohan.bench.records import document, write_document
from lohan.config import KernelSet, Precision, States
from lohan.errors import LohanError
from lohan.streaming.device import resolve_device

MICRO_BATCHES = (1, 2, 4)
ALLOWED_SPREADS = 2.0
SMOOTHED_STEPS = 10
# Told apart by people who see few colours, too (Okabe and Ito).
LOOKS = (("#999999", ""), ("#56B4E9", "7 4"), ("#0072B2", "2 3"), ("#D55E00", ""), ("#009E73", "9 3 2 3"))


def main(arguments: list[str] | None = None) -> int:
    parsed = _parser().parse_args(arguments)
    try:
        return _run(parsed)
    except LohanError as error:
        sys.stderr.write(f"convergence: {error}\n")
        return 2


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks.convergence", description=__doc__, formatter_class=raw)
    parser.add_argument("--model", type=Path, help="a model's folder or GGUF file (the installed sample)")
    parser.add_argument("--data", type=Path, help="rows as JSONL (the installed chatterbot corpus)")
    parser.add_argument("--write-data", type=Path, metavar="FILE", help="only write the installed corpus as JSONL")
    parser.add_argument("--name", default="smollm2_135m", help="of the result's files (%(default)s)")
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent, help="where they are written (%(default)s)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (%(default)s)")
    parser.add_argument("--precision", type=Precision, choices=list(Precision), default=Precision.BF16, help="%(default)s")
    parser.add_argument("--kernels", type=KernelSet, choices=list(KernelSet), default=KernelSet.TORCH, help="of the engine (%(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="at least 10 (%(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="rows of a step, at least 4 (%(default)s)")
    parser.add_argument("--sequence", type=int, default=128, help="tokens of a row at most (%(default)s)")
    parser.add_argument("--held-out", type=int, default=128, help="rows that no system trains on (%(default)s)")
    parser.add_argument("--learning-rate", type=float, default=5e-5, help="at its peak (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the order of rows (%(default)s)")
    return parser


def _run(parsed: argparse.Namespace) -> int:
    if parsed.write_data is not None:
        write_sample_rows(parsed.write_data)
        return 0
    for name, value, least in (("--steps", parsed.steps, FINAL_STEPS), ("--batch", parsed.batch, max(MICRO_BATCHES))):
        if value < least:
            _parser().error(f"{name} is {value}, expected at least {least}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, data = parsed.model or sample_model(), parsed.data
        if data is None:
            data = folder / "rows.jsonl"
            write_sample_rows(data)
        corpus = open_corpus(
            model, data, folder, sequence=parsed.sequence, batch=parsed.batch, held_out=parsed.held_out, seed=parsed.seed
        )  # fmt: skip
        setup = Setup(model, corpus, parsed.steps, parsed.learning_rate, parsed.device, parsed.precision, parsed.seed, parsed.kernels)
        curves = [train_plain(setup, count, _say) for count in MICRO_BATCHES]
        curves += [train_engine(setup, states, _say) for states in (States.AUTO, States.EIGHT_BIT)]
    verdict = compare(curves)
    records = [{**_settings(parsed, setup), **curve.record()} for curve in curves]
    path = parsed.folder / f"{parsed.name}.json"
    write_document(path, document("convergence", [*records, verdict]))
    path.with_suffix(".svg").write_text(svg(panels(curves, verdict)), encoding="utf-8")
    _print(curves, verdict, path)
    return 0 if all(verdict["within"].values()) else 1


def _settings(parsed: argparse.Namespace, setup: Setup) -> dict[str, Any]:
    return {
        "model": parsed.name,
        "device": str(resolve_device(setup.device).type),
        "precision": str(setup.precision),
        "kernels": str(setup.kernels),
        "steps": setup.steps,
        "batch": parsed.batch,
        "sequence": parsed.sequence,
        "held_out_rows": len(setup.corpus.held_out),
        "learning_rate": setup.learning_rate,
        "seed": setup.seed,
    }


def compare(curves: Sequence[Curve]) -> dict[str, Any]:
    """The verdict as a record: how far each of the engine's runs lies from plain PyTorch's mean, and how far it may."""
    plain = [curve.final_loss for curve in curves if curve.system == "torch"]
    mean, spread = fmean(plain), max(plain) - min(plain)
    distances = {curve.states: curve.final_loss - mean for curve in curves if curve.system == "lohan"}
    allowed = ALLOWED_SPREADS * spread
    return {
        "system": "comparison",
        "plain_mean": mean,
        "plain_spread": spread,
        "allowed_distance": allowed,
        "distance": distances,
        "within": {states: abs(distance) <= allowed for states, distance in distances.items()},
    }


def panels(curves: Sequence[Curve], verdict: dict[str, Any]) -> list[Panel]:
    """Training loss, held-out loss, and the end of the latter as the distance from plain PyTorch's mean."""
    looks = list(zip(curves, LOOKS, strict=True))
    trained = [
        Series(curve.name, range(1, len(curve.losses) + 1), _smoothed(curve.losses), colour, dash) for curve, (colour, dash) in looks
    ]
    held_out = [Series(curve.name, curve.held_out_steps, curve.held_out_losses, colour, dash) for curve, (colour, dash) in looks]
    plain = [curve for curve in curves if curve.system == "torch"]
    means = [fmean(values) for values in zip(*(curve.held_out_losses[-FINAL_STEPS:] for curve in plain), strict=True)]
    distances = [
        Series(
            curve.name,
            curve.held_out_steps[-FINAL_STEPS:],
            [loss - mean for loss, mean in zip(curve.held_out_losses[-FINAL_STEPS:], means, strict=True)],
            colour,
            dash,
        )
        for curve, (colour, dash) in looks
    ]
    allowed = verdict["allowed_distance"]
    title = f"Held-out loss less plain PyTorch's mean, last {FINAL_STEPS} steps (shaded: {ALLOWED_SPREADS:g} times its spread)"
    return [
        Panel(f"Training loss (mean of {SMOOTHED_STEPS} steps)", "steps", "loss", trained),
        Panel("Held-out loss", "steps", "loss", held_out),
        Panel(title, "steps", "difference", distances, (-allowed, allowed)),
    ]


def _smoothed(losses: Sequence[float]) -> list[float]:
    return [fmean(losses[max(0, end - SMOOTHED_STEPS) : end]) for end in range(1, len(losses) + 1)]


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _print(curves: Sequence[Curve], verdict: dict[str, Any], path: Path) -> None:
    for curve in curves:
        print(f"{curve.name:32} held-out loss {curve.held_out_losses[0]:.4f} -> {curve.final_loss:.5f}")
    print(f"plain PyTorch: mean {verdict['plain_mean']:.5f}, spread {verdict['plain_spread']:.2e}")
    for states, distance in verdict["distance"].items():
        word = "within" if verdict["within"][states] else "OUTSIDE"
        print(f"LoHan with {states} states: {distance:+.2e} from the mean, {word} the allowed {verdict['allowed_distance']:.2e}")
    print(f"written to {path} and {path.with_suffix('.svg')}")


if __name__ == "__main__":
    sys.exit(main())
