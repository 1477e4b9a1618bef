"""Pause, resume, stop, force-stop, submit, retry, clone and delete over REST: what happens, what is refused in which words, and once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fixtures.runs import set_run
from fixtures.service import Person
from fixtures.things import ready_dataset, ready_model, run_body
from sqlalchemy import Engine, func, select
from starlette.testclient import TestClient

from lohan_app.auth.schemas import Scope
from lohan_app.db import read_transaction
from lohan_app.entities import AuditEntry, BaseModel, Dataset, PauseCause, Run, RunState, Wanted
from lohan_app.entities.base import now
from lohan_app.settings import Settings
from lohan_app.worker.launcher import RunFiles
from lohan_app.worker.processes import holding

REQUESTS = ("pause", "resume", "stop", "cancel", "force-stop", "submit", "retry", "clone")


@pytest.fixture
def model(settings: Settings, engine: Engine) -> BaseModel:
    return ready_model(settings, engine)


@pytest.fixture
def dataset(settings: Settings, engine: Engine, owner: Person) -> Dataset:
    return ready_dataset(settings, engine, owner)


@pytest.fixture
def run_id(owner: Person, model: BaseModel, dataset: Dataset) -> str:
    """A queued run of the owner."""
    reply = owner.client.post("/api/v1/runs", json=run_body(model, dataset))
    assert reply.status_code == 201, reply.text
    return str(reply.json()["id"])


def stored(engine: Engine, run_id: str) -> Run:
    with read_transaction(engine) as session:
        run = session.get(Run, run_id)
    assert run is not None
    return run


def ask(person: Person, run_id: str, request: str, **headers: str) -> Any:
    return person.client.post(f"/api/v1/runs/{run_id}/{request}", headers=headers)


def run_count(engine: Engine) -> int:
    with read_transaction(engine) as session:
        return session.scalar(select(func.count()).select_from(Run)) or 0


# ---------------------------------------------------------------- pause and resume
@pytest.mark.database
def test_a_queued_run_is_paused_and_queued_again(owner: Person, engine: Engine, run_id: str) -> None:
    paused = ask(owner, run_id, "pause").json()
    assert (paused["state"], paused["wanted"], paused["pause_cause"]) == ("paused", "pause", "request")
    assert paused["allowed"] == ["resume", "cancel", "clone"], "there is no step to stop with"
    assert ask(owner, run_id, "pause").json()["state"] == "paused"
    resumed = ask(owner, run_id, "resume").json()
    assert (resumed["state"], resumed["wanted"], resumed["pause_cause"]) == ("queued", "run", None)
    assert ask(owner, run_id, "resume").json()["state"] == "queued"
    with read_transaction(engine) as session:
        actions = session.scalars(select(AuditEntry.action).where(AuditEntry.subject == run_id).order_by(AuditEntry.id)).all()
    assert actions == ["run.submit", "run.pause", "run.resume"], "asking again is no action"


@pytest.mark.database
@pytest.mark.parametrize("request_name", ["pause", "stop", "cancel"])
def test_a_run_at_work_is_asked_and_left_to_its_supervisor(owner: Person, engine: Engine, run_id: str, request_name: str) -> None:
    set_run(engine, run_id, state=RunState.RUNNING, step=2, attempt=1)
    for _ in range(2):
        run = ask(owner, run_id, request_name).json()
        assert (run["state"], run["wanted"]) == ("running", request_name)


@pytest.mark.database
def test_a_pause_can_be_taken_back_and_a_cancellation_cannot(owner: Person, engine: Engine, run_id: str) -> None:
    set_run(engine, run_id, state=RunState.PAUSING, wanted=Wanted.PAUSE, step=2)
    assert ask(owner, run_id, "resume").json()["wanted"] == "run"
    assert ask(owner, run_id, "cancel").json()["wanted"] == "cancel"
    for request in ("resume", "pause", "stop"):
        reply = ask(owner, run_id, request)
        assert reply.status_code == 409
        assert reply.json()["detail"] == f"the run is pausing and being cancelled: {request} is not possible"
        assert reply.json()["remedy"] == "Allowed now: force-stop, clone."


@pytest.mark.database
def test_a_run_paused_by_a_full_drive_can_be_kept_paused(owner: Person, engine: Engine, run_id: str) -> None:
    set_run(engine, run_id, state=RunState.PAUSED, pause_cause=PauseCause.DISK_FULL, state_reason="The drive is full.", step=2)
    run = ask(owner, run_id, "pause").json()
    assert (run["state"], run["pause_cause"], run["wanted"], run["state_reason"]) == ("paused", "request", "pause", "")


# ---------------------------------------------------------------- stop and force-stop
@pytest.mark.database
def test_nothing_is_kept_of_a_run_that_has_nothing(owner: Person, engine: Engine, run_id: str) -> None:
    set_run(engine, run_id, state=RunState.RUNNING)
    reply = ask(owner, run_id, "stop")
    assert (reply.status_code, reply.json()["detail"]) == (409, "the run has done no step: there is nothing to keep")
    settings = {"training": {}, "engine": {"durability": "none"}}
    set_run(engine, run_id, state=RunState.PAUSED, step=5, settings=settings)
    reply = ask(owner, run_id, "stop")
    assert reply.status_code == 409
    assert "durability none" in reply.json()["detail"]
    assert stored(engine, run_id).wanted is Wanted.RUN


@pytest.mark.database
def test_a_paused_run_is_stopped_by_way_of_the_queue(owner: Person, engine: Engine, run_id: str) -> None:
    set_run(engine, run_id, state=RunState.PAUSED, wanted=Wanted.PAUSE, pause_cause=PauseCause.REQUEST, step=5)
    run = ask(owner, run_id, "stop").json()
    assert (run["state"], run["wanted"]) == ("queued", "stop")


@pytest.mark.database
@pytest.mark.parametrize(("wanted", "then"), [("run", "pause"), ("pause", "pause"), ("stop", "pause"), ("cancel", "cancel")])
def test_a_kill_names_the_attempt_at_work(owner: Person, engine: Engine, run_id: str, wanted: str, then: str) -> None:
    set_run(engine, run_id, state=RunState.RUNNING, attempt=3, wanted=Wanted(wanted))
    for _ in range(2):
        assert ask(owner, run_id, "force-stop").json()["wanted"] == then
    assert stored(engine, run_id).kill_attempt == 3


# ---------------------------------------------------------------- retry
@pytest.mark.database
@pytest.mark.parametrize("state", [RunState.FAILED, RunState.CANCELLED])
def test_a_retry_is_a_new_run_of_the_same_owner(owner: Person, admin: Person, engine: Engine, run_id: str, state: RunState) -> None:
    set_run(engine, run_id, state=state, finished_at=now(), step=2, attempt=3)
    before = stored(engine, run_id)
    reply = ask(admin, run_id, "retry")
    assert reply.status_code == 201
    made = reply.json()
    assert reply.headers["Location"] == f"/api/v1/runs/{made['id']}"
    assert (made["parent_id"], made["state"], made["name"], made["owner_id"]) == (run_id, "queued", "first try", owner.user.id)
    assert (made["settings"], made["plan"]) == (before.settings, before.plan)
    assert (made["attempt"], made["step"], made["prepared_at"]) == (0, 0, None)
    assert stored(engine, run_id).state is state
    again = ask(owner, run_id, "retry")
    assert again.status_code == 409
    assert again.json()["detail"] == f"the run is being retried by {made['id']}"
    assert run_count(engine) == 2
    set_run(engine, made["id"], state=RunState.FAILED)
    assert ask(owner, run_id, "retry").status_code == 201


@pytest.mark.database
def test_a_retry_that_is_sent_fifty_times_is_one(owner: Person, engine: Engine, run_id: str) -> None:
    set_run(engine, run_id, state=RunState.FAILED)
    with ThreadPoolExecutor(10) as pool:
        replies = list(pool.map(lambda _: ask(owner, run_id, "retry", **{"Idempotency-Key": "k"}), range(50)))
    assert {(reply.status_code, reply.json().get("id")) for reply in replies} == {(201, replies[0].json()["id"])}
    assert sum("Idempotent-Replayed" not in reply.headers for reply in replies) == 1
    assert run_count(engine) == 2


@pytest.mark.database
def test_a_retry_needs_its_model_and_its_rows(owner: Person, admin: Person, engine: Engine, run_id: str, dataset: Dataset) -> None:
    set_run(engine, run_id, state=RunState.FAILED)
    assert owner.client.delete(f"/api/v1/datasets/{dataset.id}").status_code == 204
    for request in ("retry", "clone"):
        reply = ask(owner, run_id, request)
        assert (reply.status_code, reply.json()["place"]) == (404, "dataset_id")


# ---------------------------------------------------------------- clone and submit
@pytest.mark.database
def test_a_clone_is_a_draft_until_it_is_submitted(owner: Person, engine: Engine, run_id: str) -> None:
    reply = ask(owner, run_id, "clone")
    assert reply.status_code == 201
    made = reply.json()
    assert (made["state"], made["name"], made["parent_id"], made["plan"]) == ("draft", "Copy of first try", None, None)
    assert made["settings"] == stored(engine, run_id).settings
    assert made["allowed"] == ["submit", "cancel", "clone", "delete"]
    queued = ask(owner, made["id"], "submit").json()
    assert (queued["state"], queued["plan"]["model"]) == ("queued", "tiny")
    assert ask(owner, made["id"], "submit").json()["state"] == "queued"
    assert stored(engine, run_id).state is RunState.QUEUED


@pytest.mark.database
def test_a_draft_that_does_not_fit_any_more_stays_a_draft(owner: Person, engine: Engine, run_id: str) -> None:
    draft = ask(owner, run_id, "clone").json()["id"]
    engine_settings = stored(engine, draft).settings["engine"] | {"host_memory_bytes": 1}
    set_run(engine, draft, settings=stored(engine, draft).settings | {"engine": engine_settings})
    reply = ask(owner, draft, "submit")
    assert (reply.status_code, reply.json()["type"]) == (409, "urn:lohan:problem:capacity-error")
    assert stored(engine, draft).state is RunState.DRAFT


@pytest.mark.database
def test_a_clone_belongs_to_whoever_made_it_and_has_a_name_that_fits(admin: Person, engine: Engine, run_id: str) -> None:
    set_run(engine, run_id, name="x" * 255)
    made = ask(admin, run_id, "clone").json()
    assert (made["owner_id"], made["name"]) == (admin.user.id, ("Copy of " + "x" * 255)[:255])


# ---------------------------------------------------------------- delete
@pytest.mark.database
@pytest.mark.parametrize("state", [RunState.SUCCEEDED, RunState.FAILED, RunState.CANCELLED, RunState.DRAFT])
def test_a_deleted_run_is_gone_for_everybody_and_its_folder_is_in_the_trash(
    owner: Person, admin: Person, engine: Engine, settings: Settings, run_id: str, state: RunState
) -> None:
    other = ask(owner, run_id, "clone").json()["id"]
    set_run(engine, run_id, state=state)
    for each in (run_id, other):
        folder = settings.run_folder(each)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "trainer.log").write_text(each)
    assert owner.client.delete(f"/api/v1/runs/{run_id}").status_code == 204
    for person in (owner, admin):
        assert person.client.get(f"/api/v1/runs/{run_id}").status_code == 404
        assert person.client.delete(f"/api/v1/runs/{run_id}").status_code == 404
        assert [ask(person, run_id, request).status_code for request in REQUESTS] == [404] * len(REQUESTS)
        assert [run["id"] for run in person.client.get("/api/v1/runs").json()["items"]] == [other]
    assert not settings.run_folder(run_id).exists()
    assert (settings.data_dir / "trash" / run_id / "trainer.log").read_text() == run_id
    assert (settings.run_folder(other) / "trainer.log").read_text() == other
    run = stored(engine, run_id)
    assert run.deleted_at is not None
    assert run.state is (RunState.CANCELLED if state is RunState.DRAFT else state)


@pytest.mark.database
def test_a_run_that_has_not_ended_is_not_deleted(owner: Person, engine: Engine, run_id: str) -> None:
    for state in (RunState.QUEUED, RunState.STARTING, RunState.RUNNING, RunState.PAUSING, RunState.PAUSED, RunState.CANCELLING):
        set_run(engine, run_id, state=state, step=1)
        reply = owner.client.delete(f"/api/v1/runs/{run_id}")
        assert reply.status_code == 409
        assert reply.json()["detail"] == f"the run is {state}: delete is not possible"
        assert reply.json()["remedy"].startswith("Allowed now: ")


@pytest.mark.database
def test_a_run_whose_folder_somebody_works_in_is_not_deleted(owner: Person, engine: Engine, settings: Settings, run_id: str) -> None:
    set_run(engine, run_id, state=RunState.FAILED)
    settings.run_folder(run_id).mkdir(parents=True, exist_ok=True)
    with holding(RunFiles(settings.run_folder(run_id)).trainer_lock):
        reply = owner.client.delete(f"/api/v1/runs/{run_id}")
        assert reply.status_code == 409
        assert "still works in the run's folder" in reply.json()["detail"]
    assert owner.client.delete(f"/api/v1/runs/{run_id}").status_code == 204


@pytest.mark.database
def test_a_deleted_draft_holds_nothing_back(owner: Person, run_id: str, dataset: Dataset) -> None:
    draft = ask(owner, run_id, "clone").json()["id"]
    ask(owner, run_id, "cancel")
    assert owner.client.delete(f"/api/v1/datasets/{dataset.id}").status_code == 409
    assert owner.client.delete(f"/api/v1/runs/{draft}").status_code == 204
    assert owner.client.delete(f"/api/v1/datasets/{dataset.id}").status_code == 204


# ---------------------------------------------------------------- once, and by whom
@pytest.mark.database
def test_a_request_with_a_key_is_acted_on_once(owner: Person, engine: Engine, run_id: str) -> None:
    key = {"Idempotency-Key": "pause-1"}
    first = ask(owner, run_id, "pause", **key)
    ask(owner, run_id, "resume")
    again = ask(owner, run_id, "pause", **key)
    assert again.json() == first.json()
    assert again.headers["Idempotent-Replayed"] == "true"
    assert stored(engine, run_id).state is RunState.QUEUED, "the program that asked again did not pause it again"
    assert ask(owner, run_id, "cancel", **key).status_code == 422
    assert ask(owner, run_id, "pause", **{"Idempotency-Key": " "}).status_code == 422


@pytest.mark.database
def test_requests_that_come_at_once_leave_one_of_their_answers(owner: Person, engine: Engine, run_id: str) -> None:
    requests = ["pause", "resume", "cancel", "clone"] * 10
    with ThreadPoolExecutor(8) as pool:
        statuses = set(pool.map(lambda request: ask(owner, run_id, request).status_code, requests))
    assert statuses <= {200, 201, 409}
    assert stored(engine, run_id).state is RunState.CANCELLED
    assert run_count(engine) == 11


@pytest.mark.database
def test_strangers_runs_and_keys_without_the_scope(
    anonymous: TestClient, admin: Person, owner: Person, mate: Person, engine: Engine, run_id: str
) -> None:
    reader = owner.key(Scope.READ)
    for request in REQUESTS:
        address = f"/api/v1/runs/{run_id}/{request}"
        assert mate.client.post(address).status_code == 404, request
        assert anonymous.post(address).status_code == 401, request
        assert anonymous.post(address, headers=reader).status_code == 403, request
    set_run(engine, run_id, state=RunState.FAILED)
    assert mate.client.delete(f"/api/v1/runs/{run_id}").status_code == 404
    assert anonymous.delete(f"/api/v1/runs/{run_id}", headers=reader).status_code == 403
    assert anonymous.delete(f"/api/v1/runs/{run_id}", headers=owner.key(Scope.RUNS)).status_code == 204
