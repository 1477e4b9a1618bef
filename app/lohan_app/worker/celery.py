"""The Celery application: short, idempotent tasks that are woken by messages; what is to be done stands in the database.

A message may be lost or come twice, so every task looks at its row first, and the reconciler sends again what was not done.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, ParamSpec, cast

from celery import Celery, Task
from kombu.connection import Connection
from sqlalchemy import Engine

from lohan_app.db import create_db_engine
from lohan_app.settings import Settings, load_settings
from lohan_app.worker.processes import FileLock, python_module
from lohan_app.worker.wake import wake as wake

logger = logging.getLogger(__name__)
P = ParamSpec("P")

IO_QUEUE, LAUNCH_QUEUE = "io", "launch"
TASK_MODULES = ("lohan_app.datasets.tasks", "lohan_app.base_models.tasks", "lohan_app.runs.tasks")
TASK_ROUTES = {"runs.launch": {"queue": LAUNCH_QUEUE}}
LAUNCH_LIMIT_SECONDS = 60
SHUTDOWN_SECONDS = 5
"""How long a worker that is told to stop lets its tasks go on; what is cut short is sent again by the reconciler."""
PUBLISH_TIMEOUT_SECONDS = 2.0


def configuration(settings: Settings) -> dict[str, Any]:
    """Celery's settings for these settings of ours. The reasons were measured with Celery and kombu 5.7 on valkey 9.1."""
    # A limited child may take twice its CPU limit by the clock (limited.py); then the task has ten minutes for the rest.
    task_seconds = 2 * settings.worker_cpu_seconds + 600
    # An unacknowledged message is delivered again after this long, also to a second worker beside a healthy first one: above any task.
    visibility_seconds = max(3600, task_seconds + 600)
    return {
        "broker_url": settings.celery_broker_url,
        "broker_transport_options": {
            "visibility_timeout": visibility_seconds,
            # Below the socket timeout, so that a half-open connection is noticed by a ping rather than by silence.
            "health_check_interval": 25,
            "socket_timeout": 30,
            "socket_keepalive": True,
            # By default the sweep for lost messages runs about every 100 s (10 x 10).
            "unacked_restore_interval": 10,
            "unacked_restore_throttle": 1,
        },
        # The shortest visibility timeout of all users of a broker wins: Celery's documentation asks for all three.
        "result_backend_transport_options": {"visibility_timeout": visibility_seconds},
        "visibility_timeout": visibility_seconds,
        # Every task is idempotent, so a message is acknowledged when the work is done.
        "task_acks_late": True,
        # True would run the task again at once beside what the killed child may have left behind.
        "task_reject_on_worker_lost": False,
        # A prefetched message waits behind a long task although another process is free.
        "worker_prefetch_multiplier": 1,
        # True (the default from Celery 6 on) kills running tasks when the broker blinks and leaves them unacknowledged for an hour.
        "worker_cancel_long_running_tasks_on_connection_loss": False,
        # Below the patience of `lohan up` and the containers' stop_grace_period; what is cut short is sent again by the reconciler.
        "worker_soft_shutdown_timeout": SHUTDOWN_SECONDS,
        # True would sleep the whole timeout with nothing to do; it serves tasks with an ETA, and we send none.
        "worker_enable_soft_shutdown_on_idle": False,
        # A broker that is not up yet, or is restarted, is waited for without end: `lohan up` starts both side by side.
        "broker_connection_retry_on_startup": True,
        "broker_connection_max_retries": None,
        # JSON only: a pickle in a broker is code execution for whoever can write to it.
        "task_serializer": "json",
        "result_serializer": "json",
        "accept_content": ["json"],
        # What a task did stands in the database.
        "task_ignore_result": True,
        "task_store_errors_even_if_ignored": False,
        # Every task ends, whatever it reads: one that hangs would hold its process, and its row, for ever.
        "task_time_limit": task_seconds,
        # A fresh interpreter per child: a fork would share database connections and whatever threads the parent has.
        "worker_pool_start_method": "spawn",
        # A queue for each role: a launch never waits behind the reading of a large file.
        "task_default_queue": IO_QUEUE,
        "task_routes": TASK_ROUTES,
        "include": list(TASK_MODULES),
        # Nobody listens to them, and an idle broker stays idle.
        "worker_send_task_events": False,
        "timezone": "UTC",
        "enable_utc": True,
        # Ours: what `runs.launch` starts, with the run's id appended.
        "supervisor_command": python_module("lohan_app.worker.supervisor"),
    }


@cache
def worker_settings() -> Settings:
    """The settings of this worker process, from its environment."""
    return load_settings()


@cache
def worker_engine() -> Engine:
    """This worker process's database engine; children are started by spawn, so none is ever shared."""
    return create_db_engine(worker_settings())


class IdempotentTask(Task):  # type: ignore[misc]  # Celery publishes no types
    """A task on a row, run once at a time: a message that comes twice finds the lock held and is done."""

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        lock = FileLock(task_lock(worker_settings(), self.name, *arguments))
        if not lock.try_acquire():
            logger.info("%s%r is running already", self.name, arguments)
            return None
        try:
            return self.run(*arguments, **keywords)
        finally:
            lock.remove()


class WorkerApp(Celery):  # type: ignore[misc]  # Celery publishes no types
    """Celery's application, found again by import in the children: Celery would rebuild it there without our settings."""

    import_path = "lohan_app.worker.celery:celery_app"

    def __reduce__(self) -> tuple[Any, ...]:
        return _find_app, (self.import_path,)


def _find_app(import_path: str) -> Any:
    module, _, name = import_path.partition(":")
    return getattr(import_module(module), name)


celery_app = WorkerApp("lohan", task_cls=IdempotentTask)
celery_app.add_defaults(lambda: configuration(worker_settings()))


def task(name: str, **options: Any) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """`celery_app.task`, with the function's type kept."""
    return cast("Callable[[Callable[P, None]], Callable[P, None]]", celery_app.task(name=name, **options))


def task_lock(settings: Settings, name: str, *arguments: Any) -> Path:
    """The lock that a task on this row holds while it runs; with it the reconciler tells a long task from a lost one."""
    folder = settings.data_dir / "cache" / "tasks"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder / (re.sub(r"[^A-Za-z0-9_.-]", "_", "-".join([name, *map(str, arguments)]))[:200] + ".lock")


def send(name: str, *arguments: Any, settings: Settings | None = None) -> bool:
    """Send a task; call it after the commit that makes the task find its row.

    Never raises for a broker that is down or slow: the reconciler sends again what was not done. Returns whether the message was taken.
    """
    try:
        with _short_connection(settings or worker_settings()) as connection:
            celery_app.send_task(name, args=arguments, connection=connection, retry=False)
    except Exception as error:  # noqa: BLE001 - kombu lets the errors of redis, of the socket and its own through
        logger.warning("cannot send %s%r now (%s); the reconciler will", name, arguments, error)
        return False
    return True


def _short_connection(settings: Settings) -> Connection:
    """A connection of its own per message: a pooled one would be stale after every restart of the broker, and lose the message."""
    options = {
        "socket_connect_timeout": PUBLISH_TIMEOUT_SECONDS,
        "socket_timeout": PUBLISH_TIMEOUT_SECONDS,
        "max_retries": 1,
        "interval_start": 0,
        "connect_retries_timeout": PUBLISH_TIMEOUT_SECONDS,
    }
    url = settings.celery_broker_url
    return Connection(url, transport_options=options, connect_timeout=PUBLISH_TIMEOUT_SECONDS)  # type: ignore[no-untyped-call]  # kombu
