"""What runs that are no trainings need, and what they are called. Their `Run.settings` are `{"<kind>": {…}, "needs": {…}}`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from lohan_app.entities import Run, RunKind

NEEDS = "needs"
"""Key in `Run.settings`: the `Needs` of a run that has no plan."""
NO_DEVICE = "none"
"""Asked for by runs that compute nothing: they get no device."""
KIND_NAMES = {RunKind.TRAIN: "Training", RunKind.PROFILE: "Measurement", RunKind.EXPORT: "Export", RunKind.CHAT: "Chat"}


@dataclass(frozen=True, slots=True)
class Needs:
    """What a run without a plan reserves, and what it leaves behind."""

    device: str = NO_DEVICE
    """As in `lohan.config.EngineSection`, or `NO_DEVICE`."""
    ram_bytes: int = 0
    gpu_bytes: int = 0
    """On the GPU that it gets; its process takes no more."""
    ssd_bytes: int = 0
    """Over all state directories, evenly."""
    result_bytes: int = 0
    """In its folder, for as long as the run is kept."""


def needs_of(run: Run) -> Needs:
    """Of a run that is no training."""
    return Needs(**run.settings.get(NEEDS, {}))


def settings_of(kind: RunKind, request: dict[str, Any], needs: Needs) -> dict[str, Any]:
    """What is stored in `Run.settings` of such a run."""
    return {str(kind): request, NEEDS: asdict(needs)}
