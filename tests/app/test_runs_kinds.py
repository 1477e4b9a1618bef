"""Runs that are no trainings: what can be asked of them, whom they wait for, and that real processes do their work."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from fixtures.broker import Queues, running_broker
from fixtures.held_trainer import HELD_COMMAND, HELD_STEP
from fixtures.processes import no_process_left
from fixtures.quick_trainer import QUICK_COMMAND
from fixtures.rows import messages_rows, write_jsonl
from fixtures.runs import make_run, read_events, read_run, set_run
from fixtures.service import Person, page_text
from fixtures.simulated_machine import simulated_machine
from fixtures.things import ready_model
from fixtures.waiting import wait_until
from safetensors.torch import load
from sqlalchemy import Engine, text, update
from sqlalchemy.exc import IntegrityError

from lohan.data.prepare import prepare_tokens
from lohan.data.tokenize import Tokenizer
from lohan.events import EventType
from lohan.units import GIB
from lohan_app.db import read_transaction, write_transaction
from lohan_app.entities import TERMINAL_STATES, Run, RunKind, RunState
from lohan_app.entities.base import now
from lohan_app.runs import queries
from lohan_app.runs.kinds import NO_DEVICE
from lohan_app.settings import Settings
from lohan_app.storage.retention import Rules, states_expiry
from lohan_app.worker.reservations import Held, fit, need_of
from lohan_app.worker.run_files import state_directories
from lohan_app.worker.supervisor import Supervisor

ENGINE = {"device": "cpu", "durability": "step", "unsafe_filesystems": "allow", "threads": 1}
TRAINING = {"max_steps": 50, "batch_size": 4, "sequence_length": 64, "precision": "bf16", "evaluation_rows": 0}


@pytest.fixture
def queues(settings: Settings) -> Iterator[Queues]:
    with running_broker(settings) as queues:
        yield queues


def owned(settings: Settings, engine: Engine, person: Person, **columns: Any) -> str:
    """A training run of this person at rest, with something in its state directories."""
    run_id = make_run(settings, engine, **({"state": RunState.PAUSED, "step": 3} | columns))
    model = ready_model(settings, engine, name=run_id[-8:])
    set_run(engine, run_id, owner_id=person.user.id, base_model_id=model.id, settings={"training": TRAINING, "engine": ENGINE})
    for folder in state_directories(settings, run_id):
        folder.mkdir(parents=True)
        (folder / "states.bin").write_bytes(b"0" * 4096)
    return run_id


def post(person: Person, path: str, body: dict[str, Any] | None = None, status: int = 201, **headers: str) -> dict[str, Any]:
    reply = person.client.post(f"/api/v1{path}", json=body or {}, headers=headers)
    assert reply.status_code == status, reply.text
    found: dict[str, Any] = reply.json()
    return found


# ---------------------------------------------------------------- measurements
def test_a_measurement_is_asked_for_by_administrators(admin: Person, owner: Person, settings: Settings, engine: Engine) -> None:
    model = ready_model(settings, engine)
    assert "administrators" in post(owner, "/hardware/profiles", status=403)["detail"]
    assert post(admin, "/hardware/profiles", {"device": "cuda:7"}, status=422)["place"] == "device"
    post(admin, "/hardware/profiles", {"base_model_id": "model_none"}, status=404)
    key = {"Idempotency-Key": "once"}
    run = post(admin, "/hardware/profiles", {"base_model_id": model.id}, **key)
    assert (run["kind"], run["state"], run["base_model_name"], run["dataset_id"]) == ("profile", "queued", "tiny", None)
    assert post(admin, "/hardware/profiles", {"base_model_id": model.id}, **key)["id"] == run["id"]
    folders = settings.state_folders
    need = need_of(read_run(engine, run["id"]), folders, states={})
    assert (need.device, need.space) == ("auto", {str(folder): 512 << 20 for folder in folders})
    assert need.ram_bytes > 2 * GIB
    without = post(admin, "/hardware/profiles", {"drives": False})
    assert sum(need_of(read_run(engine, without["id"]), folders, states={}).space.values()) == 0
    listed = admin.client.get("/api/v1/runs?kind=profile").json()["items"]
    assert [item["id"] for item in listed] == [without["id"], run["id"]]
    assert admin.client.get("/api/v1/runs?kind=train").json()["items"] == []
    refused = post(admin, f"/runs/{run['id']}/pause", status=409)
    assert "the run is queued: pause is not possible of a run of kind profile: it keeps nothing" in refused["detail"]
    assert refused["remedy"] == "Allowed now: cancel."
    assert admin.client.get(f"/api/v1/runs/{run['id']}/download").status_code == 409
    # Members see that the machine is being measured, and not whose run it is.
    seen = owner.client.get("/api/v1/hardware").json()["measurement"]
    assert (seen["state"], seen["is_going_on"], seen["run"]) == ("queued", True, None)
    assert "It waits in the queue" in page_text(owner, "/hardware")
    assert "Measure this machine" in page_text(owner, "/hardware")
    assert "Measurement of this machine" in page_text(admin, f"/runs/{without['id']}")
    assert "Measurement of this machine with tiny" in page_text(admin, "/runs?kind=profile")
    assert run["id"] not in admin.client.get("/runs", headers={"Accept": "text/html"}).text


def test_a_measurement_stands_in_line_and_its_time_on_a_device_counts(
    admin: Person, settings: Settings, engine: Engine, tick: Callable[[], None]
) -> None:
    training = make_run(settings, engine, state=RunState.RUNNING, devices=["cpu:0", "cpu:1"])
    asked = post(admin, "/hardware/profiles", {"drives": False})
    assert (asked["queue_place"]["position"], asked["queue_place"]["of"]) == (1, 1)
    tick()
    assert read_run(engine, asked["id"]).state_reason == "Waits for cpu:0 or cpu:1, in use by 'a run'."
    set_run(engine, training, devices=["cpu:1"])
    tick()
    run = read_run(engine, asked["id"])
    assert (run.state, run.devices, run.started_plan) == (RunState.STARTING, ["cpu:0"], None)
    with read_transaction(engine) as session:
        assert [(use.owner_id, use.devices) for use in queries.device_uses(session, run.created_at)] == [(admin.user.id, 1)]


def test_a_real_measurement_ends_in_the_folder_of_profiles(admin: Person, settings: Settings, engine: Engine, tmp_path: Path) -> None:
    model = ready_model(settings, engine, context_length=32)
    asked = admin.client.post("/hardware/measure", data={"base_model_id": model.id, "drives": "yes"}, follow_redirects=False)
    assert asked.status_code == 303, asked.text
    run_id = admin.client.get("/api/v1/hardware").json()["measurement"]["run"]["id"]
    set_run(engine, run_id, state=RunState.STARTING, devices=["cpu:0"])
    (place,) = state_directories(settings, run_id)
    (place / ".lohan-bench-of-a-killed-attempt").mkdir(parents=True)
    with no_process_left(tmp_path):
        assert Supervisor(settings, run_id, trainer_command=QUICK_COMMAND).run() == 0
    run = read_run(engine, run_id)
    assert (run.state, run.problem, run.attempt, run.devices) == (RunState.SUCCEEDED, None, 1, [])
    assert list(settings.state_folders[0].iterdir()) == [], "its log is all that it leaves"
    events = read_events(engine, run_id)
    assert [event.type for event in events if event.type in (EventType.STARTED, EventType.EXIT)] == [EventType.STARTED, EventType.EXIT]
    told = [event.fields for event in events if event.type == EventType.PHASE and event.fields["progress"] is not None]
    assert {fields["phase"] for fields in told} == {"measuring"}
    assert [fields["progress"] for fields in told] == sorted(fields["progress"] for fields in told)
    assert any(fields["eta_seconds"] is not None for fields in told)
    (profile,) = admin.client.get("/api/v1/hardware/profiles").json()["items"]
    assert (profile["is_this_machine"], len(profile["models"]), profile["problem"]) == (True, 1, None)
    assert admin.client.get("/api/v1/hardware").json()["profile"]["ssd_read"] is not None
    assert "The last measurement ended" in page_text(admin, "/hardware")
    assert "Succeeded" in page_text(admin, f"/runs/{run_id}")


@pytest.mark.parametrize("request_name", ["cancel", "force-stop"])
def test_a_real_measurement_is_ended_and_asked_for_again(
    admin: Person, settings: Settings, engine: Engine, tmp_path: Path, request_name: str
) -> None:
    run_id = post(admin, "/hardware/profiles")["id"]
    set_run(engine, run_id, state=RunState.STARTING, devices=["cpu:0"])
    with no_process_left(tmp_path):
        supervisor = Thread(target=Supervisor(settings, run_id, trainer_command=QUICK_COMMAND).run)
        supervisor.start()
        wait_until(lambda: read_run(engine, run_id).phase == "measuring", timeout_seconds=120, what="its first event")
        post(admin, f"/runs/{run_id}/{request_name}", status=200)
        supervisor.join(timeout=120)
    assert read_run(engine, run_id).state is RunState.CANCELLED
    assert list(settings.state_folders[0].iterdir()) == []
    assert list(settings.profiles_folder.glob("*")) == []
    again = post(admin, f"/runs/{run_id}/retry")
    assert (again["kind"], again["state"], again["parent_id"], again["settings"]) == (
        "profile", "queued", run_id, read_run(engine, run_id).settings,
    )  # fmt: skip


@pytest.mark.parametrize("state", sorted(TERMINAL_STATES))
def test_what_a_killed_measurement_has_left_goes_at_once(state: RunState) -> None:
    run = Run(kind=RunKind.PROFILE, state=state, step=0, finished_at=now(), settings={})
    expiry = states_expiry(run, Rules(timedelta(7), timedelta(7), timedelta(7)))
    assert expiry is not None
    assert expiry.is_due(now())


# ---------------------------------------------------------------- exports
def test_what_can_be_exported_and_what_not(admin: Person, owner: Person, mate: Person, settings: Settings, engine: Engine) -> None:
    run_id = owned(settings, engine, owner)
    post(mate, f"/runs/{run_id}/exports", status=404)
    post(owner, f"/runs/{run_id}/exports", {"dtype": "fp16"}, status=422)
    made = post(owner, f"/runs/{run_id}/exports", **{"Idempotency-Key": "once"})
    assert (made["kind"], made["parent_id"], made["settings"]["export"]) == ("export", run_id, {"dtype": "bf16"})
    assert post(owner, f"/runs/{run_id}/exports", **{"Idempotency-Key": "once"})["id"] == made["id"]
    need = need_of(read_run(engine, made["id"]), settings.state_folders, states={})
    assert (need.device, need.ram_bytes, sum(need.space.values())) == (NO_DEVICE, GIB + 12 * 12_352, 0)
    reservation = fit(need, simulated_machine(settings), [Held("other", ["cpu:0", "cpu:1"], 0, {}, is_settled=True)])
    assert not isinstance(reservation, str), reservation
    assert reservation.devices == []
    assert [item["id"] for item in owner.client.get(f"/api/v1/runs/{run_id}/exports").json()["items"]] == [made["id"]]
    # Whatever is to be exported stays.
    set_run(engine, run_id, state=RunState.FAILED)
    assert "is to read its states" in owner.client.delete(f"/api/v1/runs/{run_id}").json()["detail"]
    assert "an export that waits" in owner.client.delete(f"/api/v1/runs/{run_id}/states").json()["detail"]
    for state, words in ((RunState.QUEUED, "the run is queued"), (RunState.SUCCEEDED, "has a result already")):
        set_run(engine, run_id, state=state)
        assert words in post(owner, f"/runs/{run_id}/exports", status=409)["detail"]
    set_run(engine, run_id, state=RunState.PAUSED, step=0)
    assert "has recorded no step" in post(owner, f"/runs/{run_id}/exports", status=409)["detail"]
    assert "only training runs" in post(owner, f"/runs/{made['id']}/exports", status=409)["detail"]
    gone = owned(settings, engine, owner)
    for folder in state_directories(settings, gone):
        (folder / "states.bin").unlink()
        folder.rmdir()
    assert "no longer kept" in post(owner, f"/runs/{gone}/exports", status=409)["detail"]


def test_a_run_and_its_export_wait_for_each_other(owner: Person, settings: Settings, engine: Engine, tick: Callable[[], None]) -> None:
    run_id = owned(settings, engine, owner)
    export = post(owner, f"/runs/{run_id}/exports")["id"]
    post(owner, f"/runs/{run_id}/resume", status=200)
    tick()
    waiting = read_run(engine, run_id)
    assert (waiting.state, read_run(engine, export).state) == (RunState.QUEUED, RunState.STARTING)
    assert "which reads the states that it goes on from" in waiting.state_reason
    assert "Export of a run" in waiting.state_reason
    set_run(engine, export, state=RunState.SUCCEEDED, devices=[])
    tick()
    assert read_run(engine, run_id).state is RunState.STARTING
    # And the other way round: what is asked for while the run is at work waits for it.
    set_run(engine, export, state=RunState.QUEUED)
    tick()
    assert "is at work on the states" in read_run(engine, export).state_reason


def test_a_retry_takes_the_states_only_when_they_are_exported(
    owner: Person, settings: Settings, engine: Engine, tick: Callable[[], None]
) -> None:
    run_id = owned(settings, engine, owner, state=RunState.CANCELLED)
    export = post(owner, f"/runs/{run_id}/exports")["id"]
    retry = make_run(settings, engine, parent_id=run_id)
    tick()
    assert read_run(engine, retry).state is RunState.QUEUED
    assert all(folder.is_dir() for folder in state_directories(settings, run_id))
    set_run(engine, export, state=RunState.CANCELLED, devices=[])
    tick()
    assert read_run(engine, retry).state is RunState.STARTING
    assert all(folder.is_dir() for folder in state_directories(settings, retry))
    set_run(engine, retry, state=RunState.QUEUED)
    assert "a retry is about to go on from its states" in post(owner, f"/runs/{run_id}/exports", status=409)["detail"]
    assert post(owner, f"/runs/{export}/retry", status=409)["detail"].startswith("a retry is about")


def test_a_real_export_of_a_real_run(owner: Person, settings: Settings, engine: Engine, tmp_path: Path) -> None:
    run_id = owned(settings, engine, owner, state=RunState.STARTING, step=0)
    rows = settings.run_folder(run_id) / "rows.jsonl"
    write_jsonl(rows, messages_rows(8))
    prepare_tokens(
        rows, Tokenizer.from_folder(settings.model_dirs[0] / run_id[-8:]), settings.run_folder(run_id) / "tokens.safetensors",
        sequence_length=64, skip_bad_rows=False,
    )  # fmt: skip
    with no_process_left(tmp_path):
        supervisor = Supervisor(settings, run_id, trainer_command=HELD_COMMAND)
        done = Thread(target=supervisor.run)
        done.start()
        wait_until(lambda: read_run(engine, run_id).step == HELD_STEP, timeout_seconds=120, what="the step that it waits behind")
        post(owner, f"/runs/{run_id}/pause", status=200)
        done.join(timeout=120)
        assert read_run(engine, run_id).state is RunState.PAUSED
        assert "Export what it has recorded?" in page_text(owner, f"/runs/{run_id}")
        asked = owner.client.post(f"/runs/{run_id}/exports", data={"dtype": "fp32"}, follow_redirects=False)
        assert asked.status_code == 303, asked.text
        export = asked.headers["Location"].rpartition("/")[2]
        set_run(engine, export, state=RunState.STARTING)
        assert Supervisor(settings, export).run() == 0
    run = read_run(engine, export)
    assert (run.state, run.problem) == (RunState.SUCCEEDED, None)
    archive = zipfile.ZipFile(io.BytesIO(owner.client.get(f"/api/v1/runs/{export}/download").content))
    weights = load(archive.read("Export of a run/model.safetensors"))
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    assert read_run(engine, run_id).state is RunState.PAUSED, "what was exported goes on whenever somebody wants it to"
    assert "Download the model" in page_text(owner, f"/runs/{export}")


# ---------------------------------------------------------------- the table
@pytest.mark.database
def test_the_database_holds_a_kind_to_what_it_needs(settings: Settings, engine: Engine) -> None:
    run_id = make_run(settings, engine)
    for column in ("dataset_id", "base_model_id"):
        with pytest.raises(IntegrityError), write_transaction(engine) as session:
            session.execute(text(f"UPDATE runs SET {column} = NULL WHERE id = :id"), {"id": run_id})  # noqa: S608 - constants
    with pytest.raises(IntegrityError), write_transaction(engine) as session:
        session.execute(update(Run).where(Run.id == run_id).values(kind=RunKind.EXPORT))
    set_run(engine, run_id, kind=RunKind.PROFILE, base_model_id=None, dataset_id=None)
    assert read_run(engine, run_id).kind is RunKind.PROFILE
