"""The chat on a run's page: what it shows of a conversation, and the form of the next question, read and filled."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from lohan.data.conversation import MAX_NEW_TOKENS, Conversation, Role
from lohan.errors import LohanError
from lohan.events import Phase
from lohan_app.entities import TERMINAL_STATES, RunState
from lohan_app.forms import FormError, read_form, without_blanks
from lohan_app.runs import presentation
from lohan_app.runs.chats import CHAT, Talk
from lohan_app.runs.run_form import whole_number
from lohan_app.runs.schemas import ChatRequest, RunDetail

SETTINGS = ("max_new_tokens", "temperature", "top_p", "seed")
NEW = "new"
"""In place of a chat's id: none, the next question begins another conversation."""
EXCERPT_CHARACTERS = 80


def read_chat_request(form: Mapping[str, str]) -> ChatRequest:
    """Raises FormError."""
    filled = without_blanks(form)
    values: dict[str, Any] = {name: filled[name] for name in ("temperature", "top_p") if name in filled}
    values |= {name: whole_number(filled[name]) for name in ("max_new_tokens", "seed") if name in filled}
    values["messages"] = [{"role": Role.USER, "content": _lines(form.get("message", ""))}]
    return read_form(ChatRequest, values | {"follows": filled.get("follows")})


def _lines(message: str) -> str:
    """Browsers send line ends as CR LF, whatever was typed."""
    return message.replace("\r\n", "\n").strip()


def panel_fields(
    run: RunDetail,
    shown: RunDetail | None,
    talks: Sequence[Talk],
    *,
    form: Mapping[str, str] | None = None,
    problem: LohanError | None = None,
) -> dict[str, Any]:
    """What the chat on the page of `run` shows.

    Args:
        shown: the chat whose conversation it is; None where another one begins.
        form: as it was sent, to be shown again with `problem`, why it was refused.
    """
    faults = problem.faults if isinstance(problem, FormError) else {}
    faults = {"message" if name == "content" else name: text for name, text in faults.items()}
    has_place = bool(faults) and faults.keys() <= {"message", *SETTINGS}
    return {
        "asked": run,
        "talk": talk_fields(shown),
        "others": [(talk, _excerpt(talk.first_words)) for talk in talks if shown is None or talk.id != shown.id],
        "values": _values(shown, form or {}),
        "faults": defaultdict(str, faults),
        "most_tokens": MAX_NEW_TOKENS,
        "chat_problem": None if has_place else problem,
        "opens_settings": any(name in SETTINGS for name in faults),
    }


def talk_fields(chat: RunDetail | None) -> dict[str, Any] | None:
    """A conversation with its last answer, as far as that has come; None of none."""
    if chat is None:
        return None
    # Until it answers, what there is of an answer is of an attempt that was lost.
    is_said = chat.state in TERMINAL_STATES or chat.phase == Phase.ANSWERING
    answer = chat.answer.model_dump() if chat.answer is not None and is_said else {}
    asked = chat.settings.get(CHAT, {})
    can_follow = chat.state is RunState.SUCCEEDED and bool(answer.get("text"))
    return {
        "chat": chat,
        "messages": asked.get("messages", []),
        "text": answer.get("text", ""),
        "note": presentation.answer_note(answer) or ("cancelled" if chat.state is RunState.CANCELLED else ""),
        "is_over": chat.state in TERMINAL_STATES,
        "can_follow": can_follow,
        "follows": chat.id if can_follow else asked.get("follows"),  # the last that was answered
        "failure_title": presentation.failure_title(chat),
        "phase": presentation.PHASE_NAMES.get(chat.phase, "Starting"),  # type: ignore[call-overload]
    }


def _values(shown: RunDetail | None, form: Mapping[str, str]) -> dict[str, Any]:
    """The settings of the conversation so far, else their defaults; whatever was sent goes before."""
    before: Mapping[str, Any] = shown.settings.get(CHAT, {}) if shown is not None else {}
    fields = Conversation.model_fields
    values = {name: before.get(name, fields[name].default) for name in SETTINGS}
    return {"message": ""} | {name: "" if value is None else value for name, value in values.items()} | dict(form)


def _excerpt(words: str) -> str:
    line = " ".join(words.split())
    return line if len(line) <= EXCERPT_CHARACTERS else f"{line[:EXCERPT_CHARACTERS]}…"
