"""A real, migrated database per test, the real application, and people."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from fastapi import FastAPI
from fixtures.broker import Queues
from fixtures.machine import BACKENDS, Backends
from fixtures.service import Person, make_person
from fixtures.simulated_machine import simulated_machine
from sqlalchemy import Engine
from starlette.testclient import TestClient

from lohan.config import UnsafeFilesystems
from lohan_app.db import create_db_engine
from lohan_app.entities import Role
from lohan_app.main import create_app
from lohan_app.settings import Settings
from lohan_app.worker.reconciler import Reconciler


@pytest.fixture
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> Settings:
    """Settings of an appliance with a migrated database and an empty data folder; with a broker where the test is marked so."""
    model_dir = tmp_path / "models"
    model_dir.mkdir()
    servers = {}
    if BACKENDS is Backends.POSTGRES:
        servers["database_url"] = request.getfixturevalue("migrated_postgres")
    if request.node.get_closest_marker("broker") is not None:
        servers["broker_url"] = request.getfixturevalue("broker_url")
    settings = Settings(
        data_dir=tmp_path / "data",
        model_dirs=(model_dir,),
        devices=("cpu:0",),
        unsafe_filesystems=UnsafeFilesystems.ALLOW,
        **servers,
    )
    settings.make_folders()
    if BACKENDS is Backends.SQLITE:
        shutil.copy(request.getfixturevalue("migrated_sqlite"), settings.data_dir / "db" / "lohan.sqlite3")
    return settings


@pytest.fixture
def queues(settings: Settings) -> Queues:
    """The messages in the broker's queues, which no worker takes; use with the `broker` marker."""
    return Queues(settings)


@pytest.fixture
def engine(settings: Settings) -> Iterator[Engine]:
    """Direct access to the test's database, to arrange and to look."""
    engine = create_db_engine(settings)
    yield engine
    engine.dispose()


@pytest.fixture
def tick(settings: Settings, engine: Engine, queues: Queues) -> Iterator[Callable[[], None]]:
    """One turn of a reconciler, which starts no supervisors; use with the `broker` marker or queues of the test's own."""
    reconciler = Reconciler(settings, engine, supervisor_command=("/bin/true",), look=simulated_machine)
    yield reconciler.tick
    reconciler.close()


@pytest.fixture
def new_children() -> Callable[[], list[psutil.Process]]:
    """Asks for this process's children other than those it had when the test began: servers of the whole session."""
    before = psutil.Process().children()
    return lambda: [child for child in psutil.Process().children() if child not in before]


@pytest.fixture
def app(settings: Settings) -> FastAPI:
    return create_app(settings)


@pytest.fixture
def anonymous(app: FastAPI) -> Iterator[TestClient]:
    """Somebody who is not logged in; starts and stops the application."""
    with TestClient(app, base_url="http://localhost:8000", raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def person(app: FastAPI, engine: Engine, anonymous: TestClient) -> Callable[..., Person]:
    """Makes logged-in users: `person("ada", role=Role.MEMBER)`."""

    def make(name: str, role: Role = Role.MEMBER) -> Person:
        return make_person(app, engine, name, role)

    return make


@pytest.fixture
def admin(person: Callable[..., Person]) -> Person:
    return person("admin", Role.ADMIN)


@pytest.fixture
def owner(person: Callable[..., Person]) -> Person:
    """The member whose things a test is about."""
    return person("owner")


@pytest.fixture
def mate(person: Callable[..., Person]) -> Person:
    """Another member of the same installation."""
    return person("mate")
