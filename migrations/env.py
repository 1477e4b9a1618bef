"""Alembic's environment: the configured database, entities as the target, locks that a busy database cannot hold for ever."""

from __future__ import annotations

from typing import Any, Literal

from alembic import context
from sqlalchemy import Connection, Enum, text

from lohan_app.db import create_db_engine
from lohan_app.entities import Entity
from lohan_app.entities.base import UtcDateTime
from lohan_app.settings import Settings, load_settings

# A migration waits this long for a table that a request holds, then fails and leaves everything as it was.
LOCK_TIMEOUT_SECONDS = 10
STATEMENT_TIMEOUT_SECONDS = 600
# Any fixed number: two processes that migrate at once take turns on PostgreSQL; on SQLite BEGIN IMMEDIATE does the same.
ADVISORY_LOCK = 5_764_201_907


def render_item(kind: str, item: Any, _autogenerate: Any) -> str | Literal[False]:
    """Write columns as the database sees them: a migration must not change when a Python type does."""
    if kind == "type" and isinstance(item, UtcDateTime):
        return "sa.DateTime(timezone=True)"
    if kind == "type" and isinstance(item, Enum) and not item.native_enum:
        return f"sa.String(length={item.length})"
    return False


def run(connection: Connection) -> None:
    is_sqlite = connection.dialect.name == "sqlite"
    if not is_sqlite:
        connection.execute(text(f"SET lock_timeout = '{LOCK_TIMEOUT_SECONDS}s'"))
        connection.execute(text(f"SET statement_timeout = '{STATEMENT_TIMEOUT_SECONDS}s'"))
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": ADVISORY_LOCK})
    # SQLite cannot alter a column: batch mode copies the table.
    context.configure(
        connection=connection, target_metadata=Entity.metadata, render_as_batch=is_sqlite, render_item=render_item, compare_type=True
    )
    with context.begin_transaction():
        context.run_migrations()


def _suspend_foreign_keys(connection: Connection) -> None:
    """Batch mode drops the old table, which would delete what refers to its rows; inside a transaction the setting does nothing."""
    cursor = connection.connection.cursor()
    cursor.execute("PRAGMA foreign_keys=OFF")
    cursor.close()


def main() -> None:
    settings = context.config.attributes.get("settings") or load_settings()
    assert isinstance(settings, Settings)
    engine = create_db_engine(settings)
    try:
        with engine.execution_options(transaction="IMMEDIATE").connect() as connection:
            if connection.dialect.name == "sqlite":
                _suspend_foreign_keys(connection)
            with connection.begin():
                run(connection)
                if connection.dialect.name == "sqlite":
                    broken = connection.exec_driver_sql("PRAGMA foreign_key_check").all()
                    assert not broken, f"the migration leaves rows that refer to nothing: {broken[:5]}"
    finally:
        engine.dispose()


main()
