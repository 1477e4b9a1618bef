"""How long a phase of a step takes at least: what it asks of each resource, over what the machine was measured to give. Pure arithmetic.

The paper's Equations 2, 4 and 5 (`lohan.planning.paper_model`) take the slowest of four terms. These are ours:

- `gpu`: seconds of the device.
- `m2g`, `g2m`: bytes each way over that way's own rate, and `pcie`: both ways together, since each is slower while the other is busy.
- `ssd`: reads and writes share the drives. Where reading and writing at once was measured to be faster than one after the other, that is
  what overlapping them gains.
- `host_memory`: every byte that a copy or a drive moves passes through host memory once, and the CPU's own passes over it come on top.
  The paper has no such term; it bound our first measurements.
- `cpu`: the optimizer's thread. Where the CPU is the device, its seconds are the device's too.
- `launch`: the thread that queues the device's kernels. What it takes hardly depends on how many rows they compute, so that it binds small
  micro-batches: a block of 8 x 1024 tokens was computed in 4.1 ms, and queued, with some of its outputs kept, in 6.0. The paper has no
  such term either.

Each term is a maximum of linear functions of the demand, so that a phase's time is convex in whatever the demand is linear in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from lohan.errors import ConfigError
from lohan.hardware.profile import HardwareProfile, Measured, value_or
from lohan.planning.state_form import SCALE_BLOCK, StateForm


class Term(StrEnum):
    """A resource, as far as it can bind a phase."""

    GPU = "gpu"
    M2G = "m2g"
    G2M = "g2m"
    PCIE = "pcie"
    """Both ways together."""
    SSD = "ssd"
    HOST_MEMORY = "host_memory"
    CPU = "cpu"
    """The optimizer's thread, its waiting for the drives included where it has nothing else to do."""
    LAUNCH = "launch"
    """The thread that queues the device's kernels."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What a machine does in a second, for one form of the states; None: there is no such thing here. Bytes, where nothing else is said."""

    m2g: float | None
    g2m: float | None
    both_ways: float | None
    """Of each way, while the other is as busy."""
    ssd_read: float | None
    ssd_write: float | None
    ssd_mixed: float | None
    """Reads and writes together, half and half."""
    host_memory: float
    """Read and written together."""
    update_elements: float
    """Elements updated."""
    gradient_norm: float
    """Of gradients."""
    checksum: float
    """Of states."""
    commit_seconds: float = 0.0
    on_cpu: bool = False
    """Whether the CPU is the device: its cores then do what the GPU and the optimizer do one after the other."""
    device_memory: float | None = None
    """Of the device, read and written together; None: its own passes over gradients are not counted."""

    @classmethod
    def of(cls, profile: HardwareProfile, form: StateForm, *, on_cpu: bool | None = None) -> Rates:
        """The rates of a measured machine.

        Host memory gives at least what any pass over it was measured to move: a fused AdamW moves more than a copy does (187 % and 132 %
        on two machines), and would otherwise be held up by its own bandwidth. Where the CPU is the device, weights are copied within host
        memory: each byte is read and written.

        Args:
            on_cpu: whether the run's device is the CPU; None: where the profile has no copies to a device.

        Raises:
            ConfigError: the profile has no AdamW of this form.
        """
        updates = [rate.elements_per_second.value for rate in profile.updates if rate.form == form.value]
        if not updates:
            known = ", ".join(sorted({rate.form for rate in profile.updates})) or "none"
            raise ConfigError(
                f"the machine's profile has no rate of AdamW over {form} states, only over: {known}",
                place="hardware profile",
                remedy="Measure the machine again.",
            )
        update = max(updates)
        copy = profile.host_memory.value
        norm = value_or(profile.gradient_norm, copy)
        memory = max(copy, norm, update * update_traffic(form))
        on_cpu = profile.host_to_device is None if on_cpu is None else on_cpu
        return cls(
            m2g=copy / 2 if on_cpu else _rate(profile.host_to_device),
            g2m=copy / 2 if on_cpu else _rate(profile.device_to_host),
            both_ways=copy / 2 if on_cpu else _rate(profile.both_ways),
            ssd_read=_rate(profile.ssd_read),
            ssd_write=_rate(profile.ssd_write),
            ssd_mixed=_rate(profile.ssd_mixed),
            host_memory=memory,
            update_elements=update,
            gradient_norm=norm,
            checksum=value_or(profile.checksum, memory),
            commit_seconds=value_or(profile.commit_seconds, 0.0),
            on_cpu=on_cpu,
            device_memory=profile.device_memory.value,
        )


def _rate(measured: Measured | None) -> float | None:
    return None if measured is None else measured.value


def update_traffic(form: StateForm) -> float:
    """Bytes that an update moves through host memory for an element: all states read and written, and its gradient read.

    fp32 moments: 12 + 12 + 2 (bf16 gradient) or 4; 8-bit moments 6.03 + 6.03 + 2 or 4.
    """
    return 2 * form.state_bytes(SCALE_BLOCK) / SCALE_BLOCK + (2 if form.is_split else 4)


@dataclass(frozen=True, slots=True)
class Demand:
    """What a phase asks of the machine. Demands add up, and can be divided."""

    gpu_seconds: float = 0.0
    m2g_bytes: float = 0.0
    g2m_bytes: float = 0.0
    ssd_read_bytes: float = 0.0
    ssd_written_bytes: float = 0.0
    ssd_sync_seconds: float = 0.0
    """In which the drives do nothing but sync."""
    host_memory_bytes: float = 0.0
    """Read and written, by copies and drives too."""
    cpu_seconds: float = 0.0
    """Of the optimizer's thread; see `Term.CPU`."""
    launch_seconds: float = 0.0
    """Of the thread that queues kernels."""

    def __add__(self, other: Demand) -> Demand:
        return Demand(*(mine + others for mine, others in zip(self._values(), other._values(), strict=True)))

    def __mul__(self, share: float) -> Demand:
        return Demand(*(value * share for value in self._values()))

    def _values(self) -> tuple[float, ...]:
        return (
            *(self.gpu_seconds, self.m2g_bytes, self.g2m_bytes, self.ssd_read_bytes, self.ssd_written_bytes),
            *(self.ssd_sync_seconds, self.host_memory_bytes, self.cpu_seconds, self.launch_seconds),
        )


