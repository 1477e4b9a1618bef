"""Pages: the Jinja2 environment and the filters with which pages print bytes, times and foreign text.

Everything printed is escaped. Names and rows come from users, so characters that would reorder or hide text are shown as visible
escapes (`visible`), and the templates put such text into elements with `dir="auto"`.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from fastapi import Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from lohan.units import format_bytes, format_count, format_duration
from lohan_app import __version__
from lohan_app.auth.schemas import Identity
from lohan_app.errors import Problem

MISSING = "\N{EN DASH}"
"""Stands where there is no number."""
THEME_COOKIE = "lohan_theme"
THEMES = ("light", "dark")
# Controls other than tab and newline, the marks that reorder text, and the invisible spaces. The joiners U+200C and U+200D stay:
# Persian, Indic scripts and emoji need them.
_INVISIBLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u202a-\u202e\u2060\u2066-\u2069\ufeff]")


def web_folder() -> Path:
    """Where templates and static files lie: beside the package in a wheel, in the checkout when installed in editable mode."""
    return Path(str(resources.files("lohan_app") / "web"))


@lru_cache(maxsize=64)
def static_url(name: str) -> str:
    """The address of a static file with a digest of its content, so that browsers may keep it until it changes."""
    digest = hashlib.sha256((web_folder() / "static" / name).read_bytes()).hexdigest()[:12]
    return f"/static/{name}?v={digest}"


def visible(text: object) -> str:
    """`text` with characters that hide or reorder others replaced by escapes a reader can see, e.g. `\\u202e`."""
    return _INVISIBLE.sub(lambda match: f"\\u{ord(match.group()):04x}", str(text))


def format_number(value: float | None, digits: int = 4) -> str:
    """A measured number with `digits` decimals; one that is missing or not finite prints as a dash."""
    if value is None or not math.isfinite(value):
        return MISSING
    return f"{value:,.{digits}f}"


def format_integer(value: int | None) -> str:
    """A count with thousands separated."""
    return MISSING if value is None else f"{value:,}"


def format_rate(value: float) -> str:
    """A learning rate as people write it: `2e-5`, `0.001`."""
    shortest = f"{value:g}"
    return re.sub(r"e([+-])0*(\d)", lambda match: f"e{'-' if match[1] == '-' else ''}{match[2]}", shortest)


def format_percent(fraction: float | None) -> str:
    return MISSING if fraction is None else f"{100 * fraction:.0f} %"


def format_seconds(seconds: float | None) -> str:
    """A time as precise as a forecast or a measurement is: `1.23 ms`, `0.97 s`, `3 min 05 s`."""
    if seconds is None:
        return MISSING
    if seconds >= 100:
        return format_duration(seconds)
    return f"{seconds:.3g} s" if seconds >= 0.1 else f"{1000 * seconds:.3g} ms"


def format_time(moment: datetime) -> str:
    """A time in UTC; app.js turns the element it stands in into the reader's own zone."""
    return moment.astimezone(UTC).strftime("%-d %b %Y, %H:%M UTC")


def from_unix(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


@lru_cache(maxsize=1)
def environment() -> Environment:
    """The one environment; a variable a template names but a page did not pass is an error, not an empty string."""
    made = Environment(
        loader=FileSystemLoader(web_folder() / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(
        bytes=format_bytes,
        count=format_count,
        duration=format_duration,
        seconds=format_seconds,
        number=format_number,
        integer=format_integer,
        rate=format_rate,
        percent=format_percent,
        time=format_time,
        from_unix=from_unix,
        visible=visible,
    )
    made.globals.update(static_url=static_url, version=__version__)
    return made


def theme_of(request: Request) -> str:
    """The theme the reader chose, or an empty string where the system's preference decides."""
    chosen = request.cookies.get(THEME_COOKIE, "")
    return chosen if chosen in THEMES else ""


def render(
    request: Request, template: str, context: Mapping[str, Any], *, viewer: Identity | None = None, status_code: int = 200
) -> HTMLResponse:
    """Render a page or a `_partial`. Besides `context` every template sees `path` and `theme`; with login `viewer` and `csrf_token`."""
    shared: dict[str, Any] = {"path": request.url.path, "theme": theme_of(request)}
    if viewer is not None:
        shared |= {"viewer": viewer, "csrf_token": viewer.csrf_token or ""}
    page = environment().get_template(template).render(**shared, **context)
    return HTMLResponse(page, status_code=status_code, headers={"Cache-Control": "no-store"})


def render_error_page(request: Request, problem: Problem) -> HTMLResponse:
    """The page that shows an error which no other page shows in its own place."""
    return render(request, "errors/error.html", {"problem": problem}, status_code=problem.status)
