"""One run's supervisor: `python -m lohan_app.worker.supervisor RUN_ID`. Starts the run's trainer, or adopts it, and sees it to its end.

It holds `supervisor.lock` for as long as it lives and is the only writer of the run's events into the database. It may be killed at any
instant: the trainer goes on, and the next supervisor finds it by `trainer.json` and reads its events on from the stored offset.
"""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import TypeVar

from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from lohan.errors import LohanError, StorageError
from lohan.events import EventReader
from lohan_app.db import create_db_engine, read_transaction, write_transaction
from lohan_app.entities import BaseModel, Run, RunState, Wanted
from lohan_app.entities.base import now
from lohan_app.entities.runs import TERMINAL_STATES
from lohan_app.runs import repository
from lohan_app.runs.announce import announce
from lohan_app.runs.repository import LostEpochError
from lohan_app.runs.states import ACTIVE_STATES, Trigger
from lohan_app.settings import Settings, load_settings
from lohan_app.worker.launcher import TRAINER_COMMAND, RunFiles, TrainerNote
from lohan_app.worker.processes import FileLock, is_held, kill_session_with, oom_kill_count
from lohan_app.worker.run_files import free_states, weights_of, write_run_files
from lohan_app.worker.trainer import Trainer, TrainerEnd
from lohan_app.worker.verdict import how_it_goes_on, judge
from lohan_app.worker.wake import wake

logger = logging.getLogger("lohan_app.supervisor")

POLL_SECONDS = 0.3
EVENTS_PER_TRANSACTION = 500
LONGEST_BACKOFF_SECONDS = 10.0
CANCEL_PATIENCE_SECONDS = 600.0
"""A step of the largest models takes minutes; a trainer that has not ended by then is killed."""
LOG_TAIL_BYTES = 4000

T = TypeVar("T")
Transaction = Callable[[Engine], AbstractContextManager[Session]]


class Stopped(Exception):  # noqa: N818 - no fault: the supervisor was told to stop and has no trainer to wait for
    """SIGTERM came while only the database was being waited for."""


