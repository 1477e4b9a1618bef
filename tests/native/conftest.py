"""What the I/O tests share: both engines, and a plan of faults that lets go of what it holds at the end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lohan._native import FaultPlan, IoEngine, io_uring_refusal


@pytest.fixture(params=[IoEngine.THREADS, IoEngine.URING], ids=lambda engine: engine.name)
def engine(request) -> IoEngine:
    if request.param is IoEngine.URING and io_uring_refusal():
        pytest.skip(f"no io_uring here: {io_uring_refusal()}")
    return request.param


@pytest.fixture
def plan() -> Iterator[FaultPlan]:
    plan = FaultPlan()
    yield plan
    plan.release()
