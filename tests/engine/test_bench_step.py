"""`lohan bench step`: the figures of real steps, in which order it measures, and what becomes of what fails or is ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch

import lohan
from lohan.bench import step, step_plans
from lohan.bench.step_child import ChildFailed, StepChild
from lohan.bench.step_model import make_config
from lohan.bench.step_options import StatesTier
from lohan.bench.step_plans import make_task
from lohan.bench.step_shapes import SHAPES, ShapeName, step_flops
from lohan.config import KernelSet, UpdateSchedule
from lohan.hardware.probe import probe
from lohan.models.blocks import find_units, trace_workload
from lohan.states.layout import DEFAULT_CHUNK_PARAMETERS
from lohan.streaming.installation import lay_out
from lohan.units import GIB
from tests.engine.bench_runs import Notes, step_options
from tests.fixtures import scripted_step_worker
from tests.fixtures.waiting import wait_until

DESIGNED_FIELDS = {
    *("system", "tuned", "schedule", "policy", "shape", "parameters", "batch", "micro_batch", "sequence", "precision", "states"),
    *("states_tier", "durability", "clip", "max_norm", "clip_rate", "gradient_norm", "kernels", "gpu_cap_bytes"),
    *("step_seconds", "step_seconds_all", "tflops", "block_peak_tflops", "fraction_of_peak", "predicted_step_seconds"),
    *("gpu_peak_bytes", "plan_gpu_bytes", "host_peak_bytes", "plan_host_bytes", "disk_bytes_per_second", "disk_mixed_bytes_per_second"),
}
SERIAL, NAIVE, OPTIMIZED = UpdateSchedule


@pytest.fixture
def scripted(tmp_path, monkeypatch):
    """Children that answer at once; returns what they were told, in order."""
    log = tmp_path / "orders.log"
    monkeypatch.setenv("LOHAN_TEST_STEP_LOG", str(log))
    command = (sys.executable, scripted_step_worker.__file__)
    monkeypatch.setattr(step, "StepChild", partial(StepChild, command=command))
    return lambda: log.read_text().splitlines()


def child_folders(folder: Path) -> list[Path]:
    return list(folder.glob(".lohan-bench-*"))


# ---------------------------------------------------------------- real steps


@pytest.mark.timeout(600)
def test_files_durability_and_clipping_make_a_complete_document(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    output = tmp_path / "step.json"
    arguments = ["--shape", "tiny", "--batch", "2", "--sequence", "16", "--precision", "bf16", "--states", "8bit", "--device", "cpu"]
    arguments += ["--schedule", "optimized", "--states-tier", "ram", "--directory", str(tmp_path), "--durability", "step"]
    arguments += ["--clip", "global", "--max-norm", "0.001", "--micro-batch", "1", "--steps", "2", "--json", "--output", str(output)]
    arguments += ["--trace", str(tmp_path / "trace.json"), "--kernels", "torch"]
    command = [sys.executable, "-m", "lohan.cli", "bench", "step", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)
    assert json.loads(output.read_text()) == content
    assert (content["schema"], content["name"], len(content["machine"]["filesystems"])) == (1, "step", 1)
    (record,) = content["records"]
    assert "skipped" not in record, record
    assert set(record) >= DESIGNED_FIELDS
    expected = {
        "system": "lohan", "tuned": True, "schedule": "optimized", "policy": "recompute-all", "shape": "tiny", "batch": 2, "micro_batch": 1,
        "sequence": 16, "precision": "bf16", "states": "8bit", "states_tier": "ram", "durability": "step", "clip": "global",
        "clip_rate": 1.0, "kernels": "eager", "gpu_cap_bytes": None, "predicted_step_seconds": None, "gpu_peak_bytes": None,
        "plan_gpu_bytes": None, "bytes_read_per_step": 0, "device": "cpu",
    }  # fmt: skip
    assert {name: record[name] for name in expected} == expected
    assert record["gradient_norm"] > record["max_norm"] == 0.001
    assert record["bytes_written_per_step"] >= 6 * record["parameters"]
    assert 0 < record["host_peak_bytes"] <= record["plan_host_bytes"]
    assert set(record["busy"]) == {"gpu", "m2g", "g2m", "ssd_read", "ssd_write", "cpu"}
    assert all(0 <= share <= 1 for share in [*record["busy"].values(), *record["waits"].values()])
    assert record["busy"]["gpu"] > 0
    assert record["busy"]["ssd_write"] > 0
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert child_folders(tmp_path) == []
    assert str(tmp_path) not in done.stdout
    assert "optimized torch, step 2" in done.stderr


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("a_drive")
def test_bytes_and_seconds_of_a_record_agree_with_the_layout(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(step, "mixed_bytes_per_second", lambda _: 5e9)
    options = step_options(tmp_path, tiers=(StatesTier.DISK,), schedules=(SERIAL,), steps=3, kernels=(KernelSet.COMPILED,))
    notes = Notes()
    (record,) = step.run(options, notes)
    assert "skipped" not in record, record
    assert record["kernels"] == "compiled"
    elements = padded_elements()
    assert record["bytes_written_per_step"] == 12 * elements
    assert 12 * elements < record["bytes_read_per_step"] <= (12 + 2 * 4) * elements
    assert len(record["step_seconds_all"]) == 3
    assert record["step_seconds"] == sorted(record["step_seconds_all"])[1]
    assert record["tflops"] == step_flops(SHAPES[ShapeName.TINY], 2, 16) / record["step_seconds"] / 1e12
    assert record["fraction_of_peak"] == record["tflops"] / record["block_peak_tflops"]
    moved = record["bytes_read_per_step"] + record["bytes_written_per_step"]
    assert record["disk_bytes_per_second"] == moved / record["step_seconds"]
    assert record["disk_mixed_bytes_per_second"] == 5e9
    assert notes.expected == len(notes.made) == 4
    assert child_folders(tmp_path) == []


def padded_elements() -> int:
    """Of the tiny model's units as they lie in the files."""
    model = lohan.empty_model(make_config(SHAPES[ShapeName.TINY], 16))
    runtimes, _ = lay_out(find_units(model), torch.optim.AdamW(model.parameters()), DEFAULT_CHUNK_PARAMETERS)
    return sum(runtime.layout.elements for runtime in runtimes)


