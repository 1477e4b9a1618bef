"""Reads training rows from JSONL: OpenAI messages, Alpaca, or prompt/completion, one format a file.

The reader is strict and total: a line that cannot be used becomes a `RowError` with its true line number, and no content of a line raises.
Only a file that holds no UTF-8 lines of JSON at all raises `DataError`. At most one line is in memory, and no longer than `MAX_LINE_BYTES`.

Rules, all decided here and stated in each message:
- Lines end with LF, CRLF or CR; U+2028, U+2029 and U+0085 are text. Blank lines are skipped and counted in the numbering.
- A byte order mark before the first line is dropped, with a warning. Other encodings than UTF-8 are refused, never replaced.
- Columns that a format does not name are ignored. A duplicate key keeps its last value, with a warning.
- Text may not hold NUL or lone surrogates: tokenizers and PostgreSQL reject them.
- A message's content is text, or a list of `{"type": "text", "text": …}` parts, which are joined. Only a system message may be empty.
- The role `developer` counts as `system`; a system message must be the first.
- An assistant message with `"weight": 0` is shown to the model but not trained on.
- Tool calls and tool messages are row errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import Any

from lohan.data.lines import (
    Line,
    RowFaultError,
    decode,
    excerpt,
    iterate_lines,
    line_excerpt,
    parse_object,
    showable,
    skip_byte_order_mark,
    type_name,
)
from lohan.errors import DataError

_BYTE_ORDER_MARK_DROPPED = "a byte order mark before the first line was dropped"
_ROLES = ("system", "user", "assistant")


class RowFormat(StrEnum):
    """How a row spells its conversation."""

    MESSAGES = "messages"
    """`{"messages": [{"role", "content"}, …]}`"""
    ALPACA = "alpaca"
    """`{"instruction", "output"}`, optionally `input`, `system` and `history` (`[[user, assistant], …]`)"""
    PROMPT_COMPLETION = "prompt_completion"
    """`{"prompt", "completion"}`"""


@dataclass(frozen=True, slots=True)
class Row:
    """One usable row, as a conversation. A message is `{"role", "content"}`, and `"weight": 0` on an assistant turn not to train on."""

    line: int
    """1-based."""
    messages: list[dict[str, Any]]
    format: RowFormat = RowFormat.MESSAGES
    warnings: tuple[str, ...] = ()
    """What was dropped or chosen while reading it; the row can be used all the same."""


@dataclass(frozen=True, slots=True)
class RowError:
    """One row that cannot be used, and why."""

    line: int
    message: str
    excerpt: str = ""
    """The line's beginning, with everything a terminal or page would interpret written as an escape."""


