"""What a run allocates where, item by item, from the engine's own allocations (`lohan.streaming`, `lohan.states`). Pure arithmetic.

What cannot be computed (libraries, fragmentation) is a named reserve.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from lohan.config import Durability, EngineSection, GradientBuffers, KernelSet, Precision, RamStates, UnitGrain
from lohan.planning.plan import CHUNK_PARAMETERS, Holder
from lohan.planning.schedule import Begin, UpdateOrder
from lohan.planning.slots import WORKING_SLOTS, SlotSizes, size_slots
from lohan.planning.state_form import SCALE_BLOCK, StateForm
from lohan.planning.workload import UnitKind, Workload
from lohan.units import GIB, MIB, format_count

LEAST_CHUNK_PARAMETERS = 4 * MIB
"""8 MiB of the smallest stream, a remainder in 16 bits: two pieces of the 4 MiB at which drives were measured to reach their rate. Chunks
of files are no larger: what was read is then often still in the processor's cache when it is updated and written (48 MiB a chunk), and
the first unit's update, which nothing hides, waits for less before it begins and after it ends. Measured on files in memory with 700
million parameters: 0.37 s a step, 0.43 s with chunks of 8 Mi, 0.50 s with 32 Mi; and 0.36 s with 2 Mi where 4 Mi took 0.33 s."""
CHUNKS_OF_A_UNIT = 3
"""At least, where all states lie in RAM: a plan may put some back on the drives, and thirds of every unit then stay there. Nothing is read,
so that smaller ones would only cost calls."""
HOST_GRADIENT_BUFFERS = 3
"""One arriving, one waiting, one being read by the optimizer."""
HOST_STAGING_BUFFERS = 2
"""Page-locked: one read into while the other is copied to the GPU."""
KEPT_STAGING_BUFFERS = 4
"""For activations on their way to the drive and back: one being filled, one being written, one being read, one being emptied."""
KEPT_REGIONS_AHEAD = 1
"""Regions whose kept activations are on the device, or on their way to it, before the region's backward begins."""
LOSS_CHUNK_BYTES = 512 * MIB
"""The loss is computed over chunks of tokens whose logits, and what is made of them, take about as much: 32 Mi logits with torch's own
kernels, and four times as many with a fused one in bf16. With 32,000 words a chunk of 1,024 tokens reached 250 TFLOPS forward on a GPU
whose blocks reached 530: a quarter as many chunks have a quarter of the waits between them."""
LOSS_BYTES_PER_LOGIT = 16
"""Working copy, fp32 copy, softmax and gradient of one logit, as torch's own kernels leave them."""
FUSED_LOSS_COPIES = 2
"""Of one logit in the working precision where a GPU computes the loss with a fused kernel: itself, and its gradient."""
GPU_RESERVE_BYTES = 3 * GIB // 2
"""CUDA's context, cuBLAS workspaces, and the allocator's fragmentation: a 24 GiB card is planned as 22.5 GiB."""
MOST_STREAMS = 6
"""Of a chunk: a split master's halves, and both moments' codes and scales."""
BLOCK_BYTES = 4096
"""In which a chunk's streams are rounded up."""
CPU_BASE_BYTES = 1 * GIB
"""Python, torch and transformers; measured 0.4 GiB before the model is built, and the allocator's slack while it trains."""
GPU_PROCESS_BASE_BYTES = 3 * GIB
"""The same with CUDA's libraries loaded."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the formulas are made of; element counts."""

    parameters: int
    units: tuple[int, ...]
    """Of each unit's slot, padding included."""
    backward: tuple[int, ...]
    """The units whose weights a backward reads, by index, in its order."""
    largest_unit: int
    boundaries: int
    joined: int
    """Tensors of the whole batch that exist while micro-batches are split and joined."""
    open_gradients: int
    hidden: int
    vocabulary: int
    saved_per_token: int
    itemsize: int
    largest_block: int
    """Or module of one."""
    working_slots: int = WORKING_SLOTS
    """On the device."""
    loss_bytes_per_logit: int = LOSS_BYTES_PER_LOGIT


