"""What the strict content policy and the absence of a CDN ask of templates, scripts and vendored files."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

WEB = Path(__file__).resolve().parent.parent / "web"
TEMPLATES = sorted((WEB / "templates").rglob("*.html"))
SCRIPTS = sorted((WEB / "static").glob("*.js"))


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: str(path.relative_to(WEB / "templates")))
def test_templates_hold_no_inline_script_or_style(template: Path) -> None:
    text = template.read_text(encoding="utf-8")
    assert not re.search(r"<style\b|\sstyle=|\son[a-z]+=|javascript:|hx-on|hx-vals=['\"]js:", text)
    assert not re.search(r"<script(?![^>]*\bsrc=)", text), "scripts come from files"
    assert "|safe" not in text.replace(" ", ""), "what is shown is escaped"


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: str(path.relative_to(WEB / "templates")))
def test_templates_load_nothing_from_elsewhere(template: Path) -> None:
    assert not re.search(r"""(?:src|href|action)=["'](?:https?:)?//""", template.read_text(encoding="utf-8"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_write_text_and_no_markup(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)


def test_vendored_files_are_the_published_ones() -> None:
    """As recorded when they were fetched: nobody has edited them since, and none lies there unrecorded."""
    folder = WEB / "static" / "vendor"
    rows = re.findall(r"^\| (\S+) \| \S+ \| \S+ \| \S+ \| ([0-9a-f]{64}) \|$", (folder / "README.md").read_text(), re.MULTILINE)
    assert {name for name, _ in rows} | {"README.md"} == {path.name for path in folder.iterdir()}
    for name, digest in rows:
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest, name
