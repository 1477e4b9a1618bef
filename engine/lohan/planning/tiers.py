"""The tiers of memory."""

from __future__ import annotations

from enum import StrEnum


class Tier(StrEnum):
    """Where bytes live."""

    GPU = "gpu"
    RAM = "ram"
    SSD = "ssd"