class Supervisor:
    """Supervises one run. One thread; `stop` may be called from a signal handler."""

    def __init__(
        self,
        settings: Settings,
        run_id: str,
        *,
        trainer_command: Sequence[str] = TRAINER_COMMAND,
        cancel_patience_seconds: float = CANCEL_PATIENCE_SECONDS,
    ) -> None:
        self._settings = settings
        self._run_id = run_id
        self._files = RunFiles(settings.run_folder(run_id))
        self._trainer_command = trainer_command
        self._cancel_patience_seconds = cancel_patience_seconds
        self._epoch = 0
        self._stopping = False
        self._interrupted = False
        self._cancel_deadline: float | None = None
        self._next_query_at = 0.0
        self._backoff_seconds = 0.0

    def stop(self) -> None:
        """Have the trainer finish its step and end; the run is queued again."""
        self._stopping = True

    def run(self) -> int:
        """Supervise until the run's trainer has ended, or at once where another supervisor does; returns the exit code."""
        self._files.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = FileLock(self._files.supervisor_lock)
        # The reconciler's look at the lock holds it for an instant; a supervisor at work holds it for good.
        if not lock.try_acquire(patience_seconds=1.0):
            logger.info("%s has a supervisor already", self._run_id)
            return 0
        self._engine = create_db_engine(self._settings)
        try:
            self._supervise()
        except LostEpochError:
            logger.warning("%s was taken over by another supervisor", self._run_id)
        except Stopped:
            logger.info("stopped while waiting for the database")
        finally:
            self._engine.dispose()
            lock.release()
        return 0

    def _supervise(self) -> None:
        epoch = self._insist(lambda session: repository.raise_epoch(session, self._run_id))
        run = self._read()
        if epoch is None or run is None or run.state not in ACTIVE_STATES:
            logger.info("%s needs no supervisor (%s)", self._run_id, run.state if run else "unknown")
            return
        self._epoch = epoch
        self._reader = EventReader(self._files.events, run.events_offset_bytes, run.malformed_events)
        trainer = self._find_or_start(run)
        if trainer is not None:
            end = self._watch(trainer)
            self._finish(trainer.attempt, end)

    # ------------------------------------------------------------ begin
    def _find_or_start(self, run: Run) -> Trainer | None:
        """The trainer to watch; None where there is none and the run has been moved to where it belongs."""
        found = Trainer.find(self._files)
        if found is not None:
            logger.info("%s: adopted the trainer, process %d, attempt %d", self._run_id, found.pid, found.attempt)
            if run.state is RunState.STARTING:
                self._fire(Trigger.TRAINER_STARTED, attempt=found.attempt)
            return found
        if not self._clear_lock():
            self._release("Another process trains in this run's folder; the run waits for it to end.")
            return None
        note = TrainerNote.read(self._files.trainer_note)
        if run.state is RunState.STARTING:
            return self._start(run, attempt=run.attempt + 1)
        if run.state is RunState.RUNNING and (note is None or note.attempt < run.attempt):
            # Our predecessor died between announcing this attempt and starting it.
            return self._start(run, attempt=run.attempt)
        count = oom_kill_count()
        out_of_memory = note is not None and note.oom_kills is not None and count is not None and count > note.oom_kills
        self._finish(run.attempt, TrainerEnd(None, out_of_memory))
        return None

    def _clear_lock(self) -> bool:
        """Whether the trainer's lock is free. What an old trainer left behind is killed and waited for; a stranger is left alone."""
        note = TrainerNote.read(self._files.trainer_note)
        if is_held(self._files.trainer_lock) and note is not None:
            kill_session_with(self._files.trainer_lock, session=note.pid)
        return not is_held(self._files.trainer_lock)

    def _start(self, run: Run, *, attempt: int) -> Trainer | None:
        if self._wanted(run) is Wanted.CANCEL:
            self._fire(Trigger.REQUEST_CANCEL)
            self._fire(Trigger.END_EARLY)
            return None
        if self._stopping:
            self._release("The machine or the service on it was stopped.")
            return None
        try:
            model = self._insist(lambda session: session.get(BaseModel, run.base_model_id), read_transaction)
            device = run.devices[0] if run.devices else "cpu"
            write_run_files(self._settings, run, weights_of(self._settings, model), device=device)
            # Announced before it is started: an attempt is counted once, and none is ever started under a number that was used.
            if run.state is RunState.STARTING and not self._fire(
                Trigger.TRAINER_STARTED, attempt=attempt, started_at=run.started_at or now()
            ):
                return None
            trainer = Trainer.start(self._files, attempt=attempt, device=device, command=self._trainer_command)
        except (LohanError, OSError) as error:
            logger.exception("%s: cannot start the trainer", self._run_id)
            problem = error if isinstance(error, LohanError) else self._refused(error)
            self._fire(Trigger.FAIL, state_reason=problem.message, problem=problem.to_dict())
            return None
        logger.info("%s: started the trainer, process %d, attempt %d, on %s", self._run_id, trainer.pid, attempt, device)
        return trainer

    def _refused(self, error: OSError) -> StorageError:
        remedy = "See that the drive is healthy, has room, and that this user may write there."
        return StorageError.of(error, "the trainer cannot be started", place=error.filename or self._files.folder, remedy=remedy)

    def _release(self, reason: str) -> None:
        self._fire(Trigger.RELEASE, state_reason=reason)
        self._fire(Trigger.END_EARLY, state_reason=reason)

    # ------------------------------------------------------------ watch
    def _watch(self, trainer: Trainer) -> TrainerEnd:
        """Copy events and pass on requests until the trainer has ended."""
        while not trainer.wait(POLL_SECONDS):
            self._copy_events()
            self._heed_requests(trainer)
        return trainer.end()

    def _heed_requests(self, trainer: Trainer) -> None:
        if self._stopping and not self._interrupted:
            self._interrupted = True
            logger.info("%s: told the trainer to finish its step", self._run_id)
            trainer.interrupt()
        if self._cancel_deadline is not None:
            if time.monotonic() > self._cancel_deadline:
                logger.warning("%s: the trainer has not ended %.0f s after the request", self._run_id, self._cancel_patience_seconds)
                trainer.kill()
            return
        run = self._try(lambda session: repository.get_run(session, self._run_id), read_transaction)
        if run is not None and run.wanted is Wanted.CANCEL:
            if run.state is not RunState.CANCELLING:
                self._fire(Trigger.REQUEST_CANCEL)
            logger.info("%s: told the trainer to cancel", self._run_id)
            trainer.ask_to_cancel()
            self._cancel_deadline = time.monotonic() + self._cancel_patience_seconds

    def _copy_events(self) -> bool:
        """Copy what has come since the last call, one batch; whether there may be more. An unreachable database is tried again later."""
        reader, before = self._reader, (self._reader.offset_bytes, self._reader.malformed)
        batch = list(islice(reader.read(), EVENTS_PER_TRANSACTION))
        if reader.offset_bytes == before[0]:
            return False

        def record(session: Session) -> bool:
            repository.record_events(
                session, self._run_id, epoch=self._epoch, events=batch, offset_bytes=reader.offset_bytes, malformed=reader.malformed
            )
            return True

        if self._try(record):
            announce(self._settings, self._run_id)
            return len(batch) == EVENTS_PER_TRANSACTION
        reader.offset_bytes, reader.malformed = before
        return True

    # ------------------------------------------------------------ end
    def _finish(self, attempt: int, end: TrainerEnd) -> None:
        """Judge the end and move the run to where it belongs."""
        while self._copy_events():
            self._pause_for_database()
        run = self._read()
        assert run is not None, "runs are not deleted while they are active"
        last_word = self._insist(lambda session: repository.exit_event(session, self._run_id, attempt=attempt), read_transaction)
        lost = self._insist(lambda session: repository.lost_attempts(session, self._run_id, attempt=attempt), read_transaction)
        verdict = judge(
            last_word.fields if last_word else None,
            end,
            lost_attempts=lost,
            goes_on=how_it_goes_on(run),
            log_tail=_tail(self._files.trainer_log),
            log_path=str(self._files.trainer_log),
        )
        cancelled = verdict.trigger is Trigger.END_EARLY and (
            run.wanted is Wanted.CANCEL or (last_word is not None and last_word.fields.get("reason") == "cancelled")
        )
        if cancelled:
            self._fire(Trigger.REQUEST_CANCEL)
        reason = "" if cancelled else verdict.reason
        state = self._fire(verdict.trigger, state_reason=reason, problem=verdict.problem)
        logger.info("%s: attempt %d ended (%s), the run is %s. %s", self._run_id, attempt, end, state, reason)
        wake(self._settings)

    # ------------------------------------------------------------ database
    def _fire(self, trigger: Trigger, **values: object) -> RunState | None:
        state = self._insist(lambda session: repository.fire(session, self._run_id, trigger, epoch=self._epoch, **values))
        if state in TERMINAL_STATES:
            free_states(self._settings, self._run_id)
        announce(self._settings, self._run_id)
        return state

    def _read(self) -> Run | None:
        return self._insist(lambda session: repository.get_run(session, self._run_id), read_transaction)

    def _wanted(self, run: Run) -> Wanted:
        newest = self._read()
        return (newest or run).wanted

    def _try(self, work: Callable[[Session], T], transaction: Transaction = write_transaction) -> T | None:
        """One transaction; None where the database does not answer, and until the back-off has passed."""
        if time.monotonic() < self._next_query_at:
            return None
        try:
            with transaction(self._engine) as session:
                result = work(session)
        except DBAPIError as error:
            self._backoff_seconds = min(max(2 * self._backoff_seconds, 0.5), LONGEST_BACKOFF_SECONDS)
            self._next_query_at = time.monotonic() + self._backoff_seconds
            logger.warning("the database does not answer (%s); next try in %.1f s", error.orig, self._backoff_seconds)
            return None
        self._backoff_seconds = 0.0
        return result

    def _insist(self, work: Callable[[Session], T], transaction: Transaction = write_transaction) -> T:
        """The same, until the database answers."""
        done: list[T] = []

        def work_and_keep(session: Session) -> bool:
            done[:] = [work(session)]
            return True

        while not self._try(work_and_keep, transaction):
            self._pause_for_database()
        return done[0]

    def _pause_for_database(self) -> None:
        """Sleep until the next query is due.

        Raises:
            Stopped: there is no time left; the events stay in the file for the next supervisor.
        """
        while time.monotonic() < self._next_query_at:
            if self._stopping:
                raise Stopped
            time.sleep(0.1)


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - LOG_TAIL_BYTES))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""


def supervise(settings: Settings, run_id: str, *, trainer_command: Sequence[str] = TRAINER_COMMAND) -> int:
    """The program: SIGTERM and SIGINT interrupt the trainer at its next step boundary."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    supervisor = Supervisor(settings, run_id, trainer_command=trainer_command)

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        supervisor.stop()

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    return supervisor.run()


if __name__ == "__main__":
    sys.exit(supervise(load_settings(), sys.argv[1]))
