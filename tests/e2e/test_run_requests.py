"""What a person asks of runs in the browser: the buttons of every state, what asks first, stale pages, and the list's quick actions."""

from __future__ import annotations

import pytest
from fixtures.runs import read_run
from playwright.sync_api import Page, expect

from lohan_app.db import write_transaction
from lohan_app.entities import PauseCause, Run, RunState, Wanted
from lohan_app.entities.base import now
from lohan_app.runs import repository
from lohan_app.runs.states import Trigger
from tests.e2e import arrange
from tests.e2e.conftest import Complaints, Opener
from tests.e2e.server import Site, Visitor

pytestmark = pytest.mark.browser


def buttons(page: Page) -> list[str]:
    """The run's buttons in the order in which they stand."""
    return [text.strip() for text in page.locator("#run-summary .page-head button").all_inner_texts()]


def set_run(site: Site, run: Run, **values: object) -> None:
    with write_transaction(site.engine) as session:
        stored = session.get(Run, run.id)
        assert stored is not None
        for name, value in values.items():
            setattr(stored, name, value)


@pytest.mark.parametrize(
    ("state", "values", "expected"),
    [
        (RunState.DRAFT, {}, ["Queue it", "Clone", "Delete"]),
        (RunState.QUEUED, {}, ["Pause", "Clone", "Cancel"]),
        (RunState.STARTING, {}, ["Pause", "Clone", "Cancel"]),
        (RunState.RUNNING, {}, ["Pause", "Clone", "Cancel"]),
        (RunState.RUNNING, {"step": 3}, ["Pause", "Stop and keep", "Clone", "Cancel"]),
        (RunState.RUNNING, {"step": 3, "wanted": Wanted.CANCEL}, ["Clone", "Stop by force"]),
        (RunState.PAUSING, {"step": 3, "wanted": Wanted.PAUSE}, ["Resume", "Stop and keep", "Clone", "Cancel", "Stop by force"]),
        (RunState.PAUSED, {"step": 3, "wanted": Wanted.PAUSE}, ["Resume", "Stop and keep", "Clone", "Cancel"]),
        (RunState.PAUSED, {"pause_cause": PauseCause.DISK_FULL}, ["Resume", "Keep paused", "Clone", "Cancel"]),
        (RunState.CANCELLING, {"wanted": Wanted.CANCEL}, ["Clone", "Stop by force"]),
        (RunState.SUCCEEDED, {}, ["Clone", "Delete"]),
        (RunState.FAILED, {}, ["Retry", "Clone", "Delete"]),
        (RunState.CANCELLED, {}, ["Retry", "Clone", "Delete"]),
    ],
)
def test_a_page_offers_what_is_possible(
    site: Site, visitor: Visitor, open_page: Opener, state: RunState, values: dict[str, object], expected: list[str]
) -> None:
    page = open_page(site, f"/runs/{arrange.add_run(site, visitor, state=state, **values).id}", visitor)
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    assert buttons(page) == expected


def test_a_run_is_paused_resumed_and_paused_again(site: Site, visitor: Visitor, open_page: Opener) -> None:
    run = arrange.add_run(site, visitor, state=RunState.QUEUED, step=3)
    page = open_page(site, f"/runs/{run.id}", visitor)
    page.get_by_role("button", name="Pause").click()
    expect(page.get_by_role("status").filter(has_text="it goes on from its last recorded step")).to_be_visible()
    page.get_by_role("button", name="Resume").click()
    expect(page.get_by_text("Waiting in the queue")).to_be_visible()
    page.get_by_role("button", name="Pause").click()
    expect(page.get_by_role("button", name="Resume")).to_be_visible()
    assert read_run(site.engine, run.id).state is RunState.PAUSED


def test_a_pause_that_would_lose_everything_asks_first(site: Site, visitor: Visitor, open_page: Opener) -> None:
    settings = arrange.SETTINGS | {"engine": {"device": "cpu", "durability": "none"}}
    run = arrange.add_run(site, visitor, step=3, settings=settings)
    page = open_page(site, f"/runs/{run.id}", visitor)
    page.get_by_role("button", name="Pause").click()
    expect(page.get_by_role("dialog")).to_contain_text("begins again from the base model")
    page.get_by_role("button", name="Let it run").click()
    assert read_run(site.engine, run.id).wanted is Wanted.RUN
    page.get_by_role("button", name="Pause").click()
    page.get_by_role("button", name="Pause it").click()
    expect(page.get_by_text("Pausing", exact=True).first).to_be_visible()
    assert read_run(site.engine, run.id).wanted is Wanted.PAUSE


def test_stopping_and_force_say_what_they_do_before_they_do_it(site: Site, visitor: Visitor, open_page: Opener) -> None:
    run = arrange.add_run(site, visitor, step=3, total_steps=40)
    page = open_page(site, f"/runs/{run.id}", visitor)
    page.get_by_role("button", name="Stop and keep").click()
    expect(page.get_by_role("dialog")).to_contain_text("exports the weights it has then")
    page.get_by_role("dialog").get_by_role("button", name="Stop and keep").click()
    expect(page.get_by_text("Stopping with its result")).to_be_visible()
    page.get_by_role("button", name="Stop by force").click()
    expect(page.get_by_role("dialog")).to_contain_text("killed at once")
    page.get_by_role("button", name="Kill the trainer").click()
    expect(page.get_by_text("Pausing", exact=True).first).to_be_visible()
    stored = read_run(site.engine, run.id)
    assert (stored.wanted, stored.kill_attempt) == (Wanted.PAUSE, 1)


