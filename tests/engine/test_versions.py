"""Paused runs of every released version are gone on with, from exactly the states that it has left."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from lohan.cli.commands import ExitCode
from lohan.config import Precision, RunConfig
from lohan.events import EventType, ExitReason
from lohan.training.loop import train
from tests.engine.reference import Outcome, relative_difference
from tests.engine.resumed_runs import curve_of, events_of, weights_of
from tests.engine.test_export_command import run_file_of
from tests.fixtures.version_states import state_digests
from tests.fixtures.versions import Version, versions

RUNS = [pytest.param(version, name, id=f"{version.name} {name}") for version in versions() for name in version.manifest["paused"]]
# Another processor adds in another order, as other micro-batches do: see `tests.engine.reference.assert_equal_training`, and
# `test_parity_bf16` for losses that are computed in bf16.
LOSS_TOLERANCE = {Precision.FP32: 1e-6, Precision.BF16: 1e-3}
WEIGHT_TOLERANCE = 1e-4


def test_the_first_version_is_among_them():
    assert {version.name: sorted(version.manifest["paused"]) for version in versions()}["v0.1"] == ["8bit", "bf16", "fp32"]


@pytest.mark.parametrize(("version", "name"), RUNS)
def test_a_paused_run_of_a_released_version_is_resumed(tmp_path: Path, version: Version, name: str):
    config, known = version.moved_run(name, tmp_path), version.manifest["paused"][name]
    before = curve_of(config)
    assert len(before) == known["step"]
    assert state_digests(config) == known["states"]
    _resume(config)
    assert [event["resumed_step"] for event in events_of(config, EventType.STARTED)] == [0, known["step"]]
    assert [event["reason"] for event in events_of(config, EventType.EXIT)] == ["paused", "succeeded"]
    curve, tolerance = curve_of(config), LOSS_TOLERANCE[config.training.precision]
    assert curve[: len(before)] == before
    assert [step for step, *_ in curve] == list(range(1, len(known["losses"]) + 1))
    assert [loss for _, loss, *_ in curve] == pytest.approx(known["losses"], rel=tolerance)
    evaluations = [event["loss"] for event in events_of(config, EventType.EVALUATION)]
    assert evaluations == pytest.approx(known["evaluations"], rel=tolerance)
    assert not list((tmp_path / "states").rglob("*.bin"))
    _check_weights(config, version.folder / "run" / name / "expected" / "model.safetensors")


def _resume(config: RunConfig) -> None:
    """By `lohan train` where the precision is fp32; the other forms of states in this process, which saves seconds of imports each."""
    if config.training.precision is not Precision.FP32:
        assert train(config) is ExitReason.SUCCEEDED
        return
    command = [sys.executable, "-m", "lohan.cli", "train", str(run_file_of(config))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == ExitCode.SUCCEEDED, done.stdout + done.stderr


def _check_weights(config: RunConfig, expected: Path) -> None:
    """Where the version has kept the weights of a run that nobody interrupted: in fp32, whose differences are small by derivation."""
    weights = weights_of(config)
    base = load_file(config.model.path / "model.safetensors")
    assert weights.keys() == base.keys()
    if config.training.precision is Precision.FP32:
        ours, theirs = Outcome([], base, weights, []), Outcome([], base, load_file(expected), [])
        assert relative_difference(ours, theirs) < WEIGHT_TOLERANCE
