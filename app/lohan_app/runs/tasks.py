"""Celery tasks of runs. The worker starts a run's supervisor and forgets it: a worker may die, be updated or forget a message."""

from __future__ import annotations

import logging

from lohan_app.db import read_transaction
from lohan_app.runs import repository
from lohan_app.runs.states import ACTIVE_STATES
from lohan_app.worker.celery import LAUNCH_LIMIT_SECONDS, celery_app, task, worker_engine, worker_settings
from lohan_app.worker.launcher import start_supervisor

logger = logging.getLogger(__name__)


@task("runs.launch", time_limit=LAUNCH_LIMIT_SECONDS)
def launch(run_id: str) -> None:
    """Start the run's supervisor in a session of its own, and return. A supervisor that finds another one at work ends at once."""
    with read_transaction(worker_engine()) as session:
        run = repository.get_run(session, run_id)
    if run is None or run.state not in ACTIVE_STATES:
        logger.info("%s needs no supervisor (%s)", run_id, run.state if run else "unknown")
        return
    start_supervisor(worker_settings(), run_id, celery_app.conf.supervisor_command)


@task("runs.prepare")
def prepare(run_id: str) -> None:
    """Tokenise the run's rows in a limited child; the run can start once that is done."""
    from lohan_app.runs.prepare import prepare_run

    prepare_run(worker_settings(), worker_engine(), run_id)
