"""What other systems do with activations, as plans that the same engine can run: the LoHan paper's comparison (section V-E, Figure 9a).

Only what a policy decides about activations is taken over; updates, weights and copies are this engine's, as in the paper. A policy whose
rule a machine cannot follow raises `CapacityError` (Figure 2a), and so does one whose model would not fit with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from lohan.config import ActivationPolicy
from lohan.errors import CapacityError, ConfigError
from lohan.planning.retention_choice import (
    ActivationDecision,
    ActivationProblem,
    check_boundaries,
    choose_retention,
    place_outputs,
    settle,
)
from lohan.planning.tiers import Tier
from lohan.units import format_bytes


@dataclass(frozen=True, slots=True)
class PolicyFacts:
    """What some policies look at, and ours does not."""

    device_bytes: int
    """Of the device's memory, all of it."""
    model_state_bytes: int
    """Weights, gradients and optimizer states as in-device training holds them: 16 a parameter in mixed precision."""
    forward_seconds: float
    """Of the device."""
    g2m_bytes_per_second: float
    solver_seconds: float = 10.0
    """After which a solver returns the best it has."""


def decide(policy: ActivationPolicy, problem: ActivationProblem, facts: PolicyFacts) -> ActivationDecision:
    """What `policy` keeps, and where.

    Raises:
        CapacityError: the policy cannot be followed on this machine; the message says why.
        ConfigError: the policy needs SciPy, which is not installed.
    """
    rule = _RULES.get(policy)
    return rule(problem) if rule is not None else _MEASURED_RULES[policy](problem, facts)


def _holistic(problem: ActivationProblem) -> ActivationDecision:
    """Ours: `lohan.planning.retention_choice`."""
    return choose_retention(problem)


def _cpu_activations(problem: ActivationProblem) -> ActivationDecision:
    """Ours without drives: the paper's Figure 8 compares it with activations on drives."""
    return choose_retention(replace(problem, ssd_bytes=0))


def _recompute_all(problem: ActivationProblem) -> ActivationDecision:
    """Plain activation checkpointing; inputs of blocks go as far as they must."""
    check_boundaries(problem, problem.rooms, "this machine")
    return _counted(problem, {})


def _keep_all(problem: ActivationProblem) -> ActivationDecision:
    """No recomputation, the nearest tiers first: the right end of the paper's Figure 9b."""
    check_boundaries(problem, problem.rooms, "this machine")
    decision = _counted(problem, {candidate.label: problem.blocks for candidate in problem.candidates})
    if decision.amounts.kept_bytes < problem.everything:
        raise _no_room(problem, problem.room, "this machine")
    return decision


def _zero_infinity(problem: ActivationProblem) -> ActivationDecision:
    """ZeRO-Infinity (arXiv 2104.07857): a static rule. Inputs of blocks go to host memory, whatever the device could hold, and all that
    lies within a block is computed again. It never uses drives for activations, which bounds its models by host memory (section III-B)."""
    check_boundaries(problem, (problem.ram_bytes,), "host memory, the one place that ZeRO-Infinity puts them,")
    return _counted(replace(problem, gpu_bytes=0, ssd_bytes=0), {})


def _colossal(problem: ActivationProblem) -> ActivationDecision:
    """Colossal-AI with Gemini (arXiv 2110.14883) as the paper runs it: inputs of blocks stay on the device, all that lies within a block is
    computed again."""
    check_boundaries(problem, (problem.gpu_bytes,), "the device, the one place that Colossal-AI leaves them in,")
    return _counted(problem, {})


