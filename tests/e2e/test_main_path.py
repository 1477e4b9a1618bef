"""The main job in the browser, with the real appliance: token, login, upload, plan, queue, live curve, download, and the model works.

One appliance serves the module; its tests build on each other's model and run in the order of the file.
"""

from __future__ import annotations

import json
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures.rows import messages_rows, write_jsonl
from fixtures.tiny_model import make_tiny_model
from playwright.sync_api import Browser, Page, expect

from tests.e2e.conftest import DESKTOP, PATIENCE_MILLISECONDS, Complaints
from tests.e2e.server import Appliance

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]

PASSWORD = "seven unrelated words"
# Reading a model, checking rows and training are processes of their own; each starts Python, two of them torch.
WORK_MILLISECONDS = 240_000
STEPS = 30


@pytest.fixture(scope="module")
def appliance() -> Iterator[Appliance]:
    with tempfile.TemporaryDirectory(prefix="lohan-e2e-up-") as folder:
        appliance = Appliance(Path(folder))
        make_tiny_model(appliance.model_dir / "tiny")
        make_tiny_model(appliance.model_dir / "damaged", seed=1)
        appliance.start()
        yield appliance
        appliance.stop()


@pytest.fixture(scope="module")
def browser_page(appliance: Appliance, browser: Browser) -> Iterator[Page]:
    """The administrator's tab, from the one-time token on."""
    context = browser.new_context(viewport=DESKTOP, base_url=appliance.url, accept_downloads=True)
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MILLISECONDS)
    yield page
    context.close()


@pytest.fixture
def page(browser_page: Page, complaints: Complaints) -> Page:
    complaints.watch(browser_page)
    return browser_page


def add_model(page: Page, name: str) -> None:
    page.goto("/models")
    page.get_by_role("button", name=f"Add {name}", exact=True).click()
    expect(page.get_by_role("link", name=f"New run with {name}", exact=True)).to_be_visible(timeout=WORK_MILLISECONDS)


def upload(page: Page, file: Path, name: str) -> None:
    page.goto("/datasets")
    page.get_by_label("File", exact=True).set_input_files(file)
    page.get_by_label("Name", exact=True).fill(name)
    page.get_by_role("button", name="Upload", exact=True).click()
    expect(page.get_by_role("heading", name=name)).to_be_visible()


def fill_run(page: Page, *, name: str, model: str, steps: int) -> None:
    page.get_by_label("Model", exact=True).select_option(label=model)
    page.get_by_label("Name", exact=True).fill(name)
    page.get_by_label("Batch size").fill("4")
    page.get_by_label("Sequence length").fill("64")
    page.get_by_label("Learning rate", exact=True).fill("1e-3")
    page.get_by_label("Steps at most").fill(str(steps))
    page.get_by_text("More settings").click()
    page.get_by_label("Rows to evaluate").fill("8")
    expect(page.get_by_text("It fits")).to_be_visible()


def test_from_the_token_to_a_model_that_speaks(appliance: Appliance, page: Page, tmp_path: Path) -> None:
    page.goto(appliance.setup_address())
    page.get_by_label("Your name").fill("ada")
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Create the administrator").click()
    page.get_by_role("button", name="Sign out").click()
    page.get_by_label("Name").fill("ada")
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("heading", name="First steps")).to_be_visible()

    add_model(page, "tiny")
    upload(page, write_jsonl(tmp_path / "rows.jsonl", messages_rows(48)), "dialogs")
    expect(page.get_by_text("What is a tier?", exact=True)).to_be_visible(timeout=WORK_MILLISECONDS)

    page.get_by_role("link", name="New run with it").click()
    fill_run(page, name="first run", model="tiny", steps=STEPS)
    expect(page.get_by_role("img", name="SSD")).to_be_visible()
    page.get_by_role("button", name="Put into the queue").click()

    expect(page.get_by_role("heading", name="first run")).to_be_visible()
    page.evaluate("window.neverReloaded = true")
    expect(page.locator("#curve-text")).to_contain_text("Step ", timeout=WORK_MILLISECONDS)
    expect(page.get_by_text("Succeeded", exact=True).first).to_be_visible(timeout=WORK_MILLISECONDS)
    expect(page.locator("#curve-text")).to_contain_text(f"Step {STEPS}:")
    assert page.evaluate("window.neverReloaded"), "everything came over the one open page"
    expect(page.locator("#run-events")).to_contain_text("rows after the last step")
    assert page.locator("#log").inner_text().strip()

    with page.expect_download() as download:
        page.get_by_role("link", name="Download the model").click()
    archive = tmp_path / "model.zip"
    download.value.save_as(archive)
    speaks(archive, tmp_path / "model")


def speaks(archive: Path, folder: Path) -> None:
    """The downloaded folder is a model of transformers' that generates."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with zipfile.ZipFile(archive) as zipped:
        assert zipped.testzip() is None
        zipped.extractall(folder)
    (top,) = folder.iterdir()
    model = AutoModelForCausalLM.from_pretrained(top)
    tokenizer = AutoTokenizer.from_pretrained(top)
    question = [{"role": "user", "content": "What is a tier?"}]
    tokens = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**tokens, max_new_tokens=8, do_sample=False)
    assert answer.shape[1] > tokens["input_ids"].shape[1]


def test_bad_rows_are_listed_by_line_and_left_out_only_by_choice(page: Page, complaints: Complaints, tmp_path: Path) -> None:
    complaints.expect("422")
    lines = [json.dumps(row) for row in messages_rows(16)]
    lines[1] = '{"messages": [{"role": "user", "content": 5}]}'
    lines[4] = "not JSON at all"
    file = tmp_path / "bad.jsonl"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    upload(page, file, "dialogs with bad rows")
    table = page.get_by_role("table")
    expect(table.get_by_role("cell", name="2", exact=True)).to_be_visible(timeout=WORK_MILLISECONDS)
    expect(table.get_by_role("cell", name="5", exact=True)).to_be_visible()
    expect(page.get_by_text("2 of 16 rows cannot be used")).to_be_visible()

    page.get_by_role("link", name="New run with it").click()
    fill_run(page, name="careful run", model="tiny", steps=2)
    page.get_by_role("button", name="Put into the queue").click()
    expect(page.get_by_role("alert")).to_contain_text("2 rows of the dataset cannot be used")
    expect(page.get_by_label("Name", exact=True)).to_have_value("careful run")
    page.get_by_label("Use the dataset without the 2 bad rows").check()
    page.get_by_role("button", name="Put into the queue").click()
    expect(page.get_by_text("Succeeded", exact=True).first).to_be_visible(timeout=WORK_MILLISECONDS)
    expect(page.get_by_text("without its bad rows")).to_be_visible()


def test_a_trainer_that_fails_says_why_on_its_page(appliance: Appliance, page: Page, tmp_path: Path) -> None:
    add_model(page, "damaged")
    weights = appliance.model_dir / "damaged" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    page.goto("/runs/new")
    page.get_by_label("Dataset", exact=True).select_option(label="dialogs")
    fill_run(page, name="doomed run", model="damaged", steps=2)
    page.get_by_role("button", name="Put into the queue").click()
    alert = page.get_by_role("alert").filter(has_text="This run failed")
    expect(alert).to_be_visible(timeout=WORK_MILLISECONDS)
    expect(alert).to_contain_text("model.safetensors")
    page.goto("/runs?show=failed")
    expect(page.get_by_role("link", name="doomed run")).to_be_visible()
