"""Databases of every released version are migrated, and the service goes on with what is in them; `tests/engine/test_versions.py` has
the runs by themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from fixtures.machine import BACKENDS, Backends
from fixtures.processes import no_process_left
from fixtures.runs import read_events, read_metrics, read_run
from fixtures.service import BASE_URL
from fixtures.simulated_machine import simulated_machine
from fixtures.versions import Version, versions
from pydantic import SecretStr
from sqlalchemy import Engine, func, inspect, select, table, text, update
from sqlalchemy.engine import make_url
from starlette.testclient import TestClient

from lohan.config import UnsafeFilesystems
from lohan.events import EventType
from lohan_app.db import migrate, read_transaction, write_transaction
from lohan_app.entities import BaseModel, Entity, Run, RunState
from lohan_app.settings import Settings
from lohan_app.worker.reconciler import Reconciler
from lohan_app.worker.run_files import state_directories
from lohan_app.worker.supervisor import Supervisor

PAGES = ("/", "/runs", "/runs?kind=profile", "/datasets", "/models", "/hardware", "/storage", "/settings")
HTML = {"Accept": "text/html"}


@pytest.fixture(params=[pytest.param(version, id=version.name) for version in versions()])
def version(request: pytest.FixtureRequest) -> Version:
    found: Version = request.param
    return found


@pytest.fixture
def settings(version: Version, request: pytest.FixtureRequest, tmp_path: Path) -> Settings:
    """Of an appliance with a released version's database, which this version has migrated."""
    (tmp_path / "models").mkdir()
    servers = {}
    if BACKENDS is Backends.POSTGRES:
        servers["database_url"] = SecretStr(request.getfixturevalue("postgres_url"))
        load_postgres(servers["database_url"].get_secret_value(), version.postgres_dump)
    settings = Settings(
        data_dir=tmp_path / "data", model_dirs=(tmp_path / "models",), devices=("cpu:0",), unsafe_filesystems=UnsafeFilesystems.ALLOW,
        **servers,
    )  # fmt: skip
    settings.make_folders()
    if BACKENDS is Backends.SQLITE:
        version.copy_sqlite(settings.data_dir / "db" / "lohan.sqlite3")
    migrate(settings)
    return settings


def load_postgres(url: str, dump: bytes) -> None:
    """psycopg sends what has no parameters as it is: a whole file of statements."""
    with psycopg.connect(make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)) as connection:
        connection.execute(dump)


@pytest.fixture
def ada(version: Version, anonymous: TestClient) -> TestClient:
    """The version's administrator, logged in with the password of then."""
    body = {"user_name": "ada", "password": version.manifest["passwords"]["ada"]}
    reply = anonymous.post("/api/v1/login", json=body, headers={"Origin": BASE_URL})
    assert reply.status_code == 200, reply.text
    anonymous.headers.update({"Origin": BASE_URL, "X-CSRF-Token": reply.json()["csrf_token"]})
    return anonymous


def get(client: TestClient, path: str, **headers: str) -> Any:
    reply = client.get(f"/api/v1{path}", headers=headers)
    assert reply.status_code == 200, (path, reply.text)
    return reply.json()


def test_the_first_version_is_among_them():
    assert "v0.1" in [version.name for version in versions()]


@pytest.mark.database
def test_a_database_of_a_released_version_is_migrated_whole(version: Version, engine: Engine):
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, Entity.metadata) == []
        there = set(inspect(connection).get_table_names())
        expected = {name: count for name, count in version.manifest["rows"].items() if name in there}
        rows = {name: connection.scalar(select(func.count()).select_from(table(name))) for name in expected}
        if BACKENDS is Backends.SQLITE:
            assert connection.execute(text("PRAGMA integrity_check")).scalar() == "ok"
    assert rows == expected


