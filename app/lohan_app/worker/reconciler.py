"""Makes the world agree with the database: starts queued runs, revives supervisors, sends lost tasks again.

The broker's messages are wake-ups. This loop looks at the rows, at who holds which lock, and does what nobody else has done. One
reconciler acts at a time per data folder; the others wait for its lock.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Engine, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from lohan.errors import CapacityError, LohanError
from lohan_app.db import read_transaction, write_transaction
from lohan_app.entities import BaseModel, BaseModelState, Dataset, DatasetState, Run, RunKind, RunState, Wanted
from lohan_app.entities.base import now
from lohan_app.runs import queries, repository
from lohan_app.runs.announce import announce
from lohan_app.runs.line import WINDOW, device_seconds, in_line_since, in_order
from lohan_app.runs.states import ACTIVE_STATES
from lohan_app.settings import Settings
from lohan_app.worker.celery import send, task_lock
from lohan_app.worker.claims import Line, claim, on_device
from lohan_app.worker.housekeeping import Housekeeper
from lohan_app.worker.launcher import RunFiles, start_supervisor
from lohan_app.worker.processes import FileLock, holder_of, is_held
from lohan_app.worker.replanning import Replanner
from lohan_app.worker.reservations import Held, Machine, Need, held_by, look_at_machine, need_of
from lohan_app.worker.run_files import states_by_directory
from lohan_app.worker.shared_states import why_it_waits
from lohan_app.worker.verdict import BEGIN_ANEW, RESUME, START_AGAIN
from lohan_app.worker.waiting import WaitingRuns, must_wait

logger = logging.getLogger(__name__)

LAUNCH_PATIENCE_SECONDS = 10.0
"""From the launch message to the supervisor's lock: a worker's turn and two seconds of imports, on a busy machine."""
HOPEFUL_LAUNCHES = 3
"""After so many starts without a supervisor that stays, the run says so."""
RESEND_AFTER_SECONDS = 30.0
"""A task's message is taken for lost when its row is this old, not done, and nobody works on it."""
REPLAN_SECONDS = 4.0
"""A plan that does not fit is made again after so long, and then less and less often: it takes up to seconds of a processor."""
LONGEST_PATIENCE_SECONDS = 300.0


@dataclass(slots=True)
class _Patience:
    """How often something was tried, and when it may be tried again: the wait doubles, so that a lasting fault costs little."""

    first_seconds: float
    tries: int = 0
    next_at: float = 0.0

    def is_due(self) -> bool:
        return time.monotonic() >= self.next_at

    def note_try(self) -> None:
        self.next_at = time.monotonic() + min(self.first_seconds * 2**self.tries, LONGEST_PATIENCE_SECONDS)
        self.tries += 1


