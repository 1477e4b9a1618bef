"""What the tests of engines and of transfers share."""

from __future__ import annotations

import numpy as np

from lohan._native import FaultPlan
from tests.fixtures.waiting import wait_until

PAGE = 4096
MIB = 1 << 20
PATIENCE_SECONDS = 60


def random_bytes(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)


def wait_until_held(plan: FaultPlan, count: int) -> None:
    wait_until(lambda: plan.held >= count, interval_seconds=0.001, what=f"{count} held operations")
