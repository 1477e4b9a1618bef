"""One optimizer step as plain data: every read, copy, block, update and write, the resource it takes, and what it waits for. No torch.

The engine takes its orders from these operations, and a trace of it is compared with them: one source of order. A step here begins with
its forward, whose first units the step before has loaded, and ends with the loads of the next forward's first units.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import groupby, islice
from types import MappingProxyType

from lohan.config import Durability, GradientBuffers
from lohan.planning.access import AccessOrder, Load, Phase, SlotWalk
from lohan.planning.footprint import HOST_GRADIENT_BUFFERS, HOST_STAGING_BUFFERS
from lohan.planning.kept_operations import KeptMoves, KeptShape, Move
from lohan.planning.schedule import Begin, UpdateOrder
from lohan.planning.slots import SlotSizes
from lohan.planning.state_form import StateForm
from lohan.planning.tiers import Tier


class Resource(StrEnum):
    """What an operation keeps busy."""

    GPU = "gpu"
    """The device that computes: the CPU's cores where there is no GPU."""
    M2G = "m2g"
    """Copies from host memory to the device."""
    G2M = "g2m"
    SSD_READ = "ssd_read"
    SSD_WRITE = "ssd_write"
    CPU = "cpu"
    """The optimizer."""


class OperationKind(StrEnum):
    FORWARD = "forward"
    """One region: one call of a unit's module on one micro-batch."""
    BACKWARD = "backward"
    """One region, its recomputation included."""
    GRADIENT_SUM = "gradient_sum"
    """A region's gradients, added to those of the unit on the device."""
    WEIGHTS_READ = "weights_read"
    """A chunk's working copy, from the drive to host memory."""
    WEIGHTS_COPY = "weights_copy"
    """A chunk's working copy, from host memory to a parameter slot."""
    GRADIENTS_COPY = "gradients_copy"
    """A unit's gradients, from the device to host memory."""
    GRADIENT_NORM = "gradient_norm"
    """The norm of a unit's gradients, and whether they are finite. On a GPU it is taken there before they leave, in a few hundredths of the
    time of their copy, and is no operation of its own."""
    STATES_READ = "states_read"
    """All states of a chunk, from the drive."""
    UPDATE = "update"
    """AdamW over a chunk."""
    CHECKSUM = "checksum"
    """CRC-32C of a chunk's states before they are written, where that is for a step record."""
    STATES_WRITE = "states_write"
    """All states of a chunk, to the drive."""
    ACTIVATIONS_OUT = "activations_out"
    """A kept operator's outputs in one region, or the region's input, from the device to host memory; `chunk` is the operator's place among
    what is kept of the block, and the input's is behind them."""
    ACTIVATIONS_WRITE = "activations_write"
    """The same, on to the drive."""
    ACTIVATIONS_READ = "activations_read"
    ACTIVATIONS_IN = "activations_in"
    """Back to the device."""
    COMMIT = "commit"
    """The data files synced, and the step record written."""


RESOURCES: Mapping[OperationKind, Resource] = MappingProxyType(
    {
        OperationKind.FORWARD: Resource.GPU,
        OperationKind.BACKWARD: Resource.GPU,
        OperationKind.GRADIENT_SUM: Resource.GPU,
        OperationKind.WEIGHTS_READ: Resource.SSD_READ,
        OperationKind.WEIGHTS_COPY: Resource.M2G,
        OperationKind.GRADIENTS_COPY: Resource.G2M,
        OperationKind.GRADIENT_NORM: Resource.CPU,
        OperationKind.STATES_READ: Resource.SSD_READ,
        OperationKind.UPDATE: Resource.CPU,
        OperationKind.CHECKSUM: Resource.CPU,
        OperationKind.STATES_WRITE: Resource.SSD_WRITE,
        OperationKind.ACTIVATIONS_OUT: Resource.G2M,
        OperationKind.ACTIVATIONS_WRITE: Resource.SSD_WRITE,
        OperationKind.ACTIVATIONS_READ: Resource.SSD_READ,
        OperationKind.ACTIVATIONS_IN: Resource.M2G,
        OperationKind.COMMIT: Resource.SSD_WRITE,
    }
)


