"""What the engine's tests share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.engine.crash_runs import References, Trainers


@pytest.fixture(autouse=True)
def _one_torch_thread() -> None:
    """The models here are so small that a second thread only adds waiting: 60 ms a step become seconds on a busy machine.

    torch is not imported for the tests that do without.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


@pytest.fixture
def a_drive(monkeypatch) -> None:
    """`lohan bench step` takes the folder of a test for one on a drive, also where it is in memory."""
    monkeypatch.setattr("lohan.bench.step_options.filesystem_type", lambda _: "ext4")


@pytest.fixture
def deterministic() -> Iterator[None]:
    """torch refuses operators whose result depends on the order in which threads come."""
    import torch

    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def deterministic_on_gpu() -> Iterator[None]:
    """The same of a GPU, where operators without such a form only warn."""
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def no_tf32() -> Iterator[None]:
    """A GPU's matrix products in fp32 are products in fp32."""
    import torch

    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture(scope="module")
def trainers() -> Trainers:
    """Starts the trainers that a module's tests kill."""
    from tests.engine.crash_runs import Trainers

    return Trainers()


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory, trainers: Trainers) -> References:
    """Runs that nobody disturbed, to compare with."""
    from tests.engine.crash_runs import References

    return References(tmp_path_factory.mktemp("references"), trainers)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how far the fp32 comparisons with plain PyTorch were off: the figures of README's table."""
    reference = sys.modules.get("tests.engine.reference")
    if reference is None or not reference.MEASURED:
        return
    measured = [entry for entry in reference.MEASURED if entry.steps >= 20]
    if measured:
        terminalreporter.write_line(
            f"parity in fp32 over 20 steps, worst of {len(measured)} comparisons: "
            f"loss {max(entry.loss for entry in measured):.1e} relative, "
            f"weights {max(entry.weights for entry in measured):.1e} of the way they moved"
        )
