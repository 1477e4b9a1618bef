"""What a plan costs to make, counted: steps that are evaluated, outputs that are placed, values that are made and checked."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from lohan.planning import retention_choice
from lohan.planning.plan import PlanItem
from lohan.planning.retention import Retention
from lohan.planning.step_cost import StepCost
from lohan.planning.workload import Workload
from tests.engine.test_forecast import plan, profile, workload


@pytest.fixture
def calls(monkeypatch) -> Counter[str]:
    """How often each was called."""
    found: Counter[str] = Counter()

    def count(owner: Any, name: str, key: str) -> None:
        original = getattr(owner, name)

        def counted(*arguments: Any, **keywords: Any) -> Any:
            found[key] += 1
            return original(*arguments, **keywords)

        monkeypatch.setattr(owner, name, counted)

    count(StepCost, "total", "evaluated")
    count(StepCost, "__call__", "explained")
    count(StepCost, "__init__", "costs")
    count(retention_choice, "place_outputs", "placed")
    for model in (PlanItem, Retention):
        count(model, "__init__", model.__name__)
    count(Workload, "model_dump_json", "workload as text")
    return found


def test_a_search_evaluates_little_and_makes_only_what_its_plan_holds(calls):
    rates = profile()
    fresh = workload().model_copy()  # has no digest yet
    assert fresh.digest == workload().digest
    calls.clear()
    chosen = plan(batch=32, rates=rates)
    ways = calls["costs"]
    assert ways < 160, "several ways for each of the micro-batches"
    # Halving alone takes 17 of 313 places, and that twice for most ways; near the best of the last one a few do.
    assert calls["evaluated"] < 20 * ways
    assert calls["placed"] < 4 * ways
    assert calls["explained"] < 16, "of those that the plan shows: the chosen step and its phases, and the settings that are priced"
    assert calls["workload as text"] == 0, "it is the same model that the profile was made for"
    assert calls["PlanItem"] == sum(len(tier.items) for tier in chosen.tiers)
    assert calls["Retention"] == 1


def test_a_changed_workload_is_not_taken_for_the_one_it_was_made_from():
    first = workload()
    assert (first.digest, first.blocks, first.parameters) == (first.digest, 26, sum(unit.parameters for unit in first.units))
    changed = first.model_copy(update={"units": first.units[:-2]})
    assert changed.digest != first.digest
    assert (changed.blocks, changed.parameters) == (25, sum(unit.parameters for unit in changed.units))
    assert first.model_copy() == first
    assert Workload.model_validate_json(first.model_dump_json()) == first
