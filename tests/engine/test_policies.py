"""Other systems' rules, expressed as plans of this engine: what each keeps, and where each cannot run."""

from __future__ import annotations

import builtins
from dataclasses import replace

import pytest

from lohan.config import ActivationPolicy
from lohan.errors import CapacityError, ConfigError
from lohan.planning.policies import PolicyFacts, decide
from lohan.planning.retention import Retention
from lohan.planning.retention_choice import ActivationProblem
from lohan.planning.step_cost import Amounts, StepCost
from lohan.planning.step_inputs import Candidate

from .test_cost_model import RATES, SETTING

BLOCKS = 8
ALL = tuple(range(BLOCKS))
CANDIDATES = (Candidate("q", 10, 0.8), Candidate("attention", 10, 3.0), Candidate("gate", 20, 1.5))
COST = StepCost(replace(SETTING, backward_seconds=100, read_share=0.0, written_share=0.0), RATES)
FACTS = PolicyFacts(device_bytes=1000, model_state_bytes=900, forward_seconds=10, g2m_bytes_per_second=10)


def problem(gpu: int = 60, ram: int = 1000, ssd: int = 1000) -> ActivationProblem:
    """8 blocks: 40 B of inputs, 320 B of outputs that may be kept."""
    return ActivationProblem(CANDIDATES, BLOCKS, 5, gpu, ram, ssd, COST)


def places(retention: Retention) -> dict[str, tuple[tuple[int, ...], ...]]:
    return {kept.label: (kept.gpu_blocks, kept.ram_blocks, kept.ssd_blocks) for kept in retention.operators}


@pytest.mark.parametrize("policy", ActivationPolicy)
def test_every_policy_is_priced_by_the_same_model_and_none_beats_the_holistic_one(policy):
    decision = decide(policy, problem(), FACTS)
    assert decision.seconds == COST(decision.amounts)
    assert decision.seconds.total >= decide(ActivationPolicy.HOLISTIC, problem(), FACTS).seconds.total * (1 - 1e-9)


def test_zero_infinity_moves_inputs_to_host_memory_though_the_device_could_hold_them():
    decision = decide(ActivationPolicy.ZERO_INFINITY, problem(), FACTS)
    assert decision.amounts == Amounts(0, 40, 0, 0)
    assert decision.retention.boundaries.ram_blocks == ALL


def test_zero_infinity_is_bounded_by_host_memory_whatever_the_drives_hold():
    with pytest.raises(CapacityError, match="host memory, the one place that ZeRO-Infinity"):
        decide(ActivationPolicy.ZERO_INFINITY, problem(gpu=1000, ram=39), FACTS)


def test_colossal_leaves_inputs_on_the_device_or_fails():
    assert decide(ActivationPolicy.COLOSSAL, problem(), FACTS).retention == Retention()
    with pytest.raises(CapacityError, match="the device, the one place that Colossal-AI"):
        decide(ActivationPolicy.COLOSSAL, problem(gpu=39), FACTS)


def test_recompute_all_lets_inputs_go_as_far_as_they_must():
    decision = decide(ActivationPolicy.RECOMPUTE_ALL, problem(gpu=10, ram=15), FACTS)
    assert decision.amounts == Amounts(10, 15, 15, 0)
    assert decision.retention.operators == ()


def test_keep_all_fills_the_nearest_tiers_first_or_fails():
    decision = decide(ActivationPolicy.KEEP_ALL, problem(gpu=60, ram=200), FACTS)
    assert decision.amounts == Amounts(60, 200, 100, pytest.approx(8 * 5.3))
    with pytest.raises(CapacityError, match="all activations take 360 B"):
        decide(ActivationPolicy.KEEP_ALL, problem(gpu=60, ram=100, ssd=100), FACTS)


def test_capuchin_swaps_what_is_hidden_and_then_what_is_shorter_to_copy():
    # 60 B on the device and 100 B hidden by the forward: attention (80 B) and half of q. Copying q takes 1 s and computing it 0.8.
    # Copying a gate takes 2 s, computing it 1.5.
    decision = decide(ActivationPolicy.CAPUCHIN, problem(), FACTS)
    found = places(decision.retention)
    assert {label: sum(map(len, tiers)) for label, tiers in found.items()} == {"attention": 8, "q": 4}
    faster = replace(FACTS, g2m_bytes_per_second=13)
    found = places(decide(ActivationPolicy.CAPUCHIN, problem(), faster).retention)
    assert {label: sum(map(len, tiers)) for label, tiers in found.items()} == {"attention": 8, "q": 8}


