"""The storage page in a browser: who sees what, freeing states with a question first, and a full quota at an upload."""

from __future__ import annotations

import json

import pytest
from playwright.sync_api import expect

from lohan_app.entities import RunState
from lohan_app.entities.base import now
from tests.e2e import arrange
from tests.e2e.conftest import PHONE, Complaints, Opener
from tests.e2e.server import Site, Visitor

pytestmark = pytest.mark.browser


def failed_run(site: Site, visitor: Visitor, name: str) -> str:
    model, dataset = arrange.add_model(site), arrange.add_dataset(site, visitor)
    values = {"base_model_id": model.id, "dataset_id": dataset.id, "finished_at": now(), "step": 3}
    run = arrange.add_run(site, visitor, state=RunState.FAILED, name=name, **values)
    arrange.leave_files(site, run.id, states=True)
    return run.id


@pytest.mark.parametrize(("size", "theme"), [(None, "light"), (PHONE, "dark")])
def test_states_are_freed_after_a_question(
    site: Site, visitor: Visitor, open_page: Opener, size: dict[str, int] | None, theme: str
) -> None:
    first, second = (failed_run(site, visitor, name) for name in ("first", "second"))
    arrange.measure_storage(site)
    page = open_page(site, "/storage", visitor, theme=theme, **({} if size is None else {"size": size}))
    buttons = page.get_by_role("button", name="Free the states of")
    expect(buttons).to_have_count(2)
    page.get_by_role("button", name="Free the states of first").click()
    dialog = page.locator(f"#free-{first}")
    expect(dialog).to_be_visible()
    dialog.get_by_role("button", name="Keep it").click()
    expect(dialog).to_be_hidden()
    assert (site.settings.state_folders[0] / first).exists()
    page.get_by_role("button", name="Free the states of first").click()
    dialog.get_by_role("button", name="Free them").click()
    expect(buttons).to_have_count(1)
    assert not (site.settings.state_folders[0] / first).exists()
    assert (site.settings.state_folders[0] / second).exists()


def test_an_upload_beyond_the_quota_says_what_to_delete(tmp_path, open_page: Opener, complaints: Complaints) -> None:
    complaints.expect("409")
    site = Site(tmp_path, LOHAN_USER_QUOTA_BYTES="2000")
    site.start()
    try:
        visitor = site.visitor("member")
        arrange.add_dataset(site, visitor, name="old dialogs", size_bytes=1900)
        page = open_page(site, "/datasets", visitor)
        row = json.dumps({"prompt": "a", "completion": "b" * 100}) + "\n"
        page.get_by_label("File").set_input_files({"name": "rows.jsonl", "mimeType": "application/jsonl", "buffer": row.encode() * 3})
        page.get_by_role("button", name="Upload", exact=True).click()
        expect(page.locator("#upload-problem-text")).to_contain_text("dataset 'old dialogs' (1.86 KiB)")
        page.goto("/storage")
        expect(page.get_by_text("of 1.95 KiB")).to_be_visible()
    finally:
        site.close()
