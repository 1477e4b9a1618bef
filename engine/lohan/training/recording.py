"""Which step boundaries of a run are recorded, so that it can go on from there, and which are kept under names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from lohan.config import Durability, RunConfig
from lohan.errors import CapacityError, NamedSnapshotError
from lohan.states.named import is_kept
from lohan.streaming.executor import Session
from lohan.training.reporter import Reporter


def kept_name(step: int) -> str:
    """What the states of `step` are kept under by `training.keep_steps`."""
    return f"step-{step:06d}"


class Recording:
    """Every step with durability `step`; with `snapshot` one when its time has come, those that are kept, and the last.

    Args:
        directories: the run's state directories.
        total_steps: after the last of them the export follows, which nobody wants to wait for twice.
        resumed_step: which is recorded already; 0 where there is none.
    """

    def __init__(
        self, session: Session, config: RunConfig, directories: Sequence[Path], reporter: Reporter, *, total_steps: int, resumed_step: int
    ) -> None:
        self._session, self._reporter, self._total_steps = session, reporter, total_steps
        self._durability, self._seconds = config.engine.durability, 60 * config.engine.snapshot_minutes
        self._keep_steps = frozenset(config.training.keep_steps)
        self._recorded_step = resumed_step
        self._recorded_at = monotonic()
        # Its copy may have been broken off by what ended the attempt before.
        if resumed_step in self._keep_steps and not is_kept(directories, kept_name(resumed_step)):
            self._keep(resumed_step)

    def is_due(self, step: int, *, is_last: bool = False) -> bool:
        """Whether the boundary behind `step` (from 1) is to be recorded; `is_last`: no other follows in this attempt."""
        match self._durability:
            case Durability.NONE:
                return False
            case Durability.STEP:
                return step > self._recorded_step
            case Durability.SNAPSHOT:
                is_wanted = is_last or step == self._total_steps or step in self._keep_steps or self._is_time()
                return is_wanted and step > self._recorded_step

    def record(self, step: int, payload: Mapping[str, Any]) -> None:
        """Have `step` recorded with `payload`, and kept where that is wanted. Does not wait.

        Raises:
            EngineError: a background stage failed.
        """
        self._recorded_step, self._recorded_at = step, monotonic()
        try:
            self._session.commit(payload)
        except NamedSnapshotError as error:
            self._warn(error)
        if step in self._keep_steps:
            self._keep(step)

    def finish(self) -> None:
        """Block until everything that was asked for is on the drives.

        Raises:
            EngineError: a background stage failed.
        """
        while True:
            try:
                self._session.wait_kept()
            except NamedSnapshotError as error:  # one of them
                self._warn(error)
            else:
                return

    def _is_time(self) -> bool:
        return monotonic() - self._recorded_at >= self._seconds

    def _keep(self, step: int) -> None:
        try:
            self._session.keep(kept_name(step))
        except (NamedSnapshotError, CapacityError) as error:
            self._warn(error)

    def _warn(self, error: NamedSnapshotError | CapacityError) -> None:
        self._reporter.warn(f"{error.message} ({error.place}).", error.remedy)
