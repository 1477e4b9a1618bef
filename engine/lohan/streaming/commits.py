"""Which step has begun, ended, and been committed, and what its record holds. Used by the optimizer's thread only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lohan.config import Durability
from lohan.planning.operations import OperationKind

if TYPE_CHECKING:
    from lohan.states.state_store import StateStore
    from lohan.streaming.trace import Trace

PAYLOAD_KEY = "optimizer"
"""Under it a step's record holds what the optimizer needs to go on: see `OptimizerWorker.resume`."""


@dataclass(frozen=True, slots=True)
class StepEnd:
    """The backward of `step` has ended: no more gradients."""

    step: int


@dataclass(frozen=True, slots=True)
class Payload:
    """What the record of `step` is to hold besides the states and the optimizer's part."""

    step: int
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Keep:
    """The states of the step whose payload came last are to be kept under `name`."""

    name: str


class StepCommits:
    """Steps count from 1; a step is committed when all its chunks are written and its caller's payload has come.

    Args:
        export: what the record holds under `PAYLOAD_KEY`.
        on_committed: called with the step once its record is durable.
        on_keeping: called for every name once its snapshot is being made.
        trace: is told of commits that make something durable.
    """

    def __init__(
        self,
        store: StateStore,
        export: Callable[[], Mapping[str, Any]],
        trace: Trace | None,
        *,
        on_committed: Callable[[int], None],
        on_keeping: Callable[[], None],
    ) -> None:
        self._store, self._export, self._on_committed, self._on_keeping = store, export, on_committed, on_keeping
        self._trace = trace if store.durability is not Durability.NONE else None
        self.begun = self.ended = self.committed = 0
        self._payload: Payload | None = None
        self._names: list[str] = []
        self.payloads_come = False

    @property
    def way_on(self) -> str:
        """What can be done after an error that leaves the newest step half updated, as a sentence; empty where there is nothing."""
        if self._store.durability is Durability.SNAPSHOT and self.committed:
            return f"The run can go on from its last snapshot, of step {self.committed}. "
        return ""

    def resume(self, step: int, *, with_payload: bool) -> None:
        """`step` is the last one that is committed, with a caller's payload or without."""
        self.begun = self.ended = self.committed = step
        self.payloads_come = with_payload

    def begin(self, step: int) -> None:
        """The step's first gradients have come; the one before it is committed."""
        self._store.begin_step(step)
        self.begun = step

    def hand_in(self, message: Payload | Keep) -> None:
        """The newest step's payload has come, or a name to keep it under."""
        if isinstance(message, Payload):
            self._payload, self.payloads_come = message, True
        else:
            self._names.append(message.name)
            if self.ended == self.committed:
                self._keep()

    def settle(self, *, without_payload: bool = False) -> None:
        """Commit the step that has ended, if its payload has come or is no longer waited for. All its chunks are written."""
        if self.ended == self.committed:
            return
        values: Mapping[str, Any] = {}
        if self._payload is not None and self._payload.step == self.ended:
            values = self._payload.values
        elif not without_payload or self._store.durability is Durability.SNAPSHOT:
            return  # a snapshot is made only where it is asked for
        begun = self._trace.host_mark(self.ended) if self._trace is not None else None
        self._store.commit(self.ended, {**values, PAYLOAD_KEY: dict(self._export())})
        if self._trace is not None:
            self._trace.add(self.ended, OperationKind.COMMIT, None, begun, self._trace.host_mark(self.ended))
        self.committed = self.ended
        self._on_committed(self.committed)
        self._keep()

    def _keep(self) -> None:
        """Before the next step's first write, since both come through the optimizer's thread."""
        while self._names:
            self._store.keep(self._names.pop(0))
            self._on_keeping()
