"""Correcting a machine's figures by what a run's first steps took, and deciding again by them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lohan.config import ActivationPolicy, EngineSection, TrainingSection
from lohan.hardware.profile import HardwareProfile
from lohan.planning import correction
from lohan.planning.corrected_plan import corrected_plan
from lohan.planning.correction import BETTER_BY, Correction, Factors, MeasuredStep, Running, correct, corrected_profile, is_wrong, ratio
from lohan.planning.operations import RESOURCES, OperationKind, Resource
from lohan.planning.plan import Plan
from lohan.planning.state_form import SCALE_BLOCK
from lohan.planning.step_trace import Span, StepTrace, Wait
from lohan.planning.tiers import Tier
from lohan.training.plan_run import PlannedRun
from tests.engine.test_forecast import IN_RAM, LENGTH, profile, workload
from tests.engine.test_planner import machine, plan_of

BATCH = 32


def running(rates: HardwareProfile | None = None, *, ram_gib: int = 256, **engine) -> tuple[Plan, Running]:
    """A plan by these figures, and the run that follows it."""
    rates = rates or profile()
    settings = EngineSection(**({"durability": "none", "ram_state_bytes": 0} | engine))
    hardware = machine(gpu_gib=24, ram_gib=ram_gib)
    plan = plan_of(workload(), hardware=hardware, engine=settings, batch_size=BATCH, sequence_length=LENGTH, profile=rates)
    training = TrainingSection(batch_size=BATCH, sequence_length=LENGTH)
    run = PlannedRun(plan, workload(), training, settings, hardware, rates).running
    assert run is not None
    return plan, run


def slower(of: Running, **factors: float) -> Running:
    """The same run on a machine that is slower than its profile says."""
    return replace(of, profile=corrected_profile(of, Factors(**factors)))


def steps_of(machine: Running, *lengths: int) -> list[MeasuredStep]:
    """What steps of these lengths take there."""
    steps = [MeasuredStep(2 + number, BATCH, length, 1.0) for number, length in enumerate(lengths)]
    return [replace(step, seconds=machine.of(step).decision.seconds.total) for step in steps]


def traces_of(machine: Running, steps: list[MeasuredStep]) -> list[StepTrace]:
    """Every resource's work of a step as one span, at its own rate; the device waits once within its forward and its backward."""
    traces = []
    for step in steps:
        cost = machine.of(step).problem[1]
        amounts = machine.of(step).decision.amounts
        forward, backward, updates = cost.forward_demand(amounts), cost.backward_demand(amounts), cost.update_demand()
        rates, wait = cost.rates, 0.01
        spans = [
            span(OperationKind.FORWARD, 0.0, forward.gpu_seconds + wait),
            span(Wait.ROOM_FOR_ACTIVATIONS, 0.1, 0.1 + wait, resource=Resource.GPU),
            span(OperationKind.BACKWARD, 10.0, 10.0 + backward.gpu_seconds + wait),
            span(Wait.ACTIVATIONS, 10.1, 10.1 + wait, resource=Resource.GPU),
        ]
        state_bytes = machine.fit.placement.form.state_bytes(SCALE_BLOCK) / SCALE_BLOCK
        moved = {
            OperationKind.WEIGHTS_COPY: (forward.m2g_bytes + backward.m2g_bytes, rates.both_ways),
            OperationKind.GRADIENTS_COPY: (forward.g2m_bytes + backward.g2m_bytes, rates.g2m),
            OperationKind.STATES_READ: (forward.ssd_read_bytes + backward.ssd_read_bytes + updates.ssd_read_bytes, rates.ssd_mixed / 2),
            OperationKind.STATES_WRITE: (forward.ssd_written_bytes + updates.ssd_written_bytes, rates.ssd_mixed / 2),
            OperationKind.UPDATE: (cost.setting.state_bytes, rates.update_elements * state_bytes),
        }
        spans += [span(kind, 20.0, 20.0 + size / rate, bytes=round(size)) for kind, (size, rate) in moved.items() if size]
        traces.append(StepTrace(step.step, 0.0, step.seconds, tuple(sorted(spans, key=lambda span: span.start_seconds))))
    return traces


