"""Chooses micro-batch, kept units and what is kept of activations together: the shortest step that a measured machine is foreseen to do.

Each way to run the batch that fits gets what its memory leaves for activations, and a policy decides about them; the fastest is taken. Few
ways are tried: micro-batches that are powers of two, with no kept units and with as many as fit, and the best of them with half as many.
Between them the time changes little.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from lohan.config import ActivationPolicy, GradientBuffers, Precision
from lohan.errors import CapacityError
from lohan.hardware.profile import BlockTimes, HardwareProfile
from lohan.planning.cost_model import PhaseSeconds, Rates
from lohan.planning.fit import ROUNDS, Fit, Rooms
from lohan.planning.footprint import HOST_GRADIENT_BUFFERS
from lohan.planning.forecast import Alternative, Forecast, PhaseForecast, SweepForecast
from lohan.planning.kernel_choice import nearest_times
from lohan.planning.policies import PolicyFacts, decide
from lohan.planning.retention_choice import ActivationDecision, ActivationProblem, forced_retention
from lohan.planning.schedule import Begin
from lohan.planning.step_cost import StepCost, StepSeconds
from lohan.planning.step_inputs import Candidate, candidates, device_seconds, gradient_seconds, step_setting
from lohan.planning.workload import OperatorGroup
from lohan.units import format_bytes

_SHORTER = 0.995
"""A step must be shorter by this factor to be taken for a smaller micro-batch: the figures are no more exact, and each region has costs of
its own that no figure has."""


@dataclass(frozen=True)
class Choice:
    """One way to run a batch, with what becomes of its activations."""

    fit: Fit
    micro_batch: int
    kept_units: int
    decision: ActivationDecision

    @property
    def seconds(self) -> float:
        return self.decision.seconds.total


def block_times(profile: HardwareProfile, fit: Fit, micro_batch: int) -> BlockTimes | None:
    """The measured times of the run's block that come nearest to these rows and tokens; None where there are none."""
    return nearest_times(fit.workload, fit.training, fit.engine.kernels, profile, micro_batch)


