"""`python -m benchmarks.step_gpu [PART ...]`: the recorded comparison of whole training steps on a machine with a GPU.

Each part is one `lohan bench step`, whose records are joined to those of the others in benchmarks/results/step.json, so that parts may be
run one at a time, in any order, and again. Without a part all are run; `list` says what they are and how long each takes, by the arithmetic
of `Part.seconds`. Llamas of 3.43 and 6.7 billion parameters, 1024 tokens a row, bf16, split states, no durability, 24 GiB of the GPU,
torch's own kernels: what is compared are schedules and tiers, with the same computing on any machine.
Needs 100 GiB of free host memory, 43 GiB in the folder on a drive and, for the 6.7b part, a /dev/shm of 80 GiB.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from lohan.bench.step_shapes import SHAPES, ShapeName
from lohan.units import format_duration

# Seconds that starting Python, torch and CUDA takes, and measuring a block at the end.
PROCESS_SECONDS = 20
# Bytes a second that states are assumed to be made and moved with, reads and writes together, and a step's least seconds by its rows.
BYTES_PER_SECOND = MappingProxyType({"ram": 60e9, "tmpfs": 10e9, "disk": 2e9})
LEAST_SECONDS = MappingProxyType({1: 1.0, 8: 2.5, 32: 4.0})
SETUP_BYTES_PER_SECOND = MappingProxyType({"ram": 2e9, "tmpfs": 3e9, "disk": 2e9})
MOVED_BYTES_PER_PARAMETER = 28
# Of new files only master weights are written; moments begin as zeros that take no writing on a drive.
SETUP_BYTES_PER_PARAMETER = MappingProxyType({"ram": 12, "tmpfs": 12, "disk": 4})


@dataclass(frozen=True)
class Part:
    """One comparison."""

    tier: str
    batch: int
    schedules: tuple[str, ...]
    steps: int
    """Timed; one more is a warm-up."""
    shape: ShapeName = ShapeName.LLAMA_3_43B
    gpu_cap: str = "24G"
    host_cap: str | None = None

    def arguments(self, directory: Path, output: Path) -> list[str]:
        """Of `lohan bench step`."""
        found = ["--shape", str(self.shape), "--states-tier", self.tier, "--batch", str(self.batch), "--sequence", "1024"]
        found += [argument for schedule in self.schedules for argument in ("--schedule", schedule)]
        found += ["--steps", str(self.steps), "--gpu-cap", self.gpu_cap, "--device", "cuda", "--kernels", "torch"]
        found += ["--host-cap", self.host_cap] if self.host_cap else []
        return [*found, "--directory", str(directory), "--output", str(output), "--append"]

    @property
    def seconds(self) -> float:
        """An estimate: a set-up for each schedule, then its steps one after the other."""
        parameters = SHAPES[self.shape].parameters
        setup = PROCESS_SECONDS + SETUP_BYTES_PER_PARAMETER[self.tier] * parameters / SETUP_BYTES_PER_SECOND[self.tier]
        step = max(LEAST_SECONDS[self.batch], MOVED_BYTES_PER_PARAMETER * parameters / BYTES_PER_SECOND[self.tier])
        return len(self.schedules) * (setup + (1 + self.steps) * step)


# The two whose ratio is asked for first: where the machine holds two of them, these take steps in turns.
ALL = ("serial", "optimized", "naive")
PARTS = MappingProxyType(
    {
        "ram-8": Part("ram", 8, ALL, steps=3),
        "ram-32": Part("ram", 32, ALL, steps=3),
        "tmpfs-8": Part("tmpfs", 8, ALL, steps=3),
        "tmpfs-32": Part("tmpfs", 32, ALL, steps=3),
        "disk-8": Part("disk", 8, ALL, steps=1),
        "disk-32": Part("disk", 32, ("optimized",), steps=1),
        "large-tmpfs": Part("tmpfs", 8, ("optimized",), steps=2, shape=ShapeName.LLAMA_6_7B),
        "small-disk": Part("disk", 1, ("optimized",), steps=1, gpu_cap="4G", host_cap="8G"),
    }
)


def main(arguments: list[str] | None = None) -> int:
    """Run the named parts; returns the first exit status that is not 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step_gpu", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"list, or any of {', '.join(PARTS)}; none means all")
    parser.add_argument("--directory", type=Path, default=Path(), help="a folder on the drive that tier disk measures (%(default)s)")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "step.json", help="%(default)s")
    parsed = parser.parse_args(arguments)
    if parsed.parts == ["list"]:
        for name, part in PARTS.items():
            print(f"{name:12} {format_duration(part.seconds):>12}  lohan bench step {' '.join(part.arguments(Path('D'), Path('FILE')))}")
        print(f"{'all':12} {format_duration(sum(part.seconds for part in PARTS.values())):>12}")
        return 0
    unknown = [name for name in parsed.parts if name not in PARTS]
    if unknown:
        parser.error(f"there is no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    for name in parsed.parts or PARTS:
        command = [sys.executable, "-m", "lohan.cli", "bench", "step", *PARTS[name].arguments(parsed.directory, parsed.output)]
        status = subprocess.run(command, check=False).returncode
        if status:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
