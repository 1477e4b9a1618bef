"""AdamW on the CPU: one thread that measures, clips and updates units as gradients arrive or after the backward, and commits steps.

Where a norm over all gradients decides, or the schedule says so, nothing is updated before the backward has ended, unless the step is
speculated (`lohan.streaming.speculation`); a step with a NaN or infinite gradient is then forgotten whole. An update on arrival cannot
know what gradients follow: such a step is taken back where the state store can do that, and ends the session where it cannot (keeping all
gradients for that case alone would cost 2 or 4 bytes of host memory a parameter that nobody asked for).
"""

from __future__ import annotations

import math
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from lohan._native import ThreadPool
from lohan.config import Clip
from lohan.errors import EngineError
from lohan.planning.operations import OperationKind, UpdateSequence
from lohan.planning.schedule import Begin, can_speculate
from lohan.streaming.accumulation import GradientSums
from lohan.streaming.chunk_pipeline import ChunkPipeline, UnitUpdate
from lohan.streaming.clipping import StepStatistics, UnitNorm, UpdateRules, measure, summarise
from lohan.streaming.commits import PAYLOAD_KEY, Keep, Payload, StepCommits, StepEnd
from lohan.streaming.gradients import HostGradient
from lohan.streaming.hyperparameters import StepCounts
from lohan.streaming.pending import Failure, PendingUpdates
from lohan.streaming.speculation import Speculation

if TYPE_CHECKING:
    from lohan.memory.arena import Arena
    from lohan.states.state_store import StateStore
    from lohan.streaming.trace import Trace


_Message = UnitUpdate | StepEnd | Payload | Keep | None


