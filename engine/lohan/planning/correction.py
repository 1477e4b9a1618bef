"""Corrects a machine's measured figures by what the first steps of a run took, and decides again what may change between two steps.

A step is foreseen at its own rows and tokens, so that batches shorter than the plan's do not make its forecast wrong. Where the steps took
more than a tenth longer or shorter, each figure that they show is taken from them: the device's seconds, AdamW's rate, and what copies and
drives gave. What is left of the difference then (waiting of things for each other, host memory) is one factor on everything, which changes
the forecast and no decision. With the corrected figures what is kept of activations is decided again. Micro-batch and kept units stay:
slots are made for the units, and another micro-batch would add gradients in another order, so that a run's numbers would depend on how busy
the machine was.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from lohan.config import ActivationPolicy
from lohan.errors import CapacityError
from lohan.hardware.profile import BlockTimes, HardwareProfile, Measured
from lohan.planning.choice import Choice, Chooser
from lohan.planning.cost_model import Rates
from lohan.planning.fit import Fit
from lohan.planning.operations import OperationKind
from lohan.planning.retention import Retention
from lohan.planning.retention_choice import ActivationDecision, ActivationProblem
from lohan.planning.state_form import SCALE_BLOCK
from lohan.planning.step_cost import Amounts, StepCost
from lohan.planning.step_trace import StepTrace, Wait, union_seconds

if TYPE_CHECKING:
    from lohan.planning.step_trace import Span

SKIPPED_STEPS = 1
"""Of a decision: the first step makes its buffers (page-locking takes half a second a GB), and has no updates of a step before it."""
MEASURED_STEPS = 3
"""The fewest whose median one disturbed step does not move. Steps come to their rhythm within two, so that one of these at most may still
be off it; more would only follow a wrong plan for longer."""
WRONG_BEYOND = 0.10
"""A forecast is wrong where the measured steps differ by more than this part of it."""
BETTER_BY = 0.03
"""Another decision is taken where its step is shorter by this part: medians of three steps of one run lie 1 to 2 % apart."""
MOST_CORRECTIONS = 2
"""Of a run: the second one sees what the first one's decision does."""

_TO_DEVICE = frozenset({OperationKind.WEIGHTS_COPY, OperationKind.ACTIVATIONS_IN})
_FROM_DEVICE = frozenset({OperationKind.GRADIENTS_COPY, OperationKind.ACTIVATIONS_OUT})
_READS = frozenset({OperationKind.STATES_READ, OperationKind.WEIGHTS_READ, OperationKind.ACTIVATIONS_READ})
_WRITES = frozenset({OperationKind.STATES_WRITE, OperationKind.ACTIVATIONS_WRITE})
_BACKWARD = frozenset({OperationKind.BACKWARD, OperationKind.GRADIENT_SUM})
_ON_CPU = frozenset({OperationKind.UPDATE, OperationKind.GRADIENT_NORM, OperationKind.CHECKSUM})


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """What a step was, and how long it took."""

    step: int
    """From 1."""
    rows: int
    length: int
    """Tokens of a row, padding included."""
    seconds: float
    clipped: bool = False
    """Whether its gradients were scaled down to a common norm, so that what was speculated was done again."""


@dataclass(frozen=True)
class Running:
    """What a run does now, and what it was planned by."""

    fit: Fit
    profile: HardwareProfile
    policy: ActivationPolicy
    micro_batch: int
    kept_units: int
    retention: Retention

    def of(self, step: MeasuredStep) -> Running:
        """The same run, whose batches are like that of `step`, and clipped as it was."""
        fit = self.fit.with_training(batch_size=step.rows, sequence_length=step.length)
        return replace(self, fit=replace(fit, clip_rate=float(step.clipped)))

    @property
    def problem(self) -> tuple[ActivationProblem, StepCost]:
        """What there is to decide, and what a step costs."""
        problem = Chooser(self.fit, self.profile, self.policy).problem(self.fit, self.micro_batch, self.kept_units)
        assert problem is not None, "the run was planned by measured times of its block"
        assert isinstance(problem.evaluate, StepCost), "it is what a chooser evaluates by"
        return problem, problem.evaluate

    @property
    def decision(self) -> ActivationDecision:
        """What is kept now, and the step that is foreseen with it."""
        problem, cost = self.problem
        amounts = _amounts(problem, self.retention)
        return ActivationDecision(self.retention, amounts, cost)


@dataclass(frozen=True, slots=True)
class Factors:
    """How much longer than foreseen the measured steps took for the same work; 1 where they do not tell."""

    forward: float = 1.0
    backward: float = 1.0
    updates: float = 1.0
    to_device: float = 1.0
    from_device: float = 1.0
    drive_reads: float = 1.0
    drive_writes: float = 1.0
    everything: float = 1.0
    """On top of the others, on all that takes time."""


