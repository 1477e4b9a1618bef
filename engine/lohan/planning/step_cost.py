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

from dataclasses import dataclass

from lohan.config import Durability
from lohan.planning.cost_model import Demand, PhaseSeconds, Rates, Term, linear_terms, phase_seconds, update_traffic
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
    """The part of all steps whose updates are taken back and done again: of speculated steps those that are clipped."""

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
        updates = self.update_demand()
        self._updates = linear_terms(updates, rates)
        self._alone = phase_seconds(updates, rates).total
        self._shares = _hidden_shares(setting)
        self._copies = self._first_unit_copies()
        self._first_update = phase_seconds(updates * setting.first_unit_share, rates).total

    def __call__(self, amounts: Amounts) -> StepSeconds:
        """See the module's text."""
        setting = self.setting
        forward, backward = linear_terms(self.forward_demand(amounts), self.rates), linear_terms(self.backward_demand(amounts), self.rates)
        under_backward = [(base, slope) for (_, base), (_, slope) in zip(backward, self._updates, strict=True)]
        if not setting.reorders_left and setting.order.begin is not Begin.AFTER_BACKWARD:
            share = _least(*self._shares, under_backward, [(0.0, -self._alone)])
            left = self._alone * (1 - share + setting.redone_share)
            return StepSeconds(_phase(forward, self._updates, 0.0), _phase(backward, self._updates, share), left + self._copies, share)
        rest = 1 - setting.first_unit_share + setting.redone_share
        under_forward = [(base + rest * slope, -slope) for (_, base), (_, slope) in zip(forward, self._updates, strict=True)]
        share = _least(*self._shares, under_backward, under_forward)
        return StepSeconds(
            forward=_phase(forward, self._updates, rest - share),
            backward=_phase(backward, self._updates, share),
            exposed_seconds=self._first_update + self._copies,
            updated_share=share,
        )

    def forward_demand(self, amounts: Amounts) -> Demand:
        """Equation 4's terms: weights in, but the first unit's, activations out, and on to the drives."""
        setting = self.setting
        weights, read = self._weights(max(0.0, setting.forward_weight_bytes - self._first_bytes))
        swapped = amounts.swapped_bytes
        return Demand(
            gpu_seconds=setting.forward_seconds,
            m2g_bytes=weights,
            g2m_bytes=swapped,
            ssd_read_bytes=read,
            ssd_written_bytes=amounts.ssd_bytes,
            host_memory_bytes=self._passes * (weights + swapped) + read + amounts.ssd_bytes,
        )

    def backward_demand(self, amounts: Amounts) -> Demand:
        """Equation 5's terms without the states: weights and activations in, gradients out, but the last unit's, and their norms."""
        setting = self.setting
        weights, read = self._weights(setting.backward_weight_bytes)
        swapped, gradients = amounts.swapped_bytes, setting.gradient_bytes - self._last_bytes
        return Demand(
            gpu_seconds=setting.backward_seconds - amounts.saved_seconds,
            m2g_bytes=weights + swapped,
            g2m_bytes=gradients,
            ssd_read_bytes=read + amounts.ssd_bytes,
            host_memory_bytes=self._passes * (weights + swapped + gradients) + self._summed(gradients) + read + amounts.ssd_bytes,
            cpu_seconds=self._summed(gradients) / self.rates.gradient_norm,
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
            return phase_seconds(Demand(ssd_read_bytes=read, ssd_written_bytes=written, cpu_seconds=update + sums), rates).total
        reading, writing = (phase_seconds(way, rates).total for way in (Demand(ssd_read_bytes=read), Demand(ssd_written_bytes=written)))
        return reading + update + max(writing, sums)

    def _weights(self, bytes: float) -> tuple[float, float]:
        """Bytes copied to the device, and read from drives; into a slot that is host memory they are read directly."""
        read = self.setting.read_share * bytes
        return (bytes - read if self.rates.on_cpu else bytes), read

    @property
    def _passes(self) -> int:
        """How often a copy to or from the device touches a byte of host memory."""
        return 2 if self.rates.on_cpu else 1

    def _summed(self, gradients: float) -> float:
        """Bytes of gradients whose norm the CPU takes."""
        return gradients if self.rates.on_cpu else 0.0

    @property
    def _first_bytes(self) -> float:
        """Weights of the unit that the forward needs first; P16 is as large as G16."""
        return self.setting.first_unit_share * self.setting.gradient_bytes

    @property
    def _last_bytes(self) -> float:
        """Gradients that arrive when the backward has ended: none that updates would wait for where they all wait for that end."""
        return 0.0 if self.setting.order.begin is Begin.AFTER_BACKWARD else self._first_bytes

    def _first_unit_copies(self) -> float:
        """Gradients out, their norm, and weights in, of the unit that is the last to arrive and the first to be needed."""
        weights, read = self._weights(self._first_bytes)
        last = self._last_bytes
        norm = Demand(cpu_seconds=self._summed(last) / self.rates.gradient_norm)
        ways = Demand(g2m_bytes=last), norm, Demand(m2g_bytes=weights, ssd_read_bytes=read)
        return sum(phase_seconds(way, self.rates).total for way in ways)


def _hidden_shares(setting: StepSetting) -> tuple[float, float]:
    """The least and the largest share of the updates that is done while the backward goes on."""
    if setting.order.begin is Begin.AFTER_BACKWARD or not setting.trainable_units:
        return 0.0, 0.0
    high = 1 - setting.first_unit_share
    return min(high, max(0.0, 1 - setting.gradient_buffers / setting.trainable_units)), high


_Terms = tuple[tuple[Term, float], ...]
_Line = tuple[float, float]
"""A linear function: its value at 0, and its slope."""


def _phase(fixed: _Terms, shared: _Terms, share: float) -> PhaseSeconds:
    """The time of a phase in which that share of something else is done too."""
    seconds = dict.fromkeys(Term, 0.0)
    for (term, base), (_, slope) in zip(fixed, shared, strict=True):
        seconds[term] = max(seconds[term], base + share * slope)
    return PhaseSeconds(seconds)


def _least(low: float, high: float, *sums: list[_Line]) -> float:
    """The place between `low` and `high` where the sum of the maxima of these lines is least; of several the highest.

    Tangents of both sides are intersected until nothing lies below where they meet. Each round finds another piece; there are at most as
    many as lines.
    """

    def at(place: float) -> _Line:
        tops = [max((value + slope * place, slope) for value, slope in lines) for lines in sums]
        return sum(value for value, _ in tops), sum(slope for _, slope in tops)

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
