"""One run's supervisor: `python -m lohan_app.worker.supervisor RUN_ID`. Starts the run's trainer, or adopts it, and sees it to its end.

It holds `supervisor.lock` for as long as it lives and is the only writer of the run's events into the database. It may be killed at any
instant: the trainer goes on, and the next supervisor finds it by `trainer.json` and reads its events on from the stored offset.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

from sqlalchemy.orm import Session

from lohan.errors import NO_SPACE, LohanError, StorageError
from lohan.events import Event, EventReader, EventType, ExitReason, FailureCause
from lohan_app.db import read_transaction
from lohan_app.entities import BaseModel, PauseCause, Run, RunState, Wanted
from lohan_app.entities.base import now
from lohan_app.entities.runs import TERMINAL_STATES
from lohan_app.runs import repository
from lohan_app.runs.announce import announce
from lohan_app.runs.repository import LostEpochError
from lohan_app.runs.states import ACTIVE_STATES, Trigger
from lohan_app.settings import Settings, load_settings
from lohan_app.worker.launcher import TRAINER_COMMAND, RunFiles, TrainerNote
from lohan_app.worker.patience import Patience, Pulse
from lohan_app.worker.patient_database import PatientDatabase, Stopped
from lohan_app.worker.processes import FileLock, is_held, kill_session_with, oom_kill_count
from lohan_app.worker.run_files import free_states_of_ended
from lohan_app.worker.trainer import Trainer, TrainerEnd
from lohan_app.worker.trainer_command import arrange
from lohan_app.worker.verdict import Verdict, how_it_goes_on, judge, out_of_space, recorded_step
from lohan_app.worker.wake import wake
from lohan_app.worker.watch import Watch

logger = logging.getLogger("lohan_app.supervisor")

POLL_SECONDS = 0.3
EVENTS_PER_TRANSACTION = 500
LOG_TAIL_BYTES = 4000


class Supervisor:
    """Supervises one run. One thread; `stop` may be called from a signal handler."""

    def __init__(
        self,
        settings: Settings,
        run_id: str,
        *,
        trainer_command: Sequence[str] = TRAINER_COMMAND,
        patience: Patience | None = None,
    ) -> None:
        self._settings = settings
        self._run_id = run_id
        self._files = RunFiles(settings.run_folder(run_id))
        self._trainer_command = trainer_command
        self._patience = patience or Patience(
            start_silence_seconds=settings.start_silence_seconds, step_silence_seconds=settings.step_silence_seconds
        )
        self._pulse = Pulse(self._files.events, self._patience)
        self._epoch = 0
        self._stopping = False

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
        self._database = PatientDatabase(self._settings, lambda: self._stopping)
        try:
            self._supervise()
        except LostEpochError:
            logger.warning("%s was taken over by another supervisor, or has ended", self._run_id)
        except Stopped:
            logger.info("stopped while waiting for the database")
        finally:
            self._database.close()
            lock.release()
        return 0

    def _supervise(self) -> None:
        epoch = self._database.insist(lambda session: repository.raise_epoch(session, self._run_id))
        run = self._read()
        if epoch is None or run is None or run.state not in ACTIVE_STATES:
            logger.info("%s needs no supervisor (%s)", self._run_id, run.state if run else "unknown")
            return
        self._epoch = epoch
        self._reader = EventReader(self._files.events, run.events_offset_bytes, run.malformed_events)
        trainer = self._find_or_start(run)
        if trainer is not None:
            end = self._watch(trainer, run)
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
        wanted = self._newest(run).wanted
        if wanted in (Wanted.CANCEL, Wanted.PAUSE):
            self._fire(Trigger.REQUEST_CANCEL if wanted is Wanted.CANCEL else Trigger.REQUEST_PAUSE, state_reason="")
            self._fire(Trigger.END_EARLY, state_reason="")
            return None
        if self._stopping:
            self._release("The machine or the service on it was stopped.")
            return None
        try:
            model, source = self._database.insist(lambda session: _parts_of(session, run), read_transaction)
            device = run.devices[0] if run.devices else "cpu"
            arguments = arrange(self._settings, run, model, source, device=device)
            # Announced before it is started: an attempt is counted once, and none is ever started under a number that was used.
            if run.state is RunState.STARTING and not self._fire(
                Trigger.TRAINER_STARTED, attempt=attempt, started_at=run.started_at or now()
            ):
                return None
            command = [*self._trainer_command, *arguments]
            trainer = Trainer.start(self._files, attempt=attempt, device=device, command=command, wanted=wanted)
        except (LohanError, OSError) as error:
            logger.exception("%s: cannot start the trainer", self._run_id)
            self._move(self._cannot_start(error))
            return None
        logger.info("%s: started the trainer, process %d, attempt %d, on %s", self._run_id, trainer.pid, attempt, device)
        return trainer

    def _cannot_start(self, error: LohanError | OSError) -> Verdict:
        problem, cause = error, FailureCause.SETTINGS
        if not isinstance(problem, LohanError):
            remedy = "See that the drive is healthy, has room, and that this user may write there."
            place = problem.filename or self._files.folder
            problem, cause = StorageError.of(problem, "the trainer cannot be started", place=place, remedy=remedy), FailureCause.STORAGE
        if isinstance(error, OSError) and error.errno in NO_SPACE:
            return out_of_space(problem.to_dict())
        return Verdict(Trigger.FAIL, problem.message, {**problem.to_dict(), "cause": str(cause)})

    def _release(self, reason: str) -> None:
        self._fire(Trigger.RELEASE, state_reason=reason)
        self._fire(Trigger.END_EARLY, state_reason=reason)

    # ------------------------------------------------------------ watch
    def _watch(self, trainer: Trainer, run: Run) -> TrainerEnd:
        """Copy events and pass on requests until the trainer has ended."""
        if run.attempt == trainer.attempt and run.step > (run.resumed_step or 0):
            self._pulse.step_seconds = 0.0  # it was adopted after its first step
        watch = Watch(trainer, self._pulse, self._patience, fire=self._fire, complain=self._complain)
        while not trainer.wait(POLL_SECONDS):
            self._copy_events()
            newest = self._database.attempt(lambda session: repository.get_run(session, self._run_id), read_transaction)
            watch.heed(newest, is_stopping=self._stopping)
        return trainer.end()

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

        if self._database.attempt(record):
            self._feel_pulse(batch)
            announce(self._settings, self._run_id)
            return len(batch) == EVENTS_PER_TRANSACTION
        reader.offset_bytes, reader.malformed = before
        return True

    def _feel_pulse(self, events: Sequence[Event]) -> None:
        for event in events:
            if event.type == EventType.STARTED:
                self._pulse.step_seconds = None
            elif event.type == EventType.ANSWER_PART:
                self._pulse.step_seconds = 0.0  # an answer that has begun goes on, as a training does after its first step
            elif event.type == EventType.STEP:
                seconds = event.fields.get("step_seconds")
                self._pulse.step_seconds = float(seconds) if isinstance(seconds, int | float) else 0.0

    # ------------------------------------------------------------ end
    def _finish(self, attempt: int, end: TrainerEnd) -> None:
        """Judge the end and move the run to where it belongs."""
        while self._copy_events():
            self._database.pause()
        run = self._read()
        assert run is not None, "runs are not deleted while they are active"
        last_word = self._database.insist(lambda session: repository.exit_event(session, self._run_id, attempt=attempt), read_transaction)
        reached = recorded_step(run)
        lost = self._database.insist(
            lambda session: repository.lost_attempts(session, self._run_id, attempt=attempt, recorded_step=reached), read_transaction
        )
        verdict = judge(
            last_word.fields if last_word else None,
            end,
            lost_attempts=lost,
            goes_on=how_it_goes_on(run),
            log_tail=_tail(self._files.trainer_log),
            log_path=str(self._files.trainer_log),
        )
        state = self._move(self._as_wanted(verdict, run, last_word.fields if last_word else {}))
        logger.info("%s: attempt %d ended (%s), the run is %s. %s", self._run_id, attempt, end, state, verdict.reason)
        wake(self._settings)

    def _as_wanted(self, verdict: Verdict, run: Run, last_word: Mapping[str, Any]) -> Verdict:
        """An early end is a cancellation or a pause where somebody wanted one, also where the trainer had not heard of it."""
        if verdict.trigger not in (Trigger.END_EARLY, Trigger.RUN_OUT_OF_SPACE):
            return verdict
        if run.wanted is Wanted.CANCEL or last_word.get("reason") == ExitReason.CANCELLED:
            self._fire(Trigger.REQUEST_CANCEL)
            return Verdict(Trigger.END_EARLY)
        if run.wanted is Wanted.PAUSE:
            self._fire(Trigger.REQUEST_PAUSE)
            return replace(verdict, wait_seconds=0.0)
        return verdict

    def _move(self, verdict: Verdict) -> RunState | None:
        """Do what the verdict says."""
        values: dict[str, Any] = {"state_reason": verdict.reason, "problem": verdict.problem}
        if verdict.wait_seconds:
            values["start_after"] = now() + timedelta(seconds=verdict.wait_seconds)
        if verdict.trigger is Trigger.RUN_OUT_OF_SPACE:
            values["pause_cause"] = PauseCause.DISK_FULL
        if verdict.stopped_step is not None:
            values["stopped_step"] = verdict.stopped_step
        return self._fire(verdict.trigger, **values)

    # ------------------------------------------------------------ database
    def _fire(self, trigger: Trigger, **values: Any) -> RunState | None:
        state = self._database.insist(lambda session: repository.fire(session, self._run_id, trigger, epoch=self._epoch, **values))
        if state in TERMINAL_STATES:
            free_states_of_ended(self._settings, self._read())
        announce(self._settings, self._run_id)
        return state

    def _complain(self, reason: str) -> None:
        def explain(session: Session) -> None:
            for state in ACTIVE_STATES:
                repository.explain(session, self._run_id, state=state, reason=reason)

        self._database.attempt(explain)
        announce(self._settings, self._run_id)

    def _read(self) -> Run | None:
        return self._database.insist(lambda session: repository.get_run(session, self._run_id), read_transaction)

    def _newest(self, run: Run) -> Run:
        return self._read() or run


def _parts_of(session: Session, run: Run) -> tuple[BaseModel | None, Run | None]:
    """The run's base model, and the run that it was made of."""
    model = session.get(BaseModel, run.base_model_id) if run.base_model_id is not None else None
    return model, session.get(Run, run.parent_id) if run.parent_id is not None else None


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
