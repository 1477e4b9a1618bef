"""`lohan bench step`, part by part: arithmetic, what fits together, files, documents, and what a user may get wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from benchmarks import step_gpu
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

import lohan
from lohan.bench import records, show, step, step_plans
from lohan.bench.step_disk import mixed_bytes_per_second
from lohan.bench.step_memory import GpuMemory, host_peak_bytes
from lohan.bench.step_model import PooledWeights, block_seconds, make_config
from lohan.bench.step_options import SETTING_FIELDS, StateKind, StatesTier
from lohan.bench.step_plans import file_bytes, fit_together, make_task
from lohan.bench.step_shapes import SHAPES, Shape, ShapeName, block_forward_flops, forward_flops, step_flops
from lohan.cli.bench import make_application
from lohan.cli.measuring import ExitCode
from lohan.config import Durability, Precision, UpdateSchedule
from lohan.errors import CapacityError, ConfigError
from lohan.hardware.probe import GpuFacts, probe
from lohan.hardware.transfers import Engine, TransferChoice, TransferSetting, save_choice
from lohan.models.blocks import trace_workload
from lohan.planning.tiers import Tier
from lohan.profiling.passes import transfer_setting
from lohan.units import GIB, MIB
from tests.engine.bench_runs import step_options


@pytest.fixture(scope="module")
def workload():
    return trace_workload(make_config(SHAPES[ShapeName.TINY], 16))


# ---------------------------------------------------------------- arithmetic


@pytest.mark.parametrize("name", ShapeName)
def test_a_shape_has_the_parameters_of_its_model(name: ShapeName):
    model = lohan.empty_model(make_config(SHAPES[name], 1024))
    assert sum(parameter.numel() for parameter in model.parameters()) == SHAPES[name].parameters


def test_the_shapes_are_those_of_their_names():
    billions = {name: SHAPES[name].parameters / 1e9 for name in ShapeName if name is not ShapeName.TINY}
    assert {name: f"{count:.3g}b" for name, count in billions.items()} == {"1.1b": "1.1b", "3.43b": "3.43b", "6.7b": "6.74b"}


def test_flops_are_those_that_torch_counts():
    """But for attention: torch counts every pair of tokens, we those that a causal model looks at."""
    rows, length = 2, 16
    shape = Shape(hidden=64, intermediate=96, layers=3, heads=4, key_value_heads=2, vocabulary=50)
    config = make_config(shape, length)
    config._attn_implementation = "eager"
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM(config)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.zeros(rows, length, dtype=torch.long), use_cache=False)
    not_looked_at = shape.layers * rows * length * 2 * length * shape.hidden
    assert counter.get_total_flops() - not_looked_at == forward_flops(shape, rows, length)
    assert step_flops(shape, rows, length) == 3 * forward_flops(shape, rows, length)


def test_the_anchors_of_the_design_are_reproduced():
    """RoundPipe's 1.73 s at batch 8 are 97 TFLOPS, its 2.43 s at batch 32 are 276."""
    shape = SHAPES[ShapeName.LLAMA_3_43B]
    assert round(step_flops(shape, 8, 1024) / 1.73 / 1e12) == 97
    assert round(step_flops(shape, 32, 1024) / 2.43 / 1e12) == 276


def test_weights_are_stretches_of_one_pool():
    model = lohan.empty_model(make_config(SHAPES[ShapeName.TINY], 16), dtype=torch.bfloat16)
    with PooledWeights(model, torch.bfloat16) as weights:
        weights.check(model)
        one, other = weights.read("model.layers.0.self_attn.q_proj.weight"), weights.read("model.layers.1.self_attn.q_proj.weight")
        assert one.is_contiguous()
        assert one.dtype is torch.bfloat16
        assert not torch.equal(one, other)
        assert 0.015 < float(one.float().std()) < 0.025
        assert torch.equal(weights.read("model.norm.weight"), torch.ones(64, dtype=torch.bfloat16))
        assert torch.equal(one, PooledWeights(model, torch.bfloat16).read("model.layers.0.self_attn.q_proj.weight"))


def test_a_block_is_timed_by_itself():
    config = make_config(SHAPES[ShapeName.TINY], 16)
    assert block_seconds(config, 2, 16, device=torch.device("cpu"), dtype=torch.float32, least_seconds=0) > 0
    assert config.num_hidden_layers == 2  # the caller's configuration stays


# ---------------------------------------------------------------- which fit together


def tasks_and_facts(folder: Path, workload, *, gpus: tuple = (), **changes: object):
    facts = probe([folder]).model_copy(update={"gpus": gpus})
    options = step_options(folder, **changes)
    return [make_task(options, setting, workload, facts) for setting in options.settings], facts


