"""A run that names no precision gets the one that suits the device it will use, and the page says why."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import FastAPI
from fixtures.service import Person
from fixtures.things import ready_dataset, ready_model, run_body
from sqlalchemy import Engine

from lohan.hardware.probe import GpuFacts, HardwareFacts
from lohan_app.entities import BaseModel, Dataset
from lohan_app.settings import Settings

GPU = GpuFacts(uuid="GPU-0a", index=0, name="RTX 4090", total_bytes=24 << 30, free_bytes=24 << 30)
HTML = {"accept": "text/html"}
REASON = "This CPU has no bf16 instructions"
# What the machine is, and what a run without a precision is then trained in.
MACHINES = [(False, (), "fp32"), (True, (), "bf16"), (False, (GPU,), "bf16")]
NAMES = ["CPU without bf16", "CPU with bf16", "GPU"]


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """Every device may be used."""
    return settings.model_copy(update={"devices": ()})


@pytest.fixture
def model(settings: Settings, engine: Engine) -> BaseModel:
    return ready_model(settings, engine)


@pytest.fixture
def dataset(settings: Settings, engine: Engine, owner: Person) -> Dataset:
    return ready_dataset(settings, engine, owner)


def put_on(app: FastAPI, monkeypatch: pytest.MonkeyPatch, multiplies_bf16: bool, gpus: tuple[GpuFacts, ...]) -> None:
    """Let the application find such a machine."""
    hardware = app.state.context.hardware
    facts: HardwareFacts = hardware.facts()
    changed = facts.model_copy(update={"cpu": facts.cpu.model_copy(update={"multiplies_bf16": multiplies_bf16}), "gpus": gpus})
    monkeypatch.setattr(hardware, "facts", lambda: changed)


def body_of(model: BaseModel, dataset: Dataset, **training: Any) -> dict[str, Any]:
    body = run_body(model, dataset)
    kept = {name: value for name, value in body.get("training", {}).items() if name != "precision"}
    return body | {"training": kept | training}


@pytest.mark.parametrize(("multiplies_bf16", "gpus", "precision"), MACHINES, ids=NAMES)
def test_plan_and_run_take_what_suits_the_machine(
    app, owner: Person, model, dataset, monkeypatch, multiplies_bf16: bool, gpus: tuple[GpuFacts, ...], precision: str
) -> None:
    put_on(app, monkeypatch, multiplies_bf16, gpus)
    plan = owner.client.post("/api/v1/plans", json={"base_model_id": model.id}).json()
    assert plan["precision"] == precision
    run = owner.client.post("/api/v1/runs", json=body_of(model, dataset))
    assert run.status_code == 201, run.text
    # The trainer reads the run's settings: they must say what the plan was made for.
    assert (run.json()["settings"]["training"]["precision"], run.json()["plan"]["precision"]) == (precision, precision)


def test_the_cpu_of_a_machine_with_a_gpu_counts_where_it_is_asked_for(app, owner: Person, model, monkeypatch, settings: Settings) -> None:
    settings_with_both = settings.model_copy(update={"devices": ("GPU-0a", "cpu:0")})
    monkeypatch.setattr(app.state.context, "settings", settings_with_both, raising=True)
    put_on(app, monkeypatch, False, (GPU,))
    for device, precision in (("auto", "bf16"), ("cpu", "fp32")):
        plan = owner.client.post("/api/v1/plans", json={"base_model_id": model.id, "engine": {"device": device}}).json()
        assert plan["precision"] == precision


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_what_is_asked_for_stays(app, owner: Person, model, dataset, monkeypatch, precision: str) -> None:
    put_on(app, monkeypatch, False, ())
    run = owner.client.post("/api/v1/runs", json=body_of(model, dataset, precision=precision)).json()
    assert (run["settings"]["training"]["precision"], run["plan"]["precision"]) == (precision, precision)
    assert any(REASON in note for note in run["plan"]["notes"]) == (precision == "bf16")


@pytest.mark.parametrize(("multiplies_bf16", "gpus", "precision"), MACHINES, ids=NAMES)
def test_the_form_opens_with_it_and_says_why(
    app, owner: Person, model, dataset, monkeypatch, multiplies_bf16: bool, gpus: tuple[GpuFacts, ...], precision: str
) -> None:
    put_on(app, monkeypatch, multiplies_bf16, gpus)
    page = owner.client.get("/runs/new", headers=HTML).text
    assert f'<option value="{precision}" selected>' in page
    hint = page.partition('id="precision-hint">')[2].partition("</p>")[0]
    assert hint.startswith("Master weights are fp32 in both.")
    assert (REASON in hint) == (precision == "fp32")
