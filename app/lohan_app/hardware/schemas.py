"""What the API gives about the machine."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import BaseModel

from lohan.hardware.profile import HardwareProfile


class GpuUserKind(StrEnum):
    RUN = "run"
    """One of our runs, which has the GPU reserved."""
    ENDING = "ending"
    """A trainer of a run of ours that has given the GPU back and is about to end."""
    OTHER = "other"
    """Somebody else's process. One that computes keeps our runs from the GPU."""


class GpuUser(BaseModel):
    """Who uses a GPU."""

    kind: GpuUserKind
    run_id: str | None = None
    run_name: str | None = None
    pid: int | None = None
    """Null where a run has the GPU reserved and no process on it yet."""
    process: str = ""
    """The process in words: its program, user and memory, as far as these may be seen."""


class HardwareView(BaseModel):
    """What is there, and what the product chose for it."""

    facts: dict[str, Any]
    """`lohan.hardware.probe.HardwareFacts` as JSON: CPU, RAM, GPUs with their holders, state directories."""
    gpu_users: dict[str, list[GpuUser]]
    """By UUID: who uses each GPU."""
    choices: list[str]
    """In words: which devices runs may use, where their states lie, how files are read and written."""
    profile: HardwareProfile | None
    """What `lohan profile` measured of it, with the device that `auto` takes; null where nothing was."""
    profile_problem: dict[str, Any] | None
    """`{kind, message, place, remedy}` where there is a profile that cannot be used."""
