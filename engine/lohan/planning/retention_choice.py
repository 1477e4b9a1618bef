"""Which operators' outputs are kept, and where: Algorithm 1 of the LoHan paper (section IV-D) over four tiers. Pure arithmetic.

Outputs are taken in descending benefit, measured seconds of recomputation per byte, block by block. What is kept fills the device first,
then host memory, then the drives: on the device it costs nothing but room. Inputs of blocks come before all outputs, since they cannot be
computed again; those that the device cannot hold are the least that leaves it (the paper's A_interBlock). The shortest step wins; of
several the one that keeps the least. That may be one that swaps nothing.

A step is convex along that order for one setting (`lohan.planning.step_cost`): what fills a tier grows with the bytes kept as the paper's
alpha A_G2M does, and each further byte saves less. So the minimum is found by halving.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Protocol

from lohan.errors import CapacityError
from lohan.planning.paper_model import Case
from lohan.planning.retention import Kept, Placed, PlacedBlocks, PlacedOperator, Retention
from lohan.planning.step_cost import Amounts, StepSeconds
from lohan.planning.step_inputs import Candidate
from lohan.planning.tiers import Tier
from lohan.units import format_bytes

MAX_POINTS = 32
"""Of a sweep that is shown."""
_SAME = 1e-9
"""Steps whose times differ by less than this part of them are equally long: rounding."""


class Evaluate(Protocol):
    """A step's time; see `lohan.planning.step_cost.StepCost`."""

    def __call__(self, amounts: Amounts) -> StepSeconds: ...

    def total(self, amounts: Amounts) -> float:
        """The same seconds, and nothing of what they are made of."""