def _capuchin(problem: ActivationProblem, facts: PolicyFacts) -> ActivationDecision:
    """Capuchin (ASPLOS 2020): tensor by tensor, from measured times of the device alone. Tensors are swapped while their copies are hidden
    by the forward; after that one is swapped where its copy is shorter than its recomputation. Host memory is its last tier, and the
    optimizer's use of the same links does not enter.

    Here: outputs in descending seconds saved per byte (its memory saving per second), the device filled first, since it evicts only under
    pressure.
    """
    rooms = problem.gpu_bytes, problem.ram_bytes
    check_boundaries(problem, rooms, "host memory and the device, beyond which Capuchin puts nothing,")
    free = problem.gpu_bytes + facts.forward_seconds * facts.g2m_bytes_per_second
    kept, counts = problem.boundaries, {}
    for candidate in problem.by_benefit:
        size = candidate.bytes_per_block
        shorter = size / facts.g2m_bytes_per_second < candidate.seconds_per_block
        limit = sum(rooms) if shorter else min(sum(rooms), free)
        counts[candidate.label] = min(problem.blocks, max(0, int((limit - kept) // size)))
        kept += counts[candidate.label] * size
    return _counted(replace(problem, ssd_bytes=0), counts)


def _g10(problem: ActivationProblem) -> ActivationDecision:
    """G10 (MICRO 2023): one storage of host memory and drives for all tensors. All activations leave the device, none is computed again;
    what is inactive for longest goes furthest, which are the first blocks' outputs: the backward comes to them last.

    G10 relies on GPUDirect Storage, which no consumer GPU has; as in the paper's comparison, host memory is passed through here instead.
    Its optimizer on the GPU is not taken over.
    """
    return _by_inactivity(problem, {Tier.RAM: problem.ram_bytes, Tier.SSD: problem.ssd_bytes}, "G10")


def _flashneuron(problem: ActivationProblem, facts: PolicyFacts) -> ActivationDecision:
    """FlashNeuron (FAST 2021): all model states stay in the device's memory; of the activations only as many as it takes go to drives, and
    none is computed again. On a 24 GB card it fails below 6B parameters, whatever else the machine has (section III-A)."""
    if facts.model_state_bytes > facts.device_bytes:
        raise CapacityError(
            f"FlashNeuron keeps all model states on the device: {format_bytes(facts.model_state_bytes)}, and it has"
            f" {format_bytes(facts.device_bytes)}",
            need_bytes=facts.model_state_bytes,
            have_bytes=facts.device_bytes,
            place="activation policy",
            remedy="Use another policy, or a smaller model.",
        )
    left = min(problem.gpu_bytes, facts.device_bytes - facts.model_state_bytes)
    return _by_inactivity(problem, {Tier.GPU: left, Tier.SSD: problem.ssd_bytes}, "FlashNeuron")


def _checkmate(problem: ActivationProblem, facts: PolicyFacts) -> ActivationDecision:
    """Checkmate (MLSys 2020): the least recomputation within a memory budget, as a mixed-integer linear program. Copies do not enter, and
    drives are not used: as in the paper, the budget is the device and host memory.

    Here: blocks are alike, so that the program needs one whole number per operator, the blocks in which it is kept.

        maximise   sum of seconds x blocks kept
        such that  sum of bytes x blocks kept <= budget - inputs of blocks, 0 <= blocks kept <= blocks
    """
    rooms = problem.gpu_bytes, problem.ram_bytes
    check_boundaries(problem, rooms, "host memory and the device, beyond which Checkmate puts nothing,")
    budget = sum(rooms) - problem.boundaries
    counts, gap = _solve(problem, budget, facts.solver_seconds)
    return replace(_counted(replace(problem, ssd_bytes=0), counts), gap=gap)


def _solve(problem: ActivationProblem, budget: int, solver_seconds: float) -> tuple[dict[str, int], float]:
    """The blocks in which each operator is kept, and how far, as a part, they may be from the optimum."""
    order = problem.by_benefit
    if not order or not budget:
        return {}, 0.0
    try:
        from scipy import optimize
    except ImportError as error:
        raise ConfigError(
            "the policy checkmate is solved for by SciPy, which is not installed",
            place="activation policy",
            remedy="Install it: pip install 'lohan[policies]'.",
        ) from error
    # In units of what is largest, so that the solver's tolerances are parts and not bytes or seconds.
    longest = max(candidate.seconds_per_block for candidate in order)
    found = optimize.milp(
        [-candidate.seconds_per_block / longest for candidate in order],
        integrality=[1] * len(order),
        bounds=optimize.Bounds(0, problem.blocks),
        constraints=optimize.LinearConstraint([[candidate.bytes_per_block / budget for candidate in order]], ub=1),
        options={"time_limit": solver_seconds},
    )
    if found.x is None:  # stopped before it had anything: keeping nothing is always possible
        return {}, 1.0
    counts = {candidate.label: round(value) for candidate, value in zip(order, found.x, strict=True)}
    return counts, float(found.mip_gap or 0.0)


def _counted(problem: ActivationProblem, counts: Mapping[str, int]) -> ActivationDecision:
    """So many outputs of each operator, placed as ours are."""
    kept, amounts = place_outputs(problem, counts)
    return ActivationDecision(kept, amounts, problem.evaluate)


def _by_inactivity(problem: ActivationProblem, rooms: Mapping[Tier, int], who: str) -> ActivationDecision:
    """Everything kept: from the last block on the nearest of the tiers, what the backward comes to last in the furthest.

    Args:
        rooms: bytes of each tier that is used, nearest first.
        who: whose rule this is.
    """
    sizes: dict[str | None, int] = {candidate.label: candidate.bytes_per_block for candidate in problem.candidates}
    sizes[None] = problem.boundary_bytes
    labels: Sequence[str | None] = [None, *(candidate.label for candidate in problem.candidates)]
    left, found = dict(rooms), {tier: {label: list[int]() for label in labels} for tier in Tier}
    for block in reversed(range(problem.blocks)):
        for label in reversed(labels):
            tier = next((tier for tier, room in left.items() if sizes[label] <= room), None)
            if tier is None:
                raise _no_room(problem, sum(rooms.values()), f"{who}, with {' and '.join(rooms)} alone,")
            left[tier] -= sizes[label]
            found[tier][label].insert(0, block)
    kept, amounts = settle(problem, found)
    return ActivationDecision(kept, amounts, problem.evaluate)


def _no_room(problem: ActivationProblem, have_bytes: int, where: str) -> CapacityError:
    return CapacityError(
        f"all activations take {format_bytes(problem.everything)}; {where} has room for {format_bytes(have_bytes)}, output by output",
        need_bytes=problem.everything,
        have_bytes=have_bytes,
        place="activation policy",
        remedy="Use another policy, a smaller batch, or shorter sequences.",
    )


_RULES: Mapping[ActivationPolicy, Callable[[ActivationProblem], ActivationDecision]] = MappingProxyType(
    {
        ActivationPolicy.HOLISTIC: _holistic,
        ActivationPolicy.ZERO_INFINITY: _zero_infinity,
        ActivationPolicy.G10: _g10,
        ActivationPolicy.COLOSSAL: _colossal,
        ActivationPolicy.CPU_ACTIVATIONS: _cpu_activations,
        ActivationPolicy.KEEP_ALL: _keep_all,
        ActivationPolicy.RECOMPUTE_ALL: _recompute_all,
    }
)
_MEASURED_RULES: Mapping[ActivationPolicy, Callable[[ActivationProblem, PolicyFacts], ActivationDecision]] = MappingProxyType(
    {
        ActivationPolicy.CAPUCHIN: _capuchin,
        ActivationPolicy.CHECKMATE: _checkmate,
        ActivationPolicy.FLASHNEURON: _flashneuron,
    }
)
