"""What must be true after a soak: every run succeeded exactly once, whole, with the bits of a run that nobody disturbed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from fixtures.runs import read_events, read_metrics, read_run
from safetensors.numpy import load_file
from sqlalchemy import Engine, func, select
from sqlalchemy.exc import DBAPIError

from lohan_app.db import read_transaction
from lohan_app.entities import Run, RunState
from lohan_app.entities.runs import TERMINAL_STATES
from lohan_app.settings import Settings
from lohan_app.worker.launcher import RunFiles
from lohan_app.worker.run_files import to_toml
from tests.soak.arrangements import Appliance
from tests.soak.witness import transitions

STALL_SECONDS = 600.0
"""So long may nothing at all happen to any run: above the longest pause of the product, five minutes."""


def drain(appliance: Appliance, engine: Engine, run_ids: Sequence[str]) -> None:
    """Wait until every run has ended, for as long as something happens.

    Raises:
        AssertionError: nothing has happened for `STALL_SECONDS`.
    """
    seen: object = None
    seen_at = time.monotonic()
    while True:
        appliance.keep()
        try:
            runs = [read_run(engine, run_id) for run_id in run_ids]
        except DBAPIError:
            runs = []
        if runs and all(run.state in TERMINAL_STATES for run in runs):
            return
        now = [(run.state, run.attempt, run.step, run.epoch) for run in runs]
        if now != seen:
            seen, seen_at = now, time.monotonic()
        states = [(run.id, str(run.state), run.attempt, run.step, run.state_reason) for run in runs]
        assert time.monotonic() - seen_at < STALL_SECONDS, f"nothing happens any more: {states}"
        time.sleep(0.5)


def check_succeeded_once(settings: Settings, engine: Engine, run_ids: Sequence[str]) -> None:
    """By the database's own record of transitions, the run's events in file and database, and its curve."""
    moved = transitions(engine)
    with read_transaction(engine) as session:
        assert session.scalar(select(func.count()).select_from(Run)) == len(run_ids), "a request was taken for two"
    for run_id in run_ids:
        run = read_run(engine, run_id)
        files = RunFiles(settings.run_folder(run_id))
        assert run.state is RunState.SUCCEEDED, (run_id, run.state, run.state_reason, run.problem)
        assert run.problem is None
        targets = [target for _, target in moved[run_id]]
        assert targets.count("succeeded") == 1, (run_id, moved[run_id])
        assert targets[-1] == "succeeded", (run_id, moved[run_id])
        check_events(files)
        said = [event.fields["reason"] for event in read_events(engine, run_id) if event.type == "exit"]
        assert said.count("succeeded") == 1, (run_id, said)
        assert [metric.step for metric in read_metrics(engine, run_id)] == list(range(1, run.total_steps + 1)), run_id
        assert run.step == run.total_steps
        assert "another trainer holds" not in files.trainer_log.read_text(errors="replace")


def check_events(files: RunFiles) -> None:
    """One attempt after the other, each with numbers without a gap; one success, which is the last word."""
    last: tuple[int, int] = (0, 0)
    was_cut = False
    reasons = []
    for line in files.events.read_text(errors="replace").splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            was_cut = True  # by a kill, or by a full drive, whose trainer may still say that
            continue
        attempt, seq = int(event["attempt"]), int(event["seq"])
        follows = (attempt, seq) == (last[0], last[1] + 1) or (attempt > last[0] and seq == 1)
        assert follows or (was_cut and (attempt, seq) > last), (files.folder.name, last, (attempt, seq))
        last, was_cut = (attempt, seq), False
        reasons.append(event.get("reason") if event["type"] == "exit" else None)
    assert reasons.count("succeeded") == 1, files.folder.name
    assert reasons[-1] == "succeeded", files.folder.name


def check_weights(settings: Settings, run_ids: Sequence[str], folder: Path) -> None:
    """Every run's result has the bits of an undisturbed run: they differ in how they were recorded alone."""
    expected = _train_undisturbed(settings, run_ids[0], folder)
    for run_id in run_ids:
        found = _weights(settings.run_folder(run_id))
        assert found.keys() == expected.keys()
        differing = [name for name in expected if found[name].tobytes() != expected[name].tobytes()]
        assert not differing, (run_id, differing)


def _train_undisturbed(settings: Settings, run_id: str, folder: Path) -> dict[str, np.ndarray]:
    """`lohan train` with the run's own settings, rows and plan, in a folder of its own."""
    files, run = RunFiles(settings.run_folder(run_id)), folder / "run"
    run.mkdir(parents=True)
    config: dict[str, Any] = tomllib.loads(files.config.read_text())
    config["engine"]["state_directories"] = [str(folder / "states")]
    config["output"]["directory"] = str(run)
    (folder / "run.toml").write_text(to_toml(config))
    RunFiles(run).plan.write_bytes(files.plan.read_bytes())
    command = [sys.executable, "-m", "lohan_app.cli", "train", str(folder / "run.toml")]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return _weights(run)


def _weights(run_folder: Path) -> dict[str, np.ndarray]:
    (file,) = (run_folder / "export").glob("*.safetensors")
    return load_file(file)


def describe(engine: Engine, run_ids: Sequence[str]) -> dict[str, Any]:
    """What the runs went through, for the report."""
    moved = transitions(engine)
    return {
        "attempts": [read_run(engine, run_id).attempt for run_id in run_ids],
        "supervisors": [read_run(engine, run_id).epoch for run_id in run_ids],
        "states": dict(Counter(str(read_run(engine, run_id).state) for run_id in run_ids)),
        "transitions": dict(Counter(f"{source} to {target}" for changes in moved.values() for source, target in changes)),
    }
