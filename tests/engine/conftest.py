"""What the engine's tests share."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(autouse=True)
def _one_torch_thread() -> None:
    """The models here are so small that a second thread only adds waiting: 60 ms a step become seconds on a busy machine.

    torch is not imported for the tests that do without.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
