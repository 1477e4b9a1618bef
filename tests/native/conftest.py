"""What the I/O tests share: both engines, and a plan of faults that lets go of what it holds at the end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lohan._native import FaultPlan, IoEngine, IoPool, io_uring_refusal


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


@pytest.fixture
def pool(engine, plan) -> Iterator[IoPool]:
    """Two operations under way at a time: enough for an order to be seen."""
    pool = IoPool(2, engine=engine, depth=2, faults=plan)
    yield pool
    plan.release()
    pool.close()
