"""Storage over REST and pages: who sees what, freeing states, quotas, the reserve; and `lohan gc`."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fixtures.runs import make_run, read_run, set_run
from fixtures.service import Person, page_text
from sqlalchemy import Engine

from lohan.hardware.probe import probe
from lohan.units import GIB, MIB, format_bytes
from lohan_app.auth.schemas import Scope
from lohan_app.db import write_transaction
from lohan_app.entities import Dataset, DatasetState, RunState
from lohan_app.entities.base import new_id, now
from lohan_app.errors import Unavailable
from lohan_app.hardware.service import with_reserve
from lohan_app.runs.schemas import RunRequest
from lohan_app.settings import Settings
from lohan_app.storage.quota import planned_bytes
from lohan_app.storage.report import measure
from lohan_app.worker.gc import Mode, run_gc
from lohan_app.worker.housekeeping import Housekeeper
from lohan_app.worker.launcher import RunFiles
from lohan_app.worker.processes import holding

PLAN = {"parameters": 10, "precision": "bf16", "tiers": [{"tier": "ssd", "items": [{"name": "states", "bytes": 100}]}]}


def with_states(settings: Settings, engine: Engine, person: Person, state: RunState = RunState.FAILED, size: int = 10_000) -> str:
    run_id = make_run(settings, engine, state=state, finished_at=now(), step=2, name=f"run of {person.user.name}")
    set_run(engine, run_id, owner_id=person.user.id)
    folder = settings.state_folders[0] / run_id
    folder.mkdir(parents=True)
    (folder / "states.bin").write_bytes(bytes(size))
    return run_id


def measured(settings: Settings, engine: Engine) -> None:
    Housekeeper(settings, engine).measure()


def storage(person: Person) -> dict[str, Any]:
    reply = person.client.get("/api/v1/storage")
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


# ---------------------------------------------------------------- who sees what
def test_before_the_first_measurement_there_are_drives_and_no_holdings(owner: Person, settings: Settings) -> None:
    found = storage(owner)
    assert (found["measured_at"], found["holdings"]) == (None, [])
    places = {place for drive in found["drives"] for place in drive["directories"]}
    assert places == {str(settings.data_dir), str(settings.state_folders[0])}
    assert all(0 < drive["free_bytes"] <= drive["total_bytes"] and drive["reserve_bytes"] == GIB for drive in found["drives"])
    assert "Not measured yet" in page_text(owner, "/storage")


@pytest.mark.database
def test_members_see_their_own_and_administrators_all(
    owner: Person, mate: Person, admin: Person, settings: Settings, engine: Engine
) -> None:
    mine, theirs = (with_states(settings, engine, person) for person in (owner, mate))
    unknown = settings.state_folders[0] / new_id("run")
    unknown.mkdir()
    measured(settings, engine)
    assert {item["id"] for item in storage(owner)["holdings"]} == {mine}
    assert [user["user_name"] for user in storage(owner)["users"]] == ["owner"]
    assert {mine, theirs, unknown.name} <= {item["id"] for item in storage(admin)["holdings"]}
    assert [item["id"] for item in storage(admin)["holdings"] if not item["is_known"]] == [unknown.name]
    states = next(item for item in storage(owner)["holdings"] if item["kind"] == "states")
    assert states["owner_name"] == "owner"
    assert states["expires_at"][:10] == (read_run(engine, mine).finished_at + timedelta(days=7)).isoformat()[:10]  # type: ignore[operator]
    assert "run of owner" in page_text(owner, "/storage")
    assert "run of mate" not in page_text(owner, "/storage")
    assert "Unknown to the database" in page_text(admin, "/storage")


def test_a_drive_that_is_not_there_says_so(admin: Person, settings: Settings) -> None:
    settings.state_folders[0].rmdir()
    gone = next(drive for drive in storage(admin)["drives"] if str(settings.state_folders[0]) in drive["directories"])
    assert gone["problem"] == "No such file or directory: is the drive mounted?"
    assert "This drive cannot be looked at" in page_text(admin, "/storage")


# ---------------------------------------------------------------- freeing states
@pytest.mark.database
@pytest.mark.parametrize("state", [RunState.FAILED, RunState.CANCELLED, RunState.SUCCEEDED])
def test_states_of_an_ended_run_are_freed_when_asked(owner: Person, settings: Settings, engine: Engine, state: RunState) -> None:
    run_id, other = (with_states(settings, engine, owner, state) for _ in range(2))
    measured(settings, engine)
    for _ in range(2):
        assert owner.client.delete(f"/api/v1/runs/{run_id}/states").status_code == 204
    Housekeeper(settings, engine).remove_due()
    left = {path.name for path in settings.state_folders[0].iterdir()}
    assert left == ({other} if state is not RunState.SUCCEEDED else set())
    assert run_id not in {item["id"] for item in storage(owner)["holdings"] if item["kind"] == "states"}, "though measured before"
    assert read_run(engine, run_id).state is state


@pytest.mark.database
def test_states_that_are_needed_are_not_freed(owner: Person, mate: Person, settings: Settings, engine: Engine, anonymous: Any) -> None:
    run_id = with_states(settings, engine, owner, RunState.PAUSED)
    address = f"/api/v1/runs/{run_id}/states"
    assert owner.client.delete(address).json()["detail"] == "the run is paused, and goes on from its states"
    set_run(engine, run_id, state=RunState.FAILED)
    assert mate.client.delete(address).status_code == 404
    assert anonymous.delete(address, headers=owner.key(Scope.READ)).status_code == 403
    with holding(RunFiles(settings.run_folder(run_id)).trainer_lock):
        assert owner.client.delete(address).status_code == 409
    retry = make_run(settings, engine, parent_id=run_id)
    reply = owner.client.post(f"/storage/runs/{run_id}/free", headers={"Accept": "text/html"})
    assert reply.status_code == 409
    assert "a retry that waits begins with these states" in reply.text
    assert (settings.state_folders[0] / run_id / "states.bin").exists()
    set_run(engine, retry, state=RunState.CANCELLED)
    assert owner.client.post(f"/storage/runs/{run_id}/free", follow_redirects=False).status_code == 303
    assert not (settings.state_folders[0] / run_id).exists()


# ---------------------------------------------------------------- quota and reserve
@pytest.fixture
def limited(app: FastAPI) -> FastAPI:
    """An installation whose members may hold one MiB."""
    context = app.state.context
    context.settings = context.settings.model_copy(update={"user_quota_bytes": MIB})
    return app


@pytest.mark.database
def test_an_upload_beyond_the_quota_is_refused_and_leaves_nothing(
    limited: FastAPI, owner: Person, mate: Person, admin: Person, settings: Settings, engine: Engine
) -> None:
    row = b'{"prompt": "a", "completion": "b"}\n'
    half = row * (600 * 1024 // len(row))
    first = owner.client.post("/api/v1/datasets?name=large", content=half)
    assert first.status_code in (200, 201), first.text
    for content in (half, iter([half])):  # with and without a Content-Length
        reply = owner.client.post("/api/v1/datasets?name=second", content=content)
        assert reply.status_code == 409, reply.text
        body = reply.json()
        assert body["type"] == "urn:lohan:problem:quota-exceeded"
        assert body["have_bytes"] == MIB - len(half)
        assert body["need_bytes"] > body["have_bytes"]
        assert body["remedy"] == f"Delete what is no longer needed: dataset 'large' ({format_bytes(len(half))})."
    assert len(owner.client.get("/api/v1/datasets").json()["items"]) == 1
    assert list((settings.data_dir / "uploads").iterdir()) == []
    assert len(list((settings.data_dir / "datasets").iterdir())) == 1
    assert mate.client.post("/api/v1/datasets?name=other", content=half).is_success, "each has their own"
    assert all(admin.client.post("/api/v1/datasets?name=x", content=half).is_success for _ in range(2)), "administrators have none"
    usage = storage(owner)["users"][0]
    assert (usage["bytes"], usage["quota_bytes"]) == (len(half), MIB)


@pytest.mark.database
def test_a_retry_beyond_the_quota_is_refused_with_what_could_be_deleted(
    limited: FastAPI, owner: Person, settings: Settings, engine: Engine
) -> None:
    run_id = with_states(settings, engine, owner, size=64 * 1024)
    other = with_states(settings, engine, owner, size=512 * 1024)
    plan = PLAN | {"tiers": [{"tier": "ssd", "items": [{"name": "states", "bytes": 900 * 1024}]}]}
    for each in (run_id, other):
        set_run(engine, each, plan=plan)
    measured(settings, engine)
    reply = owner.client.post(f"/api/v1/runs/{run_id}/retry")
    assert reply.status_code == 409
    body = reply.json()
    assert body["type"] == "urn:lohan:problem:quota-exceeded"
    assert body["need_bytes"] > body["have_bytes"] > 0
    assert "run 'run of owner'" in body["remedy"]
    assert owner.client.delete(f"/api/v1/runs/{other}").status_code == 204
    assert owner.client.post(f"/api/v1/runs/{run_id}/retry").status_code == 201, "room was made"


def test_a_plan_counts_its_states_on_the_drives_and_its_result() -> None:
    ram = {"tier": "ram", "items": [{"name": "states", "bytes": 7}]}
    assert planned_bytes(PLAN | {"tiers": [*PLAN["tiers"], ram]}) == 100 + 10 * 2  # type: ignore[misc]
    assert planned_bytes(PLAN | {"precision": "fp32"}) == 100 + 10 * 4
    assert planned_bytes(None) == 0


def test_the_reserve_is_kept_from_every_state_directory(settings: Settings) -> None:
    facts = probe(settings.state_folders)
    kept = with_reserve(facts, settings.model_copy(update={"state_reserve_bytes": 3 * GIB}))
    assert [each.free_bytes for each in kept.state_directories] == [max(0, each.free_bytes - 2 * GIB) for each in facts.state_directories]
    assert with_reserve(facts, settings.model_copy(update={"state_reserve_bytes": 0})) == facts, "plans leave one GiB in any case"


@pytest.mark.parametrize("days", [-1, 3651, True, "7"])
def test_days_are_a_number(days: object) -> None:
    with pytest.raises(ValueError, match="keep_states_days"):
        RunRequest.model_validate({"name": "x", "base_model_id": "m", "dataset_id": "d", "keep_states_days": days})


# ---------------------------------------------------------------- lohan gc
def gc(settings: Settings, mode: Mode, *, with_unknown: bool = False) -> dict[str, Any]:
    said: list[str] = []
    run_gc(settings, mode, with_unknown=with_unknown, as_json=True, say=said.append)
    document: dict[str, Any] = json.loads("\n".join(said))
    return document


def make_old(path: Path) -> None:
    for each in (*path.rglob("*"), path):
        os.utime(each, (0, 0))


def test_gc_says_what_it_would_remove_and_then_removes_that(owner: Person, settings: Settings, engine: Engine) -> None:
    expired = with_states(settings, engine, owner)
    set_run(engine, expired, finished_at=now() - timedelta(days=8))
    kept = with_states(settings, engine, owner)
    unknown, in_use, foreign = (settings.state_folders[0] / name for name in (new_id("run"), new_id("run"), "photos"))
    for folder in (unknown, in_use, foreign):
        folder.mkdir()
        (folder / "file").write_text("x" * 5000)
    make_old(unknown)
    before = measure(settings).items
    would = gc(settings, Mode.LOOK, with_unknown=True)["would_remove"]
    assert {(line["kind"], line["id"]) for line in would} == {("states", expired), ("states", unknown.name)}
    assert all(line["bytes"] > 0 for line in would)
    assert measure(settings).items == before
    assert {line["id"] for line in gc(settings, Mode.REMOVE)["removed"]} == {expired}
    document = gc(settings, Mode.REMOVE, with_unknown=True)
    assert [line["id"] for line in document["removed"]] == [unknown.name]
    assert {path.name for path in settings.state_folders[0].iterdir()} == {kept, in_use.name, "photos"}
    assert {item["id"] for item in document["holdings"] if item["kind"] == "states"} == {kept, in_use.name}
    assert gc(settings, Mode.REMOVE, with_unknown=True)["removed"] == []


def test_gc_in_words(owner: Person, settings: Settings, engine: Engine) -> None:
    said: list[str] = []
    run_gc(settings, Mode.LOOK, with_unknown=False, as_json=False, say=said.append)
    assert "Nothing is held." in said
    assert "Would remove nothing: nothing has expired." in said
    run_id = with_states(settings, engine, owner)
    said.clear()
    run_gc(settings, Mode.REMOVE, with_unknown=False, as_json=False, say=said.append)
    line = next(line for line in said if "states" in line and run_id in line)
    assert "'run of owner' of owner, failed" in line
    assert line.endswith("UTC: a retry goes on from them")


def test_gc_without_a_database_removes_nothing(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "data")
    settings.make_folders()
    folder = settings.state_folders[0] / new_id("run")
    folder.mkdir()
    make_old(folder)
    with pytest.raises(Unavailable, match="the database does not answer"):
        run_gc(settings, Mode.REMOVE, with_unknown=True, as_json=False)
    assert folder.is_dir()


def test_a_dataset_is_named_and_listed(owner: Person, settings: Settings, engine: Engine) -> None:
    with write_transaction(engine) as session:
        dataset = Dataset(owner_id=owner.user.id, name="dialogs", state=DatasetState.READY, size_bytes=5)
        session.add(dataset)
    folder = settings.data_dir / "datasets" / dataset.id
    folder.mkdir()
    (folder / "rows.jsonl").write_text("{}\n")
    measured(settings, engine)
    (item,) = storage(owner)["holdings"]
    assert (item["kind"], item["name"], item["state"], item["is_known"]) == ("dataset", "dialogs", "ready", True)
