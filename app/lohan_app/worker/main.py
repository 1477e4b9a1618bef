"""`lohan worker` (`python -m lohan_app.worker.main`): the reconciler's loop, and for each queue a Celery worker as a child."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType

from lohan_app.db import create_db_engine
from lohan_app.settings import Settings, load_settings
from lohan_app.worker.celery import IO_QUEUE, LAUNCH_QUEUE, SHUTDOWN_SECONDS
from lohan_app.worker.children import Child, end_all
from lohan_app.worker.limited import sweep_scratch
from lohan_app.worker.processes import python_module
from lohan_app.worker.reconciler import Reconciler
from lohan_app.worker.wake import wait_for_wake

logger = logging.getLogger(__name__)

INTERVAL_SECONDS = 2.0
"""How often the reconciler looks when nobody wakes it."""
SLICE_SECONDS = 0.5
"""How long one wait for a wake-up lasts: between two, ended children and a request to stop are seen."""
IO_PROCESSES = 2
WORKER_APP = "lohan_app.worker.celery"
SUPERVISOR_COMMAND = tuple(python_module("lohan_app.worker.supervisor"))


class StopFlag:
    """Set by SIGTERM and SIGINT."""

    def __init__(self) -> None:
        self.is_set = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._set)

    def _set(self, _number: int, _frame: FrameType | None) -> None:
        self.is_set = True


def celery_command(worker_app: str, queue: str, processes: int) -> list[str]:
    """One Celery worker. Gossip, mingling and heartbeats between workers are off: they only keep an idle broker busy."""
    quiet = ("--without-gossip", "--without-mingle", "--without-heartbeat")
    name = f"{queue}-{os.getpid()}@%h"
    arguments = ("-A", worker_app, "worker", "-Q", queue, "--concurrency", str(processes), "-n", name, "--loglevel", "INFO", *quiet)
    # Celery's word on running as root is about pickle, which is off; without -q it prints a banner at every start.
    return [sys.executable, "-P", "-W", "ignore:You're running the worker", "-m", "celery", "-q", *arguments]


def run_worker(settings: Settings, *, worker_app: str = WORKER_APP, supervisor_command: Sequence[str] = SUPERVISOR_COMMAND) -> None:
    """Run until SIGTERM or SIGINT. Supervisors and trainers are not children of this process and go on."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    stop = StopFlag()
    settings.make_folders()
    sweep_scratch(settings)
    engine = create_db_engine(settings)
    reconciler = Reconciler(settings, engine, supervisor_command=supervisor_command)
    # SIGQUIT is Celery's shutdown with a time limit; with SIGTERM as it comes, it would wait for a long task without end.
    environment = {"REMAP_SIGTERM": "SIGQUIT"}
    # A queue of its own for launches: they never wait behind the reading of a large file.
    children = [
        Child(f"Celery worker for {queue}", celery_command(worker_app, queue, processes),
              environment=environment, patience_seconds=SHUTDOWN_SECONDS + 3)
        for queue, processes in ((LAUNCH_QUEUE, 1), (IO_QUEUE, IO_PROCESSES))
    ]  # fmt: skip
    try:
        while not stop.is_set:
            for child in children:
                child.keep()
            reconciler.tick()
            _wait(settings, children, stop)
    finally:
        end_all(children)
        reconciler.close()
        engine.dispose()


def _wait(settings: Settings, children: Sequence[Child], stop: StopFlag) -> None:
    """Until somebody wakes the reconciler or its interval has passed."""
    deadline = time.monotonic() + INTERVAL_SECONDS
    while not stop.is_set and time.monotonic() < deadline:
        for child in children:
            child.keep()
        try:
            if wait_for_wake(settings, SLICE_SECONDS):
                return
        except Exception:  # noqa: BLE001 - whatever keeps the broker from answering, the loop goes on without it
            time.sleep(SLICE_SECONDS)


if __name__ == "__main__":
    run_worker(load_settings())
