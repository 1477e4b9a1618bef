"""From a workload and measured times to what the cost model counts with."""

from __future__ import annotations

import pytest

from lohan.config import Clip, Durability, EngineSection, Precision, UpdateSchedule
from lohan.errors import ConfigError
from lohan.hardware.profile import BlockTimes, Measured
from lohan.planning.footprint import measure, place_states, slot_sizes
from lohan.planning.operations import ChunkShape, OperationKind, Recompute, StepShape, UnitShape, Visit, step_operations
from lohan.planning.schedule import update_order
from lohan.planning.state_form import StateForm
from lohan.planning.step_inputs import Candidate, candidates, device_seconds, gradient_seconds, step_setting, weight_bytes
from lohan.planning.tiers import Tier
from lohan.planning.workload import Coefficients, OperatorGroup, OperatorWorkload, UnitKind, UnitWorkload, Workload

BLOCKS = 5


def operator(label: str, flops: float, elements: float, *, kept: bool = True, again: bool = True) -> OperatorWorkload:
    return OperatorWorkload(
        label=label,
        group=OperatorGroup.MATMUL,
        flops=Coefficients(per_token=flops),
        output_elements=Coefficients(per_token=elements),
        traffic_elements=Coefficients(),
        can_be_kept=kept,
        is_recomputed=again,
    )


WORKLOAD = Workload(
    architecture="llama",
    units=(
        UnitWorkload(name="embedding", kind=UnitKind.EMBEDDING, parameters=400),
        *(UnitWorkload(name=f"block {number}", kind=UnitKind.BLOCK, parameters=100) for number in range(BLOCKS)),
        UnitWorkload(name="head", kind=UnitKind.HEAD, parameters=400),
    ),
    hidden_size=4,
    vocabulary_size=100,
    context_length=64,
    tied_embeddings=False,
    block_saved_elements_per_token=32,
    operators=(
        operator("q", 100, 4),
        operator("attention", 50, 4),
        operator("rope", 10, 4, kept=False),
        operator("down", 200, 4, again=False),
    ),
)
TIMES = BlockTimes(
    workload_digest=WORKLOAD.digest,
    kernels="torch",
    precision="bf16",
    rows=2,
    sequence_length=8,
    forward_seconds=Measured(value=0.4),
    backward_seconds=Measured(value=0.8),
    operator_seconds={"q": 0.1, "attention": 0.05, "rope": 0.05, "down": 0.12},
    head_seconds=Measured(value=0.2),
)


def test_a_batch_takes_what_its_rows_take():
    seconds = device_seconds(WORKLOAD, TIMES, batch=6, length=8, micro_batch=2)
    assert seconds.forward == pytest.approx(3 * (BLOCKS * 0.4 + 0.2 / 4))
    assert seconds.backward == pytest.approx(3 * (BLOCKS * 0.8 + 0.2 * 3 / 4))
    # `down` is not computed again: 0.2 of 0.32 s of operators are.
    assert seconds.recompute == pytest.approx(3 * BLOCKS * 0.4 * 0.2 / 0.32)


@pytest.mark.parametrize(("micro_batch", "regions"), [(6, 1), (4, 2), (1, 6)])
def test_kernels_are_queued_once_for_each_micro_batch(micro_batch, regions):
    times = TIMES.model_copy(update={"forward_launch_seconds": Measured(value=0.5), "backward_launch_seconds": Measured(value=0.75)})
    seconds = device_seconds(WORKLOAD, times, batch=6, length=8, micro_batch=micro_batch)
    assert (seconds.forward_launch, seconds.backward_launch) == (BLOCKS * regions * 0.5, BLOCKS * regions * 0.75)
    unknown = device_seconds(WORKLOAD, TIMES, batch=6, length=8, micro_batch=micro_batch)
    assert (unknown.forward_launch, unknown.backward_launch) == (0, 0)
    sizes, order = measure(WORKLOAD, Precision.BF16), update_order(UpdateSchedule.OPTIMIZED, Clip.NONE)
    placement = place_states(sizes, Precision.BF16, EngineSection(durability=Durability.NONE))
    setting = step_setting(sizes, placement, order, seconds, kept_units=0)
    assert (setting.forward_launch_seconds, setting.backward_launch_seconds) == (seconds.forward_launch, seconds.backward_launch)


