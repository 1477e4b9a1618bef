"""First run: the one-time token makes exactly one administrator, and nothing else is open before."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor

import pytest
from fastapi import FastAPI
from fixtures.service import BASE_URL
from sqlalchemy import Engine, select
from starlette.testclient import TestClient

from lohan_app.auth.setup import ensure_setup_token, token_path
from lohan_app.db import read_transaction
from lohan_app.entities import AuditEntry, Role, SetupClaim, User
from lohan_app.settings import Settings

ORIGIN = {"Origin": BASE_URL}


PASSWORD = "correct horse battery"


def claim(client: TestClient, token: str, name: str = "ada", password: str = PASSWORD):
    return client.post("/api/v1/setup", json={"token": token, "user_name": name, "password": password}, headers=ORIGIN)


def test_the_token_lies_in_a_file_only_its_owner_can_read(anonymous: TestClient, settings: Settings):
    path = token_path(settings)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(path.read_text()) >= 43
    assert [entry.name for entry in path.parent.iterdir()] == ["setup_token"]


def test_a_restart_keeps_the_token(anonymous: TestClient, settings: Settings, engine: Engine):
    assert ensure_setup_token(settings, engine) == token_path(settings).read_text()


@pytest.mark.parametrize("path", ["/api/v1/runs", "/api/v1/datasets", "/api/v1/system", "/openapi.json", "/docs"])
def test_before_the_set_up_the_api_says_so(anonymous: TestClient, path: str):
    reply = anonymous.get(path)
    assert reply.status_code == 503
    assert reply.json()["type"] == "urn:lohan:problem:setup-required"
    assert "lohan up" in reply.json()["remedy"]


def test_before_the_set_up_a_browser_is_led_there(anonymous: TestClient):
    reply = anonymous.get("/docs", headers={"Accept": "text/html"}, follow_redirects=False)
    assert (reply.status_code, reply.headers["location"]) == (303, "/setup")


def test_nobody_logs_in_before_the_set_up(anonymous: TestClient):
    reply = anonymous.post("/api/v1/login", json={"user_name": "a", "password": "b"}, headers=ORIGIN)
    assert reply.status_code == 503


@pytest.mark.database
def test_the_token_makes_an_administrator_who_is_logged_in(anonymous: TestClient, settings: Settings, engine: Engine):
    reply = claim(anonymous, token_path(settings).read_text())
    assert reply.status_code == 201
    assert reply.json()["user"] | {"id": ""} == {"id": "", "name": "ada", "role": "admin"}
    cookie = reply.headers["set-cookie"]
    assert "HttpOnly" in cookie and "samesite=lax" in cookie.lower() and "Secure" not in cookie
    assert anonymous.get("/api/v1/me").json()["name"] == "ada"
    assert not token_path(settings).exists()
    with read_transaction(engine) as session:
        assert session.scalars(select(AuditEntry.action).order_by(AuditEntry.id)).all() == ["setup", "login"]


@pytest.mark.database
def test_of_many_at_once_one_wins(app: FastAPI, anonymous: TestClient, settings: Settings, engine: Engine):
    token = token_path(settings).read_text()
    clients = [TestClient(app, base_url=BASE_URL, raise_server_exceptions=False) for _ in range(6)]
    with ThreadPoolExecutor(len(clients)) as pool:
        replies = list(pool.map(lambda item: claim(item[1], token, name=f"user{item[0]}"), enumerate(clients)))
    statuses = sorted(reply.status_code for reply in replies)
    assert statuses[0] == 201 and set(statuses[1:]) == {409}
    with read_transaction(engine) as session:
        users = session.scalars(select(User)).all()
        assert [user.role for user in users] == [Role.ADMIN]
        assert session.scalars(select(SetupClaim.user_id)).all() == [users[0].id]


@pytest.mark.database
def test_the_token_is_dead_afterwards(app: FastAPI, anonymous: TestClient, settings: Settings):
    token = token_path(settings).read_text()
    assert claim(anonymous, token).status_code == 201
    stranger = TestClient(app, base_url=BASE_URL)
    assert claim(stranger, token, name="eve").status_code == 409


@pytest.mark.parametrize("token", ["", "wrong", "é" * 20])
def test_a_wrong_token_is_refused(anonymous: TestClient, token: str, engine: Engine):
    assert claim(anonymous, token).status_code == 403
    with read_transaction(engine) as session:
        assert session.scalars(select(User)).all() == []


def test_guessing_tokens_has_to_wait(anonymous: TestClient, settings: Settings):
    statuses = [claim(anonymous, f"guess {number}").status_code for number in range(6)]
    assert statuses == [403] * 5 + [429]
    assert claim(anonymous, token_path(settings).read_text()).status_code == 429


@pytest.mark.parametrize(
    ("name", "password", "place"),
    [
        ("ada", "short", "password"),
        ("ada", "password123", "password"),
        ("abcdefgh", "ABCDEFGH", "password"),
        ("ada", "x" * 257, "password"),
        ("", "correct horse battery", "user_name"),
        ("../etc", "correct horse battery", "user_name"),
        ("bootstrap", "correct horse battery", "user_name"),
    ],
)
def test_a_name_or_password_that_cannot_be_used_names_its_field(anonymous: TestClient, settings: Settings, name, password, place):
    reply = claim(anonymous, token_path(settings).read_text(), name, password)
    assert reply.status_code == 422
    assert reply.json()["place"] == place and reply.json()["remedy"]
    assert token_path(settings).exists()


@pytest.mark.parametrize("headers", [{}, {"Origin": "http://evil.example"}, {"Origin": "null"}, {"Origin": "http://localhost:9999"}])
def test_another_site_cannot_use_the_token(anonymous: TestClient, settings: Settings, headers: dict[str, str]):
    body = {"token": token_path(settings).read_text(), "user_name": "ada", "password": "correct horse battery"}
    assert anonymous.post("/api/v1/setup", json=body, headers=headers).status_code == 403
