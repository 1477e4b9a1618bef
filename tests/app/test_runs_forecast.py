"""Plans that go by the machine's profile: used where it is this machine's, told of where it is damaged, named in run.toml, shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fixtures.profiles import DATE, profile_of, with_operators
from fixtures.runs import make_run, read_run
from fixtures.service import Person, page_text
from fixtures.things import TINY, ready_dataset, ready_model, run_body
from sqlalchemy import Engine, update

from lohan.config import TrainingSection, load_run_config
from lohan.data.pack import BatchSampler
from lohan.hardware.probe import GpuFacts, HardwareFacts
from lohan.hardware.profile_files import facts_of_device, profile_path, save_profile
from lohan.planning.cost_model import Term
from lohan.planning.plan import Plan
from lohan.planning.tiers import Tier
from lohan_app.db import write_transaction
from lohan_app.entities import BaseModel, Dataset, Run, RunState
from lohan_app.runs.forecasts import TERM_NAMES, count_steps
from lohan_app.settings import Settings
from lohan_app.worker.run_files import write_run_files

WORKLOAD = with_operators(TINY)
GPU = GpuFacts(uuid="GPU-0a", index=0, name="RTX 4090", total_bytes=24 << 30, free_bytes=24 << 30)
NOT_MEASURED = "This machine was not measured"


def test_whatever_binds_has_a_name() -> None:
    assert list(TERM_NAMES) == [str(term) for term in Term]


@pytest.fixture
def model(settings: Settings, engine: Engine) -> BaseModel:
    return ready_model(settings, engine, workload=WORKLOAD)


@pytest.fixture
def dataset(settings: Settings, engine: Engine, owner: Person) -> Dataset:
    return ready_dataset(settings, engine, owner, rows=9)


@pytest.fixture
def facts(app: FastAPI) -> HardwareFacts:
    return facts_of_device(app.state.context.hardware.facts(), None)


@pytest.fixture
def measured(settings: Settings, facts: HardwareFacts) -> Path:
    """The file of this machine's profile, with times of the model."""
    return save_profile(settings.profiles_folder, profile_of(facts, WORKLOAD))


def plan_of(person: Person, model: BaseModel, **sections: Any) -> Plan:
    reply = person.client.post("/api/v1/plans", json={"base_model_id": model.id, "training": {"sequence_length": 64}} | sections)
    assert reply.status_code == 200, reply.text
    return Plan.model_validate(reply.json())


# ---------------------------------------------------------------- plans
def test_a_measured_machine_gives_a_forecast(owner: Person, model, measured: Path) -> None:
    plan = plan_of(owner, model)
    assert plan.forecast is not None
    assert (plan.forecast.profile_date, plan.policy) == (DATE, "holistic")
    assert plan.retention.operators, "there is room for the outputs, and keeping them costs nothing"
    assert not any("not measured" in note for note in plan.notes)


def test_without_a_profile_plans_are_as_before(owner: Person, model) -> None:
    plan = plan_of(owner, model)
    assert (plan.forecast, plan.policy) == (None, "recompute-all")
    assert any(note.startswith(NOT_MEASURED) for note in plan.notes)


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"{", "it is not JSON"), (b"\xff", "cannot be read"), (b"{}", "is damaged"), (b'{"version": 99}', "has version 99")],
)
def test_a_damaged_profile_is_a_sentence_and_takes_only_the_forecast(
    owner: Person, model, dataset, measured: Path, content: bytes, reason: str
) -> None:
    measured.write_bytes(content)
    plan = plan_of(owner, model)
    assert (plan.forecast, plan.policy) == (None, "recompute-all")
    told = [note for note in plan.notes if "forecast" in note]
    assert len(told) == 1
    assert reason in told[0]
    assert told[0].endswith("lohan profile --again.")
    assert told[0] in page_text(owner, f"/runs/new?base_model_id={model.id}")
    assert owner.client.post("/api/v1/runs", json=run_body(model, dataset)).status_code == 201


