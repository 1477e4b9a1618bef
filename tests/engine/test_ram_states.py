"""Which chunks lie in RAM: within the budget, evenly, on every directory alike."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lohan.planning.ram_states import chunks_in_ram


@given(sizes=st.lists(st.integers(1, 1000), max_size=60), share=st.floats(0, 1.2), directories=st.integers(1, 5))
def test_the_budget_is_kept_and_used_but_for_less_than_any_chunk_that_is_left(sizes, share, directories):
    budget = int(share * sum(sizes))
    taken = chunks_in_ram(sizes, budget, directories)
    held = sum(sizes[number] for number in taken)
    assert held <= budget or taken == frozenset(range(len(sizes)))
    assert all(sizes[number] > budget - held for number in range(len(sizes)) if number not in taken)
    assert chunks_in_ram(sizes, budget, directories) == taken
    assert chunks_in_ram(sizes, 0, directories) == frozenset()
    assert chunks_in_ram(sizes, sum(sizes), directories) == frozenset(range(len(sizes)))


@pytest.mark.parametrize("directories", [1, 2, 3, 12])
@pytest.mark.parametrize("quarters", [1, 2, 3])
def test_every_stretch_of_every_directory_has_its_share(directories, quarters):
    count = 40 * directories
    taken = chunks_in_ram([12] * count, 3 * count * quarters, directories)
    assert len(taken) == count * quarters // 4
    for directory in range(directories):
        of_directory = [number in taken for number in range(directory, count, directories)]
        for begin in range(36):
            assert abs(sum(of_directory[begin : begin + 4]) - quarters) <= 1, "four neighbours"


def test_directories_take_turns():
    """Two drives, a half in RAM: neither the first chunks of both nor all of one drive's."""
    taken = chunks_in_ram([10] * 16, 80, 2)
    assert all(len({number for number in taken if number // 4 == four}) == 2 for four in range(4))
    assert {number % 2 for number in taken} == {0, 1}
