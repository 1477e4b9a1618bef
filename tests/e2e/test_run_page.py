"""The run page while its run goes on: the curve, the numbers, the log, a lost connection, a failure."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from fixtures.waiting import wait_until
from playwright.sync_api import Page, expect

from lohan.events import EventType, ExitReason
from lohan_app.db import write_transaction
from lohan_app.entities import RunState
from lohan_app.runs import repository
from lohan_app.runs.states import Trigger
from tests.e2e import arrange
from tests.e2e.conftest import Complaints, Opener
from tests.e2e.server import Site, Visitor

pytestmark = pytest.mark.browser

# Counts the event streams a page has open; put in before any script of the page runs.
COUNT_STREAMS = """
  window.openStreams = 0;
  window.EventSource = class extends EventSource {
    constructor(...parts) { super(...parts); window.openStreams += 1; this.counted = true; }
    close() { if (this.counted) window.openStreams -= 1; this.counted = false; super.close(); }
  };
"""


def curve_text(page: Page) -> str:
    return page.locator("#curve-text").inner_text()


def test_steps_arrive_without_a_reload(site: Site, visitor: Visitor, open_page: Opener) -> None:
    run = arrange.add_run(site, visitor)
    trainer = arrange.Trainer(site, run)
    trainer.event(EventType.STARTED, device="cpu", total_steps=40)
    trainer.event(EventType.PHASE, phase="training", progress=0.0, detail="")
    trainer.steps(1, 5)
    page = open_page(site, f"/runs/{run.id}", visitor)
    expect(page.locator("#curve-text")).to_contain_text("Step 5:")
    trainer.steps(6, 12)
    expect(page.locator("#curve-text")).to_contain_text("Step 12:")
    expect(page.locator("[data-live=step]")).to_have_text("12 of 40")
    expect(page.locator("[data-live=speed]")).to_have_text("1,000 tokens/s")


def test_a_step_without_a_finite_loss_is_a_gap_with_a_mark(site: Site, visitor: Visitor, open_page: Opener) -> None:
    run = arrange.add_run(site, visitor)
    trainer = arrange.Trainer(site, run)
    trainer.steps(1, 5)
    trainer.steps(6, 6, loss=float("nan"))
    trainer.steps(7, 9)
    page = open_page(site, f"/runs/{run.id}", visitor)
    expect(page.locator("#curve-text")).to_contain_text("Step 9:")
    expect(page.get_by_text("Not a finite number")).to_be_visible()
    trainer.steps(10, 10, loss=float("nan"))
    expect(page.locator("#curve-text")).to_contain_text("Step 10: loss not a finite number")


def test_a_restarted_run_begins_its_curve_again(site: Site, visitor: Visitor, open_page: Opener) -> None:
    run = arrange.add_run(site, visitor)
    arrange.Trainer(site, run).steps(1, 9)
    page = open_page(site, f"/runs/{run.id}", visitor)
    expect(page.locator("#curve-text")).to_contain_text("Step 9:")
    second = arrange.Trainer(site, run, attempt=2)
    second.event(EventType.STARTED, device="cpu", total_steps=40)
    second.steps(1, 3)
    expect(page.locator("#curve-text")).to_contain_text("Step 3:")


def test_a_resumed_run_keeps_its_curve_up_to_its_step(site: Site, visitor: Visitor, open_page: Opener) -> None:
    run = arrange.add_run(site, visitor, attempt=2)
    arrange.Trainer(site, run).steps(1, 9)
    page = open_page(site, f"/runs/{run.id}", visitor)
    expect(page.locator("#curve-text")).to_contain_text("Step 9:")
    second = arrange.Trainer(site, run, attempt=2)
    second.event(EventType.STARTED, device="cpu", total_steps=40, resumed_step=7)
    expect(page.locator("#curve-text")).to_contain_text("Step 7:")
    expect(page.locator("#run-summary")).to_contain_text("resumed from step 7")
    second.steps(8, 8)
    expect(page.locator("#curve-text")).to_contain_text("Step 8:")
    second.steps(9, 12)
    expect(page.locator("#curve-text")).to_contain_text("Step 12:")
    points = page.evaluate(f"""fetch("/api/v1/runs/{run.id}/metrics").then((reply) => reply.json())""")["data"]
    assert [(point["step"], point["attempt"]) for point in points] == [(step, 1 if step < 8 else 2) for step in range(1, 13)]


# Lets a test ask what is drawn: from the next time on, whatever draws itself can be found.
FIND_CURVE = """{
  const draw = LossCurve.prototype.draw;
  LossCurve.prototype.draw = function () { window.lossCurve = this; return draw.call(this); };
  undefined;
}"""


def drag(page: Page, first: float, last: float, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Drag over the curve between two shares of its width, with something happening while the button is held."""
    box = page.locator("#curve .u-over").bounding_box()
    assert box is not None
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + first * box["width"], middle)
    page.mouse.down()
    page.mouse.move(box["x"] + (first + last) / 2 * box["width"], middle, steps=3)
    meanwhile()
    page.mouse.move(box["x"] + last * box["width"], middle, steps=3)
    page.mouse.up()
    page.mouse.move(0, 0)  # what lies under it would be told


