"""Runs that are killed and started again, and the runs that were never interrupted with which their results are compared."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lohan.config import RunConfig
from lohan.events import EventType
from tests.engine import crash_child
from tests.engine.resumed_runs import check_equal, events_of, make_config

KILLS = int(os.environ.get("LOHAN_CRASH_KILLS", "1"))
IS_SHORT = "LOHAN_CRASH_KILLS" not in os.environ
SEED = int(os.environ.get("LOHAN_CRASH_SEED", str(random.randrange(1 << 30))))  # noqa: S311 - not for secrets
STEPS = 12 if IS_SHORT else 24
LONGEST_SECONDS = 120.0
# The tiny model's states take 444 kB in 12 bytes a parameter, half of that with 8-bit moments: none of them in RAM, about half, all.
PLACES = {"ssd": 0, "half": 222_000, "ram": 1 << 30}
HALF_IN_8_BITS = 111_000
FORMS: dict[str, dict[str, Any]] = {
    "split": {"precision": "bf16"},
    "fp32": {"precision": "fp32"},
    "split-8bit": {"precision": "bf16", "states": "8bit"},
    # Every step is updated as gradients arrive, taken back, and updated again.
    "redone": {"precision": "bf16", "clip": "global", "max_gradient_norm": 0.01, "clip_updates": "speculate"},
}


@dataclass(frozen=True)
class Kind:
    """A kind of run."""

    form: str
    place: str
    durability: str

    def __str__(self) -> str:
        return f"{self.form}-{self.place}-{self.durability}"

    def config(self, folder: Path, *, steps: int = STEPS) -> RunConfig:
        """With durability `snapshot` every third step is recorded: see `crash_child.train`."""
        ram_bytes = HALF_IN_8_BITS if (self.form, self.place) == ("split-8bit", "half") else PLACES[self.place]
        return make_config(
            folder, **FORMS[self.form], durability=self.durability, snapshot_minutes=1.0, ram_state_bytes=ram_bytes, max_steps=steps
        )

    @property
    def steps_to_a_record(self) -> int:
        return 3 if self.durability == "snapshot" else 1


KINDS = [Kind(form, place, durability) for form in ("split", "fp32") for place in PLACES for durability in ("step", "snapshot")]
KINDS += [Kind("split-8bit", "half", "step"), Kind("split-8bit", "half", "snapshot"), Kind("redone", "half", "step")]


class Trainers:
    """Where trainers are forked from: a process that has imported the engine."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.engine.crash_child"])

    def start(self, config: RunConfig, *, log: Path, kill_at: int | None = None) -> Any:
        process: Any = self._context.Process(target=crash_child.train, args=(config.model_dump(mode="json"), kill_at, log))
        process.start()
        return process

    def run_to_its_end(self, config: RunConfig, *, log: Path) -> float:
        """Seconds it took."""
        begun = time.monotonic()
        process = self.start(config, log=log)
        process.join(LONGEST_SECONDS)
        assert process.exitcode == 0, last_words(log)
        return time.monotonic() - begun


class References:
    """A run that was never interrupted, by the form of its states, and how long it takes."""

    def __init__(self, folder: Path, trainers: Trainers) -> None:
        self._folder, self._trainers = folder, trainers
        self._done: dict[str, tuple[RunConfig, float]] = {}

    def get(self, form: str) -> tuple[RunConfig, float]:
        if form not in self._done:
            kind = Kind(form, "ssd", "step")
            configs = [kind.config(self._folder / f"{form} {number}") for number in (1, 2)]
            # The fork server's first child waits for its imports: the second run's time counts.
            seconds = [self._trainers.run_to_its_end(config, log=self._folder / f"{form}.log") for config in configs]
            check_equal(*configs)
            self._done[form] = configs[0], seconds[1]
        return self._done[form]


def last_words(log: Path, config: RunConfig | None = None) -> str:
    """The end of what the trainers of a run said, for a message."""
    exits = events_of(config, EventType.EXIT) if config is not None else []
    return f"seed {SEED}: {exits} {log.with_suffix('.output').read_text()[-4000:]}"


def is_done(config: RunConfig) -> bool:
    """Whether the trainer has said that the run has succeeded."""
    exits = events_of(config, EventType.EXIT) if (config.output.directory / "events.jsonl").exists() else []
    return any(event["reason"] == "succeeded" for event in exits)


def check_resumption(config: RunConfig, before: int) -> int:
    """Attempts go on from where one before them was, or further, and from recorded steps."""
    if not (config.output.directory / "events.jsonl").exists():
        return before
    steps = [event["resumed_step"] for event in events_of(config, EventType.STARTED)]
    assert steps == sorted(steps), f"seed {SEED}"
    return steps[-1] if steps else before
