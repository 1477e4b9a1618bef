"""How long a step takes in the state that steps come to: forward, backward, and what of the updates neither hides. Pure arithmetic.

With F, B and U for what a forward, a backward without updates and all updates ask of the machine (`lohan.planning.cost_model.Demand`), T
for the time that a demand takes, x for the share of the updates that is done while the backward goes on, and f for the share of the unit
that the next forward needs first:

    step = T(B + x U) + L + T(F + (1 - x - f + r) U)

- L is the way of that unit from the device through its update and back: the last to arrive, the first to be needed; nothing hides it. B
  and F are without it.
- r is the share of steps whose updates are done again (`redone_share`).
- Where updates begin on arrival, g buffers hold the gradients of g of n units, so that the backward gets at most g units ahead of the
  updates: 1 - g/n <= x <= 1 - f. Where they wait for the backward's end, x = 0.
- Where the updates left at the backward's end go on in the backward's order (few buffers), the first unit comes last, and nothing hides
  them: step = T(B + x U) + T((1 - x + r) U) + T(F) + the first unit's copies.

The engine updates as early as it can; the largest x of those that make the step shortest stands for that: a bound that it comes close to.
T is convex in the demand, so the step is convex in the bytes that are swapped, for the best x too.

Host memory: weights pass through it once on their way to the device, and once more where they come from a drive; gradients once, once in
the update, and where the CPU computes once for their norm, which a GPU takes before they leave it, in a few hundredths of the time of their
copy; kept activations twice, and on drives four times; an update's states twice within it, and as often as they are read, written and
summed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter

from lohan.config import Durability
from lohan.planning.cost_model import Demand, LinearTerms, PhaseSeconds, Rates, Term, update_traffic
from lohan.planning.schedule import Begin, UpdateOrder
from lohan.planning.state_form import StateForm


@dataclass(frozen=True, slots=True)
class Amounts:
    """What becomes of a batch's activations: bytes by tier, the inputs of blocks among them, and what keeping them saves."""

    gpu_bytes: float = 0.0
    ram_bytes: float = 0.0
    ssd_bytes: float = 0.0
    saved_seconds: float = 0.0
    """Of recomputation on the device."""

    @property
    def swapped_bytes(self) -> float:
        """That leave the device: the paper's A_G2M."""
        return self.ram_bytes + self.ssd_bytes

    @property
    def kept_bytes(self) -> float:
        return self.gpu_bytes + self.swapped_bytes


@dataclass(frozen=True, slots=True)
class StepSetting:
    """A step of one model at one batch, all but what becomes of its activations."""

    forward_seconds: float
    """Of the device, for the whole batch."""
    backward_seconds: float
    """Of the device, everything recomputed."""
    forward_weight_bytes: float
    """Copied to the device in the forward."""
    backward_weight_bytes: float
    """Copied once more in the backward: less what stayed."""
    trainable_parameters: int
    form: StateForm
    durability: Durability
    order: UpdateOrder
    read_share: float
    """Of weights and states: what lies on the drives alone."""
    written_share: float
    """Of states: what every step writes to the drives."""
    trainable_units: int
    gradient_buffers: int
    """Units whose gradients find room in host memory while they wait for their update."""
    first_unit_share: float
    """The part of the trainable parameters that the next forward needs first."""
    reorders_left: bool = True
    """Whether the updates that are left at the backward's end are done in the order in which the next forward needs them."""
    redone_share: float = 0.0
    """The part of all updates that is taken back and done again: of speculated ones those of clipped steps."""
    speculated_share: float = 1.0
    """Of the updates, what may begin before the norm is known where the order speculates."""
    forward_launch_seconds: float = 0.0
    """In which the forward's kernels are queued, for the whole batch."""
    backward_launch_seconds: float = 0.0

    @property
    def gradient_bytes(self) -> int:
        return self.trainable_parameters * (2 if self.form.is_split else 4)

    @property
    def state_bytes(self) -> int:
        return self.form.state_bytes(self.trainable_parameters)


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """A step's time and what it is made of."""

    forward: PhaseSeconds
    """With the updates that are left under it."""
    backward: PhaseSeconds
    """With the updates that are done while it goes on."""
    exposed_seconds: float
    """Between the two: updates that nothing hides."""
    updated_share: float
    """Of the updates, what is done while the backward goes on."""

    @property
    def total(self) -> float:
        return self.forward.total + self.backward.total + self.exposed_seconds

    @property
    def binding(self) -> Term:
        """What binds for longest."""
        bound: dict[Term, float] = {}
        for phase in (self.backward, self.forward):
            bound[phase.binding] = bound.get(phase.binding, 0.0) + phase.total
        return max(bound, key=lambda term: bound[term])