def measure(
    workload: Workload,
    precision: Precision,
    grain: UnitGrain = UnitGrain.BLOCK,
    working_slots: int = WORKING_SLOTS,
    kernels: KernelSet = KernelSet.AUTO,
    *,
    on_gpu: bool = False,
) -> Sizes:
    """The sizes of `workload` in the precision it is trained in.

    Args:
        grain: BLOCK, or MODULE where the workload has modules.
        kernels: of `auto`, which may become any, what takes most is counted.
        on_gpu: whether a GPU computes; on a CPU fused kernels are torch's own.
    """
    blocks = sum(unit.kind is UnitKind.BLOCK for unit in workload.units)
    units, saved, per_block = workload.units, workload.saved_elements_of(kernels), 1
    if grain is UnitGrain.MODULE:
        assert workload.modules is not None, "the caller has looked"
        units, saved = workload.modules.units, workload.modules.saved_elements_per_token
        per_block = workload.modules.boundaries_per_block
    itemsize = 2 if precision is Precision.BF16 else 4
    is_fused = on_gpu and kernels not in (KernelSet.TORCH, KernelSet.AUTO)
    largest = max(unit.parameters for unit in units)
    inside = max(unit.parameters for unit in units if unit.kind in (UnitKind.BLOCK, UnitKind.MODULE))
    return Sizes(
        parameters=workload.parameters,
        units=tuple(unit.slot_elements for unit in units),
        backward=_backward_order(len(units), tied=workload.tied_embeddings),
        largest_unit=largest,
        boundaries=blocks * per_block + 1,
        joined=4 if grain is UnitGrain.BLOCK else 5,  # around a module there is also the gradient that goes past it
        # A tied embedding collects gradients from the head at the start of the backward to the embedding at its end.
        open_gradients=largest + inside if workload.tied_embeddings else largest,
        hidden=workload.hidden_size,
        vocabulary=workload.vocabulary_size,
        saved_per_token=saved,
        itemsize=itemsize,
        largest_block=inside,
        working_slots=working_slots,
        loss_bytes_per_logit=loss_bytes_per_logit(itemsize, is_fused=is_fused),
    )


def loss_bytes_per_logit(itemsize: int, *, is_fused: bool) -> int:
    """What a logit takes while the loss is computed.

    Args:
        itemsize: of the precision that the device computes in.
        is_fused: whether a GPU computes the loss with a fused kernel.
    """
    return FUSED_LOSS_COPIES * itemsize if is_fused else LOSS_BYTES_PER_LOGIT