@dataclass(frozen=True, slots=True)
class Operation:
    """One thing that one resource does; `after` are the indices of the operations in the same step that it waits for."""

    kind: OperationKind
    unit: int | None = None
    """None for the commit."""
    chunk: int | None = None
    micro_batch: int | None = None
    """Which of the unit's regions in a pass, from 0."""
    bytes: int = 0
    """That are moved; of an update, the states that it changes."""
    slot: int | None = None
    """The parameter slot that is loaded or read."""
    after: tuple[int, ...] = ()

    @property
    def resource(self) -> Resource:
        return RESOURCES[self.kind]

    def __str__(self) -> str:
        place = [f"{name} {value}" for name in ("unit", "chunk", "micro_batch") if (value := getattr(self, name)) is not None]
        return ", ".join([self.kind.value, *place]).replace("_", " ")


class Recompute(StrEnum):
    """What becomes of a region's inner activations."""

    ALL = "all"
    """Dropped in the forward, computed again in the backward."""
    NONE_SAVED = "none_saved"
    """Kept: only for modules that save no activations and do not read their weights in the backward (`nn.Embedding`)."""
    ELSEWHERE = "elsewhere"
    """Dropped, and the region with them: a region of the same unit computes the module once more as its own beginning."""


@dataclass(frozen=True, slots=True)
class Visit:
    """A forward's passage through a module of a unit, in `regions` regions; the backward comes back in the opposite order."""

    unit: int
    regions: int = 1
    recompute: Recompute = Recompute.ALL


@dataclass(frozen=True, slots=True)
class ChunkShape:
    """A chunk of a unit's parameters; `tier` is where its states are read from, `Tier.RAM` or `Tier.SSD`."""

    elements: int
    trainable: bool
    tier: Tier = Tier.SSD


@dataclass(frozen=True, slots=True)
class UnitShape:
    chunks: tuple[ChunkShape, ...]

    @property
    def trainable_elements(self) -> int:
        return sum(chunk.elements for chunk in self.chunks if chunk.trainable)


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step goes through, before its order is chosen."""

    units: tuple[UnitShape, ...]
    visits: tuple[Visit, ...]
    """In the order of the forward."""
    slots: SlotSizes
    form: StateForm
    durability: Durability = Durability.NONE
    device: Tier = Tier.GPU
    """Where slots lie: `Tier.GPU`, or `Tier.RAM` where the CPU computes and chunks are read from the drive into their slot."""
    kept: Mapping[int, tuple[KeptShape, ...]] = field(default_factory=dict)
    """What is kept of units' activations and leaves the device, by unit."""
    waiting_units: frozenset[int] = frozenset()
    """Units whose updates cannot be taken back: where a step is speculated they wait for the backward's end."""

    @property
    def itemsize(self) -> int:
        """Bytes of a weight and of a gradient on the device."""
        return 2 if self.form.is_split else 4

    @property
    def trainable(self) -> list[int]:
        """The units that are updated, by index."""
        return [index for index, unit in enumerate(self.units) if unit.trainable_elements]


def first_with_backward(visits: Sequence[Visit], trainable: Collection[int]) -> int:
    """The first visit that gradients reach: those before it belong to frozen units."""
    return next((number for number, visit in enumerate(visits) if visit.unit in trainable), len(visits))


def expected_order(visits: Sequence[Visit], trainable: Collection[int]) -> AccessOrder:
    """The units whose weights forward and backward read, before it is known what is loaded when."""
    reached = visits[first_with_backward(visits, trainable) :][::-1]
    passes = [visit.unit for visit in visits], [visit.unit for visit in reached if visit.recompute is Recompute.ALL]
    forward, backward = ([unit for unit, _ in groupby(units)] for units in passes)
    return AccessOrder(forward, backward)