@dataclass(frozen=True)
class ActivationProblem:
    """What there is to decide, for one model, batch, micro-batch and placement of everything else."""

    candidates: tuple[Candidate, ...]
    """In the order of the block's forward."""
    blocks: int
    boundary_bytes: int
    """Inputs of one block, for the whole batch: always kept."""
    gpu_bytes: int
    """Room on the device for inputs of blocks and kept outputs, beside everything else."""
    ram_bytes: int
    """Room in host memory for what leaves the device; what goes on to the drives passes through other buffers."""
    ssd_bytes: int
    evaluate: Evaluate
    near: int | None = None
    """Where the best place of a problem like this one lies: it is looked for from there on."""

    @cached_property
    def by_benefit(self) -> tuple[Candidate, ...]:
        """Algorithm 1's order; operators alike keep the order of the forward."""
        return tuple(sorted(self.candidates, key=lambda candidate: candidate.benefit, reverse=True))

    @property
    def boundaries(self) -> int:
        """Bytes of all blocks' inputs."""
        return self.blocks * self.boundary_bytes

    @property
    def rooms(self) -> tuple[int, int, int]:
        return self.gpu_bytes, self.ram_bytes, self.ssd_bytes

    @property
    def room(self) -> int:
        """Bytes that all tiers hold together."""
        return sum(self.rooms)

    @property
    def everything(self) -> int:
        """Bytes of all that may be kept: the paper's A_all."""
        return self.boundaries + self.blocks * sum(candidate.bytes_per_block for candidate in self.candidates)


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One amount that may be kept, and the step that it leads to."""

    amounts: Amounts
    seconds: float


@dataclass(frozen=True)
class ActivationDecision:
    """What is kept, where, and how long a step then takes."""

    kept: Kept
    amounts: Amounts
    evaluate: Evaluate = field(repr=False, compare=False)
    case: Case | None = None
    """None where nothing was searched for, or there is nothing to keep."""
    memory_bound: bool = False
    """Whether more would be kept if the tiers held more."""
    sweep: Sweep | None = field(default=None, compare=False)
    """What was searched along."""
    shortest_seconds: float = 0.0
    """Of the shortest step found, where a longer one was asked for that moves less."""
    gap: float | None = None
    """Of a solver that was stopped: how far, as a part, its best may be from the optimum."""

    @cached_property
    def seconds(self) -> StepSeconds:
        """The step, and what it is made of."""
        return self.evaluate(self.amounts)

    @cached_property
    def total(self) -> float:
        """Its seconds."""
        return self.evaluate.total(self.amounts)

    @cached_property
    def retention(self) -> Retention:
        """What is kept, as plans have it."""
        return self.kept.checked() if isinstance(self.kept, Placed) else self.kept

    @property
    def points(self) -> tuple[SweepPoint, ...]:
        """Of the search, in ascending bytes kept: what was looked at, and enough to draw the rest."""
        return self.sweep.points() if self.sweep is not None else ()


class Sweep:
    """The problem along Algorithm 1's order: place k keeps the first k outputs, block by block, operator by operator."""

    def __init__(self, problem: ActivationProblem) -> None:
        self._problem = problem
        order, blocks = problem.by_benefit, problem.blocks
        self._bytes = list(accumulate((blocks * candidate.bytes_per_block for candidate in order), initial=problem.boundaries))
        self._saved = list(accumulate((blocks * candidate.seconds_per_block for candidate in order), initial=0.0))
        self._known: dict[int, float] = {}
        self._looked_at: set[int] = set()
        self._best: int | None = None
        self.places = len(order) * blocks
        check_boundaries(problem, problem.rooms, "this machine")
        self.last = self._last()
        """The last place that the tiers have room for."""

    def _last(self) -> int:
        whole = bisect_right(self._bytes, self._problem.room) - 1
        if whole == len(self._problem.by_benefit):
            return self.places
        left = self._problem.room - self._bytes[whole]
        return whole * self._problem.blocks + left // self._problem.by_benefit[whole].bytes_per_block

    def counts(self, place: int) -> dict[str, int]:
        """In how many blocks each operator is kept."""
        blocks = self._problem.blocks
        numbers = {candidate.label: min(blocks, place - index * blocks) for index, candidate in enumerate(self._problem.by_benefit)}
        return {label: number for label, number in numbers.items() if number > 0}

    def amounts(self, place: int) -> Amounts:
        """Tiers filled to the last byte, as if an output could be divided."""
        problem = self._problem
        whole, part = divmod(place, problem.blocks)
        size, saved = float(self._bytes[whole]), self._saved[whole]
        if part:
            size += part * problem.by_benefit[whole].bytes_per_block
            saved += part * problem.by_benefit[whole].seconds_per_block
        gpu = min(size, problem.gpu_bytes)
        ram = min(size - gpu, problem.ram_bytes)
        return Amounts(gpu, ram, size - gpu - ram, saved)

    def seconds(self, place: int) -> float:
        if place not in self._known:
            self._known[place] = self._problem.evaluate.total(self.amounts(place))
        return self._known[place]

    def best(self) -> int:
        """The least place of those with the shortest step: the time falls, then rises."""
        if self._best is None:
            low, high = 0, self.last
            near = self._problem.near
            if near is not None and high:
                low, high = self._around(min(near, high - 1))
            self._best = _first(low, high, self._falls_no_more)
        return self._best

    def _falls_no_more(self, place: int) -> bool:
        return self.seconds(place) <= self.seconds(place + 1) * (1 + _SAME)

    def _around(self, near: int) -> tuple[int, int]:
        """Between which places the best lies, in ever longer steps from one that is likely."""
        stride = 1
        if self._falls_no_more(near):
            while near - stride >= 0 and self._falls_no_more(near - stride):
                near, stride = near - stride, 2 * stride
            return max(0, near - stride + 1), near
        while near + stride < self.last and not self._falls_no_more(near + stride):
            near, stride = near + stride, 2 * stride
        return near + 1, min(near + stride, self.last)

    def leanest(self, best: int, longest_seconds: float) -> int:
        """The place up to `best` that sends least out of the device, of those whose step is no longer than that; `best` if none is."""
        least = self.amounts(0).swapped_bytes
        # The last place that sends no more than the inputs that must go.
        low = _first(0, best, lambda place: self.amounts(place + 1).swapped_bytes > least)

        def is_short(place: int) -> bool:
            self._looked_at.add(place)
            return self.seconds(place) <= longest_seconds

        return _first(low, best, is_short)

    def points(self) -> tuple[SweepPoint, ...]:
        """The places by which halving finds the best, and some between them."""

        def falls_no_more(place: int) -> bool:
            self._looked_at.update((place, place + 1))
            return self._falls_no_more(place)

        _first(0, self.last, falls_no_more)
        places = {*self._looked_at, *range(0, self.last, max(1, -(-self.last // MAX_POINTS))), self.last}
        return tuple(SweepPoint(self.amounts(place), self.seconds(place)) for place in sorted(places))


def _first(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The first place between the two from which on something holds; `high` if it never does."""
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


def choose_retention(problem: ActivationProblem, *, longest_seconds: float = 0.0) -> ActivationDecision:
    """The retention with the shortest step; or, where steps of `longest_seconds` are as welcome, of those the one that moves least.

    Raises:
        CapacityError: the tiers do not even hold the inputs of blocks.
    """
    sweep = Sweep(problem)
    best = sweep.best()
    decision = _placed(problem, sweep, best)
    # The sweep divides the output that a tier ends in, and places do not: where that made it seem worth keeping, one less is better. Where
    # it made no difference the sweep has said that it is not.
    while best and decision.total > sweep.seconds(best) * (1 + _SAME):
        less = _placed(problem, sweep, best - 1)
        if less.total >= decision.total * (1 - _SAME):
            break
        best, decision = best - 1, less
    shortest = decision
    if decision.total < longest_seconds:
        for place in range(sweep.leanest(best, longest_seconds), best):
            if (less := _placed(problem, sweep, place)).total <= longest_seconds:
                decision = less
                break
    case: Case | None
    if not sweep.places:
        case = None
    elif best == sweep.last:
        case = Case.GPU_BOUND
    elif shortest.amounts.swapped_bytes <= sweep.amounts(0).swapped_bytes:
        case = Case.TRANSFER_BOUND
    else:
        case = Case.INTERIOR
    memory_bound = best == sweep.last < sweep.places
    return replace(decision, case=case, memory_bound=memory_bound, sweep=sweep, shortest_seconds=shortest.total)


def forced_retention(problem: ActivationProblem, swapped_bytes: int) -> ActivationDecision:
    """Along the same order as far as so many bytes leave the device, or as the tiers have room: a point of the paper's Figure 9b.

    Raises:
        CapacityError: the tiers do not even hold the inputs of blocks.
    """
    sweep = Sweep(problem)
    return _placed(problem, sweep, _first(0, sweep.last, lambda place: sweep.amounts(place + 1).swapped_bytes > swapped_bytes))


def _placed(problem: ActivationProblem, sweep: Sweep, place: int) -> ActivationDecision:
    kept, amounts = place_outputs(problem, sweep.counts(place))
    return ActivationDecision(kept, amounts, problem.evaluate)


def check_boundaries(problem: ActivationProblem, rooms: Sequence[int], where: str) -> None:
    """Look whether the inputs of all blocks find room, each whole in one tier.

    Args:
        rooms: bytes of the tiers that may hold them.
        where: whose they are, as the sentence has it.

    Raises:
        CapacityError: they find none.
    """
    if problem.boundary_bytes and sum(room // problem.boundary_bytes for room in rooms) < problem.blocks:
        raise CapacityError(
            f"the inputs of {problem.blocks} blocks take {format_bytes(problem.boundaries)}, and {where} has {format_bytes(sum(rooms))}",
            need_bytes=problem.boundaries,
            have_bytes=sum(rooms),
            place="activations",
            remedy="Use a smaller batch, or shorter sequences.",
        )


def spread(count: int, blocks: int) -> tuple[int, ...]:
    """`count` of `blocks` blocks, evenly: copies of a run of neighbouring blocks would still wait when the forward ends (6 of 26 blocks, 12
    GB, cost nothing spread evenly, and 0.2 s as neighbours)."""
    return tuple((2 * number + 1) * blocks // (2 * count) for number in range(count))


def place_outputs(problem: ActivationProblem, counts: Mapping[str, int]) -> tuple[Placed, Amounts]:
    """Blocks and tiers for so many outputs of each operator, and what that amounts to.

    An operator's blocks are spread evenly. Inputs stay on the device from the last block on, which the backward needs first: their copies
    would have the least time. Of outputs the part that the device cannot hold leaves it spread evenly over the blocks, by bytes, and of
    these the part that host memory cannot hold goes on to the drives likewise. What of a block leaves has that block's own time to do so:
    measured with 20 GB of 26 blocks, all of the first 16, each of these took 20 ms and not 15, and a step 0.11 s more. Whole outputs leave
    gaps: one that finds no room in any tier is not kept.

    Args:
        counts: by label; in so many blocks an operator is kept.
    """
    order = [candidate for candidate in problem.by_benefit if counts.get(candidate.label)]
    sizes = {candidate.label: candidate.bytes_per_block for candidate in order}
    every = tuple(range(problem.blocks))
    kept = {label: every if counts[label] == problem.blocks else spread(counts[label], problem.blocks) for label in sizes}
    found: Places = {tier: {label: [] for label in (None, *sizes)} for tier in Tier}
    inputs, left = _inputs_on_device(problem)
    found[Tier.GPU][None] = list(every[inputs:])
    rooms = _outside({None: every[:inputs]}, {None: problem.boundary_bytes}, (problem.ram_bytes, problem.ssd_bytes), found)
    _outside(_beside_device(kept, sizes, left, found[Tier.GPU]), sizes, rooms, found)
    return settle(problem, found)


Places = Mapping[Tier, dict[str | None, list[int]]]
"""In which blocks an operator's outputs lie in a tier, ascending; None: the block's input."""


def _inputs_on_device(problem: ActivationProblem) -> tuple[int, int]:
    """The first block whose input stays on the device, and what is left there then."""
    size = problem.boundary_bytes
    stay = min(problem.blocks, max(0, problem.gpu_bytes) // size) if size else problem.blocks
    return problem.blocks - stay, problem.gpu_bytes - stay * size


def _beside_device(
    kept: Mapping[str, Sequence[int]], sizes: Mapping[str, int], left: int, on_device: dict[str | None, list[int]]
) -> Mapping[str, Sequence[int]]:
    """Put outputs on the device while it has room; returns the blocks in which those that leave it do, by operator.

    Args:
        kept: the blocks in which an operator's outputs are kept, in descending benefit.
        left: bytes of the device.
    """
    if left < min(sizes.values(), default=0):
        return kept
    total = sum([sizes[label] * len(blocks) for label, blocks in kept.items()])
    if total <= left:
        on_device.update({label: list(blocks) for label, blocks in kept.items()})
        return {}
    leaving: dict[str, list[int]] = {label: [] for label in kept}
    _divide(kept, sizes, total, (left, total), on_device, leaving)
    return leaving


def place_inputs(blocks: int, boundary_bytes: int, rooms: tuple[int, int, int]) -> Placed:
    """Where the inputs of blocks wait if nothing else is kept; those that no tier has room for are left on the device.

    Args:
        boundary_bytes: of one block's inputs.
        rooms: bytes of the device, host memory and the drives.
    """
    return place_outputs(ActivationProblem((), blocks, boundary_bytes, *rooms, _NothingChosen()), {})[0]


class _NothingChosen:
    def __call__(self, amounts: Amounts) -> StepSeconds:
        raise AssertionError("nothing is chosen")

    def total(self, amounts: Amounts) -> float:
        raise AssertionError("nothing is chosen")


def _outside(leaving: Mapping[Any, Sequence[int]], sizes: Mapping[Any, int], rooms: tuple[int, int], found: Places) -> tuple[int, int]:
    """Put outputs into host memory or on the drives; returns what is left of the rooms.

    Args:
        leaving: the blocks in which an operator's outputs leave the device, in descending benefit; None: inputs.
    """
    total = sum([sizes[label] * len(blocks) for label, blocks in leaving.items()])
    if total <= rooms[0]:
        found[Tier.RAM].update({label: list(blocks) for label, blocks in leaving.items()})
        return rooms[0] - total, rooms[1]
    return _divide(leaving, sizes, total, rooms, found[Tier.RAM], found[Tier.SSD])


def _divide(
    blocks_of: Mapping[Any, Sequence[int]],
    sizes: Mapping[Any, int],
    total: int,
    rooms: tuple[int, int],
    nearer: dict[Any, list[int]],
    farther: dict[Any, list[int]],
) -> tuple[int, int]:
    """Put what a nearer tier cannot hold into a farther one, spread evenly over the blocks, by bytes; returns what is left of their rooms.

    From the last block on, which is needed first: what the evenness leaves open goes farther in the first ones.

    Args:
        blocks_of: of each operator, in descending benefit.
        total: bytes of all.
    """
    near, far = rooms
    over = total - near
    by_block: dict[int, list[str | None]] = {}
    for label in reversed(list(blocks_of)):
        for block in blocks_of[label]:
            by_block.setdefault(block, []).append(label)
    seen = gone = 0
    for block in sorted(by_block, reverse=True):
        for label in by_block[block]:
            size = sizes[label]
            seen += size
            # Where the farther tier's share of what was seen, over / total, is further from being met without this one than with it.
            wanted = gone + size <= over and over * seen >= total * (gone + size / 2)
            if size <= far and (wanted or size > near):
                gone, far = gone + size, far - size
                farther[label].append(block)
            elif size <= near:
                near -= size
                nearer[label].append(block)
    for label in blocks_of:
        nearer[label].reverse()
        farther[label].reverse()
    return near, far


def settle(problem: ActivationProblem, found: Places) -> tuple[Placed, Amounts]:
    """What so many outputs in their tiers are as a decision, and amount to. Every block's input has a place."""
    gpu, ram, ssd = (found[tier] for tier in Tier)
    size = problem.boundary_bytes
    gpu_bytes, ram_bytes, ssd_bytes = (size * len(tier.get(None, ())) for tier in (gpu, ram, ssd))
    operators, saved = [], 0.0
    for candidate in problem.candidates:
        label = candidate.label
        on_gpu, in_ram, on_ssd = gpu.get(label, ()), ram.get(label, ()), ssd.get(label, ())
        count = len(on_gpu) + len(in_ram) + len(on_ssd)
        if count:
            gpu_bytes += candidate.bytes_per_block * len(on_gpu)
            ram_bytes += candidate.bytes_per_block * len(in_ram)
            ssd_bytes += candidate.bytes_per_block * len(on_ssd)
            saved += candidate.seconds_per_block * count
            operators.append(PlacedOperator(label, tuple(on_gpu), tuple(in_ram), tuple(on_ssd)))
    inputs = PlacedBlocks(ram_blocks=tuple(ram.get(None, ())), ssd_blocks=tuple(ssd.get(None, ())))  # the others stay on the device
    return Placed(tuple(operators), inputs), Amounts(gpu_bytes, ram_bytes, ssd_bytes, saved)
