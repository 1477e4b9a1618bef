"""The real web process for browser tests, and people who are logged in to it."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import httpx
from fixtures.waiting import wait_until
from sqlalchemy import Engine

from lohan_app.auth import service
from lohan_app.auth.schemas import Identity
from lohan_app.db import create_db_engine, migrate, write_transaction
from lohan_app.entities import Role, SetupClaim, User
from lohan_app.settings import Settings

START_SECONDS = 60.0


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def clean_environment(**values: str) -> dict[str, str]:
    """The environment of a child without a developer's LOHAN_* settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LOHAN_")}
    return kept | {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", **values}


def answers(url: str) -> bool:
    """Whether the service at `url` says that it is ready."""
    try:
        # No proxy of the environment: the service is on this machine.
        return httpx.get(f"{url}/readyz", timeout=5, trust_env=False).is_success
    except httpx.HTTPError:
        return False


@dataclass
class Visitor:
    """A logged-in user: the cookie goes into a browser, the identity arranges their things."""

    user: User
    identity: Identity
    token: str


class Site:
    """One web process (uvicorn, no worker, no broker) on a data folder of its own."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.model_dir = folder / "models"
        self.model_dir.mkdir()
        self.settings = Settings(data_dir=folder / "data", model_dirs=(self.model_dir,), devices=("cpu:0",), port=self.port)
        self.settings.make_folders()
        migrate(self.settings)
        self.engine: Engine = create_db_engine(self.settings)
        self._log = folder / "web.log"
        self._environment = clean_environment(
            LOHAN_DATA_DIR=str(self.settings.data_dir), LOHAN_MODEL_DIRS=str(self.model_dir), LOHAN_DEVICES="cpu:0", **environment
        )
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "uvicorn",
                    "--factory",
                    "lohan_app.main:create_app",
                    "--port",
                    str(self.port),
                    "--log-level",
                    "warning",
                ],
                env=self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        wait_until(self._is_up, timeout_seconds=START_SECONDS, what="the web process answers")

    def _is_up(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"the web process ended: {self.log()[-3000:]}"
        return answers(self.url)

    def stop(self) -> None:
        """Kill the process: whoever has a page open loses the connection, as when a machine goes away."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def close(self) -> None:
        self.stop()
        self.engine.dispose()

    def log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def setup_token(self) -> str:
        return (self.settings.data_dir / "secrets" / "setup_token").read_text(encoding="ascii").strip()

    def visitor(self, name: str, role: Role = Role.MEMBER) -> Visitor:
        """A user with an open session; the first administrator also claims the set-up."""
        user = User(name=name, password_hash="!", role=role)
        with write_transaction(self.engine) as session:
            session.add(user)
            session.flush()
            if session.get(SetupClaim, 1) is None:
                session.add(SetupClaim(id=1, user_id=user.id))
        login = service.open_session(self.engine, user, address="test")
        identity = Identity(user.id, user.name, role, service.scopes_of_role(role), session_id=login.session.id)
        return Visitor(user, identity, login.token)


class Appliance:
    """`lohan up` as an administrator starts it: broker, worker and web, on a data folder of its own, CPU only."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.data_dir = folder / "data"
        self.model_dir = folder / "models"
        self.model_dir.mkdir()
        self._log = folder / "up.log"
        self._environment = clean_environment(
            LOHAN_DATA_DIR=str(self.data_dir),
            LOHAN_MODEL_DIRS=str(self.model_dir),
            LOHAN_DEVICES="cpu:0",
            LOHAN_PORT=str(self.port),
        )
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "lohan_app.cli", "up"], env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        wait_until(self._is_up, timeout_seconds=2 * START_SECONDS, what="the appliance answers")

    def _is_up(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"`lohan up` ended: {self.log()[-3000:]}"
        return answers(self.url)

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(START_SECONDS)
            self._process = None

    def log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def setup_address(self) -> str:
        """What `lohan up` printed first: the address with the one-time token."""
        match = re.search(rf"{self.url}/setup\?token=\S+", self.log())
        assert match is not None, self.log()
        return match.group()
