"""Uploads: streamed to the disk, whole or not at all, under a name that can be shown."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import socket
import subprocess
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn
from fixtures.rows import messages_rows
from fixtures.service import BASE_URL, Person
from fixtures.waiting import wait_until
from sqlalchemy import Engine, select
from starlette.testclient import TestClient

from lohan_app.auth.schemas import Scope
from lohan_app.datasets.service import rows_path, sweep_uploads
from lohan_app.db import read_transaction, write_transaction
from lohan_app.entities import AuditEntry, Dataset, DatasetState
from lohan_app.settings import Settings

ROWS = "".join(json.dumps(row) + "\n" for row in messages_rows(8)).encode()


def names_in(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def nothing_is_left(settings: Settings, engine: Engine) -> bool:
    with read_transaction(engine) as session:
        rows = session.scalars(select(Dataset.id)).all()
    return not rows and not names_in(settings.data_dir / "uploads") and not names_in(settings.data_dir / "datasets")


@pytest.mark.database
def test_a_form_and_a_plain_body_give_the_same_file(owner: Person, settings: Settings, engine: Engine):
    form = owner.client.post("/api/v1/datasets", files={"file": ("talks.jsonl", io.BytesIO(ROWS))})
    body = owner.client.post("/api/v1/datasets?name=talks.jsonl", content=ROWS)
    for reply in (form, body):
        assert reply.status_code == 201, reply.text
        dataset = reply.json()
        assert (dataset["name"], dataset["state"], dataset["size_bytes"]) == ("talks.jsonl", "validating", len(ROWS))
        assert dataset["sha256"] == hashlib.sha256(ROWS).hexdigest()
        assert rows_path(settings, dataset["id"]).read_bytes() == ROWS
        assert reply.headers["location"] == f"/api/v1/datasets/{dataset['id']}"
    assert names_in(settings.data_dir / "uploads") == []
    with read_transaction(engine) as session:
        uploads = session.scalars(select(AuditEntry.subject).where(AuditEntry.action == "dataset.upload")).all()
    assert sorted(uploads) == sorted([form.json()["id"], body.json()["id"]])


@pytest.mark.parametrize("order", ["name first", "file first"])
def test_the_forms_name_wins_over_the_files(owner: Person, order: str):
    parts = [("name", (None, "My talks")), ("file", ("talks.jsonl", ROWS))]
    reply = owner.client.post("/api/v1/datasets", files=parts if order == "name first" else parts[::-1])
    assert (reply.status_code, reply.json()["name"]) == (201, "My talks")


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        ("../../etc/cron.d/x", "x"),
        ("C:\\Users\\ada\\talks.jsonl", "talks.jsonl"),
        ("ta\u202elks\u0000\u200b.jsonl", "talks.jsonl"),
        ("e\u0301tudes", "\u00e9tudes"),
        ("a\nb\tc", "a b c"),
        ("ü" * 300, "ü" * 127),
        ("-rf", "-rf"),
        ("<script>alert(1)</script>.jsonl", "script>.jsonl"),
        ("CON", "CON"),
    ],
)
def test_names_are_for_people(owner: Person, settings: Settings, sent: str, shown: str):
    reply = owner.client.post("/api/v1/datasets", params={"name": sent}, content=ROWS)
    assert (reply.status_code, reply.json().get("name")) == (201, shown)
    assert names_in(settings.data_dir / "datasets") == [reply.json()["id"]]


def test_a_name_without_a_visible_character_is_refused(owner: Person, settings: Settings, engine: Engine):
    reply = owner.client.post("/api/v1/datasets", params={"name": "\u200b\u202e"}, content=ROWS)
    assert (reply.status_code, reply.json()["place"]) == (422, "name")
    assert nothing_is_left(settings, engine)


def form_body(*parts: tuple[str, bytes], end: bytes = b"--cut--\r\n") -> bytes:
    return b"".join(b"--cut\r\n" + head.encode() + b"\r\n\r\n" + data + b"\r\n" for head, data in parts) + end


FILE_HEAD = 'Content-Disposition: form-data; name="file"; filename="a.jsonl"'


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (form_body((FILE_HEAD, ROWS), end=b""), 400),
        (form_body(('Content-Disposition: form-data; name="other"', b"x")), 400),
        (form_body((FILE_HEAD, ROWS), (FILE_HEAD, ROWS)), 400),
        (form_body(('Content-Disposition: form-data; name="name"', b"n" * 5000), (FILE_HEAD, ROWS)), 400),
        (form_body((FILE_HEAD.replace("a.jsonl", "a" * 9000), ROWS)), 400),
        (b"this is no form", 400),
        (b"", 400),
        (form_body((FILE_HEAD, b"")), 422),
    ],
    ids=["cut short", "no file", "two files", "long field", "long header", "no form", "empty body", "empty file"],
)
def test_a_broken_form_leaves_nothing(owner: Person, settings: Settings, engine: Engine, body: bytes, status: int):
    reply = owner.client.post("/api/v1/datasets", content=body, headers={"Content-Type": "multipart/form-data; boundary=cut"})
    assert reply.status_code == status, reply.text
    assert reply.json()["remedy"]
    assert nothing_is_left(settings, engine)


def test_a_form_without_a_boundary_is_refused(owner: Person):
    reply = owner.client.post("/api/v1/datasets", content=b"x", headers={"Content-Type": "multipart/form-data"})
    assert (reply.status_code, reply.json()["place"]) == (400, "Content-Type")


class TestLimit:
    @pytest.fixture
    def settings(self, settings: Settings) -> Settings:
        return settings.model_copy(update={"upload_limit_bytes": 300_000})

    def test_exactly_the_limit_fits(self, owner: Person):
        assert owner.client.post("/api/v1/datasets", content=b"x" * 300_000).status_code == 201

    @pytest.mark.parametrize("extra", [1, 200_000, 3_000_000])
    @pytest.mark.parametrize("as_form", [False, True])
    def test_one_byte_more_does_not(self, owner: Person, settings: Settings, engine: Engine, extra: int, as_form: bool):
        content = b"x" * (300_000 + extra)
        arguments = {"files": {"file": ("a", content)}} if as_form else {"content": content}
        reply = owner.client.post("/api/v1/datasets", **arguments)
        assert reply.status_code == 413
        assert "292.97 KiB" in reply.json()["detail"]
        assert nothing_is_left(settings, engine)

    def test_the_limit_holds_for_a_body_of_unknown_length(self, owner: Person, settings: Settings, engine: Engine):
        def pieces() -> Iterator[bytes]:
            for _ in range(10):
                yield b"x" * 50_000

        assert owner.client.post("/api/v1/datasets", content=pieces()).status_code == 413
        assert nothing_is_left(settings, engine)


def test_what_cannot_fit_on_the_disk_is_refused_before_it_is_read(owner: Person, settings: Settings, engine: Engine):
    free = shutil.disk_usage(settings.data_dir).free
    owner.client.app.state.context.settings = settings.model_copy(update={"upload_limit_bytes": 2 * free})
    reply = owner.client.post("/api/v1/datasets", content=iter([b"x"]), headers={"Content-Length": str(free + free // 2)})
    assert (reply.status_code, reply.json()["detail"]) == (507, "the disk is full")
    assert nothing_is_left(settings, engine)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_disk_that_fills_up_leaves_nothing(owner: Person, settings: Settings, engine: Engine):
    uploads = settings.data_dir / "uploads"
    mounted = subprocess.run(
        ["/bin/mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(uploads)], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount here: {mounted.stderr.strip()}")
    try:
        pieces = (b"x" * 65536 for _ in range(64))  # of unknown length, so that the check beforehand cannot help
        reply = owner.client.post("/api/v1/datasets", content=pieces)
        assert (reply.status_code, reply.json()["detail"]) == (507, "the disk is full")
        assert "Free some space" in reply.json()["remedy"]
        assert nothing_is_left(settings, engine)
    finally:
        subprocess.run(["/bin/umount", str(uploads)], check=True)


@pytest.fixture
def server(owner: Person) -> Iterator[int]:
    """The application behind a real socket; gives the port."""
    config = uvicorn.Config(owner.client.app, port=0, log_level="error", lifespan="off", timeout_graceful_shutdown=2)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_until(lambda: server.started, what="the server to start")
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    thread.join()


@pytest.mark.parametrize("as_form", [False, True])
def test_an_upload_is_never_whole_in_memory(owner: Person, server: int, settings: Settings, as_form: bool):
    file_bytes = 64 * 1024 * 1024
    start, end = (f"--cut\r\n{FILE_HEAD}\r\n\r\n".encode(), b"\r\n--cut--\r\n") if as_form else (b"", b"")
    kind = "multipart/form-data; boundary=cut" if as_form else "application/jsonl"
    head = (
        f"POST /api/v1/datasets HTTP/1.1\r\nHost: localhost\r\nAuthorization: {owner.key(Scope.DATASETS)['Authorization']}\r\n"
        f"Content-Type: {kind}\r\nContent-Length: {len(start) + file_bytes + len(end)}\r\nConnection: close\r\n\r\n"
    )
    piece = b"x" * 65536
    tracemalloc.start()
    try:
        with socket.create_connection(("127.0.0.1", server)) as connection:
            connection.sendall(head.encode() + start)
            for _ in range(file_bytes // len(piece)):
                connection.sendall(piece)
            connection.sendall(end)
            reply = b"".join(iter(lambda: connection.recv(65536), b""))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert reply.startswith(b"HTTP/1.1 201")
    dataset = json.loads(reply.partition(b"\r\n\r\n")[2])
    assert dataset["size_bytes"] == rows_path(settings, dataset["id"]).stat().st_size == file_bytes
    assert peak_bytes < file_bytes / 4


def test_a_connection_that_breaks_off_leaves_nothing(owner: Person, server: int, settings: Settings, engine: Engine):
    key = owner.key(Scope.DATASETS)["Authorization"]
    with socket.create_connection(("127.0.0.1", server)) as connection:
        head = f"POST /api/v1/datasets HTTP/1.1\r\nHost: localhost\r\nAuthorization: {key}\r\nContent-Length: 1000000\r\n\r\n"
        connection.sendall(head.encode() + b"x" * 100_000)
        wait_until(lambda: names_in(settings.data_dir / "uploads"), what="the upload to begin")
    wait_until(lambda: nothing_is_left(settings, engine), what="the upload to be cleaned away")


@pytest.mark.database
def test_a_start_removes_what_a_killed_server_left(anonymous: TestClient, owner: Person, settings: Settings, engine: Engine):
    whole = owner.client.post("/api/v1/datasets", content=ROWS).json()["id"]
    cut = Dataset(owner_id=owner.user.id, name="cut", state=DatasetState.UPLOADING)
    with write_transaction(engine) as session:
        session.add(cut)
    (settings.data_dir / "uploads" / f"{cut.id}.part").write_bytes(b"half")
    rows_path(settings, cut.id).parent.mkdir()
    rows_path(settings, cut.id).write_bytes(b"renamed but not recorded")
    sweep_uploads(settings, engine)
    assert names_in(settings.data_dir / "uploads") == []
    assert names_in(settings.data_dir / "datasets") == [whole]
    assert [item["id"] for item in owner.client.get("/api/v1/datasets").json()["items"]] == [whole]


def test_an_upload_with_a_cookie_needs_the_token_in_the_header(owner: Person, settings: Settings, engine: Engine):
    form = {"file": ("a", ROWS), "csrf_token": (None, owner.identity.csrf_token)}
    reply = owner.client.post("/api/v1/datasets", files=form, headers={"X-CSRF-Token": ""})
    assert (reply.status_code, reply.json()["place"]) == (403, "csrf_token")
    assert nothing_is_left(settings, engine)


def test_a_key_needs_its_scope(anonymous: TestClient, owner: Person, settings: Settings, engine: Engine):
    reply = anonymous.post("/api/v1/datasets", content=ROWS, headers=owner.key(Scope.READ) | {"Origin": BASE_URL})
    assert reply.status_code == 403 and "datasets" in reply.json()["detail"]
    assert anonymous.post("/api/v1/datasets", content=ROWS, headers=owner.key(Scope.DATASETS)).status_code == 201
    assert anonymous.post("/api/v1/datasets", content=ROWS).status_code in (401, 503)
