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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

from lohan.errors import CapacityError
from lohan.planning.paper_model import Case
from lohan.planning.retention import BlockTiers, KeptOperator, Retention
from lohan.planning.step_cost import Amounts, StepSeconds
from lohan.planning.step_inputs import Candidate
from lohan.planning.tiers import Tier
from lohan.units import format_bytes

MAX_POINTS = 32
"""Of a sweep that is shown."""
_SAME = 1e-9
"""Steps whose times differ by less than this part of them are equally long: rounding."""


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
    evaluate: Callable[[Amounts], StepSeconds]
    """A step's time; see `lohan.planning.step_cost.step_seconds`."""

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


@dataclass(frozen=True, slots=True)
class ActivationDecision:
    """What is kept, where, and how long a step then takes."""

    retention: Retention
    amounts: Amounts
    seconds: StepSeconds
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
            self._known[place] = self._problem.evaluate(self.amounts(place)).total
        return self._known[place]

    def best(self) -> int:
        """The least place of those with the shortest step."""
        low, high = 0, self.last
        while low < high:  # the time falls, then rises: the first place that is no longer than the next
            middle = (low + high) // 2
            if self.seconds(middle) <= self.seconds(middle + 1) * (1 + _SAME):
                high = middle
            else:
                low = middle + 1
        return low

    def leanest(self, best: int, longest_seconds: float) -> int:
        """The place up to `best` that sends least out of the device, of those whose step is no longer than that; `best` if none is."""
        least = self.amounts(0).swapped_bytes
        low, high = 0, best
        while low < high:  # the last place that sends no more than the inputs that must go
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.amounts(middle).swapped_bytes <= least else (low, middle - 1)
        high = best
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.seconds(middle) <= longest_seconds else (middle + 1, high)
        return low

    def points(self) -> tuple[SweepPoint, ...]:
        """All places that were looked at, and some between them."""
        for place in (*range(0, self.last, max(1, -(-self.last // MAX_POINTS))), self.last):
            self.seconds(place)
        return tuple(SweepPoint(self.amounts(place), seconds) for place, seconds in sorted(self._known.items()))


def choose_retention(problem: ActivationProblem, *, longest_seconds: float = 0.0) -> ActivationDecision:
    """The retention with the shortest step; or, where steps of `longest_seconds` are as welcome, of those the one that moves least.

    Raises:
        CapacityError: the tiers do not even hold the inputs of blocks.
    """
    sweep = Sweep(problem)
    best = sweep.best()
    decision = _placed(problem, sweep, best)
    # The sweep divides the output that a tier ends in, and places do not: where that made it seem worth keeping, one less is better.
    while best and (less := _placed(problem, sweep, best - 1)).seconds.total < decision.seconds.total * (1 - _SAME):
        best, decision = best - 1, less
    shortest = decision
    if decision.seconds.total < longest_seconds:
        for place in range(sweep.leanest(best, longest_seconds), best):
            if (less := _placed(problem, sweep, place)).seconds.total <= longest_seconds:
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
    return replace(decision, case=case, memory_bound=memory_bound, sweep=sweep, shortest_seconds=shortest.seconds.total)


def forced_retention(problem: ActivationProblem, swapped_bytes: int) -> ActivationDecision:
    """Along the same order as far as so many bytes leave the device, or as the tiers have room: a point of the paper's Figure 9b.

    Raises:
        CapacityError: the tiers do not even hold the inputs of blocks.
    """
    sweep = Sweep(problem)
    swapped = [sweep.amounts(place).swapped_bytes for place in range(sweep.last + 1)]
    return _placed(problem, sweep, max(0, bisect_right(swapped, swapped_bytes) - 1))


def _placed(problem: ActivationProblem, sweep: Sweep, place: int) -> ActivationDecision:
    retention, amounts = place_outputs(problem, sweep.counts(place))
    return ActivationDecision(retention, amounts, problem.evaluate(amounts))


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


Piece = tuple[int, str | None]
"""A block, and the operator whose output of it is meant; None: the block's input."""


def place_outputs(problem: ActivationProblem, counts: Mapping[str, int]) -> tuple[Retention, Amounts]:
    """Blocks and tiers for so many outputs of each operator, and what that amounts to.

    An operator's blocks are spread evenly. From the last block on, which the backward needs first, inputs and then outputs stay on the
    device while it has room: their copies would have the least time. Of the rest the part that host memory cannot hold goes to the drives,
    spread evenly too, by bytes. Whole outputs leave gaps: one that finds no room in any tier is not kept.

    Args:
        counts: by label; in so many blocks an operator is kept.
    """
    blocks = {label: frozenset(spread(count, problem.blocks)) for label, count in counts.items()}
    order = [candidate for candidate in problem.by_benefit if candidate.label in blocks]
    sizes: dict[str | None, int] = {candidate.label: candidate.bytes_per_block for candidate in order}
    sizes[None] = problem.boundary_bytes
    inputs: list[Piece] = [(block, None) for block in range(problem.blocks)]
    outputs: list[Piece] = [
        (block, candidate.label) for block in range(problem.blocks) for candidate in reversed(order) if block in blocks[candidate.label]
    ]
    tiers: dict[Piece, Tier] = {}
    gpu_left = problem.gpu_bytes
    for piece in (*reversed(inputs), *reversed(outputs)):
        if sizes[piece[1]] <= gpu_left:
            gpu_left -= sizes[piece[1]]
            tiers[piece] = Tier.GPU
    rooms = problem.ram_bytes, problem.ssd_bytes
    for pieces in (inputs, outputs):
        leaving = [piece for piece in pieces if piece not in tiers]
        tiers.update(outside := dict(_outside(leaving, sizes, *rooms)))
        ram, ssd = (sum(sizes[label] for (_, label), found in outside.items() if found is tier) for tier in (Tier.RAM, Tier.SSD))
        rooms = rooms[0] - ram, rooms[1] - ssd
    return settle(problem, tiers)


def place_inputs(blocks: int, boundary_bytes: int, rooms: tuple[int, int, int]) -> Retention:
    """Where the inputs of blocks wait if nothing else is kept; those that no tier has room for are left on the device.

    Args:
        boundary_bytes: of one block's inputs.
        rooms: bytes of the device, host memory and the drives.
    """

    def evaluate(_: Amounts) -> StepSeconds:
        raise AssertionError("nothing is chosen")

    retention, _ = place_outputs(ActivationProblem((), blocks, boundary_bytes, *rooms, evaluate), {})
    return retention


def _outside(pieces: Sequence[Piece], sizes: Mapping[str | None, int], ram: int, ssd: int) -> Iterator[tuple[Piece, Tier]]:
    """Host memory or the drives, with so many bytes left in each, for pieces in the order of the forward."""
    total = sum(sizes[label] for _, label in pieces)
    over = max(0, total - ram)
    seen = on_drives = 0
    for piece in pieces:
        size = sizes[piece[1]]
        seen += size
        # To the drives where their share of what was seen, over / total, is further from being met without this one than with it.
        wanted = on_drives + size <= over and over * seen >= total * (on_drives + size / 2)
        if size <= ssd and (wanted or size > ram):
            on_drives, ssd = on_drives + size, ssd - size
            yield piece, Tier.SSD
        elif size <= ram:
            ram -= size
            yield piece, Tier.RAM


def settle(problem: ActivationProblem, tiers: Mapping[Piece, Tier]) -> tuple[Retention, Amounts]:
    """What so many pieces in their tiers are as a retention, and amount to. Every block's input is among the pieces."""

    found: dict[tuple[str | None, Tier], list[int]] = {}
    for (block, label), tier in sorted(tiers.items(), key=lambda item: item[0][0]):
        found.setdefault((label, tier), []).append(block)

    def at(label: str | None, tier: Tier) -> tuple[int, ...]:
        return tuple(found.get((label, tier), ()))

    by_tier = {tier: problem.boundary_bytes * len(at(None, tier)) for tier in Tier}
    operators, saved = [], 0.0
    for candidate in problem.candidates:
        blocks = {tier: at(candidate.label, tier) for tier in Tier}
        for tier in Tier:
            by_tier[tier] += candidate.bytes_per_block * len(blocks[tier])
        count = sum(map(len, blocks.values()))
        saved += candidate.seconds_per_block * count
        if count:
            places = {f"{tier}_blocks": blocks[tier] for tier in Tier}
            operators.append(KeptOperator(label=candidate.label, **places))
    inputs = BlockTiers(ram_blocks=at(None, Tier.RAM), ssd_blocks=at(None, Tier.SSD))  # the others stay on the device
    amounts = Amounts(by_tier[Tier.GPU], by_tier[Tier.RAM], by_tier[Tier.SSD], saved)
    return Retention(operators=tuple(operators), boundaries=inputs), amounts
