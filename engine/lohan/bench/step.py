"""`lohan bench step`: whole training steps of a randomly initialised Llama on random tokens, setting beside setting.

Each setting runs in a process of its own (`step_worker`), whose memory peaks are its alone; settings that differ in nothing but what they
keep of activations take turns in one (`step_shared`), which is set up once and counts each one's peaks by itself. A step's time is that
from the end of one backward to the end of the next, in steps that follow each other without a wait, as in a run: what an update takes
beyond its step shows in the next one's forward. Settings of one tier and batch are compared: as many of them as the machine holds at once,
in order, are set up first and then take single steps in turns, each after one that does not count. What is left is measured after them,
step after step, and the whole in as many rounds as wanted, every other one in the opposite order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from lohan._native import IoError
from lohan.bench.records import Record, Watcher, median
from lohan.bench.step_child import Measured, StepChild
from lohan.bench.step_disk import mixed_bytes_per_second
from lohan.bench.step_options import StatesTier, StepOptions, StepSetting, StepTask
from lohan.bench.step_plans import grouped, make_task, waves
from lohan.bench.step_shapes import SHAPES, step_flops
from lohan.bench.step_shared import Seat, SharedChild
from lohan.bench.turns import Measurement, run_in_turns
from lohan.config import ActivationPolicy, Clip, KernelSet
from lohan.errors import LohanError
from lohan.hardware.probe import HardwareFacts, probe
from lohan.planning.kept_footprint import KEPT
from lohan.planning.tiers import Tier

SYSTEM: Final = "lohan"

OnMeasured = Callable[[list[Record]], object]


def run(options: StepOptions, watcher: Watcher, on_measured: OnMeasured = lambda _: None) -> list[Record]:
    """Measure every setting. What the machine does not hold, or what fails, becomes a record with the reason.

    Args:
        on_measured: is told all records there are whenever settings are done and others are not: hours on a drive may end early.

    Raises:
        StorageError: a state directory cannot be written to.
    """
    watcher.note(f"tracing the {options.shape} model")
    from lohan.bench.step_model import make_config
    from lohan.models.blocks import trace_workload

    workload = trace_workload(make_config(SHAPES[options.shape], options.sequence))
    records: list[Record] = []
    comparisons: list[_Comparison] = []
    for (tier, _), settings in itertools.groupby(options.settings, key=lambda setting: (setting.tier, setting.batch)):
        hardware = probe(options.named_directories(tier))
        tasks: list[StepTask] = []
        for setting in settings:
            try:
                tasks.append(make_task(options, setting, workload, hardware))
            except LohanError as error:
                records.append(_skipped(options, setting, str(error)))
        if tasks:
            comparisons.append(_Comparison(tasks, hardware, options, watcher))
    watcher.expect(sum(comparison.measurements for comparison in comparisons))
    for comparison in comparisons:
        before = tuple(records)
        records += comparison.measure(lambda found, before=before: on_measured([*before, *found]))  # type: ignore[misc]
    return records


class _Comparison:
    """Tasks of one tier and batch, in waves that are set up together."""

    def __init__(self, tasks: Sequence[StepTask], hardware: HardwareFacts, options: StepOptions, watcher: Watcher) -> None:
        measurements = {id(task): Measurement(task) for task in tasks}
        self._all = list(measurements.values())
        self._waves = [[[measurements[id(task)] for task in group] for group in wave] for wave in waves(grouped(tasks), hardware)]
        self._options, self._watcher = options, watcher
        # Whoever is set up once takes all steps of all rounds then.
        alone = len(self._waves) == 1
        self._rounds, self._steps = (1, options.rounds * options.steps) if alone else (options.rounds, options.steps)

    @property
    def measurements(self) -> int:
        """Steps of all, warm-up included."""
        return len(self._all) * self._rounds * (self._options.warmup + self._steps)

    def measure(self, on_measured: OnMeasured) -> list[Record]:
        """Records of all; `on_measured` is told those that are done while others are not."""
        first = self._all[0].task
        mixed: list[float] = []
        _measure_files(first.tier, first.engine.state_directories, mixed, self._watcher)
        for turn in range(self._rounds):
            for wave in self._waves if turn % 2 == 0 else reversed(self._waves):
                working = [[measurement for measurement in group if not measurement.failure] for group in wave]
                _run_in_turns(working, self._options, self._steps, self._watcher)
                on_measured(self._records([one for one in self._all if one.failure or len(one.results) == self._rounds], mixed))
        _measure_files(first.tier, first.engine.state_directories, mixed, self._watcher)
        return self._records(self._all, mixed)

    def _records(self, done: Sequence[Measurement], mixed: Sequence[float]) -> list[Record]:
        rate = median(mixed) if mixed else None
        in_turns = {id(measurement) for wave in self._waves for measurement in _of(wave) if len(_of(wave)) > 1}
        # Every child measured the same block: the least disturbed of them counts.
        peaks: dict[tuple[int, str], float] = {}
        for result in itertools.chain.from_iterable(measurement.results for measurement in done):
            block = (result["micro_batch"], result["kernels"])
            peaks[block] = max(result["block_peak_tflops"], peaks.get(block, 0.0))
        return [step_record(self._options, measurement, peaks, mixed=rate, in_turns=id(measurement) in in_turns) for measurement in done]


def _of(wave: Sequence[Sequence[Measurement]]) -> list[Measurement]:
    return list(itertools.chain.from_iterable(wave))


def _measure_files(tier: StatesTier, directories: tuple[Path, ...], mixed: list[float], watcher: Watcher) -> None:
    """Measured before and after the steps, so that neither a drive's fresh cache nor its tired one decides."""
    if tier is StatesTier.RAM:
        return
    watcher.note(f"measuring the {tier} directories")
    try:
        rate = mixed_bytes_per_second(directories)
    except IoError as error:
        watcher.note(f"the {tier} directories could not be measured: {error}")
        return
    mixed += [rate] if rate else []


