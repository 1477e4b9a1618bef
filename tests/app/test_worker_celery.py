"""Celery's settings as a started application has them: each with its reason, short tasks on queues that somebody reads, JSON alone."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module, metadata
from pathlib import Path

import pytest
from kombu.exceptions import ContentDisallowed
from kombu.serialization import loads

from lohan_app.settings import Settings
from lohan_app.worker import celery
from lohan_app.worker.celery import IO_QUEUE, LAUNCH_QUEUE, celery_app, configuration

MEASURED = {
    "task_acks_late": True,
    "task_reject_on_worker_lost": False,
    "worker_prefetch_multiplier": 1,
    "worker_cancel_long_running_tasks_on_connection_loss": False,
    "broker_connection_retry_on_startup": True,
    "broker_connection_max_retries": None,
    "task_serializer": "json",
    "result_serializer": "json",
    "accept_content": ["json"],
    "task_ignore_result": True,
    "worker_pool_start_method": "spawn",
    "worker_enable_soft_shutdown_on_idle": False,
    "worker_soft_shutdown_timeout": celery.SHUTDOWN_SECONDS,
}
TRANSPORT = {
    "health_check_interval": 25,
    "socket_timeout": 30,
    "socket_keepalive": True,
    "unacked_restore_interval": 10,
    "unacked_restore_throttle": 1,
}
# Settings that share the reason of the one named.
SAME_REASON = {
    "visibility_timeout": "result_backend_transport_options",
    "socket_timeout": "health_check_interval",
    "socket_keepalive": "health_check_interval",
    "unacked_restore_throttle": "unacked_restore_interval",
    "broker_connection_max_retries": "broker_connection_retry_on_startup",
    "result_serializer": "task_serializer",
    "accept_content": "task_serializer",
    "task_store_errors_even_if_ignored": "task_ignore_result",
    "task_routes": "task_default_queue",
}
# Names that say all there is to say, or hold the others.
SELF_EVIDENT = {"broker_url", "broker_transport_options", "include", "timezone", "enable_utc"}


@pytest.fixture
def own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Settings]:
    monkeypatch.setenv("LOHAN_DATA_DIR", str(tmp_path / "data"))
    celery.worker_settings.cache_clear()
    yield celery.worker_settings()
    celery.worker_settings.cache_clear()


def test_every_measured_setting_is_given_to_celery(own_settings: Settings):
    found = configuration(own_settings)
    assert {name: found[name] for name in MEASURED} == MEASURED
    transport = dict(found["broker_transport_options"])
    assert transport.pop("visibility_timeout") == found["visibility_timeout"]
    assert transport == TRANSPORT
    assert transport["health_check_interval"] < transport["socket_timeout"]


def test_celery_knows_every_setting_and_has_no_deprecated_one():
    from celery.app.defaults import NAMESPACES, flatten

    options = dict(flatten(NAMESPACES))
    for name in configuration(Settings()):
        if name in {"visibility_timeout", "supervisor_command"}:
            continue  # the transport's, also read from the top; ours
        assert name in options, name
        assert options[name].deprecate_by is None, name


def test_the_versions_have_the_repairs_that_the_settings_count_on():
    for package in ("celery", "kombu"):
        assert tuple(int(part) for part in metadata.version(package).split(".")[:2]) >= (5, 7)


def test_every_setting_has_its_reason_beside_it():
    lines = [line.strip() for line in inspect.getsource(configuration).splitlines()]
    named = {line.split('"')[1]: lines[number - 1] for number, line in enumerate(lines) if line.startswith('"') and '":' in line}
    assert configuration(Settings()).keys() | TRANSPORT.keys() <= named.keys()
    unexplained = set()
    for name, above in named.items():
        leader = named.get(SAME_REASON.get(name, ""), above)
        if not leader.startswith("#") and name not in SELF_EVIDENT:
            unexplained.add(name)
    assert unexplained == set()


def test_every_task_is_short_and_goes_to_a_queue_that_a_worker_reads(own_settings: Settings):
    for module in celery.TASK_MODULES:
        import_module(module)
    found = configuration(own_settings)
    tasks = {name: task for name, task in celery_app.tasks.items() if not name.startswith(("celery.", "tests."))}
    assert set(tasks) == {"runs.launch", "runs.prepare", "datasets.validate", "base_models.inspect"}
    queues = {}
    for name, task in tasks.items():
        assert (task.time_limit or found["task_time_limit"]) < found["visibility_timeout"]
        assert isinstance(task, celery.IdempotentTask)
        queues[name] = found["task_routes"].get(name, {"queue": found["task_default_queue"]})["queue"]
    assert queues == dict.fromkeys(tasks, IO_QUEUE) | {"runs.launch": LAUNCH_QUEUE}
    assert tasks["runs.launch"].time_limit == celery.LAUNCH_LIMIT_SECONDS


def test_a_task_sent_by_name_takes_its_role_s_queue():
    router = celery_app.amqp.Router(celery_app.amqp.Queues({}), celery.TASK_ROUTES)
    assert router.route({}, "runs.launch")["queue"].name == LAUNCH_QUEUE


@pytest.mark.parametrize("kind", ["application/x-python-serialize", "application/x-yaml"])
def test_a_message_that_is_not_json_is_refused(kind: str, own_settings: Settings):
    with pytest.raises(ContentDisallowed):
        loads(b"", kind, "binary", accept=configuration(own_settings)["accept_content"])
