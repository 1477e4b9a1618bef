"""What was measured of the machine, as the page and REST show it."""

from __future__ import annotations

import pytest
from fastapi import FastAPI
from fixtures.profiles import DATE, profile_of
from fixtures.service import Person, page_text
from fixtures.things import TINY, ready_model
from sqlalchemy import Engine

from lohan.hardware.probe import GpuFacts, HardwareFacts
from lohan.hardware.profile import HardwareProfile
from lohan.hardware.profile_files import facts_of_device, save_profile
from lohan_app.settings import Settings

GPU = GpuFacts(uuid="GPU-0a", index=0, name="RTX 4090", total_bytes=24 << 30, free_bytes=24 << 30)


@pytest.fixture
def facts(app: FastAPI) -> HardwareFacts:
    return facts_of_device(app.state.context.hardware.facts(), None)


def test_page_and_rest_show_what_was_measured(owner: Person, settings: Settings, engine: Engine, facts: HardwareFacts) -> None:
    ready_model(settings, engine)
    profile = profile_of(facts, TINY)
    save_profile(settings.profiles_folder, profile)
    text = page_text(owner, "/hardware")
    for told in (
        "State directories read 3 GB/s",
        "AdamW, split masters",
        "1.0 B parameters/s",
        "Commit of a step 12 ms",
        "tiny bf16, 1 x 64 tokens 0.25 s 0.5 s 4 %",
    ):
        assert told in text
    assert "Repetitions lie far apart in: Copy in the device's memory." in text
    found = owner.client.get("/api/v1/hardware").json()
    assert (found["profile"]["date"], found["profile_problem"]) == (DATE, None)
    assert HardwareProfile.model_validate(found["profile"]) == profile


def test_a_machine_that_was_not_measured_says_how(owner: Person) -> None:
    assert "lohan profile MODEL" in page_text(owner, "/hardware")
    found = owner.client.get("/api/v1/hardware").json()
    assert (found["profile"], found["profile_problem"]) == (None, None)


def test_a_damaged_profile_is_told(owner: Person, settings: Settings, facts: HardwareFacts) -> None:
    save_profile(settings.profiles_folder, profile_of(facts)).write_text("{")
    text = page_text(owner, "/hardware")
    assert "The measured figures cannot be used" in text
    assert "lohan profile --again" in text
    found = owner.client.get("/api/v1/hardware").json()
    assert found["profile"] is None
    assert (found["profile_problem"]["kind"], found["profile_problem"]["remedy"]) == (
        "ConfigError",
        "Measure again: lohan profile --again.",
    )


def test_the_figures_are_those_of_the_device_that_runs_take(
    app: FastAPI, owner: Person, settings: Settings, facts: HardwareFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpu = facts.model_copy(update={"gpus": (GPU,)})
    context = app.state.context
    monkeypatch.setattr(context, "settings", settings.model_copy(update={"devices": (GPU.uuid,)}))
    monkeypatch.setattr(context.hardware, "facts", lambda: with_gpu)
    save_profile(settings.profiles_folder, profile_of(facts))
    assert owner.client.get("/api/v1/hardware").json()["profile"] is None, "the CPU's figures are not the GPU's"
    save_profile(settings.profiles_folder, profile_of(with_gpu, gpu_uuid=GPU.uuid))
    assert owner.client.get("/api/v1/hardware").json()["profile"]["device"] == GPU.name
