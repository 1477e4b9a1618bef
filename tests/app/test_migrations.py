"""Migrations: the schema they make is the entities' own, on both databases, whoever runs them at once."""

from __future__ import annotations

import subprocess
import sys

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import inspect, text
from sqlalchemy.exc import OperationalError

from lohan_app.db import alembic_config, create_db_engine, migrate
from lohan_app.entities import Entity
from lohan_app.settings import Settings


@pytest.mark.database
def test_migrations_make_what_the_entities_say(settings: Settings):
    engine = create_db_engine(settings)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, Entity.metadata) == []
        partial = [index for index in inspect(connection).get_indexes("base_models") if index["name"] == "uq_base_models_name"]
        assert partial[0]["unique"]
        conditions = [str(value).strip("()") for name, value in partial[0]["dialect_options"].items() if name.endswith("_where")]
        assert conditions == ["deleted_at IS NULL"]
    engine.dispose()


@pytest.mark.database
def test_migrations_can_be_undone_and_done_again(settings: Settings):
    command.downgrade(alembic_config(settings), "base")
    engine = create_db_engine(settings)
    assert set(inspect(engine).get_table_names()) == {"alembic_version"}
    migrate(settings)
    migrate(settings)
    assert set(Entity.metadata.tables) <= set(inspect(engine).get_table_names())
    engine.dispose()


@pytest.mark.database
def test_processes_that_migrate_at_once_take_turns(settings: Settings):
    command.downgrade(alembic_config(settings), "base")
    environment = {"LOHAN_DATA_DIR": str(settings.data_dir), "PATH": ""}
    if settings.database_url is not None:
        environment["LOHAN_DATABASE_URL"] = settings.database_url.get_secret_value()
    program = "from lohan_app.db import migrate; from lohan_app.settings import load_settings; migrate(load_settings())"
    children = [
        subprocess.Popen([sys.executable, "-P", "-c", program], env=environment, stderr=subprocess.PIPE, text=True) for _ in range(3)
    ]
    outcomes = [(child.communicate()[1], child.returncode) for child in children]
    assert [code for _, code in outcomes] == [0, 0, 0], outcomes
    engine = create_db_engine(settings)
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM alembic_version")) == 1
    engine.dispose()


@pytest.mark.database(only="postgres")
def test_a_migration_gives_up_on_a_table_that_is_held(settings: Settings):
    engine = create_db_engine(settings)
    try:
        with engine.connect() as holder:
            holder.execute(text("LOCK TABLE run_metrics IN ACCESS SHARE MODE"))
            with pytest.raises(OperationalError, match="lock timeout"):
                command.downgrade(alembic_config(settings), "base")
        assert "run_metrics" in inspect(engine).get_table_names()
    finally:
        engine.dispose()


def test_revisions_are_dated_and_in_one_line(settings: Settings):
    scripts = ScriptDirectory.from_config(alembic_config(settings))
    revisions = list(scripts.walk_revisions())
    assert len(scripts.get_heads()) == 1
    for revision in revisions:
        name = revision.path.rpartition("/")[2]
        assert name[:5].removesuffix("-").isdigit() and name[10] == "_" and revision.revision in name
