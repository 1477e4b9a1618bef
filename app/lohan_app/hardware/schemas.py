"""What the API gives about the machine."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


class HardwareView(BaseModel):
    """What is there, and what the product chose for it."""

    facts: dict[str, Any]
    """`lohan.hardware.probe.HardwareFacts` as JSON: CPU, RAM, GPUs with their holders, state directories."""
    choices: list[str]
    """In words: which devices runs may use, where their states lie, how files are read and written."""
