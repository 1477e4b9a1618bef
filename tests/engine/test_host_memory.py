"""A session's host memory: on one account, by the names and within the bytes of the plan, and within its budget."""

from __future__ import annotations

import threading

import pytest

from lohan.config import Clip, EngineSection, Precision, RamStates, TrainingSection
from lohan.errors import CapacityError
from lohan.hardware.probe import probe
from lohan.models.blocks import trace_workload
from lohan.planning.plan import Plan
from lohan.planning.planner import make_plan
from lohan.planning.tiers import Tier
from tests.engine.reference import adamw, make_batches, make_llama, open_session

PAGE_BYTES = 4096
PRECISIONS = [Precision.FP32, Precision.BF16]


def plan_of(model, folder, precision: Precision, clip: Clip = Clip.NONE, *, ram_state_bytes: int | RamStates = 0) -> Plan:
    training = TrainingSection(batch_size=4, sequence_length=16, precision=precision, clip=clip)
    workload = trace_workload(model.config)
    engine = EngineSection(device="cpu", unsafe_filesystems="allow", ram_state_bytes=ram_state_bytes)
    return make_plan(
        workload,
        model_name="llama",
        training=training,
        engine=engine,
        hardware=probe([folder]),
    )


@pytest.mark.parametrize("clip", [Clip.NONE, Clip.GLOBAL])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_holders_are_the_plans_items_and_keep_within_them(tmp_path, precision, clip):
    model = make_llama()
    plan = plan_of(model, tmp_path, precision, clip, ram_state_bytes=RamStates.AUTO)
    items = {item.name: item.bytes for item in plan.tier(Tier.RAM).items}
    with open_session(model, adamw(model), tmp_path, plan=plan, precision=precision, clip=clip, chunk_parameters=None) as session:
        model(**make_batches(1)[0]).loss.backward()
        session.wait()
        ledger = session.host_memory
        assert ledger.budget_bytes == plan.tier(Tier.RAM).capacity_bytes
        holders = {"parameter slots", "host gradient buffers", "optimizer staging", "model states"}
        assert {holding.holder for holding in ledger.holdings} == holders
        states = next(holding for holding in ledger.holdings if holding.holder == "model states")
        assert items["model states"] <= states.bytes <= plan.ram_state_bytes, "all of them, padding included"
        for holding in ledger.holdings:
            # The plan counts parameters. In a unit each begins on a multiple of 256 elements and the unit ends on one of 2,048 (at
            # most 20 parameters, 4 B); slabs end on a page. No holder has more than 12 slabs: 3 chunks of 4 streams.
            slack = 12 * (4 * (20 * 255 + 2047) + PAGE_BYTES)
            assert 0 < holding.bytes <= (items[holding.holder] + slack if holding is not states else plan.ram_state_bytes), holding
            assert holding.peak_bytes == holding.bytes
    assert session.host_memory.held_bytes == 0


def test_a_session_that_does_not_fit_its_plan_is_not_begun(tmp_path):
    model = make_llama()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    plan = plan_of(model, tmp_path, Precision.FP32)
    ram = plan.tier(Tier.RAM).model_copy(update={"capacity_bytes": 1_000_000})
    small = plan.model_copy(update={"tiers": (*(tier for tier in plan.tiers if tier.tier is not Tier.RAM), ram)})
    with pytest.raises(CapacityError, match="held by parameter slots") as caught:
        open_session(model, adamw(model), tmp_path, plan=small)
    assert caught.value.need_bytes > caught.value.have_bytes
    assert set(caught.value.holders) <= {"parameter slots", "host gradient buffers", "optimizer staging"}
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("lohan-")]
    assert all(parameter.equal(before[name]) for name, parameter in model.named_parameters())
    with open_session(model, adamw(model), tmp_path, plan=plan):  # the directory is free again
        model(**make_batches(1)[0]).loss.backward()
