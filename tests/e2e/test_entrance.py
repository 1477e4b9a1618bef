"""Set-up and login in the browser."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from lohan_app.auth import service
from lohan_app.auth.passwords import PasswordHasher
from lohan_app.entities import Role
from tests.e2e.conftest import Complaints, Opener
from tests.e2e.server import Site, Visitor

pytestmark = pytest.mark.browser

PASSWORD = "seven unrelated words"


def test_the_token_leaves_the_address_and_makes_the_administrator_once(fresh_site: Site, open_page: Opener, complaints: Complaints) -> None:
    complaints.expect("403")
    token = fresh_site.setup_token()
    page = open_page(fresh_site, "/")
    assert page.url == f"{fresh_site.url}/setup", "before the set-up every page leads there"
    page.goto(f"/setup?token={token}")
    assert page.url == f"{fresh_site.url}/setup"
    expect(page.get_by_label("One-time token")).to_have_value(token)

    page.get_by_label("One-time token").fill("not the token")
    page.get_by_label("Your name").fill("ada")
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Create the administrator").click()
    expect(page.get_by_role("alert")).to_contain_text("the set-up token is not valid")
    expect(page.get_by_label("Your name")).to_have_value("ada")
    expect(page.get_by_label("Password")).to_have_value("")

    page.get_by_label("One-time token").fill(token)
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Create the administrator").click()
    expect(page.get_by_role("heading", name="Dashboard")).to_be_visible()
    expect(page.get_by_role("heading", name="First steps")).to_be_visible()
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
    page.goto(f"/setup?token={token}")
    expect(page.get_by_role("heading", name="Already set up")).to_be_visible()


def test_login_returns_to_the_page_that_was_asked_for(site: Site, visitor: Visitor, open_page: Opener, complaints: Complaints) -> None:
    complaints.expect("401")
    service.create_user(site.engine, PasswordHasher(), name="grace", password=PASSWORD, role=Role.MEMBER)
    page = open_page(site, "/datasets")
    page.get_by_label("Name").fill("grace")
    page.get_by_label("Password").fill("wrong")
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("alert")).to_contain_text("user name or password is wrong")
    expect(page.get_by_label("Name")).to_have_value("grace")
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("heading", name="Datasets", exact=True)).to_be_visible()


@pytest.mark.parametrize("target", ["https://example.org/", "//example.org/", "/\\example.org", "javascript:alert(1)"])
def test_login_never_leads_to_another_site(site: Site, visitor: Visitor, open_page: Opener, target: str) -> None:
    page = open_page(site, f"/login?next={target}", visitor)
    assert page.url == f"{site.url}/"


def test_a_key_is_shown_once_and_can_be_revoked(site: Site, visitor: Visitor, open_page: Opener) -> None:
    page = open_page(site, "/settings", visitor)
    page.get_by_label("Name of a new key").fill("<b>laptop</b>")
    page.get_by_role("button", name="Create a key").click()
    expect(page.get_by_text("it is shown this once")).to_be_visible()
    text = page.locator("#new-key").inner_text()
    assert text.startswith("lohan_")
    page.goto("/settings")
    expect(page.get_by_text(text)).to_have_count(0)
    page.get_by_role("button", name="Revoke <b>laptop</b>").click()
    page.get_by_role("button", name="Revoke", exact=True).click()
    expect(page.get_by_text("<b>laptop</b>")).to_have_count(0)


def test_the_chosen_theme_stays_for_the_next_page(site: Site, visitor: Visitor, open_page: Opener) -> None:
    page = open_page(site, "/settings", visitor)
    before = page.evaluate("getComputedStyle(document.body).color")
    page.get_by_role("button", name="Dark mode").click()
    dark = page.evaluate("getComputedStyle(document.body).color")
    assert dark != before
    page.goto("/docs")
    assert page.locator("html").get_attribute("data-theme") == "dark"
    assert page.evaluate("getComputedStyle(document.body).color") == dark
