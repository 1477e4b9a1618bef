"""`python -m benchmarks.planner [PART ...]`: what the planner says beside what this machine does.

First `lohan profile` measures the machine and a block of each shape, where that has not been done. Then each part runs `lohan bench step`
by the profile's plans, and its records are joined to those of the others in benchmarks/results/planner.json, so that parts may be run one
at a time, in any order, and again. At the end: how far forecasts lie from measurements, where the planner's choice lies among forced
amounts of swapped activations (with a chart beside the records), how other policies do, and what part of the block's peak whole steps
reach. `list` names the parts, `report` only reads.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.planner import show
from benchmarks.planner.parts import PARTS, TINY_PARTS, Machine, Part, to_profile
from benchmarks.planner.verdicts import ablations, of_peak, predictions, sweeps
from lohan.bench import records
from lohan.bench.show import stdout_kept_clean, watcher_on_stderr
from lohan.bench.step import run
from lohan.bench.step_options import SETTING_FIELDS
from lohan.bench.step_shapes import SHAPES
from lohan.cli.measuring import terminated_in_order
from lohan.config import Clip, KernelSet, Precision
from lohan.errors import LohanError
from lohan.units import parse_bytes

RESULTS = Path(__file__).parents[1] / "results"


def main(arguments: list[str] | None = None) -> int:
    """Measure and report; returns the exit status."""
    parser = _parser()
    parsed = parser.parse_args(arguments)
    parts = TINY_PARTS if parsed.tiny else PARTS
    if parsed.parts == ["list"]:
        print("\n".join(parts))
        return 0
    if parsed.parts != ["report"]:
        unknown = [name for name in parsed.parts if name not in parts]
        if unknown:
            parser.error(f"there is no part {unknown[0]!r}; there are {', '.join(parts)}, list and report")
        chosen = {name: parts[name] for name in parsed.parts or parts}
        machine = Machine(parsed.device, parsed.precision, parsed.gpu_cap, parsed.directory, parsed.tmpfs_directory, parsed.profiles)
        try:
            _profile(chosen, machine, parsed.kernels or (), quick=parsed.quick)
            _measure(chosen, machine, parsed.output)
        except LohanError as error:
            sys.stderr.write(f"planner: {error}\n")
            return 2
        except subprocess.CalledProcessError as error:  # which has said why
            return int(error.returncode)
    report(parsed.output)
    return 0


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner", description=__doc__, formatter_class=raw)
    parser.add_argument("parts", nargs="*", metavar="PART", help="list, report, or any of what list names; none means all")
    parser.add_argument("--tiny", action="store_true", help="the same questions about a tiny model, on any machine")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (%(default)s)")
    parser.add_argument("--precision", type=Precision, choices=list(Precision), default=Precision.BF16, help="%(default)s")
    parser.add_argument("--gpu-cap", type=parse_bytes, metavar="BYTES", help="of the GPU's memory, e.g. 24G (all)")
    parser.add_argument("--directory", type=Path, default=Path(), help="a folder on the drive that tier disk measures (%(default)s)")
    parser.add_argument("--tmpfs-directory", type=Path, default=Path("/dev/shm"), help="for tier tmpfs (%(default)s)")  # noqa: S108
    parser.add_argument("--profiles", type=Path, required=True, metavar="FOLDER", help="where profiles are kept")
    parser.add_argument("--quick", action="store_true", help="profile in a few seconds, roughly")
    parser.add_argument("--kernels", type=KernelSet, choices=list(KernelSet), action="append", help="to profile; may be repeated (all)")
    parser.add_argument("--output", type=Path, default=RESULTS / "planner.json", metavar="FILE", help="%(default)s")
    return parser


def _profile(parts: Mapping[str, Part], machine: Machine, kernels: Sequence[KernelSet], *, quick: bool) -> None:
    """Have every shape's block measured; what was measured before is not measured again."""
    from lohan.bench.step_model import make_config

    with tempfile.TemporaryDirectory() as name:
        for (directory, shape, sequence), rows in to_profile(parts, machine).items():
            model = Path(name, str(shape))
            make_config(SHAPES[shape], sequence).save_pretrained(model)
            command = [sys.executable, "-m", "lohan.cli", "profile", str(model), "--profiles", str(machine.profiles)]
            command += ["--device", machine.device, "--precision", str(machine.precision), "--directory", str(directory)]
            command += ["--seq", str(sequence), "--rows", ",".join(map(str, rows)), *(["--quick"] if quick else [])]
            command += [argument for name in kernels for argument in ("--kernels", str(name))]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _measure(parts: Mapping[str, Part], machine: Machine, output: Path) -> None:
    for part in parts.values():
        options = part.step_options(machine)
        with terminated_in_order(), stdout_kept_clean(), watcher_on_stderr() as watcher:
            found = run(options, watcher)
        content = records.document("planner", found, directories=options.used_directories)
        records.write_document(output, records.appended(output, content, key=SETTING_FIELDS))


def report(path: Path) -> None:
    """Print what the records in `path` say, and draw the sweeps beside them."""
    found: Sequence[records.Record] = json.loads(path.read_text(encoding="utf-8"))["records"]
    console = Console(width=160)
    chosen = [record for record in found if record["swapped_activation_bytes"] is None and record["activation_ram_bytes"] is None]
    show.print_predictions(predictions(chosen), console)
    show.print_of_peak(of_peak(found), console)
    found = [record for record in found if record["clip"] == Clip.NONE]
    swept = sweeps(found)
    show.print_sweeps(swept, console)
    show.print_ablations(ablations(found), console)
    if swept:
        path.with_suffix(".svg").write_text(show.sweep_chart(swept), encoding="utf-8")
        console.print(f"the chart is {path.with_suffix('.svg')}")


if __name__ == "__main__":
    sys.exit(main())
