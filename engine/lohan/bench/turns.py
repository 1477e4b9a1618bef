"""Measuring processes beside each other: set up one after the other, then single steps in turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from lohan.bench.records import Record, Watcher
from lohan.bench.step_child import ChildFailed, Measured

Start = Callable[[Any], Measured]
"""Makes the child of a task, which is not running yet."""


class Measurement:
    """What is known of one task so far."""

    def __init__(self, task: Any) -> None:
        self.task = task
        self.steps: list[Record] = []
        self.setup_seconds: list[float] = []
        self.results: list[Record] = []
        self.failure = ""

    def attempt(self, do: Callable[[], None]) -> None:
        """Unless it failed before; a failure is kept as the reason."""
        if self.failure:
            return
        try:
            do()
        except ChildFailed as error:
            self.failure = error.message

    def set_up(self, child: Measured, warmup: int, watcher: Watcher, *, in_turns: bool) -> None:
        """Wait for the child, and let it warm up; with `in_turns` it rests then."""
        watcher.note(f"{self.task.name}: setting up")
        self.setup_seconds.append(child.wait_ready())
        for number in range(1, warmup + 1):
            watcher.done(f"{self.task.name}, warm-up {number}: {child.step()['seconds']:.3f} s")
        if in_turns:
            child.pause()

    def take_step(self, child: Measured, watcher: Watcher, *, in_turns: bool) -> None:
        """A timed step; with `in_turns` the child rests after it."""
        self.steps.append(child.step())
        if in_turns:
            child.pause()
        watcher.done(f"{self.task.name}, step {len(self.steps)}: {self.steps[-1]['seconds']:.3f} s")

    def finish(self, child: Measured) -> None:
        """Let the child say what it took."""
        self.results.append(child.finish())


def run_in_turns(measured: Sequence[Measurement], start: Start, *, warmup: int, steps: int, watcher: Watcher) -> None:
    """All at once: set up one after the other, so that their accounts of the GPU do not mix; then single steps in turns.

    Who is alone takes its steps one behind the other.
    """
    in_turns = len(measured) > 1
    with ExitStack() as stack:
        running: list[tuple[Measurement, Measured]] = []
        for measurement in measured:
            child = stack.enter_context(start(measurement.task))
            running.append((measurement, child))
            measurement.attempt(partial(measurement.set_up, child, warmup, watcher, in_turns=in_turns))
        for turn in range(steps):
            first = turn % len(running) if running else 0
            for measurement, child in running[first:] + running[:first]:
                measurement.attempt(partial(measurement.take_step, child, watcher, in_turns=in_turns))
        for measurement, child in running:
            measurement.attempt(partial(measurement.finish, child))
