"""What all tests share: skips with reasons (failures in CI), places of servers, a clean environment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures import machine

NEEDS = ("postgres", "redis", "browser", "gpu")


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in NEEDS:
        if item.get_closest_marker(marker) is None:
            continue
        reason = machine.missing(marker)
        if reason is None:
            continue
        # A machine without a GPU is an ordinary CI machine; one without the servers is a broken one.
        if machine.in_ci() and marker != "gpu":
            pytest.fail(f"CI: {reason}", pytrace=False)
        pytest.skip(reason)


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's LOHAN_* settings never reach a test, and nothing looks for a model hub."""
    for name in list(os.environ):
        if name.startswith("LOHAN_") and not name.startswith(("LOHAN_TEST_", "LOHAN_CI")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def repository() -> Path:
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def redis_url() -> str:
    """URL of a Redis-protocol server (database 9, so that a developer's own data in 0 stays untouched)."""
    return machine.REDIS_URL


@pytest.fixture
def postgres_url() -> Iterator[str]:
    """URL of an empty PostgreSQL database made for this test and dropped after it; use with the `postgres` marker."""
    import uuid

    from sqlalchemy import create_engine, text
    from sqlalchemy.engine import make_url

    server = make_url(machine.POSTGRES_URL)
    name = f"lohan_test_{uuid.uuid4().hex}"
    engine = create_engine(server, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(f'CREATE DATABASE "{name}"'))
    try:
        yield server.set(database=name).render_as_string(hide_password=False)
    finally:
        with engine.connect() as connection:
            connection.execute(text(f'DROP DATABASE "{name}" WITH (FORCE)'))
        engine.dispose()
