"""Every page asks for a login, changes nothing without the form's token, and shows nobody another's things."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

import pytest
from fixtures.service import Person
from sqlalchemy import Engine
from starlette.testclient import TestClient

from lohan_app.auth.pages import describe_browser
from lohan_app.auth.schemas import Scope
from lohan_app.db import write_transaction
from lohan_app.entities import BaseModel, BaseModelSource, BaseModelState, Dataset, DatasetState, Run, RunState
from lohan_app.forms import local_path
from lohan_app.main import FEATURES
from lohan_app.templating import format_rate, visible

HTML = {"Accept": "text/html"}
OPEN = {"/setup", "/login", "/healthz", "/readyz"}


def page_routes() -> Iterator[tuple[str, str]]:
    """(method, path with its parameters filled in) of every route that is no part of the API."""
    routers = [import_module(f"lohan_app.{feature}.pages").router for feature in FEATURES]
    for router in [*routers, import_module("lohan_app.system.api").root_router]:
        for route in router.routes:
            if route.path not in OPEN:
                for method in route.methods:
                    yield method, "/".join("x" if part.startswith("{") else part for part in route.path.split("/"))


def test_every_page_leads_strangers_to_the_login(anonymous: TestClient, admin: Person) -> None:
    found = list(page_routes())
    assert {("GET", "/"), ("GET", "/runs/new"), ("POST", "/runs"), ("GET", "/docs"), ("GET", "/openapi.json")} <= set(found)
    for method, path in found:
        reply = anonymous.request(method, path, headers=HTML, follow_redirects=False)
        assert reply.status_code == 303, (method, path)
        assert reply.headers["location"].startswith("/login"), (method, path)


def test_every_form_is_refused_without_its_token(admin: Person) -> None:
    forms = [path for method, path in page_routes() if method == "POST"]
    assert len(forms) >= 8
    for path in forms:
        reply = admin.client.post(path, data={"csrf_token": "wrong"}, headers=HTML | {"X-CSRF-Token": ""}, follow_redirects=False)
        assert reply.status_code == 403, path
        assert "does not belong to this session" in reply.text


def test_pages_are_not_for_keys(anonymous: TestClient, owner: Person) -> None:
    headers = owner.key(Scope.READ, Scope.RUNS) | HTML
    assert anonymous.get("/runs", headers=headers).status_code == 403
    reply = anonymous.post("/settings/api-keys", data={"name": "more", "scopes": "runs"}, headers=headers)
    assert reply.status_code == 403
    assert len(owner.client.get("/api/v1/api-keys").json()) == 1, "a leaked key makes no others"


@pytest.fixture
def things(engine: Engine, owner: Person) -> dict[str, str]:
    """A dataset and a run of the owner."""
    model = BaseModel(name="m", source=BaseModelSource.SAMPLE, state=BaseModelState.READY)
    dataset = Dataset(owner_id=owner.user.id, name="private dialogs", state=DatasetState.READY)
    with write_transaction(engine) as session:
        session.add_all([model, dataset])
        session.flush()
        run = Run(
            owner_id=owner.user.id,
            name="private run",
            base_model_id=model.id,
            dataset_id=dataset.id,
            settings={"training": {}, "engine": {}},
            state=RunState.QUEUED,
            devices=[],
        )
        session.add(run)
    return {"dataset": dataset.id, "run": run.id}


def test_a_mate_neither_sees_nor_changes_the_owners_things(owner: Person, mate: Person, things: dict[str, str]) -> None:
    for path in (f"/datasets/{things['dataset']}", f"/runs/{things['run']}", f"/runs/{things['run']}/partials/summary"):
        assert owner.client.get(path, headers=HTML).status_code == 200, path
        assert mate.client.get(path, headers=HTML).status_code == 404, path
    for path in ("/", "/runs", "/datasets", "/runs/new"):
        assert "private" not in mate.client.get(path, headers=HTML).text, path
    for path in (f"/runs/{things['run']}/cancel", f"/datasets/{things['dataset']}/delete"):
        assert mate.client.post(path, headers=HTML).status_code == 404, path
    assert "Queued" in owner.client.get(f"/runs/{things['run']}", headers=HTML).text


def test_models_are_managed_by_administrators(owner: Person, admin: Person, things: dict[str, str]) -> None:
    assert 'action="/models"' not in owner.client.get("/models", headers=HTML).text
    assert owner.client.post("/models", data={"source": "sample"}, headers=HTML).status_code == 403


@pytest.mark.parametrize(
    ("address", "target"),
    [("/runs?show=failed", "/runs?show=failed"), ("//evil.example", "/"), ("https://evil.example", "/"), ("/\\evil", "/"), ("", "/")],
)
def test_only_paths_of_this_service_are_followed_after_login(address: str, target: str) -> None:
    assert local_path(address) == target


def test_hidden_and_reordering_characters_become_visible() -> None:
    assert visible("a\u202eb\u200bc\x00d\x1be") == "a\\u202eb\\u200bc\\u0000d\\u001be"
    assert visible("two\nlines\tof ש and 🏳\u200d🌈") == "two\nlines\tof ש and 🏳\u200d🌈"


@pytest.mark.parametrize(("value", "text"), [(2e-5, "2e-5"), (0.001, "0.001"), (1.0, "1"), (1.5e-7, "1.5e-7"), (0.0, "0")])
def test_learning_rates_print_as_people_write_them(value: float, text: str) -> None:
    assert format_rate(value) == text


@pytest.mark.parametrize(
    ("user_agent", "name"),
    [
        ("Mozilla/5.0 (X11; Linux x86_64; rv:140.0) Gecko/20100101 Firefox/140.0", "Firefox on Linux"),
        ("Mozilla/5.0 (Windows NT 10.0; Win64; x64) AppleWebKit/537.36 Chrome/140.0 Safari/537.36 Edg/140.0", "Edge on Windows"),
        ("Mozilla/5.0 (iPhone; CPU iPhone OS 18_0 like Mac OS X) AppleWebKit/605.1 Version/18.0 Mobile Safari/604.1", "Safari on iPhone"),
        ("curl/8.9", "curl"),
        ("", "Unknown browser"),
    ],
)
def test_browsers_are_named_as_their_users_know_them(user_agent: str, name: str) -> None:
    assert describe_browser(user_agent) == name
