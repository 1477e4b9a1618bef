"""The planner's arithmetic, its choice of the micro-batch, and what it says when something does not fit."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from lohan.config import EngineSection, Precision, States, TrainingSection, UpdateSchedule
from lohan.errors import CapacityError, ConfigError, DriveSpaceError
from lohan.hardware.probe import CpuFacts, GpuFacts, HardwareFacts, RamFacts, StateDirectoryFacts, _cpu, probe
from lohan.hardware.profile import HardwareProfile
from lohan.planning.plan import Plan
from lohan.planning.planner import default_precision, make_plan
from lohan.planning.tiers import Tier
from lohan.planning.workload import UnitKind, UnitWorkload, Workload
from lohan.units import GIB, MIB, format_bytes


def llama(*, hidden: int = 4096, blocks: int = 32, tied: bool = False) -> Workload:
    """About the sizes of a Llama 7B."""
    block = 12 * hidden * hidden
    units = [UnitWorkload(name="embedding", kind=UnitKind.EMBEDDING, parameters=32000 * hidden)]
    units += [UnitWorkload(name=f"layers.{index}", kind=UnitKind.BLOCK, parameters=block) for index in range(blocks)]
    units.append(UnitWorkload(name="head", kind=UnitKind.HEAD, parameters=hidden if tied else 32001 * hidden))
    return Workload(
        architecture="llama",
        units=tuple(units),
        hidden_size=hidden,
        vocabulary_size=32000,
        context_length=4096,
        tied_embeddings=tied,
        block_saved_elements_per_token=20 * hidden,
    )


def machine(*, gpu_gib: float | None = 24, ram_gib: float = 128, ssd_gib: float = 2000, drives: tuple[str, ...] = ("a",)) -> HardwareFacts:
    size = int((gpu_gib or 0) * GIB)
    gpu = GpuFacts(uuid="GPU-0a", index=0, name="RTX 4090", total_bytes=size, free_bytes=size)
    return HardwareFacts(
        cpu=CpuFacts(name="cpu", cores=16, usable_cores=16),
        ram=RamFacts(total_bytes=int(ram_gib * GIB), free_bytes=int(ram_gib * GIB)),
        gpus=() if gpu_gib is None else (gpu, gpu.model_copy(update={"uuid": "GPU-0b", "index": 1})),
        state_directories=tuple(
            StateDirectoryFacts(
                path=f"/states/{index}",
                filesystem="ext4",
                drive=drive,
                total_bytes=int(ssd_gib * GIB),
                free_bytes=int(ssd_gib * GIB),
                direct_io=True,
            )
            for index, drive in enumerate(drives)
        ),
    )


def plan_of(
    workload: Workload | None = None,
    *,
    hardware: HardwareFacts | None = None,
    engine: EngineSection | None = None,
    profile: HardwareProfile | None = None,
    devices: int | None = None,
    **training,
) -> Plan:
    settings = TrainingSection(**({"batch_size": 16, "sequence_length": 1024} | training))
    return make_plan(
        workload or llama(),
        model_name="llama-7b",
        training=settings,
        engine=engine or EngineSection(durability="none", ram_state_bytes=0),
        hardware=hardware or machine(),
        profile=profile,
        devices=devices,
    )


def items(plan: Plan, tier: Tier) -> dict[str, int]:
    return {item.name: item.bytes for item in plan.tier(tier).items}


def _kept_elements(workload: Workload, kept_units: int) -> int:
    """Of the head and the blocks below it."""
    return sum(unit.parameters for unit in workload.units[::-1][:kept_units])


NO_ROOM = machine(gpu_gib=10)
"""For a 7B model's working slots, and little beside them."""