def test_host_memory_gpu_and_drives_all_decide_who_fits_together(tmp_path, workload, a_drive):
    gpu = GpuFacts(uuid="GPU-1", index=0, name="a GPU", total_bytes=80 * GIB, free_bytes=80 * GIB)
    tasks, facts = tasks_and_facts(tmp_path, workload, gpus=(gpu,), device="cuda", gpu_cap_bytes=24 * GIB, tiers=(StatesTier.DISK,))
    assert fit_together(tasks, facts)
    assert not fit_together(tasks, facts.model_copy(update={"gpus": (gpu.model_copy(update={"free_bytes": 71 * GIB}),)}))
    host = sum(task.plan.tier(Tier.RAM).used_bytes for task in tasks) + step_plans.RAM_RESERVE_BYTES
    assert fit_together(tasks, facts.model_copy(update={"ram": facts.ram.model_copy(update={"free_bytes": host})}))
    assert not fit_together(tasks, facts.model_copy(update={"ram": facts.ram.model_copy(update={"free_bytes": host - 1})}))
    (directory,) = facts.state_directories
    room = sum(map(file_bytes, tasks)) + step_plans.SSD_RESERVE_BYTES
    full = directory.model_copy(update={"free_bytes": room - 1})
    assert fit_together(tasks, facts.model_copy(update={"state_directories": (directory.model_copy(update={"free_bytes": room}),)}))
    assert not fit_together(tasks, facts.model_copy(update={"state_directories": (full,)}))


def test_files_on_a_tmpfs_count_as_host_memory(tmp_path, workload, monkeypatch):
    monkeypatch.setattr("lohan.bench.step_options.filesystem_type", lambda _: "tmpfs")
    changes = {"tmpfs_directory": tmp_path, "tiers": (StatesTier.TMPFS,), "durability": Durability.STEP, "batches": (1,)}
    (task, *_), facts = tasks_and_facts(tmp_path, workload, **changes)
    assert file_bytes(task) == 2 * 12 * task.plan.parameters
    used = task.plan.tier(Tier.RAM).used_bytes + file_bytes(task) + step_plans.RAM_RESERVE_BYTES
    small = facts.model_copy(update={"ram": facts.ram.model_copy(update={"free_bytes": used})})
    assert fit_together([task], small)
    assert not fit_together([task, task], small)
    options = step_options(tmp_path, **changes)
    make_task(options, options.settings[0], workload, small)
    no_more = file_bytes(task) + step_plans.RAM_RESERVE_BYTES  # the files, and nothing for the process
    less = small.model_copy(update={"ram": small.ram.model_copy(update={"free_bytes": no_more})})
    with pytest.raises(CapacityError):
        make_task(options, options.settings[0], workload, less)


def test_nothing_is_exported_so_that_its_space_is_not_asked_for(tmp_path, workload, a_drive):
    options = step_options(tmp_path, tiers=(StatesTier.DISK,))
    facts = probe([tmp_path])
    (directory,) = facts.state_directories
    room = 12 * workload.parameters + step_plans.SSD_RESERVE_BYTES
    for free, fits in ((room, True), (room - 1, False)):
        changed = facts.model_copy(update={"state_directories": (directory.model_copy(update={"free_bytes": free}),)})
        if fits:
            make_task(options, options.settings[0], workload, changed)
        else:
            with pytest.raises(CapacityError):
                make_task(options, options.settings[0], workload, changed)


# ---------------------------------------------------------------- files


def test_the_drives_are_measured_with_what_the_engine_goes_by(tmp_path):
    assert transfer_setting((tmp_path,)).block_bytes == 4 * MIB
    chosen = TransferSetting(Engine.THREADS, 4 * MIB, 2)
    save_choice(tmp_path, TransferChoice(chosen, 1e9, "a test"))
    assert transfer_setting((tmp_path,)) == chosen
    before = sorted(tmp_path.iterdir())
    assert mixed_bytes_per_second((tmp_path,), file_bytes=16 * MIB, least_seconds=0) > 0
    assert sorted(tmp_path.iterdir()) == before


def test_a_full_drive_is_not_measured(tmp_path, monkeypatch):
    monkeypatch.setattr("lohan.bench.step_disk._SHARE_OF_FREE_SPACE", 1 << 62)
    assert mixed_bytes_per_second((tmp_path,)) == 0


# ---------------------------------------------------------------- documents


def document(*found: dict) -> dict:
    return records.document("step", [{"system": "lohan", **record} for record in found])


