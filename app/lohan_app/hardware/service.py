"""What the machine has, asked for at most every few seconds, and what was measured of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from lohan.config import EngineSection
from lohan.errors import ConfigError, LohanError
from lohan_app.db import read_transaction
from lohan_app.hardware.holders import users_of
from lohan_app.hardware.schemas import GpuUser
from lohan_app.runs import queries
from lohan_app.settings import Settings

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from lohan.hardware.probe import HardwareFacts
    from lohan.hardware.profile import HardwareProfile
    from lohan_app.context import AppContext

# Free memory moves all the time, but a page that shows it need not ask the driver more often than people look.
FRESH_SECONDS = 5.0


class HardwareCache:
    """`lohan.hardware.probe` behind a short memory. Thread-safe: one thread probes, the others wait for its answer."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._lock = threading.Lock()
        self._facts: HardwareFacts | None = None
        self._probed_at = 0.0

    def facts(self) -> HardwareFacts:
        """CPU, RAM, GPUs and the state directories, at most `FRESH_SECONDS` old."""
        from lohan.hardware.probe import probe  # loads the GPU driver's library: not at import

        with self._lock:
            if self._facts is None or self._clock() - self._probed_at > FRESH_SECONDS:
                self._facts = probe(self._settings.state_folders)
                self._probed_at = self._clock()
            return self._facts


def usable(facts: HardwareFacts, settings: Settings) -> HardwareFacts:
    """The machine without the GPUs that LOHAN_DEVICES leaves out."""
    if not settings.devices:
        return facts
    by_uuid = {gpu.uuid: gpu for gpu in facts.gpus}
    return facts.model_copy(update={"gpus": tuple(by_uuid[name] for name in settings.devices if name in by_uuid)})


def with_reserve(facts: HardwareFacts, settings: Settings) -> HardwareFacts:
    """The machine as if what LOHAN_STATE_RESERVE_BYTES keeps back, beyond what plans leave in any case, were taken."""
    from lohan.planning.fit import SSD_RESERVE_BYTES  # as in `HardwareCache.facts`

    kept = max(0, settings.state_reserve_bytes - SSD_RESERVE_BYTES)
    directories = (
        directory.model_copy(update={"free_bytes": max(0, directory.free_bytes - kept)}) for directory in facts.state_directories
    )
    return facts.model_copy(update={"state_directories": tuple(directories)}) if kept else facts


def measured(
    facts: HardwareFacts, settings: Settings, engine: EngineSection | None = None
) -> tuple[HardwareProfile | None, ConfigError | None]:
    """What `lohan profile` measured of this machine with the device that `engine` asks for, and why a profile that is there cannot be used.

    A damaged profile takes nothing but the forecast from anybody: it is told of, and never raised.

    Args:
        facts: of the machine with all its GPUs.
        engine: without it, the device that `auto` takes.

    Raises:
        ConfigError: there is no such device.
    """
    from lohan.planning.fit import choose_gpu  # as in `HardwareCache.facts`
    from lohan.planning.machine import machine_profile

    engine = (engine or EngineSection()).model_copy(update={"profiles": settings.profiles_folder})
    usable_facts = usable(facts, settings)
    choose_gpu(engine, usable_facts)
    try:
        return machine_profile(engine, usable_facts), None
    except ConfigError as error:
        return None, error


def gpu_users(engine: Engine, settings: Settings, facts: HardwareFacts) -> dict[str, list[GpuUser]]:
    """Who uses each GPU, by UUID."""
    if not facts.gpus:
        return {}
    with read_transaction(engine) as session:
        active = queries.active_runs(session)
    return {gpu.uuid: users_of(settings, gpu, {run.id: run.name for run in active if gpu.uuid in run.devices}) for gpu in facts.gpus}


def device_choices(context: AppContext) -> list[tuple[str, str]]:
    """Name and label of what a run may ask for as its device; of a machine that cannot be looked at the automatic choice alone."""
    try:
        facts = context.hardware.facts()
    except LohanError:
        return [("auto", "Automatic")]
    allowed = context.settings.devices
    gpus = [(gpu.uuid, f"GPU {gpu.index}: {gpu.name}") for gpu in facts.gpus if not allowed or gpu.uuid in allowed]
    with_cpu = not gpus or any(name.startswith("cpu") for name in allowed)
    return [("auto", "Automatic"), *gpus, *([("cpu", "CPU")] if with_cpu else [])]


def choices(facts: HardwareFacts, settings: Settings) -> list[str]:
    """What the product chose for this machine, one sentence each."""
    if settings.devices:
        devices = f"Runs may use {', '.join(settings.devices)} (LOHAN_DEVICES)."
    elif facts.gpus:
        devices = f"Runs may use {len(facts.gpus)} GPU{'s' if len(facts.gpus) > 1 else ''}: every GPU found."
    else:
        devices = "Runs use the CPU: no GPU was found."
    folders = settings.state_folders
    why = "LOHAN_STATE_DIRS" if settings.state_dirs else "the data folder, as LOHAN_STATE_DIRS is not set"
    return [devices, f"Master weights and moments lie in {len(folders)} folder{'s' if len(folders) > 1 else ''} ({why})."]
