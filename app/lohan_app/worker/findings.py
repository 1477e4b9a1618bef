"""What `lohan doctor` says: one finding for each thing that was looked at."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    OK = "ok"
    NOTE = "note"
    """Works, and somebody may want to know."""
    MISSING = "missing"
    """Needed, and not there or not right."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    subject: str
    status: Status
    text: str
    remedy: str | None = None
