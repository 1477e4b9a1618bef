"""Whether a step that is clipped to a common norm updates on arrival, in the hope that the norm is not too large, or after the backward."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lohan.config import ClipUpdate
from lohan.planning.schedule import DRIVES_CLIP_RATE

if TYPE_CHECKING:
    from lohan.streaming.clipping import StepStatistics

REMEMBERED_STEPS = 32


class Speculation:
    """Decides for each step, and counts. Used by the optimizer's thread only.

    A *speculated* step updates each unit when its gradients arrive, with the factor 1 exactly, and keeps the gradients. If the norm turns
    out to be too large, the step is *redone*: its writes are taken back and all units updated again, with the right factor. The bits are
    those of deferral in either case.

    When it pays: let a backward take B, the updates U, and taking writes back R. Deferred, backward and updates take B + U. Speculated
    they take max(B, U), which saves min(B, U); redone, R + U more, which costs max(B, U) + R - B over deferral. With a part p of all
    steps redone, speculation is faster where (1 - p) min(B, U) > p (max(B, U) + R - B). Taking back writes nothing and reads what lies
    in RAM, so R is at most about U. For U up to B this is p < 1/2, for U = 2 B it is p < 1/4. Below a quarter speculation is thus faster
    wherever the updates take up to twice the backward, and it writes at most a quarter more to the drives; above it, deferral is taken.

    In second places in RAM nothing is written twice, and R is 0: what is best there is computed when the run is planned
    (`lohan.planning.prices.speculated_clip_rate`). `auto` goes by the last 32 steps; before it has seen as many it defers, unless the plan
    expects speculation to be faster. It asks no clock, so that a run that is repeated or resumed decides alike.

    Args:
        first: what `auto` does until then.
        most_failing: the part of the last steps that may have failed.
        is_possible: see `lohan.planning.schedule.can_speculate`.
    """

    def __init__(
        self,
        updates: ClipUpdate,
        *,
        is_possible: bool,
        first: ClipUpdate = ClipUpdate.DEFER,
        most_failing: float = DRIVES_CLIP_RATE,
    ) -> None:
        self._updates, self._is_possible, self._first, self._most_failing = updates, is_possible, first, most_failing
        self._recent: deque[bool] = deque(maxlen=REMEMBERED_STEPS)
        self.speculated_steps = 0
        self.redone_steps = 0

    def decide(self) -> bool:
        """Whether the step that begins is speculated."""
        match self._updates:
            case ClipUpdate.DEFER:
                return False
            case ClipUpdate.SPECULATE:
                return self._is_possible
            case ClipUpdate.AUTO:
                has_seen = len(self._recent) == REMEMBERED_STEPS or self._first is ClipUpdate.SPECULATE
                return self._is_possible and has_seen and sum(self._recent) < self._most_failing * REMEMBERED_STEPS

    def note(self, statistics: StepStatistics, *, speculated: bool) -> None:
        """A backward has ended. A step that is left out counts as one to redo: its writes are taken back too."""
        fails = statistics.clipped or statistics.skipped
        self._recent.append(fails)
        self.speculated_steps += speculated
        self.redone_steps += speculated and fails

    def export(self) -> dict[str, Any]:
        """For a step's record."""
        recent = [int(fails) for fails in self._recent]
        return {"recent": recent, "speculated_steps": self.speculated_steps, "redone_steps": self.redone_steps}

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Go on from what `export` returned."""
        self._recent.clear()
        self._recent.extend(bool(fails) for fails in kept["recent"])
        self.speculated_steps, self.redone_steps = int(kept["speculated_steps"]), int(kept["redone_steps"])
