"""The two ways in which the appliance is run: by an init system beside servers of its own, or as `lohan up`."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from fixtures.appliance import environment_of, free_port
from fixtures.waiting import wait_until

from lohan_app.demo.client import answers as is_served
from lohan_app.settings import Settings
from lohan_app.worker.broker import answers, find_broker_binary
from lohan_app.worker.main import IO_PROCESSES
from tests.soak.postgresql import Cluster
from tests.soak.schedule import Victim
from tests.soak.services import Service
from tests.soak.victims import find

DEVICES = ("cpu:0", "cpu:1")


class Database(StrEnum):
    POSTGRES = "postgres"
    """`lohan web` and `lohan worker` with a PostgreSQL server and a broker on private ports, as containers run them."""
    SQLITE = "sqlite"
    """`lohan up`: one command, SQLite and its own broker."""


class Appliance:
    """A running appliance. Call `keep` often: it is what starts again what was killed."""

    def __init__(self, place: Path, settings: Settings, services: list[Service], cluster: Cluster | None = None) -> None:
        self.place = place
        """Every process of the appliance was started for a folder in it."""
        self.settings = settings
        self.services = {service.name: service for service in services}
        self._cluster = cluster

    @property
    def broker_folder(self) -> Path:
        """Where the broker keeps its append-only file."""
        return self.place / "broker" if "broker" in self.services else self.settings.data_dir / "broker"

    @property
    def victims(self) -> list[Victim]:
        """The kinds of process that there are to kill."""
        return [victim for victim in Victim if victim is not Victim.UP or "up" in self.services]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.settings.port}"

    def keep(self) -> None:
        for service in self.services.values():
            service.keep()

    def wait(self, condition: Any, *, timeout_seconds: float, what: str) -> Any:
        """`wait_until`, with everything kept running."""

        def kept() -> Any:
            self.keep()
            return condition()

        return wait_until(kept, timeout_seconds=timeout_seconds, interval_seconds=0.2, what=what)

    def is_ready(self) -> bool:
        """Whether web server, broker and both Celery workers are there."""
        is_answered = is_served(f"{self.url}/readyz") and answers(self.settings)
        return is_answered and len(find(self.place, Victim.POOL_CHILD)) == 1 + IO_PROCESSES

    def __enter__(self) -> Self:
        try:
            for name in ("database", "broker"):
                if name in self.services:
                    self.services[name].keep()
            self.wait(self.is_ready, timeout_seconds=300, what="a ready appliance")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for name in ("up", "web", "worker", "broker", "database"):
            if name in self.services:
                self.services[name].stop()
        if self._cluster is not None:
            self._cluster.remove()


def lohan_up(place: Path, data_dir: Path) -> Appliance:
    """`lohan up` on `data_dir`."""
    settings = _settings(place, data_dir)
    up = _lohan(place, settings, "up")
    return Appliance(place, settings, [up])


def servers(place: Path, data_dir: Path) -> Appliance:
    """Web server and worker on `data_dir`, with a database server and a broker of their own."""
    cluster = Cluster()
    broker_port = free_port()
    settings = _settings(place, data_dir, database_url=cluster.url, broker_url=f"redis://127.0.0.1:{broker_port}/0")
    (place / "broker").mkdir()
    options = {
        "port": str(broker_port), "bind": "127.0.0.1", "dir": str(place / "broker"), "appendonly": "yes", "appendfsync": "always",
        "save": "", "maxmemory-policy": "noeviction", "daemonize": "no",
    }  # fmt: skip
    command = [str(find_broker_binary()), *(part for name, value in options.items() for part in (f"--{name}", value))]
    broker = Service("broker", command, log=place / "broker.log", environment={})
    programs = [_lohan(place, settings, command) for command in ("web", "worker")]
    return Appliance(place, settings, [cluster.service(), broker, *programs], cluster)


def _settings(place: Path, data_dir: Path, **addresses: Any) -> Settings:
    settings = Settings(data_dir=data_dir, model_dirs=(place / "models",), devices=DEVICES, port=free_port(), **addresses)
    settings.make_folders()
    return settings


def _lohan(place: Path, settings: Settings, command: str) -> Service:
    # Threads of a trainer that is given one: no other library may start more.
    environment = environment_of(settings) | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return Service(command, [sys.executable, "-m", "lohan_app.cli", command], log=place / f"{command}.log", environment=environment)