def test_candidates_are_what_may_be_kept_and_would_be_computed_again():
    found = candidates(WORKLOAD, TIMES, batch=6, length=8, itemsize=2)
    size = 6 * 8 * 4 * 2
    assert [candidate.label for candidate in found] == ["q", "attention"]
    # Between operators lie 0.08 of 0.4 s, which go to all of them.
    assert found == (Candidate("q", size, pytest.approx(3 * 0.125)), Candidate("attention", size, pytest.approx(3 * 0.0625)))


def test_without_times_of_operators_nothing_can_be_kept():
    times = TIMES.model_copy(update={"operator_seconds": {}})
    assert candidates(WORKLOAD, times, batch=6, length=8, itemsize=2) == ()
    assert device_seconds(WORKLOAD, times, batch=2, length=8, micro_batch=2).recompute == pytest.approx(BLOCKS * 0.4)


def test_times_of_another_model_are_refused():
    with pytest.raises(ConfigError, match="another model"):
        device_seconds(WORKLOAD.model_copy(update={"vocabulary_size": 99}), TIMES, batch=1, length=8, micro_batch=1)


@pytest.mark.parametrize(
    ("kept", "backward"),
    [
        (0, 100 + 100 + 100),  # the head and two blocks are in the working slots
        (2, 100),  # the head and a block are kept, three blocks in the working slots
        (6, 0),
    ],
)
def test_weights_that_stayed_are_not_copied_again(kept, backward):
    sizes = measure(WORKLOAD, Precision.BF16)
    assert weight_bytes(sizes, kept) == (2 * 1300, 2 * backward)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kept", [0, 1, 3, 8])
@pytest.mark.parametrize("blocks", [1, 2, 6])
def test_weights_are_copied_as_often_as_operations_copy_them(tied, kept, blocks):
    head = UnitWorkload(name="head", kind=UnitKind.HEAD, parameters=30 if tied else 390)
    units = (*WORKLOAD.units[:2], *WORKLOAD.units[2:3] * (blocks - 1), head)
    sizes = measure(WORKLOAD.model_copy(update={"units": units, "tied_embeddings": tied}), Precision.BF16)
    visits = [Visit(0, recompute=Recompute.NONE_SAVED), *(Visit(unit) for unit in range(1, len(units)))]
    visits += [Visit(0)] if tied else []
    shapes = tuple(UnitShape((ChunkShape(unit.parameters, True, Tier.RAM),)) for unit in units)
    shape = StepShape(shapes, tuple(visits), slot_sizes(sizes, kept), StateForm.SPLIT)
    operations = step_operations(shape, update_order(UpdateSchedule.OPTIMIZED, Clip.NONE))
    copied = sum(operation.bytes for operation in operations if operation.kind is OperationKind.WEIGHTS_COPY)
    assert sum(weight_bytes(sizes, kept)) == copied


def test_gradients_are_added_up_once_for_every_micro_batch():
    sizes = measure(WORKLOAD, Precision.BF16)
    # bf16: 2 + 4 bytes for the first, 2 + 8 for another, 4 for the norm and 4 + 2 on the way out.
    assert gradient_seconds(sizes, 1, 16.0) == 1300 * (6 + 4 + 6) / 16
    assert gradient_seconds(sizes, 3, 1.0) == 1300 * (6 + 2 * 10 + 4 + 6)
    assert gradient_seconds(sizes, 3, None) == 0


def test_a_setting_from_a_run():
    sizes = measure(WORKLOAD, Precision.BF16)
    engine = EngineSection(ram_state_bytes=1300 * 12 // 4, durability=Durability.STEP)
    seconds = device_seconds(WORKLOAD, TIMES, batch=2, length=8, micro_batch=2)
    order = update_order(UpdateSchedule.OPTIMIZED, Clip.NONE)
    setting = step_setting(sizes, place_states(sizes, Precision.BF16, engine), order, seconds, kept_units=2, gradient_seconds=0.5)
    assert (setting.read_share, setting.written_share) == (0.75, 1.0)
    assert setting.backward_seconds == pytest.approx(seconds.backward + seconds.recompute + 0.5)
    assert (setting.trainable_units, setting.first_unit_share) == (7, 400 / 1300)
    assert (setting.gradient_bytes, setting.state_bytes) == (2600, 15600)
