"""Health, readiness, what the service says of itself and of the machine, its API document."""

from __future__ import annotations

import pytest
from alembic import command
from fixtures.service import Person
from sqlalchemy import make_url
from starlette.testclient import TestClient

from lohan_app.db import alembic_config
from lohan_app.hardware.service import FRESH_SECONDS, HardwareCache
from lohan_app.main import create_app
from lohan_app.settings import Settings


def test_the_process_answers(anonymous: TestClient):
    assert anonymous.get("/healthz").json() == {"status": "ok"}


@pytest.mark.database
def test_ready_once_the_database_is_migrated_whatever_the_broker_does(anonymous: TestClient):
    reply = anonymous.get("/readyz")
    state = reply.json()
    assert (reply.status_code, state["ready"], state["database"], state["migrations"]) == (200, True, "ok", "ok")
    assert "broker.sock" in state["broker"]


@pytest.mark.database
def test_not_ready_before_the_migrations(anonymous: TestClient, settings: Settings):
    command.downgrade(alembic_config(settings), "base")
    reply = anonymous.get("/readyz")
    assert (reply.status_code, reply.json()["ready"]) == (503, False)
    assert "lohan migrate" in reply.json()["migrations"]
    assert anonymous.get("/healthz").status_code == 200
    assert anonymous.get("/api/v1/runs").status_code == 503


@pytest.mark.database(only="postgres")
def test_the_process_lives_while_the_database_is_away(tmp_path, postgres_url: str):
    away = make_url(postgres_url).set(database="lohan_test_is_not_there").render_as_string(hide_password=False)
    with TestClient(create_app(Settings(data_dir=tmp_path, database_url=away)), base_url="http://localhost:8000") as client:
        assert client.get("/healthz").status_code == 200
        reply = client.get("/readyz")
        assert (reply.status_code, reply.json()["migrations"]) == (503, "unknown")
        assert "lohan_test_is_not_there" in reply.json()["database"]
        assert client.get("/api/v1/runs").status_code == 503


@pytest.mark.broker
def test_a_broker_that_answers_is_ok(owner: Person):
    assert owner.client.get("/readyz").json()["broker"] == "ok"


@pytest.mark.database
def test_the_service_says_what_it_is_made_of(owner: Person, settings: Settings):
    found = owner.client.get("/api/v1/system").json()
    assert found["database"].startswith(("SQLite 3.", "PostgreSQL 1"))
    assert (found["database_state"], found["migrations_state"], found["workers"]) == ("ok", "ok", [])
    assert found["upload_limit_bytes"] == settings.upload_limit_bytes
    assert any("LOHAN_DEVICES" in choice for choice in found["choices"])


def test_the_machine_is_shown_as_it_is(owner: Person, settings: Settings):
    found = owner.client.get("/api/v1/hardware").json()
    assert found["facts"]["cpu"]["cores"] >= 1 and found["facts"]["ram"]["total_bytes"] > 0
    assert [directory["path"] for directory in found["facts"]["state_directories"]] == [str(path) for path in settings.state_folders]
    assert "cpu:0" in found["choices"][0]


def test_the_machine_is_asked_again_only_after_a_while(settings: Settings):
    seconds = 0.0
    cache = HardwareCache(settings, clock=lambda: seconds)
    first = cache.facts()
    seconds = FRESH_SECONDS - 0.1
    assert cache.facts() is first
    seconds = FRESH_SECONDS + 0.1
    assert cache.facts() is not first


def test_the_document_describes_every_address_and_only_the_api(owner: Person):
    paths = owner.client.get("/openapi.json").json()["paths"]
    assert all(path.startswith("/api/v1/") for path in paths)
    assert {"/api/v1/runs/{run_id}/events", "/api/v1/datasets", "/api/v1/plans", "/api/v1/base-models/available"} <= paths.keys()
    upload = paths["/api/v1/datasets"]["post"]["requestBody"]["content"]
    assert {"multipart/form-data", "application/jsonl"} == upload.keys()
    # `Depends` and the context are no parameters of a request.
    names = {parameter["name"] for path in paths.values() for method in path.values() for parameter in method.get("parameters", [])}
    assert not names & {"identity", "context", "request", "response", "args", "kwargs"}
