"""`lohan bench step`: settings that differ only in what they keep of activations take turns in one process."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lohan.bench import step, step_plans
from lohan.bench.step_child import StepChild
from lohan.bench.step_memory import forget_host_peak, host_peak_bytes
from lohan.bench.step_model import make_config
from lohan.bench.step_options import StatesTier, StepOptions, StepTask
from lohan.bench.step_plans import grouped, largest, make_task
from lohan.bench.step_shapes import SHAPES, ShapeName
from lohan.bench.step_worker import StepRun
from lohan.config import ActivationPolicy, UpdateSchedule
from lohan.hardware.probe import probe
from lohan.models.blocks import trace_workload
from lohan.planning.tiers import Tier
from lohan.units import MIB
from tests.engine.bench_runs import Notes, step_options
from tests.engine.test_bench_step import child_folders
from tests.engine.test_planned_runs import write_profile_of
from tests.fixtures import scripted_step_worker

POLICIES = (ActivationPolicy.HOLISTIC, ActivationPolicy.RECOMPUTE_ALL, ActivationPolicy.G10)
SERIAL = (UpdateSchedule.SERIAL,)


@pytest.fixture(scope="module")
def workload():
    return trace_workload(make_config(SHAPES[ShapeName.TINY], 16))


def options_of(folder: Path, workload: Any, **changes: Any) -> StepOptions:
    """Three policies on the CPU of a machine that is said to be measured."""
    write_profile_of(workload, folder / "profiles", folder, precision="fp32")
    values: dict[str, Any] = {"profiles": folder / "profiles", "policies": POLICIES, "schedules": SERIAL, "micro_batch": 2}
    return step_options(folder, **{**values, **changes})


def tasks_of(options: StepOptions, workload: Any, folder: Path) -> list[StepTask]:
    hardware = probe([folder])
    return [make_task(options, setting, workload, hardware) for setting in options.settings]


@pytest.fixture
def scripted(tmp_path, monkeypatch):
    """Children that answer at once; returns what they were told, in order."""
    log = tmp_path / "orders.log"
    monkeypatch.setenv("LOHAN_TEST_STEP_LOG", str(log))
    command = (sys.executable, scripted_step_worker.__file__)
    monkeypatch.setattr(step, "StepChild", partial(StepChild, command=command))
    return lambda: [line.partition(" ")[2] for line in log.read_text().splitlines()]


# ---------------------------------------------------------------- which share one
def test_those_that_differ_only_in_retention_are_one_group(tmp_path, workload):
    options = options_of(tmp_path, workload, schedules=(UpdateSchedule.SERIAL, UpdateSchedule.OPTIMIZED))
    tasks = tasks_of(options, workload, tmp_path)
    assert [[task.engine.schedule for task in group] for group in grouped(tasks)] == [["serial"] * 3, ["optimized"] * 3]
    other = tasks[1].model_copy(update={"plan": tasks[1].plan.model_copy(update={"kept_units": 1})})
    assert [len(group) for group in grouped([tasks[0], other, tasks[2]])] == [2, 1]
    other = tasks[1].model_copy(update={"plan": tasks[1].plan.model_copy(update={"micro_batch_size": 1})})
    assert [len(group) for group in grouped([tasks[0], other, tasks[2]])] == [3], "a session can change it"


def test_a_group_takes_what_the_largest_takes(tmp_path, workload):
    tasks = tasks_of(options_of(tmp_path, workload), workload, tmp_path)
    whole = largest(tasks)
    for tier in Tier:
        assert whole.plan.tier(tier).used_bytes == max(task.plan.tier(tier).used_bytes for task in tasks)


# ---------------------------------------------------------------- turns
def test_they_are_set_up_once_and_take_turns(tmp_path, workload, scripted):
    notes = Notes()
    found = step.run(options_of(tmp_path, workload), notes)
    turn = ["step", "pause"]
    warm = ["ready", *turn, "use 1", *turn, "use 2", *turn]
    turns = ["use 0", *turn, "use 1", *turn, "use 2", *turn, "use 1", *turn, "use 2", *turn, "use 0", *turn]
    assert scripted() == [*warm, *turns, "finish"]
    assert [record["policy"] for record in found] == [str(policy) for policy in POLICIES]
    assert [record["bytes_read_per_step"] for record in found] == [0, 100, 200], "each has its own account"
    assert all(record["in_turns"] and record["step_seconds_all"] == [0.5, 0.5] for record in found)
    assert notes.expected == len(notes.made) == 9
    assert child_folders(tmp_path) == []


def test_they_are_one_of_those_that_have_to_fit_together(tmp_path, workload, scripted, monkeypatch):
    monkeypatch.setattr(step_plans, "fit_together", lambda *_: False)
    options = options_of(tmp_path, workload, schedules=(UpdateSchedule.SERIAL, UpdateSchedule.OPTIMIZED), steps=1)
    found = step.run(options, Notes())
    assert scripted().count("ready") == 2
    expected = [(str(schedule), str(policy)) for schedule in options.schedules for policy in POLICIES]
    assert [(record["schedule"], record["policy"]) for record in found] == expected
    assert all(record["in_turns"] for record in found)


@pytest.mark.parametrize(("order", "set_ups"), [("use 1", 2), ("use 2", 2), ("ready", 3)])
def test_who_ends_the_process_becomes_a_record_and_the_others_go_on(order, set_ups, tmp_path, workload, scripted, monkeypatch):
    monkeypatch.setenv("LOHAN_TEST_STEP_SCRIPT", json.dumps({"serial": {order: "fail"}}))
    found = step.run(options_of(tmp_path, workload), Notes())
    assert scripted().count("ready") == set_ups
    if order == "ready":
        assert [record["skipped"] for record in found] == ["no ready today"] * 3
    else:
        place = int(order[-1])
        assert found[place]["skipped"] == f"no {order} today"
        assert all(len(record["step_seconds_all"]) == 2 for number, record in enumerate(found) if number != place)
    assert child_folders(tmp_path) == []


def test_what_was_taken_cannot_be_told_twice(tmp_path, workload, scripted, monkeypatch):
    """A process that fails to say what it took is asked again by the next, after a step that does not count."""
    monkeypatch.setenv("LOHAN_TEST_STEP_SCRIPT", json.dumps({"serial": {"finish": "fail"}}))
    found = step.run(options_of(tmp_path, workload), Notes())
    assert [record["skipped"] for record in found] == ["no finish today"] * 3
    assert scripted()[-8:] == ["ready", "use 1", "step", "finish", "ready", "use 2", "step", "finish"]


# ---------------------------------------------------------------- real steps
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("a_drive")
def test_each_has_its_own_bytes_losses_and_trace(tmp_path, workload, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(step, "mixed_bytes_per_second", lambda _: 5e9)
    options = options_of(tmp_path, workload, tiers=(StatesTier.DISK,), trace=tmp_path / "trace.json")
    found = step.run(options, Notes())
    assert all("skipped" not in record for record in found), found
    by_policy = {record["policy"]: record for record in found}
    assert len({record["setup_seconds"] for record in found}) == 1, "they were set up together"
    states = {record["bytes_written_per_step"] for record in found}
    assert len(states) == 1, "kept activations are not counted among the states"
    assert by_policy["g10"]["kept_activation_bytes"]["ssd"] > by_policy["recompute-all"]["kept_activation_bytes"]["ssd"]
    names = {policy: tmp_path / f"trace-disk-2-serial-{policy}.json" for policy in by_policy}
    moved = {policy: "activations" in path.read_text() for policy, path in names.items()}
    assert moved == {"holistic": False, "recompute-all": False, "g10": True}
    for record in found:
        assert record["busy"]["gpu"] > 0
        assert record["host_peak_bytes"] > 0
        assert len(record["step_seconds_all"]) == 2
    assert child_folders(tmp_path) == []


@pytest.mark.timeout(600)
def test_steps_of_a_setting_are_those_of_its_own_process(tmp_path, workload, monkeypatch):
    """The losses of a session that goes to and fro are, step by step, those of one that stays."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    first, *_, last = tasks_of(options_of(tmp_path, workload), workload, tmp_path)
    seen = []
    for number, choices in enumerate((["0"] * 4, ["0", "1", "1", "0"])):
        folder = tmp_path / f"run{number}"
        folder.mkdir()
        others = last.choice, last.choice.model_copy(update={"micro_batch_size": 1})
        with StepRun(first.model_copy(update={"folders": (folder,), "others": others})) as run:
            losses = []
            for choice in choices:
                run.use(choice)
                losses.append(run.step()["loss"])
                run.pause()
            seen.append(losses)
            run.use("2")
            run.step()
            accounts = run.finish()["choices"]
        assert [(account["bytes_written"], account["micro_batch"]) for account in accounts] == [(0, 2), (0, 2), (0, 1)]
    assert seen[0] == seen[1]


def test_a_peak_can_be_forgotten():
    """Where the kernel lets a process ask for that; elsewhere it stays."""
    memory = bytearray(64 * MIB)
    memory[::4096] = b"x" * len(memory[::4096])
    del memory
    before = host_peak_bytes()
    forget_host_peak()
    assert host_peak_bytes() <= before
    forget_host_peak(Path("/no/such/file"))
