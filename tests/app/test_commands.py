"""The service's commands, run as a user runs them: in a process of their own on a data folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fixtures.service import BASE_URL
from sqlalchemy import select
from starlette.testclient import TestClient

from lohan_app.auth import service
from lohan_app.auth.passwords import PasswordHasher
from lohan_app.db import create_db_engine, read_transaction
from lohan_app.entities import BrowserSession, Role, User
from lohan_app.main import create_app
from lohan_app.settings import Settings


class CommandLine:
    def __init__(self, data_dir: Path) -> None:
        self.settings = Settings(data_dir=data_dir)

    def __call__(self, *arguments: str, typed: str = "") -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"LOHAN_DATA_DIR": str(self.settings.data_dir)}
        command = [sys.executable, "-m", "lohan_app.cli", *arguments]
        return subprocess.run(command, env=environment, input=typed, capture_output=True, text=True, check=False)

    def users(self) -> dict[str, Role]:
        engine = create_db_engine(self.settings)
        with read_transaction(engine) as session:
            return {user.name: user.role for user in session.scalars(select(User))}


@pytest.fixture
def lohan(tmp_path: Path) -> CommandLine:
    return CommandLine(tmp_path / "data")


def test_a_key_is_made_on_a_folder_that_is_still_empty(lohan: CommandLine):
    made = lohan("api-key", "create", "demo")
    assert made.returncode == 0, made.stderr
    key = made.stdout.strip()
    assert key.startswith("lohan_") and "\n" not in key
    assert lohan.users() == {"bootstrap": Role.ADMIN}
    with TestClient(create_app(lohan.settings), base_url=BASE_URL) as client:
        header = {"Authorization": f"Bearer {key}"}
        # The key works before anybody has set the service up, and does not count as that.
        assert client.get("/api/v1/me", headers=header).json()["name"] == "bootstrap"
        assert client.get("/api/v1/runs", headers=header).status_code == 200
        assert client.get("/api/v1/runs").status_code == 503
        assert client.post("/api/v1/base-models", json={"source": "sample"}, headers=header).status_code == 403
    admin = lohan("api-key", "create", "more", "--scopes", "read,admin").stdout.strip()
    with TestClient(create_app(lohan.settings), base_url=BASE_URL) as client:
        reply = client.post("/api/v1/base-models", json={"source": "sample"}, headers={"Authorization": f"Bearer {admin}"})
        assert reply.status_code == 201
    assert lohan.users() == {"bootstrap": Role.ADMIN}


@pytest.mark.parametrize("scopes", ["root", "", "read,,write"])
def test_unknown_scopes_are_refused_with_the_known_ones(lohan: CommandLine, scopes: str):
    refused = lohan("api-key", "create", "demo", "--scopes", scopes)
    assert refused.returncode != 0 and refused.stdout == ""
    assert "read, datasets, runs, admin" in refused.stderr and "Traceback" not in refused.stderr


def test_the_database_is_private_to_its_user(lohan: CommandLine):
    assert lohan("migrate").returncode == 0
    assert (lohan.settings.data_dir / "db").stat().st_mode & 0o077 == 0


def test_a_password_is_reset_and_ends_every_session(lohan: CommandLine):
    assert lohan("admin", "create-user", "ada", "--role", "admin", typed="correct horse battery\n").returncode == 0
    assert lohan.users() == {"ada": Role.ADMIN}
    assert lohan("admin", "create-user", "ADA", typed="correct horse battery\n").returncode != 0
    engine = create_db_engine(lohan.settings)
    with read_transaction(engine) as session:
        ada = session.scalars(select(User)).one()
    service.open_session(engine, ada, address="x")
    reset = lohan("admin", "reset-password", "ada", typed="another fine phrase\n")
    assert reset.returncode == 0 and "another" not in reset.stdout + reset.stderr
    with read_transaction(engine) as session:
        assert session.scalars(select(BrowserSession)).all() == []
    passwords = PasswordHasher()
    for word, works in (("correct horse battery", False), ("another fine phrase", True)):
        with read_transaction(engine) as session:
            assert passwords.matches(word, session.scalars(select(User.password_hash)).one()) is works


@pytest.mark.parametrize(
    ("arguments", "typed", "word"),
    [
        (("admin", "reset-password", "nobody"), "correct horse battery\n", "no user 'nobody'"),
        (("admin", "create-user", "a b"), "correct horse battery\n", "cannot be a user name"),
        (("admin", "create-user", "ada"), "short\n", "5 characters"),
    ],
)
def test_what_cannot_be_done_says_why(lohan: CommandLine, arguments: tuple[str, ...], typed: str, word: str):
    refused = lohan(*arguments, typed=typed)
    assert refused.returncode == 1 and word in refused.stderr and "Traceback" not in refused.stderr


def test_an_empty_answer_gets_a_password_that_is_printed(lohan: CommandLine):
    made = lohan("admin", "create-user", "ada", typed="\n")
    assert made.returncode == 0
    assert len(made.stdout.partition("password: ")[2].split()[0]) == 20