def test_another_machines_profile_is_not_this_ones(owner: Person, model, settings: Settings, facts: HardwareFacts) -> None:
    other = facts.model_copy(update={"ram": facts.ram.model_copy(update={"total_bytes": facts.ram.total_bytes + (1 << 30)})})
    path = save_profile(settings.profiles_folder, profile_of(other, WORKLOAD))
    assert any(note.startswith(NOT_MEASURED) for note in plan_of(owner, model).notes)
    path.rename(profile_path(settings.profiles_folder, facts))
    assert any("the profile is another machine's" in note for note in plan_of(owner, model).notes)


def test_a_profile_belongs_to_the_device_a_run_asks_for(
    app: FastAPI, owner: Person, model, settings: Settings, facts: HardwareFacts, measured: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = app.state.context
    monkeypatch.setattr(context, "settings", settings.model_copy(update={"devices": (GPU.uuid, "cpu:0")}))
    with_gpu = facts.model_copy(update={"gpus": (GPU,)})
    monkeypatch.setattr(context.hardware, "facts", lambda: with_gpu)
    assert plan_of(owner, model, engine={"device": "cpu"}).forecast is not None
    assert plan_of(owner, model).forecast is None, "the CPU's figures are not the GPU's"
    save_profile(settings.profiles_folder, profile_of(with_gpu, WORKLOAD, gpu_uuid=GPU.uuid))
    on_gpu = plan_of(owner, model)
    assert on_gpu.device == GPU.uuid
    assert on_gpu.forecast is not None


def test_a_model_that_was_not_measured_is_told_from_the_machine(owner: Person, model, settings: Settings, facts: HardwareFacts) -> None:
    save_profile(settings.profiles_folder, profile_of(facts))
    assert any(note.startswith("This model was not measured here") for note in plan_of(owner, model).notes)


@pytest.mark.parametrize(
    ("field", "value", "told"), [("profiles", "/etc", "in the data folder"), ("policy", "checkmate", "for runs from the command line")]
)
def test_what_only_the_command_line_may_set_is_refused(owner: Person, model, field: str, value: str, told: str) -> None:
    reply = owner.client.post("/api/v1/plans", json={"base_model_id": model.id, "engine": {field: value}})
    assert reply.status_code == 422
    assert told in reply.text


# ---------------------------------------------------------------- run.toml
@pytest.mark.parametrize("state", ["measured", "not measured when it was planned", "damaged since", "gone since"])
def test_a_run_is_planned_again_by_the_figures_it_was_planned_by(
    owner: Person, model, measured: Path, settings: Settings, engine: Engine, state: str
) -> None:
    plan = plan_of(owner, model).model_dump(mode="json")
    if state == "not measured when it was planned":
        plan["forecast"] = None
    if state == "damaged since":
        measured.write_text("{")
    if state == "gone since":
        measured.unlink()
    run = read_run(engine, make_run(settings, engine, state=RunState.STARTING, plan=plan))
    write_run_files(settings, run, settings.model_dirs[0], device="cpu:0")
    config = load_run_config(settings.run_folder(run.id) / "run.toml")
    assert config.engine.profiles == (settings.profiles_folder if state == "measured" else None)


@pytest.mark.parametrize(("asked", "written"), [(None, 12345678), ("auto", 12345678), (0, 0), (4096, 4096)])
def test_states_take_the_host_memory_that_was_reserved_for_them(
    settings: Settings, engine: Engine, owner: Person, model, asked: int | str | None, written: int
) -> None:
    plan = plan_of(owner, model).model_dump(mode="json") | {"ram_state_bytes": 12345678}
    run = read_run(engine, make_run(settings, engine, state=RunState.STARTING, plan=plan))
    run.settings = {**run.settings, "engine": {} if asked is None else {"ram_state_bytes": asked}}
    write_run_files(settings, run, settings.model_dirs[0], device="cpu:0")
    assert load_run_config(settings.run_folder(run.id) / "run.toml").engine.ram_state_bytes == written


def test_a_run_that_was_reserved_less_keeps_fewer_states_in_ram(settings: Settings, engine: Engine, owner: Person, model) -> None:
    plan = plan_of(owner, model)
    used, states = plan.tier(Tier.RAM).used_bytes, plan.ram_state_bytes
    assert states > 0
    for reserved, expected in ((used, states), (used - states // 4, states - states // 4), (used - 2 * states, 0)):
        run = read_run(engine, make_run(settings, engine, state=RunState.STARTING, plan=plan.model_dump(mode="json")))
        run.reserved_ram_bytes = reserved
        write_run_files(settings, run, settings.model_dirs[0], device="cpu:0")
        assert load_run_config(settings.run_folder(run.id) / "run.toml").engine.ram_state_bytes == expected


def test_runs_on_several_devices_share_host_memory(
    app: FastAPI, owner: Person, model, settings: Settings, facts: HardwareFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one of two runs takes for states leaves as much to the other."""
    context = app.state.context
    free = 3 << 30
    small = facts.model_copy(update={"ram": facts.ram.model_copy(update={"total_bytes": free, "free_bytes": free})})
    monkeypatch.setattr(context.hardware, "facts", lambda: small)
    held = {}
    for devices in (("cpu:0",), ("cpu:0", "cpu:1", "cpu:2")):
        monkeypatch.setattr(context, "settings", settings.model_copy(update={"devices": devices}))
        plan = plan_of(owner, model)
        held[len(devices)] = plan.ram_state_bytes
        assert sum(item.bytes for item in plan.tier(Tier.RAM).items if item.name == "model states") <= plan.ram_state_bytes
    assert held[1] > held[3] == 0


# ---------------------------------------------------------------- pages
def test_pages_show_the_time_of_a_step_and_of_the_run(owner: Person, model, dataset, measured: Path) -> None:
    text = page_text(owner, f"/runs/new?base_model_id={model.id}&dataset_id={dataset.id}")
    assert "Time of a step It waits longest for: CPU" in text
    assert "2 steps" in text, "nine rows in batches of eight"
    assert "mlp.up_proj" in text
    run = owner.client.post("/api/v1/runs", json=run_body(model, dataset)).json()
    text = page_text(owner, f"/runs/{run['id']}")
    assert "3 steps" in text, "as many as were asked for at most"
    assert "Kept from forward to backward:" in text
    assert "lohan profile" not in text


def test_pages_say_how_to_measure(owner: Person, model, dataset) -> None:
    assert "lohan profile MODEL" in page_text(owner, f"/runs/new?base_model_id={model.id}")


@pytest.mark.parametrize("forecast", [None, {"of": "a later version"}])
def test_plans_of_other_versions_are_shown(owner: Person, model, dataset, engine: Engine, forecast: Any) -> None:
    plan = plan_of(owner, model).model_dump(mode="json", exclude={"retention", "forecast", "policy", "kept_units", "notes"})
    columns = {"plan": plan | {"notes": [], "policy": "recompute-all"} | ({"forecast": forecast} if forecast else {})}
    run = owner.client.post("/api/v1/runs", json=run_body(model, dataset)).json()
    with write_transaction(engine) as session:
        session.execute(update(Run).where(Run.id == run["id"]).values(**columns))
    assert "lohan profile MODEL" in page_text(owner, f"/runs/{run['id']}")
    assert owner.client.get(f"/api/v1/runs/{run['id']}").json()["plan"] == columns["plan"]


@pytest.mark.parametrize(("rows", "batch", "epochs"), [(9, 8, 1.0), (8, 8, 1.0), (1000, 7, 2.5), (3, 64, 0.1)])
def test_steps_are_counted_as_the_trainer_counts_them(rows: int, batch: int, epochs: float) -> None:
    training = TrainingSection(batch_size=batch, epochs=epochs)
    assert count_steps(training, rows) == BatchSampler(rows, batch, seed=0).steps(epochs)
    assert count_steps(training, 0) is None
    assert count_steps(training.model_copy(update={"max_steps": 5}), rows) == 5