def test_appending_replaces_equal_settings_and_keeps_the_rest(tmp_path):
    path = tmp_path / "step.json"
    first = document({"batch": 8, "schedule": "serial", "skipped": "no room"}, {"batch": 32, "schedule": "serial", "tflops": 1.0})
    assert records.appended(path, first, key=SETTING_FIELDS) == first
    records.write_document(path, first)
    second = document({"batch": 8, "schedule": "serial", "tflops": 2.0})
    joined = records.appended(path, second, key=SETTING_FIELDS)
    assert [(record["batch"], record["tflops"]) for record in joined["records"]] == [(32, 1.0), (8, 2.0)]


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 1, "name": "io", "machine": {}, "records": []}'])
def test_appending_to_something_else_is_refused(text: str, tmp_path):
    path = tmp_path / "step.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="holds no results of bench step"):
        records.appended(path, document(), key=SETTING_FIELDS)


def test_appending_to_another_machines_results_is_refused(tmp_path):
    content = document()
    records.write_document(tmp_path / "step.json", {**content, "machine": {**content["machine"], "gpus": ["another"]}})
    with pytest.raises(ConfigError, match="another machine: gpus differ"):
        records.appended(tmp_path / "step.json", content, key=SETTING_FIELDS)


def test_the_table_has_a_row_for_each_setting(capsys):
    done = {"shape": "3.43b", "states_tier": "ram", "batch": 8, "schedule": "serial", "step_seconds": 2.5, "tflops": 97.4}
    done |= {"gpu_peak_bytes": 20 * GIB, "plan_gpu_bytes": 21 * GIB, "fraction_of_peak": 0.23}
    done |= {"busy": {"gpu": 0.91, "ssd_read": 0.42}, "waits": {"wait for weights": 0.07}}
    show.print_step([done, {"system": "lohan", "shape": "6.7b", "batch": 8, "schedule": "naive", "skipped": "no room"}])
    shown = capsys.readouterr().out
    for text in ("2.500", "97.4", "20.00 GiB", "23%", "91%", "42%", "7%", "ssd read", "skipped lohan 6.7b 8 naive: no room"):
        assert text in shown