@pytest.mark.timeout(600)
def test_an_error_in_a_child_is_the_reason_of_its_record(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    workload = trace_workload(make_config(SHAPES[ShapeName.TINY], 16))
    (setting,) = step_options(tmp_path, schedules=(SERIAL,)).settings
    task = make_task(step_options(tmp_path), setting, workload, probe([tmp_path]))
    broken = task.model_copy(update={"plan": task.plan.model_copy(update={"slots": 1})})
    with StepChild(broken) as child:
        with pytest.raises(ChildFailed, match="slots is 1, expected at least 2"):
            child.wait_ready()
        assert child._process.wait(60) == 1
        assert child_folders(tmp_path) == []  # the child's own doing
    assert child_folders(tmp_path) == []


# ---------------------------------------------------------------- order and failures


def test_settings_that_fit_together_take_steps_in_turns(tmp_path, scripted):
    notes = Notes()
    found = step.run(step_options(tmp_path), notes)
    setups = [f"{name} {order}" for name in UpdateSchedule for order in ("ready", "step", "pause")]
    names = [SERIAL, NAIVE, OPTIMIZED, NAIVE, OPTIMIZED, SERIAL]
    turns = [f"{name} {order}" for name in names for order in ("step", "pause")]
    assert scripted() == [*setups, *turns, "serial finish", "naive finish", "optimized finish"]
    assert [record["schedule"] for record in found] == list(UpdateSchedule)
    assert all(record["in_turns"] and record["step_seconds_all"] == [0.5, 0.5] for record in found)
    assert all(record["bytes_read_per_step"] == 300 and record["disk_bytes_per_second"] == 800 for record in found)
    assert notes.expected == len(notes.made) == 9
    assert child_folders(tmp_path) == []


def test_who_is_set_up_once_takes_the_steps_of_all_rounds(tmp_path, scripted):
    notes = Notes()
    (record,) = step.run(step_options(tmp_path, schedules=(SERIAL,), rounds=3), notes)
    assert len(record["step_seconds_all"]) == 6
    assert scripted().count("serial ready") == 1
    assert notes.expected == len(notes.made) == 7


def test_settings_that_do_not_are_set_up_in_rounds_of_alternating_order(tmp_path, scripted, monkeypatch):
    monkeypatch.setattr(step_plans, "fit_together", lambda *_: False)
    notes = Notes()
    found = step.run(step_options(tmp_path, rounds=2, schedules=(SERIAL, OPTIMIZED), steps=1), notes)
    once = ["ready", "step", "step", "finish"]
    assert scripted() == [f"{name} {order}" for name in (SERIAL, OPTIMIZED, OPTIMIZED, SERIAL) for order in once]
    assert all(not record["in_turns"] and record["step_seconds_all"] == [0.5, 0.5] for record in found)
    assert notes.expected == len(notes.made) == 8
    assert child_folders(tmp_path) == []


def test_as_many_as_fit_take_steps_in_turns_and_the_rest_follows(tmp_path, scripted, monkeypatch):
    monkeypatch.setattr(step_plans, "fit_together", lambda tasks, _: len(tasks) < 3)
    found = step.run(step_options(tmp_path, schedules=(SERIAL, OPTIMIZED, NAIVE), steps=1), Notes())
    both = [f"{name} {order}" for name in (SERIAL, OPTIMIZED) for order in ("ready", "step", "pause")]
    both += [f"{name} {order}" for name in (SERIAL, OPTIMIZED) for order in ("step", "pause")]
    both += ["serial finish", "optimized finish"]
    assert scripted() == [*both, "naive ready", "naive step", "naive step", "naive finish"]
    assert {record["schedule"]: record["in_turns"] for record in found} == {"serial": True, "optimized": True, "naive": False}


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("order", ["ready", "step", "finish"])
def test_who_fails_becomes_a_record_and_the_others_go_on(order: str, together: bool, tmp_path, scripted, monkeypatch):
    monkeypatch.setattr(step_plans, "fit_together", lambda *_: together)
    monkeypatch.setenv("LOHAN_TEST_STEP_SCRIPT", json.dumps({"naive": {order: "fail"}}))
    found = {record["schedule"]: record for record in step.run(step_options(tmp_path), Notes())}
    assert found["naive"]["skipped"] == f"no {order} today"
    assert "step_seconds" not in found["naive"]
    assert all(len(found[name]["step_seconds_all"]) == 2 for name in ("serial", "optimized"))
    assert child_folders(tmp_path) == []


@pytest.mark.parametrize(
    ("what", "reason"), [("die", "the process was killed: the system ran out of memory"), ("exit", "ended with status 1: the last words")]
)
def test_a_child_that_dies_without_a_word_is_a_record_too(what: str, reason: str, tmp_path, scripted, monkeypatch):
    monkeypatch.setenv("LOHAN_TEST_STEP_SCRIPT", json.dumps({"serial": {"step": what}}))
    (record,) = step.run(step_options(tmp_path, schedules=(SERIAL,)), Notes())
    assert reason in record["skipped"]
    assert child_folders(tmp_path) == []


def test_files_are_measured_before_and_after(tmp_path, scripted, a_drive, monkeypatch):
    rates = iter([1e9, 3e9])
    monkeypatch.setattr(step, "mixed_bytes_per_second", lambda _: next(rates))
    (record,) = step.run(step_options(tmp_path, tiers=(StatesTier.DISK,), schedules=(SERIAL,)), Notes())
    assert record["disk_mixed_bytes_per_second"] == 2e9


def test_what_does_not_fit_is_skipped_with_need_and_have(tmp_path, scripted):
    found = step.run(step_options(tmp_path, shape=ShapeName.LLAMA_6_7B, host_cap_bytes=2 * GIB, batches=(1,)), Notes())
    assert len(found) == 3
    assert all("2.00 GiB may be used" in record["skipped"] for record in found)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_a_gpu_setting_is_skipped(tmp_path, scripted):
    found = step.run(step_options(tmp_path, device="cuda"), Notes())
    assert [record["skipped"] for record in found] == [found[0]["skipped"]] * 3
    assert "usable GPUs: none" in found[0]["skipped"]


# ---------------------------------------------------------------- ends


def test_an_interrupt_ends_all_children_and_removes_their_folders(tmp_path, scripted):
    """Ctrl-C reaches the parent alone, in the middle of whatever it waits for."""
    others = set(psutil.Process().children())  # of tests before
    running: list[psutil.Process] = []

    class Interrupted(Notes):
        def done(self, what: str) -> None:
            if "optimized, step 1" in what:
                running.extend(set(psutil.Process().children()) - others)
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        step.run(step_options(tmp_path), Interrupted())
    assert len(running) == 3
    assert not any(child.is_running() for child in running)
    assert child_folders(tmp_path) == []


def test_what_was_measured_before_an_interrupt_is_told(tmp_path, scripted, monkeypatch):
    monkeypatch.setattr(step_plans, "fit_together", lambda *_: False)
    told: list[list[str]] = []

    class Interrupted(Notes):
        def done(self, what: str) -> None:
            if "naive, step 1" in what:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        options = step_options(tmp_path, schedules=(SERIAL, OPTIMIZED, NAIVE))
        step.run(options, Interrupted(), lambda records: told.append([record["schedule"] for record in records]))
    assert told == [["serial"], ["serial", "optimized"]]


def test_a_plan_that_goes_by_no_profile_although_one_was_named_is_a_record_with_the_reason(tmp_path, scripted):
    (record,) = step.run(step_options(tmp_path, schedules=(SERIAL,), profiles=tmp_path / "none"), Notes())
    assert "This machine was not measured" in record["skipped"]
    assert "lohan profile MODEL" in record["skipped"]


def start(folder: Path) -> subprocess.Popen[str]:
    arguments = ["--shape", "tiny", "--batch", "2", "--sequence", "16", "--precision", "fp32", "--device", "cpu"]
    arguments += ["--schedule", "serial", "--directory", str(folder), "--steps", "1000000"]
    command = [sys.executable, "-m", "lohan.cli", "bench", "step", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    for line in process.stderr:
        if "step 1:" in line:
            return process
    raise AssertionError("it ended before the first step")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_however_it_ends_no_process_and_no_folder_is_left(number: signal.Signals, tmp_path):
    process = start(tmp_path)
    try:
        (child,) = psutil.Process(process.pid).children()
        assert len(child_folders(tmp_path)) == 1
        process.send_signal(number)
        process.communicate(timeout=120)
        if number is signal.SIGKILL:  # nobody is left to clear up but the child
            wait_until(lambda: not child.is_running(), timeout_seconds=120, what="the child's end")
        assert not child.is_running()
        assert child_folders(tmp_path) == []
    finally:
        process.kill()
        process.wait()
