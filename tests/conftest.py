"""What all tests share: skips with reasons (failures in CI), the databases and brokers of a session, a clean environment."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
from fixtures import machine

# A machine that only trains has the engine alone: its tests run there, too.
pytest_plugins = ["fixtures.backends"] if find_spec("alembic") else []
NEEDS = ("database", "broker", "browser", "gpu")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--complete", action="store_true", help="fail where a service's test is skipped, or none marked database or broker runs"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("complete"):
        config.pluginmanager.register(Completeness())


class Completeness:
    """With `--complete`: a test of the service that was not run is a failure of the whole session."""

    def __init__(self) -> None:
        self._skipped: list[str] = []
        self._missing = {"database", "broker"}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail") and report.nodeid.startswith(("tests/app/", "tests/e2e/")):
            self._skipped.append(report.nodeid)
        if report.when == "call" and report.passed:
            self._missing -= report.keywords.keys()

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if (self._skipped or self._missing) and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for name in self._skipped:
            terminalreporter.write_line(f"--complete: {name} was skipped", red=True)
        for marker in sorted(self._missing):
            terminalreporter.write_line(f"--complete: no test marked {marker} has passed on {machine.BACKENDS}", red=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is about other backends than this session's: that is another session's work, and no skipped test."""
    others = [item for item in items if not _is_for_this_session(item)]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]


def _is_for_this_session(item: pytest.Item) -> bool:
    marks = [mark for name in ("database", "broker") for mark in item.iter_markers(name)]
    return all(machine.Backends(mark.kwargs.get("only", machine.BACKENDS)) is machine.BACKENDS for mark in marks)


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in NEEDS:
        if item.get_closest_marker(marker) is None:
            continue
        reason = machine.missing(marker)
        if reason is None:
            continue
        # A machine without a GPU is an ordinary CI machine; one without the servers is a broken one.
        if machine.in_ci() and marker != "gpu":
            pytest.fail(f"CI: {reason}", pytrace=False)
        pytest.skip(reason)


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's LOHAN_* settings never reach a test, and nothing looks for a model hub."""
    for name in list(os.environ):
        if name.startswith("LOHAN_") and not name.startswith(("LOHAN_TEST_", "LOHAN_CI")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def repository() -> Path:
    return Path(__file__).resolve().parent.parent
