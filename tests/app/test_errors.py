"""How errors look: problem+json for programs, a page for people; and what every reply carries."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from urllib.parse import quote

import pytest
from fastapi import APIRouter, FastAPI
from fixtures.service import BASE_URL, Person
from fixtures.things import ready_model
from fixtures.web_server import serving
from sqlalchemy import Engine
from starlette.testclient import TestClient

from lohan.errors import CapacityError, ConfigError, DataError, EngineError, LohanError, ModelError, StorageError
from lohan_app import db
from lohan_app.auth.schemas import Scope
from lohan_app.errors import Conflict, NotFound, Problem, problem_of_error, still_needed
from lohan_app.middleware import DEFAULT_BODY_LIMIT_BYTES, SECURITY_HEADERS, host_is_allowed, own_host_names
from lohan_app.settings import Settings
from lohan_app.templating import static_url

HTML = {"Accept": "text/html,application/xhtml+xml"}


# ---------------------------------------------------------------- statuses
@pytest.mark.parametrize(
    ("error", "status", "slug"),
    [
        (ConfigError("m"), 422, "config-error"),
        (DataError("m"), 422, "data-error"),
        (ModelError("m"), 422, "model-error"),
        (CapacityError("m", need_bytes=2, have_bytes=1), 409, "capacity-error"),
        (StorageError("m", errno=28), 507, "storage-error"),
        (StorageError("m", errno=5), 500, "storage-error"),
        (EngineError("m"), 500, "engine-error"),
        (NotFound("m"), 404, "not-found"),
        (Conflict("m"), 409, "conflict"),
    ],
)
def test_every_error_knows_its_status(error: LohanError, status: int, slug: str):
    error.place, error.remedy = "p", "r"
    problem = problem_of_error(error)
    assert (problem.status, problem.type) == (status, f"urn:lohan:problem:{slug}")
    body = problem.to_dict()
    assert (body["detail"], body["place"], body["remedy"]) == ("m", "p", "r") and body["title"]


def test_what_runs_still_need_names_the_first_few_of_them():
    one, many = still_needed("model", ["a"], place="id"), still_needed("dataset", list("abcdefg"), place="id")
    assert (one.message, one.status, one.place) == ("1 unfinished run of this model: a", 409, "id")
    assert many.message == "7 unfinished runs of this dataset: a, b, c, d, e"


# ---------------------------------------------------------------- over the wire
@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/api/v1/nothing", 404),
        ("PATCH", "/api/v1/runs", 405),
        ("GET", "/api/v1/runs?limit=0", 422),
        ("GET", "/api/v1/runs?limit=x", 422),
    ],
)
def test_the_frameworks_errors_are_problems_too(owner: Person, method: str, path: str, status: int):
    reply = owner.client.request(method, path)
    assert (reply.status_code, reply.headers["content-type"]) == (status, "application/problem+json")
    assert {"type", "title", "status", "detail", "place"} <= reply.json().keys()
    assert reply.json()["remedy"]


HOSTILE_JSON = {
    "cut": (b"{", 422), "deep": (b"[" * 100_000, 400), "long number": (b'{"a": ' + b"9" * 5000 + b"}", 400), "no UTF-8": (b"\xff", 400),
    "empty": (b"", 422), "null": (b"null", 422), "array": (b"[]", 422), "surrogate": (b'"\\ud800"', 422),
}  # fmt: skip


@pytest.mark.parametrize(("body", "status"), HOSTILE_JSON.values(), ids=HOSTILE_JSON.keys())
def test_hostile_json_is_refused_and_never_a_crash(owner: Person, body: bytes, status: int):
    reply = owner.client.post("/api/v1/runs", content=body, headers={"Content-Type": "application/json"})
    assert reply.status_code == status, reply.text
    assert reply.json()["status"] == status


@pytest.mark.database
def test_a_lone_surrogate_is_refused_and_can_be_shown(owner: Person):
    body = b'{"name": "a\\ud800", "base_model_id": "\\ud800", "dataset_id": "d", "training": {"seed": "\\ud800"}}'
    reply = owner.client.post("/api/v1/runs", content=body, headers={"Content-Type": "application/json"})
    assert reply.status_code == 422
    assert {fault["field"] for fault in reply.json()["errors"]} == {"base_model_id", "name", "training.seed"}
    body = b'{"base_model_id": "\\ud800"}'
    assert owner.client.post("/api/v1/plans", content=body, headers={"Content-Type": "application/json"}).status_code in (404, 422)


@pytest.mark.database
@pytest.mark.parametrize("identifier", ["x\x00y", "\u0000", "%00", "..%2F..", "'; DROP TABLE runs; --", "é", "a" * 5000])
def test_hostile_identifiers_are_not_found(owner: Person, identifier: str):
    for kind in ("runs", "datasets", "base-models"):
        reply = owner.client.get(f"/api/v1/{kind}/{quote(identifier, safe='%')}")
        assert reply.status_code in (404, 422), (kind, reply.status_code)


@pytest.mark.database
def test_hostile_identifiers_in_a_body_and_in_a_query_are_refused(owner: Person, settings: Settings, engine: Engine):
    model = ready_model(settings, engine)
    for body in ({"base_model_id": "a\x00b"}, {"base_model_id": model.id, "dataset_id": "a\x00b"}, {"base_model_id": "\ud800"}):
        reply = owner.client.post("/api/v1/plans", content=json.dumps(body), headers={"Content-Type": "application/json"})
        assert reply.status_code in (404, 422), body
    assert owner.client.get("/api/v1/runs", params={"after": "a\x00b"}).status_code in (200, 422)


@pytest.mark.database
@pytest.mark.parametrize("name", ["a\x00b", "\x00"])
def test_a_hostile_user_name_is_nobody(anonymous: TestClient, admin: Person, name: str):
    reply = anonymous.post("/api/v1/login", json={"user_name": name, "password": "x"}, headers={"Origin": BASE_URL})
    assert reply.status_code == 401


def test_a_secret_is_not_echoed(anonymous: TestClient):
    body = {"token": ["s3cret"], "user_name": "a", "password": {"p4ss": "w0rd"}, "other": 1}
    reply = anonymous.post("/api/v1/setup", json=body, headers={"Origin": BASE_URL})
    assert reply.status_code == 422
    assert not any(word in reply.text for word in ("s3cret", "p4ss", "w0rd"))


def broken() -> None:
    raise RuntimeError("secret detail")


@pytest.fixture
def broken_app(app: FastAPI) -> FastAPI:
    router = APIRouter()
    router.get("/api/v1/broken")(broken)
    router.get("/broken")(broken)
    app.include_router(router)
    return app


def test_an_unforeseen_error_tells_nothing_it_should_not(broken_app: FastAPI, anonymous: TestClient):
    reply = anonymous.get("/api/v1/broken")
    assert (reply.status_code, reply.json()["type"]) == (500, "urn:lohan:problem:internal")
    assert "secret" not in reply.text and "RuntimeError" in reply.json()["detail"]
    assert SECURITY_HEADERS.items() <= dict(reply.headers).items()


def test_a_page_shows_the_error_to_people(broken_app: FastAPI, anonymous: TestClient):
    shown: list[Problem] = []
    original = broken_app.state.error_page
    broken_app.state.error_page = lambda request, problem: shown.append(problem) or original(request, problem)
    for path, status in (("/broken", 500), ("/nothing", 404)):
        reply = anonymous.get(path, headers=HTML)
        assert (reply.status_code, reply.headers["content-type"]) == (status, "text/html; charset=utf-8")
        assert SECURITY_HEADERS.items() <= dict(reply.headers).items()
    assert [problem.status for problem in shown] == [500, 404]


def test_a_stranger_is_led_to_the_login_and_back(anonymous: TestClient, admin: Person):
    page = anonymous.get("/docs?a=1", headers=HTML, follow_redirects=False)
    assert (page.status_code, page.headers["location"]) == (303, "/login?next=%2Fdocs%3Fa%3D1")
    fragment = anonymous.get("/docs", headers={"HX-Request": "true"}, follow_redirects=False)
    assert (fragment.status_code, fragment.headers["hx-redirect"]) == (401, "/login?next=%2Fdocs")
    assert anonymous.get("/docs", follow_redirects=False).json()["type"] == "urn:lohan:problem:authentication-required"


LOCKING_PROGRAM = """
import sys
from pysqlite3 import dbapi2
connection = dbapi2.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN IMMEDIATE")
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_database_that_stays_locked_is_503_and_not_500(
    anonymous: TestClient, app: FastAPI, settings: Settings, monkeypatch, admin: Person
):
    monkeypatch.setattr(db, "BUSY_TIMEOUT_SECONDS", 0.2)
    app.state.context.engine = db.create_db_engine(settings)
    key = admin.key(Scope.READ)
    program = [sys.executable, "-c", LOCKING_PROGRAM, str(settings.data_dir / "db" / "lohan.sqlite3")]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as locker:
        assert locker.stdout is not None and locker.stdout.readline() == "locked\n"
        body = {"user_name": "nobody", "password": "wrong"}
        reply = anonymous.post("/api/v1/login", json=body, headers={"Origin": BASE_URL})
        assert (reply.status_code, reply.json()["type"], reply.headers["retry-after"]) == (503, "urn:lohan:problem:unavailable", "5")
        # Reading goes on, although this first use of the key cannot be noted.
        assert anonymous.get("/api/v1/runs", headers=key).status_code == 200
        locker.communicate("")
    assert anonymous.post("/api/v1/login", json=body, headers={"Origin": BASE_URL}).status_code == 401


