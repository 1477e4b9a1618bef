"""Logging in, sessions, forged requests, API keys."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
from fastapi import FastAPI
from fixtures.service import BASE_URL, Person
from sqlalchemy import Engine, event, select, update
from starlette.testclient import TestClient

from lohan_app.auth import service
from lohan_app.auth.dependencies import SESSION_COOKIE
from lohan_app.auth.passwords import LoginBackoff, PasswordHasher
from lohan_app.auth.schemas import Scope
from lohan_app.db import read_transaction, write_transaction
from lohan_app.entities import ApiKey, AuditEntry, BrowserSession, Role, User
from lohan_app.entities.base import now
from lohan_app.errors import TooManyRequests
from lohan_app.settings import Settings

PASSWORD = "correct horse battery"
ORIGIN = {"Origin": BASE_URL}


@pytest.fixture
def grace(engine: Engine, admin: Person) -> User:
    """A member with a password, in an installation that is set up."""
    return service.create_user(engine, PasswordHasher(), name="Grace", password=PASSWORD, role=Role.MEMBER)


def log_in(client: TestClient, name: str = "Grace", word: str = PASSWORD, **headers: str):
    return client.post("/api/v1/login", json={"user_name": name, "password": word}, headers=ORIGIN | headers)


# ---------------------------------------------------------------- login
@pytest.mark.database
@pytest.mark.parametrize("spelling", ["Grace", "grace", "GRACE"])
def test_a_login_opens_a_session(anonymous: TestClient, grace: User, engine: Engine, spelling: str):
    reply = log_in(anonymous, spelling)
    assert reply.status_code == 200
    assert reply.json()["user"] == {"id": grace.id, "name": "Grace", "role": "member"}
    token = anonymous.cookies[SESSION_COOKIE]
    assert len(token) >= 43
    assert anonymous.get("/api/v1/me").json()["id"] == grace.id
    with read_transaction(engine) as session:
        opened = session.scalars(select(BrowserSession).where(BrowserSession.user_id == grace.id)).one()
    assert token not in (opened.token_hash, opened.csrf_token) and opened.token_hash == service.sha256_hex(token)


def test_every_login_has_a_token_of_its_own(anonymous: TestClient, grace: User):
    tokens = {log_in(anonymous).cookies[SESSION_COOKIE] for _ in range(3)}
    assert len(tokens) == 3


def test_the_cookie_is_secure_over_https(app: FastAPI, grace: User, anonymous: TestClient):
    browser = TestClient(app, base_url="https://localhost:8000")
    reply = browser.post("/api/v1/login", json={"user_name": "Grace", "password": PASSWORD}, headers={"Origin": "https://localhost:8000"})
    cookie = reply.headers["set-cookie"]
    assert "Secure" in cookie and "HttpOnly" in cookie and "samesite=lax" in cookie.lower()


@pytest.mark.parametrize(("name", "word"), [("Grace", "wrong"), ("nobody", PASSWORD), ("", ""), ("Grace", "x" * 1000), ("bootstrap", "!")])
def test_a_wrong_login_does_not_say_which_part(anonymous: TestClient, grace: User, engine: Engine, name: str, word: str):
    service.bootstrap_identity(engine)
    reply = log_in(anonymous, name, word)
    assert (reply.status_code, reply.json()["detail"]) == (401, "user name or password is wrong")
    assert SESSION_COOKIE not in anonymous.cookies
    with read_transaction(engine) as session:
        assert session.scalars(select(AuditEntry.action).where(AuditEntry.action == "login.failed")).all() == ["login.failed"]


def test_an_unknown_user_costs_a_hash_too(anonymous: TestClient, grace: User, app: FastAPI, monkeypatch):
    hasher = app.state.context.passwords
    verified: list[str] = []
    original = hasher._hash.verify
    monkeypatch.setattr(hasher._hash, "verify", lambda password, stored: verified.append(stored) or original(password, stored))
    log_in(anonymous, "nobody")
    log_in(anonymous, "Grace", "wrong")
    assert len(verified) == 2 and all(stored.startswith("$argon2id$") for stored in verified)


def test_the_password_is_stored_as_an_argon2_hash(grace: User):
    assert grace.password_hash.startswith("$argon2id$") and PASSWORD not in grace.password_hash


# ---------------------------------------------------------------- back-off
def test_guessing_has_to_wait_and_says_how_long(anonymous: TestClient, grace: User):
    assert [log_in(anonymous, word=f"guess {number}").status_code for number in range(5)] == [401] * 5
    blocked = log_in(anonymous)
    assert blocked.status_code == 429
    assert int(blocked.headers["retry-after"]) >= 1 and "s." in blocked.json()["remedy"]


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def is_blocked(backoff: LoginBackoff, *keys: str) -> bool:
    try:
        backoff.check(*keys)
    except TooManyRequests:
        return True
    return False


def test_the_wait_doubles_up_to_a_minute_and_nobody_is_locked_out_for_good():
    clock = Clock()
    backoff = LoginBackoff(clock)
    waits = []
    for _ in range(20):
        backoff.failed("account")
        start = clock.seconds
        while is_blocked(backoff, "account"):
            clock.seconds += 0.5
        waits.append(clock.seconds - start)
    assert waits[:10] == [0, 0, 0, 0, 1, 2, 4, 8, 16, 32] and set(waits[10:]) == {60}


def test_account_and_address_are_counted_apart_and_success_forgives():
    backoff = LoginBackoff(Clock())
    for _ in range(6):
        backoff.failed("account:ada", "address:1")
    assert is_blocked(backoff, "account:ada", "address:2")
    assert is_blocked(backoff, "account:bob", "address:1")
    assert not is_blocked(backoff, "account:bob", "address:2")
    backoff.succeeded("account:ada", "address:1")
    assert not is_blocked(backoff, "account:ada", "address:1")


def test_a_flood_of_made_up_accounts_does_not_grow_the_process(monkeypatch):
    monkeypatch.setattr(LoginBackoff, "REMEMBERED", 100)
    backoff = LoginBackoff(Clock())
    for number in range(1000):
        backoff.failed(f"account:{number}")
    assert len(backoff._failures) == 100


# ---------------------------------------------------------------- sessions
@pytest.mark.database
def test_a_logout_ends_the_session_on_the_server(app: FastAPI, owner: Person, admin: Person):
    thief = TestClient(app, base_url=BASE_URL, cookies={SESSION_COOKIE: owner.client.cookies[SESSION_COOKIE]})
    assert thief.get("/api/v1/me").status_code == 200
    assert owner.client.post("/api/v1/logout").status_code == 204
    assert thief.get("/api/v1/me").status_code == 401


@pytest.mark.database
def test_an_idle_session_ends(owner: Person, admin: Person, settings: Settings, engine: Engine):
    def seen(hours: float) -> None:
        with write_transaction(engine) as session:
            before = now() - timedelta(hours=hours)
            session.execute(update(BrowserSession).where(BrowserSession.user_id == owner.user.id).values(last_seen_at=before))

    seen(settings.session_idle_hours - 0.1)
    assert owner.client.get("/api/v1/me").status_code == 200
    # That request counted as being there.
    with read_transaction(engine) as session:
        opened = session.scalars(select(BrowserSession).where(BrowserSession.user_id == owner.user.id)).one()
    assert now() - opened.last_seen_at < timedelta(minutes=5)
    seen(settings.session_idle_hours + 0.1)
    assert owner.client.get("/api/v1/me").status_code == 401
    with read_transaction(engine) as session:
        assert session.scalars(select(BrowserSession).where(BrowserSession.user_id == owner.user.id)).all() == []


def writes_of(engine: Engine, action: Callable[[], object]) -> list[str]:
    statements: list[str] = []

    def note(_connection, _cursor, statement, *_rest) -> None:
        statements.append(statement)

    event.listen(engine, "before_cursor_execute", note)
    try:
        action()
    finally:
        event.remove(engine, "before_cursor_execute", note)
    return [statement for statement in statements if statement.startswith(("UPDATE", "INSERT", "DELETE"))]


@pytest.mark.database
def test_being_seen_is_written_once_a_minute(owner: Person, app: FastAPI, engine: Engine):
    web_engine = app.state.context.engine
    assert writes_of(web_engine, lambda: [owner.client.get("/api/v1/me") for _ in range(5)]) == []
    key = owner.key(Scope.READ)
    stranger = TestClient(app, base_url=BASE_URL)
    writes = writes_of(web_engine, lambda: [stranger.get("/api/v1/runs", headers=key) for _ in range(5)])
    assert len(writes) == 1 and "api_keys" in writes[0]


@pytest.mark.database
def test_sessions_are_listed_and_revoked(owner: Person, mate: Person, engine: Engine):
    other = service.open_session(engine, owner.user, address="x", user_agent="Other browser")
    listed = owner.client.get("/api/v1/sessions").json()
    assert {item["id"]: item["is_current"] for item in listed} == {owner.identity.session_id: True, other.session.id: False}
    assert mate.client.delete(f"/api/v1/sessions/{other.session.id}").status_code == 404
    assert owner.client.delete(f"/api/v1/sessions/{other.session.id}").status_code == 204
    assert [item["id"] for item in owner.client.get("/api/v1/sessions").json()] == [owner.identity.session_id]


# ---------------------------------------------------------------- forged requests
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 201),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": ""}, 403),
        ({"Origin": "http://localhost:9000"}, 403),
        ({"Origin": "http://localhost:8000.evil.example"}, 403),
        ({"Origin": "http://localhost:no"}, 403),
        ({"Origin": "", "Referer": f"{BASE_URL}/settings"}, 201),
        ({"Origin": "", "Referer": "http://evil.example/"}, 403),
        ({"Origin": "https://localhost:8000"}, 201),  # a proxy in front of us ends TLS
        ({"X-CSRF-Token": ""}, 403),
        ({"X-CSRF-Token": "wrong"}, 403),
        ({"X-CSRF-Token": "é".encode()}, 403),
    ],
)
def test_a_change_by_cookie_needs_our_origin_and_our_token(owner: Person, headers: dict[str, str | bytes], status: int):
    if headers.get("Origin") == "":
        del owner.client.headers["Origin"]
        headers = {name: value for name, value in headers.items() if name != "Origin"}
    reply = owner.client.post("/api/v1/api-keys", json={"name": "k"}, headers=headers)
    assert reply.status_code == status, reply.text


def test_another_sessions_token_does_not_do(owner: Person, mate: Person):
    headers = {"X-CSRF-Token": mate.identity.csrf_token or ""}
    assert owner.client.post("/api/v1/api-keys", json={"name": "k"}, headers=headers).status_code == 403


def test_a_form_carries_the_token_in_a_field(owner: Person):
    fields = {"csrf_token": owner.identity.csrf_token or ""}
    without_header = {"X-CSRF-Token": ""}
    assert owner.client.post("/api/v1/logout", data={"csrf_token": "wrong"}, headers=without_header).status_code == 403
    assert owner.client.post("/api/v1/logout", data=fields, headers=without_header).status_code == 204


def test_a_key_needs_neither(anonymous: TestClient, owner: Person):
    reply = anonymous.post("/api/v1/plans", json={"base_model_id": "x"}, headers=owner.key(Scope.RUNS) | {"Origin": "http://evil.example"})
    assert reply.status_code == 404  # let through to the question itself


# ---------------------------------------------------------------- keys
@pytest.mark.database
def test_a_key_is_shown_once_and_stored_as_a_hash(owner: Person, anonymous: TestClient, engine: Engine):
    reply = owner.client.post("/api/v1/api-keys", json={"name": "laptop", "scopes": ["read"]})
    made = reply.json()
    assert reply.status_code == 201 and made["key"].startswith(f"lohan_{made['api_key']['id'].removeprefix('key_')}_")
    assert anonymous.get("/api/v1/me", headers={"Authorization": f"Bearer {made['key']}"}).json()["name"] == "owner"
    listed = owner.client.get("/api/v1/api-keys").json()
    assert [(key["name"], key["scopes"]) for key in listed] == [("laptop", ["read"])] and "key" not in listed[0]
    assert listed[0]["last_used_at"] is not None
    with read_transaction(engine) as session:
        stored = session.scalars(select(ApiKey)).one()
    assert made["key"].rpartition("_")[2] not in stored.secret_hash
    assert owner.client.delete(f"/api/v1/api-keys/{stored.id}").status_code == 204
    assert anonymous.get("/api/v1/me", headers={"Authorization": f"Bearer {made['key']}"}).status_code == 401
    assert owner.client.get("/api/v1/api-keys").json() == []
    assert owner.client.delete(f"/api/v1/api-keys/{stored.id}").status_code == 404


@pytest.mark.database
def test_a_key_ends_when_it_said(owner: Person, anonymous: TestClient, engine: Engine):
    body = {"name": "k", "expires_at": (now() + timedelta(hours=1)).isoformat()}
    made = owner.client.post("/api/v1/api-keys", json=body).json()
    header = {"Authorization": f"Bearer {made['key']}"}
    assert anonymous.get("/api/v1/me", headers=header).status_code == 200
    with write_transaction(engine) as session:
        session.execute(update(ApiKey).values(expires_at=now() - timedelta(seconds=1)))
    assert anonymous.get("/api/v1/me", headers=header).status_code == 401
    past = {"name": "k", "expires_at": "2020-01-01T00:00:00Z"}
    assert owner.client.post("/api/v1/api-keys", json=past).json()["place"] == "expires_at"
    assert owner.client.post("/api/v1/api-keys", json=past | {"expires_at": "2090-01-01T00:00:00"}).status_code == 422


@pytest.mark.parametrize("change", ["secret", "id", "empty", "basic", "spaces", "cookie too"])
def test_what_is_no_key_is_refused_even_beside_a_cookie(owner: Person, app: FastAPI, anonymous: TestClient, change: str):
    key = owner.key(Scope.READ)["Authorization"]
    spoiled = {
        "secret": key[:-1] + ("A" if key[-1] != "A" else "B"),
        "id": key.replace("lohan_0", "lohan_1", 1),
        "empty": "Bearer ",
        "basic": "Basic " + key.partition(" ")[2],
        "spaces": key + " x",
        "cookie too": "Bearer lohan_x_y",
    }[change]
    client = owner.client if change == "cookie too" else anonymous
    reply = client.get("/api/v1/me", headers={"Authorization": spoiled})
    assert (reply.status_code, reply.headers["www-authenticate"]) == (401, "Bearer")


def test_a_key_in_the_address_is_not_read(anonymous: TestClient, owner: Person):
    key = owner.key(Scope.READ)["Authorization"].partition(" ")[2]
    assert anonymous.get("/api/v1/runs", params={"api_key": key, "token": key}).status_code in (401, 503)


def test_nobody_grants_more_than_they_hold(owner: Person, admin: Person, anonymous: TestClient):
    assert owner.client.post("/api/v1/api-keys", json={"name": "k", "scopes": ["admin"]}).status_code == 403
    assert admin.client.post("/api/v1/api-keys", json={"name": "k", "scopes": ["admin"]}).status_code == 201
    for body in (
        {"name": "k", "scopes": []},
        {"name": "k", "scopes": ["root"]},
        {"name": ""},
        {"name": "\u202e"},
        {"name": "k", "user_id": "x"},
    ):
        assert owner.client.post("/api/v1/api-keys", json=body).status_code == 422, body


def test_a_leaked_key_makes_no_others(owner: Person, admin: Person, anonymous: TestClient):
    for path in ("/api/v1/api-keys", "/api/v1/sessions"):
        assert anonymous.get(path, headers=owner.key()).status_code == 403
        assert anonymous.get(path, headers=admin.key(Scope.ADMIN)).status_code == 200


@pytest.mark.database
def test_a_key_of_an_administrator_made_a_member_loses_its_power(admin: Person, anonymous: TestClient, engine: Engine):
    key = admin.key(Scope.ADMIN, Scope.READ)
    assert anonymous.post("/api/v1/base-models", json={"source": "folder", "root": "x", "name": "y"}, headers=key).status_code == 422
    with write_transaction(engine) as session:
        session.execute(update(User).where(User.id == admin.user.id).values(role=Role.MEMBER))
    assert anonymous.post("/api/v1/base-models", json={"source": "folder", "root": "x", "name": "y"}, headers=key).status_code == 403
    assert anonymous.get("/api/v1/runs", headers=key).status_code == 200


def test_pages_do_not_take_keys(anonymous: TestClient, owner: Person, app: FastAPI):
    reply = anonymous.get("/docs", headers=owner.key())
    assert reply.status_code == 403 and "/api/v1" in reply.json()["remedy"]


# ---------------------------------------------------------------- everything is behind the door
OPEN = {"/healthz", "/readyz", "/setup", "/login", "/api/v1/setup", "/api/v1/login", "/static"}


def test_no_address_but_the_open_ones_answers_a_stranger(app: FastAPI, admin: Person, anonymous: TestClient):
    checked = 0
    for path, methods in addresses(app):
        if path in OPEN:
            continue
        for method in methods:
            reply = anonymous.request(method, path.replace("{", "").replace("}", ""), headers=ORIGIN, follow_redirects=False)
            assert reply.status_code == 401, f"{method} {path} gives {reply.status_code}"
            checked += 1
    assert checked > 30


def addresses(app: FastAPI) -> list[tuple[str, set[str]]]:
    document = app.openapi()["paths"]
    found = [(path, {method.upper() for method in operations}) for path, operations in document.items()]
    hidden = ["/openapi.json", "/docs", "/", "/runs", "/datasets", "/models", "/hardware", "/settings", "/runs/new", "/logout"]
    return found + [(path, {"POST" if path == "/logout" else "GET"}) for path in hidden]