def _run_in_turns(groups: Sequence[Sequence[Measurement]], options: StepOptions, steps: int, watcher: Watcher) -> None:
    """Measurements of one group share a process."""
    measured = _of(groups)
    last = last_step(options.warmup, steps, in_turns=len(measured) > 1)
    children: dict[int, Measured] = {}
    for group in groups:
        tasks = [measurement.task.model_copy(update={"warmup": options.warmup, "trace_step": last}) for measurement in group]
        shared = SharedChild(tasks, StepChild) if len(tasks) > 1 else None
        for place, (measurement, task) in enumerate(zip(group, tasks, strict=True)):
            children[id(measurement.task)] = Seat(shared, place) if shared is not None else StepChild(task)
    run_in_turns(measured, lambda task: children[id(task)], warmup=options.warmup, steps=steps, watcher=watcher)


def last_step(warmup: int, steps: int, *, in_turns: bool) -> int:
    """How many steps a child takes in all: one that does not count goes before those that follow each other."""
    if not in_turns:
        return 1 + warmup + steps
    return (1 + warmup if warmup else 0) + 2 * steps


def _settings(options: StepOptions, setting: StepSetting) -> Record:
    """The fields of a record that say what was asked for."""
    shape = SHAPES[options.shape]
    return {
        "system": SYSTEM,
        "tuned": options.micro_batch is not None,
        "schedule": str(setting.schedule),
        "policy": str(setting.policy if options.profiles is not None else ActivationPolicy.RECOMPUTE_ALL),
        "shape": str(options.shape),
        "parameters": shape.parameters,
        "batch": setting.batch,
        "micro_batch": options.micro_batch,
        "sequence": options.sequence,
        "precision": str(options.precision),
        "states": str(options.state_kind),
        "states_tier": str(setting.tier),
        "durability": str(options.durability),
        "clip": str(options.clip),
        "max_norm": options.max_norm if options.clip is not Clip.NONE else None,
        "expected_clip_rate": options.clip_rate if options.clip is Clip.GLOBAL else None,
        "kernels": _kernels(setting.kernels),
        "device": options.device,
        "gpu_cap_bytes": options.gpu_cap_bytes,
        "host_cap_bytes": options.host_cap_bytes,
        "activation_ram_bytes": options.activation_ram_bytes,
        "swapped_activation_bytes": setting.swapped_bytes,
        "gradient_buffers": str(options.gradient_buffers),
    }


