"""The arrows of ARCHITECTURE.md, as a test: who may import whom, what stays unloaded, how big a file may be, what features are made of.

Imports are read with `ast`, inside functions too: a lazy import is still an arrow. What stands under `if TYPE_CHECKING:` is none: a
function may name the type of what it is handed without reaching for it.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"lohan": ROOT / "engine" / "lohan", "lohan_app": ROOT / "app" / "lohan_app"}
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 70

# ---------------------------------------------------------------- the table

# What every room of the engine may use.
BASE = ("lohan.errors", "lohan.units", "lohan.config", "lohan.events")

ENGINE_ROOMS: dict[str, tuple[str, ...]] = {
    # room: the other rooms it may import, besides BASE and itself
    "lohan.errors": (),
    "lohan.units": (),
    "lohan.events": (),
    "lohan.config": (),
    "lohan.hardware": (),
    "lohan.planning": ("lohan.hardware",),
    "lohan.data": (),
    "lohan.memory": ("lohan.hardware",),
    "lohan.states": ("lohan.memory", "lohan.planning", "lohan.hardware"),
    "lohan.models": ("lohan.planning", "lohan.states", "lohan.hardware"),
    "lohan.streaming": ("lohan.memory", "lohan.states", "lohan.models", "lohan.planning"),
    "lohan.training": ("lohan.hardware", "lohan.planning", "lohan.data", "lohan.states", "lohan.models", "lohan.streaming", "lohan"),
    "lohan.profiling": ("lohan.hardware", "lohan.planning", "lohan.memory", "lohan.states", "lohan.models", "lohan.streaming"),
    "lohan.bench": ("lohan.hardware", "lohan.planning", "lohan.models", "lohan.streaming", "lohan.profiling", "lohan"),
    "lohan.cli": (
        *("lohan.hardware", "lohan.planning", "lohan.data", "lohan.models", "lohan.streaming", "lohan.training", "lohan.bench"),
        *("lohan.profiling", "lohan"),
    ),
    "lohan": ("lohan.streaming", "lohan.models"),
}

# The engine knows no web and no database.
ENGINE_NEVER = ("lohan_app", "fastapi", "starlette", "uvicorn", "sqlalchemy", "alembic", "celery", "kombu", "redis", "pydantic_settings")

# The native core: bytes through the store and the arena, numbers through the optimizer and the state store (split masters, checksums).
# `lohan doctor` asks whether it loads, what the processor and the kernel give it, and whether files go direct; `lohan bench` and
# `lohan.profiling` measure it.
NATIVE_USERS = {
    *("lohan.memory.store", "lohan.memory.arena", "lohan.states.state_store", "lohan.states.record"),
    *(f"lohan.streaming.{name}" for name in ("optimizer", "chunk_pipeline", "clipping", "hyperparameters")),
    "lohan_app.worker.native_findings",
    *("lohan.bench.adam", "lohan.bench.adam_arrays", "lohan.bench.io", "lohan.bench.striping", "lohan.bench.step"),
    *("lohan.profiling.passes", "lohan.profiling.host", "lohan.profiling.drives", "lohan.profiling.machine"),
}

FEATURES = ("auth", "runs", "datasets", "base_models", "hardware", "storage", "system")
FEATURE_FILES = ("__init__", "pages", "api", "service", "repository", "schemas", "tasks", "commands")
# Files that a feature has besides the common ones, each with its reason.
FEATURE_EXTRAS = {
    "auth/dependencies.py": "who asks, and whether they may: every router takes it",
    "auth/passwords.py": "hashing with a bound on memory; no database in it",
    "auth/setup.py": "the first administrator: a file and a row that must agree",
    "base_models/inspection.py": "the task's work on a model; what the limited child finds is written down here",
    "base_models/model_check.py": "runs inside the limited child, with torch",
    "base_models/sources.py": "folders of the administrator; no path is a user's",
    "datasets/row_check.py": "runs inside the limited child",
    "datasets/upload.py": "from the network to the disk, block by block",
    "datasets/validation.py": "the task's work on a dataset",
    "hardware/holders.py": "who uses a GPU: asked by the queue, REST and the page",
    "hardware/measuring.py": "measurements as runs of the queue, and what they leave; service.py is below runs, which plan by it",
    "hardware/presentation.py": "measured figures as the page words them",
    "runs/announce.py": "wakes the streams of the web process",
    "runs/archive.py": "a folder as a zip file that is made while it is sent",
    "runs/chat_panel.py": "the chat on a run's page: what it shows, and its form, read and filled",
    "runs/chats.py": "conversations with what a run has as its result, as runs of their own",
    "runs/curves.py": "curves of long runs as the database aggregates them",
    "runs/exports.py": "exports of what a training run has recorded, as runs of their own",
    "runs/forecasts.py": "a plan's forecast as the pages word it",
    "runs/kinds.py": "what runs that are no trainings need; quotas, reservations and pages share it",
    "runs/lifecycle.py": "what is asked of runs that exist; service.py plans, submits and shows them",
    "runs/line.py": "the queue's order, pure: reconciler, REST and pages share it",
    "runs/logs.py": "the trainer's log as text that a page can show",
    "runs/once.py": "a request and the reply to its idempotency key as one transaction",
    "runs/planning.py": "a plan for the machine as it will be when the run's turn comes",
    "runs/prepare.py": "the task's work on a run",
    "runs/presentation.py": "numbers and states as the pages word them",
    "runs/queries.py": "reading runs for people; repository.py moves them",
    "runs/requests.py": "what may be asked in which state: one table that service, REST and pages share",
    "runs/row_tokens.py": "runs inside the limited child",
    "runs/run_form.py": "the form of a new run, read and filled",
    "runs/states.py": "the state machine: one table that service, supervisor and reconciler share",
    "runs/stream.py": "one poller for all streams of events",
    "storage/holdings.py": "measured folders with the rows behind them, for service and command line",
    "storage/quota.py": "what a user may hold: asked by datasets and runs",
    "storage/report.py": "the measurement of folders that reconciler, quotas, pages and REST share",
    "storage/retention.py": "what expires when, pure",
}


@dataclass(frozen=True)
class Role:
    """What files of one name may not import; names are prefixes of dotted modules, `*` stands for any feature."""

    never: tuple[str, ...]
    why: str


QUERIES = ("sqlalchemy", "alembic", "lohan_app.db", "lohan_app.*.repository")
_REPOSITORY = Role(
    ("fastapi", "starlette", "celery", "lohan_app.worker", *(f"lohan_app.*.{name}" for name in ("pages", "api", "service", "tasks"))),
    "queries know entities and nothing above them",
)
ROLES: dict[str, Role] = {
    "pages": Role((*QUERIES, "celery", "lohan_app.worker"), "pages ask the service; they never query or queue"),
    "api": Role((*QUERIES, "celery", "lohan_app.worker"), "the JSON router asks the service; it never queries or queues"),
    "service": Role(("lohan_app.*.pages", "lohan_app.*.api", "fastapi.templating", "jinja2"), "rules know no page"),
    "repository": _REPOSITORY,
    "queries": _REPOSITORY,
    "schemas": Role(
        ("sqlalchemy", "lohan_app.db", *(f"lohan_app.*.{name}" for name in ("pages", "api", "service", "repository", "tasks"))),
        "schemas are shapes: no behaviour of the service in them",
    ),
    "tasks": Role(("fastapi", "starlette", "lohan_app.*.pages", "lohan_app.*.api"), "a task is a thin door to the service"),
}

# Loaded by none of the processes that must stay small and quick to start.
HEAVY = ("torch", "transformers", "numpy", "scipy", "pyarrow", "pandas")
ENGINE_WITHOUT_TORCH = (
    *("lohan", "lohan.config", "lohan.events", "lohan.planning.planner", "lohan.data.formats", "lohan.hardware.probe"),
    *("lohan.hardware.profile_files", "lohan.hardware.catalog", "lohan.cli.profile", "lohan.cli.show_profile"),
    *("lohan.cli.bench", "lohan.bench.adam", "lohan.bench.io", "lohan.bench.step", "lohan.bench.show"),
)


# ---------------------------------------------------------------- reading imports


@dataclass
class Module:
    name: str
    path: Path
    tree: ast.Module
    imports: list[tuple[int, str]] = field(default_factory=list)


def _python_files(folder: Path) -> Iterator[Path]:
    yield from sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def _imports(tree: ast.Module, module: str, *, is_package: bool) -> Iterator[tuple[int, str]]:
    for node in _nodes_that_run(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".") if is_package else module.split(".")[:-1]
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            origin = ".".join(part for part in (base, node.module or "") if part)
            for alias in node.names:
                # `from lohan.memory import store` is an import of lohan.memory.store where that is a module.
                yield node.lineno, f"{origin}.{alias.name}" if _is_module(f"{origin}.{alias.name}") else origin


def _nodes_that_run(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return
    for child in ast.iter_child_nodes(node):
        yield from _nodes_that_run(child)


def _is_module(name: str) -> bool:
    package, *rest = name.split(".")
    if package not in PACKAGES or not rest:
        return False
    path = PACKAGES[package].joinpath(*rest)
    return path.is_dir() or path.with_suffix(".py").is_file() or path.with_suffix(".pyi").is_file()


def _modules() -> list[Module]:
    found = []
    for package, folder in PACKAGES.items():
        for path in _python_files(folder):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            is_package = parts[-1] == "__init__"
            name = ".".join(parts[:-1] if is_package else parts)
            tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
            found.append(Module(name, path, tree, list(_imports(tree, name, is_package=is_package))))
    return found


MODULES = _modules()


def _within(name: str, prefix: str) -> bool:
    wanted, actual = prefix.split("."), name.split(".")
    return len(actual) >= len(wanted) and all(w in ("*", a) for w, a in zip(wanted, actual, strict=False))


def _offences(modules: list[Module], never: tuple[str, ...]) -> list[str]:
    return [
        f"{module.path.relative_to(ROOT)}:{line} imports {name}"
        for module in modules
        for line, name in module.imports
        if any(_within(name, prefix) for prefix in never)
    ]


def _in_package(name: str) -> list[Module]:
    return [module for module in MODULES if module.name.split(".")[0] == name]


def _room(module: str) -> str:
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "lohan" else parts[0]


# ---------------------------------------------------------------- the engine


def test_the_engine_knows_no_web_and_no_database():
    assert _offences(_in_package("lohan"), ENGINE_NEVER) == []


def test_every_engine_room_is_in_the_table():
    rooms = {_room(module.name) for module in _in_package("lohan")}
    assert rooms - set(ENGINE_ROOMS) == set(), "a new room needs its arrows here and in ARCHITECTURE.md"


@pytest.mark.parametrize("room", sorted(ENGINE_ROOMS))
def test_engine_rooms_import_only_downwards(room: str):
    allowed = {room, *BASE, *ENGINE_ROOMS[room]}
    offences = [
        f"{module.path.relative_to(ROOT)}:{line} imports {name}"
        for module in _in_package("lohan")
        if _room(module.name) == room
        for line, name in module.imports
        if name.split(".")[0] == "lohan" and not name.startswith("lohan._native") and _room(name) not in allowed
    ]
    assert offences == []


def test_the_engine_rooms_have_no_cycle():
    seen: set[str] = set()

    def visit(room: str, path: tuple[str, ...]) -> None:
        assert room not in path, f"cycle: {' -> '.join((*path, room))}"
        if room not in seen:
            for below in ENGINE_ROOMS[room]:
                visit(below, (*path, room))
            seen.add(room)

    for room in ENGINE_ROOMS:
        visit(room, ())


def test_the_native_core_includes_no_streams_and_no_filesystem():
    """PyTorch's libraries carry parts of another libstdc++: with them loaded, std::filesystem and the streams' locales have crashed."""
    forbidden = {"filesystem", "fstream", "iostream", "sstream", "istream", "ostream", "locale", "regex", "iomanip"}
    for folder in ("include", "src", "bindings"):
        for path in (ROOT / "native" / folder).rglob("*.*"):
            included = set(re.findall(r"#include <(\w+)>", path.read_text(encoding="utf-8")))
            assert not included & forbidden, f"{path.relative_to(ROOT)}: {sorted(included & forbidden)}"


def test_only_the_store_the_arena_and_the_optimizer_use_the_native_core():
    users = {module.name for module in MODULES for _, name in module.imports if _within(name, "lohan._native")}
    assert users <= NATIVE_USERS


# ---------------------------------------------------------------- the service


@pytest.mark.parametrize("role", sorted(ROLES))
def test_files_of_a_role_import_only_what_the_role_may(role: str):
    modules = [m for m in _in_package("lohan_app") if m.name.split(".")[-1] == role and m.name.split(".")[1] in FEATURES]
    assert _offences(modules, ROLES[role].never) == [], ROLES[role].why


def test_entities_know_nothing_above_them():
    modules = [module for module in MODULES if _within(module.name, "lohan_app.entities")]
    offences = [
        f"{module.name}:{line} imports {name}"
        for module in modules
        for line, name in module.imports
        if name.split(".")[0] in ("lohan", "lohan_app", "fastapi", "celery") and not _within(name, "lohan_app.entities")
    ]
    assert offences == []


def test_features_are_made_of_the_same_files():
    strange = [
        str(path.relative_to(ROOT))
        for feature in FEATURES
        for path in _python_files(PACKAGES["lohan_app"] / feature)
        if path.stem not in FEATURE_FILES and path.relative_to(PACKAGES["lohan_app"]).as_posix() not in FEATURE_EXTRAS
    ]
    assert strange == [], "use the common names, or give the file its reason in FEATURE_EXTRAS"


def test_every_extra_exists():
    assert [name for name in FEATURE_EXTRAS if not (PACKAGES["lohan_app"] / name).is_file()] == []


# ---------------------------------------------------------------- what stays unloaded


def _loaded_by(modules: tuple[str, ...]) -> set[str]:
    code = f"import importlib, json, sys\nfor name in {modules!r}: importlib.import_module(name)\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("module", ENGINE_WITHOUT_TORCH)
def test_planning_and_data_load_no_torch(module: str):
    assert _loaded_by((module,)) & {"torch", "transformers"} == set()


@pytest.mark.parametrize("module", ["lohan_app.main", "lohan_app.worker.supervisor", "lohan_app.worker.celery"])
def test_the_service_loads_no_heavy_package(module: str):
    assert _loaded_by((module,)) & set(HEAVY) == set()


# ---------------------------------------------------------------- sizes


def _source_files() -> Iterator[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout.split("\0")  # noqa: S607
    for name in listed:
        path = ROOT / name
        # Migrations are drafted by Alembic, one long list of columns; the stub is written by nanobind.
        generated = "vendor" in path.parts or path.suffix == ".pyi" or name.startswith("migrations/versions/")
        if path.suffix in {".py", ".cc", ".h", ".html", ".css", ".js"} and path.is_file() and not generated:
            yield path


def _lines(node: ast.stmt) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def test_no_file_is_over_500_lines():
    sizes = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in _source_files()}
    assert {name: lines for name, lines in sizes.items() if lines > MAX_FILE_LINES} == {}


def test_no_function_is_over_70_lines():
    long = {}
    for path in _source_files():
        if path.suffix != ".py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = _lines(node) - (_lines(node.body[0]) if ast.get_docstring(node, clean=False) else 0)
                if lines > MAX_FUNCTION_LINES:
                    long[f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"] = lines
    assert long == {}
