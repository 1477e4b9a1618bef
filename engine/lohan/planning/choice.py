"""One way to run a batch on a measured machine: what its memory leaves for activations, what a policy keeps there, how long a step takes.

Which ways there are, and which of them is taken, is `lohan.planning.search`'s.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lohan.config import ActivationPolicy, GradientBuffers, Precision
from lohan.errors import CapacityError
from lohan.hardware.profile import BlockTimes, HardwareProfile
from lohan.planning.cost_model import Rates
from lohan.planning.fit import ROUNDS, Fit, Rooms
from lohan.planning.footprint import HOST_GRADIENT_BUFFERS, ssd_bytes_read, ssd_bytes_written
from lohan.planning.kernel_choice import nearest_times
from lohan.planning.policies import PolicyFacts, decide
from lohan.planning.retention_choice import ActivationDecision, ActivationProblem, Sweep, choose_retention, forced_retention
from lohan.planning.schedule import Begin, UpdateOrder
from lohan.planning.step_cost import StepCost
from lohan.planning.step_inputs import Candidate, DeviceSeconds, candidates, device_seconds, gradient_seconds, step_setting, weight_bytes
from lohan.planning.workload import OperatorGroup
from lohan.units import format_bytes

_END = 1 << 30
"""Behind the last place of any sweep."""
_OURS = (ActivationPolicy.HOLISTIC, ActivationPolicy.CPU_ACTIVATIONS)


@dataclass(frozen=True)
class Choice:
    """One way to run a batch, with what becomes of its activations."""

    fit: Fit
    micro_batch: int
    kept_units: int
    decision: ActivationDecision

    @property
    def seconds(self) -> float:
        return self.decision.total

    @property
    def least_moved_bytes(self) -> int:
        """That a step moves over links and drives whatever becomes of activations: weights to the device, states from and to drives."""
        fit = self.fit
        of_states = ssd_bytes_read(fit.sizes, fit.placement, self.kept_units) + ssd_bytes_written(fit.placement)
        return sum(weight_bytes(fit.sizes, self.kept_units)) + of_states

    @property
    def moved_bytes(self) -> float:
        """With activations, out and back."""
        amounts = self.decision.amounts
        return self.least_moved_bytes + 2 * (amounts.swapped_bytes + amounts.ssd_bytes)


@dataclass(frozen=True, slots=True)
class _Block:
    """What was measured of the run's block, nearest to a micro-batch, and what follows from it for the whole batch."""

    seconds: DeviceSeconds
    candidates: tuple[Candidate, ...]