class Chooser:
    """Tries ways to run one batch.

    Raises:
        ConfigError: the profile has no rate of something that the run needs.
    """

    def __init__(self, fit: Fit, profile: HardwareProfile, policy: ActivationPolicy) -> None:
        self._fit, self._profile, self._policy = fit, profile, policy
        self._rates = Rates.of(profile, fit.placement.form, on_cpu=fit.gpu is None)

    def choose(self, micro_batches: Sequence[int], most_kept: Sequence[int]) -> tuple[Choice | None, tuple[Alternative, ...]]:
        """The shortest step, and the best of each micro-batch.

        Args:
            micro_batches: that fit, descending.
            most_kept: for each the most units that may be kept.

        Returns:
            None where the model's block was never measured.

        Raises:
            CapacityError: the policy cannot be followed on this machine, with whatever micro-batch.
        """
        best: Choice | None = None
        refusal: CapacityError | None = None
        alternatives = []
        for micro_batch, most in zip(micro_batches, most_kept, strict=True):
            found, error = self._fastest(micro_batch, {0, most})
            refusal = refusal or error
            if found is not None and (best is None or found.seconds < best.seconds * _SHORTER):
                best = found
            alternatives.append(
                Alternative(
                    micro_batch_size=micro_batch,
                    kept_units=found.kept_units if found is not None else most,
                    seconds=found.seconds if found is not None else None,
                    reason=error.message if found is None and error is not None else "",
                )
            )
        if best is None and refusal is not None:
            raise refusal
        if best is not None:
            most = most_kept[micro_batches.index(best.micro_batch)]
            half, _ = self._fastest(best.micro_batch, {most // 2} - {0, most})
            if half is not None and half.seconds < best.seconds:
                best = half
                changed = {"kept_units": half.kept_units, "seconds": half.seconds}
                alternatives = [
                    alternative.model_copy(update=changed) if alternative.micro_batch_size == half.micro_batch else alternative
                    for alternative in alternatives
                ]
        return best, tuple(alternatives)

    def _fastest(self, micro_batch: int, kept_units: Collection[int]) -> tuple[Choice | None, CapacityError | None]:
        """The fastest with one of these numbers of kept units, and why another could not be."""
        best: Choice | None = None
        refusal = None
        for number in sorted(kept_units, reverse=True):
            try:
                choice = self.decide(micro_batch, number)
            except CapacityError as error:
                refusal = refusal or error
                continue
            if choice is not None and (best is None or choice.seconds < best.seconds):
                best = choice
        return best, refusal

    def decide(self, micro_batch: int, kept_units: int) -> Choice | None:
        """What the policy keeps in what is left then; None where the block was never measured.

        Raises:
            CapacityError: the policy cannot be followed on this machine.
        """
        times = block_times(self._profile, self._fit, micro_batch)
        if times is None:
            return None
        rooms = self._fit.activation_rooms(micro_batch, kept_units)
        problem, facts = self._problem(times, micro_batch, kept_units, rooms)
        for _ in range(ROUNDS):
            choice = Choice(self._fit, micro_batch, kept_units, self._decision(problem, facts))
            less = self._fit.less_room(rooms, micro_batch, kept_units, choice.decision.retention)
            if less is None:
                return choice
            rooms = less
            problem = replace(problem, gpu_bytes=rooms.gpu_bytes, ram_bytes=rooms.ram_bytes)
        plans = self._fit.memory(micro_batch, kept_units, choice.decision.retention)
        short = max(plans, key=lambda plan: plan.used_bytes - plan.capacity_bytes)
        missing = format_bytes(short.used_bytes - short.capacity_bytes)
        raise CapacityError(
            f"no room is left for what the policy {self._policy} keeps: {missing} are missing",
            need_bytes=short.used_bytes,
            have_bytes=short.capacity_bytes,
            place="activations",
            remedy="Use a smaller micro-batch, or another policy.",
        )

    def problem(self, micro_batch: int, kept_units: int) -> ActivationProblem | None:
        """What there is to decide then; None where the block was never measured."""
        times = block_times(self._profile, self._fit, micro_batch)
        if times is None:
            return None
        return self._problem(times, micro_batch, kept_units, self._fit.activation_rooms(micro_batch, kept_units))[0]

    def _decision(self, problem: ActivationProblem, facts: PolicyFacts) -> ActivationDecision:
        swapped_bytes = self._fit.engine.swapped_activation_bytes
        if swapped_bytes is not None and self._policy is ActivationPolicy.HOLISTIC:
            return forced_retention(problem, swapped_bytes)
        return decide(self._policy, problem, facts)

    def _problem(self, times: BlockTimes, micro_batch: int, kept_units: int, rooms: Rooms) -> tuple[ActivationProblem, PolicyFacts]:
        fit = self._fit
        training, order, sizes = fit.training, fit.order, fit.sizes
        batch, length = training.batch_size, training.sequence_length
        seconds = device_seconds(fit.workload, times, batch=batch, length=length)
        cost = StepCost(
            step_setting(
                sizes,
                fit.placement,
                order,
                seconds,
                kept_units=kept_units,
                gradient_buffers=len(sizes.units) if order.gradients is GradientBuffers.ALL else HOST_GRADIENT_BUFFERS,
                reorders_left=order.takes_needed_first or order.begin is Begin.AFTER_BACKWARD,
                gradient_seconds=gradient_seconds(sizes, -(-batch // micro_batch), self._rates.device_memory),
            ),
            self._rates,
        )
        problem = ActivationProblem(
            candidates=self._candidates(times),
            blocks=fit.workload.blocks,
            boundary_bytes=fit.boundary_bytes if fit.can_keep else 0,
            gpu_bytes=rooms.gpu_bytes,
            ram_bytes=rooms.ram_bytes,
            ssd_bytes=rooms.ssd_bytes,
            evaluate=cost,
        )
        return problem, self._facts(seconds.forward)

    def _candidates(self, times: BlockTimes) -> tuple[Candidate, ...]:
        """What may be kept in a run: without the attention of an fp32 run on a GPU, which has no fused kernel for grouped heads there, so
        that its operators are others than those that were traced."""
        fit = self._fit
        if not fit.can_keep:
            return ()
        training = fit.training
        found = candidates(fit.workload, times, batch=training.batch_size, length=training.sequence_length, itemsize=fit.sizes.itemsize)
        if fit.gpu is None or training.precision is not Precision.FP32:
            return found
        attention = {operator.label for operator in fit.workload.operators_of(times.kernels) if operator.group is OperatorGroup.ATTENTION}
        return tuple(candidate for candidate in found if candidate.label not in attention)

    def _facts(self, forward_seconds: float) -> PolicyFacts:
        fit = self._fit
        device = fit.gpu.total_bytes if fit.gpu is not None else fit.hardware.ram.total_bytes
        return PolicyFacts(
            device_bytes=min(device, fit.engine.gpu_memory_bytes or device),
            model_state_bytes=16 * fit.workload.parameters,
            forward_seconds=forward_seconds,
            g2m_bytes_per_second=self._rates.g2m or self._rates.host_memory,
        )


def forecast(choice: Choice, alternatives: tuple[Alternative, ...], profile: HardwareProfile) -> Forecast:
    """What a plan says of the chosen step."""
    fit, decision = choice.fit, choice.decision
    seconds = decision.seconds
    batch, length = fit.training.batch_size, fit.training.sequence_length
    return Forecast(
        step_seconds=seconds.total,
        phases=_phases(seconds),
        binding=seconds.binding.value,
        case=decision.case.value if decision.case is not None else None,
        is_memory_bound=decision.memory_bound,
        updated_share=min(1.0, max(0.0, seconds.updated_share)),
        tokens_per_second=batch * length / seconds.total,
        flops_per_second=3 * fit.workload.forward_flops(batch, length) / seconds.total,
        sweep=tuple(
            SweepForecast(
                gpu_bytes=round(point.amounts.gpu_bytes),
                ram_bytes=round(point.amounts.ram_bytes),
                ssd_bytes=round(point.amounts.ssd_bytes),
                seconds=point.seconds,
            )
            for point in decision.points
        ),
        alternatives=alternatives,
        profile_date=profile.date,
    )


def _phases(seconds: StepSeconds) -> tuple[PhaseForecast, ...]:
    def phase(name: str, part: PhaseSeconds) -> PhaseForecast:
        resources = {term.value: value for term, value in part.seconds.items()}
        return PhaseForecast(name=name, seconds=part.total, resources=resources, binding=part.binding.value)

    exposed = PhaseForecast(name="updates", seconds=seconds.exposed_seconds)
    return (phase("forward", seconds.forward), phase("backward", seconds.backward), exposed)
