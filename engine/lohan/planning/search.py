"""Chooses micro-batch, units kept on the device, gradient buffers, states in RAM and activations together, by the time a step takes.

Two things are weighed. The *shortest* step is looked for first, over micro-batches that are powers of two, none, half and all of the units
that the device has room to keep, few or all gradient buffers, and quarters of the states that RAM has room for; between them the time
changes little. Then, with that micro-batch, of all ways whose step is at most `MARGIN` longer the one is taken that moves the fewest bytes:
figures are no more exact than that, and what is moved for nothing wears drives out and is in everybody's way.

Most ways are never counted out. With everything else equal a step gets no longer when more states lie in RAM, more gradients have room,
more weights stay on the device, or activations have more room; so a way that has the best of each at once (`Chooser.bound`) is a lower
bound of all that share it. And since the room that states leave to activations is linear, the least time is convex in the states in RAM:
once it rises, it goes on rising. `tests/engine/test_search.py` holds the result to an exhaustive search.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from lohan.config import GradientBuffers
from lohan.errors import CapacityError
from lohan.planning.choice import Choice, Chooser
from lohan.planning.fit import Fit
from lohan.planning.forecast import Alternative
from lohan.units import MIB

MARGIN = 1.01
"""Steps that are longer than the shortest by no more than this factor are as good, and the one that moves least is taken."""
SHORTER = 0.995
"""A step must be shorter by this factor to be taken for a smaller micro-batch: the figures are no more exact, and each region has costs of
its own that no figure has."""
RAM_PARTS = 4
"""Of the states that have room in RAM: as finely they are divided."""


@dataclass(slots=True)
class Tried:
    """What one micro-batch comes to."""

    micro_batch: int
    ways: list[Choice] = field(default_factory=list)
    """Those that were counted out, but for those that cannot be."""
    refusal: CapacityError | None = None

    @property
    def best(self) -> Choice | None:
        """The shortest step; of several the first."""
        return min(self.ways, key=lambda way: way.seconds, default=None)


@dataclass(frozen=True, slots=True)
class Chosen:
    """The way that is taken, and what it was compared with."""

    choice: Choice
    shortest: Choice
    """With the same micro-batch; the choice moves less, or is this one."""
    ways: tuple[Choice, ...]
    """With the same micro-batch, those that were counted out."""
    alternatives: tuple[Alternative, ...]
    """The best of each micro-batch."""


class Search:
    """Over the ways to run one batch.

    Args:
        fit: the batch and the machine, before anything is chosen but grain and slots.
    """

    def __init__(self, fit: Fit, chooser: Chooser) -> None:
        self._fit, self._chooser = fit, chooser

    def choose(self, micro_batches: Sequence[int]) -> Chosen | None:
        """The way to run the batch; None where the model's block was never measured.

        Args:
            micro_batches: that fit, descending.

        Raises:
            CapacityError: the policy cannot be followed on this machine, with whatever micro-batch.
        """
        best: Choice | None = None
        taken: Tried | None = None
        refusal: CapacityError | None = None
        tried = []
        for micro_batch in micro_batches:
            found = self._try(micro_batch, best)
            tried.append(found)
            refusal = refusal or found.refusal
            if found.best is not None and (best is None or found.best.seconds < best.seconds * SHORTER):
                best, taken = found.best, found
        if best is None and refusal is not None:
            raise refusal
        if best is None or taken is None:
            return None
        choice = self._leanest(best, taken.ways)
        alternatives = tuple(_alternative(choice if found is taken else found.best, found) for found in tried)
        return Chosen(choice, best, tuple(taken.ways), alternatives)

    def _try(self, micro_batch: int, best: Choice | None) -> Tried:
        """What may be shorter than `best`; where nothing is, what `best` would take with this micro-batch."""
        tried = Tried(micro_batch)
        longest = best.seconds * SHORTER if best is not None else None
        seen = set[tuple[int, int, GradientBuffers]]()
        for fit, kept_units in self.ways(micro_batch, longest=longest, tried=tried):
            way = kept_units, fit.placement.ram_bytes, fit.order.gradients
            if way not in seen:
                self._decide(fit, kept_units, tried)
            seen.add(way)
        if best is not None and not tried.ways:
            self._decide(best.fit, min(best.kept_units, self._most_kept(micro_batch)), tried)
        return tried

    def _decide(self, fit: Fit, kept_units: int, tried: Tried) -> None:
        try:
            way = self._chooser.decide(fit, tried.micro_batch, kept_units)
        except CapacityError as error:
            tried.refusal = tried.refusal or error
        else:
            tried.ways += [way] if way is not None else []

    def ways(self, micro_batch: int, *, longest: float | None = None, tried: Tried | None = None) -> Iterator[tuple[Fit, int]]:
        """Fits and kept units with this micro-batch, the most in RAM and on the device first.

        Args:
            longest: ways whose bound is longer are left out; None: none are.
            tried: what was made of those that came before: what cannot come near their best is left out.
        """
        kept = self._kept(micro_batch)
        for buffers in self._buffers(micro_batch):
            sizes = ram_sizes(buffers, micro_batch)
            most, least = buffers.with_ram_states(sizes[0]), buffers.with_ram_states(sizes[-1])
            if tried is not None and self._is_longer(longest, most, least, micro_batch, kept[0], 0):
                continue
            if tried is not None:
                before = len(tried.ways)
                yield most, kept[0]
                if len(tried.ways) == before:
                    yield least, 0
                if len(tried.ways) == before:
                    continue  # what does not fit with the least of everything fits with nothing
            for kept_units in kept:
                limit = longest
                if tried is not None and tried.best is not None:
                    limit = min(tried.best.seconds * MARGIN, longest or tried.best.seconds * MARGIN)
                if tried is not None and self._is_longer(limit, most, least, micro_batch, kept_units, kept_units):
                    continue
                yield from self._until_longer([buffers.with_ram_states(size) for size in sizes], kept_units, tried)

    def _until_longer(self, fits: Sequence[Fit], kept_units: int, tried: Tried | None) -> Iterator[tuple[Fit, int]]:
        """Those with ever less in RAM, until their steps get longer by more than the margin."""
        shortest: float | None = None
        for fit in fits:
            before = len(tried.ways) if tried is not None else 0
            yield fit, kept_units
            if tried is None or len(tried.ways) == before:
                continue
            seconds = tried.ways[-1].seconds
            if shortest is not None and seconds > shortest * MARGIN and self._chooser.is_ours:
                return
            shortest = seconds if shortest is None else min(shortest, seconds)

    def _is_longer(self, limit: float | None, most: Fit, least: Fit, micro_batch: int, kept_units: int, rooms_of: int) -> bool:
        if limit is None:
            return False
        try:
            return self._chooser.bound(most, least, micro_batch, kept_units, rooms_of=rooms_of) > limit
        except CapacityError:
            return False  # which the decision will name

    def _leanest(self, best: Choice, ways: Sequence[Choice]) -> Choice:
        """Of the ways that are no longer than the margin the one that moves least; of several the shortest."""
        if not self._chooser.is_ours:
            return best
        longest = best.seconds * MARGIN
        leanest = best
        for way in sorted((way for way in ways if way.seconds <= longest), key=lambda way: way.least_moved_bytes):
            if way.least_moved_bytes > leanest.moved_bytes:
                break
            lean = self._chooser.decide(way.fit, way.micro_batch, way.kept_units, longest_seconds=longest)
            assert lean is not None, "it was measured when it was tried"
            if lean.seconds <= longest and (lean.moved_bytes, lean.seconds) < (leanest.moved_bytes, leanest.seconds):
                leanest = lean
        return leanest

    def _most_kept(self, micro_batch: int) -> int:
        return self._fit.most_kept_units(micro_batch, self._fit.inputs_placed(micro_batch, 0))

    def _kept(self, micro_batch: int) -> list[int]:
        """Numbers of kept units, descending."""
        most = self._most_kept(micro_batch)
        return sorted({most, most // 2, 0} if self._chooser.is_ours else {most, 0}, reverse=True)

    def _buffers(self, micro_batch: int) -> list[Fit]:
        """With all gradient buffers and with few, as far as that is open, and host memory has room beside nothing else."""
        fit = self._fit
        if not fit.chooses_gradient_buffers:
            return [fit]
        every = fit.with_engine(gradient_buffers=GradientBuffers.ALL)
        _, on_host = every.memory(micro_batch, 0, every.inputs_placed(micro_batch, 0))
        few = fit.with_engine(gradient_buffers=GradientBuffers.FEW)
        return [every, few] if on_host.used_bytes <= on_host.capacity_bytes else [few]


def ram_sizes(fit: Fit, micro_batch: int) -> list[int]:
    """Bytes of states that may lie in RAM, descending: what was asked for, else parts of what has room."""
    if not fit.chooses_ram_states:
        return [fit.placement.ram_bytes]
    least = fit.least_ram_states()
    most = max(least, fit.most_ram_states(micro_batch, fit.inputs_placed(micro_batch, 0)))
    parts = {least + (most - least) * part // RAM_PARTS for part in range(RAM_PARTS + 1)}
    whole = {size if size in (least, most) else size // MIB * MIB for size in parts}
    return sorted(whole, reverse=True)


def _alternative(way: Choice | None, tried: Tried) -> Alternative:
    if way is None:
        reason = tried.refusal.message if tried.refusal is not None else ""
        return Alternative(micro_batch_size=tried.micro_batch, kept_units=0, seconds=None, reason=reason)
    return Alternative(
        micro_batch_size=way.micro_batch,
        kept_units=way.kept_units,
        gradient_buffers=str(way.fit.order.gradients),
        ram_state_bytes=way.fit.placement.ram_bytes,
        seconds=way.seconds,
    )
