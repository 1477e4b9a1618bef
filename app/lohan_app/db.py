"""Database access: SQLite by default, PostgreSQL by URL; sessions, write transactions, migrations.

Every write goes through `write_transaction`: on SQLite it takes the write lock at once (BEGIN IMMEDIATE), because a transaction
that starts by reading and then writes fails at once with SQLITE_BUSY_SNAPSHOT whatever the busy timeout (measured).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from typing import TYPE_CHECKING, Any

from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.orm import Session

from lohan.errors import StorageError
from lohan_app.settings import Settings

if TYPE_CHECKING:
    from alembic.config import Config

BUSY_TIMEOUT_SECONDS = 30
# PostgreSQL waits without end by default. Every statement of the service takes well under a second: one that takes a minute is a lost
# plan or a lost server, and the request or the supervisor's turn ends with an error that is tried again. Migrations set their own.
STATEMENT_TIMEOUT_SECONDS = 60
LOCK_TIMEOUT_SECONDS = BUSY_TIMEOUT_SECONDS
# A process that was stopped in the middle of a transaction would hold its rows for as long as it is stopped.
IDLE_TRANSACTION_TIMEOUT_SECONDS = 300
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
# 3.7.0 to 3.51.2 can corrupt a WAL database used by several connections; the fix was backported to these two.
SQLITE_FIXED_VERSION = (3, 51, 3)
SQLITE_BACKPORTS = ((3, 44, 6), (3, 50, 7))


def sqlite_is_safe(version: tuple[int, ...]) -> bool:
    """Whether this SQLite has the fix of the WAL-reset race (https://sqlite.org/wal.html#walresetbug); 3.52.0 was withdrawn."""
    if version[:2] == (3, 52):
        return False
    return version >= SQLITE_FIXED_VERSION or any(version[:2] == fixed[:2] and version >= fixed for fixed in SQLITE_BACKPORTS)


def create_db_engine(settings: Settings) -> Engine:
    """The SQLAlchemy engine for the configured database.

    Raises:
        StorageError: the SQLite library at hand can corrupt the database.
    """
    url = settings.sqlalchemy_url
    if not url.startswith("sqlite"):
        engine = create_engine(url, pool_pre_ping=True, pool_size=10, max_overflow=20)
        event.listen(engine, "connect", _set_up_postgresql)
        event.listen(engine, "before_cursor_execute", _storable_parameters, retval=True)
        return engine
    from pysqlite3 import dbapi2  # the wheel's SQLite: the system's may have the WAL-reset race

    if not sqlite_is_safe(dbapi2.sqlite_version_info):
        raise StorageError(
            f"SQLite {dbapi2.sqlite_version} can corrupt databases that several processes use",
            place="pysqlite3",
            remedy="Install pysqlite3 0.6.1 or newer, or set LOHAN_DATABASE_URL to a PostgreSQL server.",
        )
    (settings.data_dir / "db").mkdir(mode=0o700, parents=True, exist_ok=True)
    engine = create_engine(url, module=dbapi2, connect_args={"timeout": BUSY_TIMEOUT_SECONDS})
    _set_up_sqlite(engine)
    event.listen(engine, "before_cursor_execute", _storable_parameters, retval=True)
    return engine


def _storable_parameters(
    _connection: Any, _cursor: Any, statement: str, parameters: Any, _context: Any, _executemany: bool
) -> tuple[str, Any]:
    """PostgreSQL's text takes no NUL and UTF-8 no lone surrogate; both become U+FFFD, on SQLite too.

    So an id or name that holds one is simply not found, and a trainer's last words can always be stored.
    """
    return statement, _storable(parameters)


def _storable(value: Any) -> Any:
    if isinstance(value, str):
        return _UNSTORABLE.sub("\ufffd", value)
    if isinstance(value, tuple | list):
        return type(value)(_storable(item) for item in value)
    if isinstance(value, dict):
        return {key: _storable(item) for key, item in value.items()}
    return value


def _set_up_postgresql(connection: Any, _record: Any) -> None:
    # Outside a transaction: a setting made in one goes with its rollback.
    connection.autocommit = True
    connection.execute(f"SET statement_timeout = '{STATEMENT_TIMEOUT_SECONDS}s'")
    connection.execute(f"SET lock_timeout = '{LOCK_TIMEOUT_SECONDS}s'")
    connection.execute(f"SET idle_in_transaction_session_timeout = '{IDLE_TRANSACTION_TIMEOUT_SECONDS}s'")
    connection.autocommit = False


def _set_up_sqlite(engine: Engine) -> None:
    @event.listens_for(engine, "connect")
    def on_connect(connection: Any, _record: Any) -> None:
        # The driver's own transaction control is switched off so that BEGIN IMMEDIATE below is the only BEGIN.
        connection.isolation_level = None
        cursor = connection.cursor()
        cursor.execute("PRAGMA journal_mode=WAL")
        cursor.execute("PRAGMA synchronous=FULL")
        cursor.execute("PRAGMA foreign_keys=ON")
        cursor.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_SECONDS * 1000}")
        cursor.close()

    @event.listens_for(engine, "begin")
    def on_begin(connection: Any) -> None:
        mode = connection.get_execution_options().get("transaction", "DEFERRED")
        connection.exec_driver_sql(f"BEGIN {mode}")


@contextmanager
def write_transaction(engine: Engine) -> Iterator[Session]:
    """A session whose changes are committed at the end, or rolled back on an error. Keep it short: SQLite has one writer."""
    with Session(engine.execution_options(transaction="IMMEDIATE"), expire_on_commit=False) as session, session.begin():
        yield session


@contextmanager
def read_transaction(engine: Engine) -> Iterator[Session]:
    """A session for reading; whatever it holds stays usable after it closes."""
    with Session(engine, expire_on_commit=False) as session:
        yield session


def alembic_config(settings: Settings) -> Config:
    """Alembic's configuration for the packaged migrations and the configured database."""
    from alembic.config import Config  # here: supervisors and workers never migrate, and Alembic is a third of their start

    config = Config()
    config.set_main_option("script_location", str(resources.files("lohan_app") / "migrations"))
    config.attributes["settings"] = settings
    return config


def migrate(settings: Settings) -> None:
    """Bring the database to the newest schema."""
    from alembic import command

    command.upgrade(alembic_config(settings), "head")


def check_connection(engine: Engine) -> None:
    """Run the smallest query; raises SQLAlchemy's OperationalError when the database does not answer."""
    with engine.connect() as connection:
        connection.execute(text("SELECT 1"))