# ---------------------------------------------------------------- every reply
@pytest.mark.parametrize("path", ["/healthz", "/api/v1/runs", "/api/v1/nothing", "/login", "/static/nothing.js", "/docs"])
def test_every_reply_has_the_security_headers(anonymous: TestClient, path: str):
    headers = anonymous.get(path, follow_redirects=False).headers
    assert SECURITY_HEADERS.items() <= dict(headers).items()
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["cache-control"]


def test_static_files_are_kept_by_their_digest(anonymous: TestClient):
    address = static_url("app.js")
    assert anonymous.get(address).headers["cache-control"] == "public, max-age=31536000, immutable"
    assert anonymous.get(address.partition("?")[0]).headers["cache-control"] == "no-cache"
    assert anonymous.get("/static/../templates/base.html").status_code == 404


NAMES = own_host_names() | {"box.lab"}


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("localhost", True), ("localhost:8000", True), ("LOCALHOST.", True), ("127.0.0.1:8000", True), ("[::1]:8000", True),
        ("192.168.1.7", True), ("box.lab", True), ("BOX.lab:443", True), (socket.gethostname(), True),
        ("evil.example", False), ("localhost.evil.example", False), ("a/?x=", False), ("localhost@evil", False), ("", False),
        ("2130706433", False), ("0x7f.1", False), ("localhost:8000:1", False), ("local host", False), ("[::1", False),
        ("localhost:99999999", False),
    ],
)  # fmt: skip
def test_only_our_own_names_are_answered(host: str, allowed: bool):
    assert host_is_allowed(host, NAMES) is allowed


