"""Runs the systems beside LoHan: as many as the machine holds with it take single steps in turns; ratios are those of one run."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from benchmarks.peers.settings import TRAITS, PeerTask, System, micro_batches, reason_not_to_run
from lohan.bench import step
from lohan.bench.records import Record, Watcher, median
from lohan.bench.step_child import ChildFailed, StepChild
from lohan.bench.step_model import make_config
from lohan.bench.step_options import StatesTier, StepOptions, StepTask
from lohan.bench.step_plans import file_bytes, make_task
from lohan.bench.step_shapes import SHAPES, step_flops
from lohan.bench.turns import Measurement, run_in_turns
from lohan.config import Clip, UpdateSchedule
from lohan.errors import LohanError
from lohan.hardware.probe import HardwareFacts, probe
from lohan.models.blocks import trace_workload
from lohan.planning.fit import RAM_RESERVE_BYTES
from lohan.planning.tiers import Tier

WORKER: Final = (sys.executable, "-m", "benchmarks.peers.worker")
# A smaller micro-batch that is slower by more than this ends the search: it moves more weights for the same work.
SLOWER: Final = 1.1


@dataclass(frozen=True)
class PeerOptions:
    """What is compared."""

    base: StepOptions
    """Shape, batches, tiers, folders, caps, steps, largest norm, and LoHan's states; its schedule and clipping are not used."""
    systems: tuple[System, ...] = tuple(System)
    kinds: tuple[bool, ...] = (True, False)
    """Tuned, and as installed."""


@dataclass
class _Group:
    """LoHan and those that are measured with it."""

    ours: Measurement
    options: StepOptions
    peers: list[Measurement] = field(default_factory=list)


def compare(options: PeerOptions, watcher: Watcher) -> list[Record]:
    """Records of all systems; what could not run is one with the reason."""
    base = options.base
    workload = trace_workload(make_config(SHAPES[base.shape], base.sequence))
    records: list[Record] = []
    for tier, batch, tuned in itertools.product(base.tiers, base.batches, options.kinds):
        hardware = probe(base.named_directories(tier))
        ours = _our_options(base, tier, batch, tuned=tuned)
        try:
            task = make_task(ours, ours.settings[0], workload, hardware)
        except LohanError as error:
            records.append({"system": step.SYSTEM, **_asked(base, tier, batch, tuned=tuned), "skipped": str(error)})
            continue
        peers: list[PeerTask] = []
        for system in options.systems:
            if tier in TRAITS[system].tiers:
                peer = _peer_task(ours, system, tier, batch, device=task.plan.device, tuned=tuned)
                reason = reason_not_to_run(peer)
                if reason is None:
                    peers.append(peer)
                else:
                    records.append(_skipped(peer, reason))
        records += _compare_with(task, ours, peers, hardware, watcher)
    return records


def _our_options(base: StepOptions, tier: StatesTier, batch: int, *, tuned: bool) -> StepOptions:
    clip = Clip.GLOBAL if tuned else Clip.NONE
    changed: dict[str, Any] = {"tiers": (tier,), "batches": (batch,), "clip": clip, "schedules": (UpdateSchedule.OPTIMIZED,)}
    return StepOptions(**{**vars(base), **changed})


def _peer_task(options: StepOptions, system: System, tier: StatesTier, batch: int, *, device: str, tuned: bool) -> PeerTask:
    return PeerTask(
        system=system,
        tuned=tuned,
        shape_name=options.shape,
        tier=tier,
        batch=batch,
        sequence=options.sequence,
        precision=options.precision,
        device=device,
        gpu_cap_bytes=options.gpu_cap_bytes,
        directories=options.named_directories(tier),
        micro_batch=batch,
        variant=TRAITS[system].variants[0] if system is not System.TORCH or tuned else "keep",
        largest_norm=options.max_norm,
    )


def _compare_with(
    task: StepTask, options: StepOptions, peers: Sequence[PeerTask], hardware: HardwareFacts, watcher: Watcher
) -> list[Record]:
    records: list[Record] = []
    groups: list[_Group] = []
    for peer in peers:
        try:
            chosen = choose(peer, watcher)
        except ChildFailed as error:
            records.append(_skipped(peer, error.message))
            continue
        if not groups or not _fits(groups[-1], chosen, hardware):
            groups.append(_Group(Measurement(task), options))
        groups[-1].peers.append(Measurement(chosen))
    for group in groups or [_Group(Measurement(task), options)]:
        records += _measure(group, hardware, watcher)
    return records


