"""The new-run form: the plan follows it, refusals keep what was typed, bad rows are used without only by choice."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from lohan_app.auth.schemas import Identity
from lohan_app.context import make_context
from lohan_app.runs import service
from tests.e2e import arrange
from tests.e2e.conftest import Complaints, Opener
from tests.e2e.server import Site, Visitor

pytestmark = pytest.mark.browser


def runs_of(site: Site, identity: Identity) -> list[str]:
    context = make_context(site.settings)
    try:
        return [run.name for run in service.list_runs(context, identity).items]
    finally:
        context.engine.dispose()


def test_the_plan_follows_the_form(site: Site, visitor: Visitor, open_page: Opener) -> None:
    model = arrange.add_model(site)
    arrange.add_dataset(site, visitor)
    page = open_page(site, f"/runs/new?base_model_id={model.id}", visitor)
    expect(page.get_by_text("It fits")).to_be_visible()
    expect(page.get_by_label("Sequence length")).to_have_value("256"), "the model's context is shorter than the usual default"
    before = page.locator("#plan .tier-ram").inner_text()
    page.get_by_label("Batch size").fill("64")
    expect(page.locator("#plan .tier-ram")).not_to_have_text(before)
    expect(page.locator("#plan")).to_contain_text("64 rows")


def test_a_setting_that_cannot_be_is_explained_beside_the_form(site: Site, visitor: Visitor, open_page: Opener) -> None:
    model = arrange.add_model(site)
    arrange.add_dataset(site, visitor)
    page = open_page(site, f"/runs/new?base_model_id={model.id}", visitor)
    page.get_by_label("Sequence length").fill("1000")
    expect(page.locator("#plan")).to_contain_text("the model's context is 256 tokens")
    expect(page.locator("#plan")).to_contain_text("Use at most 256.")
    page.get_by_label("Sequence length").fill("128")
    expect(page.get_by_text("It fits")).to_be_visible()


def test_too_little_memory_shows_need_have_and_remedy(site: Site, visitor: Visitor, open_page: Opener) -> None:
    model = arrange.add_model(site)
    arrange.add_dataset(site, visitor)
    page = open_page(site, f"/runs/new?base_model_id={model.id}", visitor)
    page.get_by_text("More settings").click()
    page.get_by_label("RAM at most, GiB").fill("0.001")
    alert = page.get_by_role("alert").filter(has_text="This does not fit on this machine")
    expect(alert).to_be_visible()
    expect(page.locator("#plan")).to_contain_text("Needed")
    expect(page.locator("#plan")).to_contain_text("There is 1.02 MiB")


def test_bad_rows_are_offered_to_be_left_out_and_only_then_it_queues(
    site: Site, visitor: Visitor, open_page: Opener, complaints: Complaints
) -> None:
    complaints.expect("422")
    model = arrange.add_model(site)
    arrange.add_dataset(site, visitor, name="clean")
    bad = arrange.add_dataset(site, visitor, name="with bad rows", bad_rows=2)
    page = open_page(site, f"/runs/new?base_model_id={model.id}", visitor)
    page.get_by_label("Dataset", exact=True).select_option(label="clean")
    choice = page.get_by_label("Use the dataset without the 2 bad rows")
    expect(choice).to_have_count(0)
    page.get_by_label("Dataset", exact=True).select_option(label="with bad rows")
    expect(choice).to_be_visible()
    assert not choice.is_checked()
    page.get_by_label("Name", exact=True).fill("careful")
    page.get_by_label("Batch size").fill("2")
    page.get_by_role("button", name="Put into the queue").click()
    expect(page.get_by_role("alert")).to_contain_text("2 rows of the dataset cannot be used")
    assert runs_of(site, visitor.identity) == []
    expect(page.get_by_label("Name", exact=True)).to_have_value("careful")
    expect(page.get_by_label("Batch size")).to_have_value("2")
    choice.check()
    page.get_by_role("button", name="Put into the queue").click()
    expect(page.get_by_role("heading", name="careful")).to_be_visible()
    expect(page.get_by_text("without its bad rows")).to_be_visible()
    assert runs_of(site, visitor.identity) == ["careful"]
    assert page.get_by_role("link", name="with bad rows").get_attribute("href") == f"/datasets/{bad.id}"


def test_going_back_and_sending_again_makes_no_second_run(site: Site, visitor: Visitor, open_page: Opener) -> None:
    model = arrange.add_model(site)
    arrange.add_dataset(site, visitor)
    page = open_page(site, f"/runs/new?base_model_id={model.id}", visitor)
    form = page.evaluate("new URLSearchParams(new FormData(document.querySelector('main form'))).toString()")
    for _ in range(2):
        reply = page.request.post(
            "/runs",
            data=form,
            headers={"Content-Type": "application/x-www-form-urlencoded", "Origin": site.url, "Accept": "text/html"},
        )
        assert reply.ok
    assert len(runs_of(site, visitor.identity)) == 1


def test_a_value_out_of_bounds_is_marked_at_its_field(site: Site, visitor: Visitor, open_page: Opener, complaints: Complaints) -> None:
    complaints.expect("422")
    model = arrange.add_model(site)
    arrange.add_dataset(site, visitor)
    page = open_page(site, f"/runs/new?base_model_id={model.id}", visitor)
    page.evaluate("document.querySelector('main form').noValidate = true")
    page.get_by_label("Batch size").fill("5000")
    page.get_by_label("Learning rate", exact=True).fill("7")
    page.get_by_role("button", name="Put into the queue").click()
    expect(page.locator("#batch_size-fault")).to_contain_text("less than or equal to 4096 (found 5000)")
    expect(page.locator("#learning_rate-fault")).to_contain_text("(found 7)")
    expect(page.get_by_label("Batch size")).to_have_value("5000")
    assert page.get_by_label("Batch size").get_attribute("aria-invalid") == "true"