@dataclass(frozen=True)
class Correction:
    """What the first steps of a run say of its plan."""

    ratio: float
    """Measured over foreseen seconds: the median of the steps."""
    factors: Factors
    running: Running
    """With the corrected figures."""
    foreseen_seconds: float
    """Of a step of a whole batch, before."""
    corrected_seconds: float
    """The same by the corrected figures."""
    better: Choice | None
    """What is worth doing instead."""


def ratio(running: Running, steps: Sequence[MeasuredStep]) -> float:
    """Measured over foreseen seconds of `steps`, each at its own rows and tokens: the median."""
    return median(step.seconds / running.of(step).decision.total for step in steps)


def is_wrong(found: float) -> bool:
    """Whether a forecast that is off by this ratio is to be corrected."""
    return abs(found - 1) > WRONG_BEYOND


def correct(running: Running, steps: Sequence[MeasuredStep], traces: Sequence[StepTrace]) -> Correction | None:
    """What to make of the measured steps; None where they took what was foreseen, and are clipped no more or less often than it pays to
    know.

    Args:
        traces: of the same steps; none where they do not hold everything that the steps did.
    """
    found = ratio(running, steps)
    seen = replace(running.fit, clip_rate=_clip_rate(steps))
    if not is_wrong(found):
        return _known_better(replace(running, fit=seen), running, found)
    factors = _factors(running, steps, traces) if len(traces) == len(steps) else Factors()
    partly = replace(running, profile=corrected_profile(running, factors))
    factors = replace(factors, everything=ratio(partly, steps))
    corrected = replace(running, fit=seen, profile=corrected_profile(running, factors))
    now = corrected.decision.total
    return Correction(
        ratio=found,
        factors=factors,
        running=corrected,
        foreseen_seconds=running.decision.total,
        corrected_seconds=now,
        better=_better(corrected, now),
    )


def _clip_rate(steps: Sequence[MeasuredStep]) -> float:
    """What is to be expected of further steps: the mean of all rates, each as likely as any other before these were seen (Laplace's rule of
    succession). Without any it is `EXPECTED_CLIP_RATE`."""
    return (sum(step.clipped for step in steps) + 1) / (len(steps) + 2)


def _known_better(seen: Running, running: Running, found: float) -> Correction | None:
    """Where a forecast was right: whether what is now known of clipping makes something else better."""
    if not running.fit.spare_bytes:
        return None
    now = seen.decision.total
    better = _better(seen, now)
    return None if better is None else Correction(found, Factors(), seen, running.decision.total, now, better)


def _better(running: Running, seconds: float) -> Choice | None:
    try:
        choice = Chooser(running.fit, running.profile, running.policy).decide(running.fit, running.micro_batch, running.kept_units)
    except CapacityError:
        return None
    if choice is None or choice.decision.retention == running.retention:
        return None
    return choice if choice.seconds < seconds * (1 - BETTER_BY) else None


def _amounts(problem: ActivationProblem, retention: Retention) -> Amounts:
    """What `retention` keeps of the problem's batch, by tier, and saves."""
    inputs, of_blocks = retention.boundaries, problem.boundary_bytes
    ram, ssd = len(inputs.ram_blocks) * of_blocks, len(inputs.ssd_blocks) * of_blocks
    gpu, saved = problem.boundaries - ram - ssd, 0.0
    known = {candidate.label: candidate for candidate in problem.candidates}
    for operator in retention.operators:
        candidate = known.get(operator.label)
        if candidate is None:
            continue
        gpu += candidate.bytes_per_block * len(operator.gpu_blocks)
        ram += candidate.bytes_per_block * len(operator.ram_blocks)
        ssd += candidate.bytes_per_block * len(operator.ssd_blocks)
        blocks = len(operator.gpu_blocks) + len(operator.ram_blocks) + len(operator.ssd_blocks)
        saved += candidate.seconds_per_block * blocks
    return Amounts(gpu, ram, ssd, saved)


# ---------------------------------------------------------------- what the traces show