def loss_chunk_tokens(vocabulary: int, bytes_per_logit: int) -> int:
    """Tokens whose loss is computed at a time."""
    return max(1, LOSS_CHUNK_BYTES // (bytes_per_logit * vocabulary))


def _backward_order(units: int, *, tied: bool) -> tuple[int, ...]:
    """As `lohan.streaming.installation.access_order` has it: a tied embedding comes first, one of its own is not read."""
    others = tuple(range(units - 1, 0, -1))
    return (0, *others) if tied else others


@lru_cache(maxsize=256)  # more than the units of a model, of which each number is tried for each micro-batch
def slot_sizes(sizes: Sizes, kept_units: int) -> SlotSizes:
    """The parameter slots with so many units kept."""
    return size_slots(sizes.units, sizes.backward, working=sizes.working_slots, kept=kept_units)


def _slots_item(sizes: Sizes, kept_units: int) -> Holder:
    slots = slot_sizes(sizes, kept_units)

    def formula() -> str:
        parts = ""
        if slots.working:
            parts = f"{slots.working} slots x {format_count(slots.working_elements)} parameters of the largest unit"
        if slots.kept:
            own = f"{format_count(slots.kept_elements)} parameters of {len(slots.kept)} units that stay from forward to backward"
            parts = f"({parts} + {own})" if parts else own
        return f"{parts} x {sizes.itemsize} B"

    return Holder("parameter slots", slots.elements * sizes.itemsize, formula)


def device_items(sizes: Sizes, batch: int, length: int, micro_batch: int, kept_units: int, *, moved_inputs: int = 0) -> tuple[Holder, ...]:
    """What lies on the device, kept outputs of operators aside: a GPU's memory, or RAM where the CPU computes.

    Args:
        moved_inputs: blocks whose inputs wait elsewhere.
    """
    item = sizes.itemsize
    width = f"{item} B"
    micro_tokens = micro_batch * length
    # The loss takes whole tokens: at least one, at most all of the batch.
    loss_tokens = min(batch * length, loss_chunk_tokens(sizes.vocabulary, sizes.loss_bytes_per_logit))
    return (
        _slots_item(sizes, kept_units),
        Holder(
            name="unit gradient buffers",
            bytes=4 * sizes.open_gradients,
            formula=lambda: f"{format_count(sizes.open_gradients)} parameters of the units open at once x 4 B (fp32 sums)",
        ),
        Holder(
            name="gradients of a region",
            bytes=2 * sizes.largest_unit * item,
            formula=lambda: (
                f"2 x {format_count(sizes.largest_unit)} parameters of the largest unit x {width} (computed, and on their way out)"
            ),
        ),
        Holder(
            name="boundary activations",
            bytes=batch * length * sizes.hidden * (sizes.boundaries - moved_inputs) * item,
            formula=lambda: (
                f"{batch} rows x {length} tokens x {sizes.hidden} hidden x {sizes.boundaries - moved_inputs} boundaries x {width}"
            ),
        ),
        Holder(
            name="joining of micro-batches",
            bytes=sizes.joined * batch * length * sizes.hidden * item,
            formula=lambda: (
                f"{sizes.joined} x {batch} rows x {length} tokens x {sizes.hidden} hidden x {width} (outputs and their gradients)"
            ),
        ),
        Holder(
            name="block working set",
            bytes=micro_tokens * sizes.saved_per_token * item,
            formula=lambda: f"{micro_batch} rows x {length} tokens x {sizes.saved_per_token} saved elements a token x {width}",
        ),
        Holder(
            name="loss head chunk",
            bytes=loss_tokens * sizes.vocabulary * sizes.loss_bytes_per_logit,
            formula=lambda: f"{loss_tokens} tokens x {sizes.vocabulary} vocabulary x {sizes.loss_bytes_per_logit} B",
        ),
    )


def host_items(sizes: Sizes, placement: Placement, order: UpdateOrder, *, on_gpu: bool, spare_bytes: int = 0) -> tuple[Holder, ...]:
    """What lies in host memory whatever the device; `spare_bytes` for second places of states."""
    item, form = sizes.itemsize, placement.form
    chunk = min(placement.chunk_parameters, sizes.largest_unit)
    items = [
        _host_gradients(sizes, order),
        Holder(
            name="optimizer staging",
            bytes=order.chunks_in_flight * form.state_bytes(chunk),
            formula=lambda: (
                f"{order.chunks_in_flight} chunks in flight x {format_count(chunk)} parameters x {_per_parameter(form)} B of states"
            ),
        ),
        Holder(
            name="process base",
            bytes=GPU_PROCESS_BASE_BYTES if on_gpu else CPU_BASE_BYTES,
            formula=lambda: "Python, torch and transformers" + (" with CUDA's libraries" if on_gpu else ""),
        ),
    ]
    if on_gpu:
        staging = Holder(
            name="host staging",
            bytes=HOST_STAGING_BUFFERS * sizes.largest_unit * item,
            formula=lambda: f"{HOST_STAGING_BUFFERS} page-locked buffers x {format_count(sizes.largest_unit)} parameters x {item} B",
        )
        items.insert(0, staging)
    return (*items, *ram_state_items(placement), *_spare_items(placement, spare_bytes))


def _spare_items(placement: Placement, spare_bytes: int) -> tuple[Holder, ...]:
    if not spare_bytes:
        return ()
    share = min(1.0, spare_bytes / placement.total_bytes)
    return (Holder(SPARE_STATES, spare_bytes, lambda: f"of {share:.0%} of the states: for updates before the norm is known"),)


def _host_gradients(sizes: Sizes, order: UpdateOrder) -> Holder:
    """Gradients on the host: of a few units, or of all, in buffers of their own sizes."""
    item = sizes.itemsize
    if order.gradients is GradientBuffers.ALL:
        why = "all gradients wait for the backward's end" if order.begin is Begin.AFTER_BACKWARD else "the backward waits for no update"
        return Holder(
            name="host gradient buffers",
            bytes=sizes.parameters * item,
            formula=lambda: f"{format_count(sizes.parameters)} parameters x {item} B: {why}",
        )
    return Holder(
        name="host gradient buffers",
        bytes=HOST_GRADIENT_BUFFERS * sizes.largest_unit * item,
        formula=lambda: f"{HOST_GRADIENT_BUFFERS} buffers x {format_count(sizes.largest_unit)} parameters x {item} B",
    )


@dataclass(frozen=True, slots=True)
class Placement:
    """How model states are divided over RAM and the drives; in bytes, frozen parameters counted as if they were trained."""

    form: StateForm
    durability: Durability
    total_bytes: int
    ram_bytes: int
    """At most this: whole chunks."""
    chunk_parameters: int = CHUNK_PARAMETERS

    @property
    def read_share(self) -> float:
        """The part of all states that is read from the drives."""
        return 1 - self.ram_bytes / self.total_bytes

    @property
    def stored_share(self) -> float:
        """The part of all states that has a place on the drives: all of it where steps are committed."""
        return self.read_share if self.durability is Durability.NONE else 1.0

    @property
    def written_share(self) -> float:
        """The part of all states that every step writes to the drives."""
        return 1.0 if self.durability is Durability.STEP else self.read_share

    @property
    def slots(self) -> int:
        return 1 if self.durability is Durability.NONE else 2


def place_states(sizes: Sizes, precision: Precision, engine: EngineSection) -> Placement:
    """Where the model states of a run lie; none in RAM where that is still to be chosen."""
    form = StateForm.of(precision, engine.states)
    total_bytes = form.state_bytes(sizes.parameters)
    ram_bytes = 0 if isinstance(engine.ram_state_bytes, RamStates) else min(engine.ram_state_bytes, total_bytes)
    chosen = _chunk_in_ram(sizes.largest_block) if ram_bytes == total_bytes else LEAST_CHUNK_PARAMETERS
    return Placement(form, engine.durability, total_bytes, ram_bytes, engine.chunk_parameters or chosen)


def _chunk_in_ram(largest_block: int) -> int:
    """The largest power of two of which the largest block has `CHUNKS_OF_A_UNIT`, within the bounds of chunks."""
    wanted = max(1, largest_block // CHUNKS_OF_A_UNIT)
    return min(CHUNK_PARAMETERS, max(LEAST_CHUNK_PARAMETERS, 1 << (wanted.bit_length() - 1)))


def whole_state_bytes(sizes: Sizes, placement: Placement) -> int:
    """What all states take in RAM at most: units with their padding, every chunk's streams in whole blocks."""
    chunks = sum(-(-unit // placement.chunk_parameters) for unit in sizes.units)
    return placement.form.state_bytes(sum(sizes.units)) + chunks * MOST_STREAMS * BLOCK_BYTES


def state_items(sizes: Sizes, placement: Placement) -> tuple[Holder, ...]:
    """What lies on the drives."""
    form, parameters = placement.form, format_count(sizes.parameters)
    if form.is_split:
        parts = [
            ("working copy", 2 * sizes.parameters, f"{parameters} parameters x 2 B"),
            ("remainders", 2 * sizes.parameters, f"{parameters} parameters x 2 B"),
        ]
    else:
        parts = [("master weights", 4 * sizes.parameters, f"{parameters} parameters x 4 B")]
    each = f"(1 B + 4 B / {SCALE_BLOCK})" if form.has_8bit_moments else "4 B"
    parts.append(("moments", form.moments_bytes(sizes.parameters), f"{parameters} parameters x 2 moments x {each}"))
    share = placement.stored_share
    factors = (" x 2 slots" if placement.slots == 2 else "") + (f" x {share:.1%} outside RAM" if share < 1 else "")
    items = [
        Holder(name, round(size * placement.slots * share), lambda formula=formula: formula + factors)  # type: ignore[misc]
        for name, size, formula in parts
    ]
    return (*items, Holder("exported model", sizes.itemsize * sizes.parameters, lambda: f"{parameters} parameters x {sizes.itemsize} B"))


SPARE_STATES = "second places of states"
"""Where speculated updates of states in RAM go, as an item of a plan."""
RAM_STATES = "model states"
"""What lies in RAM of them, as an item of a plan."""


def ram_state_items(placement: Placement) -> tuple[Holder, ...]:
    """What of the states lies in RAM."""
    if not placement.ram_bytes:
        return ()
    what = "copies of states that are on the drives too" if placement.durability is Durability.STEP else "states that are nowhere else"
    if placement.durability is Durability.SNAPSHOT:
        what += ", written to the drives at every snapshot"
    share = placement.ram_bytes / placement.total_bytes
    return (Holder(name=RAM_STATES, bytes=placement.ram_bytes, formula=lambda: f"{share:.0%} of all, in whole chunks: {what}"),)


def ssd_bytes_read(sizes: Sizes, placement: Placement, kept_units: int) -> int:
    """By one step: weights once per pass, those of kept units once in all, and the optimizer all states."""
    weights = 2 * sizes.parameters - slot_sizes(sizes, kept_units).kept_elements
    return round(placement.read_share * (sizes.itemsize * weights + placement.total_bytes))


def ssd_bytes_written(placement: Placement) -> int:
    """By one step: all states, once; with durability `snapshot` only those on the drives."""
    return round(placement.written_share * placement.total_bytes)


def _per_parameter(form: StateForm) -> str:
    return f"{form.state_bytes(SCALE_BLOCK) / SCALE_BLOCK:.4g}"
