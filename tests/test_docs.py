"""Documentation against code: settings, commands, targets, folders, links. What is written must exist, what exists must be written."""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

import lohan
from lohan_app import cli
from lohan_app.auth import commands
from lohan_app.settings import ENVIRONMENT_PREFIX, Settings

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def _read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def _tracked_folders() -> set[str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout  # noqa: S607
    files = [Path(name) for name in listed.split("\0") if name and (ROOT / name).exists()]
    return {str(parent) for file in files for parent in file.parents if str(parent) != "."}


# ---------------------------------------------------------------- settings


def test_every_setting_is_documented():
    text = _read("docs/settings.md")
    missing = [name for name in Settings.model_fields if f"`{ENVIRONMENT_PREFIX}{name.upper()}`" not in text]
    assert missing == []


def test_every_documented_setting_exists():
    known = {f"{ENVIRONMENT_PREFIX}{name.upper()}" for name in Settings.model_fields}
    named = {
        name
        for document in DOCUMENTS
        for name in re.findall(r"\bLOHAN_[A-Z_]+\b", document.read_text(encoding="utf-8"))
        if not name.startswith(("LOHAN_TEST_", "LOHAN_CI"))
    }
    others = {"LOHAN_PYTHON", *_compose_variables()}  # read by the set-up and by docker-compose.yml
    assert {name for name in named if name.removesuffix("_FILE") not in known and name not in others} == set()


def _compose_variables() -> set[str]:
    return set(re.findall(r"\$\{(LOHAN_[A-Z_]+)", _read("docker-compose.yml")))


# ---------------------------------------------------------------- commands


def _commands(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    children = getattr(command, "commands", None)
    if children is None:
        yield path, command
        return
    for name, child in children.items():
        if not child.hidden:
            yield from _commands(child, (*path, name))


def _all_commands() -> list[tuple[tuple[str, ...], Any]]:
    """The commands of `lohan`; those that `cli.py` forwards are taken from where they are forwarded to."""
    application = typer.Typer()
    commands.register(application)
    forwarded: Any = typer.main.get_command(application)
    own: Any = typer.main.get_command(cli.build())
    own.commands.update(forwarded.commands)
    return list(_commands(own, ("lohan",)))


def test_every_command_and_option_is_documented():
    text = _read("docs/cli.md")
    missing = []
    for path, command in _all_commands():
        section = re.search(rf"^##+ `{re.escape(' '.join(path))}\b.*?(?=^##|\Z)", text, re.MULTILINE | re.DOTALL)
        if section is None:
            missing.append(" ".join(path))
            continue
        options = [option for parameter in command.params if parameter.param_type_name == "option" for option in parameter.opts]
        missing += [f"{' '.join(path)} {option}" for option in options if option != "--help" and f"`{option}" not in section.group()]
    assert missing == []


def test_every_documented_command_exists():
    known = {" ".join(path) for path, _ in _all_commands()}
    named = set(re.findall(r"^##+ `(lohan[a-z -]*[a-z])", _read("docs/cli.md"), re.MULTILINE))
    assert named - known == set()


# ---------------------------------------------------------------- make


def _targets() -> set[str]:
    return set(re.findall(r"^([a-z0-9-]+):.*## ", _read("Makefile"), re.MULTILINE))


def test_every_target_that_a_document_names_exists():
    named = {
        (str(document.relative_to(ROOT)), target)
        for document in DOCUMENTS
        for target in re.findall(r"(?:`|^|\s)(?:[A-Z_]+=\S+ )*make ([a-z][a-z0-9-]*)(?=[`\s]|$)", _code(document), re.MULTILINE)
    }
    assert {place for place in named if place[1] not in _targets()} == set()


def _code(document: Path) -> str:
    """The parts of a document that are set as code: prose may say "make sure"."""
    text = document.read_text(encoding="utf-8")
    return "\n".join(re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL))


# ---------------------------------------------------------------- folders

# Folders whose own folders are rooms, each with its line in ARCHITECTURE.md.
BUILDINGS = (".", "engine/lohan", "app/lohan_app", "native", "web", "tests")
# Folders that only hold a package, or that a tool's convention asks for.
SHELLS = {"engine", "app"}


def _named_folders() -> set[str]:
    text = _read("ARCHITECTURE.md")
    tracked = _tracked_folders()
    tops = {folder.split("/")[0] for folder in tracked}
    rows = re.findall(r"^(?:\| |### )`([^`]+)`", text, re.MULTILINE) + re.findall(r"`((?:tests|web)/[a-z0-9_/]+)`", text)
    return {name for name in rows if name.split("/")[0] in tops and "." not in name.rsplit("/", 1)[-1].removeprefix(".")}


def test_every_folder_named_in_the_architecture_exists():
    assert {name for name in _named_folders() if name not in _tracked_folders()} == set()


def test_every_folder_is_named_in_the_architecture():
    folders = {folder for folder in _tracked_folders() if str(Path(folder).parent) in BUILDINGS}
    assert folders - SHELLS - _named_folders() == set()


# ---------------------------------------------------------------- links and versions


def _anchors(document: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_to_local_files_resolve(document: Path):
    broken = []
    for target in re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", document.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (document.parent / name).resolve() if name else document
        if not path.exists() or (anchor and path.suffix == ".md" and anchor not in _anchors(path)):
            broken.append(target)
    assert broken == []


def test_one_version_everywhere():
    project = tomllib.loads(_read("pyproject.toml"))["project"]
    assert project["version"] == lohan.__version__
    assert project["version"].split(".dev")[0] in _read("CHANGELOG.md")