# ---------------------------------------------------------------- what a user may get wrong


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--directory /nowhere/at/all --states-tier disk", "--directory /nowhere/at/all: there is no such folder"),
        ("--states-tier tmpfs --tmpfs-directory /proc", "--tmpfs-directory /proc: it is on proc, which is not what tier tmpfs measures"),
        ("--states fp32", "--states: training in bf16 keeps split or 8bit states, not fp32"),
        ("--states split --precision fp32", "--states: training in fp32 keeps fp32 or 8bit states, not split"),
        ("--gpu-cap lots", "--gpu-cap: 'lots' is no number of bytes"),
        ("--gpu-cap 5M", "--gpu-cap: 5.00 MiB holds no training"),
        ("--host-cap 5M", "--host-cap: 5.00 MiB holds no training"),
        ("--batch 8 --micro-batch 9", "--micro-batch: 9 is more than the smallest batch, 8"),
        ("--batch 5000", "--batch: Input should be less than or equal to 4096 (found 5000)"),
        ("--sequence 200000", "--sequence: Input should be less than or equal to 131072"),
        ("--max-norm 0", "--max-norm: Input should be greater than 0"),
        ("--device tpu", "--device: String should match pattern"),
        ("--trace /nowhere/trace.json", "--trace: /nowhere/trace.json: No such file or directory"),
        ("--append", "--append: there is no file to append to"),
    ],
)
def test_a_wrong_option_is_named(arguments: str, message: str, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(step, "run", lambda *_, **__: pytest.fail("it was measured"))
    result = CliRunner().invoke(make_application(), ["step", *arguments.split()])
    assert result.exit_code == ExitCode.BAD_CONFIG
    assert message in result.stderr


@pytest.mark.parametrize(
    "arguments", ["--steps 0", "--warmup -1", "--rounds 0", "--batch 0", "--schedule never", "--states-tier gpu", "--shape 70b", "--clip x"]
)
def test_a_value_out_of_range_is_refused(arguments: str):
    assert CliRunner().invoke(make_application(), ["step", *arguments.split()]).exit_code == 2


def test_options_made_by_a_program_are_checked_too(tmp_path):
    for changes in ({"steps": 0}, {"warmup": -1}, {"rounds": 0}, {"batches": ()}):
        with pytest.raises(ConfigError):
            step_options(tmp_path, **changes)


def test_states_follow_the_precision(tmp_path):
    assert step_options(tmp_path).state_kind is StateKind.FP32
    assert step_options(tmp_path, precision=Precision.BF16).state_kind is StateKind.SPLIT
    assert step_options(tmp_path, states=StateKind.EIGHT_BIT).state_kind is StateKind.EIGHT_BIT


def test_every_setting_has_a_trace_of_its_own(tmp_path):
    options = step_options(tmp_path, trace=tmp_path / "trace.json", batches=(1, 2), schedules=(UpdateSchedule.SERIAL,))
    assert [options.trace_path(setting).name for setting in options.settings] == ["trace-ram-1-serial.json", "trace-ram-2-serial.json"]
    alone = step_options(tmp_path, trace=tmp_path / "trace.json", schedules=(UpdateSchedule.SERIAL,))
    assert alone.trace_path(alone.settings[0]) == tmp_path / "trace.json"


def test_only_directories_with_files_in_them_are_named_in_the_document(tmp_path, a_drive):
    assert step_options(tmp_path).used_directories == ()
    assert step_options(tmp_path, durability=Durability.STEP).used_directories == (tmp_path,)
    assert step_options(tmp_path, tiers=(StatesTier.DISK, StatesTier.RAM)).used_directories == (tmp_path,)


def test_a_block_flops_is_its_share_of_the_forward():
    shape = SHAPES[ShapeName.LLAMA_3_43B]
    head = 8 * 1024 * 2 * shape.hidden * shape.vocabulary
    assert forward_flops(shape, 8, 1024) == shape.layers * block_forward_flops(shape, 8, 1024) + head


# ---------------------------------------------------------------- the recorded comparison


@pytest.mark.parametrize("name", step_gpu.PARTS)
def test_a_part_of_the_recorded_comparison_is_a_command_that_is_taken(name: str, tmp_path, monkeypatch):
    part, output, seen = step_gpu.PARTS[name], tmp_path / "step.json", []
    monkeypatch.setattr("lohan.bench.step_options.filesystem_type", lambda path: "ext4" if path == tmp_path else "tmpfs")
    record = {"system": "lohan", "batch": part.batch}
    monkeypatch.setattr(step, "run", lambda options, _, on_measured: seen.append(options) or (on_measured([record]) and [record]))
    if not Path("/dev/shm").is_dir():  # noqa: S108 - where the parts have their tmpfs
        pytest.skip("no /dev/shm")
    result = CliRunner().invoke(make_application(), ["step", *part.arguments(tmp_path, output)])
    assert result.exit_code == 0, result.output
    assert [seen[0].shape, seen[0].batches, seen[0].schedules] == [part.shape, (part.batch,), part.schedules]
    assert seen[0].directories == (tmp_path,)
    assert json.loads(output.read_text())["records"] == [{"system": "lohan", "batch": part.batch}]


def test_the_parts_are_listed_with_their_times(capsys):
    assert step_gpu.main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [*step_gpu.PARTS, "all"]
    with pytest.raises(SystemExit):
        step_gpu.main(["ram-9"])


# ---------------------------------------------------------------- memory


def test_the_peak_of_host_memory_is_this_process_alone(tmp_path):
    status = tmp_path / "status"
    status.write_text("VmPeak:\t 9 kB\nVmHWM:\t  123 kB\nRssShmem:\t  23 kB\nThreads:\t4\n")
    assert host_peak_bytes(status) == 100 * 1024, "mapped files of a tmpfs are not the process's"
    status.write_text("VmPeak:\t 9 kB\nVmHWM:\t  123 kB\n")
    with pytest.raises(OSError, match="does not say"):
        host_peak_bytes(status)
    child = "import resource; from lohan.bench.step_memory import host_peak_bytes; print(host_peak_bytes())"
    taken = torch.ones(256 * MIB // 4)  # a child's getrusage would begin with it
    done = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True)
    assert int(done.stdout) < host_peak_bytes() - taken.nbytes // 2


class FakeNvml:
    """A GPU that holds `used` bytes, and `own` of them by this process, where that can be seen."""

    class NVMLError(Exception):
        pass

    def __init__(self, used: int, own: int | None) -> None:
        self.used, self.own = used, own

    def nvmlInit(self) -> None:  # noqa: N802 - NVML's own names, here and below
        return

    def nvmlShutdown(self) -> None:  # noqa: N802
        return

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid != "GPU-1":
            raise self.NVMLError("not found")
        return uuid

    def nvmlDeviceGetMemoryInfo(self, _: str) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(used=self.used)

    def nvmlDeviceGetComputeRunningProcesses(self, _: str) -> list[SimpleNamespace]:  # noqa: N802
        others = [SimpleNamespace(pid=os.getpid() + 1, usedGpuMemory=99)]
        return others if self.own is None else [*others, SimpleNamespace(pid=os.getpid(), usedGpuMemory=self.own)]


@pytest.mark.parametrize(("uuid", "own", "expected"), [("GPU-1", 700, 200), ("GPU-1", None, 400), ("cpu", None, None)])
def test_what_cuda_holds_is_told_by_nvml(uuid: str, own: int | None, expected: int | None, monkeypatch):
    nvml = FakeNvml(used=100, own=own)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 500)
    memory = GpuMemory(uuid)
    nvml.used = 1000
    assert memory.context_bytes(torch.device("cuda")) == expected