def start(task: Any) -> StepChild:
    """The child of LoHan or of another system."""
    return StepChild(task, command=WORKER) if isinstance(task, PeerTask) else StepChild(task)


def choose(task: PeerTask, watcher: Watcher) -> PeerTask:
    """The task with its micro-batch: tuned the fastest by a step each, as installed the default or the largest that runs.

    Raises:
        ChildFailed: none runs; of the last.
    """
    rows = micro_batches(task.batch)
    if task.system is System.ROUNDPIPE and not task.tuned:
        rows = rows[1:] or rows  # it cuts a batch in two by default, for one GPU
    best: tuple[float, PeerTask] | None = None
    failure: ChildFailed | None = None
    for variant in TRAITS[task.system].variants if task.tuned else (task.variant,):
        left = [task.model_copy(update={"micro_batch": count, "variant": variant}) for count in rows]
        before = float("inf")
        while left:
            try:
                with start(left[0]) as child:
                    child.wait_ready()
                    while left:
                        child.use(f"{left[0].micro_batch} {left[0].variant}")
                        seconds = child.step()["seconds"]
                        watcher.note(f"{task.name}: {seconds:.3f} s with {left[0].micro_batch} rows {left[0].variant}")
                        best = min(best or (seconds, left[0]), (seconds, left[0]), key=lambda found: found[0])
                        slower, before = seconds > SLOWER * before, min(before, seconds)
                        left = [] if slower or not task.tuned else left[1:]
            except ChildFailed as error:
                failure, left = error, left[1:] if _is_memory(error) else []
    if best is None:
        assert failure is not None
        raise failure
    return best[1]


def _is_memory(error: ChildFailed) -> bool:
    """Whether fewer rows may help; any other failure would come again."""
    return "out of memory" in error.message.lower()


def _fits(group: _Group, peer: PeerTask, hardware: HardwareFacts) -> bool:
    """Whether host memory and GPU hold another system beside LoHan and those that are with it."""
    ours: StepTask = group.ours.task
    together = [*(other.task for other in group.peers), peer]
    in_files = file_bytes(ours) if ours.tier is StatesTier.TMPFS else 0
    host = ours.plan.tier(Tier.RAM).used_bytes + in_files + sum(host_bytes(task) for task in together)
    gpus = {gpu.uuid: gpu.free_bytes for gpu in hardware.gpus}
    cap = ours.engine.gpu_memory_bytes or gpus.get(peer.device, 0)
    return host + RAM_RESERVE_BYTES <= hardware.ram.free_bytes and (len(together) + 1) * cap <= gpus.get(peer.device, cap)


def host_bytes(task: PeerTask) -> int:
    """An estimate of what a system takes of host memory."""
    parameters = task.shape.parameters
    in_files = 16 * parameters if task.tier is StatesTier.TMPFS else 0
    beside = 20 * parameters if task.system is System.TORCH and task.device == "cpu" else 0
    return TRAITS[task.system].host_bytes_per_parameter * parameters + in_files + beside


def _measure(group: _Group, hardware: HardwareFacts, watcher: Watcher) -> list[Record]:
    """In turns if all fit at once; else one after the other, in rounds of alternating order."""
    options, everyone = group.options, [group.ours, *group.peers]
    first, *others = group.peers or [None]
    in_turns = first is not None and _fits(_Group(group.ours, options, others), first.task, hardware)
    for measurement in everyone:
        measurement.task = measurement.task.model_copy(update={"warmup": options.warmup})
    # As in `lohan bench step`, the last step is the one that is recorded.
    last = step.last_step(options.warmup, options.steps, in_turns=in_turns)
    group.ours.task = group.ours.task.model_copy(update={"trace_step": last})
    if in_turns:
        watcher.expect(len(everyone) * (options.warmup + options.steps))
        run_in_turns(everyone, start, warmup=options.warmup, steps=options.steps, watcher=watcher)
    else:
        watcher.expect(len(everyone) * options.rounds * (options.warmup + options.steps))
        for turn in range(options.rounds):
            for measurement in everyone if turn % 2 == 0 else reversed(everyone):
                if not measurement.failure:
                    run_in_turns([measurement], start, warmup=options.warmup, steps=options.steps, watcher=watcher)
    peaks = {(result["micro_batch"], result["kernels"]): result["block_peak_tflops"] for result in group.ours.results}
    ours = step.step_record(options, group.ours, peaks, mixed=None, in_turns=in_turns)
    ours["compared_with"] = " ".join(str(other.task.system) for other in group.peers)
    return [ours, *(_record(peer, ours, in_turns=in_turns) for peer in group.peers)]


