"""Every page, empty and full: no complaint of the browser, no sideways scroll on a phone, hostile names shown as text."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from lohan.events import EventType
from lohan_app.entities import BaseModelState, DatasetState, Role, RunState
from tests.e2e import arrange
from tests.e2e.conftest import DESKTOP, PHONE, Complaints, Opener
from tests.e2e.server import Site, Visitor

pytestmark = pytest.mark.browser

PAGES = ["/", "/runs", "/runs/new", "/datasets", "/models", "/hardware", "/storage", "/settings", "/docs"]
LOOKS = [pytest.param(DESKTOP, "light", id="desktop"), pytest.param(PHONE, "dark", id="phone")]
PROBLEM = {"kind": "StorageError", "message": "no space left on device", "place": "states/unit-3.bin", "remedy": "Free some space."}
SINGLES = [f"run-{state}" for state in RunState] + [f"dataset-{name}" for name in ("ready", "bad-rows", "validating", "invalid")]
LONG_WORD = "supercalifragilistic" * 12


def overflow(page: Page) -> int:
    """Pixels by which the page is wider than the window."""
    return int(page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))


@pytest.fixture(scope="module")
def full(site: Site) -> dict[str, str]:
    """A member whose lists hold something in every state; the addresses of the pages of single things."""
    keeper = site.visitor("keeper", Role.ADMIN)
    plain = arrange.add_dataset(site, keeper)
    bad = arrange.add_dataset(site, keeper, name=arrange.HOSTILE, bad_rows=30)
    validating = arrange.add_dataset(site, keeper, state=DatasetState.VALIDATING, progress=0.4, format=None, preview=None)
    invalid = arrange.add_dataset(site, keeper, name=LONG_WORD, state=DatasetState.INVALID, problem=PROBLEM, preview=None)
    for state in BaseModelState:
        arrange.add_model(site, state=state, problem=PROBLEM if state is BaseModelState.INVALID else None)
    model = arrange.add_model(site, name=f"{LONG_WORD}-model")
    runs = {
        state: arrange.add_run(
            site,
            keeper,
            state=state,
            name=arrange.HOSTILE if state is RunState.RUNNING else f"{state} {LONG_WORD}",
            base_model_id=model.id,
            dataset_id=plain.id,
            problem=PROBLEM if state is RunState.FAILED else None,
            state_reason="The GPU is held by another process." if state is RunState.QUEUED else "",
            started_plan=arrange.make_plan().model_dump(mode="json") | {"micro_batch_size": 1, "kernels": LONG_WORD},
        )
        for state in RunState
    }
    trainer = arrange.Trainer(site, runs[RunState.RUNNING])
    trainer.event(EventType.STARTED, device="cpu", precision="bf16", parameters=92_288, total_steps=40)
    trainer.steps(1, 20)
    for state, run in runs.items():
        arrange.leave_files(site, run.id, states=state is not RunState.DRAFT)
    arrange.measure_storage(site, unknown_runs=2)
    singles = {f"run-{state}": f"/runs/{run.id}" for state, run in runs.items()}
    datasets = {"ready": plain, "bad-rows": bad, "validating": validating, "invalid": invalid}
    return {"token": keeper.token} | singles | {f"dataset-{name}": f"/datasets/{dataset.id}" for name, dataset in datasets.items()}


@pytest.fixture
def keeper(site: Site, full: dict[str, str], admin: Visitor) -> Visitor:
    return Visitor(admin.user, admin.identity, full["token"])


def assert_stands(page: Page, path: str) -> None:
    """The page has its heading, and does not scroll sideways."""
    page.goto(path)
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    assert overflow(page) == 0, path


@pytest.mark.parametrize(("size", "theme"), LOOKS)
def test_empty_pages_stand(site: Site, visitor: Visitor, open_page: Opener, size: dict[str, int], theme: str) -> None:
    page = open_page(site, "/", visitor, size=size, theme=theme)
    for path in PAGES:
        assert_stands(page, path)


@pytest.mark.parametrize(("size", "theme"), LOOKS)
def test_full_pages_stand(site: Site, keeper: Visitor, full: dict[str, str], open_page: Opener, size: dict[str, int], theme: str) -> None:
    page = open_page(site, "/", keeper, size=size, theme=theme)
    for path in [*PAGES, *(full[name] for name in SINGLES)]:
        assert_stands(page, path)


def test_hostile_names_are_shown_as_text(site: Site, keeper: Visitor, full: dict[str, str], open_page: Opener) -> None:
    page = open_page(site, "/runs", keeper)
    for path in ("/runs", "/datasets", full["run-running"], full["dataset-bad-rows"]):
        page.goto(path)
        expect(page.get_by_text(arrange.HOSTILE_SHOWN, exact=True).first).to_be_visible()
        assert page.locator("img").count() == 0, path
        assert "\u202e" not in page.content(), path


def test_every_control_has_a_name_and_every_field_a_label(site: Site, keeper: Visitor, full: dict[str, str], open_page: Opener) -> None:
    page = open_page(site, "/", keeper)
    for path in [*(path for path in PAGES if path != "/docs"), full["run-running"], full["dataset-bad-rows"]]:
        page.goto(path)
        nameless = page.evaluate(
            """[...document.querySelectorAll("a, button, input:not([type=hidden]), select, summary")]
                 .filter((e) => !(e.innerText || e.ariaLabel || (e.labels && e.labels.length) || e.textContent.trim()))
                 .map((e) => e.outerHTML)"""
        )
        assert nameless == [], path


def test_the_menu_opens_on_a_phone(site: Site, visitor: Visitor, open_page: Opener) -> None:
    page = open_page(site, "/settings", visitor, size=PHONE)
    link = page.get_by_role("link", name="Hardware")
    expect(link).to_be_hidden()
    page.get_by_role("button", name="Menu").click()
    link.click()
    expect(page.get_by_role("heading", name="Hardware")).to_be_visible()


def test_what_does_not_exist_says_so_on_a_page(site: Site, visitor: Visitor, open_page: Opener, complaints: Complaints) -> None:
    complaints.expect("404")
    page = open_page(site, "/runs/run_nobody", visitor)
    expect(page.get_by_text("no such run")).to_be_visible()
    expect(page.get_by_role("link", name="To the dashboard")).to_be_visible()
