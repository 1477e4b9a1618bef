"""How the service itself is doing."""

from __future__ import annotations

import platform
from functools import lru_cache

import redis
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError

from lohan.errors import LohanError
from lohan_app import __version__
from lohan_app.context import AppContext
from lohan_app.db import alembic_config, check_connection
from lohan_app.hardware import service as hardware_service
from lohan_app.redis_client import connect
from lohan_app.settings import Settings
from lohan_app.system.schemas import Readiness, SystemView

WORKER_REPLY_SECONDS = 0.5


def database_state(engine: Engine) -> str:
    """`ok`, or what is wrong."""
    try:
        check_connection(engine)
    except DBAPIError as error:
        return _first_line(error.orig or error)
    return "ok"


@lru_cache(maxsize=1)
def _newest_revision(settings: Settings) -> str | None:
    return ScriptDirectory.from_config(alembic_config(settings)).get_current_head()


def migrations_state(engine: Engine, settings: Settings) -> str:
    """`ok`, or which revision the database has and which this version needs."""
    needed = _newest_revision(settings)
    try:
        with engine.connect() as connection:
            found = MigrationContext.configure(connection).get_current_revision()
    except DBAPIError as error:
        return _first_line(error.orig or error)
    return "ok" if found == needed else f"the database is at revision {found}, this version needs {needed}: run `lohan migrate`"


def broker_state(settings: Settings) -> str:
    """`ok`, or what is wrong."""
    try:
        with connect(settings) as client:
            client.ping()
    except (redis.RedisError, OSError, ValueError) as error:
        return _first_line(error)
    return "ok"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def readiness(context: AppContext) -> Readiness:
    database = database_state(context.engine)
    migrations = migrations_state(context.engine, context.settings) if database == "ok" else "unknown"
    ready = database == "ok" and migrations == "ok"
    return Readiness(ready=ready, database=database, migrations=migrations, broker=broker_state(context.settings))


def _workers() -> list[str]:
    """Names of the Celery workers that answer now."""
    from lohan_app.worker.celery import celery_app

    replies = celery_app.control.ping(timeout=WORKER_REPLY_SECONDS)
    return sorted(name for reply in replies for name in reply)


def _database_kind(engine: Engine) -> str:
    names = {"sqlite": "SQLite", "postgresql": "PostgreSQL"}
    name = names.get(engine.dialect.name, engine.dialect.name)
    try:
        with engine.connect() as connection:
            version = connection.dialect.server_version_info or ()
    except DBAPIError:
        return name
    return f"{name} {'.'.join(str(part) for part in version)}"


def overview(context: AppContext) -> SystemView:
    state = readiness(context)
    try:
        choices = hardware_service.choices(context.hardware.facts(), context.settings)
    except LohanError as error:
        choices = [str(error)]
    return SystemView(
        version=__version__,
        python=platform.python_version(),
        started_at=context.started_at,
        database=_database_kind(context.engine),
        database_state=state.database,
        migrations_state=state.migrations,
        broker_state=state.broker,
        workers=_workers() if state.broker == "ok" else [],
        upload_limit_bytes=context.settings.upload_limit_bytes,
        model_dirs=[folder.name for folder in context.settings.model_dirs],
        choices=choices,
    )
