"""What a run's first steps corrected of the machine's figures, kept in its folder, so that a resumed run begins with it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from lohan.hardware.profile import HardwareProfile

CORRECTION_FILE = "corrected-profile.json"


class CorrectedProfile(BaseModel):
    """The file's content."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int = 1
    corrections: int
    """That the run has made."""
    profile: HardwareProfile

    def save(self, directory: Path) -> None:
        """Into the run's folder."""
        temporary = directory / (CORRECTION_FILE + ".tmp")
        temporary.write_text(self.model_dump_json() + "\n", encoding="utf-8")
        temporary.replace(directory / CORRECTION_FILE)


def corrected_by_run(directory: Path, measured: HardwareProfile | None) -> tuple[HardwareProfile | None, int]:
    """The profile that a run in `directory` goes by, and how often its own steps have corrected it.

    A correction of what is no longer the machine's profile counts for nothing, as does a file that cannot be read: the run's next steps
    correct again.

    Args:
        measured: the machine's.
    """
    if measured is not None:
        with suppress(OSError, ValidationError):
            kept = CorrectedProfile.model_validate_json((directory / CORRECTION_FILE).read_bytes())
            if (kept.version, kept.profile.fingerprint, kept.profile.date) == (1, measured.fingerprint, measured.date):
                return kept.profile, kept.corrections
    return measured, 0
