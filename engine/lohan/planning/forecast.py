"""What a plan foresees of a step's time, as data: how long it takes, what binds it, and what else was looked at. No torch."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

Seconds = Annotated[FiniteFloat, Field(ge=0)]
Bytes = Annotated[int, Field(ge=0)]


class _Forecast(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PhaseForecast(_Forecast):
    """A stretch of a step, and how long it keeps each resource busy."""

    name: str
    """`forward`, with the updates that lie under it; `backward`, with those that do; `updates`, which nothing hides."""
    seconds: Seconds
    resources: dict[str, Seconds] = Field(default_factory=dict)
    """By `lohan.planning.cost_model.Term`'s values."""
    binding: str | None = None
    """The resource that the phase waits for."""


class SweepForecast(_Forecast):
    """One amount of activations that may be kept, and the step that it leads to."""

    gpu_bytes: Bytes
    ram_bytes: Bytes
    ssd_bytes: Bytes
    seconds: Seconds


class Alternative(_Forecast):
    """Another way to run the same batch, and how long a step would take then."""

    micro_batch_size: int
    kept_units: int
    gradient_buffers: str = ""
    """`few` or `all`; empty where it cannot run here."""
    ram_state_bytes: Bytes = 0
    seconds: Seconds | None
    """None where it cannot run here."""
    reason: str = ""
    """Why not."""


class SettingForecast(_Forecast):
    """What a step would be with another value of one setting, and with this one."""

    setting: str
    """As a run's configuration names it, e.g. `engine.durability`."""
    value: str
    seconds: Seconds
    is_taken: bool = False
    ssd_bytes_per_step: Bytes
    """Read and written, together."""
    ssd_bytes_written_per_step: Bytes
    terabytes_written_per_day: Annotated[FiniteFloat, Field(ge=0)]
    """Of 10^12 bytes, with step after step; snapshots counted."""
    note: str = ""


class Forecast(_Forecast):
    """A step, once the first few are over."""

    step_seconds: Seconds
    phases: tuple[PhaseForecast, ...]
    binding: str
    """The resource that the step waits for longest."""
    case: int | None = None
    """Of the LoHan paper's Algorithm 1: 1, transfers bind and nothing is swapped beyond what must leave the GPU; 2, the GPU binds and all
    is kept that there is room for; 3, in between. None where there was nothing to keep."""
    is_memory_bound: bool = False
    """Whether more would be kept if the tiers held more."""
    updated_share: Annotated[FiniteFloat, Field(ge=0, le=1)] = 0.0
    """Of the updates, what is done while the backward goes on."""
    tokens_per_second: Annotated[FiniteFloat, Field(ge=0)] = 0.0
    flops_per_second: Annotated[FiniteFloat, Field(ge=0)] = 0.0
    """Three times the forward's FLOPs over the step: recomputation is not counted."""
    sweep: tuple[SweepForecast, ...] = ()
    """In ascending bytes kept."""
    alternatives: tuple[Alternative, ...] = ()
    """The best of each micro-batch that was tried, the one taken among them."""
    settings: tuple[SettingForecast, ...] = ()
    """What the user decides, and what was weighed within the micro-batch that is taken."""
    shortest_seconds: Seconds | None = None
    """Of the shortest step found, where one is taken that is at most a hundredth longer and moves less."""
    spared_bytes: Bytes = 0
    """That it moves less."""
    profile_date: str = ""
    """When the machine was measured."""
