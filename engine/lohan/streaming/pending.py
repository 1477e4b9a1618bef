"""What the engine's threads tell each other: which units still have an update under way, and the first error of any of them."""

from __future__ import annotations

import threading

from lohan.errors import EngineError, LohanError


class Failure:
    """The first error of any background stage. Every waiter asks `check` and is woken when one is set. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._stage = ""
        self._waiters: list[threading.Condition] = []

    def wake(self, condition: threading.Condition) -> None:
        """Notify `condition` when an error is set."""
        with self._lock:
            self._waiters.append(condition)

    def leave(self, condition: threading.Condition) -> None:
        """Notify `condition` no more: nobody will wait on it."""
        with self._lock:
            self._waiters.remove(condition)

    def set(self, stage: str, error: BaseException) -> None:
        """Record `error` of `stage` (a phrase such as `the optimizer`), unless there is one already, and wake all waiters."""
        with self._lock:
            if self._error is None:
                self._error, self._stage = error, stage
            waiters = list(self._waiters)
        for condition in waiters:
            with condition:
                condition.notify_all()

    @property
    def failed(self) -> bool:
        return self._error is not None

    def check(self) -> None:
        """Raise an EngineError with the stage's error as its cause, if there is one."""
        error = self._error
        if error is None:
            return
        place = error.place if isinstance(error, LohanError) else None
        remedy = error.remedy if isinstance(error, LohanError) else None
        message = error.message if isinstance(error, LohanError) else f"{type(error).__name__}: {error}"
        raise EngineError(
            f"{self._stage} failed: {message}", place=place, remedy=remedy or "Mend the cause and start the run again."
        ) from error


class PendingUpdates:
    """Units whose weights on disk are about to change, steps whose gradients are not known yet, and records that are to be written. A
    reader of a unit waits here, per unit and not per step. Thread-safe."""

    def __init__(self, failure: Failure) -> None:
        self._condition = threading.Condition()
        self._units: set[int] = set()
        self._step_to_record = self._recorded_step = 0
        self._judged_step = 0
        self._names_to_keep = 0
        self._failure = failure
        failure.wake(self._condition)

    def begin(self, unit: int) -> None:
        with self._condition:
            assert unit not in self._units, "a unit is read, hence waited for, before it is updated again"
            self._units.add(unit)

    def finish(self, unit: int) -> None:
        with self._condition:
            self._units.discard(unit)
            self._condition.notify_all()

    def is_pending(self, unit: int) -> bool:
        """Whether the unit has an update under way."""
        with self._condition:
            return unit in self._units

    def wait(self, unit: int) -> None:
        """Block until `unit` has no update under way.

        Raises:
            EngineError: a background stage failed.
        """
        with self._condition:
            self._condition.wait_for(lambda: unit not in self._units or self._failure.failed)
        self._failure.check()

    def judged(self, step: int) -> None:
        """The gradients of `step` have all been looked at."""
        with self._condition:
            self._judged_step = step
            self._condition.notify_all()

    def wait_judged(self, step: int) -> None:
        """Block until the gradients of `step` have all been looked at; raises as `wait`."""
        with self._condition:
            self._condition.wait_for(lambda: self._judged_step >= step or self._failure.failed)
        self._failure.check()

    def record(self, step: int) -> None:
        """The record of `step` was asked for."""
        with self._condition:
            self._step_to_record = step

    def recorded(self, step: int) -> None:
        """The record of `step` is durable."""
        with self._condition:
            self._recorded_step = step
            self._condition.notify_all()

    def has_record(self, step: int) -> bool:
        """Whether the record of `step` is durable, or asked for."""
        with self._condition:
            return step in (self._step_to_record, self._recorded_step)

    def keep(self) -> None:
        """A named snapshot was asked for."""
        with self._condition:
            self._names_to_keep += 1

    def keeping(self) -> None:
        """It is being made."""
        with self._condition:
            self._names_to_keep -= 1
            self._condition.notify_all()

    def wait_all(self) -> None:
        """Block until no unit has an update under way, every record that was asked for is durable, and the named snapshots of it are being
        made; raises as `wait`."""

        def is_done() -> bool:
            return not (self._units or self._names_to_keep) and self._recorded_step >= self._step_to_record

        with self._condition:
            self._condition.wait_for(lambda: is_done() or self._failure.failed)
        self._failure.check()
