"""What the API gives about the machine."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from lohan.hardware.profile import HardwareProfile


class HardwareView(BaseModel):
    """What is there, and what the product chose for it."""

    facts: dict[str, Any]
    """`lohan.hardware.probe.HardwareFacts` as JSON: CPU, RAM, GPUs with their holders, state directories."""
    choices: list[str]
    """In words: which devices runs may use, where their states lie, how files are read and written."""
    profile: HardwareProfile | None
    """What `lohan profile` measured of it, with the device that `auto` takes; null where nothing was."""
    profile_problem: dict[str, Any] | None
    """`{kind, message, place, remedy}` where there is a profile that cannot be used."""
