"""A conversation that a model is to answer, and how: what `lohan chat` reads and the service takes, with their bounds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, field_validator, model_validator

from lohan.errors import ConfigError

MAX_MESSAGES = 200
MAX_CONVERSATION_BYTES = 256 * 1024
"""Of all contents together, as UTF-8: more than the context of most models."""
MAX_NEW_TOKENS = 8192


class Role(StrEnum):
    """Who says something."""

    SYSTEM = "system"
    """Sets the scene; the first message only."""
    USER = "user"
    ASSISTANT = "assistant"


class Message(BaseModel):
    """One turn."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: Role
    content: Annotated[str, Field(min_length=1)]

    @field_validator("content")
    @classmethod
    def _storable(cls, value: str) -> str:
        # As in training rows: tokenizers and PostgreSQL reject both.
        if "\0" in value:
            raise ValueError("holds a NUL character: leave it out")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"holds half of a surrogate pair at character {error.start}: leave it out") from error
        return value


class Conversation(BaseModel):
    """Messages that end with a user's, and how they are to be answered."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    messages: Annotated[tuple[Message, ...], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_new_tokens: Annotated[int, Field(ge=1, le=MAX_NEW_TOKENS, strict=True)] = 512
    """Tokens of the answer at most; fewer where the model's context has no room for so many."""
    temperature: Annotated[FiniteFloat, Field(ge=0, le=2)] = 0.7
    """0 takes the likeliest token each time."""
    top_p: Annotated[FiniteFloat, Field(gt=0, le=1)] = 0.9
    """Only the likeliest tokens whose probabilities add up to this are drawn from; 1 draws from all."""
    seed: Annotated[int, Field(ge=0, lt=2**32, strict=True)] | None = None
    """The same seed and settings give the same answer on the same device and software; by default another one each time."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        size = sum(len(message.content.encode()) for message in self.messages)
        if size > MAX_CONVERSATION_BYTES:
            raise ValueError(f"messages: {size} bytes, at most {MAX_CONVERSATION_BYTES} are allowed: leave out the earliest")
        for index, message in enumerate(self.messages):
            if message.role is Role.SYSTEM and index > 0:
                raise ValueError(f"messages.{index}: a system message must be the first")
        if self.messages[-1].role is not Role.USER:
            raise ValueError(f"messages: the last is of the {self.messages[-1].role}, and must be a user's: it is what is answered")
        return self

    @property
    def size_bytes(self) -> int:
        """Of all contents, as UTF-8."""
        return sum(len(message.content.encode()) for message in self.messages)

    @property
    def plain_messages(self) -> list[dict[str, str]]:
        """As templates take them."""
        return [{"role": str(message.role), "content": message.content} for message in self.messages]


def parse_conversation(text: str, *, place: str, overrides: Mapping[str, Any] | None = None) -> Conversation:
    """Read a conversation: a JSON list of messages, a JSON object with the fields of `Conversation`, or plain text, which is one user's
    message.

    Args:
        place: where it comes from, for messages.
        overrides: fields that count instead of what the text says.

    Raises:
        ConfigError: it is neither, or has a field or value that is not allowed. No content is in the message.
    """
    begin = text.lstrip()[:1]
    values: Any = {"messages": [{"role": "user", "content": text.strip()}]}
    if begin in ("[", "{"):
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"not valid JSON: {error}", place=place, remedy="Correct it, or give plain text.") from error
        values = {"messages": values} if begin == "[" else values
    try:
        return Conversation.model_validate({**values, **(overrides or {})})
    except ValidationError as error:
        faults = "; ".join(_describe(fault["loc"], fault["msg"]) for fault in error.errors())
        raise ConfigError(faults, place=place, remedy="Correct the fields named above.") from None


def _describe(place: tuple[int | str, ...], message: str) -> str:
    """Faults of the whole conversation name their place themselves."""
    words = message.removeprefix("Value error, ")
    return f"{'.'.join(map(str, place))}: {words}" if place else words
