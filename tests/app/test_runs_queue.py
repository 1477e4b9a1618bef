"""The queue as people meet it: places and priority over REST and on pages, plans made again at the start, forecasts that are corrected."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from fastapi import FastAPI
from fixtures.runs import make_run, read_run, set_run
from fixtures.service import Person, page_text
from fixtures.things import ready_dataset, ready_model, run_body
from sqlalchemy import Engine, select

from lohan.config import load_run_config
from lohan.events import Event, FailureCause
from lohan.hardware.probe import GpuFacts, GpuHolder
from lohan.planning.fit import RAM_RESERVE_BYTES
from lohan.planning.plan import Plan
from lohan.planning.tiers import Tier
from lohan_app.db import read_transaction, write_transaction
from lohan_app.entities import AuditEntry, DeviceUse, RunState
from lohan_app.entities.base import now
from lohan_app.runs import forecasts, repository
from lohan_app.settings import Settings
from lohan_app.worker.reconciler import Reconciler
from lohan_app.worker.reservations import Machine, look_at_machine
from lohan_app.worker.run_files import write_run_files


@pytest.fixture
def model(settings: Settings, engine: Engine):
    return ready_model(settings, engine)


@pytest.fixture
def submit(settings: Settings, engine: Engine, model) -> Callable[..., str]:
    """Queues a prepared run of that person; returns its id."""

    def queue(person: Person, **changes: Any) -> str:
        reply = person.client.post("/api/v1/runs", json=run_body(model, ready_dataset(settings, engine, person), **changes))
        assert reply.status_code == 201, reply.text
        set_run(engine, reply.json()["id"], prepared_at=now())
        return reply.json()["id"]

    return queue


def get(person: Person, run_id: str) -> dict[str, Any]:
    return person.client.get(f"/api/v1/runs/{run_id}").json()


# ---------------------------------------------------------------- places and priority
@pytest.mark.database
def test_a_queued_run_says_its_place_and_why(engine: Engine, owner: Person, mate: Person, submit: Callable[..., str]) -> None:
    first, second, of_mate = submit(owner), submit(owner), submit(mate)
    with write_transaction(engine) as session:
        session.add(DeviceUse(run_id=second, devices=1, began_at=now() - timedelta(hours=2), ended_at=now() - timedelta(hours=1)))
    assert get(mate, of_mate)["queue_place"] == {"position": 1, "of": 3, "why": "Nobody is before it."}
    place = get(owner, second)["queue_place"]
    assert (place["position"], place["of"]) == (3, 3)
    assert "1 of owners who had less time on devices in the last 7 days than its own (1 h 00 min)" in place["why"]
    assert "1 of the same owner, longer in line" in place["why"]
    assert "3 of 3 in the queue, in line since" in page_text(owner, f"/runs/{second}")
    assert "2 of 3 in the queue" in page_text(owner, "/runs")
    dashboard = page_text(owner, "/")
    assert dashboard.index("2 of 3") < dashboard.index("3 of 3")
    set_run(engine, first, state=RunState.RUNNING)
    assert get(owner, first)["queue_place"] is None


def test_an_administrator_sets_the_priority(engine: Engine, owner: Person, admin: Person, mate: Person, submit: Callable[..., str]) -> None:
    first, second = submit(owner), submit(mate)
    assert get(owner, first)["queue_place"]["position"] == 1
    changed = admin.client.patch(f"/api/v1/runs/{second}", json={"priority": 3})
    assert (changed.status_code, changed.json()["priority"], changed.json()["queue_place"]["position"]) == (200, 3, 1)
    assert get(owner, first)["queue_place"]["why"] == "Before it: 1 with a higher priority."
    reply = admin.client.post(f"/runs/{first}/priority", data={"priority": "4"}, follow_redirects=False)
    assert (reply.status_code, reply.headers["location"]) == (303, f"/runs/{first}")
    assert read_run(engine, first).priority == 4
    assert "1 of 2 in the queue, with priority 4" in page_text(admin, f"/runs/{first}")
    with read_transaction(engine) as session:
        assert session.scalars(select(AuditEntry.subject).where(AuditEntry.action == "run.priority")).all() == [second, first]


def test_who_may_not_set_a_priority_and_what_is_none(engine: Engine, owner: Person, admin: Person, submit: Callable[..., str]) -> None:
    run_id = submit(owner)
    assert owner.client.patch(f"/api/v1/runs/{run_id}", json={"priority": 3}).status_code == 403
    assert owner.client.post(f"/runs/{run_id}/priority", data={"priority": "3"}).status_code == 403
    assert "Set the priority" not in page_text(owner, f"/runs/{run_id}")
    for wrong in ({"priority": 101}, {"priority": "3"}, {"priority": True}, {}, {"name": "x", "priority": 1}):
        assert admin.client.patch(f"/api/v1/runs/{run_id}", json=wrong).status_code == 422
    for text in ("101", "", "much", "9" * 5000, "\u0663x"):
        assert admin.client.post(f"/runs/{run_id}/priority", data={"priority": text}).status_code == 422
    assert admin.client.patch("/api/v1/runs/run_0", json={"priority": 3}).status_code == 404
    set_run(engine, run_id, state=RunState.SUCCEEDED)
    assert admin.client.patch(f"/api/v1/runs/{run_id}", json={"priority": 3}).status_code == 409
    assert read_run(engine, run_id).priority == 0


# ---------------------------------------------------------------- plans made again
class Looked:
    """This machine, with as much host memory as a test says."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.changes: dict[str, int] = {}

    def __call__(self, _: Settings) -> Machine:
        machine = look_at_machine(self.settings)
        assert machine.facts is not None
        ram = machine.facts.ram.model_copy(update=self.changes)
        facts = machine.facts.model_copy(update={"ram": ram})
        return replace(machine, ram_total_bytes=ram.total_bytes, ram_free_bytes=ram.free_bytes, facts=facts)


