"""The compose file as data: hardening on every service, nothing published beyond this machine, only settings that exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from lohan_app.settings import ENVIRONMENT_PREFIX, Settings

ROOT = Path(__file__).resolve().parent.parent
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_every_service_is_hardened_and_watched(name: str):
    service = SERVICES[name]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["init"] is True
    assert "stop_grace_period" in service
    assert "healthcheck" in service or name == "web", "the image's own HEALTHCHECK is the web server's"


def test_ports_are_published_on_this_machine_alone():
    ports = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_broker_and_database_are_on_an_internal_network():
    assert COMPOSE["networks"]["inside"]["internal"] is True
    assert SERVICES["redis"]["networks"] == SERVICES["postgres"]["networks"] == ["inside"]


def test_the_worker_may_lock_memory_and_has_time_for_a_step():
    for name in ("worker", "worker-gpu"):
        assert SERVICES[name]["ulimits"]["memlock"] == -1
        assert SERVICES[name]["stop_grace_period"] == "10m"


def test_every_setting_it_passes_exists():
    known = {f"{ENVIRONMENT_PREFIX}{name.upper()}" for name in Settings.model_fields}
    passed = {name for service in SERVICES.values() for name in service.get("environment", {}) if name.startswith(ENVIRONMENT_PREFIX)}
    assert {name for name in passed if name.removesuffix("_FILE") not in known} == set()


def test_secrets_come_from_files_and_folders_are_asked_for_with_a_reason():
    text = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    assert re.search(r"PASSWORD(?!_FILE)\s*:", text) is None
    for name in ("LOHAN_DATA", "LOHAN_MODELS", "LOHAN_SECRETS"):
        assert re.search(rf"\$\{{{name}:\?[^}}]{{20,}}\}}", text)