def access_order(operations: Sequence[Operation]) -> AccessOrder:
    """The units whose weights the forward and the backward of `operations` read, in order."""

    def units(kind: OperationKind) -> list[int]:
        used = [operation.unit for operation in operations if operation.kind is kind and operation.slot is not None]
        return [unit for unit, _ in groupby(used) if unit is not None]

    return AccessOrder(units(OperationKind.FORWARD), units(OperationKind.BACKWARD))


class UpdateSequence:
    """The order of the updates in `operations`: of each unit's chunks, and of units where one may be chosen."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        self._chunks: dict[int, list[int]] = {}
        for operation in operations:
            if operation.kind is OperationKind.UPDATE:
                assert operation.unit is not None and operation.chunk is not None, "an update is of a chunk"
                self._chunks.setdefault(operation.unit, []).append(operation.chunk)
        forward = dict.fromkeys(operation.unit for operation in operations if operation.kind is OperationKind.FORWARD)
        self._places = {unit: place for place, unit in enumerate(forward) if unit is not None}

    def place(self, unit: int) -> int:
        """How many units the next forward needs before `unit`."""
        return self._places[unit]

    def chunks(self, unit: int) -> Sequence[int]:
        """The unit's chunks that are updated, in order, by index."""
        return self._chunks[unit]


def step_operations(shape: StepShape, order: UpdateOrder) -> tuple[Operation, ...]:
    """A step with one backward, in the state that steps come to after the first few, in an order in which they could be begun."""
    return _Step(shape, order, _settled_walk(shape, order)).build()


def _settled_walk(shape: StepShape, order: UpdateOrder) -> SlotWalk:
    """The slots as steps leave them."""
    walk = SlotWalk(expected_order(shape.visits, shape.trainable), shape.slots)
    walk.begin_forward()
    for _ in range(2):
        _Step(shape, order, walk).build()
    return walk


@dataclass(slots=True)
class _Slot:
    ready: tuple[int, ...] = ()
    """What filled it in this step."""
    last_use: tuple[int, ...] = ()


@dataclass(slots=True)
class _Job:
    """A chunk's update; `thread_end` is the last that the optimizer's thread itself does for it."""

    update: int
    thread_end: int
    end: int
    tier: Tier


