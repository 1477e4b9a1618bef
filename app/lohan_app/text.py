"""Names that people give things: cleaned for display, capped, never used as a path."""

from __future__ import annotations

import unicodedata

NAME_LIMIT_BYTES = 255


def display_name(raw: str) -> str:
    """`raw` in NFC without characters that cannot be seen (control, bidirectional override, zero width, lone surrogate), at most 255
    bytes of UTF-8.

    Raises:
        ValueError: nothing is left.
    """
    kept = "".join(" " if character in "\t\n\r" else character for character in raw if character in "\t\n\r" or _is_visible(character))
    name = " ".join(unicodedata.normalize("NFC", kept).split())
    name = name.encode()[:NAME_LIMIT_BYTES].decode(errors="ignore").strip()
    if not name:
        raise ValueError("the name has no visible character")
    return name


def _is_visible(character: str) -> bool:
    # Cc control, Cf format (bidirectional marks, zero-width joiners), Cs surrogate, Co private use, Cn unassigned, Zl/Zp separators.
    category = unicodedata.category(character)
    return category[0] != "C" and category not in ("Zl", "Zp")
