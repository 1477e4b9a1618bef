"""SIGKILL at any instant: every restart resumes, and the result is bit for bit that of a run that was never interrupted.

`make test-crash N=100 SEED=1` kills at 100 random instants of every kind of run, and at every boundary inside a step; without it a few of
each are tried. The seed fixes the moments from a trainer's start at which it is killed; it is part of a failure's message.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from lohan.config import RunConfig
from lohan.events import EventType
from tests.engine import crash_child
from tests.engine.resumed_runs import check_equal, events_of, make_config

KILLS = int(os.environ.get("LOHAN_CRASH_KILLS", "3"))
SEED = int(os.environ.get("LOHAN_CRASH_SEED", str(random.randrange(1 << 30))))  # noqa: S311 - not for secrets
ALL = 1 << 30
# The tiny model's states take 444 kB: none of them in RAM, about half, all.
PLACES = {"ssd": 0, "half": 222_000, "ram": ALL}
STEPS = 24
LONGEST_SECONDS = 120.0


@pytest.fixture(scope="module")
def trainers() -> Any:
    """Where trainers are forked from."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.engine.crash_child"])
    return context


def start(trainers: Any, config: RunConfig, kill_at: int | None = None) -> Any:
    log = config.output.directory.parent / "ticks"
    process = trainers.Process(target=crash_child.train, args=(config.model_dump(mode="json"), kill_at, log))
    process.start()
    return process


def run_to_its_end(trainers: Any, config: RunConfig) -> float:
    """Seconds it took."""
    begun = time.monotonic()
    process = start(trainers, config)
    process.join(LONGEST_SECONDS)
    assert process.exitcode == 0, (config.output.directory.parent / "ticks.output").read_text()[-4000:]
    return time.monotonic() - begun


class Reference:
    """A run that was never interrupted, by precision, and how long it takes."""

    def __init__(self, folder: Path, trainers: Any) -> None:
        self._folder, self._trainers = folder, trainers
        self._done: dict[str, tuple[RunConfig, float]] = {}

    def get(self, precision: str) -> tuple[RunConfig, float]:
        if precision not in self._done:
            config = make_config(self._folder / precision, precision=precision, max_steps=STEPS)
            run_to_its_end(self._trainers, config)  # the fork server's first child waits for its imports
            again = make_config(self._folder / f"{precision}_again", precision=precision, max_steps=STEPS)
            self._done[precision] = config, run_to_its_end(self._trainers, again)
            check_equal(again, config)
        return self._done[precision]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, trainers: Any) -> Reference:
    return Reference(tmp_path_factory.mktemp("reference"), trainers)


@pytest.mark.timeout(0 if KILLS > 10 else 300)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_killed_at_random_instants(tmp_path: Path, trainers: Any, reference: Reference, place: str, precision: str) -> None:
    expected, seconds = reference.get(precision)
    instants = random.Random(f"{SEED} {place} {precision}")  # noqa: S311 - not for secrets
    kills = number = 0
    while kills < KILLS:
        number += 1
        config = make_config(tmp_path / str(number), precision=precision, ram_state_bytes=PLACES[place], max_steps=STEPS)
        resumed = 0
        while True:
            process = start(trainers, config)
            process.join(instants.uniform(0.0, 1.1 * seconds) if kills < KILLS else LONGEST_SECONDS)
            if process.exitcode is not None:
                break
            process.kill()
            process.join()
            kills += 1
            if is_done(config):
                break
            resumed = check_resumption(config, resumed)
        assert is_done(config), f"seed {SEED}: {(tmp_path / str(number) / 'ticks.output').read_text()[-4000:]}"
        check_equal(config, expected)


def is_done(config: RunConfig) -> bool:
    """Whether the trainer has said that the run has succeeded."""
    exits = events_of(config, EventType.EXIT) if (config.output.directory / "events.jsonl").exists() else []
    return any(event["reason"] == "succeeded" for event in exits)


def check_resumption(config: RunConfig, before: int) -> int:
    """Attempts go on from where one before them was, or further."""
    if not (config.output.directory / "events.jsonl").exists():
        return before
    steps = [event["resumed_step"] for event in events_of(config, EventType.STARTED)]
    assert steps == sorted(steps), f"seed {SEED}"
    return steps[-1] if steps else before


def test_killed_at_every_boundary_of_a_step(tmp_path: Path, trainers: Any, reference: Reference) -> None:
    """Before every write, update, sync, rename, record and event of the second step after a start, one after the other."""
    expected, _ = reference.get("bf16")
    boundaries = boundaries_of_a_step(tmp_path / "count", trainers)
    assert {"write", "adamw_update", "sync", "fsync", "rename", "commit", "say", "begin_step"} <= set(boundaries.values())
    chosen = sorted(boundaries) if KILLS > 10 else sorted(random.Random(SEED).sample(sorted(boundaries), KILLS))  # noqa: S311
    config = make_config(tmp_path / "run", precision="bf16", max_steps=STEPS)
    for kill_at in chosen:
        while (exitcode := exit_code_of(start(trainers, config, kill_at))) == 0:  # the run has too few steps left: another one
            check_equal(config, expected)
            config = make_config(tmp_path / f"run{kill_at}", precision="bf16", max_steps=STEPS)
        assert exitcode == -signal.SIGKILL, (
            f"{boundaries[kill_at]}: {(config.output.directory.parent / 'ticks.output').read_text()[-4000:]}"
        )
    run_to_its_end(trainers, config)
    check_equal(config, expected)


def exit_code_of(process: Any) -> int | None:
    process.join(LONGEST_SECONDS)
    code: int | None = process.exitcode
    return code


def boundaries_of_a_step(folder: Path, trainers: Any) -> dict[int, str]:
    """What happens from the first to the last tick of the second step, by the number of the tick."""
    config = make_config(folder, precision="bf16", max_steps=3)
    process = start(trainers, config, kill_at=ALL)
    process.join(LONGEST_SECONDS)
    assert process.exitcode == 0
    ticks = [line.split() for line in (folder / "ticks").read_text().splitlines()]
    return {number: what for number, (step, what) in enumerate(ticks, 1) if step == "2"}