@dataclass(frozen=True, slots=True)
class PhaseSeconds:
    """How long a phase takes, by resource."""

    seconds: dict[Term, float]

    @classmethod
    def of(cls, terms: Sequence[float]) -> PhaseSeconds:
        """From the functions in the order of `TERMS`."""
        seconds = dict.fromkeys(Term, 0.0)
        for term, value in zip(TERMS, terms, strict=True):
            seconds[term] = max(seconds[term], value)
        return cls(seconds)

    @property
    def total(self) -> float:
        return max(self.seconds.values())

    @property
    def binding(self) -> Term:
        """The slowest; of several the first in the order of `Term`."""
        return max(self.seconds, key=lambda term: self.seconds[term])


def phase_seconds(demand: Demand, rates: Rates) -> PhaseSeconds:
    """The least time in which the machine can do what `demand` asks for, if everything overlaps.

    Raises:
        ConfigError: something is asked of a resource that the machine has no rate for.
    """
    return PhaseSeconds.of(LinearTerms(rates)(demand))


TERMS = (Term.GPU, Term.M2G, Term.G2M, Term.PCIE, Term.PCIE, Term.SSD, Term.SSD, Term.HOST_MEMORY, Term.CPU, Term.LAUNCH)
"""Of the functions whose maximum is a phase's time, in their order."""


class LinearTerms:
    """The functions whose maximum is a phase's time, in the order of `TERMS`; each is linear in the demand."""

    def __init__(self, rates: Rates) -> None:
        self._rates = rates
        self._down, self._up = (1 / rate if rate is not None else 0.0 for rate in (rates.m2g, rates.g2m))
        self._reading, self._writing = (1 / rate if rate is not None else 0.0 for rate in (rates.ssd_read, rates.ssd_write))
        self._pcie = _corners(self._down, self._up, None if rates.both_ways is None else 1 / rates.both_ways)
        self._ssd = _corners(self._reading, self._writing, None if rates.ssd_mixed is None else 2 / rates.ssd_mixed)
        self._is_complete = None not in (rates.m2g, rates.g2m, rates.ssd_read, rates.ssd_write)

    def __call__(self, demand: Demand) -> tuple[float, ...]:
        """Seconds.

        Raises:
            ConfigError: something is asked of a resource that the machine has no rate for.
        """
        if not self._is_complete:
            _check_rates(demand, self._rates)
        m2g, g2m, read, written = demand.m2g_bytes, demand.g2m_bytes, demand.ssd_read_bytes, demand.ssd_written_bytes
        on_cpu, cpu, sync = self._rates.on_cpu, demand.cpu_seconds, demand.ssd_sync_seconds
        device = demand.gpu_seconds + cpu if on_cpu else demand.gpu_seconds
        (first_in, first_out), (second_in, second_out) = self._pcie
        (first_read, first_written), (second_read, second_written) = self._ssd
        return (
            device,
            m2g * self._down,
            g2m * self._up,
            first_in * m2g + first_out * g2m,
            second_in * m2g + second_out * g2m,
            first_read * read + first_written * written + sync,
            second_read * read + second_written * written + sync,
            demand.host_memory_bytes / self._rates.host_memory,
            device if on_cpu else cpu,
            demand.launch_seconds,
        )


def _check_rates(demand: Demand, rates: Rates) -> None:
    for rate, size, what in (
        (rates.m2g, demand.m2g_bytes, "copies to the device"),
        (rates.g2m, demand.g2m_bytes, "copies from the device"),
        (rates.ssd_read, demand.ssd_read_bytes, "reads from drives"),
        (rates.ssd_write, demand.ssd_written_bytes, "writes to drives"),
    ):
        if size and rate is None:
            raise ConfigError(
                f"the machine's profile has no rate for {what}",
                place="hardware profile",
                remedy="Measure the machine again, with the run's device and state directories.",
            )


def two_way_seconds(first: float, second: float, first_rate: float, second_rate: float, both_rate: float | None) -> float:
    """The least time for `first` bytes one way and `second` bytes the other.

    x seconds are spent with both ways busy, each at `both_rate` b, y and z with one alone at its own rate r, s: minimise x + y + z such
    that b x + r y >= first and b x + s z >= second. Its dual is the maximum of u first + v second over u, v >= 0 with b (u + v) <= 1,
    r u <= 1, s v <= 1; the maximum lies in one of two corners, u or v as large as it may be. Linear pieces: convex in both counts.

    Where b is below what taking turns gives, taking turns is what counts.

    Args:
        both_rate: of each way while both are busy; None: they take turns.
    """
    corners = _corners(1 / first_rate, 1 / second_rate, None if both_rate is None else 1 / both_rate)
    return max(u * first + v * second for u, v in corners)


def _corners(u: float, v: float, both: float | None) -> tuple[tuple[float, float], tuple[float, float]]:
    """`two_way_seconds`' two corners: seconds a byte of each way; so are the rates."""
    both = u + v if both is None else both
    u, v = min(u, both), min(v, both)
    return (u, min(v, both - u)), (min(u, both - v), v)
