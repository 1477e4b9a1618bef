"""What a supervisor passes on to the trainer it watches: requests, the host's stop, and an end to silence."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from lohan.errors import EngineError
from lohan_app.entities import Run, RunState, Wanted
from lohan_app.runs.states import Trigger
from lohan_app.worker.patience import Patience, Pulse
from lohan_app.worker.trainer import Killed, Trainer

logger = logging.getLogger("lohan_app.supervisor")

# Nothing that was told is taken back, and only what weighs more is told after it: a trainer that pauses is not told to bring its result
# instead; the run's next one is. What a trainer told to pause leaves can still be cancelled.
_WEIGHT = {Wanted.RUN: 0, Wanted.STOP: 1, Wanted.PAUSE: 2, Wanted.CANCEL: 3}
_TRIGGERS = {Wanted.PAUSE: (Trigger.REQUEST_PAUSE, RunState.PAUSING), Wanted.CANCEL: (Trigger.REQUEST_CANCEL, RunState.CANCELLING)}


class Watch:
    """What one trainer has been told, and when it is to be killed.

    Args:
        fire: moves the run.
        complain: says on the run's page why nothing happens.
    """

    def __init__(
        self, trainer: Trainer, pulse: Pulse, patience: Patience, *, fire: Callable[[Trigger], object], complain: Callable[[str], None]
    ) -> None:
        self._trainer, self._pulse, self._patience = trainer, pulse, patience
        self._fire, self._complain = fire, complain
        self._told = Wanted.RUN
        self._is_interrupted = False
        self._deadline: float | None = None

    def heed(self, run: Run | None, *, is_stopping: bool) -> None:
        """Act on what is wanted of `run` (None: the database does not answer now), on the supervisor's own stop, and on silence."""
        if is_stopping and not self._is_interrupted:
            self._is_interrupted = True
            logger.info("told the trainer to finish its step")
            self._trainer.interrupt()
        if run is not None:
            self._pass_on(run)
        if self._deadline is not None and time.monotonic() > self._deadline:
            logger.warning("the trainer has not ended %.0f s after the request", self._patience.cancel_seconds)
            self._kill(Killed.UNHEEDING)
        elif run is not None and run.kill_attempt == self._trainer.attempt:
            logger.warning("somebody wants the trainer killed")
            self._kill(Killed.BY_REQUEST)
        elif self._pulse.is_lost():
            logger.warning("the trainer was silent for %.0f s", self._pulse.limit_seconds)
            self._kill(Killed.HUNG, silence_seconds=self._pulse.limit_seconds)

    def _pass_on(self, run: Run) -> None:
        if _WEIGHT[run.wanted] <= _WEIGHT[self._told]:
            return
        self._told = run.wanted
        if run.wanted in _TRIGGERS:
            trigger, state = _TRIGGERS[run.wanted]
            if run.state is not state:
                self._fire(trigger)
        logger.info("told the trainer to %s", run.wanted)
        self._trainer.tell(run.wanted)
        if run.wanted is Wanted.CANCEL:
            self._deadline = time.monotonic() + self._patience.cancel_seconds

    def _kill(self, why: Killed, *, silence_seconds: float = 0.0) -> None:
        try:
            self._trainer.kill(why, silence_seconds=silence_seconds)
        except EngineError as error:
            logger.exception("the trainer cannot be killed")
            self._complain(f"{error.message[0].upper()}{error.message[1:]}. {error.remedy} Until it is gone, its device stays taken.")