def iterate_rows(path: Path) -> Iterator[Row | RowError]:
    """Yield every non-blank line of `path` as a row, or as the reason why it is none.

    Raises:
        DataError: the file is missing, empty, in another encoding, compressed, or one JSON array instead of lines.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", place=path.name, remedy="Name an existing JSONL file.") from error
    with file:
        file_warnings = (_BYTE_ORDER_MARK_DROPPED,) if skip_byte_order_mark(file, place=path.name) else ()
        lines = (line for line in iterate_lines(file) if line.content is None or line.content.strip())
        first_line = next(lines, None)
        if first_line is None:
            raise DataError("the file has no rows", place=path.name, remedy="Write one JSON object a line.")
        if (first_line.content or b"").lstrip().startswith(b"["):
            raise DataError(
                "the file is a JSON array, expected one JSON object a line",
                place=f"{path.name}:{first_line.number}",
                remedy="Write each element of the array on a line of its own, without the brackets and the commas between them.",
            )
        file_format: tuple[RowFormat, int] | None = None
        for line in chain((first_line,), lines):
            row = _read_line(line, file_format)
            if isinstance(row, Row):
                file_format = file_format or (row.format, row.line)
                row = replace(row, warnings=(*file_warnings, *row.warnings))
                file_warnings = ()
            yield row


def detect_format(value: dict[str, Any]) -> RowFormat | None:
    """The format whose required columns `value` has; where several fit, messages wins over Alpaca over prompt/completion."""
    if "messages" in value:
        return RowFormat.MESSAGES
    if "instruction" in value and "output" in value:
        return RowFormat.ALPACA
    if "prompt" in value and "completion" in value:
        return RowFormat.PROMPT_COMPLETION
    return None


def _read_line(line: Line, file_format: tuple[RowFormat, int] | None) -> Row | RowError:
    try:
        value, warnings = parse_object(decode(line))
        row_format = detect_format(value)
        if row_format is None:
            raise RowFaultError(_missing_columns(value))
        if file_format is not None and row_format is not file_format[0]:
            raise RowFaultError(
                f"the row's format is {row_format}, but the file's is {file_format[0]} (line {file_format[1]}); use one format a file"
            )
        return Row(line.number, _READERS[row_format](value), row_format, tuple(showable(warning) for warning in warnings))
    except RowFaultError as fault:
        return RowError(line.number, showable(str(fault)), line_excerpt(line))


def _missing_columns(value: dict[str, Any]) -> str:
    known = {"messages", "instruction", "input", "output", "prompt", "completion"}
    respelled = [key for key in value if key not in known and key.strip().lower() in known]
    found = ", ".join(repr(key[:40]) for key in list(value)[:8]) or "none"
    hint = f"; write {respelled[0]!r} as {respelled[0].strip().lower()!r}" if respelled else ""
    preference = "; preference rows (chosen/rejected) cannot be trained on" if "chosen" in value and "rejected" in value else ""
    return f'expected "messages", or "instruction" and "output", or "prompt" and "completion"; found {found}{hint}{preference}'


def _text(value: Any, field: str) -> str:
    """`value` if it is text that can be stored and tokenised."""
    if not isinstance(value, str):
        hint = " (several answers a row is a preference format, which cannot be trained on)" if isinstance(value, list) else ""
        raise RowFaultError(f"{field} must be text, found {type_name(value)}{hint}")
    if "\x00" in value:
        raise RowFaultError(f"{field} contains a NUL character (\\u0000); remove it")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RowFaultError(
            f"{field} contains half of a surrogate pair (\\u{ord(value[error.start]):04x}); write the whole character"
        ) from error
    return value


def _required_text(value: Any, field: str) -> str:
    text = _text(value, field)
    if not text.strip():
        raise RowFaultError(f"{field} is empty")
    return text


def _read_messages(value: dict[str, Any]) -> list[dict[str, Any]]:
    messages = value["messages"]
    if not isinstance(messages, list):
        raise RowFaultError(f"messages must be an array, found {type_name(messages)}")
    for key in ("tools", "functions"):
        if value.get(key):
            raise RowFaultError(f'the row has "{key}": tool calls cannot be trained on; remove the key or the row')
    read = [_read_message(message, index) for index, message in enumerate(messages)]
    if any(message["role"] == "system" for message in read[1:]):
        raise RowFaultError("a system message must be the first, and the only one")
    if not any(message["role"] == "assistant" and message.get("weight", 1) for message in read):
        raise RowFaultError("no assistant message to train on")
    return read


def _read_message(message: Any, index: int) -> dict[str, Any]:
    place = f"messages[{index}]"
    if not isinstance(message, dict):
        raise RowFaultError(f"{place} must be an object, found {type_name(message)}")
    if message.get("tool_calls") or message.get("function_call"):
        raise RowFaultError(f"{place} calls a tool: tool calls cannot be trained on; remove the row")
    role = message.get("role")
    role = "system" if role == "developer" else role
    if role not in _ROLES:
        shown = repr(role[:40]) if isinstance(role, str) else type_name(role)
        raise RowFaultError(f"{place}.role must be system, user or assistant, found {shown}")
    content = _content(message.get("content"), f"{place}.content")
    if role != "system" and not content.strip():
        raise RowFaultError(f"{place}.content is empty; only a system message may be")
    read: dict[str, Any] = {"role": role, "content": content}
    weight = message.get("weight")
    if weight is not None and role == "assistant":
        if isinstance(weight, bool) or weight not in (0, 1):
            shown = str(weight) if isinstance(weight, int | float) and math.isfinite(weight) else type_name(weight)
            raise RowFaultError(f"{place}.weight must be 0 or 1, found {excerpt(shown)}")
        if weight == 0:
            read["weight"] = 0
    return read


def _content(content: Any, field: str) -> str:
    if not isinstance(content, list):
        return _text(content, field)
    parts = []
    for index, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else None
            shown = repr(kind[:40]) if isinstance(kind, str) else type_name(part)
            raise RowFaultError(f'{field}[{index}] must be {{"type": "text", "text": …}}, found {shown}')
        parts.append(_text(part.get("text"), f"{field}[{index}].text"))
    return "".join(parts)


def _read_alpaca(value: dict[str, Any]) -> list[dict[str, Any]]:
    instruction, output = _required_text(value["instruction"], "instruction"), _required_text(value["output"], "output")
    extra = _text(value["input"], "input") if value.get("input") is not None else ""
    system = _text(value["system"], "system") if value.get("system") is not None else ""
    history = value.get("history") or []
    if not isinstance(history, list):
        raise RowFaultError(f"history must be an array of [user, assistant] pairs, found {type_name(history)}")
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system.strip() else []
    for index, pair in enumerate(history):
        if not isinstance(pair, list) or len(pair) != 2:
            raise RowFaultError(f"history[{index}] must be a [user, assistant] pair, found {type_name(pair)}")
        messages.append({"role": "user", "content": _required_text(pair[0], f"history[{index}][0]")})
        messages.append({"role": "assistant", "content": _required_text(pair[1], f"history[{index}][1]")})
    messages.append({"role": "user", "content": f"{instruction}\n{extra}" if extra.strip() else instruction})
    messages.append({"role": "assistant", "content": output})
    return messages


def _read_prompt_completion(value: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": _required_text(value["prompt"], "prompt")},
        {"role": "assistant", "content": _required_text(value["completion"], "completion")},
    ]


_READERS: dict[RowFormat, Callable[[dict[str, Any]], list[dict[str, Any]]]] = {
    RowFormat.MESSAGES: _read_messages,
    RowFormat.ALPACA: _read_alpaca,
    RowFormat.PROMPT_COMPLETION: _read_prompt_completion,
}
