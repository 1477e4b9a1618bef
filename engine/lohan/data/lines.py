"""Lines and strict JSON of a foreign text file: bounded memory, true line numbers, every fault a sentence.

Lines end with LF, CRLF or CR; U+2028, U+2029 and U+0085 are text. A byte order mark is dropped; other encodings than UTF-8 are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from lohan.errors import DataError

MAX_LINE_BYTES = 16 * 1024 * 1024
"""Longest line that is parsed; a longer one is skipped without being held."""

_READ_BYTES = 256 * 1024
_EXCERPT_CHARACTERS = 160
_LINE_END = re.compile(rb"\r\n|\n|\r")
# Characters that a page or terminal would act on instead of showing: controls, zero-width ones, bidirectional overrides, surrogates.
_UNSHOWABLE = re.compile("[\\x00-\\x1f\\x7f-\\x9f\\u200b-\\u200f\\u2028-\\u202e\\u2066-\\u2069\\ufeff\\ud800-\\udfff]")
_WRONG_ENCODINGS = ((b"\xff\xfe\x00\x00", "UTF-32"), (b"\x00\x00\xfe\xff", "UTF-32"), (b"\xff\xfe", "UTF-16"), (b"\xfe\xff", "UTF-16"))


class RowFaultError(Exception):
    """Why a row cannot be used, as the sentence its `RowError` carries."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the file."""

    number: int
    """1-based."""
    offset_bytes: int
    content: bytes | None
    """Without the line's end; None where it is longer than `MAX_LINE_BYTES`."""


def showable(text: str) -> str:
    """`text` with controls, bidirectional overrides and surrogates written as `\\uXXXX`."""
    return _UNSHOWABLE.sub(lambda match: f"\\u{ord(match.group()):04x}", text)


def excerpt(text: str) -> str:
    """The beginning of `text`, showable."""
    return showable(text[:_EXCERPT_CHARACTERS]) + ("…" if len(text) > _EXCERPT_CHARACTERS else "")


def skip_byte_order_mark(file: BinaryIO, *, place: str) -> bool:
    """Move `file` to its first character; returns whether a byte order mark was skipped.

    Raises:
        DataError: the file begins like UTF-16, UTF-32 or a compressed file.
    """
    head = file.read(8)
    name = next((name for mark, name in _WRONG_ENCODINGS if head.startswith(mark)), None)
    # Text in UTF-16 without a mark has a zero byte beside each ASCII character: `{` is 7B 00.
    if name is None and len(head) >= 2 and head[:2].count(0) == 1:
        name = "UTF-16"
    if name is not None:
        raise DataError(f"the file is {name} text, expected UTF-8", place=place, remedy="Save it as UTF-8.")
    if head.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PK\x03\x04")):
        raise DataError("the file is compressed, expected JSONL text", place=place, remedy="Decompress it first.")
    byte_order_mark = head.startswith(b"\xef\xbb\xbf")
    file.seek(3 if byte_order_mark else 0)
    return byte_order_mark


def iterate_lines(file: BinaryIO) -> Iterator[Line]:
    """Yield the lines from the file's position on, holding at most one of them."""
    number, block_start = 1, file.tell()
    line_start, pending, too_long, after_carriage_return = block_start, bytearray(), False, False
    while block := file.read(_READ_BYTES):
        position = 0
        if after_carriage_return and block.startswith(b"\n"):  # the second half of a CRLF that the last block cut
            position, line_start = 1, block_start + 1
        after_carriage_return = block.endswith(b"\r")
        for end in _LINE_END.finditer(block, position):
            pending += block[position : end.start()]
            yield Line(number, line_start, None if too_long or len(pending) > MAX_LINE_BYTES else bytes(pending))
            pending.clear()
            number, too_long, position, line_start = number + 1, False, end.end(), block_start + end.end()
        pending += block[position:]
        block_start += len(block)
        if len(pending) > MAX_LINE_BYTES:
            too_long = True
            pending.clear()
    if pending or too_long:
        yield Line(number, line_start, None if too_long else bytes(pending))


def decode(line: Line) -> str:
    """The line's text.

    Raises:
        RowFaultError: the line is too long, or not UTF-8 (with the byte and its offset in the file).
    """
    if line.content is None:
        raise RowFaultError(f"the line is longer than {MAX_LINE_BYTES // 1024**2} MiB")
    try:
        return line.content.decode("utf-8")
    except UnicodeDecodeError as error:
        at = line.offset_bytes + error.start
        raise RowFaultError(f"not UTF-8: byte 0x{line.content[error.start]:02x} at file offset {at}; save the file as UTF-8") from error


def line_excerpt(line: Line) -> str:
    """The line's beginning, showable even where it is not UTF-8."""
    return excerpt((line.content or b"")[: 4 * _EXCERPT_CHARACTERS].decode("utf-8", "backslashreplace"))


def parse_object(text: str) -> tuple[dict[str, Any], list[str]]:
    """Parse one line strictly; returns the object and warnings about duplicate keys.

    Raises:
        RowFaultError: not JSON, not one object, NaN or Infinity, nesting or a number beyond what Python takes.
    """
    warnings: list[str] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(items)
        if len(value) < len(items):
            keys = [key for key, _ in items]
            doubled = sorted({key for key in keys if keys.count(key) > 1}) if len(keys) < 1000 else ["…"]
            warnings.append(f"duplicate key {', '.join(repr(key) for key in doubled)}: the last value was taken")
        return value

    def refuse_constant(name: str) -> float:
        raise RowFaultError(f"{name} is not JSON; write null or leave the key out")

    try:
        value = json.loads(text, object_pairs_hook=pairs, parse_constant=refuse_constant)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            raise RowFaultError(
                f"more than one value on the line: the second begins at column {error.colno}; write one object a line"
            ) from error
        raise RowFaultError(f"not valid JSON: {error.msg} at column {error.colno}") from error
    except RecursionError as error:
        raise RowFaultError("not usable JSON: brackets are nested too deeply") from error
    except ValueError as error:  # Python refuses integers of more than 4300 digits
        raise RowFaultError("not usable JSON: a number has too many digits") from error
    if not isinstance(value, dict):
        raise RowFaultError(f"a row must be a JSON object, found {type_name(value)}")
    return value, warnings


def type_name(value: Any) -> str:
    """What a JSON value is, in words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    names: tuple[tuple[type | tuple[type, ...], str], ...] = (
        (str, "text"),
        ((int, float), "a number"),
        (list, "an array"),
        (dict, "an object"),
    )
    return next(name for kind, name in names if isinstance(value, kind))
