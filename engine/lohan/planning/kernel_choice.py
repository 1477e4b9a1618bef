"""Which kernel set a run computes its blocks with: what was asked for, or the fastest that was measured. Pure arithmetic, no torch."""

from __future__ import annotations

import math

from lohan.config import EngineSection, KernelSet, TrainingSection
from lohan.hardware.profile import BlockTimes, HardwareProfile
from lohan.planning.workload import Workload


def choose_kernels(workload: Workload, training: TrainingSection, engine: EngineSection, profile: HardwareProfile | None) -> KernelSet:
    """The set for a run. `auto`, which leaves it to the run itself, only where none was measured with this model and precision."""
    if engine.kernels is not KernelSet.AUTO or profile is None:
        return engine.kernels
    seconds: dict[KernelSet, float] = {}
    for kernels in KernelSet:
        times = nearest_times(workload, training, kernels, profile, training.batch_size)
        if times is not None:
            passes = times.forward_seconds.value + times.backward_seconds.value
            seconds[kernels] = passes / (times.rows * times.sequence_length)
    return min(seconds, key=seconds.__getitem__, default=KernelSet.AUTO)


def nearest_times(
    workload: Workload, training: TrainingSection, kernels: KernelSet, profile: HardwareProfile, rows: int
) -> BlockTimes | None:
    """The measured times of the workload's block that come nearest to these rows, and the run's tokens; None where there are none."""
    wanted = (workload.digest, kernels.value, str(training.precision))
    known = [times for times in profile.blocks if (times.workload_digest, times.kernels, times.precision) == wanted]

    def distance(times: BlockTimes) -> float:
        return abs(math.log(times.rows / rows)) + abs(math.log(times.sequence_length / training.sequence_length))

    return min(known, key=distance, default=None)
