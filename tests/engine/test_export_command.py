"""`lohan export`: what a run at rest has recorded, as the run itself would have written it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lohan.cli.commands import ExitCode
from lohan.config import Precision, RunConfig
from lohan.events import EventReader, ExitReason, Phase
from lohan.training.exporting import ExportJob
from lohan.training.job import carry_out
from lohan.training.loop import train
from lohan.training.plan_run import state_directories
from lohan.training.run_lock import hold_run
from tests.engine.resumed_runs import make_config, weights_of
from tests.engine.test_ending_early import ask, asking


def paused(folder: Path, *, step: int, **options: Any) -> RunConfig:
    config = make_config(folder, **options)
    assert train(config, listener=asking(config, "pause", at_step=step)) is ExitReason.PAUSED
    return config


def exported(config: RunConfig, folder: Path, dtype: Precision | None = None) -> ExitReason:
    """In this process."""
    return carry_out(
        folder,
        lambda reporter, stop: ExportJob(config, folder / "export", reporter, stop, dtype=dtype),
        phase=Phase.LOADING_MODEL,
        attempt=None,
        listener=None,
    )


def state_files(config: RunConfig) -> dict[Path, bytes]:
    return {path: path.read_bytes() for folder in state_directories(config) for path in folder.rglob("*") if path.is_file()}


def last_error(folder: Path) -> dict[str, Any]:
    return [event for event in EventReader(folder / "events.jsonl").read() if event.type == "exit"][-1].fields["error"]


def run_file_of(config: RunConfig) -> Path:
    """As `lohan train` reads it."""
    lines = []
    for section, values in config.model_dump(mode="json", exclude_none=True).items():
        if isinstance(values, dict):
            lines += [f"[{section}]", *(f"{name} = {json.dumps(value)}" for name, value in values.items())]
    path = config.output.directory.parent / "run.toml"
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16"},
        {"precision": "fp32", "ram_state_bytes": 200_000, "chunk_parameters": 4096},
        {"precision": "bf16", "states": "8bit", "durability": "snapshot"},
    ],
    ids=["split", "fp32 partly in RAM", "8-bit snapshot"],
)
def test_an_export_is_bit_for_bit_what_the_run_writes_at_that_step(tmp_path, options):
    config = paused(tmp_path, step=3, **options)
    before = state_files(config)
    assert exported(config, tmp_path / "out") is ExitReason.SUCCEEDED
    assert exported(config, tmp_path / "out32", Precision.FP32) is ExitReason.SUCCEEDED
    assert state_files(config) == before, "the states are only read"
    # Told to stop before it begins, the run takes no step and writes what it has.
    ask(config, "stop")
    assert train(config) is ExitReason.SUCCEEDED
    own, other = config.output.directory / "export", tmp_path / "out" / "export"
    assert {path.name: path.read_bytes() for path in own.iterdir()} == {path.name: path.read_bytes() for path in other.iterdir()}
    exact = load_file(tmp_path / "out32" / "export" / "model.safetensors")
    for name, weight in weights_of(config).items():
        assert exact[name].dtype is torch.float32
        assert torch.equal(exact[name].to(weight.dtype), weight), name
        if weight.dtype is torch.bfloat16 and weight.dim() > 1:
            assert not torch.equal(exact[name], weight.float()), "the master has more bits"


def test_the_command_exports_and_the_run_is_held_meanwhile(tmp_path):
    config = paused(tmp_path, step=2)
    run_file = run_file_of(config)
    done = export(run_file, "--to", tmp_path / "out", "--dtype", "bf16")
    assert done.returncode == ExitCode.SUCCEEDED, done.stderr
    assert f"the model is in {tmp_path / 'out' / 'export'}" in done.stdout
    assert {weight.dtype for weight in load_file(tmp_path / "out" / "export" / "model.safetensors").values()} == {torch.bfloat16}
    with hold_run(config.output.directory):
        assert exported(config, tmp_path / "second") is ExitReason.FAILED
    assert "a trainer is at work on the run" in last_error(tmp_path / "second")["message"]
    assert not (tmp_path / "second" / "export").exists()
    refused = export(run_file, "--to", config.output.directory)
    assert (refused.returncode, refused.stderr.splitlines()[0]) == (
        ExitCode.BAD_CONFIG,
        "lohan: --to: an export cannot be in the run's own folder",
    )


def export(run_file: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lohan.cli", "export", str(run_file), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def test_a_run_without_recorded_states_says_so(tmp_path):
    config = make_config(tmp_path)
    assert exported(config, tmp_path / "out") is ExitReason.FAILED
    error = last_error(tmp_path / "out")
    assert (error["message"], error["cause"]) == ("the run has recorded no step, or its states are gone", "resume")


def test_a_cancelled_export_leaves_no_folder(tmp_path):
    config = paused(tmp_path, step=2)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "control.json").write_text('{"wanted": "cancel"}')
    assert exported(config, tmp_path / "out") is ExitReason.CANCELLED
    assert [path.name for path in (tmp_path / "out").glob("export*")] == []
