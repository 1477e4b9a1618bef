"""Plays a step's operations (`lohan.planning.operations`) several times over into a timeline, with the time that each takes. No torch.

An operation begins when what it waits for has ended and its resource is free. What one thread or stream does is done in the list's order:
that of the device, that of the optimizer, and for copies and drives one for every kind of operation; of several that could go next on one
resource it takes the one that has been ready for longest. Operations slow each other down as `lohan.planning.operation_costs.Sharing` says.

A step follows the one before it by the rules that `following` has. Steps come to a rhythm within two; the figures are of those after.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lohan.planning.operation_costs import OperationCost, Sharing
from lohan.planning.operations import Operation, OperationKind, Resource, UpdateSequence
from lohan.planning.timeline import Task, lay_out

_SETTLING_STEPS = 2
_PLAYED_STEPS = 4

_LOADS = (OperationKind.WEIGHTS_READ, OperationKind.WEIGHTS_COPY)
_UPDATES = (OperationKind.UPDATE, OperationKind.STATES_WRITE)
_OF_THE_OPTIMIZER = (*_UPDATES, OperationKind.STATES_READ, OperationKind.GRADIENT_NORM, OperationKind.CHECKSUM)
_ONE_THREAD = (Resource.GPU, Resource.CPU)


def following(operations: Sequence[Operation]) -> list[tuple[int, ...]]:
    """For each operation those of the step before that it waits for, besides what its resource has still to do.

    - Weights are read and copied after the backward, and after their unit's updates and the writes of those.
    - A slot that a step did not fill itself holds what the step before loaded.
    - The first write waits for the commit; the device goes from the backward to the next forward by itself.

    Gradients need no rule: the next forward waits for every unit's update, and with it for the buffers.
    """
    updates: dict[int | None, dict[OperationKind, int]] = {}  # the last of each kind: one thread does them in order
    loads: dict[int | None, dict[OperationKind, int]] = {}
    backward_end: tuple[int, ...] = ()
    commits = []
    for index, operation in enumerate(operations):
        if operation.kind in _UPDATES:
            updates.setdefault(operation.unit, {})[operation.kind] = index
        elif operation.kind in _LOADS:
            loads.setdefault(operation.slot, {})[operation.kind] = index
        elif operation.kind is OperationKind.COMMIT:
            commits.append(index)
        elif operation.resource is Resource.GPU:
            backward_end = (index,)
    found: list[tuple[int, ...]] = []
    filled = set[int | None]()
    for operation in operations:
        waits: list[int] = []
        if operation.kind in _LOADS:
            waits += (*backward_end, *updates.get(operation.unit, {}).values())
            filled.add(operation.slot)
        elif operation.kind is OperationKind.STATES_WRITE:
            waits += commits
        elif operation.resource is Resource.GPU and operation.slot is not None and operation.slot not in filled:
            waits += loads.get(operation.slot, {}).values()
        found.append(tuple(waits))
    return found


@dataclass(frozen=True, slots=True)
class PlayedSteps:
    """A timeline; seconds since the first step's begin."""

    starts: tuple[tuple[float, ...], ...]
    """By step and operation."""
    ends: tuple[tuple[float, ...], ...]
    step_seconds: float
    """From one backward's end to the next, once steps have come to their rhythm."""
    wait_seconds: float
    """Of these, from a backward's end to the next forward's begin: what of the updates nothing hides."""
    forward_seconds: float
    """From the forward's begin to its end."""
    backward_seconds: float
    """From the forward's end to the backward's."""
    busy: Mapping[Resource, float]
    """The part of the time that a resource is busy, in that rhythm."""
    host_memory_busy: float
    """The part of host memory's bytes that pass; 0 where it is without end."""

    @property
    def binding(self) -> Resource | None:
        """The resource that is busy for longest; None: host memory."""
        resource = max(self.busy, key=lambda resource: self.busy[resource])
        return resource if self.busy[resource] >= self.host_memory_busy else None


def play(
    operations: Sequence[Operation],
    cost: Callable[[Operation], OperationCost],
    sharing: Sharing | None = None,
    *,
    needed_first: bool = False,
    steps: int = _PLAYED_STEPS,
) -> PlayedSteps:
    """Play so many steps of `operations`, one after the other.

    Args:
        operations: of one step, as `step_operations` has them: each after what it waits for.
        cost: what each takes by itself.
        sharing: how they slow each other down; None: not at all.
        needed_first: whether of the units that wait the one that the next forward needs first is updated first
            (`UpdateOrder.takes_needed_first`); else units are updated in the list's order.
        steps: at least 3.
    """
    sharing = sharing or Sharing()
    costs = [cost(operation) for operation in operations]
    across = following(operations)
    runs = _runs(operations, costs, across)
    ranks = _ranks(operations) if needed_first else [0] * len(operations)
    starts, ends = [], []
    for run_starts in lay_out(_tasks(operations, costs, across, runs, ranks), sharing, steps):
        begins, finishes = [0.0] * len(operations), [0.0] * len(operations)
        for run, (begin, end) in zip(runs, run_starts, strict=True):
            for index in run[:-1]:  # of the device, which nothing slows down
                begins[index], begin = begin, begin + costs[index].seconds
                finishes[index] = begin
            begins[run[-1]], finishes[run[-1]] = begin, end
        starts.append(begins)
        ends.append(finishes)
    return _summary(operations, costs, sharing, starts, ends)


