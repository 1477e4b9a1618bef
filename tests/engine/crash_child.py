"""A trainer in a process of its own that can be made to kill itself at the n-th thing it does to its states and records.

Run by `multiprocessing`'s fork server, which has imported the engine once: a trainer then starts in a tenth of a second.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from transformers.models.llama import modeling_llama

from lohan.config import parse_run_config
from lohan.memory.store import StoreFile
from lohan.models import trace
from lohan.states.state_store import StateStore
from lohan.streaming import chunk_pipeline
from lohan.streaming.executor import Session
from lohan.training import attempt, loop, recording
from lohan.training.reporter import Reporter

# Imported for the fork server, which has to know them before it forks: the engine imports them late, which would cost every trainer 5 s.
assert attempt and trace and modeling_llama


class Countdown:
    """Kills this process when `tick` is called for the `kill_at`-th time since the first step of this attempt began; writes what it saw."""

    def __init__(self, kill_at: int, log: Path) -> None:
        self._left, self._log = kill_at, log.open("ab", buffering=0)
        self._lock = threading.Lock()
        self._steps_begun = 0

    def begin_step(self) -> None:
        with self._lock:
            self._steps_begun += 1
        self.tick("StateStore.begin_step")

    def tick(self, what: str) -> None:
        with self._lock:
            if not self._steps_begun:
                return
            self._log.write(f"{self._steps_begun} {what}\n".encode())
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def before(self, owner: Any, name: str, what: str) -> None:
        """Tick before every call of `owner.name`, as `what`."""
        original: Callable[..., Any] = getattr(owner, name)

        def ticking(*arguments: Any, **options: Any) -> Any:
            self.begin_step() if name == "begin_step" else self.tick(what)
            return original(*arguments, **options)

        setattr(owner, name, ticking)


def train(values: dict[str, Any], kill_at: int | None, log: Path) -> None:
    """Train the run `values` to its end, or until `kill_at` ticks have passed; leaves with the exit reason's success as exit code.

    A minute has passed whenever the clock of the snapshots has been asked three times, which is once a step: with
    `engine.snapshot_minutes = 1` every third step is recorded.
    """
    sys.stdout = sys.stderr = log.with_suffix(".output").open("a")
    torch.set_num_threads(1)
    recording.monotonic = itertools.count(step=20).__next__
    if kill_at is not None:
        countdown = Countdown(kill_at, log)
        for owner, name in (
            (StateStore, "begin_step"),
            (StateStore, "write"),
            (StateStore, "commit"),
            (StoreFile, "write"),
            (StoreFile, "sync"),
            (Session, "commit"),
            (Reporter, "say"),
            (chunk_pipeline, "adamw_update"),
            (os, "fsync"),
            (Path, "rename"),
        ):
            countdown.before(owner, name, f"{owner.__name__.rpartition('.')[2]}.{name}")
    reason = loop.train(parse_run_config(values, place="crash"))
    sys.stdout.flush()
    os._exit(0 if reason == "succeeded" else 1)
