"""Starting the appliance for the demonstration, finding one that already runs, and stopping what was started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lohan.errors import LohanError
from lohan_app.demo.client import answers
from lohan_app.worker.processes import Process, is_held, python_module, read_json, start_ticks

START_SECONDS = 90.0
STOP_SECONDS = 60.0
LAST_LINES = 25
PORTS_TRIED = 50


@dataclass(frozen=True, slots=True)
class Appliance:
    """A running `lohan up` on this machine."""

    data_dir: Path
    url: str
    pid: int
    start_ticks: int
    is_ours: bool
    """Whether this demonstration started it: only then may it stop it."""

    @property
    def log(self) -> Path:
        return self.data_dir / "logs" / "demo-appliance.log"

    def setup_token(self) -> str | None:
        """The one-time token; None once the first administrator exists."""
        try:
            return (self.data_dir / "secrets" / "setup_token").read_text(encoding="ascii").strip()
        except FileNotFoundError:
            return None

    def stop(self) -> None:
        """SIGTERM, and wait until it has stopped its own.

        Raises:
            LohanError: it has not within a minute.
        """
        process = Process(self.pid, self.start_ticks)
        try:
            process.send(signal.SIGTERM)
            if not process.wait(STOP_SECONDS):
                raise LohanError(
                    f"the appliance (process {self.pid}) does not stop", place=str(self.log), remedy=f"End it: kill -9 {self.pid}"
                )
        finally:
            process.close()


def free_port(first: int) -> int:
    """`first`, or the next port that nobody listens on.

    Raises:
        LohanError: the next fifty are all taken.
    """
    for port in range(first, min(first + PORTS_TRIED, 65536)):
        with socket.socket() as probe:
            # As the web server itself does: otherwise a connection that just ended would hold the port for a minute.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise LohanError(f"no free port from {first} on", place="--port", remedy="Name another: python -m lohan_app.demo --port 9000")


def find_running(data_dir: Path) -> Appliance | None:
    """The appliance that runs on this data folder already, whoever started it.

    Raises:
        LohanError: it holds the folder but does not answer.
    """
    lock = data_dir / "up.lock"
    if not is_held(lock):
        return None
    note = read_json(lock) or {}
    pid, url = int(note.get("pid", 0)), str(note.get("url", ""))
    if not url or not _comes_up(url, lambda: is_held(lock)):
        raise LohanError(
            f"the appliance on this data folder (process {pid}) does not answer", place=str(data_dir), remedy=f"End it: kill {pid}"
        )
    return Appliance(data_dir, url, pid, start_ticks(pid) or 0, is_ours=False)


def _comes_up(url: str, is_alive: Callable[[], bool]) -> bool:
    """Whether the service gets ready while its process lives, within `START_SECONDS`."""
    deadline = time.monotonic() + START_SECONDS
    while not answers(f"{url}/readyz"):
        if not is_alive() or time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def start(data_dir: Path, first_port: int) -> Appliance:
    """Start `lohan up` in a session of its own, so that it outlives this program and its terminal.

    Raises:
        LohanError: it did not answer within 90 s, or ended; the message has the end of its log.
    """
    port = free_port(first_port)
    (data_dir / "logs").mkdir(mode=0o700, parents=True, exist_ok=True)
    log = data_dir / "logs" / "demo-appliance.log"
    environment = os.environ | {"LOHAN_DATA_DIR": str(data_dir), "LOHAN_PORT": str(port), "LOHAN_HOST": "127.0.0.1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            python_module("lohan_app.cli", "up"),
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True,
        )  # fmt: skip
    appliance = Appliance(data_dir, f"http://127.0.0.1:{port}", process.pid, start_ticks(process.pid) or 0, is_ours=True)
    if not _comes_up(appliance.url, lambda: process.poll() is None):
        what = "ended" if process.poll() is not None else f"does not answer after {START_SECONDS:.0f} s"
        appliance.stop()
        raise LohanError(f"the appliance {what}:\n{tail(log)}", place=str(log), remedy="Run `make doctor`.")
    return appliance


def tail(path: Path) -> str:
    """The last lines of a log."""
    try:
        return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:])
    except OSError as error:
        return f"(no log: {error.strerror})"
