"""The engine's typed errors: what was wrong, where, and what to do about it.

Every error a user can cause or mend derives from `LohanError` and carries three texts that the command line, the REST API and the
pages print alike: `message` (what was wrong, with the value), `place` (file and line, field path, path on disk) and `remedy`.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from os import PathLike
from typing import Self

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
"""The system's numbers for a drive, or a user's quota on it, that is full."""


class LohanError(Exception):
    """Base of all errors that are shown to a user as they are."""

    def __init__(self, message: str, *, place: str | None = None, remedy: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.place = place
        self.remedy = remedy

    def __str__(self) -> str:
        where = f"{self.place}: " if self.place else ""
        if not self.remedy:
            return f"{where}{self.message}"
        stop = "" if self.message.endswith((".", "!", "?")) else "."
        return f"{where}{self.message}{stop} {self.remedy}"

    def to_dict(self) -> dict[str, str | None]:
        """The error as JSON-ready data, as it stands in an `exit` event and behind problem+json."""
        return {"kind": type(self).__name__, "message": self.message, "place": self.place, "remedy": self.remedy}


class ConfigError(LohanError, ValueError):
    """A setting has a value it may not have; `place` is the field's path, e.g. `training.batch_size`."""


class DataError(LohanError, ValueError):
    """A dataset, or a row of it, cannot be used; `place` is `file:line` where a row is at fault."""


class ModelError(LohanError, ValueError):
    """A model folder or file cannot be used: unknown type, missing file, a tensor that does not fit its config."""


class CapacityError(LohanError):
    """The machine has too little of something; the message states need, have and the nearest thing that fits.

    `holders` says who has how many bytes of it, where that is known.
    """

    def __init__(
        self,
        message: str,
        *,
        need_bytes: int,
        have_bytes: int,
        holders: Mapping[str, int] | None = None,
        place: str | None = None,
        remedy: str | None = None,
    ) -> None:
        super().__init__(message, place=place, remedy=remedy)
        self.need_bytes = need_bytes
        self.have_bytes = have_bytes
        self.holders = dict(holders or {})


class DriveSpaceError(CapacityError):
    """The drives have too little room free now; emptied, they would have enough."""


class StorageError(LohanError, OSError):
    """A file operation failed; carries the operating system's error number and the file offset in bytes, where there is one."""

    def __init__(
        self, message: str, *, place: str | None = None, remedy: str | None = None, errno: int | None = None, offset: int | None = None
    ) -> None:
        super().__init__(message, place=place, remedy=remedy)
        self.errno = errno
        self.offset = offset

    @classmethod
    def of(cls, error: OSError, what: str, *, place: PathLike[str] | str | None, remedy: str) -> Self:
        """What the operating system refused: `what` as a clause (`the file cannot be written`), followed by its reason."""
        return cls(f"{what}: {error.strerror or error}", place=str(place) if place else None, remedy=remedy, errno=error.errno)


class NamedSnapshotError(LohanError):
    """A step's states could not be kept under a name; the run itself is not affected. What the system said is the cause."""


class ResumeError(LohanError, ValueError):
    """What a run was to go on from is missing, damaged, or belongs to something else; the message says which, `place` which file."""


class EngineError(LohanError, RuntimeError):
    """The engine was used in a way it cannot honour, or one of its background stages failed; no state was changed after it."""


class NonFiniteError(LohanError, ArithmeticError):
    """Too many steps in a row had a loss or gradients that are NaN or infinite: what the run learns from here on is nothing."""


class StopRequested(LohanError):  # noqa: N818 - a request, not a fault
    """The run was asked to stop (cancel, or SIGTERM) and did so at a step boundary."""