def test_a_rebound_name_gets_nothing(anonymous: TestClient, settings: Settings):
    reply = anonymous.get("/healthz", headers={"Host": "evil.example"})
    assert (reply.status_code, reply.headers["content-type"]) == (421, "application/problem+json")
    assert "LOHAN_ALLOWED_HOSTS" in reply.json()["remedy"]
    assert SECURITY_HEADERS.items() <= dict(reply.headers).items()


# ---------------------------------------------------------------- large bodies
@pytest.mark.parametrize(("path", "kind"), [("/api/v1/runs", "json"), ("/api/v1/login", "json"), ("/login", "x-www-form-urlencoded")])
def test_a_body_is_cut_off_at_its_allowance(admin: Person, path: str, kind: str):
    body = b"a" * (DEFAULT_BODY_LIMIT_BYTES + 1)
    reply = admin.client.post(path, content=body, headers={"Content-Type": f"application/{kind}"})
    assert reply.status_code == 413


def test_a_body_without_a_length_is_cut_off_too(app: FastAPI, owner: Person):
    with serving(app) as port, socket.create_connection(("127.0.0.1", port)) as connection:
        head = f"POST /api/v1/runs HTTP/1.1\r\nHost: localhost\r\nAuthorization: {owner.key()['Authorization']}\r\n"
        head += "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        connection.sendall(head.encode())
        chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
        for _ in range(DEFAULT_BODY_LIMIT_BYTES // 0x10000 + 1):
            connection.sendall(chunk)
        assert connection.recv(100).startswith(b"HTTP/1.1 413")
