"""What the cost model is given, from a workload, measured times of a block, and the sizes of a run. Pure arithmetic, no torch."""

from __future__ import annotations

from dataclasses import dataclass

from lohan.errors import ConfigError
from lohan.hardware.profile import BlockTimes, value_or
from lohan.planning.footprint import HOST_GRADIENT_BUFFERS, Placement, Sizes, slot_sizes
from lohan.planning.schedule import UpdateOrder
from lohan.planning.step_cost import StepSetting
from lohan.planning.workload import OperatorWorkload, Workload

_HEAD_PARTS = 4
"""Of the head's measured time: its forward, the same once more in the backward, and twice that for the gradients."""


@dataclass(frozen=True, slots=True)
class DeviceSeconds:
    """What a batch takes on the device; blocks and head together."""

    forward: float
    backward: float
    """Without recomputation of blocks."""
    recompute: float
    """Of all blocks, if nothing is kept: less than their forward, since a recomputation ends when autograd has all that it saved."""
    forward_launch: float = 0.0
    """Of the thread that queues the kernels of all blocks; 0 where that was not measured."""
    backward_launch: float = 0.0
    """With recomputation."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An operator's outputs, the same in every block: what keeping them takes and saves, for the whole batch."""

    label: str
    """As `OperatorWorkload.label` has it."""
    bytes_per_block: int
    seconds_per_block: float
    """Of recomputation that keeping them saves."""

    @property
    def benefit(self) -> float:
        """Equation 6 in measured seconds per byte. FLOPs per byte hardly tell a block's matrix products apart, since their outputs are as
        wide as their inputs, and a quarter of a block's time is none of theirs."""
        return self.seconds_per_block / self.bytes_per_block


