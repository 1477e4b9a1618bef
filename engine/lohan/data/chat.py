"""Renders conversations with a model's own chat template, and finds the spans of the text that are trained.

Trained are the assistant's turns, from behind the generation prompt to the end of the turn. The spans are found by rendering growing
prefixes of the conversation: for an assistant's message i, the text of the messages before it with the generation prompt, and the text of
the messages up to it, must both be beginnings of the whole text. A template that rewrites earlier turns breaks this rule and is refused,
because what would be trained is not what would be generated.

Templates come with models from anywhere: they run in Jinja's immutable sandbox, with the names transformers gives them, and with
a cap on their output. Their running time is bounded by whoever calls (the service parses in a child with a CPU limit).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from jinja2.exceptions import SecurityError

from lohan.errors import DataError, ModelError

MAX_RENDERED_CHARACTERS = 64 * 1024 * 1024
"""Four times the longest row that the reader lets through."""

_REMEDY = "Use rows of one question and one answer, or a model whose template keeps earlier turns as they are."
_PRIVATE_USE_START = 0xF0000


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation as the model reads it. Spans are half-open ranges of characters of `text`."""

    text: str
    trained: tuple[tuple[int, int], ...]
    """Assistant turns that are trained, in order."""
    literal: tuple[tuple[int, int], ...] = ()
    """Spellings of special tokens that stand in a message's content: text, not tokens."""


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: the Jinja text.
        special_tokens: `bos_token`, `eos_token` and so on, as the template may name them.
        place: where it comes from, for messages.

    Raises:
        ModelError: the text is no Jinja template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, place: str) -> None:
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelError(
                f"not a usable chat template: {error}", place=place, remedy="Correct the template in the model's folder."
            ) from error

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> str:
        """The template's text for `messages` (role and content of each).

        Raises:
            DataError: the template refuses the conversation, fails on it, or writes more than `MAX_RENDERED_CHARACTERS`.
        """
        plain = [{"role": message["role"], "content": message["content"]} for message in messages]
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(
                messages=plain, add_generation_prompt=add_generation_prompt, tools=None, documents=None, **self._special_tokens
            ):
                size += len(piece)
                if size > MAX_RENDERED_CHARACTERS:
                    raise DataError("the chat template's text grows past 64 Mi characters", remedy="Use another template.")
                pieces.append(piece)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(
                f"the chat template refuses the conversation: {error}", remedy="Reorder its messages, or leave the row out."
            ) from error
        return "".join(pieces)


def render_chat(template: ChatTemplate, messages: Sequence[Mapping[str, Any]], special_tokens: Sequence[str]) -> RenderedChat:
    """Render a conversation and find its trained and its literal spans.

    Args:
        template: the model's template.
        messages: a `Row`'s messages.
        special_tokens: spellings that are special to the tokenizer; where a message's content holds one, its span is returned as literal.

    Raises:
        DataError: the template refuses the conversation or breaks the prefix rule.
    """
    shielded, spelling_of = _shield([message["content"] for message in messages], special_tokens)
    turns = [{**message, "content": content} for message, content in zip(messages, shielded, strict=True)]
    text = template.render(turns, add_generation_prompt=False)
    trained: list[tuple[int, int]] = []
    for index, message in enumerate(turns):
        if message["role"] != "assistant" or message.get("weight", 1) == 0:
            continue
        start = _prefix_length(template, text, turns[:index], index, add_generation_prompt=True)
        end = _prefix_length(template, text, turns[: index + 1], index, add_generation_prompt=False)
        if end <= start:
            raise DataError(f"the chat template writes nothing for message {index}", remedy=_REMEDY)
        trained.append((start, end))
    return _unshield(text, trained, spelling_of)


def render_prompt(template: ChatTemplate, messages: Sequence[Mapping[str, Any]], special_tokens: Sequence[str]) -> RenderedChat:
    """What the model reads of a conversation that it is to answer: nothing of it is trained.

    Args:
        special_tokens: as of `render_chat`.

    Raises:
        DataError: the template refuses the conversation.
    """
    shielded, spelling_of = _shield([message["content"] for message in messages], special_tokens)
    turns = [{**message, "content": content} for message, content in zip(messages, shielded, strict=True)]
    return _unshield(template.render(turns, add_generation_prompt=True), [], spelling_of)