def test_a_stale_page_says_where_the_run_is_now(site: Site, visitor: Visitor, open_page: Opener, complaints: Complaints) -> None:
    complaints.expect("409")
    run = arrange.add_run(site, visitor, state=RunState.QUEUED)
    page = open_page(site, "/settings", visitor)
    page.route("**/partials/summary", lambda route: route.fulfill(status=204))  # the tab was asleep
    page.route("**/events*", lambda route: route.abort())
    complaints.expect("net::ERR")
    complaints.expect("htmx:")
    page.goto(f"/runs/{run.id}")
    set_run(site, run, state=RunState.SUCCEEDED, finished_at=now())
    page.get_by_role("button", name="Pause").click()
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text("the run is succeeded: pause is not possible")
    expect(alert).to_contain_text("Allowed now: clone, delete.")
    expect(page.get_by_text("Succeeded", exact=True)).to_be_visible()
    assert read_run(site.engine, run.id).wanted is Wanted.RUN


def test_a_failed_run_is_retried_once_and_says_what_happens(
    site: Site, visitor: Visitor, open_page: Opener, complaints: Complaints
) -> None:
    complaints.expect("409")
    problem = {
        "kind": "CapacityError",
        "message": "GPU memory ran out: 2 GiB",
        "place": "GPU memory",
        "remedy": "Use less.",
        "cause": "gpu_memory",
    }
    run = arrange.add_run(site, visitor, state=RunState.FAILED, problem=problem, step=7, total_steps=40)
    arrange.leave_files(site, run.id, states=True)
    page = open_page(site, f"/runs/{run.id}", visitor)
    expect(page.get_by_role("alert")).to_contain_text("This run failed: GPU memory ran out")
    expect(page.get_by_text("goes on from its last recorded step")).to_be_visible()
    page.get_by_role("button", name="Retry").click()
    expect(page.get_by_text("Waiting in the queue")).to_be_visible()
    retry = page.url.rpartition("/")[2]
    assert retry != run.id
    assert read_run(site.engine, retry).parent_id == run.id
    expect(page.get_by_role("link", name="the run before it")).to_have_attribute("href", f"/runs/{run.id}")
    page.go_back()
    page.get_by_role("button", name="Retry").click()
    expect(page.get_by_role("alert").filter(has_text="Not done")).to_contain_text(f"the run is being retried by {retry}")


def test_a_clone_can_be_queued_changed_or_deleted(site: Site, visitor: Visitor, open_page: Opener) -> None:
    run = arrange.add_run(site, visitor, state=RunState.SUCCEEDED)
    page = open_page(site, f"/runs/{run.id}", visitor)
    page.get_by_role("button", name="Clone").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Copy of night run")
    expect(page.get_by_text("Nothing is queued yet.")).to_be_visible()
    page.get_by_role("link", name="Change its settings").click()
    expect(page.get_by_label("Batch size")).to_have_value("4")
    expect(page.get_by_label("Sequence length")).to_have_value("64")
    expect(page.get_by_label("Learning rate")).to_have_value("0.001")
    page.go_back()
    page.get_by_role("button", name="Queue it").click()
    expect(page.get_by_text("Waiting in the queue")).to_be_visible()


def test_deleting_asks_first_and_leads_to_the_list(site: Site, visitor: Visitor, open_page: Opener) -> None:
    run = arrange.add_run(site, visitor, state=RunState.FAILED)
    other = arrange.add_run(site, visitor, state=RunState.FAILED, name="the other")
    page = open_page(site, f"/runs/{run.id}", visitor)
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="Keep it").click()
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="Delete the run").click()
    expect(page.locator("#runs")).to_contain_text("the other")
    expect(page.locator(f"#open-{run.id}")).to_have_count(0)
    assert read_run(site.engine, other.id).deleted_at is None


def test_a_full_drive_says_what_it_waits_for_and_goes_on_without_a_click(site: Site, visitor: Visitor, open_page: Opener) -> None:
    reason = (
        "The drive is full (/states). It goes on by itself when there is room: it needs 2.50 GiB in the data folder, where 1 GiB are free."
    )
    run = arrange.add_run(site, visitor, state=RunState.PAUSED, pause_cause=PauseCause.DISK_FULL, state_reason=reason, step=3)
    page = open_page(site, f"/runs/{run.id}", visitor)
    notice = page.get_by_role("status").filter(has_text="Paused: a drive is full")
    expect(notice).to_contain_text(reason)
    expect(notice).to_contain_text("nothing of this run is lost")
    page.goto("/runs")
    expect(page.locator("#runs")).to_contain_text("A drive is full; it goes on by itself when there is room")
    with write_transaction(site.engine) as session:
        assert repository.fire(session, run.id, Trigger.RESUME, state_reason="") is RunState.QUEUED
    expect(page.locator("#runs")).to_contain_text("Waits for its turn")


def test_the_list_pauses_resumes_and_says_what_is_not_possible(site: Site, visitor: Visitor, open_page: Opener) -> None:
    run = arrange.add_run(site, visitor, state=RunState.QUEUED, name="listed")
    page = open_page(site, "/runs", visitor)
    page.get_by_role("button", name="Pause listed").click()
    expect(page.get_by_role("button", name="Resume listed")).to_be_visible()
    page.get_by_role("button", name="Resume listed").click()
    expect(page.get_by_role("button", name="Pause listed")).to_be_visible()
    page.route("**/partials/list?*", lambda route: route.fulfill(status=204) if route.request.method == "GET" else route.continue_())
    set_run(site, run, state=RunState.CANCELLED, finished_at=now())
    page.evaluate("document.querySelector('#runs').removeAttribute('hx-trigger')")
    expect(page.get_by_role("button", name="Pause listed")).to_be_visible()
    page.get_by_role("button", name="Pause listed").click()
    expect(page.get_by_role("alert")).to_contain_text("the run is cancelled: pause is not possible")
    expect(page.get_by_role("button", name="Retry listed")).to_be_visible()