class OptimizerWorker:
    """The thread. `submit`, `end_step` and `commit` may be called from any thread; errors go to `failure`.

    Args:
        give_back: called with a unit's gradients once they are no longer needed.
        chunk_elements: of the largest chunk.
        can_roll_back: whether `store.rollback` undoes the writes of a step that is not committed.
        sequence: the order in which the next forward needs units, and that of each unit's chunks.
        trace: is told of updates, their reads and writes, and commits.
    """

    def __init__(
        self,
        store: StateStore,
        arena: Arena,
        pending: PendingUpdates,
        failure: Failure,
        give_back: Callable[[HostGradient], None],
        counts: StepCounts,
        rules: UpdateRules,
        *,
        chunk_elements: int,
        threads: int,
        can_roll_back: bool,
        sequence: UpdateSequence,
        trace: Trace | None,
    ) -> None:
        self._store, self._pending, self._failure, self._give_back = store, pending, failure, give_back
        self._counts, self._rules, self._can_roll_back = counts, rules, can_roll_back
        self._sequence, self._trace = sequence, trace
        self._keeps_gradients = rules.order.begin is Begin.AFTER_BACKWARD
        # What waits for the backward's end is sorted then; what is speculated instead may overtake.
        self._takes_needed_first = self._keeps_gradients or rules.order.takes_needed_first
        self.speculation = Speculation(
            rules.clip_updates,
            first=rules.first_clip_updates,
            most_failing=rules.speculated_clip_rate,
            is_possible=can_speculate(rules.schedule, rules.clip, store.durability, has_spare=bool(store.units_with_spare)),
        )
        self._pool = ThreadPool(threads)
        self._sums = GradientSums(arena)
        self._pipeline = ChunkPipeline(
            store,
            arena,
            self._pool,
            chunk_elements=chunk_elements,
            in_flight=rules.order.chunks_in_flight,
            sequence=sequence,
            on_read=self._gradients_read,
            on_written=self._unit_written,
            trace=trace,
        )
        self._messages: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self._inbox: deque[_Message] = deque()
        self._ready: list[UnitUpdate] = []
        """Measured, and waiting for the pipeline."""
        self._closing = False
        self._commits = StepCommits(store, self._export, trace, on_committed=pending.recorded, on_keeping=pending.keeping)
        self._norms: dict[int, UnitNorm] = {}
        self._deferred: list[UnitUpdate] = []
        self._speculates = False
        self._speculated: dict[int, UnitUpdate] = {}
        self._withheld: list[int] = []
        self._counts_before = counts.values
        self.last_step: StepStatistics | None = None
        """The newest step whose gradients have all come; set before any of its units may be read again."""
        self.clipped_steps = 0
        self.skipped_steps = 0
        self._thread = threading.Thread(target=self._run, name="lohan-optimizer", daemon=True)
        self._thread.start()

    def submit(self, update: UnitUpdate) -> None:
        """Queue a unit's gradients; unless they are only added up, readers of the unit wait from now on."""
        if not update.adds_only:
            self._pending.begin(update.layout.index)
        self._messages.put(update)

    def end_step(self, step: int) -> None:
        """All of the step's gradients have been submitted."""
        self._messages.put(StepEnd(step))

    def commit(self, step: int, payload: Mapping[str, Any]) -> None:
        """Have the step's record written, with `payload` in it, once all its chunks are. Does not wait."""
        self._pending.record(step)
        self._messages.put(Payload(step, MappingProxyType(dict(payload))))

    def keep(self, name: str) -> None:
        """Keep the step whose record was asked for last under `name`, once it is written. Does not wait."""
        self._pending.keep()
        self._messages.put(Keep(name))

    @property
    def committed_step(self) -> int:
        """The newest step whose record has been written."""
        return self._commits.committed

    def resume(self, step: int, payload: Mapping[str, Any]) -> None:
        """Go on after `step`, from what its record holds. Before the first `submit` only.

        Raises:
            EngineError: the record is of another model.
        """
        kept = payload[PAYLOAD_KEY]
        self._counts.restore(kept["step_counts"])
        self.clipped_steps, self.skipped_steps = int(kept["clipped_steps"]), int(kept["skipped_steps"])
        if "speculation" in kept:
            self.speculation.restore(kept["speculation"])
        self._pending.judged(step)
        self._pending.recorded(step)
        self._commits.resume(step, with_payload=payload.keys() != {PAYLOAD_KEY})

    def close(self) -> None:
        """Finish the steps whose backward has ended, and end the thread."""
        self._messages.put(None)
        if threading.current_thread() is not self._thread:  # the garbage collector may close a forgotten session from here
            self._thread.join()
        self._pipeline.free()

    def _run(self) -> None:
        try:
            while not (self._closing and self._is_idle):
                self._turn()
            # A caller that hands payloads in cannot go on from a record without: the last committed step stays.
            self._commits.settle(without_payload=not self._commits.payloads_come)
        except Exception as error:  # noqa: BLE001 - reported to whoever waits for an update
            self._failure.set("the optimizer", error)
            self._ready.clear()
            self._pipeline.abandon()
        # A backward that raised leaves units behind that never got their update; who waits for them must not wait for ever.
        for update in self._deferred:
            self._pending.finish(update.layout.index)
        self._release_withheld()

    @property
    def _is_idle(self) -> bool:
        """Whether everything that was begun is written."""
        return self._pipeline.idle and not self._ready

    def _turn(self) -> None:
        while not self._closing and self._may_take_message():
            self._take_message()
        self._feed()
        self._pipeline.advance(more_to_come=bool(self._ready) or self._has_message())
        self._settle()

    def _has_message(self) -> bool:
        """Whether there is a message that can be acted on without waiting for the device."""
        while not self._messages.empty():
            self._inbox.append(self._messages.get())
        if not self._inbox:
            return False
        message = self._inbox[0]
        return not isinstance(message, UnitUpdate) or message.gradients is None or message.gradients.ready.reached

    def _may_take_message(self) -> bool:
        """Whether to act on the next message now: it is waited for only when there is nothing else to do."""
        return self._is_idle or self._has_message()

    def _feed(self) -> None:
        """Let the pipeline have what it can begin. A unit that is needed earlier may overtake others, so no more than that."""
        while self._ready and self._pipeline.hungry:
            first = 0
            if self._takes_needed_first:
                first = min(range(len(self._ready)), key=lambda place: self._sequence.place(self._ready[place].layout.index))
            self._pipeline.add(self._ready.pop(first))

    def _take_message(self) -> None:
        """Act on the next message; waits until there is one, and for the gradients it brings."""
        message = self._inbox.popleft() if self._inbox else self._messages.get()
        if message is None:
            self._closing = True
        elif isinstance(message, UnitUpdate):
            self._receive(message)
        elif isinstance(message, StepEnd):
            self._end(message.step)
        else:
            self._commits.hand_in(message)
            self._settle()

    def _receive(self, update: UnitUpdate) -> None:
        """A unit's gradients have come: add them up, or measure them and update the unit now or later."""
        self._begin(update.step)
        host, layout = update.gradients, update.layout
        squared = None
        if host is not None:
            host.ready.synchronize()
            update.values = host.buffer[: layout.trainable_elements]
            squared = host.squared_norm
        if update.adds_only or self._sums.holds(layout.index):
            squared = None  # of one backward only
            if host is not None:
                self._sums.add(layout, update.values, update.touched)
                self._gradients_read(update)
            if update.adds_only:
                return
            update.values, update.touched = self._sums.take(layout.index)
        # What is infinite in the device's fp32 may be finite here; what is not finite is counted.
        norm = UnitNorm(squared, 0) if squared is not None and math.isfinite(squared) else self._measure(update)
        self._norms[layout.index] = norm
        speculates = self._speculates and self._can_take_back(layout.index)
        if self._keeps_gradients and not speculates:
            self._deferred.append(update)
        elif (speculates or self._can_roll_back) and any(norm.non_finite for norm in self._norms.values()):
            self._gradients_read(update)  # the step will be taken back; the backward may be waiting for the buffer
            self._deferred.append(update)
        elif speculates:
            update.may_be_taken_back = True
            self._speculated[layout.index] = update
            self._update(update, 1.0)
        elif norm.non_finite:
            self.last_step = summarise(update.step, self._norms, self._rules)
            raise EngineError(
                f"{norm.non_finite} gradients of {layout.name} are NaN or infinite in step {update.step}; its weights were not updated,"
                " those of other units may have been",
                place=layout.name,
                remedy=f"{self._commits.way_on}Start again with a lower learning rate, and check the data for rows without trained tokens."
                ' With training.clip = "global" or engine.durability = "step" such a step is skipped whole.',
            )
        else:
            self._update(update, self._rules.scale(norm.squared))

    def _can_take_back(self, unit: int) -> bool:
        """Whether an update of the unit can be undone before its step is committed."""
        return self._can_roll_back or unit in self._store.units_with_spare

    def _measure(self, update: UnitUpdate) -> UnitNorm:
        """The norm of a unit's gradients where the device has not measured it."""
        begun = self._trace.host_mark(update.step) if self._trace is not None else None
        norm = measure(update.values, update.layout, update.touched, self._pool)
        if self._trace is not None:
            ended = self._trace.host_mark(update.step)
            self._trace.add(update.step, OperationKind.GRADIENT_NORM, update.layout.index, begun, ended, bytes=update.values.nbytes)
        return norm

    def _begin(self, step: int) -> None:
        """The first gradients of a step: everything before it becomes durable first."""
        if step > self._commits.begun:
            while not self._is_idle:
                self._feed()
                self._pipeline.advance(more_to_come=bool(self._ready))
            self._commits.settle(without_payload=True)
            self._norms.clear()
            self._counts_before = self._counts.values
            self._speculates = self.speculation.decide()
            self._commits.begin(step)

    def _update(self, update: UnitUpdate, scale: float) -> None:
        update.scale = scale
        update.segments = self._counts.advance(update.layout, update.touched, update.groups)
        self._ready.append(update)

    def _end(self, step: int) -> None:
        """The backward has ended: the verdict on the step, and what waited for it."""
        self._begin(step)
        statistics = summarise(step, self._norms, self._rules)
        self.last_step = statistics
        self.clipped_steps += statistics.clipped
        self.skipped_steps += statistics.skipped
        self.speculation.note(statistics, speculated=self._speculates)
        self._pending.judged(step)
        updates, self._deferred = self._deferred, []
        if statistics.skipped:
            self._skip(updates)
        else:
            if self._speculated and statistics.clipped:
                self._take_back()
                self._withheld.clear()  # until they are written again
                updates += self._speculated.values()
                self._speculated.clear()
            elif self._speculated:
                self._confirm()
            scale = self._rules.scale(statistics.squared_gradient_norm) if self._rules.clip is Clip.GLOBAL else None
            for update in updates:
                update.may_be_taken_back = False
                self._update(update, self._rules.scale(self._norms[update.layout.index].squared) if scale is None else scale)
        self._commits.ended = step
        self._release_withheld()

    def _skip(self, deferred: list[UnitUpdate]) -> None:
        """Leave everything as it was before the step."""
        updates = {update.layout.index: update for update in (*deferred, *self._speculated.values(), *self._ready)}
        if self._speculates or not self._keeps_gradients:
            self._take_back()
        self._speculated.clear()
        for update in updates.values():
            self._gradients_read(update)
            self._pending.finish(update.layout.index)

    def _confirm(self) -> None:
        """The speculated updates stand: their gradients are needed no longer than the pipeline reads them."""
        updates = list(self._speculated.values())
        self._speculated.clear()
        for update in updates:
            if not update.unread_chunks:
                self._gradients_read(update)

    def _take_back(self) -> None:
        """Undo what the step has written so far; its gradients stay."""
        self._ready.clear()
        self._pipeline.drain()
        self._store.rollback()
        self._counts.restore(self._counts_before)

    def _gradients_read(self, update: UnitUpdate) -> None:
        if update.gradients is not None and update.layout.index not in self._speculated:
            self._give_back(update.gradients)
            update.gradients = None

    def _unit_written(self, update: UnitUpdate) -> None:
        # Until the backward has ended the step may have to be taken back. The next forward cannot begin before that either.
        if update.step <= self._commits.ended:
            self._pending.finish(update.layout.index)
        else:
            self._withheld.append(update.layout.index)

    def _release_withheld(self) -> None:
        for unit in self._withheld:
            self._pending.finish(unit)
        self._withheld.clear()

    def _settle(self) -> None:
        if self._is_idle:
            self._commits.settle()

    def _export(self) -> dict[str, Any]:
        return {
            "step_counts": self._counts.values,
            "clipped_steps": self.clipped_steps,
            "skipped_steps": self.skipped_steps,
            "speculation": self.speculation.export(),
        }