def _kernels(kernels: str) -> str:
    """As records of all systems call it."""
    return "eager" if kernels == KernelSet.TORCH else str(kernels)


def _skipped(options: StepOptions, setting: StepSetting, reason: str) -> Record:
    return {**_settings(options, setting), "skipped": reason}


def step_record(
    options: StepOptions, measurement: Measurement, block_peaks: dict[tuple[int, str], float], *, mixed: float | None, in_turns: bool
) -> Record:
    """One setting's record: its medians and peaks, or why there are none.

    Args:
        block_peaks: TFLOPS of one block by itself, by micro-batch and kernel set.
        mixed: bytes a second of its directories, if measured.
        in_turns: whether its steps took turns with others'.
    """
    task = measurement.task
    engine, plan = task.engine, task.plan
    setting = StepSetting(
        engine.schedule, task.training.batch_size, task.tier, engine.policy, engine.swapped_activation_bytes, engine.kernels
    )
    if measurement.failure:
        return _skipped(options, setting, measurement.failure)
    results, steps = measurement.results, measurement.steps
    seconds = [step["seconds"] for step in steps]
    step_seconds = median(seconds)
    read, written = (int(median([result[name] for result in results])) for name in ("bytes_read", "bytes_written"))
    tflops = step_flops(SHAPES[options.shape], setting.batch, options.sequence) / step_seconds / 1e12
    block_peak = block_peaks[results[0]["micro_batch"], results[0]["kernels"]]
    on_gpu = bool(plan.tier(Tier.GPU).items)

    def peak(name: str) -> int | None:
        return max((result[name] for result in results if result[name] is not None), default=None)

    return {
        **_settings(options, setting),
        "micro_batch": results[0]["micro_batch"],
        "kernels": _kernels(results[0]["kernels"]),
        "device": "gpu" if on_gpu else "cpu",
        "clip_rate": median([result["clip_rate"] for result in results]),
        "gradient_norm": median([result["gradient_norm"] for result in results]),
        "step_seconds": step_seconds,
        "step_seconds_all": seconds,
        "setup_seconds": median(measurement.setup_seconds),
        "in_turns": in_turns,
        "tflops": tflops,
        "block_peak_tflops": block_peak,
        "fraction_of_peak": tflops / block_peak,
        "predicted_step_seconds": plan.forecast.step_seconds if plan.forecast is not None else None,
        "predicted_binding": plan.forecast.binding if plan.forecast is not None else None,
        "gpu_peak_bytes": peak("gpu_peak_bytes"),
        "gpu_allocated_peak_bytes": peak("gpu_allocated_peak_bytes"),
        "gpu_context_bytes": peak("gpu_context_bytes"),
        "plan_gpu_bytes": plan.tier(Tier.GPU).used_bytes if on_gpu else None,
        "host_peak_bytes": peak("host_peak_bytes"),
        "plan_host_bytes": plan.tier(Tier.RAM).used_bytes,
        "bytes_read_per_step": read,
        "bytes_written_per_step": written,
        "disk_bytes_per_second": (read + written) / step_seconds if read + written else None,
        "disk_mixed_bytes_per_second": mixed,
        "kept_units": plan.kept_units,
        "gradient_buffers": plan.gradient_buffers,
        "kept_activation_bytes": {str(tier.tier): sum(item.bytes for item in tier.items if item.name == KEPT) for tier in plan.tiers},
        "busy": results[-1]["busy"],
        "waits": results[-1]["waits"],
    }