@pytest.mark.database
def test_the_service_shows_what_a_released_version_has_stored(version: Version, settings: Settings, engine: Engine, ada: TestClient):
    restore_from_trash(settings, engine, ada)
    runs = get(ada, "/runs?limit=100")["items"]
    assert len(runs) == version.manifest["rows"]["runs"]
    assert {run["kind"] for run in runs} == {"train", "export", "chat", "profile"}
    assert {run["state"] for run in runs} == {"draft", "queued", "paused", "succeeded", "failed", "cancelled"}
    steps = 0
    for run in runs:
        assert get(ada, f"/runs/{run['id']}")["name"] == run["name"]
        drawn = get(ada, f"/runs/{run['id']}/curves")
        steps += drawn["total"]
        assert bool(drawn["curves"]["loss"]["mean"]) == (run["kind"] == "train" and run["step"] > 0)
        assert ada.get(f"/runs/{run['id']}", headers=HTML).status_code == 200, run["name"]
    assert steps == version.manifest["rows"]["run_metrics"]
    (dataset,) = get(ada, "/datasets")["items"]
    assert [error["line"] for error in get(ada, f"/datasets/{dataset['id']}/errors")["items"]] == [15, 16]
    assert {model["state"] for model in get(ada, "/base-models")["items"]} == {"ready"}
    for page in PAGES:
        assert ada.get(page, headers=HTML).status_code == 200, page


def restore_from_trash(settings: Settings, engine: Engine, ada: TestClient) -> None:
    with read_transaction(engine) as session:
        (deleted,) = session.scalars(select(Run.id).where(Run.deleted_at.is_not(None)))
    (settings.data_dir / "trash" / deleted).mkdir()
    assert [run["id"] for run in get(ada, "/storage")["trash"]] == [deleted]
    reply = ada.post(f"/api/v1/runs/{deleted}/restore")
    assert (reply.status_code, reply.json()["state"]) == (200, "cancelled")


@pytest.mark.database
def test_keys_and_repeated_requests_of_a_released_version_are_known(version: Version, ada: TestClient):
    ada.cookies.clear()
    key = {"Authorization": f"Bearer {version.manifest['api_key']}"}
    assert get(ada, "/me", **key)["name"] == "ben"
    run = get(ada, f"/runs/{version.manifest['paused']['fp32']['run_id']}", **key)
    body = {name: run[name] for name in ("name", "base_model_id", "dataset_id", "skip_bad_rows")} | run["settings"]
    reply = ada.post("/api/v1/runs", json=body, headers=key | {"Idempotency-Key": "submit-fp32"})
    assert (reply.status_code, reply.headers.get("Idempotent-Replayed")) == (201, "true"), reply.text
    assert reply.json()["id"] == run["id"]


def test_a_paused_run_is_resumed_by_the_service(version: Version, settings: Settings, engine: Engine, ada: TestClient, tmp_path: Path):
    known = version.manifest["paused"]["bf16"]
    run_id, steps = known["run_id"], len(known["losses"])
    # The machine of then had its models elsewhere; where weights lie is for whoever moves them to say.
    with write_transaction(engine) as session:
        session.execute(update(BaseModel).values(root=str(settings.model_dirs[0])))
    (states,) = state_directories(settings, run_id)
    version.copy_run("bf16", job=settings.run_folder(run_id), states=states, model=settings.model_dirs[0] / "tiny")
    # Asked for by an administrator to come first, it would take the only device.
    (waiting,) = get(ada, "/runs?state=queued")["items"]
    for path in (f"{waiting['id']}/cancel", f"{run_id}/resume"):
        assert ada.post(f"/api/v1/runs/{path}").status_code == 200, path
    reconciler = Reconciler(settings, engine, supervisor_command=("/bin/true",), look=simulated_machine)
    reconciler.tick()
    reconciler.close()
    with no_process_left(tmp_path):
        assert Supervisor(settings, run_id).run() == 0
    run = read_run(engine, run_id)
    assert (run.state, run.problem, run.attempt, run.step) == (RunState.SUCCEEDED, None, 2, steps)
    assert [metric.attempt for metric in read_metrics(engine, run_id)] == [1] * known["step"] + [2] * (steps - known["step"])
    started = [event.fields["resumed_step"] for event in read_events(engine, run_id) if event.type == EventType.STARTED]
    assert started == [0, known["step"]]
    assert ada.get(f"/api/v1/runs/{run_id}/download").status_code == 200
