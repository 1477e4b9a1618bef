"""Plans that go by a measured machine: the time they foresee, what they keep, and what they tried."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lohan.bench.step_model import make_config
from lohan.bench.step_shapes import SHAPES, ShapeName
from lohan.config import ActivationPolicy, EngineSection
from lohan.errors import CapacityError
from lohan.hardware.profile import BlockTimes, HardwareProfile, Measured, UpdateRate
from lohan.models.blocks import trace_workload
from lohan.planning.cost_model import Term
from lohan.planning.plan import Plan
from lohan.planning.search import MARGIN, SHORTER
from lohan.planning.state_form import StateForm
from lohan.planning.tiers import Tier
from lohan.planning.workload import OperatorGroup, OperatorWorkload, Workload
from lohan.units import GIB
from tests.engine.test_planner import items, machine, plan_of

GPU_FLOPS, GPU_MEMORY = 165e12, 1e12
IN_RAM = {"ram_state_bytes": 10**12}
LENGTH = 1024


@cache
def workload() -> Workload:
    return trace_workload(make_config(SHAPES[ShapeName.LLAMA_3_43B], LENGTH))


def seconds_of(operator: OperatorWorkload, rows: int) -> float:
    """A card that reaches its peaks."""
    traffic = 2 * operator.traffic_elements.at(rows, LENGTH) / GPU_MEMORY
    return max(traffic, operator.flops.at(rows, LENGTH) / GPU_FLOPS if operator.group is not OperatorGroup.OTHER else 0.0)


def block(rows: int, kernels: str = "torch") -> BlockTimes:
    operators = {operator.label: seconds_of(operator, rows) for operator in workload().operators_of(kernels)}
    forward = sum(operators.values())
    return BlockTimes(
        workload_digest=workload().digest,
        kernels=kernels,
        precision="bf16",
        rows=rows,
        sequence_length=LENGTH,
        forward_seconds=Measured(value=forward),
        backward_seconds=Measured(value=2 * forward),
        operator_seconds=operators,
        head_seconds=Measured(value=4 * workload().head_forward_flops(rows, LENGTH) / GPU_FLOPS),
    )


def profile(**rates: float | None) -> HardwareProfile:
    """About an RTX 4090 in a server with four drives."""
    figures = {
        "host_to_device": 25e9,
        "device_to_host": 25e9,
        "both_ways": 20e9,
        "ssd_read": 20e9,
        "ssd_write": 12e9,
        "ssd_mixed": 14e9,
        "host_memory": 150e9,
        "gradient_norm": 50e9,
        "checksum": 40e9,
    } | rates
    return HardwareProfile(
        fingerprint="made up",
        date="2026-11-30T00:00:00+00:00",
        device="a card",
        device_memory=Measured(value=GPU_MEMORY),
        matmul_flops_per_second=Measured(value=GPU_FLOPS),
        updates=tuple(UpdateRate(form=form.value, threads=32, elements_per_second=Measured(value=4e9)) for form in StateForm),
        blocks=tuple(block(rows) for rows in (1, 2, 4, 8)),
        **{name: None if rate is None else Measured(value=rate) for name, rate in figures.items()},
    )


def plan(*, gpu_gib: float = 24, ram_gib: int = 256, batch: int = 32, rates: HardwareProfile | None = None, **engine) -> Plan:
    return plan_of(
        workload(),
        hardware=machine(gpu_gib=gpu_gib, ram_gib=ram_gib),
        engine=EngineSection(**({"durability": "none"} | engine)),
        batch_size=batch,
        sequence_length=LENGTH,
        profile=rates or profile(),
    )


def test_phases_make_the_step_and_the_slowest_resource_each_phase():
    foreseen = plan().forecast
    assert [phase.name for phase in foreseen.phases] == ["forward", "backward", "updates"]
    assert foreseen.step_seconds == pytest.approx(sum(phase.seconds for phase in foreseen.phases))
    for phase in foreseen.phases[:2]:
        assert phase.seconds == pytest.approx(max(phase.resources.values()))
        assert phase.resources[phase.binding] == pytest.approx(phase.seconds)
    assert foreseen.tokens_per_second == pytest.approx(32 * LENGTH / foreseen.step_seconds)
    assert foreseen.flops_per_second == pytest.approx(3 * workload().forward_flops(32, LENGTH) / foreseen.step_seconds)
    assert foreseen.flops_per_second < GPU_FLOPS


def test_the_fastest_alternative_is_the_one_that_is_taken():
    taken = plan()
    tried = {alternative.micro_batch_size: alternative for alternative in taken.forecast.alternatives}
    assert {1, 2, 4, 8} <= tried.keys()
    chosen = tried[taken.micro_batch_size]
    assert (chosen.kept_units, chosen.seconds) == (taken.kept_units, taken.forecast.step_seconds)
    seconds = [alternative.seconds for alternative in tried.values() if alternative.seconds is not None]
    assert chosen.seconds <= min(seconds) * MARGIN / SHORTER, "a smaller micro-batch must gain half a percent, and a byte a hundredth"
    assert plan(micro_batch_size=2).micro_batch_size == 2
    assert plan().forecast.step_seconds <= plan(micro_batch_size=2).forecast.step_seconds


@settings(max_examples=25, deadline=None)
@given(gpu_gib=st.floats(7, 80), ram_gib=st.integers(16, 768), batch=st.integers(1, 160), durability=st.sampled_from(["none", "step"]))
def test_what_is_planned_fits_and_is_no_slower_than_recomputing(gpu_gib, ram_gib, batch, durability):
    try:
        result = plan(gpu_gib=gpu_gib, ram_gib=ram_gib, batch=batch, durability=durability)
    except CapacityError as error:
        assert error.need_bytes > error.have_bytes
        return
    assert all(tier.used_bytes <= tier.capacity_bytes for tier in result.tiers)
    again = plan(gpu_gib=gpu_gib, ram_gib=ram_gib, batch=batch, durability=durability, policy="recompute-all")
    assert result.forecast.step_seconds <= again.forecast.step_seconds * MARGIN / SHORTER
    assert not again.retention.operators


def test_the_sweep_is_convex_and_its_minimum_is_taken():
    foreseen = plan(micro_batch_size=8).forecast
    assert foreseen.case in (1, 2, 3)
    points = [(point.gpu_bytes + point.ram_bytes + point.ssd_bytes, point.seconds) for point in foreseen.sweep]
    assert points == sorted(points)
    assert len(points) > 10
    slopes = [(later[1] - earlier[1]) / (later[0] - earlier[0]) for earlier, later in itertools.pairwise(points)]
    scale = max(map(abs, slopes))
    assert all(later >= earlier - 1e-6 * scale for earlier, later in itertools.pairwise(slopes))
    # Whole outputs leave gaps that the sweep does not have: of one output of one block at most.
    assert foreseen.step_seconds <= min(seconds for _, seconds in points) * 1.02


def test_a_slow_link_keeps_activations_at_home_and_a_slow_card_sends_them():
    slow_link = plan(rates=profile(host_to_device=3e9, device_to_host=3e9, both_ways=2e9), micro_batch_size=8, **IN_RAM)
    assert slow_link.forecast.case == 1
    assert not any(kept.ram_blocks or kept.ssd_blocks for kept in slow_link.retention.operators)
    fast_link = plan(
        rates=profile(host_to_device=900e9, device_to_host=900e9, both_ways=900e9, host_memory=4e12), micro_batch_size=8, **IN_RAM
    )
    assert fast_link.forecast.case == 2
    assert any(kept.ram_blocks for kept in fast_link.retention.operators)
    assert fast_link.forecast.step_seconds < slow_link.forecast.step_seconds


def test_little_host_memory_sends_activations_on_to_the_drives():
    fast = {"host_to_device": 900e9, "device_to_host": 900e9, "both_ways": 900e9, "host_memory": 4e12}
    drives = {"ssd_read": 400e9, "ssd_write": 400e9, "ssd_mixed": 400e9}
    result = plan(rates=profile(**fast, **drives), micro_batch_size=8, activation_ram_bytes=8 * GIB, **IN_RAM)
    assert any(kept.ssd_blocks for kept in result.retention.operators)
    assert items(result, Tier.RAM)["kept activations"] <= 8 * GIB
    written = items(result, Tier.SSD)["kept activations"]
    assert result.ssd_bytes_written_per_step == written
    off = plan(rates=profile(**fast, **drives), micro_batch_size=8, activation_ram_bytes=8 * GIB, activation_ssd_bytes=0, **IN_RAM)
    assert not any(kept.ssd_blocks for kept in off.retention.operators)
    assert off.forecast.step_seconds > result.forecast.step_seconds


@pytest.mark.parametrize("policy", ActivationPolicy)
def test_every_policy_is_a_plan_or_says_why_not(policy):
    try:
        result = plan(policy=policy, micro_batch_size=8)
    except CapacityError as error:
        assert policy in (ActivationPolicy.FLASHNEURON, ActivationPolicy.KEEP_ALL, ActivationPolicy.G10), error
        return
    assert result.policy == policy
    assert result.forecast.step_seconds >= plan(micro_batch_size=8).forecast.step_seconds * 0.98


@pytest.mark.parametrize("swapped_gib", [0, 4, 16])
def test_a_forced_swap_is_as_near_as_whole_outputs_come(swapped_gib):
    result = plan(swapped_activation_bytes=swapped_gib * GIB, micro_batch_size=8)
    swapped = items(result, Tier.RAM).get("kept activations", 0)
    largest = 2 * 32 * LENGTH * 8640
    assert swapped_gib * GIB - largest <= swapped <= swapped_gib * GIB + largest


def test_without_figures_the_plan_is_as_before_and_says_so():
    bare = profile().model_copy(update={"blocks": ()})
    for rates, reason in ((bare, "This model was not measured here"), (None, "This machine was not measured")):
        result = plan_of(workload(), hardware=machine(), batch_size=32, sequence_length=LENGTH, profile=rates)
        assert result.forecast is None
        assert (result.policy, result.retention.operators) == ("recompute-all", ())
        assert any(note.startswith(reason) for note in result.notes)
    no_drives = profile(ssd_read=None, ssd_write=None, ssd_mixed=None)
    result = plan_of(workload(), hardware=machine(), batch_size=32, sequence_length=LENGTH, profile=no_drives)
    assert any("no rate for reads from drives" in note for note in result.notes)


def with_kernels(*sets: str) -> HardwareProfile:
    """As measured with these sets; fused operators read and write less."""
    return profile().model_copy(update={"blocks": tuple(block(rows, kernels) for kernels in sets for rows in (1, 2, 4, 8))})


def test_the_fastest_measured_kernels_are_taken():
    plain, both = plan(rates=with_kernels("torch")), plan(rates=with_kernels("torch", "compiled"))
    assert (plain.kernels, both.kernels) == ("torch", "compiled")
    assert both.forecast.step_seconds < plain.forecast.step_seconds
    fused = {operator.label for operator in workload().fused_operators}
    for result in (plan(rates=with_kernels("compiled", "torch"), micro_batch_size=8, policy="keep-all"), both):
        assert result.kernels == "compiled"
        assert {operator.label for operator in result.retention.operators} <= fused
    asked = plan(rates=with_kernels("torch", "compiled"), kernels="torch")
    assert (asked.kernels, asked.forecast) == ("torch", plain.forecast)
    assert asked.retention == plain.retention


def test_kernels_that_were_not_measured_have_no_forecast():
    result = plan(rates=with_kernels("torch"), kernels="liger")
    assert (result.kernels, result.forecast) == ("liger", None)
    assert "This model was not measured here with liger kernels: there is no forecast of the time." in " ".join(result.notes)
    assert plan_of(workload(), hardware=machine(), batch_size=32, sequence_length=LENGTH).kernels == "auto"


def test_a_plan_with_a_forecast_is_json_and_comes_back():
    result = plan()
    assert Plan.model_validate_json(result.model_dump_json()) == result


def test_whatever_binds_has_a_name():
    from lohan.cli.show_plan import _TERM_NAMES

    assert list(_TERM_NAMES) == [str(term) for term in Term]
