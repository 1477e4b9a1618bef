"""`lohan web`: the web server alone, as a container runs it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from tests.fixtures.waiting import wait_until

from lohan_app.demo.client import answers
from lohan_app.worker.processes import is_held


def _start(data_dir: Path, port: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "lohan_app.cli", "web", "--port", str(port)]
    environment = os.environ | {"LOHAN_DATA_DIR": str(data_dir)}
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_it_prints_the_address_serves_and_ends_at_sigterm(tmp_path: Path):
    port = _free_port()
    process = _start(tmp_path / "data", port)
    try:
        assert process.stdout is not None
        assert f"http://127.0.0.1:{port}/setup?token=" in process.stdout.readline()
        wait_until(lambda: answers(f"http://127.0.0.1:{port}/readyz"), what="the server answers")
        assert is_held(tmp_path / "data" / "up.lock")
        second = _start(tmp_path / "data", _free_port())
        output, _ = second.communicate(timeout=60)
        assert second.returncode != 0
        assert f"process {process.pid}" in output
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 0
    assert not is_held(tmp_path / "data" / "up.lock")
