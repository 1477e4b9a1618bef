"""The schedule of a soak: a pure function of its seed."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.soak.schedule import Act, Fault, Victim, make_schedule


@pytest.mark.parametrize("fault", Fault)
def test_the_same_seed_makes_the_same_schedule(fault: Fault) -> None:
    first = make_schedule(7, 600, list(Victim), fault)
    assert first == make_schedule(7, 600, list(Victim), fault)
    assert first != make_schedule(8, 600, list(Victim), fault)
    shorter = make_schedule(7, 60, list(Victim), fault)
    assert shorter == [stroke for stroke in first if stroke.at_seconds < 60]


def test_a_process_is_killed_every_5_to_15_seconds_and_each_kind_in_turn() -> None:
    kills = make_schedule(7, 600, list(Victim), Fault.NONE)
    instants = [0.0, *(stroke.at_seconds for stroke in kills)]
    assert all(4.99 <= after - before <= 15.01 for before, after in pairwise(instants))
    assert {stroke.what for stroke in kills[: len(Victim)]} == set(Victim)


def test_kills_go_on_beside_every_fault() -> None:
    kills = make_schedule(7, 600, list(Victim), Fault.NONE)
    for fault in (Fault.REDIS, Fault.POSTGRES, Fault.DISK):
        schedule = make_schedule(7, 600, list(Victim), fault)
        assert [stroke for stroke in schedule if isinstance(stroke.what, Victim)] == kills
        assert any(isinstance(stroke.what, Act) for stroke in schedule)