def _runs(operations: Sequence[Operation], costs: Sequence[OperationCost], across: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """Operations of the device that follow each other with nothing to wait for between them, and nothing waiting for any but the last, as
    one: a block's regions, of which there may be thousands."""
    awaited: list[set[int]] = [set() for _ in operations]
    awaited_next = {earlier for waits in across for earlier in waits}
    for index, operation in enumerate(operations):
        for earlier in operation.after:
            awaited[earlier].add(index)
    runs: list[list[int]] = []
    run: list[int] = []
    met, met_before = set[int](), set[int]()
    for index, operation in enumerate(operations):
        if operation.resource is not Resource.GPU or costs[index].host_memory_bytes:
            runs.append([index])
            continue
        unwatched = run and awaited[run[-1]] <= {index} and run[-1] not in awaited_next
        if unwatched and met.issuperset(operation.after) and met_before.issuperset(across[index]):
            run.append(index)
        else:
            run, met, met_before = [index], set(operation.after), set(across[index])
            runs.append(run)
        met.add(index)
    return runs


def _ranks(operations: Sequence[Operation]) -> list[int]:
    """Of what the optimizer does for a unit: the unit's place in the forward."""
    sequence = UpdateSequence(operations)
    return [
        sequence.place(operation.unit) if operation.kind in _OF_THE_OPTIMIZER and operation.unit is not None else 0
        for operation in operations
    ]


def _thread(operations: Sequence[Operation], operation: Operation) -> str:
    """What does an operation in its order. Activations come back from host memory and from drives by a thread each."""
    if operation.resource in _ONE_THREAD:
        return operation.resource.value
    is_read = any(operations[earlier].kind is OperationKind.ACTIVATIONS_READ for earlier in operation.after)
    return f"{operation.kind.value} read" if operation.kind is OperationKind.ACTIVATIONS_IN and is_read else operation.kind.value


def _tasks(
    operations: Sequence[Operation],
    costs: Sequence[OperationCost],
    across: Sequence[tuple[int, ...]],
    runs: Sequence[Sequence[int]],
    ranks: Sequence[int],
) -> list[Task]:
    place = {index: number for number, run in enumerate(runs) for index in run}
    tasks = []
    for number, run in enumerate(runs):
        first = operations[run[0]]
        tasks.append(
            Task(
                resource=first.resource,
                thread=_thread(operations, first),
                seconds=sum(costs[index].seconds for index in run),
                rank=ranks[run[0]],
                host_memory_bytes=costs[run[0]].host_memory_bytes,
                after=tuple({place[earlier] for index in run for earlier in operations[index].after} - {number}),
                after_last_step=tuple({place[earlier] for index in run for earlier in across[index]}),
            )
        )
    return tasks


def _summary(
    operations: Sequence[Operation],
    costs: Sequence[OperationCost],
    sharing: Sharing,
    starts: list[list[float]],
    ends: list[list[float]],
) -> PlayedSteps:
    device = [index for index, operation in enumerate(operations) if operation.resource is Resource.GPU]
    forward = [index for index in device if operations[index].kind is OperationKind.FORWARD]
    steps = range(_SETTLING_STEPS, len(starts))
    before = steps[0] - 1
    window = ends[-1][device[-1]] - ends[before][device[-1]]
    seconds = window / len(steps)
    busy = dict.fromkeys(Resource, 0.0)
    for step in range(before, len(starts)):
        for index, operation in enumerate(operations):
            begin, end = max(starts[step][index], ends[before][device[-1]]), min(ends[step][index], ends[-1][device[-1]])
            busy[operation.resource] += max(0.0, end - begin)
    moved = sum(cost.host_memory_bytes for cost in costs)
    waits = [starts[step][forward[0]] - ends[step - 1][device[-1]] for step in steps]
    forwards = [ends[step][forward[-1]] - starts[step][forward[0]] for step in steps]
    backwards = [ends[step][device[-1]] - ends[step][forward[-1]] for step in steps]
    return PlayedSteps(
        starts=tuple(map(tuple, starts)),
        ends=tuple(map(tuple, ends)),
        step_seconds=seconds,
        wait_seconds=sum(waits) / len(steps),
        forward_seconds=sum(forwards) / len(steps),
        backward_seconds=sum(backwards) / len(steps),
        busy={resource: found / window if window else 0.0 for resource, found in busy.items()},
        host_memory_busy=moved / (sharing.host_memory * seconds) if sharing.host_memory and seconds else 0.0,
    )
