"""`python -m benchmarks.peers`: training steps of RoundPipe, DeepSpeed ZeRO-3 and plain PyTorch beside LoHan's.

Same shape, batch, precision, random weights and tokens, same cap of the GPU's memory. Each system is measured tuned and as installed; what
cannot be had is a record with the reason.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.peers.comparison import PeerOptions, compare
from benchmarks.peers.settings import System
from lohan.bench import records, show
from lohan.bench.step_options import SETTING_FIELDS, StateKind, StatesTier, StepOptions
from lohan.bench.step_shapes import ShapeName
from lohan.cli.measuring import terminated_in_order
from lohan.config import Precision
from lohan.errors import LohanError
from lohan.planning.schedule import EXPECTED_CLIP_RATE
from lohan.units import parse_bytes


def main(arguments: list[str] | None = None) -> int:
    """Compare; returns the exit status."""
    parsed = _parser().parse_args(arguments)
    try:
        options = _options(parsed)
        with terminated_in_order(), show.stdout_kept_clean(), show.watcher_on_stderr() as watcher:
            measured = compare(options, watcher)
        content = records.document("peers", measured, directories=options.base.used_directories)
        if parsed.output is not None:
            key = (*SETTING_FIELDS, "compared_with", "lohan_states")
            records.write_document(parsed.output, records.appended(parsed.output, content, key=key) if parsed.append else content)
    except LohanError as error:
        sys.stderr.write(f"peers: {error}\n")
        return 2
    if parsed.json:
        sys.stdout.write(records.as_json(content))
    else:
        show.print_peers(measured)
    return 0


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__, formatter_class=raw)
    parser.add_argument("--shape", type=ShapeName, choices=list(ShapeName), default=ShapeName.LLAMA_3_43B, help="%(default)s")
    parser.add_argument("--batch", type=int, action="append", help="rows of a step; may be repeated (8 and 32)")
    parser.add_argument("--sequence", type=int, default=1024, help="tokens of a row (%(default)s)")
    parser.add_argument("--system", type=System, choices=list(System), action="append", help="beside LoHan; may be repeated (all)")
    parser.add_argument("--only", choices=["tuned", "installed"], help="leave the other kind out")
    tiers = list(StatesTier)
    parser.add_argument("--states-tier", type=StatesTier, choices=tiers, action="append", help="may be repeated (ram and tmpfs)")
    parser.add_argument("--directory", type=Path, default=Path(), help="for tier disk (%(default)s)")
    parser.add_argument("--tmpfs-directory", type=Path, default=Path("/dev/shm"), help="for tier tmpfs (%(default)s)")  # noqa: S108
    parser.add_argument("--gpu-cap", type=parse_bytes, metavar="BYTES", help="of the GPU's memory, for every system, e.g. 24G (all)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (%(default)s)")
    parser.add_argument("--precision", type=Precision, choices=list(Precision), default=Precision.BF16, help="%(default)s")
    parser.add_argument("--states", type=StateKind, choices=list(StateKind), help="of LoHan; others keep exact ones (those of --precision)")
    parser.add_argument("--max-norm", type=float, default=1.0, help="the largest that clipping leaves, of every tuned system (%(default)s)")
    parser.add_argument("--clip-rate", type=float, default=EXPECTED_CLIP_RATE, help="of steps, that LoHan's plan expects (%(default)s)")
    parser.add_argument("--profiles", type=Path, help="folder of `lohan profile`, by which LoHan's plan then goes")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each (%(default)s)")
    parser.add_argument("--warmup", type=int, default=1, help="steps before them (%(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="how often systems that do not fit together are set up (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print the document instead of the table")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the document to this file, too")
    parser.add_argument("--append", action="store_true", help="join the records to those the file holds")
    return parser


def _options(parsed: argparse.Namespace) -> PeerOptions:
    base = StepOptions(
        shape=parsed.shape,
        batches=tuple(dict.fromkeys(parsed.batch or (8, 32))),
        sequence=parsed.sequence,
        tiers=tuple(dict.fromkeys(parsed.states_tier or (StatesTier.RAM, StatesTier.TMPFS))),
        directories=(parsed.directory.absolute(),),
        tmpfs_directory=parsed.tmpfs_directory,
        gpu_cap_bytes=parsed.gpu_cap,
        device=parsed.device,
        precision=parsed.precision,
        states=parsed.states,
        max_norm=parsed.max_norm,
        clip_rate=parsed.clip_rate,
        profiles=parsed.profiles,
        steps=parsed.steps,
        warmup=parsed.warmup,
        rounds=parsed.rounds,
    )
    kinds = {"tuned": (True,), "installed": (False,)}.get(parsed.only, (True, False))
    return PeerOptions(base, tuple(dict.fromkeys(parsed.system or System)), kinds)


if __name__ == "__main__":
    sys.exit(main())