class Reconciler:
    """Call `tick` every few seconds; what it remembers between two calls is only how patient to be."""

    def __init__(
        self,
        settings: Settings,
        engine: Engine,
        *,
        supervisor_command: Sequence[str],
        look: Callable[[Settings], Machine] = look_at_machine,
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._supervisor_command = supervisor_command
        self._look = look
        self._waiting = WaitingRuns(settings, engine, look)
        self._replanner = Replanner(settings, engine)
        self._plans: dict[str, _Patience] = {}
        self._housekeeper = Housekeeper(settings, engine)
        self._lock = FileLock(settings.data_dir / "reconciler.lock")
        self._is_acting = False
        self._launches: dict[str, _Patience] = {}
        self._tasks: dict[tuple[str, str], _Patience] = {}

    def tick(self) -> None:
        """Do what is to be done now. Faults are logged and met again at the next call: the loop has to outlive them."""
        if not self._is_acting:
            self._is_acting = self._lock.try_acquire()
            if not self._is_acting:
                return
        waiting, house = self._waiting, self._housekeeper
        # Retries get their states before any expire, and what expires makes room before anybody asks for it.
        for work in (
            *(waiting.heed, waiting.take_over, house.remove_due, waiting.resume_where_there_is_room),
            *(self._start_queued, self._revive_supervisors, self._send_again, house.measure_when_old),
        ):
            try:
                work()
            except DBAPIError as error:
                logger.warning("the database does not answer: %s", error.orig)
                return
            except (LohanError, OSError):
                logger.exception("the reconciler could not finish a step")

    def close(self) -> None:
        self._lock.release()

    # ------------------------------------------------------------ runs
    def _start_queued(self) -> None:
        """Give out reservations in the queue's order (`runs.line`, `worker.claims`); a run that does not fit says what it waits for."""
        at = now()
        with read_transaction(self._engine) as session:
            queued = repository.runs_in(session, [RunState.QUEUED])
            active = repository.runs_in(session, ACTIVE_STATES)
            seconds = device_seconds(queries.device_uses(session, at - WINDOW) if queued else (), at)
            exports = repository.unfinished_exports(session) if queued else {}
            waits = {run.id: why_it_waits(session, self._settings, run, exports) for run in queued}
        self._plans = {run.id: self._plans[run.id] for run in queued if run.id in self._plans}
        if not queued:
            return
        machine = self._look(self._settings)
        line = Line(machine, [held_by(run) for run in active], at)
        for run in in_order(queued, seconds):
            if run.wanted not in (Wanted.RUN, Wanted.STOP) or must_wait(run):
                continue
            reason = waits[run.id] or self._start(run, line, machine)
            if reason and reason != run.state_reason:
                with write_transaction(self._engine) as session:
                    repository.explain(session, run.id, state=RunState.QUEUED, reason=reason)
                announce(self._settings, run.id)

    def _start(self, run: Run, line: Line, machine: Machine) -> str:
        """Start the run if its turn has come; otherwise say why not. The plan of a training is made again for the machine as it is now."""
        if run.prepared_at is None:
            return run.state_reason or "Its rows are being prepared."
        lock = RunFiles(self._settings.run_folder(run.id)).trainer_lock
        if is_held(lock):
            return f"Waits for process {holder_of(lock) or '(unknown)'}, which trains in this run's folder."
        folders, states = self._settings.state_folders, states_by_directory(self._settings, run.id)
        need = need_of(run, folders, states=states)
        answer = line.ask(run.name, need, in_line_since(run))
        if run.kind is not RunKind.TRAIN:
            return answer if isinstance(answer, str) else self._claim(run, need, line, machine)
        device = line.free_device(need) if isinstance(answer, str) else answer.devices[0]
        if device is None or (isinstance(answer, str) and line.waits_for_ours(need)):
            return str(answer)
        # Where nobody's end is waited for, the machine has changed since the plan was made: another plan may fit.
        patience = self._plans.setdefault(run.id, _Patience(REPLAN_SECONDS))
        if isinstance(answer, str) and not patience.is_due():
            return run.state_reason
        made = self._replanner.plan(run, device, machine, line.held, states)
        if isinstance(made, CapacityError):
            patience.note_try()
            return self._replanner.reason(run, device, machine, made)
        if made is None and isinstance(answer, str):
            return answer
        plan = run.plan if made is None else made.model_dump(mode="json")
        need = on_device(need_of(run, folders, states=states, plan=plan), device)
        reason = self._claim(run, need, line, machine, started_plan=plan)
        if reason:
            patience.note_try()
        return reason

    def _claim(self, run: Run, need: Need, line: Line, machine: Machine, **values: Any) -> str:
        """Reserve what the run needs, with `values` written beside, and have it started; otherwise say why not."""
        # Why an earlier attempt ended stays readable while the next one runs.
        values["state_reason"] = run.state_reason if any(words in run.state_reason for words in (START_AGAIN, RESUME, BEGIN_ANEW)) else ""
        got = claim(self._engine, run.id, need, machine, kept=line.kept, values=values)
        if got is None or isinstance(got, str):
            return got or ""
        line.started(Held(run.name, got.devices, got.ram_bytes, got.space, is_settled=False))
        logger.info("%s: claimed, with %s", run.id, ", ".join(got.devices) or "no device")
        announce(self._settings, run.id)
        self._launches[run.id] = _Patience(LAUNCH_PATIENCE_SECONDS)
        self._launch(run.id)
        return ""

    def _revive_supervisors(self) -> None:
        """An active run whose supervisor's lock is free has lost its supervisor: alive means holding the lock."""
        with read_transaction(self._engine) as session:
            active = [run.id for run in repository.runs_in(session, ACTIVE_STATES)]
        for run_id in active:
            if is_held(RunFiles(self._settings.run_folder(run_id)).supervisor_lock):
                self._launches.pop(run_id, None)
            elif self._launches.setdefault(run_id, _Patience(LAUNCH_PATIENCE_SECONDS)).is_due():
                logger.info("%s: has no supervisor", run_id)
                self._launch(run_id)
                self._explain_if_hopeless(run_id)
        for run_id in self._launches.keys() - set(active):
            del self._launches[run_id]

    def _launch(self, run_id: str) -> None:
        """Through the queue first; directly where the broker does not take the message, or nothing came of it."""
        patience = self._launches[run_id]
        patience.note_try()
        if patience.tries == 1 and send("runs.launch", run_id, settings=self._settings):
            return
        start_supervisor(self._settings, run_id, self._supervisor_command)

    def _explain_if_hopeless(self, run_id: str) -> None:
        if self._launches[run_id].tries <= HOPEFUL_LAUNCHES:
            return
        log = RunFiles(self._settings.run_folder(run_id)).supervisor_log
        logger.warning("%s: no supervisor stays up after %d starts; see %s", run_id, self._launches[run_id].tries, log)
        with write_transaction(self._engine) as session:
            for state in ACTIVE_STATES:
                repository.explain(session, run_id, state=state, reason=f"Its supervisor does not stay up: see {log}. It is tried again.")

    # ------------------------------------------------------------ tasks
    def _send_again(self) -> None:
        """Tasks whose message, or whose worker, was lost: the row still waits, and nobody holds the task's lock."""
        before = now() - timedelta(seconds=RESEND_AFTER_SECONDS)
        with read_transaction(self._engine) as session:
            waiting = set(_unfinished_tasks(session, before))
        for key in waiting:
            name, row_id = key
            patience = self._tasks.setdefault(key, _Patience(RESEND_AFTER_SECONDS))
            if is_held(task_lock(self._settings, name, row_id)) or not patience.is_due():
                continue
            patience.note_try()
            logger.info("%s(%s) was not done; sent again", name, row_id)
            send(name, row_id, settings=self._settings)
        for key in self._tasks.keys() - waiting:
            del self._tasks[key]


def _unfinished_tasks(session: Session, before: datetime) -> Iterator[tuple[str, str]]:
    """(task name, row id) of rows made before `before` that still wait for their task."""
    datasets = select(Dataset.id).where(Dataset.state == DatasetState.VALIDATING, Dataset.created_at < before, Dataset.deleted_at.is_(None))
    models = select(BaseModel.id).where(
        BaseModel.state == BaseModelState.INSPECTING, BaseModel.created_at < before, BaseModel.deleted_at.is_(None)
    )
    runs = select(Run.id).where(Run.state == RunState.QUEUED, Run.prepared_at.is_(None), Run.created_at < before)
    for name, statement in (("datasets.validate", datasets), ("base_models.inspect", models), ("runs.prepare", runs)):
        for row_id in session.scalars(statement):
            yield name, row_id
