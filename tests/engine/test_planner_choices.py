"""What the planner chooses beside the micro-batch: units that stay on the GPU, and whether blocks move whole."""

from __future__ import annotations

import pytest

from lohan.config import EngineSection
from lohan.errors import CapacityError, ConfigError
from lohan.planning.slots import SlotSizes, size_slots
from lohan.planning.tiers import Tier
from lohan.planning.workload import ModuleWorkload, UnitKind, UnitWorkload, Workload
from lohan.units import GIB, MIB
from tests.engine.test_planner import items, llama, machine, plan_of


def with_modules(workload: Workload) -> Workload:
    """Blocks cut into attention (a third) and MLP."""
    units = [workload.units[0]]
    for unit in workload.units[1:-1]:
        units += [
            UnitWorkload(name=f"{unit.name}.{name}", kind=UnitKind.MODULE, parameters=unit.parameters * share // 3)
            for name, share in (("self_attn", 1), ("mlp", 2))
        ]
    saved = workload.block_saved_elements_per_token * 2 // 3
    modules = ModuleWorkload(units=(*units, workload.units[-1]), saved_elements_per_token=saved, boundaries_per_block=2)
    return workload.model_copy(update={"modules": modules})


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_units_stay_on_the_gpu_as_far_as_its_memory_goes(tied):
    workload = llama(tied=tied)
    counts = []
    for gpu_gib in (10.5, 12, 16, 24, 80):
        plan = plan_of(workload, hardware=machine(gpu_gib=gpu_gib))
        item = next(item for item in plan.tier(Tier.GPU).items if item.name == "parameter slots")
        slots = size_slots([unit.parameters for unit in workload.units], order_of(workload), working=3, kept=plan.kept_units)
        assert item.bytes == 2 * slots.elements
        one_more = size_slots([unit.parameters for unit in workload.units], order_of(workload), working=3, kept=plan.kept_units + 1)
        used = plan.tier(Tier.GPU).used_bytes
        assert used <= gpu_gib * GIB
        assert plan.kept_units == len(order_of(workload)) or used + 2 * (one_more.elements - slots.elements) > gpu_gib * GIB
        assert (f"{plan.kept_units} units that stay" in item.formula) == bool(plan.kept_units)
        assert any(f"{plan.kept_units} of 34 units" in note for note in plan.notes) == bool(plan.kept_units)
        assert plan.ssd_bytes_per_step == 28 * workload.parameters - 2 * slots.kept_elements
        counts.append(plan.kept_units)
    assert counts == sorted(counts)
    # An embedding of its own needs no second load; a tied one is the output projection.
    assert counts[0] < 3
    assert counts[-1] == (34 if tied else 33)


def order_of(workload: Workload) -> list[int]:
    blocks_down = list(range(len(workload.units) - 1, 0, -1))
    return [0, *blocks_down] if workload.tied_embeddings else blocks_down


def test_the_micro_batch_comes_before_kept_units():
    plan = plan_of(hardware=machine(gpu_gib=10))
    assert plan.micro_batch_size == plan_of(hardware=machine(gpu_gib=10), engine=EngineSection(device="GPU-0a")).micro_batch_size
    asked = plan_of(hardware=machine(gpu_gib=10), engine=EngineSection(micro_batch_size=1, durability="none"))
    assert asked.kept_units > plan.kept_units


def test_on_the_cpu_no_unit_has_a_slot_of_its_own():
    plan = plan_of(hardware=machine(gpu_gib=None))
    assert plan.kept_units == 0
    assert items(plan, Tier.RAM)["parameter slots"] == 3 * 12 * 4096 * 4096 * 2


@pytest.mark.parametrize(
    ("engine", "ram_gib", "expected"),
    [
        ({}, 256, "all"),
        ({"schedule": "naive"}, 256, "few"),
        ({"schedule": "serial"}, 256, "all"),
        ({"gradient_buffers": "few"}, 256, "few"),
        ({"schedule": "naive", "gradient_buffers": "all"}, 256, "all"),
        ({"device": "cpu"}, 256, "few"),
        ({"device": "cpu", "gradient_buffers": "all"}, 256, "all"),
        ({}, 12, "few"),
        ({"host_memory_bytes": 12 * GIB}, 256, "few"),
    ],
)
def test_gradients_of_all_units_wait_in_host_memory_where_there_is_room(engine, ram_gib, expected):
    workload = llama()
    plan = plan_of(workload, hardware=machine(gpu_gib=24, ram_gib=ram_gib), engine=EngineSection(**engine))
    assert plan.gradient_buffers == expected
    held = items(plan, Tier.RAM)["host gradient buffers"]
    assert held == 2 * (workload.parameters if expected == "all" else 3 * max(unit.parameters for unit in workload.units))
    assert plan.tier(Tier.RAM).used_bytes <= plan.tier(Tier.RAM).capacity_bytes


def test_room_that_was_asked_for_and_is_not_there_is_an_error():
    with pytest.raises(CapacityError, match="host gradient buffers"):
        plan_of(hardware=machine(gpu_gib=24, ram_gib=12), engine=EngineSection(gradient_buffers="all"))


def test_a_slot_of_its_own_costs_a_unit_its_own_size():
    slots = size_slots([100, 10, 10, 10, 50], [4, 3, 2, 1], working=3, kept=2)
    assert (slots.kept, slots.kept_elements, slots.working, slots.working_elements, slots.elements) == ((4, 3), 60, 3, 100, 360)
    assert size_slots([100, 10, 10, 10, 50], [0, 4, 3, 2, 1], working=3, kept=2).elements == 150 + 3 * 10
    assert size_slots([100, 10, 10], [2, 1], working=3, kept=9).elements == 120
    assert size_slots([100, 10], [0, 1], working=3, kept=9) == SlotSizes((0, 1), 110, 0, 0)


def test_modules_are_taken_where_blocks_do_not_fit():
    workload = with_modules(llama())
    blocks = plan_of(workload, hardware=machine(gpu_gib=7), batch_size=2)
    assert (blocks.grain, blocks.kept_units > 0) == ("block", True)
    assert not any("one by one" in note for note in blocks.notes)
    with pytest.raises(CapacityError):
        plan_of(hardware=machine(gpu_gib=4.4), batch_size=1)
    plan = plan_of(workload, hardware=machine(gpu_gib=4.4), batch_size=1)
    assert plan.grain == "module"
    assert any("move one by one, since whole blocks do not fit" in note for note in plan.notes)
    gpu, mlp, tokens = items(plan, Tier.GPU), 8 * 4096 * 4096, 1024
    assert gpu["unit gradient buffers"] == 4 * mlp
    assert gpu["boundary activations"] == tokens * 4096 * 65 * 2
    assert gpu["joining of micro-batches"] == 5 * tokens * 4096 * 2
    assert gpu["block working set"] == plan.micro_batch_size * 1024 * (20 * 4096 * 2 // 3) * 2
    assert items(plan, Tier.RAM)["host staging"] == 2 * 2 * mlp
    assert plan.tier(Tier.GPU).used_bytes <= 4.4 * GIB
    with pytest.raises(CapacityError):
        plan_of(workload, hardware=machine(gpu_gib=4), batch_size=1)


def test_two_slots_are_taken_where_three_do_not_fit():
    """Before blocks are cut: with two a unit is still loaded while another computes."""
    workload = with_modules(llama())
    found = {}
    for gpu_gib in (4.3, 4.4, 4.5, 5):
        plan = plan_of(workload, hardware=machine(gpu_gib=gpu_gib), batch_size=1)
        found[gpu_gib] = plan.grain, plan.slots
        assert plan.tier(Tier.GPU).used_bytes <= gpu_gib * GIB
        assert f"{plan.slots} slots x" in next(item.formula for item in plan.tier(Tier.GPU).items if item.name == "parameter slots")
    assert found == {4.3: ("module", 2), 4.4: ("module", 3), 4.5: ("block", 2), 5: ("block", 3)}


@pytest.mark.parametrize(("hidden", "chunk"), [(512, 4 * MIB), (2048, 16 * MIB), (3200, 32 * MIB), (12288, 32 * MIB)])
def test_chunks_in_ram_are_a_third_of_a_block_within_bounds(hidden, chunk):
    workload = llama(hidden=hidden, blocks=2)
    plan = plan_of(workload, hardware=machine(gpu_gib=80), engine=EngineSection(ram_state_bytes=1 << 50), batch_size=1)
    assert plan.chunk_parameters == chunk
    assert chunk == 4 * MIB or 12 * hidden * hidden >= 3 * chunk
    item = next(item for item in plan.tier(Tier.RAM).items if item.name == "optimizer staging")
    assert item.bytes == 3 * 12 * min(chunk, max(unit.parameters for unit in workload.units))


@pytest.mark.parametrize("ram_state_bytes", [0, 1 * GIB])
def test_chunks_of_files_are_small_enough_for_caches(ram_state_bytes):
    plan = plan_of(llama(hidden=3200, blocks=8), engine=EngineSection(ram_state_bytes=ram_state_bytes), batch_size=1)
    assert plan.chunk_parameters == 4 * MIB


def test_chunks_may_be_asked_for():
    plan = plan_of(llama(hidden=3200, blocks=2), hardware=machine(gpu_gib=80), engine=EngineSection(chunk_parameters=4096), batch_size=1)
    assert plan.chunk_parameters == 4096


@pytest.mark.parametrize("durability", ["none", "step", "snapshot"])
@pytest.mark.parametrize("ram_gib", [24, 64, 160, 512])
def test_states_take_what_host_memory_has_left_but_a_quarter(ram_gib, durability):
    workload = llama()
    total = 12 * workload.parameters
    plan = plan_of(workload, hardware=machine(ram_gib=ram_gib), engine=EngineSection(durability=durability), devices=1)
    held = items(plan, Tier.RAM).get("model states", 0)
    tier = plan.tier(Tier.RAM)
    others = tier.used_bytes - held
    assert held == min(total, max(0, int(tier.capacity_bytes * 0.75) - others) // 1)
    assert (plan.ram_state_bytes == held) if held < total else (total <= plan.ram_state_bytes < total * 1.01)
    if durability == "none":
        assert plan.ssd_bytes_written_per_step == pytest.approx(total - held, abs=1)
    # Two devices share host memory: each run's states end at its half of those three quarters.
    shared = plan_of(workload, hardware=machine(ram_gib=ram_gib), engine=EngineSection(durability=durability))
    assert shared.tier(Tier.RAM).used_bytes <= max(others, tier.capacity_bytes * 0.75 / 2)
    none = plan_of(workload, hardware=machine(ram_gib=ram_gib), engine=EngineSection(durability=durability, ram_state_bytes=0))
    assert "model states" not in items(none, Tier.RAM)
    assert none.ram_state_bytes == 0


def test_a_cap_on_host_memory_is_used_to_its_end():
    plan = plan_of(hardware=machine(ram_gib=256), engine=EngineSection(host_memory_bytes=48 * GIB))
    assert items(plan, Tier.RAM)["model states"] > 10 * GIB
    assert 48 * GIB - MIB <= plan.tier(Tier.RAM).used_bytes <= 48 * GIB


def test_what_the_drives_cannot_hold_lies_in_ram_where_nothing_is_kept_to_resume_from():
    workload = llama()
    total = 12 * workload.parameters
    small = machine(ram_gib=256, ssd_gib=60)
    plan = plan_of(workload, hardware=small, engine=EngineSection(durability="none"), devices=1)
    assert total - items(plan, Tier.RAM)["model states"] <= 60 * GIB
    assert all(tier.used_bytes <= tier.capacity_bytes for tier in plan.tiers)
    with pytest.raises(CapacityError, match="SSD space") as caught:
        plan_of(workload, hardware=small, engine=EngineSection(durability="step"))
    assert "engine.durability = none needs half the space" in caught.value.remedy
    with pytest.raises(CapacityError) as caught:
        plan_of(workload, hardware=machine(ram_gib=32, ssd_gib=60), engine=EngineSection(durability="none"))
    assert "more of free host memory would hold what the drives do not" in caught.value.remedy
    with pytest.raises(CapacityError) as caught:
        plan_of(workload, hardware=small, engine=EngineSection(durability="none", ram_state_bytes=0))
    assert 'engine.ram_state_bytes = "auto"' in caught.value.remedy


def test_states_in_ram_that_were_asked_for_and_do_not_fit_are_named_with_what_does():
    with pytest.raises(CapacityError) as caught:
        plan_of(hardware=machine(ram_gib=64), engine=EngineSection(ram_state_bytes=200 * GIB))
    assert caught.value.remedy.startswith("engine.ram_state_bytes up to ")
    assert caught.value.need_bytes > caught.value.have_bytes == 63 * GIB


def test_inputs_of_blocks_leave_the_gpu_where_a_large_batch_needs_it():
    """The last blocks' stay: the backward begins with them. Modules keep more tensors between regions, and do not help."""
    workload, each = with_modules(llama()), 64 * 1024 * 4096 * 2
    engine = EngineSection(durability="none", ram_state_bytes=0)
    plan = plan_of(workload, hardware=machine(gpu_gib=10), batch_size=64, engine=engine)
    moved = plan.retention.boundaries.ram_blocks
    assert plan.grain == "block"
    assert moved == tuple(range(len(moved)))
    assert items(plan, Tier.GPU)["boundary activations"] == (33 - len(moved)) * each
    assert items(plan, Tier.GPU)["kept activations on their way"] == 2 * each * plan.micro_batch_size // 64
    assert items(plan, Tier.RAM)["kept activations"] == len(moved) * each
    assert all(tier.used_bytes <= tier.capacity_bytes for tier in plan.tiers)
    on_drives = engine.model_copy(update={"activation_ram_bytes": 3 * each})
    plan = plan_of(workload, hardware=machine(gpu_gib=10), batch_size=64, engine=on_drives)
    boundaries = plan.retention.boundaries
    assert (len(boundaries.ram_blocks), len(boundaries.ram_blocks) + len(boundaries.ssd_blocks)) == (3, len(moved))
    assert items(plan, Tier.SSD)["kept activations"] == len(boundaries.ssd_blocks) * each
    assert plan.ssd_bytes_written_per_step == 12 * workload.parameters + len(boundaries.ssd_blocks) * each
    nowhere = on_drives.model_copy(update={"activation_ram_bytes": 0, "activation_ssd_bytes": 0})
    with pytest.raises(CapacityError) as caught:
        plan_of(workload, hardware=machine(gpu_gib=10), batch_size=64, engine=nowhere)
    assert "boundary activations (16.5" in str(caught.value)


def test_the_grain_that_was_asked_for_is_taken():
    def asked(grain: str) -> EngineSection:
        return EngineSection(grain=grain, durability="none")

    workload = with_modules(llama())
    assert plan_of(workload, engine=asked("module")).grain == "module"
    assert any("as was asked for" in note for note in plan_of(workload, engine=asked("module")).notes)
    with pytest.raises(CapacityError):
        plan_of(workload, hardware=machine(gpu_gib=4.4), engine=asked("block"), batch_size=1)
    with pytest.raises(ConfigError, match="cannot be cut into modules"):
        plan_of(llama(), engine=asked("module"))


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"durability": "none"}, "5: updates begin after the backward."),
        ({"durability": "step"}, "5: updates begin after the backward, or before it ends while few steps are clipped."),
        ({"durability": "step", "schedule": "serial"}, "5: updates begin after the backward."),
        ({"durability": "step", "clip_updates": "defer"}, "5: updates begin after the backward."),
        ({"clip_updates": "speculate"}, "5: updates begin as gradients arrive, and are done again where a step is clipped."),
    ],
)
def test_the_plan_says_when_clipped_updates_begin(engine, said):
    plan = plan_of(engine=EngineSection(**engine), clip="global", max_gradient_norm=5)
    assert any(note.endswith(said) for note in plan.notes)
    assert items(plan, Tier.RAM)["host gradient buffers"] == 2 * llama().parameters, "kept, whenever updates begin"