def render_plain_prompt(messages: Sequence[Mapping[str, Any]], *, end_of_text: str, special_tokens: Sequence[str]) -> RenderedChat:
    """The same for a model without a chat template: contents behind each other, an answer's with the end of text, nothing between.

    That is what a prompt/completion row of such a model is (`render_completion`), and a row behind it.
    """
    shielded, spelling_of = _shield([message["content"] for message in messages], special_tokens)
    endings = [end_of_text if message["role"] == "assistant" else "" for message in messages]
    text = "".join(content + ending for content, ending in zip(shielded, endings, strict=True))
    return _unshield(text, [], spelling_of)


def render_completion(prompt: str, completion: str, *, end_of_text: str, special_tokens: Sequence[str]) -> RenderedChat:
    """The plain form of a prompt/completion row, for a model without a chat template: prompt, completion, end of text, nothing between."""
    (prompt, completion), spelling_of = _shield([prompt, completion], special_tokens)
    text = prompt + completion + end_of_text
    return _unshield(text, [(len(prompt), len(text))], spelling_of)


def _prefix_length(template: ChatTemplate, text: str, messages: list[dict[str, Any]], index: int, *, add_generation_prompt: bool) -> int:
    prefix = template.render(messages, add_generation_prompt=add_generation_prompt)
    if not text.startswith(prefix):
        raise DataError(
            f"the chat template rewrites earlier turns: its text up to message {index} is no beginning of the whole text", remedy=_REMEDY
        )
    return len(prefix)


def _shield(contents: list[str], special_tokens: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Replace special tokens' spellings in contents by single private-use characters that the contents do not use.

    The template can then move and trim contents as it likes, and the spellings are found again behind it.
    """
    spellings = [spelling for spelling in special_tokens if spelling and any(spelling in content for content in contents)]
    if not spellings:
        return contents, {}
    used = set("".join(contents))
    spelling_of: dict[str, str] = {}
    code_point = _PRIVATE_USE_START
    for spelling in sorted(spellings, key=len, reverse=True):
        while chr(code_point) in used:
            code_point += 1
        stand_in = chr(code_point)
        code_point += 1
        spelling_of[stand_in] = spelling
        contents = [content.replace(spelling, stand_in) for content in contents]
    return contents, spelling_of


def _unshield(text: str, trained: list[tuple[int, int]], spelling_of: dict[str, str]) -> RenderedChat:
    if not spelling_of:
        return RenderedChat(text, tuple(trained))
    pieces: list[str] = []
    literal: list[tuple[int, int]] = []
    position_of = [0] * (len(text) + 1)  # where each shielded character's text begins
    length = 0
    for index, character in enumerate(text):
        position_of[index] = length
        piece = spelling_of.get(character, character)
        if character in spelling_of:
            literal.append((length, length + len(piece)))
        length += len(piece)
        pieces.append(piece)
    position_of[len(text)] = length
    return RenderedChat("".join(pieces), tuple((position_of[start], position_of[end]) for start, end in trained), tuple(literal))


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks assistant text for other tools; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _BoundedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, which bounds `range` by itself, with repetition and powers bounded too."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and (abs(left) > 1_000_000 or abs(right) > 64):
            raise SecurityError("a power is too large")
        for sequence, count in ((left, right), (right, left)):
            repeats = operator == "*" and isinstance(sequence, str | list | tuple) and isinstance(count, int)
            if repeats and len(sequence) * count > MAX_RENDERED_CHARACTERS:
                raise SecurityError("a repetition is too long")
        return super().call_binop(context, operator, left, right)


def _environment() -> jinja2.Environment:
    # Whitespace settings, extensions and names are those that transformers gives to chat templates.
    environment = _BoundedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
        autoescape=False,  # the text goes to a tokenizer, not to a page
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)  # noqa: DTZ005 - the model is told the local date
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    known = {key: options[key] for key in ("separators", "sort_keys") if key in options}
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **known)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
