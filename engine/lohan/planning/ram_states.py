"""Which chunks' states lie in RAM where host memory holds some of them and not all: the one rule of planner and state store. No torch.

They are spread evenly. The optimizer takes chunks in order: while it updates what lies in RAM the drives read what does not, so that a
stretch of both takes the longer of the two times. With a part r in RAM, all updates taking U and reading everything R
seconds, spread chunks take max(U, (1 - r) R); the first units' whole would take r U + max((1 - r) U, (1 - r) R), since drives have nothing
to read for a unit in RAM, and the optimizer nothing to update while it waits for one that is not. For 13B parameters in equal halves with U
= 4.3 s and R = 7.8 s that is 4.3 s and not 6.1. Weights that the device waits for gain likewise: of every unit the same part comes from the
drives.

Chunks go round robin over the state directories whether they lie in RAM or not (a resumed run may have other chunks in RAM, and files stay
as they are), so the chunks of each directory are spread by themselves: else every second chunk of two directories' would be all of one's.
"""

from __future__ import annotations

from collections.abc import Sequence


def chunks_in_ram(sizes: Sequence[int], budget_bytes: int, directories: int = 1) -> frozenset[int]:
    """The chunks, by number, whose states lie in RAM.

    Of each directory's chunks one is taken whenever what was taken falls behind its share of what was seen; what whole chunks then leave of
    the budget goes to the first that it holds.

    Args:
        sizes: bytes that each chunk takes, in the order of units and chunks; chunk n belongs to directory n mod `directories`.
        budget_bytes: of host memory for them; never exceeded.
    """
    total = sum(sizes)
    if budget_bytes >= total:
        return frozenset(range(len(sizes)))
    taken: set[int] = set()
    left = budget_bytes
    for directory in range(directories):
        numbers = range(directory, len(sizes), directories)
        of_all = sum(sizes[number] for number in numbers)
        share = budget_bytes * of_all // total if total else 0
        seen = held = 0
        for number in numbers:
            size = sizes[number]
            seen += size
            # (held + size) / share <= seen / of_all, a part of a chunk earlier in each directory after the first, so that they take turns.
            ahead = directory * size * of_all
            if held + size <= share and directories * (held + size) * of_all <= directories * share * seen + ahead:
                held += size
                taken.add(number)
        left -= held
    for number, size in enumerate(sizes):
        if number not in taken and size <= left:
            left -= size
            taken.add(number)
    return frozenset(taken)


def units_with_spare(sizes: Sequence[int | None], budget_bytes: int) -> frozenset[int]:
    """The units whose states have a second place in host memory, so that an update may be written there and taken back.

    Whole units, in turns from the last and from the first of the forward on, so that those without lie in its middle. Gradients of the last
    come first: their updates have most of the backward to hide under. The first are needed first: updates that only begin when the norm
    is known would be waited for. What has no second place is updated then, while the next forward computes the first ones. Measured with 5
    of 28 units without, an update taking 22 ms and a block's forward 15: where the first five had none, the next forward waited 71 ms.

    Args:
        sizes: bytes that each unit's trained chunks take, in the order of the forward; None where some of them do not lie in RAM.
        budget_bytes: of host memory for second places; never exceeded.
    """
    taken: set[int] = set()
    left = budget_bytes
    count = len(sizes)
    for turn in range(count):
        unit = turn // 2 if turn % 2 else count - 1 - turn // 2
        size = sizes[unit]
        if size and size <= left:
            left -= size
            taken.add(unit)
    return frozenset(taken)