class Chooser:
    """Decides about activations for one way to run a batch after the other.

    Args:
        fit: the batch and the machine; what of it may vary is given with each way.

    Raises:
        ConfigError: the profile has no rate of something that the run needs.
    """

    def __init__(self, fit: Fit, profile: HardwareProfile, policy: ActivationPolicy) -> None:
        self._profile, self._policy = profile, policy
        self._rates = Rates.of(profile, fit.placement.form, on_cpu=fit.gpu is None)
        self._training, self._kernels = fit.training, fit.engine.kernels
        self._blocks: dict[int, _Block | None] = {}
        self._best_places: dict[tuple[int, int, int], int] = {}
        """Of the last problem of a micro-batch, number of kept units and round: the next one's is near."""
        self.is_ours = self._policy in _OURS and fit.engine.swapped_activation_bytes is None
        """Whether the shortest step is looked for, and not what a rule says."""

    def decide(self, fit: Fit, micro_batch: int, kept_units: int, *, longest_seconds: float = 0.0) -> Choice | None:
        """What the policy keeps in what is left then; None where the block was never measured.

        Args:
            longest_seconds: steps up to that are as welcome as the shortest if they move less; of other systems' policies none are.

        Raises:
            CapacityError: the policy cannot be followed on this machine.
        """
        if self._block(fit, micro_batch) is None:
            return None
        rooms = fit.activation_rooms(micro_batch, kept_units)
        problem, facts = self._problem(fit, micro_batch, kept_units, rooms)
        for number in range(ROUNDS):
            place = (micro_batch, kept_units, number)
            problem = replace(problem, gpu_bytes=rooms.gpu_bytes, ram_bytes=rooms.ram_bytes, near=self._best_places.get(place))
            decision = self._decision(fit, problem, facts, longest_seconds)
            if decision.sweep is not None:
                self._best_places[place] = decision.sweep.best() if decision.sweep.best() < decision.sweep.last else _END
            held = Rooms(round(decision.amounts.gpu_bytes), round(decision.amounts.ram_bytes), round(decision.amounts.ssd_bytes))
            less = fit.less_room(rooms, micro_batch, kept_units, decision.kept, held=held)
            if less is None:
                return Choice(fit, micro_batch, kept_units, decision)
            rooms = less
        plans = fit.memory(micro_batch, kept_units, decision.kept)
        short = max(plans, key=lambda plan: plan.used_bytes - plan.capacity_bytes)
        missing = format_bytes(short.used_bytes - short.capacity_bytes)
        raise CapacityError(
            f"no room is left for what the policy {self._policy} keeps: {missing} are missing",
            need_bytes=short.used_bytes,
            have_bytes=short.capacity_bytes,
            place="activations",
            remedy="Use a smaller micro-batch, or another policy.",
        )

    def problem(self, fit: Fit, micro_batch: int, kept_units: int) -> ActivationProblem | None:
        """What there is to decide then; None where the block was never measured."""
        if self._block(fit, micro_batch) is None:
            return None
        return self._problem(fit, micro_batch, kept_units, fit.activation_rooms(micro_batch, kept_units))[0]

    def bound(self, most: Fit, least: Fit, micro_batch: int, kept_units: int, *, rooms_of: int) -> float:
        """Seconds that no step takes less than which is between the two: as if what `most` gives updates and weights left the room for
        activations that `least` leaves. 0 where it is not the shortest step that is looked for.

        Args:
            most: has the most states in RAM, and the most gradient buffers.
            least: has the least of them.
            kept_units: at most.
            rooms_of: so many of them at least.

        Raises:
            CapacityError: not even that room holds the inputs of blocks.
        """
        if self._block(most, micro_batch) is None or not self.is_ours:
            return 0.0
        problem, _ = self._problem(most, micro_batch, kept_units, least.activation_rooms(micro_batch, rooms_of))
        sweep = Sweep(problem)
        return sweep.seconds(sweep.best())

    def cost(
        self, fit: Fit, micro_batch: int, kept_units: int, *, order: UpdateOrder | None = None, redone_share: float | None = None
    ) -> StepCost:
        """The time of a step as a function of its activations.

        Args:
            order: of the updates; None: the fit's own.
            redone_share: see `lohan.planning.step_cost.StepSetting`; None: what is expected of the fit's own order.
        """
        redone = fit.redone_share if redone_share is None else redone_share
        return self._cost(fit, micro_batch, kept_units, order or fit.order, redone)

    def _decision(self, fit: Fit, problem: ActivationProblem, facts: PolicyFacts, longest_seconds: float) -> ActivationDecision:
        swapped_bytes = fit.engine.swapped_activation_bytes
        if swapped_bytes is not None and self._policy is ActivationPolicy.HOLISTIC:
            return forced_retention(problem, swapped_bytes)
        if longest_seconds and self.is_ours:
            with_drives = self._policy is ActivationPolicy.HOLISTIC
            return choose_retention(problem if with_drives else replace(problem, ssd_bytes=0), longest_seconds=longest_seconds)
        return decide(self._policy, problem, facts)

    def _block(self, fit: Fit, micro_batch: int) -> _Block | None:
        """None where it was never measured."""
        if micro_batch not in self._blocks:
            training, workload = self._training, fit.workload
            times = nearest_times(workload, training, self._kernels, self._profile, micro_batch)
            self._blocks[micro_batch] = None
            if times is not None:
                seconds = device_seconds(
                    workload, times, batch=training.batch_size, length=training.sequence_length, micro_batch=micro_batch
                )
                self._blocks[micro_batch] = _Block(seconds, self._candidates(fit, times))
        return self._blocks[micro_batch]

    def _problem(self, fit: Fit, micro_batch: int, kept_units: int, rooms: Rooms) -> tuple[ActivationProblem, PolicyFacts]:
        block = self._block(fit, micro_batch)
        assert block is not None, "the caller has looked"
        cost = self._cost(fit, micro_batch, kept_units, fit.order, fit.redone_share)
        problem = ActivationProblem(
            candidates=block.candidates,
            blocks=fit.workload.blocks,
            boundary_bytes=fit.boundary_bytes if fit.can_keep else 0,
            gpu_bytes=rooms.gpu_bytes,
            ram_bytes=rooms.ram_bytes,
            ssd_bytes=rooms.ssd_bytes,
            evaluate=cost,
            near=self._best_places.get((micro_batch, kept_units, 0)),
        )
        return problem, self._facts(fit, cost.setting.forward_seconds)

    def _cost(self, fit: Fit, micro_batch: int, kept_units: int, order: UpdateOrder, redone_share: float) -> StepCost:
        sizes, batch, block = fit.sizes, fit.training.batch_size, self._block(fit, micro_batch)
        assert block is not None, "the choice was made by its times"
        setting = step_setting(
            sizes,
            fit.placement,
            order,
            block.seconds,
            kept_units=kept_units,
            gradient_buffers=len(sizes.units) if order.gradients is GradientBuffers.ALL else HOST_GRADIENT_BUFFERS,
            reorders_left=order.takes_needed_first or order.begin is Begin.AFTER_BACKWARD,
            gradient_seconds=gradient_seconds(sizes, -(-batch // micro_batch), self._rates.device_memory),
            redone_share=redone_share,
            speculated_share=fit.spare_share if fit.spare_bytes else 1.0,
        )
        return StepCost(setting, self._rates)

    def _candidates(self, fit: Fit, times: BlockTimes) -> tuple[Candidate, ...]:
        """What may be kept in a run: without the attention of an fp32 run on a GPU, which has no fused kernel for grouped heads there, so
        that its operators are others than those that were traced."""
        if not fit.can_keep:
            return ()
        training = fit.training
        found = candidates(fit.workload, times, batch=training.batch_size, length=training.sequence_length, itemsize=fit.sizes.itemsize)
        if fit.gpu is None or training.precision is not Precision.FP32:
            return found
        attention = {operator.label for operator in fit.workload.operators_of(times.kernels) if operator.group is OperatorGroup.ATTENTION}
        return tuple(candidate for candidate in found if candidate.label not in attention)

    def _facts(self, fit: Fit, forward_seconds: float) -> PolicyFacts:
        device = fit.gpu.total_bytes if fit.gpu is not None else fit.hardware.ram.total_bytes
        return PolicyFacts(
            device_bytes=min(device, fit.engine.gpu_memory_bytes or device),
            model_state_bytes=16 * fit.workload.parameters,
            forward_seconds=forward_seconds,
            g2m_bytes_per_second=self._rates.g2m or self._rates.host_memory,
        )