class StepCost:
    """The time of a step as a function of what becomes of its activations.

    Raises:
        ConfigError: the step needs a resource that the machine has no rate for.
    """

    def __init__(self, setting: StepSetting, rates: Rates) -> None:
        self.setting, self.rates = setting, rates
        self._terms = LinearTerms(rates)
        self._passes = 2 if rates.on_cpu else 1
        """How often a copy to or from the device touches a byte of host memory."""
        self._first_bytes = setting.first_unit_share * setting.gradient_bytes
        """Weights of the unit that the forward needs first; P16 is as large as G16."""
        self._last_bytes = 0.0 if setting.order.begin is Begin.AFTER_BACKWARD else self._first_bytes
        """Gradients that arrive when the backward has ended: none that updates would wait for where they all wait for that end."""
        self._forward_weights = self._weights(max(0.0, setting.forward_weight_bytes - self._first_bytes))
        self._backward_weights = self._weights(setting.backward_weight_bytes)
        self._gradients = setting.gradient_bytes - self._last_bytes
        self._norm_bytes = self._summed(self._gradients)
        self._norm_seconds = self._norm_bytes / rates.gradient_norm
        updates = self.update_demand()
        self._updates = self._terms(updates)
        self._shared = [(number, slope) for number, slope in enumerate(self._updates) if slope]
        """The terms that updates have a part of, and the updates' seconds."""
        self._others: Callable[[Sequence[float]], tuple[float, ...]]
        self._others = itemgetter(*(number for number, slope in enumerate(self._updates) if not slope))  # copies are among them: several
        self._alone = max(self._updates)
        self._is_left_over = not setting.reorders_left and setting.order.begin is not Begin.AFTER_BACKWARD
        """Whether nothing hides the updates that are left at the backward's end."""
        self._low, self._high = _hidden_shares(setting)
        copies = self._first_unit_copies()
        self._exposed = copies if self._is_left_over else max(self._terms(updates * setting.first_unit_share)) + copies

    def __call__(self, amounts: Amounts) -> StepSeconds:
        """See the module's text."""
        forward, backward = self._terms(self.forward_demand(amounts)), self._terms(self.backward_demand(amounts))
        share, under_forward, exposed = self._divided(forward, backward)
        return StepSeconds(
            forward=PhaseSeconds.of([base + under_forward * slope for base, slope in zip(forward, self._updates, strict=True)]),
            backward=PhaseSeconds.of([base + share * slope for base, slope in zip(backward, self._updates, strict=True)]),
            exposed_seconds=exposed,
            updated_share=share,
        )

    def total(self, amounts: Amounts) -> float:
        """`StepSeconds.total`, to the bit, with nothing made for it."""
        forward, backward = self._terms(self.forward_demand(amounts)), self._terms(self.backward_demand(amounts))
        share, under_forward, exposed = self._divided(forward, backward)
        first = max([*self._others(forward), *[forward[number] + under_forward * slope for number, slope in self._shared]])
        second = max([*self._others(backward), *[backward[number] + share * slope for number, slope in self._shared]])
        return first + second + exposed

    def _divided(self, forward: Sequence[float], backward: Sequence[float]) -> tuple[float, float, float]:
        """The shares of the updates that are done in the backward and in the forward, and the seconds that nothing hides."""
        redone, low, high = self.setting.redone_share, self._low, self._high
        rest = 1 - self.setting.first_unit_share + redone
        share = low
        if high > low:
            under_backward = self._lines(backward, 0.0, 1.0)
            other = [(0.0, -self._alone)] if self._is_left_over else self._lines(forward, rest, -1.0)
            share = _least(low, high, under_backward, other)
        if self._is_left_over:
            return share, 0.0, self._alone * (1 - share + redone) + self._exposed
        return share, rest - share, self._exposed

    def _lines(self, bases: Sequence[float], at_zero: float, sign: float) -> list[_Line]:
        """A phase's terms as functions of the share; of those that updates have no part of the largest alone."""
        lines = [(bases[number] + at_zero * slope, sign * slope) for number, slope in self._shared]
        lines.append((max(self._others(bases)), 0.0))
        return lines

    def forward_demand(self, amounts: Amounts) -> Demand:
        """Equation 4's terms: weights in, but the first unit's, activations out, and on to the drives."""
        (weights, read), swapped, on_drives = self._forward_weights, amounts.ram_bytes + amounts.ssd_bytes, amounts.ssd_bytes
        return Demand(
            gpu_seconds=self.setting.forward_seconds,
            m2g_bytes=weights,
            g2m_bytes=swapped,
            ssd_read_bytes=read,
            ssd_written_bytes=on_drives,
            host_memory_bytes=self._passes * (weights + swapped) + read + on_drives,
            launch_seconds=self.setting.forward_launch_seconds,
        )

    def backward_demand(self, amounts: Amounts) -> Demand:
        """Equation 5's terms without the states: weights and activations in, gradients out, but the last unit's, and their norms."""
        (weights, read), swapped, on_drives = self._backward_weights, amounts.ram_bytes + amounts.ssd_bytes, amounts.ssd_bytes
        gradients = self._gradients
        return Demand(
            gpu_seconds=self.setting.backward_seconds - amounts.saved_seconds,
            m2g_bytes=weights + swapped,
            g2m_bytes=gradients,
            ssd_read_bytes=read + on_drives,
            host_memory_bytes=self._passes * (weights + swapped + gradients) + self._norm_bytes + read + on_drives,
            cpu_seconds=self._norm_seconds,
            launch_seconds=self.setting.backward_launch_seconds,
        )

    def update_demand(self) -> Demand:
        """All updates of a step: states in, AdamW, sums, states out, commit.

        The optimizer's thread takes chunks in order, and those whose states lie in RAM are spread among the others
        (`lohan.planning.ram_states`): drives and thread are busy at the same time, and the thread's seconds, its waiting included, are
        those of whichever is slower.
        """
        setting = self.setting
        read, written = setting.read_share * setting.state_bytes, setting.written_share * setting.state_bytes
        summed = 0.0 if setting.durability is Durability.NONE else written
        return Demand(
            ssd_read_bytes=read,
            ssd_written_bytes=written,
            ssd_sync_seconds=self.rates.commit_seconds if setting.durability is Durability.STEP else 0.0,
            host_memory_bytes=setting.trainable_parameters * update_traffic(setting.form) + read + written + summed,
            cpu_seconds=self._pipeline_seconds(read, written),
        )

    def _pipeline_seconds(self, read: float, written: float) -> float:
        """Of the optimizer's thread, for all updates with so many bytes read and written: the slowest of reading, updating and writing, or,
        with one chunk in flight, one after the other; a chunk is written while its sum is taken."""
        setting, rates = self.setting, self.rates
        update = setting.trainable_parameters / rates.update_elements
        sums = 0.0 if setting.durability is Durability.NONE else written / rates.checksum
        if setting.order.chunks_in_flight > 1:
            return max(self._terms(Demand(ssd_read_bytes=read, ssd_written_bytes=written, cpu_seconds=update + sums)))
        reading, writing = (max(self._terms(way)) for way in (Demand(ssd_read_bytes=read), Demand(ssd_written_bytes=written)))
        return reading + update + max(writing, sums)

    def _weights(self, bytes: float) -> tuple[float, float]:
        """Bytes copied to the device, and read from drives; into a slot that is host memory they are read directly."""
        read = self.setting.read_share * bytes
        return (bytes - read if self.rates.on_cpu else bytes), read

    def _summed(self, gradients: float) -> float:
        """Bytes of gradients whose norm the CPU takes."""
        return gradients if self.rates.on_cpu else 0.0

    def _first_unit_copies(self) -> float:
        """Gradients out, their norm, and weights in, of the unit that is the last to arrive and the first to be needed."""
        weights, read = self._weights(self._first_bytes)
        last = self._last_bytes
        norm = Demand(cpu_seconds=self._summed(last) / self.rates.gradient_norm)
        ways = Demand(g2m_bytes=last), norm, Demand(m2g_bytes=weights, ssd_read_bytes=read)
        return sum(max(self._terms(way)) for way in ways)