def test_bytes_of_a_7b_model_on_a_gpu():
    workload = llama()
    plan = plan_of(workload, hardware=machine(gpu_gib=16))
    largest, tokens = 12 * 4096 * 4096, 16 * 1024
    gpu = items(plan, Tier.GPU)
    assert 0 < plan.kept_units < 33
    assert gpu["parameter slots"] == (3 * largest + _kept_elements(workload, plan.kept_units)) * 2
    assert gpu["unit gradient buffers"] == 4 * largest
    assert gpu["boundary activations"] == tokens * 4096 * 33 * 2
    assert gpu["block working set"] == plan.micro_batch_size * 1024 * 20 * 4096 * 2
    assert gpu["loss head chunk"] == (32 * 1024**2 // 32000) * 32000 * 16
    assert gpu["non-torch reserve"] == 3 * GIB // 2
    assert items(plan, Tier.SSD) == {
        "working copy": 2 * workload.parameters,
        "remainders": 2 * workload.parameters,
        "moments": 8 * workload.parameters,
        "exported model": 2 * workload.parameters,
    }
    assert plan.ssd_bytes_per_step == 28 * workload.parameters - 2 * _kept_elements(workload, plan.kept_units)
    assert plan.device == "GPU-0a"
    assert (plan.parameters, plan.slots, plan.durability) == (workload.parameters, 3, "none")
    assert all(tier.used_bytes <= tier.capacity_bytes for tier in plan.tiers)


@pytest.mark.parametrize(
    ("kernels", "precision", "gpu_gib", "bytes_per_logit"),
    [
        ("torch", "bf16", 24, 16),
        ("auto", "bf16", 24, 16),
        ("liger", "bf16", 24, 4),
        ("compiled", "bf16", 24, 4),
        ("compiled", "fp32", 48, 8),
        ("compiled", "bf16", None, 16),
    ],
)
def test_a_fused_loss_takes_longer_chunks_in_the_same_memory(kernels, precision, gpu_gib, bytes_per_logit):
    """It holds a logit and its gradient. Of kernels that are still open the most is counted; a CPU computes fused formulas with torch's own
    operators."""
    engine = EngineSection(durability="none", kernels=kernels)
    plan = plan_of(hardware=machine(gpu_gib=gpu_gib), engine=engine, precision=precision)
    device = plan.tier(Tier.RAM if gpu_gib is None else Tier.GPU)
    chunk = next(item for item in device.items if item.name == "loss head chunk")
    tokens = 512 * MIB // (bytes_per_logit * 32000)
    assert chunk.bytes == tokens * 32000 * bytes_per_logit
    assert chunk.formula == f"{tokens} tokens x 32000 vocabulary x {bytes_per_logit} B"


def test_items_print_how_they_come_about():
    plan = plan_of(hardware=NO_ROOM)
    slots = next(item for item in plan.tier(Tier.GPU).items if item.name == "parameter slots")
    assert slots.formula == "3 slots x 201.3 M parameters of the largest unit x 2 B"
    assert all(item.formula for tier in plan.tiers for item in tier.items)


def test_plan_is_json_and_comes_back():
    plan = plan_of()
    assert Plan.model_validate_json(plan.model_dump_json()) == plan


def test_fp32_doubles_the_device_and_has_no_working_copy():
    bf16, fp32 = (
        plan_of(batch_size=1, hardware=machine(gpu_gib=80), precision=precision) for precision in (Precision.BF16, Precision.FP32)
    )
    assert bf16.kept_units == fp32.kept_units == 33
    assert items(fp32, Tier.GPU)["parameter slots"] == 2 * items(bf16, Tier.GPU)["parameter slots"]
    assert items(fp32, Tier.GPU)["unit gradient buffers"] == items(bf16, Tier.GPU)["unit gradient buffers"]
    assert "working copy" not in items(fp32, Tier.SSD)


@pytest.mark.parametrize(
    ("precision", "weights"), [(Precision.BF16, {"working copy": 2, "remainders": 2}), (Precision.FP32, {"master weights": 4})]
)
def test_8bit_states_are_half_the_bytes_with_their_scales_counted(precision, weights):
    workload = llama()
    plan = plan_of(
        workload, engine=EngineSection(states=States.EIGHT_BIT, durability="none", ram_state_bytes=0), precision=precision, batch_size=1
    )
    on_drives = items(plan, Tier.SSD)
    assert {name: on_drives[name] for name in weights} == {name: size * workload.parameters for name, size in weights.items()}
    assert on_drives["moments"] == 2 * workload.parameters + 2 * 4 * workload.parameters // 256
    chunk = plan.chunk_parameters
    assert items(plan, Tier.RAM)["optimizer staging"] == 3 * (6 * chunk + 8 * chunk // 256)
    assert plan.states == ("split-8bit" if precision is Precision.BF16 else "fp32-8bit")
    assert any("8 bits" in note for note in plan.notes)
    assert not any("8 bits" in note for note in plan_of().notes)


@pytest.mark.parametrize(("schedule", "clip"), [("serial", "none"), ("serial", "per_unit"), ("naive", "global"), ("optimized", "global")])
def test_gradients_that_wait_for_the_end_of_the_backward_are_counted(schedule, clip):
    workload = llama()
    plan = plan_of(workload, engine=EngineSection(schedule=schedule, durability="none"), clip=clip)
    item = next(item for item in plan.tier(Tier.RAM).items if item.name == "host gradient buffers")
    assert item.bytes == 2 * workload.parameters
    assert plan.schedule == schedule


def test_the_schedules_differ_in_chunks_under_way():
    staging = {}
    for schedule in UpdateSchedule:
        items = plan_of(engine=EngineSection(schedule=schedule, durability="none")).tier(Tier.RAM).items
        staging[schedule] = next(item.bytes for item in items if item.name == "optimizer staging")
    assert staging["serial"] == staging["optimized"] == 3 * staging["naive"]


def test_steps_that_are_committed_take_two_slots_and_write_no_more():
    workload = llama()
    none, step = plan_of(workload), plan_of(workload, engine=EngineSection(durability="step", ram_state_bytes=0))
    assert (none.durability, step.durability) == ("none", "step")
    twice = {name: 2 * size for name, size in items(none, Tier.SSD).items() if name != "exported model"}
    assert items(step, Tier.SSD) == {**twice, "exported model": items(none, Tier.SSD)["exported model"]}
    assert step.ssd_bytes_per_step == none.ssd_bytes_per_step
    assert step.ssd_bytes_written_per_step == none.ssd_bytes_written_per_step == 12 * workload.parameters
    assert any(re.search(r"0?\.?\d+ TB a day", note) for note in step.notes)
    states = 24 * workload.parameters / GIB
    with pytest.raises(CapacityError, match="SSD space") as caught:
        plan_of(workload, hardware=machine(ssd_gib=states), engine=EngineSection(durability="step"))
    assert "durability = none" in caught.value.remedy


def test_states_in_ram_save_reads_and_without_commits_space_and_writes_too():
    workload = llama()
    half = 6 * workload.parameters
    alone = plan_of(workload, hardware=NO_ROOM, engine=EngineSection(ram_state_bytes=half, durability="none"))
    copied = plan_of(workload, hardware=NO_ROOM, engine=EngineSection(ram_state_bytes=half, durability="step"))
    assert items(alone, Tier.RAM)["model states"] == items(copied, Tier.RAM)["model states"] == half
    assert items(alone, Tier.SSD)["moments"] == 4 * workload.parameters
    assert items(copied, Tier.SSD)["moments"] == 16 * workload.parameters
    assert alone.ssd_bytes_written_per_step == 6 * workload.parameters
    assert copied.ssd_bytes_written_per_step == 12 * workload.parameters
    assert alone.ssd_bytes_per_step == 14 * workload.parameters
    assert copied.ssd_bytes_per_step == 20 * workload.parameters
    everything = plan_of(workload, engine=EngineSection(ram_state_bytes=2**60, durability="none"), hardware=machine(ram_gib=512))
    assert items(everything, Tier.RAM)["model states"] == 12 * workload.parameters
    assert everything.ssd_bytes_per_step == 0
    with pytest.raises(CapacityError, match="host memory"):
        plan_of(workload, engine=EngineSection(ram_state_bytes=2**60, durability="none"), hardware=machine(ram_gib=64))


@pytest.mark.parametrize(("filesystem", "durability"), [("tmpfs", "none"), ("overlay", "step"), ("btrfs", "step")])
def test_file_systems_that_are_no_place_for_states_are_refused_before_the_start(filesystem, durability):
    hardware = machine()
    directory = hardware.state_directories[0].model_copy(update={"filesystem": filesystem})
    hardware = hardware.model_copy(update={"state_directories": (directory,)})
    with pytest.raises(ConfigError, match=filesystem) as caught:
        plan_of(hardware=hardware, engine=EngineSection(durability=durability))
    assert caught.value.place == "engine.state_directories"
    assert plan_of(hardware=hardware, engine=EngineSection(durability=durability, unsafe_filesystems="allow"))


def test_snapshots_take_two_slots_and_write_states_in_ram_only_when_they_are_made():
    workload = llama()
    half = 6 * workload.parameters
    step = plan_of(workload, engine=EngineSection(ram_state_bytes=half, durability="step"))
    snapshot = plan_of(workload, engine=EngineSection(ram_state_bytes=half, durability="snapshot", snapshot_minutes=5))
    none = plan_of(workload, engine=EngineSection(ram_state_bytes=half, durability="none"))
    assert snapshot.durability == "snapshot"
    assert items(snapshot, Tier.SSD) == items(step, Tier.SSD)
    assert items(snapshot, Tier.RAM) == items(step, Tier.RAM)
    assert snapshot.ssd_bytes_written_per_step == none.ssd_bytes_written_per_step == half
    assert snapshot.ssd_bytes_per_step == none.ssd_bytes_per_step
    note = next(note for note in snapshot.notes if "snapshot" in note)
    assert "every 5 minutes" in note and format_bytes(half) in note and "loses" in note
    with pytest.raises(ValueError, match="snapshot_minutes"):
        EngineSection(durability="snapshot", snapshot_minutes=0)


def test_named_snapshots_are_a_note_and_no_item():
    workload = llama()
    plan = plan_of(workload, engine=EngineSection(durability="step"), keep_steps=(100, 200))
    assert any(note.startswith(f"2 named snapshots take {format_bytes(12 * workload.parameters)} each") for note in plan.notes)
    assert items(plan, Tier.SSD) == items(plan_of(workload, engine=EngineSection(durability="step")), Tier.SSD)


def test_tied_embedding_keeps_its_gradients_open():
    tied, untied = llama(tied=True), llama()
    difference = items(plan_of(tied), Tier.GPU)["unit gradient buffers"] - items(plan_of(untied), Tier.GPU)["unit gradient buffers"]
    assert difference == 4 * 12 * 4096 * 4096


def test_micro_batch_is_the_largest_that_fits():
    assert plan_of(hardware=machine(gpu_gib=80)).micro_batch_size == 16
    workload = llama()
    plan = plan_of(workload, hardware=machine(gpu_gib=10))
    assert 1 <= plan.micro_batch_size < 16
    # One more row would not fit, were no unit kept.
    used = plan.tier(Tier.GPU).used_bytes - 2 * _kept_elements(workload, plan.kept_units) + 1024 * 20 * 4096 * 2
    assert plan.tier(Tier.GPU).used_bytes <= 10 * GIB < used


def test_micro_batch_need_not_divide_the_batch():
    sizes = {plan_of(hardware=machine(gpu_gib=10 + quarter / 4)).micro_batch_size for quarter in range(20)}
    assert any(16 % size for size in sizes)


def test_micro_batch_that_was_asked_for_is_kept_or_refused():
    assert plan_of(engine=EngineSection(micro_batch_size=3, durability="none")).micro_batch_size == 3
    fitting = plan_of(hardware=machine(gpu_gib=10)).micro_batch_size
    asked = EngineSection(micro_batch_size=16, durability="none")
    plan = plan_of(hardware=machine(gpu_gib=10), engine=asked)
    assert plan.micro_batch_size == 16, "where inputs of blocks may leave the GPU"
    assert plan.retention.boundaries.ram_blocks
    with pytest.raises(CapacityError) as caught:
        plan_of(hardware=machine(gpu_gib=10), engine=asked.model_copy(update={"activation_ram_bytes": 0, "activation_ssd_bytes": 0}))
    assert caught.value.place == "GPU memory"
    assert f"engine.micro_batch_size = {fitting} fits" in caught.value.remedy
    assert caught.value.need_bytes > caught.value.have_bytes == 10 * GIB


@pytest.mark.parametrize("hardware", [machine(gpu_gib=7), machine(gpu_gib=None, ram_gib=12)])
def test_batch_that_cannot_fit_names_batch_and_length_that_do(hardware):
    with pytest.raises(CapacityError) as caught:
        plan_of(hardware=hardware, batch_size=512, sequence_length=4096)
    match = re.fullmatch(
        r"training.batch_size = (\d+) or training.sequence_length = (\d+) fits, with one row at a time through a block\.",
        caught.value.remedy,
    )
    assert match is not None
    batch, length = int(match[1]), int(match[2])
    assert plan_of(hardware=hardware, batch_size=batch, sequence_length=4096).micro_batch_size >= 1
    assert plan_of(hardware=hardware, batch_size=512, sequence_length=length).micro_batch_size >= 1
    for too_much in ({"batch_size": batch + 1, "sequence_length": 4096}, {"batch_size": 512, "sequence_length": length + 1}):
        with pytest.raises(CapacityError):
            plan_of(hardware=hardware, **too_much)


def test_machine_too_small_for_the_model_at_all():
    with pytest.raises(CapacityError, match="GPU memory: the run needs") as caught:
        plan_of(hardware=machine(gpu_gib=3.5))
    assert "a GPU with" in caught.value.remedy
    with pytest.raises(CapacityError, match="host memory: the run needs") as caught:
        plan_of(hardware=machine(ram_gib=4))
    assert "free host memory of" in caught.value.remedy


def test_states_that_do_not_fit_on_the_drives():
    """A drive that is full now is told from one that is too small: the first may be emptied while the run waits."""
    with pytest.raises(CapacityError, match="SSD space: the run needs") as caught:
        plan_of(hardware=machine(ssd_gib=50))
    assert caught.value.have_bytes == 49 * GIB
    assert type(caught.value) is CapacityError
    with pytest.raises(DriveSpaceError, match="SSD space: the run needs"):
        plan_of(hardware=filled(machine(ssd_gib=1000)))
    with pytest.raises(CapacityError):
        plan_of(hardware=machine(drives=()))


def filled(hardware):
    """The same machine with 1 GiB free on each drive."""
    return hardware.model_copy(
        update={"state_directories": tuple(one.model_copy(update={"free_bytes": GIB}) for one in hardware.state_directories)}
    )


def test_space_of_drives_adds_up_and_directories_on_one_drive_share_it():
    assert plan_of(hardware=machine(ssd_gib=101)).tier(Tier.SSD).capacity_bytes == 100 * GIB
    assert plan_of(hardware=machine(ssd_gib=101, drives=("a", "b"))).tier(Tier.SSD).capacity_bytes == 200 * GIB
    assert plan_of(hardware=machine(ssd_gib=201, drives=("a", "a"))).tier(Tier.SSD).capacity_bytes == 200 * GIB
    assert plan_of(hardware=machine(ssd_gib=101, drives=("a", "a", "b"))).tier(Tier.SSD).capacity_bytes == 150 * GIB


def test_cpu_run_has_the_device_items_in_ram():
    for hardware, engine in (
        (machine(gpu_gib=None), EngineSection(durability="none")),
        (machine(), EngineSection(device="cpu", durability="none")),
    ):
        plan = plan_of(hardware=hardware, engine=engine)
        assert plan.device == "cpu"
        assert plan.tier(Tier.GPU).items == ()
        assert {"parameter slots", "block working set", "optimizer staging", "process base"} <= items(plan, Tier.RAM).keys()
        assert "non-torch reserve" not in items(plan, Tier.RAM)


def test_caps_bound_what_a_run_may_use():
    engine = EngineSection(gpu_memory_bytes=10 * GIB, host_memory_bytes=20 * GIB, durability="none")
    plan = plan_of(engine=engine)
    assert plan.tier(Tier.GPU).capacity_bytes == 10 * GIB
    assert plan.tier(Tier.RAM).capacity_bytes == 20 * GIB
    assert plan_of(engine=EngineSection(gpu_memory_bytes=999 * GIB, durability="none")).tier(Tier.GPU).capacity_bytes == 24 * GIB


@pytest.mark.parametrize(
    ("device", "chosen"), [("auto", "GPU-0a"), ("cuda", "GPU-0a"), ("cuda:1", "GPU-0b"), ("GPU-0b", "GPU-0b"), ("cpu:0", "cpu:0")]
)
def test_devices(device, chosen):
    assert plan_of(engine=EngineSection(device=device, durability="none")).device == chosen


@pytest.mark.parametrize("device", ["cuda:7", "GPU-ff"])
def test_unknown_devices_are_named(device):
    with pytest.raises(ConfigError, match="usable GPUs: GPU-0a, GPU-0b"):
        plan_of(engine=EngineSection(device=device, durability="none"))


def test_sequence_beyond_the_context_is_refused():
    with pytest.raises(ConfigError, match="context is 4096 tokens") as caught:
        plan_of(sequence_length=4097)
    assert caught.value.place == "training.sequence_length"


def test_digests_follow_what_they_are_of():
    plan = plan_of()
    assert plan_of().settings_digest == plan.settings_digest
    assert plan_of(learning_rate=1e-3).settings_digest != plan.settings_digest
    assert plan_of(llama(blocks=2)).workload_digest != plan.workload_digest
    assert machine(gpu_gib=24).digest != machine(gpu_gib=80).digest


def test_probe_of_this_machine(tmp_path):
    facts = probe([tmp_path / "not" / "yet", tmp_path])
    assert facts.cpu.cores >= facts.cpu.usable_cores >= 1
    assert facts.cpu.name
    assert 0 < facts.ram.free_bytes <= facts.ram.total_bytes
    first, second = facts.state_directories
    assert first.path == str(tmp_path / "not" / "yet")
    assert first.drive == second.drive
    assert first.filesystem
    assert 0 < first.free_bytes <= first.total_bytes
    assert facts.gpus or facts.notes
    assert probe([tmp_path / "not" / "yet", tmp_path]).digest == facts.digest
    assert probe([tmp_path / "another", tmp_path / "third"]).digest == facts.digest  # folders of the same drive
    assert probe([tmp_path]).digest != facts.digest
    assert HardwareFacts.model_validate_json(facts.model_dump_json()) == facts
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("lines", "name", "multiplies_bf16"),
    [
        ("model name\t: AMD EPYC 9\nflags\t\t: fpu avx512f avx512_bf16\n\nmodel name\t: second", "AMD EPYC 9", True),
        ("model name\t: Xeon\nflags\t\t: avx2 amx_bf16 amx_tile\n", "Xeon", True),
        ("model name\t: Core i7\nflags\t\t: fpu avx2 avx512f avx512_bf16x\n\nflags : avx512_bf16", "Core i7", False),
        ("processor\t: 0\nFeatures\t: fp asimd bf16\n", None, True),
        ("", None, False),
        (None, None, False),
    ],
)
def test_the_cpu_by_its_instructions(tmp_path, lines, name, multiplies_bf16):
    cpuinfo = tmp_path / "cpuinfo"
    if lines is not None:
        cpuinfo.write_text(lines)
    cpu = _cpu(cpuinfo)
    assert cpu.multiplies_bf16 is multiplies_bf16
    assert cpu.name == name if name else cpu.name


def test_bf16_is_the_default_except_on_a_cpu_without_its_instructions():
    old, new = machine(gpu_gib=None), machine(gpu_gib=None)
    new = new.model_copy(update={"cpu": new.cpu.model_copy(update={"multiplies_bf16": True})})
    assert default_precision(EngineSection(durability="none"), old) is Precision.FP32
    assert default_precision(EngineSection(durability="none"), new) is Precision.BF16
    assert default_precision(EngineSection(durability="none"), machine()) is Precision.BF16
    assert default_precision(EngineSection(device="cpu", durability="none"), machine()) is Precision.FP32
    with pytest.raises(ConfigError, match="cuda:7"):
        default_precision(EngineSection(device="cuda:7", durability="none"), machine())


def test_a_plan_in_bf16_for_a_cpu_without_it_says_so():
    cpu = EngineSection(device="cpu", durability="none")
    notes = {precision: " ".join(plan_of(engine=cpu, precision=precision).notes) for precision in Precision}
    assert "This CPU has no bf16 instructions" in notes[Precision.BF16]
    assert "instructions" not in notes[Precision.FP32]
    assert "instructions" not in " ".join(plan_of().notes)


def test_planning_loads_no_torch():
    code = "import sys, lohan.planning.planner; print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
