"""What the machine has, asked for at most every few seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from lohan_app.settings import Settings

if TYPE_CHECKING:
    from lohan.hardware.probe import HardwareFacts

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
