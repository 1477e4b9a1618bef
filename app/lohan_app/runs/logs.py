"""The trainer's log as text that a page can show: a stretch of it, without what a terminal would act on."""

from __future__ import annotations

import re
from pathlib import Path

from lohan_app.runs.schemas import LogView

# One reply; the next offset continues it.
STRETCH_BYTES = 256 * 1024
# What a page shows first: the end of the log.
TAIL_BYTES = 64 * 1024
LINE_LIMIT_BYTES = 8 * 1024
CUT_MARK = " … (line cut)"
# Control sequences (CSI), operating-system commands such as window titles and links (OSC), and the other two-character escapes.
_TERMINAL = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[PX^_][^\x1b]*(?:\x1b\\)?|[@-Z\\-_]|[ -/]+[0-~]?)?")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def read_log(path: Path, offset: int | None) -> LogView:
    """The log from byte `offset` on, or its last part; only whole lines, so that no character is cut in two.

    A log that is not there yet is empty. An offset behind the end (the log was started anew) begins again at 0.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return LogView(text="", next_offset=0, size=0)
    with file:
        size = file.seek(0, 2)
        is_tail = offset is None
        start = max(0, size - TAIL_BYTES) if offset is None else offset
        if start > size:
            start = 0
        file.seek(start)
        raw = file.read(STRETCH_BYTES)
    if is_tail and start > 0:
        # Begin at a line's start.
        skipped = raw.find(b"\n") + 1
        raw, start = raw[skipped:], start + skipped
    end = raw.rfind(b"\n") + 1
    # A line longer than a whole stretch is given in pieces; otherwise the unfinished last line waits for its end.
    if end == 0 and len(raw) == STRETCH_BYTES:
        end = len(raw)
    return LogView(text=as_plain_text(raw[:end]), next_offset=start + end, size=size)


def as_plain_text(raw: bytes) -> str:
    """Lines without terminal sequences and controls; of a line that overwrites itself (carriage return) what stayed on the screen."""
    return "".join(f"{_plain_line(line)}\n" for line in raw.removesuffix(b"\n").split(b"\n")) if raw else ""


def _plain_line(raw: bytes) -> str:
    raw = raw.rstrip(b"\r").rpartition(b"\r")[2]
    cut = CUT_MARK if len(raw) > LINE_LIMIT_BYTES else ""
    text = raw[:LINE_LIMIT_BYTES].decode("utf-8", errors="replace")
    return _CONTROLS.sub("", _TERMINAL.sub("", text)) + cut