def device_seconds(workload: Workload, times: BlockTimes, *, batch: int, length: int, micro_batch: int) -> DeviceSeconds:
    """What the batch takes, from the measured times of one block on other rows: in proportion to its FLOPs, the head's to its tokens.

    Blocks of a workload whose operators were not counted go by tokens. Kernels are queued once for each micro-batch, however many rows.

    Raises:
        ConfigError: the times are those of another model.
    """
    _check_times(workload, times)
    blocks, scale = workload.blocks, _scale(workload, times, batch, length)
    tokens = batch * length / (times.rows * times.sequence_length)
    head = value_or(times.head_seconds, 0.0) * tokens
    measured = sum(times.operator_seconds.values())
    again = sum(times.operator_seconds.get(operator.label, 0.0) for operator in _operators(workload, times) if operator.is_recomputed)
    block_forward = times.forward_seconds.value * scale * blocks
    launches = blocks * -(-batch // micro_batch)
    return DeviceSeconds(
        forward=block_forward + head / _HEAD_PARTS,
        backward=times.backward_seconds.value * scale * blocks + head * (1 - 1 / _HEAD_PARTS),
        recompute=block_forward * (again / measured if again else 1.0),
        forward_launch=launches * value_or(times.forward_launch_seconds, 0.0),
        backward_launch=launches * value_or(times.backward_launch_seconds, 0.0),
    )


def candidates(workload: Workload, times: BlockTimes, *, batch: int, length: int, itemsize: int) -> tuple[Candidate, ...]:
    """The operators whose outputs may be kept, in the order of the block's forward.

    An operator's measured seconds are its share of the block's forward: what lies between operators goes to all of them alike.

    Raises:
        ConfigError: the times are those of another model.
    """
    _check_times(workload, times)
    measured = sum(times.operator_seconds.values())
    if not measured:
        return ()
    scale = _scale(workload, times, batch, length) * times.forward_seconds.value / measured
    found = []
    for operator in _operators(workload, times):
        size = round(operator.output_elements.at(batch, length) * itemsize)
        seconds = times.operator_seconds.get(operator.label, 0.0) * scale
        if operator.can_be_kept and operator.is_recomputed and size > 0 and seconds > 0:
            found.append(Candidate(operator.label, size, seconds))
    return tuple(found)


def _operators(workload: Workload, times: BlockTimes) -> tuple[OperatorWorkload, ...]:
    """Those that were timed, each once."""
    return tuple({operator.label: operator for operator in workload.operators_of(times.kernels)}.values())


def _check_times(workload: Workload, times: BlockTimes) -> None:
    if times.workload_digest != workload.digest:
        raise ConfigError(
            "the measured times of a block are those of another model, or of this one before it was registered again",
            place="hardware profile",
            remedy="Measure the machine with this model.",
        )


def _scale(workload: Workload, times: BlockTimes, batch: int, length: int) -> float:
    measured = workload.block_forward_flops(times.rows, times.sequence_length)
    return workload.block_forward_flops(batch, length) / measured if measured else batch * length / (times.rows * times.sequence_length)


def weight_bytes(sizes: Sizes, kept_units: int) -> tuple[int, int]:
    """Bytes of weights that are copied to the device in the forward and in the backward.

    The forward loads every unit, and a tied embedding once more for the output projection, unless it is kept or no unit has to make room.
    When it ends, kept units are still there, and so are those that the backward needs first of the others, one in each working slot
    (`lohan.planning.slots`).
    """
    slots = slot_sizes(sizes, kept_units)
    order = tuple(dict.fromkeys(sizes.backward))
    is_tied = order[:1] == (0,) and len(sizes.units) > 1  # an embedding of its own is not read in the backward
    makes_room = len(sizes.units) - len(slots.kept) > slots.working
    forward = sum(sizes.units) + (sizes.units[0] if is_tied and makes_room and 0 not in slots.kept else 0)
    others = [unit for unit in order if unit not in slots.kept][slots.working :]
    return sizes.itemsize * forward, sizes.itemsize * sum(sizes.units[unit] for unit in others)


def gradient_seconds(sizes: Sizes, micro_batches: int, device_bytes_per_second: float | None) -> float:
    """What the device does to gradients besides computing them; 0 where its memory's rate is not known.

    Each region's are added to their unit's fp32 sums: itemsize + 4 bytes a parameter for the first, which is copied, itemsize + 8 for the
    others. Then the sums are read for their norm, 4, and rounded on their way out, 4 + itemsize.
    """
    if device_bytes_per_second is None:
        return 0.0
    each = micro_batches * (sizes.itemsize + 8) + 4 + sizes.itemsize
    return sizes.parameters * each / device_bytes_per_second


def step_setting(
    sizes: Sizes,
    placement: Placement,
    order: UpdateOrder,
    seconds: DeviceSeconds,
    *,
    kept_units: int,
    gradient_buffers: int = HOST_GRADIENT_BUFFERS,
    reorders_left: bool = True,
    gradient_seconds: float = 0.0,
    redone_share: float = 0.0,
    speculated_share: float = 1.0,
) -> StepSetting:
    """A step of a run all of whose parameters are trained.

    Args:
        gradient_buffers: see `StepSetting`.
        reorders_left: see `StepSetting`.
        gradient_seconds: see the function of that name.
        redone_share: see `StepSetting`.
        speculated_share: see `StepSetting`.
    """
    forward_bytes, backward_bytes = weight_bytes(sizes, kept_units)
    return StepSetting(
        forward_seconds=seconds.forward,
        backward_seconds=seconds.backward + seconds.recompute + gradient_seconds,
        forward_weight_bytes=forward_bytes,
        backward_weight_bytes=backward_bytes,
        trainable_parameters=sizes.parameters,
        form=placement.form,
        durability=placement.durability,
        order=order,
        read_share=placement.read_share,
        written_share=placement.written_share,
        trainable_units=len(sizes.units),
        first_unit_share=sizes.units[0] / sum(sizes.units),
        gradient_buffers=gradient_buffers,
        reorders_left=reorders_left,
        redone_share=redone_share,
        speculated_share=speculated_share,
        forward_launch_seconds=seconds.forward_launch,
        backward_launch_seconds=seconds.backward_launch,
    )
