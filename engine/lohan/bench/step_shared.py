"""One process for settings that differ in nothing but what they keep of activations and in micro-batches: set up once, and told before each
turn which is meant.

Setting up the 3.43 B shape takes 25 s and a step 1 s; changing what is kept takes as long as its buffers take to make.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Self, TypeVar

from lohan.bench.step_child import ChildFailed, StepChild
from lohan.bench.step_options import StepTask

if TYPE_CHECKING:
    from lohan.bench.records import Record

_Answer = TypeVar("_Answer")


class SharedChild:
    """The process of several tasks. Where one of them ends it, the others go on in a new one.

    Args:
        start: makes a child, which is not running yet.
    """

    def __init__(self, tasks: Sequence[StepTask], start: Callable[[StepTask], StepChild]) -> None:
        first, *others = tasks
        self._task, self._start = first.model_copy(update={"others": tuple(task.choice for task in others)}), start
        self._child: StepChild | None = None
        self._setup_seconds = 0.0
        self._now = 0
        self._stepped: set[int] = set()  # who has taken a step in the process that runs now
        self._results: list[Record] | None = None
        self._seated = 0

    def sit(self) -> None:
        """One more takes turns."""
        self._seated += 1

    def leave(self) -> None:
        """One takes turns no more; the last one ends the process."""
        self._seated -= 1
        if not self._seated:
            self._end()

    def wait_ready(self, place: int) -> float:
        """Seconds that setting up took, which all share; raises as `StepChild.wait_ready`."""
        self._ask(place, lambda _: None)
        return self._setup_seconds

    def step(self, place: int) -> Record:
        """A step of the task at `place`; raises as `StepChild.step`."""
        record = self._ask(place, StepChild.step)
        self._stepped.add(place)
        return record

    def pause(self, place: int) -> None:
        """Raises as `StepChild.pause`."""
        self._ask(place, StepChild.pause)

    def finish(self, place: int) -> Record:
        """What the task's steps took; all tasks' have been taken. Raises as `StepChild.finish`."""
        if self._results is None:
            if place not in self._stepped:  # the process that took them has ended
                self.step(place)
            self._results = self._ask(place, StepChild.finish)["choices"]
        return self._results[place]

    def _ask(self, place: int, do: Callable[[StepChild], _Answer]) -> _Answer:
        """Let the process go on as the task at `place`."""
        try:
            child = self._running()
            if self._now != place:
                child.use(str(place))
                self._now = place
            return do(child)
        except ChildFailed:
            self._end()
            raise

    def _running(self) -> StepChild:
        if self._child is None:
            self._child = self._start(self._task)
            self._child.__enter__()
            self._now = 0
            self._setup_seconds = self._child.wait_ready()
        return self._child

    def _end(self) -> None:
        if self._child is not None:
            self._child.__exit__(None, None, None)
        self._child = None
        self._stepped.clear()


class Seat:
    """One task's part in a shared process, used as a child of its own is."""

    def __init__(self, child: SharedChild, place: int) -> None:
        self._child, self._place = child, place

    def __enter__(self) -> Self:
        self._child.sit()
        return self

    def __exit__(self, *_: object) -> None:
        self._child.leave()

    def wait_ready(self) -> float:
        """See `SharedChild.wait_ready`."""
        return self._child.wait_ready(self._place)

    def step(self) -> Record:
        """See `SharedChild.step`."""
        return self._child.step(self._place)

    def pause(self) -> None:
        """See `SharedChild.pause`."""
        self._child.pause(self._place)

    def finish(self) -> Record:
        """See `SharedChild.finish`."""
        return self._child.finish(self._place)
