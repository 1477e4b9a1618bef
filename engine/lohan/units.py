"""Bytes and durations, and how they are read and printed: GiB for memory and files, GB/s for bandwidth."""

from __future__ import annotations

import re

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB


_UNITS = {"": 1, "K": KIB, "M": MIB, "G": GIB, "T": 1024 * GIB}


def parse_bytes(text: str) -> int:
    """Read a byte count: a whole number, with K, M, G or T (binary; `KiB` and `KB` mean the same) behind it or not.

    Raises:
        ValueError: the text is no such count.
    """
    found = re.fullmatch(r"\s*([0-9]+)\s*([KMGT]?)(?:I?B)?\s*", text, re.IGNORECASE)
    if found is None:
        raise ValueError(f"{text!r} is no number of bytes")
    return int(found.group(1)) * _UNITS[found.group(2).upper()]


def format_bytes(count: int) -> str:
    """Print a byte count with the largest binary unit that keeps it at one or above, e.g. `1.50 GiB`."""
    for size, name in ((1024 * GIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(count) >= size:
            return f"{count / size:.2f} {name}"
    return f"{count} B"


def format_count(count: int) -> str:
    """Print a number of parameters or tokens, e.g. `134.5 M`."""
    for size, name in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if abs(count) >= size:
            return f"{count / size:.1f} {name}"
    return str(count)


def format_duration(seconds: float | None) -> str:
    """Print a duration as `1 h 02 min`, `3 min 05 s` or `12 s`; an unknown one as `unknown`."""
    if seconds is None:
        return "unknown"
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    minutes, left = divmod(rest, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    if minutes:
        return f"{minutes} min {left:02d} s"
    return f"{left} s"