def _factors(running: Running, steps: Sequence[MeasuredStep], traces: Sequence[StepTrace]) -> Factors:
    forward = backward = on_cpu = 0.0
    for step in steps:
        problem, cost = running.of(step).problem
        amounts = _amounts(problem, running.retention)
        before, after = cost.forward_demand(amounts), cost.backward_demand(amounts)
        # A device that waits for its kernels is under way all the same, as traces see it.
        forward += max(before.gpu_seconds, before.launch_seconds)
        backward += max(after.gpu_seconds, after.launch_seconds)
        on_cpu += after.cpu_seconds + cost.update_demand().cpu_seconds
    rates = Rates.of(running.profile, running.fit.placement.form, on_cpu=running.fit.gpu is None)
    if rates.on_cpu:
        # Its cores do both at once, and each is the slower for it: only what they took together can be told.
        together = _own_seconds(traces, {OperationKind.FORWARD, *_BACKWARD, *_ON_CPU})
        factor = _over(together, forward + backward + on_cpu)
        copies = {}
        device = {"forward": factor, "backward": factor, "updates": factor}
    else:
        state_bytes = running.fit.placement.form.state_bytes(SCALE_BLOCK) / SCALE_BLOCK
        updated = _bytes_per_second(traces, {OperationKind.UPDATE})
        device = {
            "forward": _over(_own_seconds(traces, {OperationKind.FORWARD}), forward),
            "backward": _over(_own_seconds(traces, _BACKWARD), backward),
            "updates": _over(rates.update_elements * state_bytes, updated),
        }
        copies = {
            "to_device": _outside(_bytes_per_second(traces, _TO_DEVICE), rates.both_ways, rates.m2g),
            "from_device": _outside(_bytes_per_second(traces, _FROM_DEVICE), rates.both_ways, rates.g2m),
        }
    each = rates.ssd_mixed / 2 if rates.ssd_mixed else None
    drives = {
        "drive_reads": _outside(_bytes_per_second(traces, _READS), each, rates.ssd_read),
        "drive_writes": _outside(_bytes_per_second(traces, _WRITES), each, rates.ssd_write),
    }
    return Factors(**device, **copies, **drives)


def _own_seconds(traces: Sequence[StepTrace], kinds: Iterable[OperationKind]) -> float:
    """In which these operations were under way and the device did not wait within them."""
    total, wanted = 0.0, frozenset(kinds)
    for trace in traces:
        waits = [span for span in trace.spans if isinstance(span.kind, Wait)]
        total += union_seconds([*_of_kinds(trace, wanted), *waits]) - union_seconds(waits)
    return total


def _bytes_per_second(traces: Sequence[StepTrace], kinds: Iterable[OperationKind]) -> float:
    """That these operations moved while any of them was under way; 0 where there was none."""
    spans = [_of_kinds(trace, frozenset(kinds)) for trace in traces]
    seconds = sum(map(union_seconds, spans))
    return sum(span.bytes for of_step in spans for span in of_step) / seconds if seconds else 0.0


def _of_kinds(trace: StepTrace, kinds: frozenset[OperationKind]) -> list[Span]:
    return [span for span in trace.spans if span.kind in kinds]


def _over(first: float, second: float) -> float:
    """Their quotient; 1 where nothing was measured, or nothing foreseen."""
    return first / second if first > 0 and second > 0 else 1.0


def _outside(measured: float, contended: float | None, alone: float | None) -> float:
    """How much slower than foreseen something was that is slower while its opposite is busy: nothing where it is between the two rates."""
    if not measured or not alone:
        return 1.0
    low = min(contended or alone, alone)
    return low / measured if measured < low else alone / measured if measured > alone else 1.0


# ---------------------------------------------------------------- the corrected figures


def corrected_profile(running: Running, factors: Factors) -> HardwareProfile:
    """The run's profile, slower by `factors`; other models' times stay."""
    profile, every = running.profile, factors.everything
    slower: Mapping[str, float] = {
        "host_to_device": factors.to_device,
        "device_to_host": factors.from_device,
        "both_ways": max(factors.to_device, factors.from_device),
        "device_memory": 1.0,
        "host_memory": 1.0,
        "ssd_read": factors.drive_reads,
        "ssd_write": factors.drive_writes,
        "ssd_mixed": max(factors.drive_reads, factors.drive_writes),
        "gradient_norm": 1.0,
        "checksum": 1.0,
    }
    changes: dict[str, Any] = {name: _times(getattr(profile, name), 1 / (factor * every)) for name, factor in slower.items()}
    changes["commit_seconds"] = _times(profile.commit_seconds, every)
    changes["updates"] = tuple(
        rate.model_copy(update={"elements_per_second": _times(rate.elements_per_second, 1 / (factors.updates * every))})
        for rate in profile.updates
    )
    digest = running.fit.workload.digest
    changes["blocks"] = tuple(_slower_block(times, factors) if times.workload_digest == digest else times for times in profile.blocks)
    return profile.model_copy(update=changes)


def _slower_block(times: BlockTimes, factors: Factors) -> BlockTimes:
    forward, backward = factors.forward * factors.everything, factors.backward * factors.everything
    return times.model_copy(
        update={
            "forward_seconds": _times(times.forward_seconds, forward),
            "backward_seconds": _times(times.backward_seconds, backward),
            "operator_seconds": {label: seconds * forward for label, seconds in times.operator_seconds.items()},
            # A quarter of the head's time is its forward.
            "head_seconds": _times(times.head_seconds, (forward + 3 * backward) / 4),
            "forward_launch_seconds": _times(times.forward_launch_seconds, forward),
            "backward_launch_seconds": _times(times.backward_launch_seconds, backward),
        }
    )


def _times(measured: Measured | None, factor: float) -> Measured | None:
    return None if measured is None else measured.model_copy(update={"value": measured.value * factor})
