"""What must not be in the tree: secrets, paths of one machine, hosts of package registries, compiled or downloaded files."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOP_LEVEL = {
    ".ci", ".clang-format", ".dockerignore", ".gitattributes", ".gitignore", "ARCHITECTURE.md", "CHANGELOG.md", "LICENSE", "Makefile",
    "README.md", "app", "benchmarks", "docker", "docker-compose.yml", "docs", "engine", "migrations", "native", "pyproject.toml",
    "tests", "web",
}  # fmt: skip

# Each pattern is written so that this file does not match itself.
FORBIDDEN = {
    "a path of one machine": r"(?<![\w.])/(?:wor[k]|roo[t]|hom[e]/[a-z]\w+|User[s]/\w+|far[m])/",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KE[Y]-----",
    "an access token": r"\b(?:gh[pousr]_[A-Za-z0-9]{36}|hf_[A-Za-z]{34}|AKIA[0-9A-Z]{16}|xox[abpr]-[0-9A-Za-z-]{20,})\b",
    "a package registry's host": (
        r"(?:pyp[i]|pythonhoste[d]|download\.pytorc[h]|deb\.debia[n])\.org|registry\.(?:npmj[s]|yarnpk[g])|conda\.anacond[a]"
    ),
    "a resolved address of a lock file": r"\"resolve[d]\":\s*\"https?:",
    "an unresolved merge": r"^(?:<{7}|>{7}) ",
}
NEVER_TRACKED = {".so", ".pyc", ".o", ".a", ".safetensors", ".gguf", ".pkl", ".pt", ".sqlite3", ".log"}
MAX_FILE_BYTES = 256 * 1024
MAX_VENDORED_BYTES = 2 * 1024**2  # Swagger UI is 1.7 MB
# What a released version has left behind is data by its nature: databases, weights and states of tiny runs.
RELEASED = re.compile(r"tests/fixtures/v\d+(?:\.\d+)+/")
RELEASED_MAY = {".safetensors", ".sqlite3"}
MAX_RELEASED_BYTES = 512 * 1024


@cache
def _tracked() -> tuple[Path, ...]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout  # noqa: S607
    return tuple(path for name in listed.split("\0") if name and (path := ROOT / name).is_file())


def _text(path: Path) -> str | None:
    raw = path.read_bytes()
    return None if b"\0" in raw else raw.decode("utf-8")


@pytest.mark.parametrize("what", sorted(FORBIDDEN))
def test_no_tracked_file_holds(what: str):
    pattern = re.compile(FORBIDDEN[what], re.MULTILINE)
    found = [
        f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1} {match.group()}"
        for path in _tracked()
        if "vendor" not in path.parts and (text := _text(path)) is not None and (match := pattern.search(text))
    ]
    assert found == []


def test_vendored_files_hold_no_secret():
    pattern = re.compile(FORBIDDEN["a private key"])
    assert [str(path) for path in _tracked() if "vendor" in path.parts and (text := _text(path)) and pattern.search(text)] == []


def test_the_top_level_has_only_what_the_layout_names():
    assert {path.relative_to(ROOT).parts[0] for path in _tracked()} - TOP_LEVEL == set()


def test_nothing_compiled_downloaded_or_large_is_tracked():
    assert [str(path.relative_to(ROOT)) for path in _tracked() if _is_strange(path)] == []


def _is_strange(path: Path) -> bool:
    if RELEASED.match(str(path.relative_to(ROOT))):
        return path.suffix in NEVER_TRACKED - RELEASED_MAY or path.stat().st_size > MAX_RELEASED_BYTES
    return path.suffix in NEVER_TRACKED or path.stat().st_size > (MAX_VENDORED_BYTES if "vendor" in path.parts else MAX_FILE_BYTES)


def test_constraints_name_versions_and_nothing_else():
    lines = [line for line in (ROOT / ".ci" / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert [line for line in lines if re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!]+", line) is None] == []


def test_make_lists_every_target():
    shown = subprocess.run(["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, check=True, text=True).stdout  # noqa: S607
    declared = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text().replace("\\\n", " "), re.MULTILINE)
    assert declared is not None
    for target in declared.group(1).split():
        assert re.search(rf"^  {re.escape(target)} +\S", shown, re.MULTILINE), f"make help does not list {target}"