@pytest.fixture
def looked(settings: Settings) -> Looked:
    return Looked(settings)


@pytest.fixture
def tick(settings: Settings, engine: Engine, looked: Looked) -> Iterator[Callable[[], None]]:
    reconciler = Reconciler(settings, engine, supervisor_command=("/bin/true",), look=looked)
    yield reconciler.tick
    reconciler.close()


def used(plan: dict[str, Any] | None, tier: Tier) -> int:
    return Plan.model_validate(plan).tier(tier).used_bytes


def test_the_plan_is_made_again_at_the_start_and_both_are_kept(
    settings: Settings, engine: Engine, owner: Person, submit: Callable[..., str], looked: Looked, tick: Callable[[], None]
) -> None:
    run_id = submit(owner)
    queued = get(owner, run_id)
    assert queued["started_plan"] is None
    plan = Plan.model_validate(queued["plan"])
    assert plan.ram_state_bytes > 0
    # What is left holds the run without its copies of states in RAM.
    need = plan.tier(Tier.RAM).used_bytes - sum(item.bytes for item in plan.tier(Tier.RAM).items if item.name == "model states")
    looked.changes = {"free_bytes": need + RAM_RESERVE_BYTES + plan.ram_state_bytes // 8}
    tick()
    run = get(owner, run_id)
    assert (run["state"], run["plan"]) == ("starting", queued["plan"])
    began = Plan.model_validate(run["started_plan"])
    assert began.ram_state_bytes < plan.ram_state_bytes
    row = read_run(engine, run_id)
    assert row.reserved_ram_bytes == began.tier(Tier.RAM).used_bytes
    changes = {name: (before, after) for name, before, after in forecasts.plan_changes(run["plan"], run["started_plan"])}
    text = page_text(owner, f"/runs/{run_id}")
    assert "The machine was another when the run began, and the plan was made again" in text
    assert f"States in RAM, at most {' '.join(changes['States in RAM, at most'])}" in text
    write_run_files(settings, row, settings.model_dirs[0], device="cpu:0")
    files = settings.run_folder(run_id)
    assert load_run_config(files / "run.toml").engine.ram_state_bytes == began.ram_state_bytes
    assert Plan.model_validate_json((files / "plan.json").read_text()) == began


def test_the_same_plan_shows_no_changes(owner: Person, submit: Callable[..., str], tick: Callable[[], None]) -> None:
    run_id = submit(owner, engine={"ram_state_bytes": 0, "micro_batch_size": 1})
    tick()
    run = get(owner, run_id)
    assert run["state"] == "starting"
    assert forecasts.plan_changes(run["plan"], run["started_plan"]) == []
    assert "the plan was made again" not in page_text(owner, f"/runs/{run_id}")


def test_a_run_that_does_not_fit_now_waits_and_one_that_never_will_fails(
    engine: Engine, owner: Person, submit: Callable[..., str], looked: Looked, tick: Callable[[], None]
) -> None:
    run_id = submit(owner)
    looked.changes = {"free_bytes": RAM_RESERVE_BYTES + 1}
    tick()
    run = get(owner, run_id)
    assert run["state"] == "queued"
    assert run["state_reason"].startswith("Does not fit the machine as it is now: host memory: the run needs ")
    assert "1 B may be used" in run["state_reason"]
    other = submit(owner)
    looked.changes = {"free_bytes": RAM_RESERVE_BYTES + 2, "total_bytes": RAM_RESERVE_BYTES + 2}
    tick()
    run = get(owner, other)
    assert (run["state"], run["problem"]["cause"]) == ("failed", FailureCause.CAPACITY)
    assert run["problem"]["message"].startswith("it can never run on this machine: the run needs ")
    assert "2 B may be used" in run["problem"]["message"]
    assert run["state_reason"] == run["problem"]["message"]
    assert get(owner, run_id)["state"] == "queued", "it was asked for a moment ago, and is asked for again later"


@pytest.mark.parametrize("kind", ["resumed", "retried"])
def test_a_run_that_goes_on_keeps_what_its_states_are_laid_out_by(
    engine: Engine, owner: Person, submit: Callable[..., str], tick: Callable[[], None], kind: str
) -> None:
    run_id = submit(owner)
    before = read_run(engine, run_id).plan | {"micro_batch_size": 1, "chunk_parameters": 4096}
    set_run(engine, run_id, step=2, attempt=1, started_plan=before)
    if kind == "retried":
        set_run(engine, run_id, state=RunState.FAILED)
        run_id = owner.client.post(f"/api/v1/runs/{run_id}/retry").json()["id"]
        assert get(owner, run_id)["plan"] == before
        set_run(engine, run_id, prepared_at=now())
    tick()
    began = Plan.model_validate(get(owner, run_id)["started_plan"])
    assert (began.micro_batch_size, began.chunk_parameters, began.batch_size) == (1, 4096, 2)


# ---------------------------------------------------------------- forecasts
def forecast(seconds: float) -> dict[str, Any]:
    return {"step_seconds": seconds, "phases": [], "binding": "cpu", "tokens_per_second": 100.0}


def test_the_page_shows_what_was_planned_started_and_corrected(settings: Settings, engine: Engine, owner: Person, model) -> None:
    plan = Plan.model_validate(owner.client.post("/api/v1/plans", json={"base_model_id": model.id}).json()).model_dump(mode="json") | {
        "notes": []
    }
    run_id = make_run(
        settings, engine, state=RunState.RUNNING, attempt=1, total_steps=10, plan=plan | {"forecast": forecast(2.0)},
        started_plan=plan | {"forecast": forecast(2.5)},
    )  # fmt: skip
    set_run(engine, run_id, owner_id=owner.user.id)
    text = page_text(owner, f"/runs/{run_id}")
    assert "A step, about 2.5 s" in text
    assert "A step, as it was foreseen Planned 2 s At the start 2.5 s" in text
    event = Event(1, 1, now().timestamp(), "plan_corrected", {"new_seconds": 5.0, "corrected_seconds": 6.0, "ratio": 2.4})
    with write_transaction(engine) as session:
        repository.record_events(session, run_id, epoch=0, events=[event], offset_bytes=1, malformed=0)
    assert get(owner, run_id)["corrected_step_seconds"] == 5.0
    for address in (f"/runs/{run_id}", f"/runs/{run_id}/partials/forecast"):
        text = page_text(owner, address)
        assert "A step, about 5 s" in text
        assert "Speed, about 50 tokens/s" in text
        assert "All steps, about 50 s" in text
        assert "Planned 2 s At the start 2.5 s Corrected by the first steps 5 s" in text


# ---------------------------------------------------------------- who uses a GPU
def test_page_and_rest_say_who_uses_a_gpu(
    app: FastAPI, settings: Settings, engine: Engine, owner: Person, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(settings, engine, state=RunState.STARTING, devices=["GPU-b"], name="mine")
    stranger = GpuHolder(pid=2**22 + 5, name="python", user="ann", bytes=3 << 30)
    gpus = tuple(
        GpuFacts(uuid=f"GPU-{letter}", index=index, name="RTX 4090", total_bytes=24 << 30, free_bytes=20 << 30, holders=holders)
        for index, (letter, holders) in enumerate({"a": (stranger,), "b": (), "c": ()}.items())
    )
    facts = app.state.context.hardware.facts().model_copy(update={"gpus": gpus})
    monkeypatch.setattr(app.state.context.hardware, "facts", lambda: facts)
    monkeypatch.setattr(app.state.context, "settings", settings.model_copy(update={"devices": ("GPU-a", "GPU-b", "GPU-c")}))
    users = owner.client.get("/api/v1/hardware").json()["gpu_users"]
    assert [(user["kind"], user["pid"], user["process"]) for user in users["GPU-a"]] == [
        ("other", 2**22 + 5, f"process {2**22 + 5} (python, of ann, 3.00 GiB)")
    ]
    assert [(user["kind"], user["pid"], user["run_name"]) for user in users["GPU-b"]] == [("run", None, "mine")]
    assert users["GPU-c"] == []
    text = page_text(owner, "/hardware")
    assert f"Somebody else : process {2**22 + 5} (python, of ann, 3.00 GiB)" in text
    assert "Run mine : reserved, no process on it yet" in text
    assert "Nobody uses it." in text
