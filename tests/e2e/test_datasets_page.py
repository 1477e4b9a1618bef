"""Uploading in the browser: progress, stopping, refusals; and the page of a dataset with bad rows."""

from __future__ import annotations

from pathlib import Path

import pytest
from fixtures.rows import messages_rows, write_jsonl
from playwright.sync_api import Page, Route, expect

from lohan_app.db import write_transaction
from lohan_app.entities import Dataset, DatasetState
from tests.e2e import arrange
from tests.e2e.conftest import Complaints, Opener
from tests.e2e.server import Site, Visitor

pytestmark = pytest.mark.browser


def choose(page: Page, file: Path) -> None:
    page.get_by_label("File", exact=True).set_input_files(file)
    page.get_by_role("button", name="Upload", exact=True).click()


def test_a_file_arrives_and_its_page_waits_for_the_check(site: Site, visitor: Visitor, open_page: Opener, tmp_path: Path) -> None:
    page = open_page(site, "/datasets", visitor)
    choose(page, write_jsonl(tmp_path / "my rows.jsonl", messages_rows(4)))
    expect(page.get_by_role("heading", name="my rows.jsonl")).to_be_visible()
    expect(page.get_by_text("Checking every row")).to_be_visible()
    dataset_id = page.url.rpartition("/")[2]
    with write_transaction(site.engine) as session:
        dataset = session.get(Dataset, dataset_id)
        assert dataset is not None
        dataset.state, dataset.row_count = DatasetState.READY, 4
    expect(page.get_by_text("Ready", exact=True)).to_be_visible()
    expect(page.get_by_role("link", name="New run with it")).to_be_visible()


def test_an_upload_can_be_stopped(site: Site, visitor: Visitor, open_page: Opener, complaints: Complaints, tmp_path: Path) -> None:
    page = open_page(site, "/datasets", visitor)
    held: list[Route] = []
    page.route("**/api/v1/datasets", lambda route: held.append(route))  # the request is held, as on a slow network
    choose(page, write_jsonl(tmp_path / "rows.jsonl", messages_rows(4)))
    page.get_by_role("button", name="Stop the upload").click()
    expect(page.get_by_role("button", name="Upload", exact=True)).to_be_enabled()
    expect(page.get_by_role("button", name="Stop the upload")).to_be_hidden()
    page.reload()
    expect(page.get_by_text("No dataset yet")).to_be_visible()


def test_a_refused_file_says_why_and_the_form_stays(
    site: Site, visitor: Visitor, open_page: Opener, complaints: Complaints, tmp_path: Path
) -> None:
    complaints.expect("422")
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    page = open_page(site, "/datasets", visitor)
    choose(page, empty)
    expect(page.get_by_role("alert")).to_contain_text("the file is empty")
    expect(page.get_by_role("button", name="Upload", exact=True)).to_be_enabled()


def test_a_file_above_the_limit_is_refused_before_it_is_sent(site: Site, visitor: Visitor, open_page: Opener, tmp_path: Path) -> None:
    page = open_page(site, "/datasets", visitor)
    page.evaluate("document.getElementById('upload').dataset.limit = '10'")
    choose(page, write_jsonl(tmp_path / "rows.jsonl", messages_rows(4)))
    expect(page.get_by_role("alert")).to_contain_text("is above the limit of 10 B")


def test_bad_rows_are_listed_with_their_lines(site: Site, visitor: Visitor, open_page: Opener) -> None:
    dataset = arrange.add_dataset(site, visitor, bad_rows=30)
    page = open_page(site, f"/datasets/{dataset.id}", visitor)
    expect(page.get_by_text("30 of 33 rows cannot be used")).to_be_visible()
    expect(page.get_by_role("row")).to_have_count(1 + 20)
    page.get_by_role("link", name="Show more").click()
    expect(page.get_by_role("row")).to_have_count(1 + 30)
    expect(page.get_by_role("cell", name="33", exact=True)).to_be_visible()


def test_deleting_asks_first_and_says_what_stands_in_the_way(
    site: Site, visitor: Visitor, open_page: Opener, complaints: Complaints
) -> None:
    complaints.expect("409")
    dataset = arrange.add_dataset(site, visitor, name="needed")
    arrange.add_run(site, visitor, dataset_id=dataset.id)
    page = open_page(site, f"/datasets/{dataset.id}", visitor)
    page.get_by_role("button", name="Delete", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(page.get_by_role("alert")).to_contain_text("1 unfinished run of this dataset")
    free = arrange.add_dataset(site, visitor, name="not needed")
    page.goto(f"/datasets/{free.id}")
    page.get_by_role("button", name="Delete", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(page.get_by_role("heading", name="Datasets", exact=True)).to_be_visible()
    expect(page.get_by_text("not needed")).to_have_count(0)