def _hidden_shares(setting: StepSetting) -> tuple[float, float]:
    """The least and the largest share of the updates that is done while the backward goes on."""
    if setting.order.begin is Begin.AFTER_BACKWARD or not setting.trainable_units:
        return 0.0, 0.0
    high = 1 - setting.first_unit_share
    if setting.order.begin is Begin.SPECULATED:
        high = min(high, setting.speculated_share)
    return min(high, max(0.0, 1 - setting.gradient_buffers / setting.trainable_units)), high


_Line = tuple[float, float]
"""A linear function: its value at 0, and its slope."""


def _least(low: float, high: float, *sums: list[_Line]) -> float:
    """The place between `low` and `high` where the sum of the maxima of these lines is least; of several the highest.

    Tangents of both sides are intersected until nothing lies below where they meet. Each round finds another piece; there are at most as
    many as lines.
    """

    def at(place: float) -> _Line:
        total, total_slope = 0.0, 0.0
        for lines in sums:
            top, steepest = -math.inf, 0.0
            for value, slope in lines:
                here = value + slope * place
                if here > top or (here == top and slope > steepest):
                    top, steepest = here, slope
            total, total_slope = total + top, total_slope + steepest
        return total, total_slope

    left, right = at(low), at(high)
    if high <= low or left[1] > 0:
        return low
    if right[1] <= 0:
        return high
    while True:
        middle = (right[0] - left[0] + left[1] * low - right[1] * high) / (left[1] - right[1])
        middle = min(high, max(low, middle))
        found = at(middle)
        bound = left[0] + left[1] * (middle - low)
        if found[0] <= bound + 1e-12 * abs(bound) or middle in (low, high):
            return middle
        if found[1] <= 0:
            low, left = middle, found
        else:
            high, right = middle, found
