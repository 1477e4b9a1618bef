"""The two databases as they are opened: safe SQLite, one writer at a time, waits that end."""

from __future__ import annotations

import pytest
from fixtures.things import ready_model
from pysqlite3 import dbapi2
from sqlalchemy import Engine, select, text
from sqlalchemy.exc import OperationalError

from lohan_app import db
from lohan_app.db import create_db_engine, read_transaction, sqlite_is_safe, write_transaction
from lohan_app.entities import BaseModel
from lohan_app.settings import Settings


def test_every_sqlite_connection_syncs_waits_and_keeps_foreign_keys(engine: Engine):
    wanted = {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "busy_timeout": db.BUSY_TIMEOUT_SECONDS * 1000}
    with engine.connect() as one, engine.connect() as other:
        for connection in (one, other):
            assert {name: connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in wanted} == wanted
        assert sqlite_is_safe(tuple(int(part) for part in one.exec_driver_sql("SELECT sqlite_version()").scalar_one().split(".")))


def test_a_write_transaction_takes_the_lock_at_once_and_readers_go_on(engine: Engine, settings: Settings):
    ready_model(settings, engine)
    with write_transaction(engine) as session:
        assert session.scalar(text("SELECT 1")) == 1  # has only read; its lock is held all the same
        other = dbapi2.connect(str(settings.data_dir / "db" / "lohan.sqlite3"), timeout=0, isolation_level=None)
        with pytest.raises(dbapi2.OperationalError, match="locked"):
            other.execute("BEGIN IMMEDIATE")
        assert other.execute("SELECT count(*) FROM base_models").fetchone() == (1,)
        other.close()
    with write_transaction(engine) as session:
        assert session.scalar(text("SELECT 1")) == 1


@pytest.mark.database(only="postgres")
class TestPostgresql:
    def test_every_connection_has_its_time_limits_also_after_a_rollback(self, engine: Engine):
        wanted = {
            "statement_timeout": f"{db.STATEMENT_TIMEOUT_SECONDS // 60}min",
            "lock_timeout": f"{db.LOCK_TIMEOUT_SECONDS}s",
            "idle_in_transaction_session_timeout": f"{db.IDLE_TRANSACTION_TIMEOUT_SECONDS // 60}min",
        }
        for _ in range(2):
            with engine.connect() as connection:
                assert {name: connection.scalar(text(f"SHOW {name}")) for name in wanted} == wanted
                connection.rollback()

    def test_a_statement_that_never_ends_is_ended(self, settings: Settings, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(db, "STATEMENT_TIMEOUT_SECONDS", 1)
        engine = create_db_engine(settings)
        with read_transaction(engine) as session, pytest.raises(OperationalError, match="statement timeout"):
            session.execute(text("SELECT pg_sleep(600)"))
        engine.dispose()

    def test_a_row_that_is_held_is_not_waited_for_without_end(self, settings: Settings, engine: Engine, monkeypatch: pytest.MonkeyPatch):
        model = ready_model(settings, engine)
        monkeypatch.setattr(db, "LOCK_TIMEOUT_SECONDS", 1)
        impatient = create_db_engine(settings)
        query = select(BaseModel.id).where(BaseModel.id == model.id).with_for_update()
        with write_transaction(engine) as holder:
            assert holder.scalar(query) == model.id
            with pytest.raises(OperationalError, match="lock timeout"), write_transaction(impatient) as session:
                session.scalar(query)
        with write_transaction(impatient) as session:
            assert session.scalar(query) == model.id
        impatient.dispose()


@pytest.mark.database
def test_what_fails_in_a_write_transaction_leaves_nothing(engine: Engine, settings: Settings):
    model = ready_model(settings, engine)
    with pytest.raises(RuntimeError, match="half way"), write_transaction(engine) as session:
        changed = session.get(BaseModel, model.id)
        assert changed is not None
        changed.name = "changed"
        session.flush()
        raise RuntimeError("half way")
    with read_transaction(engine) as session:
        assert session.scalar(select(BaseModel.name).where(BaseModel.id == model.id)) == model.name
