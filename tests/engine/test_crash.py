"""SIGKILL at any instant: every restart resumes, and the result is bit for bit that of a run that was never interrupted.

`make test-crash N=100 SEED=1` kills at 100 random instants of every kind of run, and at every boundary inside the steps up to a record;
without it a few of each are tried. The seed fixes the moments from a trainer's start at which it is killed; it is part of a failure's
message.
"""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.engine.crash_runs import (
    IS_SHORT,
    KILLS,
    KINDS,
    LONGEST_SECONDS,
    SEED,
    Kind,
    References,
    Trainers,
    check_resumption,
    is_done,
    last_words,
)
from tests.engine.resumed_runs import check_equal

NEVER = 1 << 30
BOUNDARIES = {"StateStore.write", "StoreFile.sync", "chunk_pipeline.adamw_update", "StoreFile.write", "os.fsync", "Path.rename"}
"""Some that there are in any kind of run."""

pytestmark = pytest.mark.timeout(300 if IS_SHORT else 0)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_killed_at_random_instants(tmp_path: Path, trainers: Trainers, references: References, kind: Kind) -> None:
    expected, seconds = references.get(kind.form)
    instants = random.Random(f"{SEED} {kind}")  # noqa: S311 - not for secrets
    kills = number = 0
    while kills < KILLS:
        number += 1
        config, log = kind.config(tmp_path / str(number)), tmp_path / f"{number}.log"
        resumed = 0
        while True:
            begun = time.monotonic()
            process = trainers.start(config, log=log)
            process.join(instants.uniform(0.0, 1.1 * seconds) if kills < KILLS else LONGEST_SECONDS)
            if process.exitcode is not None:
                # A machine that was busy while the reference ran would have nearly all of them end before they are killed.
                seconds = min(seconds, time.monotonic() - begun) if resumed == 0 else seconds
                break
            process.kill()
            process.join()
            kills += 1
            if is_done(config):
                break
            resumed = check_resumption(config, resumed)
            assert resumed % kind.steps_to_a_record == 0
        assert is_done(config), last_words(log, config)
        check_equal(config, expected)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.form in ("split", "redone")], ids=str)
def test_killed_at_every_boundary_of_a_step(tmp_path: Path, trainers: Trainers, references: References, kind: Kind) -> None:
    """Before every write, update, sync, rename, record and event of the step whose record is the second of an attempt, one after the
    other: of the second step after a start, or of the three that end with the second snapshot."""
    expected, _ = references.get(kind.form)
    boundaries = boundaries_of_a_step(kind, tmp_path / "count", trainers)
    assert set(boundaries.values()) > BOUNDARIES, sorted(set(boundaries.values()))
    chosen = random.Random(SEED).sample(sorted(boundaries), KILLS) if IS_SHORT else sorted(boundaries)  # noqa: S311
    config, log = kind.config(tmp_path / "run"), tmp_path / "run.log"
    for kill_at in chosen:
        while (exitcode := exit_code_of(trainers.start(config, log=log, kill_at=kill_at))) == 0:  # too few steps left: another run
            check_equal(config, expected)
            config = kind.config(tmp_path / f"run{kill_at}")
        assert exitcode == -signal.SIGKILL, f"{boundaries[kill_at]}: {last_words(log)}"
    trainers.run_to_its_end(config, log=log)
    check_equal(config, expected)


def exit_code_of(process: Any) -> int | None:
    process.join(LONGEST_SECONDS)
    code: int | None = process.exitcode
    return code


def boundaries_of_a_step(kind: Kind, folder: Path, trainers: Trainers) -> dict[int, str]:
    """What happens from the first to the last tick of the steps that are looked at, by the number of the tick."""
    first = kind.steps_to_a_record + 1
    last = 2 * kind.steps_to_a_record
    config, log = kind.config(folder, steps=last + 1), folder.with_suffix(".log")
    assert exit_code_of(trainers.start(config, log=log, kill_at=NEVER)) == 0, last_words(log)
    ticks = [line.split() for line in log.read_text().splitlines()]
    return {number: what for number, (step, what) in enumerate(ticks, 1) if first <= int(step) <= last}