def shown_range(page: Page) -> list[int]:
    text = page.locator("#curve-range").inner_text()
    return [int(number.replace(",", "")) for number in re.findall(r"[0-9,]*[0-9]", text)]


def test_a_stretch_of_the_curve_is_shown_step_by_step_and_stays_while_the_run_goes_on(
    site: Site, visitor: Visitor, open_page: Opener
) -> None:
    run = arrange.add_run(site, visitor)
    trainer = arrange.Trainer(site, run, total_steps=4000)
    trainer.event(EventType.STARTED, device="cpu", total_steps=4000)
    trainer.steps(1, 3000)
    page = open_page(site, f"/runs/{run.id}", visitor)
    expect(page.locator("#curve-text")).to_contain_text("Step 3,000:")
    expect(page.locator("#curve-range")).to_be_empty()
    page.evaluate(FIND_CURVE)

    # Steps that come while somebody drags neither end the drag nor move what was dragged over.
    drag(
        page,
        0.5,
        0.6,
        meanwhile=lambda: [trainer.steps(3001, 3002), expect(page.locator("[data-live=step]")).to_have_text("3,002 of 4,000")],
    )
    expect(page.locator("#curve-range")).to_contain_text("every step")
    first, last = shown_range(page)
    assert 1450 < first < 1550 < 1750 < last < 1850
    # Every one of them has arrived, and nothing else is drawn.
    drawn = page.evaluate("lossCurve.shown.steps")
    assert drawn == list(range(first, last + 1))
    view = page.evaluate("[lossCurve.plot.scales.x.min, lossCurve.plot.scales.x.max]")
    assert view == [first, last]
    trainer.steps(3003, 3010)
    expect(page.locator("[data-live=step]")).to_have_text("3,010 of 4,000")
    assert page.evaluate("[lossCurve.plot.scales.x.min, lossCurve.plot.scales.x.max]") == view
    assert page.evaluate("lossCurve.shown.steps") == drawn

    # By the keyboard: later, closer, and back to all of it, with what came meanwhile.
    for name in ("Later", "Zoom in"):
        before = shown_range(page)
        page.get_by_role("button", name=name).press("Enter")
        wait_until(lambda before=before: shown_range(page) != before, what=name)
    narrow_first, narrow_last = shown_range(page)
    assert first < narrow_first < narrow_last
    assert narrow_last - narrow_first < last - first
    page.get_by_role("button", name="Whole run").press("Enter")
    expect(page.locator("#curve-range")).to_be_empty()
    expect(page.locator("#curve-text")).to_contain_text("Step 3,010:")
    drag(page, 0.2, 0.4)
    expect(page.locator("#curve-range")).to_contain_text("every step")
    page.locator("#curve .u-over").dblclick()
    expect(page.locator("#curve-range")).to_be_empty()
    wait_until(lambda: page.evaluate("lossCurve.plot.scales.x.max") == 3010, what="the whole run")


def test_one_stream_is_open_and_none_while_the_tab_is_hidden(site: Site, visitor: Visitor, open_page: Opener) -> None:
    run = arrange.add_run(site, visitor)
    trainer = arrange.Trainer(site, run)
    trainer.steps(1, 2)
    page = open_page(site, "/settings", visitor)
    page.add_init_script(COUNT_STREAMS)
    page.goto(f"/runs/{run.id}")
    wait_until(lambda: page.evaluate("window.openStreams") == 1, what="one stream is open")
    page.evaluate("""Object.defineProperty(document, "hidden", {configurable: true, get: () => true});
                     document.dispatchEvent(new Event("visibilitychange"))""")
    assert page.evaluate("window.openStreams") == 0
    trainer.steps(3, 8)
    page.evaluate("""Object.defineProperty(document, "hidden", {configurable: true, get: () => false});
                     document.dispatchEvent(new Event("visibilitychange"))""")
    expect(page.locator("#curve-text")).to_contain_text("Step 8:")
    assert page.evaluate("window.openStreams") == 1