def span(kind, start: float, end: float, *, bytes: int = 0, resource: Resource | None = None) -> Span:
    return Span(kind, resource or RESOURCES[kind], 1, None, 0, bytes, start, end)


def corrected(of: Running, on: Running, *lengths: int) -> Correction | None:
    steps = steps_of(on, *(lengths or (LENGTH,) * 3))
    return correct(of, steps, traces_of(on, steps))


# ---------------------------------------------------------------- whether a forecast is wrong
@pytest.mark.parametrize("ram_state_bytes", [0, "auto"])
def test_what_a_plan_foresees_is_what_it_is_held_against(ram_state_bytes):
    plan, run = running(ram_state_bytes=ram_state_bytes, ram_gib=64)
    assert run.decision.seconds.total == pytest.approx(plan.forecast.step_seconds, rel=1e-12)
    assert run.decision.retention == plan.retention
    assert corrected(run, run) is None


@pytest.mark.parametrize(("factor", "is_wrong"), [(1.08, False), (1.12, True), (0.93, False), (0.88, True)])
def test_a_tenth_more_or_less_makes_a_forecast_wrong(factor, is_wrong):
    _, run = running()
    steps = [replace(step, seconds=step.seconds * factor) for step in steps_of(run, LENGTH, LENGTH, LENGTH)]
    assert ratio(run, steps) == pytest.approx(factor)
    assert (correct(run, steps, []) is not None) is is_wrong


