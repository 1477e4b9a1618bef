"""A PostgreSQL server of a test's own: a new cluster in a temporary folder, on a free port, for this machine alone."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from fixtures.appliance import free_port

from tests.soak.services import Service

INSTALLED = Path("/usr/lib/postgresql")


@cache
def programs() -> Path | None:
    """The folder with `initdb` and `postgres`: Debian's newest, or the one on PATH; None where there is none."""
    found = sorted(INSTALLED.glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]) if path.parts[-3].isdigit() else 0)
    on_path = shutil.which("initdb")
    initdb = found[-1] if found else Path(on_path).resolve() if on_path else None
    return initdb.parent if initdb is not None and (initdb.parent / "postgres").exists() else None


class Cluster:
    """The cluster's files; `service()` runs the server. PostgreSQL refuses to run as root: then it is `postgres`, or `nobody`."""

    def __init__(self) -> None:
        found = programs()
        assert found is not None, "asked before"
        self._programs = found
        # Not among the test's own folders: those are root's alone.
        self.folder = Path(tempfile.mkdtemp(prefix="lohan-soak-postgresql-"))
        self.port = free_port()
        self.user = _account() if os.geteuid() == 0 else None
        if self.user is not None:
            shutil.chown(self.folder, self.user)
        self.url = f"postgresql+psycopg://lohan@127.0.0.1:{self.port}/postgres"
        # Its environment names no folder of the test: nothing that looks for the appliance's processes finds it.
        self._environment = {"PATH": os.environ.get("PATH", ""), "LC_ALL": "C", "TZ": "UTC"}
        subprocess.run(
            [str(found / "initdb"), "-D", str(self.data), "-U", "lohan", "--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync"],
            check=True, capture_output=True, timeout=120, user=self.user, env=self._environment, cwd=self.folder,
        )  # fmt: skip

    @property
    def data(self) -> Path:
        return self.folder / "data"

    def service(self) -> Service:
        options = {
            "listen_addresses": "127.0.0.1",
            "port": str(self.port),
            "unix_socket_directories": "",
            "max_connections": "200",
        }
        command = [str(self._programs / "postgres"), "-D", str(self.data), *(f"--{name}={value}" for name, value in options.items())]
        log = self.folder / "postgresql.log"
        # SIGQUIT is what `pg_ctl -m immediate` sends: connections and transactions are cut, and the next start recovers.
        return Service("database", command, log=log, environment=self._environment, user=self.user, stop_signal=signal.SIGQUIT)

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def _account() -> str:
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name).pw_name
        except KeyError:
            continue
    raise AssertionError("neither postgres nor nobody is an account of this machine")
