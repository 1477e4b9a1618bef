"""The chat on the page of a run with a model: asking, waiting, an answer that grows, going on, and what can go wrong."""

from __future__ import annotations

import pytest
from fixtures.tiny_model import make_tiny_model
from playwright.sync_api import Page, expect
from sqlalchemy import select, update

from lohan.events import EventType
from lohan_app.db import read_transaction, write_transaction
from lohan_app.entities import Run, RunKind, RunState
from lohan_app.entities.base import now
from tests.e2e import arrange
from tests.e2e.conftest import DESKTOP, PHONE, Opener
from tests.e2e.server import Site, Visitor
from tests.e2e.test_every_page import overflow

pytestmark = pytest.mark.browser


def move(site: Site, run_id: str, **values: object) -> None:
    with write_transaction(site.engine) as session:
        session.execute(update(Run).where(Run.id == run_id).values(**values))


def run_with_model(site: Site, visitor: Visitor) -> Run:
    run = arrange.add_run(site, visitor, state=RunState.SUCCEEDED, step=40, total_steps=40, finished_at=now(), name="support bot")
    make_tiny_model(site.settings.run_folder(run.id) / "export")
    return run


def ask(page: Page, words: str) -> None:
    page.locator("#chat-message").fill(words)
    page.get_by_role("button", name="Send").click()


def newest_chat(site: Site, run: Run) -> Run:
    with read_transaction(site.engine) as session:
        found = session.scalars(select(Run).where(Run.parent_id == run.id, Run.kind == RunKind.CHAT).order_by(Run.id.desc())).first()
    assert found is not None
    return found


def begin(site: Site, chat: Run) -> arrange.Trainer:
    move(site, chat.id, state=RunState.RUNNING, epoch=1, attempt=1, devices=["cpu:0"])
    trainer = arrange.Trainer(site, chat)
    trainer.event(EventType.STARTED, device="cpu", total_steps=0, resumed_step=0)
    trainer.event(EventType.PHASE, phase="loading_model", progress=0.5, detail="Loading the model.")
    return trainer


@pytest.mark.parametrize(("size", "theme"), [pytest.param(DESKTOP, "light", id="desktop"), pytest.param(PHONE, "dark", id="phone")])
def test_a_model_is_asked_answers_and_is_asked_on(
    site: Site, visitor: Visitor, open_page: Opener, size: dict[str, int], theme: str
) -> None:
    run = run_with_model(site, visitor)
    page = open_page(site, f"/runs/{run.id}", visitor, size=size, theme=theme)
    panel = page.locator("#chat")
    expect(panel.get_by_text("Each answer is a run of its own")).to_be_visible()
    ask(page, f"Who are you? {arrange.HOSTILE}")
    expect(panel.get_by_text("in the queue.")).to_be_visible()
    expect(panel.get_by_text("Who are you? <img src=x onerror=alert(1)>")).to_be_visible()
    chat = newest_chat(site, run)
    trainer = begin(site, chat)
    expect(panel.get_by_text("Loading the model on cpu:0")).to_be_visible()
    trainer.event(EventType.PHASE, phase="answering", progress=0.0, detail="Answering.")
    trainer.event(EventType.ANSWER_PART, text="I am ", tokens=2, progress=0.1)
    expect(panel.locator("[data-answer]")).to_have_text("I am ")
    trainer.event(EventType.ANSWER_PART, text=f"a bot. {arrange.HOSTILE}", tokens=9, progress=0.5)
    expect(panel.locator("[data-answer]")).to_have_text(f"I am a bot. {arrange.HOSTILE_SHOWN}")
    assert overflow(page) == 0
    own = open_page(site, f"/runs/{chat.id}", visitor)
    expect(own.locator("[data-answer]")).to_have_text(f"I am a bot. {arrange.HOSTILE_SHOWN}")
    trainer.event(
        EventType.ANSWER,
        text=f"I am a bot. {arrange.HOSTILE}",
        finish_reason="end_of_text",
        prompt_tokens=30,
        answer_tokens=12,
        tokens_per_second=8.0,
    )
    move(site, chat.id, state=RunState.SUCCEEDED, finished_at=now(), devices=[])
    expect(panel.get_by_text("30 tokens read, 12 written, 8.0 tokens/s, the model ended it")).to_be_visible()
    expect(own.get_by_text("the model ended it").first).to_be_visible()
    expect(panel.get_by_label("Go on")).to_be_focused()
    assert page.locator("img").count() == 0

    # The conversation goes with the next question, which is cancelled while it waits.
    panel.get_by_label("Go on").fill("And what do you do?")
    page.keyboard.press("Control+Enter")
    expect(panel.locator(".bubble")).to_have_count(3)
    assert [message["role"] for message in newest_chat(site, run).settings["chat"]["messages"]] == ["user", "assistant", "user"]
    panel.get_by_role("button", name="Cancel").click()
    expect(panel.get_by_role("button", name="Ask again")).to_be_visible()
    expect(panel.get_by_text("It goes on from the last answer")).to_be_visible()
    assert panel.locator("input[name=follows]").input_value() == chat.id
    # What fails says why; what is out of bounds is said beside its field, and what was written stays.
    panel.get_by_role("link", name="New chat").click()
    ask(page, "Another question")
    expect(panel.get_by_text("Waiting in the queue")).to_be_visible()
    failed = {"message": "GPU memory ran out", "place": "GPU memory", "remedy": "Ask for fewer tokens.", "cause": "gpu_memory"}
    move(site, newest_chat(site, run).id, state=RunState.FAILED, finished_at=now(), problem=failed)
    expect(panel.get_by_text("This run failed: GPU memory ran out")).to_be_visible()
    page.get_by_text("How it answers").click()
    page.get_by_label("Temperature").evaluate("field => { field.max = 99 }")  # or the browser would not send it
    page.get_by_label("Temperature").fill("9")
    ask(page, "Once more")
    expect(panel.get_by_text("less than or equal to 2")).to_be_visible()
    expect(page.locator("#chat-message")).to_have_value("Once more")
    assert overflow(page) == 0
    page.get_by_role("link", name="Who are you?").first.click()
    expect(panel.get_by_text("Who are you?").first).to_be_visible()