def test_a_lost_server_is_said_and_found_again(fresh_site: Site, open_page: Opener, complaints: Complaints) -> None:
    complaints.expect("net::ERR")
    complaints.expect("htmx:")  # what it writes about the poll that got no answer
    visitor = fresh_site.visitor("ada")
    run = arrange.add_run(fresh_site, visitor)
    trainer = arrange.Trainer(fresh_site, run)
    trainer.steps(1, 4)
    page = open_page(fresh_site, f"/runs/{run.id}", visitor)
    expect(page.locator("#curve-text")).to_contain_text("Step 4:")
    trainer.steps(5, 5)
    expect(page.locator("#curve-text")).to_contain_text("Step 5:")
    fresh_site.stop()
    expect(page.locator("#connection")).to_contain_text("Connection to the server lost. What you see is from")
    trainer.steps(6, 9)
    fresh_site.start()
    expect(page.locator("#curve-text")).to_contain_text("Step 9:", timeout=45_000)
    expect(page.locator("#connection")).to_be_hidden()


def test_a_page_whose_stream_never_opened_says_how_old_it_is(
    site: Site, visitor: Visitor, open_page: Opener, complaints: Complaints
) -> None:
    complaints.expect("net::ERR")
    run = arrange.add_run(site, visitor)
    arrange.Trainer(site, run).steps(1, 4)
    page = open_page(site, "/settings", visitor)
    page.route("**/events*", lambda route: route.abort())
    page.goto(f"/runs/{run.id}")
    expect(page.locator("#curve-text")).to_contain_text("Step 4:")
    expect(page.locator("#connection")).to_contain_text("Connection to the server lost. What you see is from")


def test_the_log_is_plain_text_and_follows(site: Site, visitor: Visitor, open_page: Opener) -> None:
    run = arrange.add_run(site, visitor)
    log = site.settings.run_folder(run.id) / "trainer.log"
    log.write_bytes(b"\x1b[32mgreen\x1b[0m \x1b]0;title\x07end\n10 %\r99 %\n<b>bold</b> \xe2\x80\xae\xff\n")
    page = open_page(site, f"/runs/{run.id}", visitor)
    expect(page.locator("#log")).to_contain_text("green end")
    expect(page.locator("#log")).to_contain_text("<b>bold</b> \\u202e")
    text = page.locator("#log").inner_text()
    assert "99 %" in text
    assert "10 %" not in text
    assert "\x1b" not in text
    with log.open("ab") as file:
        file.write(b"the next line\n")
    expect(page.locator("#log")).to_contain_text("the next line", timeout=10_000)


def test_a_failure_shows_its_reason_and_remedy_at_the_top(site: Site, visitor: Visitor, open_page: Opener) -> None:
    run = arrange.add_run(site, visitor)
    trainer = arrange.Trainer(site, run)
    trainer.steps(1, 3)
    page = open_page(site, f"/runs/{run.id}", visitor)
    expect(page.locator("#curve-text")).to_contain_text("Step 3:")
    problem = {"kind": "StorageError", "message": "no space left on device", "place": "states/a.bin", "remedy": "Free some space."}
    trainer.event(EventType.EXIT, reason=ExitReason.FAILED, error=problem)
    with write_transaction(site.engine) as session:
        assert repository.fire(session, run.id, Trigger.FAIL, problem=problem) is RunState.FAILED
    alert = page.get_by_role("alert").filter(has_text="This run failed")
    expect(alert).to_contain_text("states/a.bin: no space left on device")
    expect(alert).to_contain_text("Free some space.")
    expect(page.get_by_role("button", name="Cancel", exact=True)).to_have_count(0)


def test_cancel_asks_first(site: Site, visitor: Visitor, open_page: Opener) -> None:
    run = arrange.add_run(site, visitor, state=RunState.QUEUED)
    page = open_page(site, f"/runs/{run.id}", visitor)
    page.get_by_role("button", name="Cancel", exact=True).click()
    page.get_by_role("button", name="Keep it").click()
    expect(page.get_by_text("Queued", exact=True)).to_be_visible()
    page.get_by_role("button", name="Cancel", exact=True).click()
    page.get_by_role("button", name="Cancel the run").click()
    expect(page.get_by_text("Cancelled", exact=True)).to_be_visible()
