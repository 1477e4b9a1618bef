"""`lohan up`: the whole appliance from one command: broker (if ours), worker, web server. Restarts them; runs outlive it."""

from __future__ import annotations

import errno
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing

import psutil
from sqlalchemy.exc import DBAPIError

from lohan.errors import ConfigError, EngineError, StorageError
from lohan_app.auth.setup import ensure_setup_token, setup_url
from lohan_app.db import create_db_engine, migrate
from lohan_app.settings import Settings
from lohan_app.worker.broker import answers, broker_command, broker_log
from lohan_app.worker.celery import SHUTDOWN_SECONDS
from lohan_app.worker.children import Child, end_all
from lohan_app.worker.main import StopFlag
from lohan_app.worker.processes import FileLock, python_module

logger = logging.getLogger(__name__)

LISTEN_BACKLOG = 128
BROKER_START_SECONDS = 10.0
LOOK_SECONDS = 0.2


def run_up(settings: Settings, *, worker_command: Sequence[str] | None = None, say: Callable[[str], None] = print) -> None:
    """Run the appliance until SIGTERM or SIGINT.

    Raises:
        EngineError: another `lohan up` runs on this data folder; it is named.
        ConfigError: the port is taken, the address is not this machine's, or there is no broker program.
        StorageError: the database does not answer.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("alembic").setLevel(logging.WARNING)  # the first line is the address
    settings.make_folders()
    lock = take_up_lock(settings)
    with closing(listen(settings)) as listener:
        broker = [Child("broker", broker_command(settings))] if settings.broker_url is None else []
        say(first_line(settings))
        sys.stdout.flush()
        stop = StopFlag()
        # The flags of the command line reach the children as settings.
        environment = {"LOHAN_HOST": settings.host, "LOHAN_PORT": str(settings.port)}
        worker = Child("worker", worker_command or python_module("lohan_app.worker.main"),
                       environment=environment, patience_seconds=2 * SHUTDOWN_SECONDS + 8)  # fmt: skip
        web = Child("web server", python_module("lohan_app.worker.web", str(listener.fileno())),
                    environment=environment, pass_fds=(listener.fileno(),))  # fmt: skip
        children = [*broker, worker, web]
        try:
            if broker:
                _wait_for_broker(settings, broker[0], stop)
            while not stop.is_set:
                for child in children:
                    child.keep()
                time.sleep(LOOK_SECONDS)
            say("Stopping. Runs that are training go on; the next `lohan up` finds them.")
        finally:
            end_all([web, worker])
            end_all(broker)  # last: a worker that has lost its broker retries instead of ending
            lock.release()


def run_web(settings: Settings, *, say: Callable[[str], None] = print) -> None:
    """Run the web server alone until SIGTERM or SIGINT: for containers, where `lohan worker` runs in another.

    Raises:
        EngineError, ConfigError, StorageError: as `run_up`.
    """
    settings.make_folders()
    lock = take_up_lock(settings)
    try:
        with closing(listen(settings)) as listener:
            say(first_line(settings))
            sys.stdout.flush()
            from lohan_app.worker.web import serve  # the whole application: only this command needs it in this process

            StopFlag()  # uvicorn raises the signal that ended it once more: with a handler in place, that is no death by a signal
            serve(settings, listener)
    finally:
        lock.release()


def first_line(settings: Settings) -> str:
    """Bring the database up to date and return what is printed first: where to go with a browser.

    Raises:
        StorageError: the database does not answer.
    """
    engine = create_db_engine(settings)
    try:
        migrate(settings)
        token = ensure_setup_token(settings, engine)
    except DBAPIError as error:
        raise StorageError(
            f"the database does not answer: {error.orig}",
            place="LOHAN_DATABASE_URL" if settings.database_url else str(settings.data_dir / "db"),
            remedy="Start the database server, or correct the address.",
        ) from error
    finally:
        engine.dispose()
    if token is not None:
        return f"LoHan: open {setup_url(settings, token)} to make the administrator's account (works once)."
    return f"LoHan: open {base_url(settings)}"


def base_url(settings: Settings) -> str:
    """The address to show; a wildcard address is shown as the local one."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)  # noqa: S104 - read, not bound
    return f"http://{f'[{host}]' if ':' in host else host}:{settings.port}"


def take_up_lock(settings: Settings) -> FileLock:
    """Hold the data folder for this `lohan up`.

    Raises:
        EngineError: another one holds it; the message names its process and address.
    """
    lock = FileLock(settings.data_dir / "up.lock")
    if not lock.try_acquire():
        note = lock.read_note()
        raise EngineError(
            f"the appliance runs on this data folder already: process {note.get('pid', '(unknown)')} at {note.get('url', '(unknown)')}",
            place=str(settings.data_dir),
            remedy="Use that one, stop it first, or set LOHAN_DATA_DIR to another folder.",
        )
    lock.write_note({"pid": os.getpid(), "url": base_url(settings)})
    return lock


def listen(settings: Settings) -> socket.socket:
    """The web server's listening socket. It is opened here and inherited, so that it outlives a restart of the web server.

    Raises:
        ConfigError: the port is taken, or the address cannot be used.
    """
    place = f"{settings.host}:{settings.port}"
    try:
        family, _, _, _, address = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server((str(address[0]), settings.port), family=family, backlog=LISTEN_BACKLOG)
    except socket.gaierror as error:
        raise ConfigError(f"{settings.host!r} is no address", place="LOHAN_HOST", remedy="Use 127.0.0.1, 0.0.0.0 or ::.") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            message, remedy = f"port {settings.port} is taken{_holder(settings.port)}", "Choose another: lohan up --port 8001"
        elif error.errno in (errno.EACCES, errno.EPERM):
            message, remedy = f"port {settings.port} may not be used by this user", "Choose one above 1023: lohan up --port 8000"
        else:
            message, remedy = (
                f"cannot listen: {os.strerror(error.errno or 0)}",
                "Set LOHAN_HOST to an address of this machine.",
            )
        raise ConfigError(message, place=place, remedy=remedy) from error


def _holder(port: int) -> str:
    """`` by NAME (process N)``, where this user may see it."""
    try:
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port
            if listens and connection.pid is not None:
                return f" by {psutil.Process(connection.pid).name()} (process {connection.pid})"
    except (psutil.Error, OSError):
        pass
    return ""


def _wait_for_broker(settings: Settings, broker: Child, stop: StopFlag) -> None:
    """Give the broker a moment's head start: Celery's first retry would come two seconds later."""
    deadline = time.monotonic() + BROKER_START_SECONDS
    while not stop.is_set and not answers(settings):
        broker.keep()
        if time.monotonic() > deadline:
            logger.error("the broker does not answer; see %s. Runs start without it.", broker_log(settings))
            return
        time.sleep(0.05)
