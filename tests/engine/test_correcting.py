"""Runs whose first steps correct their plan: what they say, keep and change, and that no number of the training is another for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lohan.config import RunConfig
from lohan.errors import CapacityError, ConfigError
from lohan.events import EventType, ExitReason
from lohan.hardware.profile_files import load_profile
from lohan.planning.choice import Choice
from lohan.planning.correction import MEASURED_STEPS, MOST_CORRECTIONS, SKIPPED_STEPS
from lohan.planning.plan import Plan
from lohan.planning.retention import BlockTiers, KeptOperator, Retention
from lohan.streaming.executor import Session
from lohan.training import correcting
from lohan.training.corrected_profile import CORRECTION_FILE, CorrectedProfile
from lohan.training.loop import train
from lohan.training.plan_run import STATES_FOLDER, prepare_run
from lohan.training.tracing import RunTrace, TraceRequest
from tests.engine.kept_runs import GATE
from tests.engine.test_planned_runs import write_profile
from tests.engine.test_training import events_of, make_config

FIRST_VERDICT = SKIPPED_STEPS + MEASURED_STEPS + 1
"""The step behind those that are measured: their updates are done then."""
ON_DRIVES = Retention(
    operators=(KeptOperator(label=GATE, ram_blocks=(0,), ssd_blocks=(1,)),), boundaries=BlockTiers(ram_blocks=(1,), ssd_blocks=(0,))
)


def wrong_run(folder: Path, *, steps: int = FIRST_VERDICT + 2, **engine: Any) -> RunConfig:
    """A run of a machine that is said to compute 100 kFLOPS: no machine takes as long as is foreseen."""
    config = make_config(folder, engine={"profiles": folder / "profiles", **engine}, max_steps=steps, evaluation_rows=0)
    write_profile(folder / "profiles", config.model.path, config.output.directory / STATES_FOLDER, flops=1e5)
    return config


def trained(config: RunConfig, **options: Any) -> tuple[list[float], dict[str, torch.Tensor], list[dict[str, Any]]]:
    """Losses, exported weights, and the corrections that were told."""
    assert train(config, **options) is ExitReason.SUCCEEDED
    losses = [event["loss"] for event in events_of(config, EventType.STEP)]
    weights = load_file(config.output.directory / "export" / "model.safetensors")
    return losses, weights, events_of(config, EventType.PLAN_CORRECTED)


def plan_of(config: RunConfig) -> Plan:
    return Plan.model_validate_json((config.output.directory / "plan.json").read_text())


def force(monkeypatch, *retentions: Retention) -> None:
    """Each correction finds the next of these to be better, after steps that are said to have taken twice as long as foreseen."""
    original, left = correcting.correct, list(retentions)

    def forced(running, steps, traces):
        steps = [replace(step, seconds=2 * running.of(step).decision.seconds.total) for step in steps]
        found = original(running, steps, traces)
        assert found is not None
        decision = replace(found.running.decision, kept=left.pop(0))
        return replace(found, better=Choice(running.fit, running.micro_batch, running.kept_units, decision))

    monkeypatch.setattr(correcting, "correct", forced)


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_a_wrong_forecast_is_corrected_and_told(tmp_path):
    config = wrong_run(tmp_path)
    foreseen = prepare_run(config).plan.forecast.step_seconds
    _, _, (told,) = trained(config)
    assert (told["step"], told["outcome"]) == (FIRST_VERDICT, "kept")
    assert 0 < told["ratio"] < 0.5
    assert told["foreseen_seconds"] == foreseen
    assert told["corrected_seconds"] == told["new_seconds"] < foreseen / 2
    assert set(told["factors"]) >= {"forward", "backward", "updates", "to_device", "drive_reads", "everything"}
    assert "instead of" in told["detail"] and "stays as it is" in told["detail"]
    assert plan_of(config).forecast.step_seconds == pytest.approx(told["corrected_seconds"])
    kept = CorrectedProfile.model_validate_json((config.output.directory / CORRECTION_FILE).read_text())
    assert kept.corrections == 1


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("engine", [{}, {"durability": "step", "ram_state_bytes": 10**6}], ids=["none", "step"])
def test_a_corrected_run_trains_bit_for_bit_as_one_without(engine, tmp_path, monkeypatch):
    steps = 2 * FIRST_VERDICT + 3
    plain = make_config(tmp_path / "plain", engine=engine, max_steps=steps, evaluation_rows=0)
    losses, weights, none = trained(plain)
    assert none == []
    force(monkeypatch, ON_DRIVES, Retention())
    found_losses, found_weights, told = trained(wrong_run(tmp_path / "corrected", steps=steps, **engine))
    assert [event["outcome"] for event in told] == ["changed"] * MOST_CORRECTIONS
    assert [event["step"] for event in told] == [FIRST_VERDICT, 2 * FIRST_VERDICT], "and no third one"
    assert losses == found_losses
    assert same(weights, found_weights)
    assert plan_of(wrong_run(tmp_path / "corrected")).retention == Retention()


def test_what_is_better_is_kept_from_the_next_step_on(tmp_path, monkeypatch):
    force(monkeypatch, ON_DRIVES)
    kept = []
    original = Session.wait_gradients

    def wait(session):
        original(session)
        kept.append(session._stages.kept.now.decisions if session._stages.kept.now is not None else {})

    monkeypatch.setattr(Session, "wait_gradients", wait)
    config = wrong_run(tmp_path, policy="recompute-all")
    _, _, (told,) = trained(config)
    assert [sorted(decisions) for decisions in kept] == [[]] * FIRST_VERDICT + [[1, 2]] * 2
    assert "Other activations are kept" in told["detail"]
    assert plan_of(config).retention == ON_DRIVES


def test_where_there_is_no_room_the_run_goes_on_as_it_was(tmp_path, monkeypatch):
    def refuse(*_: Any) -> None:
        raise CapacityError("nothing is left", need_bytes=2, have_bytes=1, place="host memory", remedy="Free memory.")

    monkeypatch.setattr(Session, "retain", refuse)
    force(monkeypatch, ON_DRIVES)
    config = wrong_run(tmp_path)
    before = prepare_run(config).plan.retention
    _, _, (told,) = trained(config)
    assert told["outcome"] == "no_room"
    assert told["new_seconds"] == told["corrected_seconds"]
    assert plan_of(config).retention == before
    assert [event["message"] for event in events_of(config, EventType.WARNING)] == ["The run goes on as it was planned: nothing is left."]


def test_what_cannot_be_corrected_or_written_leaves_the_run_alone(tmp_path, monkeypatch):
    def refuse(*_: Any) -> None:
        raise ConfigError("there is no rate", place="hardware profile", remedy="Measure again.")

    monkeypatch.setattr(correcting, "correct", refuse)
    first = wrong_run(tmp_path / "refused")
    assert trained(first)[2] == []
    monkeypatch.undo()
    second = wrong_run(tmp_path / "unwritten")
    (second.output.directory / (CORRECTION_FILE + ".tmp")).mkdir(parents=True)
    _, _, (told,) = trained(second)
    assert told["outcome"] == "kept"
    said = [event["message"] for config in (first, second) for event in events_of(config, EventType.WARNING)]
    assert said == ["The forecast cannot be corrected: there is no rate.", "The corrected plan cannot be written: Is a directory."]


def test_a_resumed_run_begins_with_what_was_corrected(tmp_path, monkeypatch):
    config = wrong_run(tmp_path, steps=3 * FIRST_VERDICT, durability="step")
    original = Session.wait_gradients

    def interrupted(session):
        original(session)
        if session.steps == FIRST_VERDICT + 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Session, "wait_gradients", interrupted)
    assert train(config) is ExitReason.INTERRUPTED
    monkeypatch.setattr(Session, "wait_gradients", original)
    (told,) = events_of(config, EventType.PLAN_CORRECTED)
    planned = prepare_run(config)
    assert planned.corrections == 1
    assert planned.plan.forecast.step_seconds < told["foreseen_seconds"] / 2
    assert train(config) is ExitReason.SUCCEEDED
    assert len(events_of(config, EventType.PLAN_CORRECTED)) <= MOST_CORRECTIONS


def test_a_machine_that_is_measured_again_counts_before_what_was_corrected(tmp_path):
    config = wrong_run(tmp_path)
    measured = prepare_run(config).profile
    config.output.directory.mkdir(parents=True, exist_ok=True)
    slower = measured.model_copy(update={"device_memory": measured.device_memory.model_copy(update={"value": 1.0})})
    CorrectedProfile(corrections=2, profile=slower).save(config.output.directory)
    assert prepare_run(config).profile == slower
    CorrectedProfile(corrections=2, profile=slower.model_copy(update={"date": "2020-01-01"})).save(config.output.directory)
    planned = prepare_run(config)
    assert (planned.profile, planned.corrections) == (measured, 0)
    (config.output.directory / CORRECTION_FILE).write_text("{")
    assert prepare_run(config).profile == measured == load_profile_of(config)


def load_profile_of(config: RunConfig) -> Any:
    from lohan.hardware.probe import probe
    from lohan.hardware.profile_files import facts_of_device

    return load_profile(config.engine.profiles, facts_of_device(probe([config.output.directory / STATES_FOLDER]), None))


def test_after_two_corrections_no_step_is_looked_at(tmp_path):
    config = wrong_run(tmp_path)
    config.output.directory.mkdir(parents=True, exist_ok=True)
    CorrectedProfile(corrections=MOST_CORRECTIONS, profile=prepare_run(config).profile).save(config.output.directory)
    assert trained(config)[2] == []


def test_steps_that_the_user_traces_are_traced_first(tmp_path):
    reports = []
    config = wrong_run(tmp_path, steps=FIRST_VERDICT + 4)
    _, _, (told,) = trained(config, trace=TraceRequest(tmp_path / "trace.json", 2, reports.append))
    assert [[step.step for step in report.steps] for report in reports] == [[2, 3]]
    assert told["step"] == 3 + FIRST_VERDICT
    assert (tmp_path / "trace.json").exists()


def test_a_run_without_a_forecast_is_not_traced():
    assert RunTrace(None, 5, 0, None, is_watched=False).trace is None
    assert RunTrace(None, 5, 0, None, is_watched=True).trace is not None
