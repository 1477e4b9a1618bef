"""What a measured machine adds to the pages: how long a step and a run take, and where that time goes."""

from __future__ import annotations

import pytest
from fixtures.profiles import with_operators
from playwright.sync_api import expect

from tests.e2e import arrange
from tests.e2e.conftest import DESKTOP, PHONE, Complaints, Opener
from tests.e2e.server import Site
from tests.e2e.test_every_page import assert_stands, overflow

pytestmark = pytest.mark.browser


def test_the_forecast_follows_the_form_and_stays_with_the_run(fresh_site: Site, open_page: Opener, complaints: Complaints) -> None:
    visitor = fresh_site.visitor("ada")
    workload = with_operators(arrange.tiny_workload())
    model = arrange.add_model(fresh_site, workload=workload.model_dump(mode="json"))
    arrange.add_dataset(fresh_site, visitor)
    address = f"/runs/new?base_model_id={model.id}"
    page = open_page(fresh_site, address, visitor)
    expect(page.locator("#plan")).to_contain_text("lohan profile MODEL")
    arrange.measure(fresh_site, workload)
    page.reload()
    plan = page.locator("#plan")
    expect(plan.get_by_role("heading", name="Time of a step")).to_be_visible()
    expect(plan.locator(".tier")).to_have_count(2)
    forward = plan.get_by_role("row", name="Takes")
    before = forward.inner_text()
    page.get_by_label("Batch size").fill("1")
    expect(plan).to_contain_text("3 steps")
    expect(forward).not_to_have_text(before)
    # The click also leaves the field, for which the plan is asked for again: what was opened stays open.
    with page.expect_response("**/runs/partials/plan"):
        plan.get_by_text("What is kept, and what was tried").click()
    expect(plan.get_by_role("row", name="mlp.up_proj")).to_be_visible()
    page.get_by_label("Epochs").fill("2")
    expect(plan).to_contain_text("6 steps")
    expect(plan.get_by_role("row", name="mlp.up_proj")).to_be_visible()
    page.get_by_role("button", name="Put into the queue").click()
    expect(page.get_by_role("heading", name="Time of a step")).to_be_visible()
    run_page = page.url
    for size, theme in ((DESKTOP, "light"), (PHONE, "dark")):
        page = open_page(fresh_site, "/", visitor, size=size, theme=theme)
        for path in (address, run_page, "/hardware"):
            assert_stands(page, path)
            for summary in page.locator("details > summary").all():
                summary.click()
            assert overflow(page) == 0, path
    expect(page.get_by_role("row", name="Checksum")).to_be_visible()
    assert complaints.unexpected() == []
