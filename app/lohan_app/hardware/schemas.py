"""What the API gives about the machine."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from lohan.hardware.profile import HardwareProfile
from lohan_app.entities import RunState
from lohan_app.runs.schemas import RecordId, RunView


class ProfileRequest(BaseModel):
    """What is to be measured."""

    model_config = ConfigDict(extra="forbid")

    device: Annotated[str, Field(min_length=1, max_length=64)] = "auto"
    """`auto`, `cpu`, `cuda`, `cuda:N`, or one of LOHAN_DEVICES."""
    base_model_id: RecordId | None = None
    """A model one block of which is timed on the device, so that plans can foresee its steps."""
    drives: bool = True
    """Whether reading and writing the state directories is measured; half a GiB is written to each."""


class ProfileView(BaseModel):
    """What is kept of one machine, as one device sees it."""

    fingerprint: str
    is_this_machine: bool
    """With the hardware that it has now."""
    date: str | None = None
    """ISO 8601; null, as what follows, where the file cannot be used."""
    device: str | None = None
    models: list[str] = []
    """Models whose block was timed."""
    problem: dict[str, Any] | None = None
    """`{kind, message, place, remedy}`."""


class ProfileList(BaseModel):
    """Newest first."""

    items: list[ProfileView]


class MeasurementView(BaseModel):
    """How far the newest measurement is, as everybody may know it."""

    state: RunState
    is_going_on: bool
    """Queued, or at work."""
    progress: float | None
    """0 to 1."""
    eta_seconds: float | None
    base_model_name: str | None
    finished_at: datetime | None
    run: RunView | None
    """The run itself, for its owner and administrators."""


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
    measurement: MeasurementView | None
    """The newest that was asked for here; null where there was none."""