def test_shorter_batches_are_foreseen_at_their_own_tokens():
    plan, run = running(**IN_RAM)
    steps = steps_of(run, LENGTH // 4, LENGTH // 2, LENGTH // 3)
    assert all(is_wrong(step.seconds / plan.forecast.step_seconds) for step in steps), "by the whole batch's forecast"
    assert corrected(run, run, LENGTH // 4, LENGTH // 2, LENGTH // 3) is None
    on = slower(run, everything=1.5)
    found = correct(run, steps_of(on, LENGTH // 4, LENGTH // 2, LENGTH // 3), [])
    assert found.ratio == pytest.approx(1.5)
    assert found.foreseen_seconds == pytest.approx(plan.forecast.step_seconds)
    assert found.corrected_seconds == pytest.approx(1.5 * plan.forecast.step_seconds)


def test_one_disturbed_step_of_three_counts_for_nothing():
    _, run = running()
    first, second, third = steps_of(run, LENGTH, LENGTH, LENGTH)
    assert correct(run, [first, replace(second, seconds=9 * second.seconds), third], []) is None


# ---------------------------------------------------------------- what the traces show
def test_each_figure_is_taken_from_the_steps():
    """What the run waits for within its computing is not the device's; copies and drives count as slower below their shared rates only."""
    _, run = running(ram_gib=256)
    wrong = {"forward": 1.3, "backward": 1.6, "updates": 2.0, "to_device": 3.0, "drive_reads": 4.0, "drive_writes": 4.0}
    on = slower(run, **wrong)
    found = corrected(run, on).factors
    assert found.forward == pytest.approx(1.3, rel=0.01), "a part of the head's time, which is 1.5 times as long, is the forward's"
    # A backward computes forwards again: its seconds are of both.
    assert 1.3 < found.backward < 1.6
    assert found.updates == pytest.approx(2.0)
    assert (found.to_device, found.from_device) == pytest.approx((3.0, 1.0))
    assert found.drive_reads == pytest.approx(4.0, rel=1e-6)
    assert found.drive_writes == pytest.approx(4.0, rel=1e-6)
    assert found.everything == pytest.approx(1.0, abs=0.1)


def test_the_corrected_figures_foresee_the_measured_steps():
    _, run = running()
    on = slower(run, forward=1.3, backward=1.6, updates=2.0, drive_reads=4.0, drive_writes=4.0, everything=1.2)
    steps = steps_of(on, LENGTH, LENGTH // 2, LENGTH // 2)
    found = correct(run, steps, traces_of(on, steps))
    assert ratio(found.running, steps) == pytest.approx(1.0)
    assert correct(found.running, steps, []) is None


def test_without_whole_traces_one_factor_is_all():
    _, run = running()
    on = slower(run, backward=2.0)
    steps = steps_of(on, LENGTH, LENGTH, LENGTH)
    found = correct(run, steps, traces_of(on, steps)[:2])
    assert found.factors == Factors(everything=found.ratio)
    assert found.better is None


def test_a_cpu_that_computes_and_updates_is_slower_at_both():
    rates = profile(host_to_device=None, device_to_host=None, both_ways=None)
    _, run = running(rates, device="cpu")
    on = slower(run, forward=1.5, backward=1.5, updates=1.5)
    steps = steps_of(on, LENGTH, LENGTH, LENGTH)
    found = correct(
        run, steps, [StepTrace(step.step, 0.0, step.seconds, (span(OperationKind.BACKWARD, 0.0, step.seconds),)) for step in steps]
    )
    assert found.factors.forward == found.factors.backward == found.factors.updates > 1
    assert (found.factors.to_device, found.factors.from_device) == (1, 1)
    assert ratio(found.running, steps) == pytest.approx(1.0)


# ---------------------------------------------------------------- what is decided
def test_a_machine_that_is_slower_at_everything_changes_no_decision():
    _, run = running()
    found = corrected(run, slower(run, everything=1.7))
    assert found.better is None
    assert found.running.retention == run.retention


SWAPPING = {"activation_ram_bytes": 0, **IN_RAM}


def test_drives_that_are_slower_than_measured_get_less():
    plan, run = running(**SWAPPING)
    assert any(operator.ssd_blocks for operator in plan.retention.operators), "there is something to take off them"
    on = slower(run, drive_reads=12.0, drive_writes=12.0)
    found = corrected(run, on)
    better = found.better
    assert better is not None
    assert (better.micro_batch, better.kept_units) == (run.micro_batch, run.kept_units)
    assert better.seconds < found.corrected_seconds * (1 - BETTER_BY)
    assert better.decision.amounts.ssd_bytes < run.decision.amounts.ssd_bytes
    # By the true figures it is as good as what would have been planned by them.
    known = replace(on, retention=better.decision.retention).decision.seconds.total
    assert known <= on.decision.seconds.total * (1 - BETTER_BY)


def test_what_is_better_by_less_than_noise_is_left(monkeypatch):
    _, run = running(**SWAPPING)
    on = slower(run, drive_reads=12.0, drive_writes=12.0)
    monkeypatch.setattr(correction, "BETTER_BY", 0.999)
    assert corrected(run, on).better is None


@pytest.mark.parametrize("policy", [ActivationPolicy.RECOMPUTE_ALL, ActivationPolicy.KEEP_ALL])
def test_a_policy_decides_again_as_it_does(policy):
    _, run = running(policy=policy, ram_gib=512)
    found = corrected(run, slower(run, everything=2.0))
    assert found is not None
    assert found.better is None


def test_the_same_steps_are_always_corrected_alike():
    _, run = running(**SWAPPING)
    on = slower(run, drive_reads=12.0, drive_writes=12.0)
    assert corrected(run, on) == corrected(run, on)


# ---------------------------------------------------------------- the plan afterwards
def test_the_plan_says_what_is_followed():
    plan, run = running(**SWAPPING)
    on = slower(run, drive_reads=12.0, drive_writes=12.0)
    found = corrected(run, on)
    kept, changed = (corrected_plan(plan, found, retention_changed=value) for value in (False, True))
    assert (kept.retention, changed.retention) == (plan.retention, found.better.decision.retention)
    assert kept.forecast.step_seconds == pytest.approx(found.corrected_seconds)
    assert changed.forecast.step_seconds == pytest.approx(found.better.seconds)
    assert kept.tiers == plan.tiers
    assert (kept.forecast.case, kept.ssd_bytes_per_step) == (plan.forecast.case, plan.ssd_bytes_per_step)
    on_drives = [item.bytes for one in (plan, changed) for item in one.tier(Tier.SSD).items if item.name == "kept activations"]
    less = on_drives[0] - sum(on_drives[1:])
    assert less > 0
    assert plan.ssd_bytes_written_per_step - changed.ssd_bytes_written_per_step == less
    assert plan.ssd_bytes_per_step - changed.ssd_bytes_per_step == 2 * less
    assert all(tier.used_bytes <= tier.capacity_bytes for tier in changed.tiers)
    assert Plan.model_validate_json(changed.model_dump_json()) == changed
