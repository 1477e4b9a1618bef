"""Runs over REST: what is refused and why, plans, one run per idempotency key, cancelling, whose eyes. What else is asked of runs:
test_runs_lifecycle.py."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from fixtures.runs import set_run
from fixtures.service import Person
from fixtures.things import TINY, ready_dataset, ready_model, run_body
from sqlalchemy import Engine, func, select
from starlette.testclient import TestClient

from lohan.planning.plan import Plan
from lohan.planning.tiers import Tier
from lohan_app.auth.schemas import Scope
from lohan_app.db import read_transaction
from lohan_app.entities import AuditEntry, BaseModelState, DatasetState, IdempotencyKey, Run, RunState, Wanted
from lohan_app.settings import Settings


@pytest.fixture
def model(settings: Settings, engine: Engine):
    return ready_model(settings, engine)


@pytest.fixture
def dataset(settings: Settings, engine: Engine, owner: Person):
    return ready_dataset(settings, engine, owner)


def submit(person: Person, body: dict, **headers: str):
    return person.client.post("/api/v1/runs", json=body, headers=headers)


def run_count(engine: Engine) -> int:
    with read_transaction(engine) as session:
        return session.scalar(select(func.count()).select_from(Run)) or 0


# ---------------------------------------------------------------- plans
def test_a_plan_is_the_planners_own(owner: Person, model, dataset):
    body = {key: value for key, value in run_body(model, dataset).items() if key != "name"}
    reply = owner.client.post("/api/v1/plans", json=body)
    assert reply.status_code == 200, reply.text
    plan = Plan.model_validate(reply.json())
    assert (plan.model, plan.parameters, plan.device, plan.batch_size) == ("tiny", TINY.parameters, "cpu", 2)
    assert plan.tier(Tier.SSD).used_bytes > 0


def test_what_does_not_fit_says_need_and_have(owner: Person, model, dataset):
    reply = owner.client.post("/api/v1/plans", json={"base_model_id": model.id, "engine": {"host_memory_bytes": 1}})
    problem = reply.json()
    assert (reply.status_code, problem["type"]) == (409, "urn:lohan:problem:capacity-error")
    assert problem["need_bytes"] > problem["have_bytes"] >= 0
    assert problem["remedy"]


def test_a_plan_counts_what_our_own_runs_hold_as_free(owner: Person, model, dataset, engine: Engine, app):
    total = app.state.context.hardware.facts().ram.total_bytes
    run_id = submit(owner, run_body(model, dataset)).json()["id"]
    body = {"base_model_id": model.id}
    before = Plan.model_validate(owner.client.post("/api/v1/plans", json=body).json())
    set_run(engine, run_id, state=RunState.RUNNING, devices=["cpu:0"], reserved_ram_bytes=total)
    after = Plan.model_validate(owner.client.post("/api/v1/plans", json=body).json())
    assert after.tier(Tier.RAM).capacity_bytes >= before.tier(Tier.RAM).capacity_bytes


# ---------------------------------------------------------------- submission
@pytest.mark.database
def test_a_submission_queues_a_run_with_its_plan(owner: Person, model, dataset, engine: Engine):
    reply = submit(owner, run_body(model, dataset))
    assert reply.status_code == 201, reply.text
    run = reply.json()
    assert reply.headers["location"] == f"/api/v1/runs/{run['id']}"
    assert (run["state"], run["wanted"], run["owner_name"], run["base_model_name"], run["dataset_name"]) == (
        "queued", "run", "owner", "tiny", "talks",
    )  # fmt: skip
    assert run["settings"]["training"]["batch_size"] == 2
    assert run["settings"]["engine"]["state_directories"] == []
    assert Plan.model_validate(run["plan"]).batch_size == 2
    assert owner.client.get(f"/api/v1/runs/{run['id']}").json() == run
    listed = owner.client.get("/api/v1/runs").json()["items"]
    assert [item["id"] for item in listed] == [run["id"]] and "plan" not in listed[0]
    with read_transaction(engine) as session:
        assert session.scalars(select(AuditEntry.subject).where(AuditEntry.action == "run.submit")).all() == [run["id"]]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"training": {"batch_size": 0}}, "training.batch_size"),
        ({"training": {"batch_size": True}}, "training.batch_size"),
        ({"training": {"learning_rate": "1e999"}}, "training.learning_rate"),
        ({"training": {"learning_rate": -1}}, "training.learning_rate"),
        ({"training": {"epochs": -1}}, "training.epochs"),
        ({"training": {"max_steps": 10**9}}, "training.max_steps"),
        ({"training": {"trick": 1}}, "training.trick"),
        ({"engine": {"device": "gpu; rm -rf /"}}, "engine.device"),
        ({"engine": {"state_directories": ["/etc"]}}, "engine.state_directories"),
        ({"engine": {"unsafe_filesystems": "allow"}}, "engine.unsafe_filesystems"),
        ({"engine": {"durability": "always"}}, "engine.durability"),
        ({"engine": {"durability": "snapshot", "snapshot_minutes": 0}}, "engine.snapshot_minutes"),
        ({"training": {"keep_steps": [100]}}, "training.keep_steps"),
        ({"engine": {"ram_state_bytes": -1}}, "engine.ram_state_bytes"),
        ({"output_dir": "; curl x|sh"}, "output_dir"),
        ({"name": "\u202e\u200b"}, "name"),
        ({"name": ""}, "name"),
        ({"base_model_id": "x" * 100}, "base_model_id"),
        ({"dataset_id": None}, "dataset_id"),
        ({"skip_bad_rows": "perhaps"}, "skip_bad_rows"),
    ],
)
def test_a_wrong_field_is_named_with_its_path(owner: Person, model, dataset, engine: Engine, change: dict, field: str):
    reply = submit(owner, run_body(model, dataset, **change))
    problem = reply.json()
    assert (reply.status_code, [fault["field"] for fault in problem["errors"]]) == (422, [field])
    assert field in problem["detail"] and problem["remedy"]
    assert run_count(engine) == 0


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none_are_refused(owner: Person, model, dataset, literal: str):
    body = json.dumps(run_body(model, dataset, training={"learning_rate": 0.5})).replace("0.5", literal)
    reply = owner.client.post("/api/v1/runs", content=body, headers={"Content-Type": "application/json"})
    assert (reply.status_code, reply.json()["place"]) == (422, "training.learning_rate")


def test_every_fault_is_named_at_once(owner: Person, model, dataset):
    training = {"batch_size": 0, "epochs": -1, "seed": "x"}
    problem = submit(owner, run_body(model, dataset, training=training)).json()
    assert [fault["field"] for fault in problem["errors"]] == ["training.batch_size", "training.epochs", "training.seed"]


@pytest.mark.parametrize(
    ("change", "status", "place"),
    [
        ({"engine": {"micro_batch_size": 3}}, 422, "engine.micro_batch_size"),
        ({"training": {"sequence_length": 2048}}, 422, "training.sequence_length"),
        ({"engine": {"device": "cuda:7"}}, 422, "engine.device"),
        ({"engine": {"device": "GPU-0123abcd"}}, 422, "engine.device"),
        ({"base_model_id": "model_none"}, 404, "base_model_id"),
        ({"dataset_id": "dataset_none"}, 404, "dataset_id"),
    ],
)
def test_what_fields_do_not_show_is_checked_too(owner: Person, model, dataset, engine: Engine, change: dict, status: int, place: str):
    reply = submit(owner, run_body(model, dataset, **change))
    assert (reply.status_code, reply.json()["place"]) == (status, place), reply.text
    assert reply.json()["remedy"]
    assert run_count(engine) == 0


def test_bad_rows_are_left_out_only_by_choice(owner: Person, model, settings: Settings, engine: Engine):
    dataset = ready_dataset(settings, engine, owner, bad_lines=("{",))
    refused = submit(owner, run_body(model, dataset))
    assert (refused.status_code, refused.json()["place"]) == (422, "skip_bad_rows")
    assert "1 rows" in refused.json()["detail"] and f"/datasets/{dataset.id}/errors" in refused.json()["remedy"]
    assert submit(owner, run_body(model, dataset, skip_bad_rows=True)).status_code == 201


@pytest.mark.parametrize("state", [DatasetState.UPLOADING, DatasetState.VALIDATING, DatasetState.INVALID])
def test_a_dataset_that_is_not_ready_is_refused_with_its_state(owner: Person, model, settings: Settings, engine: Engine, state):
    dataset = ready_dataset(settings, engine, owner, state=state)
    reply = submit(owner, run_body(model, dataset))
    assert reply.status_code == 409 and state in reply.json()["detail"]


@pytest.mark.parametrize("state", [BaseModelState.INSPECTING, BaseModelState.INVALID])
def test_a_model_that_is_not_ready_is_refused_with_its_state(owner: Person, dataset, settings: Settings, engine: Engine, state):
    model = ready_model(settings, engine, state=state)
    reply = submit(owner, run_body(model, dataset))
    assert reply.status_code == 409 and state in reply.json()["detail"]


def test_another_members_dataset_looks_like_none(mate: Person, model, dataset, engine: Engine):
    assert submit(mate, run_body(model, dataset)).status_code == 404
    assert mate.client.post("/api/v1/plans", json={"base_model_id": model.id, "dataset_id": dataset.id}).status_code == 404
    assert run_count(engine) == 0


# ---------------------------------------------------------------- idempotency
@pytest.mark.database
def test_fifty_equal_submissions_at_once_make_one_run(owner: Person, model, dataset, engine: Engine):
    body = run_body(model, dataset)
    with ThreadPoolExecutor(16) as pool:
        replies = list(pool.map(lambda _: submit(owner, body, **{"Idempotency-Key": "once"}), range(50)))
    assert {reply.status_code for reply in replies} == {201}
    assert len({reply.text for reply in replies}) == 1
    assert sum("idempotent-replayed" not in reply.headers for reply in replies) == 1
    assert run_count(engine) == 1


@pytest.mark.database
def test_a_key_belongs_to_one_request_of_one_user(owner: Person, mate: Person, model, dataset, settings: Settings, engine: Engine):
    first = submit(owner, run_body(model, dataset), **{"Idempotency-Key": "k"})
    other_body = submit(owner, run_body(model, dataset, name="another"), **{"Idempotency-Key": "k"})
    assert (other_body.status_code, other_body.json()["place"]) == (422, "Idempotency-Key")
    # Defaults spelled out are the same request.
    spelled = submit(owner, run_body(model, dataset, skip_bad_rows=False), **{"Idempotency-Key": "k"})
    assert spelled.json() == first.json()
    theirs = ready_dataset(settings, engine, mate)
    assert submit(mate, run_body(model, theirs), **{"Idempotency-Key": "k"}).json()["id"] != first.json()["id"]


@pytest.mark.database
def test_a_refused_submission_keeps_its_key_free(owner: Person, model, dataset, engine: Engine):
    key = {"Idempotency-Key": "k"}
    assert submit(owner, run_body(model, dataset, engine={"host_memory_bytes": 1}), **key).status_code == 409
    assert submit(owner, run_body(model, dataset), **key).status_code == 201
    with read_transaction(engine) as session:
        stored = session.scalars(select(IdempotencyKey)).one()
    assert len(stored.body_hash) == len(hashlib.sha256().hexdigest())


@pytest.mark.database
def test_a_replay_still_answers_when_the_dataset_is_gone(owner: Person, model, dataset, engine: Engine):
    key = {"Idempotency-Key": "k"}
    first = submit(owner, run_body(model, dataset), **key).json()
    owner.client.post(f"/api/v1/runs/{first['id']}/cancel")
    assert owner.client.delete(f"/api/v1/datasets/{dataset.id}").status_code == 204
    assert submit(owner, run_body(model, dataset), **key).json() == first


@pytest.mark.parametrize("key", ["", " ", "x" * 256, "a b"])
def test_a_malformed_key_is_refused(owner: Person, model, dataset, key: str):
    reply = submit(owner, run_body(model, dataset), **{"Idempotency-Key": key})
    assert (reply.status_code, reply.json()["place"]) == (422, "Idempotency-Key")


# ---------------------------------------------------------------- cancelling
@pytest.mark.database
def test_a_queued_run_is_cancelled_at_once(owner: Person, model, dataset, engine: Engine):
    run_id = submit(owner, run_body(model, dataset)).json()["id"]
    reply = owner.client.post(f"/api/v1/runs/{run_id}/cancel")
    run = reply.json()
    assert (reply.status_code, run["state"], run["wanted"]) == (200, "cancelled", "cancel")
    assert run["finished_at"]
    again = owner.client.post(f"/api/v1/runs/{run_id}/cancel")
    assert again.status_code == 409 and "cancelled" in again.json()["detail"]
    with read_transaction(engine) as session:
        assert len(session.scalars(select(AuditEntry).where(AuditEntry.action == "run.cancel")).all()) == 1


@pytest.mark.database
@pytest.mark.parametrize("state", [RunState.STARTING, RunState.RUNNING, RunState.CANCELLING])
def test_a_run_at_work_is_left_to_its_supervisor(owner: Person, model, dataset, engine: Engine, state: RunState):
    run_id = submit(owner, run_body(model, dataset)).json()["id"]
    set_run(engine, run_id, state=state)
    for _ in range(2):
        reply = owner.client.post(f"/api/v1/runs/{run_id}/cancel")
        assert (reply.status_code, reply.json()["state"], reply.json()["wanted"]) == (200, state, Wanted.CANCEL)


@pytest.mark.database
@pytest.mark.parametrize("state", [RunState.SUCCEEDED, RunState.FAILED])
def test_a_run_that_has_ended_is_not_cancelled(owner: Person, model, dataset, engine: Engine, state: RunState):
    run_id = submit(owner, run_body(model, dataset)).json()["id"]
    set_run(engine, run_id, state=state)
    reply = owner.client.post(f"/api/v1/runs/{run_id}/cancel")
    assert reply.status_code == 409 and state in reply.json()["detail"]
    assert owner.client.get(f"/api/v1/runs/{run_id}").json()["wanted"] == "run"


# ---------------------------------------------------------------- what runs hold on to
@pytest.mark.database
def test_what_an_unfinished_run_needs_cannot_be_deleted(owner: Person, admin: Person, model, dataset):
    run_id = submit(owner, run_body(model, dataset)).json()["id"]
    for person, path in ((owner, f"/api/v1/datasets/{dataset.id}"), (admin, f"/api/v1/base-models/{model.id}")):
        reply = person.client.delete(path)
        assert reply.status_code == 409 and run_id in reply.json()["detail"]
    owner.client.post(f"/api/v1/runs/{run_id}/cancel")
    assert owner.client.delete(f"/api/v1/datasets/{dataset.id}").status_code == 204
    assert admin.client.delete(f"/api/v1/base-models/{model.id}").status_code == 204
    # The run still tells what it was made from.
    run = owner.client.get(f"/api/v1/runs/{run_id}").json()
    assert (run["dataset_name"], run["base_model_name"]) == ("talks", "tiny")


# ---------------------------------------------------------------- whose eyes
@pytest.mark.database
def test_members_see_their_own_and_administrators_all(
    owner: Person, mate: Person, admin: Person, anonymous: TestClient, model, dataset, settings: Settings, engine: Engine
):
    mine = submit(owner, run_body(model, dataset)).json()["id"]
    theirs = submit(mate, run_body(model, ready_dataset(settings, engine, mate))).json()["id"]
    for path in ("", "/metrics", "/log", "/events", "/download"):
        address = f"/api/v1/runs/{mine}{path}"
        assert mate.client.get(address).status_code == 404, path
        assert anonymous.get(address).status_code == 401, path
        if path != "/events":
            expected = 409 if path == "/download" else 200
            assert [person.client.get(address).status_code for person in (owner, admin)] == [expected, expected], path
    assert mate.client.post(f"/api/v1/runs/{mine}/cancel").status_code == 404
    listed = [[item["id"] for item in person.client.get("/api/v1/runs").json()["items"]] for person in (owner, mate, admin)]
    assert listed == [[mine], [theirs], [theirs, mine]]


@pytest.mark.database
def test_lists_are_filtered_by_state(owner: Person, model, dataset):
    first, second = (submit(owner, run_body(model, dataset)).json()["id"] for _ in range(2))
    owner.client.post(f"/api/v1/runs/{first}/cancel")
    found = {state: owner.client.get("/api/v1/runs", params={"state": state}).json() for state in ("queued", "cancelled", "failed")}
    assert [[item["id"] for item in page["items"]] for page in found.values()] == [[second], [first], []]
    assert owner.client.get("/api/v1/runs", params={"state": "lost"}).status_code == 422


def test_a_key_needs_the_scope_for_what_it_does(anonymous: TestClient, owner: Person, model, dataset):
    body = run_body(model, dataset)
    reader, runner = owner.key(Scope.READ), owner.key(Scope.RUNS)
    assert anonymous.post("/api/v1/runs", json=body, headers=reader).status_code == 403
    run_id = anonymous.post("/api/v1/runs", json=body, headers=runner).json()["id"]
    assert anonymous.get(f"/api/v1/runs/{run_id}", headers=runner).status_code == 403
    assert anonymous.get(f"/api/v1/runs/{run_id}", headers=reader).status_code == 200
    assert anonymous.post(f"/api/v1/runs/{run_id}/cancel", headers=reader).status_code == 403
    assert anonymous.post(f"/api/v1/runs/{run_id}/cancel", headers=runner).status_code == 200
