"""Lays tasks out in time: threads that work in order, resources that do one task at a time, and what those share. Pure numbers.

Time goes from event to event; between two, every task that runs goes on at one speed. An event costs time in proportion to the resources,
not to the tasks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from types import MappingProxyType

from lohan.planning.operation_costs import Sharing
from lohan.planning.operations import Resource

_ROUNDING = 1e-12

_OPPOSITE: Mapping[Resource, Resource] = MappingProxyType(
    {
        Resource.M2G: Resource.G2M,
        Resource.G2M: Resource.M2G,
        Resource.SSD_READ: Resource.SSD_WRITE,
        Resource.SSD_WRITE: Resource.SSD_READ,
    }
)


@dataclass(frozen=True, slots=True)
class Task:
    """One thing that one thread does on one resource in every step."""

    resource: Resource
    thread: str
    """Tasks of a thread are done in their order; its resource may have others."""
    seconds: float
    """By itself."""
    rank: int = 0
    """A thread with tasks of several ranks does those of each in their order, and goes on with the lowest rank that can go on whenever it
    is done with all of one."""
    host_memory_bytes: float = 0.0
    after: tuple[int, ...] = ()
    """Tasks of the same step, by index."""
    after_last_step: tuple[int, ...] = ()


Spans = list[tuple[float, float]]
"""Begin and end of every task of a step, in seconds."""


def lay_out(tasks: Sequence[Task], sharing: Sharing, steps: int) -> list[Spans]:
    """When each task of so many steps begins and ends, for each step: as early as its thread and resource let it.

    Of several threads that could go on with one resource it takes the task that has been ready for longest, then the earlier one.
    """
    return _Clock(tasks, sharing, steps).run()


@dataclass(slots=True)
class _Line:
    """Tasks of one thread and rank."""

    rank: int
    tasks: list[int]
    done: int = 0

    def next(self, count: int, steps: int) -> int | None:
        """The number of the task that is next, with so many tasks a step; None after the last step."""
        step, place = divmod(self.done, len(self.tasks))
        return None if step == steps else step * count + self.tasks[place]

    @property
    def order(self) -> tuple[int, bool, int]:
        """Before which others of its thread it comes: those of later steps, those not yet begun, those of higher rank."""
        step, place = divmod(self.done, len(self.tasks))
        return step, not place, self.rank


_Thread = list[_Line]


@dataclass(slots=True)
class _Running:
    number: int
    """Of the task, counted over all steps."""
    left: float
    """Seconds, at its own speed."""
    task: Task


@dataclass(slots=True)
class _Clock:
    tasks: Sequence[Task]
    sharing: Sharing
    steps: int
    now: float = 0.0
    waits: list[int] = field(default_factory=list)
    """For each task over all steps how many others it still waits for."""
    ready: list[float] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    successors: list[list[int]] = field(default_factory=list)
    """Of each task the numbers to add to its own to get those that wait for it."""
    threads: dict[Resource, list[_Thread]] = field(default_factory=dict)
    running: dict[Resource, _Running] = field(default_factory=dict)

    def run(self) -> list[Spans]:
        self._prepare()
        count = len(self.tasks)
        while True:
            for resource, threads in self.threads.items():
                if resource not in self.running:
                    self._start(resource, threads)
            if not self.running:
                break
            self._advance()
        unfinished = self.ends.count(inf)
        assert not unfinished, f"{unfinished} operations wait for each other"
        spans = list(zip(self.starts, self.ends, strict=True))
        return [spans[step * count : (step + 1) * count] for step in range(self.steps)]

    def _prepare(self) -> None:
        count = len(self.tasks)
        self.successors = [[] for _ in self.tasks]
        lines: dict[tuple[Resource, str, int], _Line] = {}
        for index, task in enumerate(self.tasks):
            for earlier in task.after:
                self.successors[earlier].append(index - earlier)
            for earlier in task.after_last_step:
                self.successors[earlier].append(index - earlier + count)
            lines.setdefault((task.resource, task.thread, task.rank), _Line(task.rank, [])).tasks.append(index)
        threads: dict[tuple[Resource, str], _Thread] = {}
        for (resource, thread, _), line in lines.items():
            threads.setdefault((resource, thread), []).append(line)
        for (resource, _), of_thread in threads.items():
            self.threads.setdefault(resource, []).append(of_thread)
        first = [len(task.after) for task in self.tasks]
        others = [len(task.after) + len(task.after_last_step) for task in self.tasks]
        total = count * self.steps
        self.waits = first + others * (self.steps - 1)
        self.ready, self.starts, self.ends = [0.0] * total, [inf] * total, [inf] * total

    def _start(self, resource: Resource, threads: list[_Thread]) -> None:
        found = [choice for thread in threads if (choice := self._next(thread)) is not None]
        if not found:
            return
        _, number, line = min(found, key=lambda choice: choice[:2])
        task = self.tasks[number % len(self.tasks)]
        line.done += 1
        self.starts[number] = self.now
        self.running[resource] = _Running(number, task.seconds, task)

    def _next(self, thread: _Thread) -> tuple[float, int, _Line] | None:
        """Since when the thread could go on, with which task, of which line."""
        count, steps, waits = len(self.tasks), self.steps, self.waits
        best: tuple[int, _Line] | None = None
        for line in thread:
            number = line.next(count, steps)
            if number is not None and not waits[number] and (best is None or line.order < best[1].order):
                best = number, line
        return None if best is None else (self.ready[best[0]], *best)

    def _advance(self) -> None:
        """To the next end of a task."""
        speeds = self._speeds()
        wait = min(running.left / speeds[resource] for resource, running in self.running.items())
        self.now += wait
        for resource, running in tuple(self.running.items()):
            running.left -= wait * speeds[resource]
            if running.left <= _ROUNDING * running.task.seconds:
                del self.running[resource]
                self._end(running.number)

    def _end(self, number: int) -> None:
        self.ends[number] = self.now
        for distance in self.successors[number % len(self.tasks)]:
            later = number + distance
            if later < len(self.waits):
                self.waits[later] -= 1
                if not self.waits[later]:
                    self.ready[later] = self.now

    def _speeds(self) -> dict[Resource, float]:
        """Each task's, as a part of its own. Host memory gives all that pass through it the same part of what they ask for."""
        sharing, running = self.sharing, self.running
        speeds = {resource: sharing.slowed.get(resource, 1.0) if _OPPOSITE.get(resource) in running else 1.0 for resource in running}
        if sharing.host_memory is None:
            return speeds
        asked = 0.0
        for resource, found in running.items():
            if found.task.host_memory_bytes and found.task.seconds:
                asked += found.task.host_memory_bytes / found.task.seconds * speeds[resource]
        if asked > sharing.host_memory:
            part = sharing.host_memory / asked
            for resource, found in running.items():
                if found.task.host_memory_bytes:
                    speeds[resource] *= part
        return speeds
