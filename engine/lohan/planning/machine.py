"""The measured machine that a run's plan goes by."""

from __future__ import annotations

from lohan.config import EngineSection
from lohan.hardware.probe import HardwareFacts
from lohan.hardware.profile import HardwareProfile
from lohan.hardware.profile_files import facts_of_device, load_profile
from lohan.planning.fit import choose_gpu


def machine_profile(engine: EngineSection, hardware: HardwareFacts) -> HardwareProfile | None:
    """What was measured of this machine with the run's device; None where nothing was.

    Args:
        hardware: with the run's state directories.

    Raises:
        ConfigError: there is no such device, or the profile cannot be read.
    """
    if engine.profiles is None:
        return None
    gpu = choose_gpu(engine, hardware)
    return load_profile(engine.profiles, facts_of_device(hardware, gpu.uuid if gpu is not None else None))