@dataclass(slots=True)
class _Step:
    """Writes a step down. Fields hold the operations that later ones wait for."""

    shape: StepShape
    order: UpdateOrder
    walk: SlotWalk
    operations: list[Operation] = field(default_factory=list)
    slots: dict[int, _Slot] = field(default_factory=dict)
    compute: tuple[int, ...] = ()
    loads: list[tuple[int, ...]] = field(default_factory=list)
    """Of each load what its buffer in host memory waits for: its copies, or its reads where there are no copies."""
    reads: tuple[int, ...] = ()
    """Of the newest load."""
    copy: tuple[int, ...] = ()
    gradients: tuple[int, ...] = ()
    norm: tuple[int, ...] = ()
    sent: list[int] = field(default_factory=list)
    """Units in the order in which their gradients leave the device."""
    jobs: list[_Job] = field(default_factory=list)
    jobs_of: dict[int, list[_Job]] = field(default_factory=dict)
    kept: KeptMoves = field(init=False)

    def __post_init__(self) -> None:
        self.kept = KeptMoves(self.shape.kept, self._add_move)

    def build(self) -> tuple[Operation, ...]:
        shape, trainable = self.shape, frozenset(self.shape.trainable)
        numbers = self._region_numbers()
        for visit, regions in zip(shape.visits, numbers, strict=True):
            slot = self._use(visit.unit, Phase.FORWARD)
            for region in regions:
                before = self.compute
                self._compute(OperationKind.FORWARD, visit.unit, region, slot)
                self.compute += self.kept.send(visit.unit, region, before)
        reached = list(zip(shape.visits, numbers, strict=True))[first_with_backward(shape.visits, trainable) :]
        backward = [(visit, regions) for visit, regions in reached if visit.recompute is not Recompute.ELSEWHERE]
        while backward:
            visit, regions = backward.pop()
            reads_weights = visit.recompute is Recompute.ALL
            backward_slot = self._use(visit.unit, Phase.BACKWARD) if reads_weights else None
            for region in reversed(regions):
                self._compute_again(visit.unit, region, backward_slot)
                if visit.unit in trainable:
                    self.compute = (self._add(Operation(OperationKind.GRADIENT_SUM, visit.unit, micro_batch=region), self.compute),)
            if visit.unit in trainable and all(visit.unit != other.unit for other, _ in backward):
                self._send_gradients(visit.unit)
        # In the order in which the next forward needs them.
        for unit in dict.fromkeys(visit.unit for visit in shape.visits):
            if unit in self.sent and self._waits(unit):
                self._update(unit, self.norm + self.compute)
        for load in self.walk.begin_forward():
            self._load(load, tuple(job.end for job in self.jobs_of.get(load[0], ())))
        if shape.durability is Durability.STEP:
            self._add(Operation(OperationKind.COMMIT), tuple(job.end for job in self.jobs))
        return tuple(self.operations)

    def _region_numbers(self) -> list[range]:
        """For each visit the numbers of its regions: they are counted over all visits of a unit."""
        counts: dict[int, int] = {}
        numbers = []
        for visit in self.shape.visits:
            first = counts.get(visit.unit, 0)
            counts[visit.unit] = first + visit.regions
            numbers.append(range(first, first + visit.regions))
        return numbers

    def _add_move(self, move: Move, unit: int, place: int, region: int, size_bytes: int, after: tuple[int, ...]) -> int:
        return self._add(Operation(OperationKind(move), unit, place, region, size_bytes), after)

    def _add(self, operation: Operation, after: tuple[int, ...]) -> int:
        self.operations.append(replace(operation, after=tuple(sorted(set(after)))))
        return len(self.operations) - 1

    def _use(self, unit: int, phase: Phase) -> int:
        slot, loads = self.walk.use(unit, phase)
        for load in loads:
            self._load(load, ())
        return slot

    def _load(self, load: Load, after: tuple[int, ...]) -> None:
        """One thread loads unit after unit, through two buffers in host memory where slots are a GPU's."""
        unit, index = load
        slot = self.slots.setdefault(index, _Slot())
        on_gpu = self.shape.device is Tier.GPU
        begin = after + self.reads
        if on_gpu:
            begin += self.loads[-HOST_STAGING_BUFFERS] if len(self.loads) >= HOST_STAGING_BUFFERS else ()
        else:
            begin += slot.last_use
        reads: list[int] = []
        copies: list[int] = []
        chunks = list(enumerate(self.shape.units[unit].chunks))
        if on_gpu:  # what lies in host memory is copied while the rest is read
            chunks.sort(key=lambda item: item[1].tier is not Tier.RAM)
        for number, chunk in chunks:
            size = chunk.elements * self.shape.itemsize
            source = begin
            if chunk.tier is Tier.SSD:
                reads.append(self._add(Operation(OperationKind.WEIGHTS_READ, unit, number, bytes=size, slot=index), begin))
                source = (reads[-1],)
            if on_gpu:
                self.copy = (
                    self._add(
                        Operation(OperationKind.WEIGHTS_COPY, unit, number, bytes=size, slot=index), source + slot.last_use + self.copy
                    ),
                )
                copies += self.copy
            elif chunk.tier is Tier.RAM:
                copies.append(self._add(Operation(OperationKind.WEIGHTS_COPY, unit, number, bytes=size, slot=index), begin))
        self.reads = tuple(reads) if on_gpu else (*reads, *copies)
        self.loads.append(tuple(copies[-1:]))
        slot.ready = tuple(copies[-1:]) if on_gpu else (*reads, *copies)

    def _compute(self, kind: OperationKind, unit: int, region: int, slot: int | None) -> None:
        held = self.slots.setdefault(slot, _Slot()) if slot is not None else _Slot()
        self.compute = (self._add(Operation(kind, unit, micro_batch=region, slot=slot), self.compute + held.ready),)
        held.last_use = self.compute

    def _compute_again(self, unit: int, region: int, slot: int | None) -> None:
        """A region's backward; `slot` is None where it recomputes nothing."""
        if slot is not None:
            self.compute += self.kept.bring(unit, region, self.compute)
        self._compute(OperationKind.BACKWARD, unit, region, slot)
        self.compute += self.kept.finish(unit, region)

    def _send_gradients(self, unit: int) -> None:
        """The unit's last region is done."""
        after = self.compute + self.gradients
        if self.order.gradients is GradientBuffers.FEW and len(self.sent) >= HOST_GRADIENT_BUFFERS:
            after += (self.jobs_of[self.sent[-HOST_GRADIENT_BUFFERS]][-1].update,)
        size = self.shape.units[unit].trainable_elements * self.shape.itemsize
        self.gradients = (self._add(Operation(OperationKind.GRADIENTS_COPY, unit, bytes=size), after),)
        if self.shape.device is Tier.GPU:
            self.norm = self.gradients
        else:
            self.norm = (self._add(Operation(OperationKind.GRADIENT_NORM, unit, bytes=size), self.gradients + self.norm),)
        self.sent.append(unit)
        self.walk.invalidate(unit)
        if not self._waits(unit):
            self._update(unit, self.norm)

    def _waits(self, unit: int) -> bool:
        """Whether the unit's update waits for the backward's end."""
        begin = self.order.begin
        return begin is Begin.AFTER_BACKWARD or (begin is Begin.SPECULATED and unit in self.shape.waiting_units)

    def _update(self, unit: int, after: tuple[int, ...]) -> None:
        """Chunk after chunk, as many under way as the order allows. Where units may overtake each other, which other unit's chunks lie
        before this one's is not known: only the order of its own is."""
        in_flight = self.order.chunks_in_flight
        jobs = self.jobs_of.setdefault(unit, [])
        earlier = jobs if self.order.takes_needed_first else self.jobs
        for number, chunk in enumerate(self.shape.units[unit].chunks):
            if not chunk.trainable:
                continue
            size = self.shape.form.state_bytes(chunk.elements)
            begin = after
            if chunk.tier is Tier.SSD:
                # What lies in RAM takes no buffer, and no turn of those that are read ahead.
                counted = list(islice((job for job in reversed(earlier) if job.tier is Tier.SSD or in_flight == 1), in_flight))
                if len(counted) == in_flight:
                    begin += (counted[-1].end,)
                if len(counted) >= max(1, in_flight - 1):
                    begin += (counted[max(1, in_flight - 1) - 1].thread_end,)
                begin = (self._add(Operation(OperationKind.STATES_READ, unit, number, bytes=size), begin),)
            written = list(islice((job for job in reversed(earlier) if job.end != job.update), in_flight))
            if len(written) == in_flight:
                begin += (written[-1].end,)
            before = (earlier[-1].thread_end,) if earlier else ()
            update = thread_end = end = self._add(Operation(OperationKind.UPDATE, unit, number, bytes=size), begin + before)
            if chunk.tier is Tier.SSD or self.shape.durability is Durability.STEP:
                if self.shape.durability is not Durability.NONE:
                    thread_end = self._add(Operation(OperationKind.CHECKSUM, unit, number, bytes=size), (update,))
                # The first of a chunk's streams is written while the sum of the next is taken.
                end = self._add(Operation(OperationKind.STATES_WRITE, unit, number, bytes=size), (update,))
            job = _Job(update, thread_end, end, chunk.tier)
            jobs.append(job)
            self.jobs.append(job)
