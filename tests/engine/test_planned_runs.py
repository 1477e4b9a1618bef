"""Runs of a machine that was measured: what their plans keep of activations is kept, on the drives too, and changes no bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from lohan.cli import register
from lohan.config import RunConfig
from lohan.events import EventType, ExitReason
from lohan.hardware.probe import probe
from lohan.hardware.profile import BlockTimes, HardwareProfile, Measured, UpdateRate
from lohan.hardware.profile_files import facts_of_device, save_profile
from lohan.models.blocks import trace_workload
from lohan.models.load import load_config
from lohan.planning.plan import Plan
from lohan.planning.state_form import StateForm
from lohan.planning.tiers import Tier
from lohan.planning.workload import Workload
from lohan.training.loop import train
from lohan.training.plan_run import STATES_FOLDER
from tests.engine.test_training import events_of, make_config
from tests.fixtures.tiny_model import make_tiny_model

LENGTH = 96


def write_profile(folder: Path, model: Path, states: Path, *, precision: str = "fp32", flops: float = 1e9) -> None:
    """This machine, its CPU for the device, as if it computed 1 GFLOPS and moved 1 GB/s, and its drives 100 GB/s."""
    write_profile_of(trace_workload(load_config(model)), folder, states, precision=precision, flops=flops)


def write_profile_of(workload: Workload, folder: Path, states: Path, *, precision: str, flops: float = 1e9) -> None:
    seconds = {
        operator.label: (operator.flops.at(3, LENGTH) + operator.traffic_elements.at(3, LENGTH)) / flops for operator in workload.operators
    }
    forward = sum(seconds.values())
    block = BlockTimes(
        workload_digest=workload.digest,
        kernels="torch",
        precision=precision,
        rows=3,
        sequence_length=LENGTH,
        forward_seconds=Measured(value=forward),
        backward_seconds=Measured(value=2 * forward),
        operator_seconds=seconds,
    )
    slow, fast = Measured(value=1e9), Measured(value=1e11)
    facts = facts_of_device(probe([states]), None)
    updates = tuple(UpdateRate(form=form.value, threads=1, elements_per_second=fast) for form in StateForm)
    result = HardwareProfile(
        fingerprint=facts.digest,
        date="2026-11-30T00:00:00+00:00",
        device="a made-up CPU",
        device_memory=slow,
        matmul_flops_per_second=slow,
        host_memory=fast,
        ssd_read=fast,
        ssd_write=fast,
        ssd_mixed=fast,
        updates=updates,
        blocks=(block,),
    )
    save_profile(folder, result)


def planned_run(folder: Path, **engine: Any) -> RunConfig:
    """A run of the tiny model that goes by a profile."""
    config = make_config(folder, engine={"profiles": folder / "profiles", **engine}, max_steps=3, evaluation_rows=0)
    write_profile(folder / "profiles", config.model.path, config.output.directory / STATES_FOLDER)
    return config


def outcome(config: RunConfig) -> tuple[list[float], Plan]:
    assert train(config) is ExitReason.SUCCEEDED
    losses = [event["loss"] for event in events_of(config, EventType.STEP)]
    return losses, Plan.model_validate_json((config.output.directory / "plan.json").read_text())


@pytest.mark.usefixtures("deterministic")
def test_policies_keep_what_they_say_and_train_alike(tmp_path):
    settings = {
        "recompute-all": {},
        "holistic": {},
        "keep-all": {},
        "g10": {},  # on the CPU nothing is in host memory but what stays where it is: all that leaves goes to the drives
        "checkmate": {},
    }
    losses, plans = {}, {}
    for policy, engine in settings.items():
        losses[policy], plans[policy] = outcome(planned_run(tmp_path / policy, policy=policy, **engine))
        assert plans[policy].policy == policy
        assert plans[policy].forecast is not None
    assert all(found == losses["recompute-all"] for found in losses.values())
    assert not plans["recompute-all"].retention.operators
    assert all(kept.gpu_blocks for kept in plans["holistic"].retention.operators)
    g10 = plans["g10"]
    assert all(kept.ssd_blocks and not kept.gpu_blocks for kept in g10.retention.operators)
    assert g10.retention.boundaries.ssd_blocks == (0, 1)
    kept = next(item.bytes for item in g10.tier(Tier.SSD).items if item.name == "kept activations")
    assert g10.ssd_bytes_written_per_step == plans["holistic"].ssd_bytes_written_per_step + kept


def test_the_plan_is_kept_to_within_the_memory_it_says(tmp_path):
    """With no room for all, a part is kept, some of it on the drives."""
    whole = outcome(planned_run(tmp_path / "whole", ram_state_bytes=0))[1]
    kept = next(item.bytes for item in whole.tier(Tier.RAM).items if item.name == "kept activations")
    cap = whole.tier(Tier.RAM).used_bytes - kept // 2
    config = planned_run(tmp_path / "less", host_memory_bytes=cap, ram_state_bytes=0)
    losses, plan = outcome(config)
    assert plan.tier(Tier.RAM).used_bytes <= cap
    assert any(operator.ssd_blocks for operator in plan.retention.operators)
    assert any(operator.gpu_blocks for operator in plan.retention.operators)
    assert losses == outcome(planned_run(tmp_path / "again", policy="recompute-all"))[0]


def command(*arguments: object) -> Result:
    application = typer.Typer()
    register(application)
    return CliRunner().invoke(application, list(map(str, arguments)), env={"COLUMNS": "140"})


def test_a_model_is_planned_without_a_run(tmp_path):
    model, states, profiles = make_tiny_model(tmp_path / "model"), tmp_path / "states", tmp_path / "profiles"
    states.mkdir()
    write_profile(profiles, model, states)
    options = ["--batch", 6, "--seq", LENGTH, "--precision", "fp32", "--device", "cpu", "--directory", states, "--profiles", profiles]
    options += ["--durability", "none"]
    text = command("plan", model, *options)
    assert text.exit_code == 0, text.stderr
    shown = " ".join(text.stdout.split())
    for part in (
        "batch 6 (micro-batch 6), 96 tokens a row",
        "\u2501",
        "A step:",
        "forward",
        "waits for",
        "Alternatives tried",
        "(case 2)",
        "engine.durability",
        "none (taken)",
        "TB",
    ):
        assert part in shown
    plan = Plan.model_validate(json.loads(command("plan", model, *options, "--json").stdout))
    assert {alternative.micro_batch_size for alternative in plan.forecast.alternatives} == {1, 2, 4, 6}
    asked = command("plan", model, *options, "--policy", "colossal", "--ram-gib", 1.5, "--json")
    plan = Plan.model_validate(json.loads(asked.stdout))
    assert (plan.policy, plan.tier(Tier.RAM).capacity_bytes) == ("colossal", 3 * 2**29)


def test_what_cannot_be_planned_is_said_in_words(tmp_path):
    model = make_tiny_model(tmp_path / "model")
    for arguments, code, said in (
        (["--policy", "magic"], 2, "engine.policy"),
        (["--batch", 5000], 2, "training.batch_size"),
        (["--policy", "flashneuron"], 0, ""),  # nothing was measured: no policy decides
        (["--ram-gib", 0.5], 1, "host memory: the run needs"),
    ):
        result = command("plan", model, "--device", "cpu", "--seq", 32, *arguments, "--profiles", tmp_path / "none")
        assert result.exit_code == code, result.stderr
        assert said in result.stderr
        assert result.exception is None or isinstance(result.exception, SystemExit)
    run_file = tmp_path / "run.toml"
    run_file.write_text("")
    result = command("plan", run_file, "--batch", 4)
    assert result.exit_code == 2
    assert "--batch is given beside a run's configuration" in result.stderr