def _asked(options: StepOptions, tier: StatesTier, batch: int, *, tuned: bool) -> Record:
    return {
        "tuned": tuned,
        "shape": str(options.shape),
        "parameters": SHAPES[options.shape].parameters,
        "batch": batch,
        "sequence": options.sequence,
        "precision": str(options.precision),
        "states_tier": str(tier),
        "clip": str(Clip.GLOBAL if tuned else Clip.NONE),
        "max_norm": options.max_norm if tuned else None,
        "gpu_cap_bytes": options.gpu_cap_bytes,
    }


def _settings(task: PeerTask) -> Record:
    """The fields of `lohan bench step` that say what was asked for; those that only LoHan has are null."""
    no_plan = dict.fromkeys(("predicted_step_seconds", "plan_gpu_bytes", "plan_host_bytes"))
    not_told = dict.fromkeys(("schedule", "expected_clip_rate", "clip_rate", "gradient_norm"))
    no_rates = dict.fromkeys(("block_peak_tflops", "fraction_of_peak", "disk_bytes_per_second", "disk_mixed_bytes_per_second"))
    return {
        "system": str(task.system),
        "tuned": task.tuned,
        "policy": task.variant or None,
        "shape": str(task.shape_name),
        "parameters": task.shape.parameters,
        "batch": task.batch,
        "micro_batch": task.micro_batch,
        "sequence": task.sequence,
        "precision": str(task.precision),
        "states": "fp32",
        "states_tier": "gpu" if task.system is System.TORCH and task.device != "cpu" else str(task.tier),
        "durability": "none",
        "clip": str(Clip.NONE if task.max_norm is None else Clip.GLOBAL),
        "max_norm": task.max_norm,
        "kernels": "liger" if task.tuned and task.device != "cpu" else "eager",
        "device": "cpu" if task.device == "cpu" else "gpu",
        "gpu_cap_bytes": task.gpu_cap_bytes,
        **not_told,
        **no_plan,
        **no_rates,
    }


def _skipped(task: PeerTask, reason: str) -> Record:
    return {**_settings(task), "micro_batch": None, "compared_with": step.SYSTEM, "skipped": reason}


def _record(measurement: Measurement, ours: Record, *, in_turns: bool) -> Record:
    task: PeerTask = measurement.task
    if measurement.failure:
        return _skipped(task, measurement.failure)
    seconds = [taken["seconds"] for taken in measurement.steps]
    step_seconds, own = median(seconds), ours.get("step_seconds")
    peak = partial(_largest, measurement.results)
    return {
        **_settings(task),
        "kernels": measurement.results[0]["kernels"],
        "step_seconds": step_seconds,
        "step_seconds_all": seconds,
        "setup_seconds": median(measurement.setup_seconds),
        "in_turns": in_turns,
        "tflops": step_flops(task.shape, task.batch, task.sequence) / step_seconds / 1e12,
        **{name: peak(name) for name in ("gpu_peak_bytes", "gpu_allocated_peak_bytes", "gpu_context_bytes", "host_peak_bytes")},
        "compared_with": step.SYSTEM,
        "lohan_states": ours.get("states"),
        "lohan_step_seconds": own,
        "ratio_to_lohan": step_seconds / own if own is not None else None,
    }


def _largest(results: Sequence[Record], name: str) -> int | None:
    return max((result[name] for result in results if result[name] is not None), default=None)