def test_capuchin_uses_no_drives():
    assert not decide(ActivationPolicy.CAPUCHIN, problem(ram=70), FACTS).amounts.ssd_bytes
    with pytest.raises(CapacityError, match="beyond which Capuchin"):
        decide(ActivationPolicy.CAPUCHIN, problem(gpu=20, ram=15), FACTS)


def test_g10_moves_everything_and_sends_the_first_blocks_furthest():
    decision = decide(ActivationPolicy.G10, problem(ram=180), FACTS)
    assert decision.amounts == Amounts(0, 180, 180, pytest.approx(8 * 5.3))
    assert places(decision.retention) == dict.fromkeys(("q", "attention", "gate"), ((), (4, 5, 6, 7), (0, 1, 2, 3)))
    with pytest.raises(CapacityError, match="G10, with ram and ssd alone"):
        decide(ActivationPolicy.G10, problem(gpu=10_000, ram=100, ssd=100), FACTS)


def test_flashneuron_needs_all_states_on_the_device():
    decision = decide(ActivationPolicy.FLASHNEURON, problem(gpu=90), FACTS)
    assert (decision.amounts.gpu_bytes, decision.amounts.ram_bytes, decision.amounts.ssd_bytes) == (90, 0, 270)
    with pytest.raises(CapacityError, match="keeps all model states on the device"):
        # 6B parameters of 16 bytes on a card of 24 GB, the paper's Figure 2a.
        decide(ActivationPolicy.FLASHNEURON, problem(), replace(FACTS, device_bytes=24 * 10**9, model_state_bytes=16 * 6 * 10**9))


def test_cpu_activations_leave_the_drives_alone():
    decision = decide(ActivationPolicy.CPU_ACTIVATIONS, problem(gpu=0, ram=60), FACTS)
    assert decision.amounts == Amounts(0, 60, 0, 6.0)
    assert decision.memory_bound
    with pytest.raises(CapacityError):
        decide(ActivationPolicy.CPU_ACTIVATIONS, problem(gpu=0, ram=39), FACTS)


def test_checkmate_finds_what_a_greedy_order_does_not():
    # Seconds per byte favour the small output, of which one fits: 9 + 0. The optimum is one of the large ones: 10.
    candidates = (Candidate("small", 6, 9.0), Candidate("large", 10, 10.0))
    single = ActivationProblem(candidates, 1, 0, 10, 0, 0, COST)
    decision = decide(ActivationPolicy.CHECKMATE, single, FACTS)
    assert places(decision.retention) == {"large": ((0,), (), ())}
    assert decision.gap == pytest.approx(0, abs=1e-4)


def test_checkmate_stays_within_the_device_and_host_memory():
    decision = decide(ActivationPolicy.CHECKMATE, problem(gpu=50, ram=100), FACTS)
    assert decision.amounts.ssd_bytes == 0
    assert decision.amounts.kept_bytes <= 150
    assert decision.amounts.saved_seconds == pytest.approx(8 * 3 + 3 * 0.8)
    with pytest.raises(CapacityError, match="beyond which Checkmate"):
        decide(ActivationPolicy.CHECKMATE, problem(gpu=10, ram=20), FACTS)


def test_checkmate_stopped_at_once_still_answers():
    decision = decide(ActivationPolicy.CHECKMATE, problem(), replace(FACTS, solver_seconds=0.0))
    assert decision.gap is not None
    assert 0 <= decision.gap <= 1


def test_checkmate_without_scipy_says_what_to_install(monkeypatch):
    plain = builtins.__import__

    def without_scipy(name: str, *rest: object) -> object:
        if name.startswith("scipy"):
            raise ImportError(name)
        return plain(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_scipy)
    with pytest.raises(ConfigError, match=r"lohan\[policies\]"):
        decide(ActivationPolicy.CHECKMATE, problem(), FACTS)
