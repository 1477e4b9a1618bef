"""Runs that are no trainings in a browser: measuring the machine from its page, and exporting what a run has recorded."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect
from sqlalchemy import update

from lohan.events import EventType
from lohan_app.db import write_transaction
from lohan_app.entities import Run, RunKind, RunState
from lohan_app.entities.base import now
from tests.e2e import arrange
from tests.e2e.conftest import Opener
from tests.e2e.server import Site, Visitor

pytestmark = pytest.mark.browser


def move(site: Site, run_id: str, **values: object) -> None:
    with write_transaction(site.engine) as session:
        session.execute(update(Run).where(Run.id == run_id).values(**values))


def test_a_measurement_is_asked_for_followed_and_its_figures_appear(site: Site, admin: Visitor, open_page: Opener) -> None:
    model = arrange.add_model(site, name="to be measured")
    page = open_page(site, "/hardware", admin)
    page.get_by_label("Model").select_option(label=model.name)
    page.get_by_role("button", name="Measure this machine").click()
    measuring = page.locator("#measuring")
    expect(measuring.get_by_text("It waits in the queue")).to_be_visible()
    run_id = str(page.locator("#measurement-run").get_attribute("href")).rpartition("/")[2]
    move(site, run_id, state=RunState.RUNNING, epoch=1, attempt=1, devices=["cpu:0"])
    trainer = arrange.Trainer(site, Run(id=run_id))
    trainer.event(EventType.STARTED, device="cpu", total_steps=0, resumed_step=0)
    trainer.event(EventType.PHASE, phase="measuring", progress=0.4, detail="Measuring host memory.", eta_seconds=90.0)
    expect(measuring.get_by_text("40 %, about 1 min 30 s left")).to_be_visible()
    own = open_page(site, f"/runs/{run_id}", admin)
    expect(own.get_by_text("Measurement of this machine with to be measured")).to_be_visible()
    expect(own.get_by_text("1 min 30 s")).to_be_visible()
    arrange.measure(site, arrange.tiny_workload())
    move(site, run_id, state=RunState.SUCCEEDED, finished_at=now(), devices=[])
    expect(measuring.get_by_text("The last measurement ended")).to_be_visible()
    expect(measuring.get_by_text("State directories read")).to_be_visible()
    expect(own.get_by_role("link", name="See the figures")).to_be_visible()


def test_what_a_paused_run_has_recorded_is_exported(site: Site, visitor: Visitor, open_page: Opener) -> None:
    run = arrange.add_run(site, visitor, state=RunState.PAUSED, step=12, total_steps=40, name="half done")
    move(site, run.id, settings={**arrange.SETTINGS, "training": arrange.SETTINGS["training"] | {"precision": "bf16"}})
    arrange.leave_files(site, run.id, states=True)
    page = open_page(site, f"/runs/{run.id}", visitor)
    page.get_by_role("button", name="Export").click()
    dialog = page.locator("#export-run")
    dialog.get_by_label("Weights").select_option("fp32")
    dialog.get_by_role("button", name="Export").click()
    expect(page.get_by_role("heading", name="Export of half done")).to_be_visible()
    expect(page.get_by_text("Waiting in the queue")).to_be_visible()
    export_id = page.url.rpartition("/")[2]
    page.goto("/runs?kind=all")
    expect(page.locator(f"#open-{export_id}")).to_be_visible()
    page.get_by_role("link", name="Trainings").click()
    expect(page.locator(f"#open-{run.id}")).to_be_visible()
    expect(page.locator(f"#open-{export_id}")).to_have_count(0)
    move(site, export_id, state=RunState.SUCCEEDED, kind=RunKind.EXPORT)
    page.goto(f"/runs/{export_id}")
    expect(page.get_by_role("link", name="Download the model")).to_be_visible()
