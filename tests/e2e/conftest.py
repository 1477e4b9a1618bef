"""A real browser, the real web process, and a page that notices every complaint of the browser."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fixtures import machine
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, expect, sync_playwright

from lohan_app.auth.dependencies import SESSION_COOKIE
from lohan_app.entities import Role
from tests.e2e.server import Site, Visitor

DESKTOP = {"width": 1280, "height": 800}
PHONE = {"width": 375, "height": 700}
# A page is given as long as a busy machine may need; a test that passes does not wait.
PATIENCE_MILLISECONDS = 20_000
expect.set_options(timeout=PATIENCE_MILLISECONDS)
# The tests may run as root (a container), where Chromium's sandbox does not start; it only opens pages of this machine.
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-sync"]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Chromium, driven by Playwright without a download of its own."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=machine.chromium(), headless=True, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def site() -> Iterator[Site]:
    """The web process that most tests share; each test uses users and things of its own."""
    with tempfile.TemporaryDirectory(prefix="lohan-e2e-") as folder:
        site = Site(Path(folder))
        site.start()
        yield site
        site.close()


@pytest.fixture
def fresh_site(tmp_path: Path) -> Iterator[Site]:
    """A web process on an empty data folder that has not been set up."""
    site = Site(tmp_path)
    site.start()
    yield site
    site.close()


class Complaints:
    """What the browser complains about: script errors, violations of the content policy, failed requests."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self._expected: list[str] = []

    def expect(self, text: str) -> None:
        """Messages that contain `text` are part of the test, e.g. a refused form's status."""
        self._expected.append(text)

    def watch(self, page: Page) -> None:
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.found.append(f"script error on {page.url}: {error}"))

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            place = message.page.url if message.page is not None else ""
            self.found.append(f"console {message.type} on {place}: {message.text}")

    def unexpected(self) -> list[str]:
        return [text for text in self.found if not any(expected in text for expected in self._expected)]


@pytest.fixture
def complaints() -> Iterator[Complaints]:
    complaints = Complaints()
    yield complaints
    assert complaints.unexpected() == []


Opener = Callable[..., Page]


@pytest.fixture
def open_page(browser: Browser, complaints: Complaints) -> Iterator[Opener]:
    """Opens an address: `open_page(site, "/runs", visitor, size=PHONE, theme="dark")`; complaints of the browser fail the test."""
    contexts: list[BrowserContext] = []

    def open_(site: Site, path: str, visitor: Visitor | None = None, *, size: dict[str, int] = DESKTOP, theme: str = "light") -> Page:
        context = browser.new_context(viewport=size, color_scheme=theme, base_url=site.url, accept_downloads=True)
        contexts.append(context)
        if visitor is not None:
            context.add_cookies([{"name": SESSION_COOKIE, "value": visitor.token, "url": site.url}])
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MILLISECONDS)
        complaints.watch(page)
        page.goto(path)
        return page

    yield open_
    for context in contexts:
        context.close()


@pytest.fixture
def visitor(site: Site, request: pytest.FixtureRequest) -> Visitor:
    """A member of their own for this test."""
    return site.visitor(f"member-{abs(hash(request.node.nodeid)):x}"[:60])


@pytest.fixture
def admin(site: Site, request: pytest.FixtureRequest) -> Visitor:
    """An administrator of their own for this test: sees everybody's things."""
    return site.visitor(f"admin-{abs(hash(request.node.nodeid)):x}"[:60], Role.ADMIN)
