"""Turns whatever ended a trainer into words with a remedy; the stack goes to trainer.log, where whoever mends the program looks."""

from __future__ import annotations

import errno
import traceback
from pathlib import Path

from lohan.errors import CapacityError, EngineError, LohanError, StorageError

LOG_FILE = "trainer.log"


def as_error(fault: Exception) -> LohanError:
    """The typed error that stands for `fault`; a LohanError stands for itself, unless what caused it says more."""
    cause = fault.__cause__ if isinstance(fault, LohanError) else fault
    named = _known(cause) if isinstance(cause, Exception) else None
    if named is not None:
        return named
    if isinstance(fault, LohanError):
        return fault
    message = (str(fault).strip().splitlines() or [""])[0]
    return EngineError(
        f"an unexpected error ended the run: {type(fault).__name__}: {message}",
        remedy=f"{LOG_FILE} has the details; report it if it comes again.",
    )


def _known(fault: Exception) -> LohanError | None:
    """Faults of the machine that have a name and a remedy of their own."""
    import torch

    if isinstance(fault, LohanError):
        return None
    if isinstance(fault, torch.OutOfMemoryError):
        return CapacityError(
            "GPU memory ran out: " + str(fault).strip().splitlines()[0],
            need_bytes=0,
            have_bytes=0,
            place="GPU memory",
            remedy="Use a smaller engine.micro_batch_size or training.sequence_length, and see what else uses the GPU.",
        )
    if isinstance(fault, MemoryError) or "can't allocate memory" in str(fault):
        return CapacityError(
            "host memory ran out",
            need_bytes=0,
            have_bytes=0,
            place="host memory",
            remedy="Use a smaller engine.micro_batch_size or training.sequence_length, or close other programs.",
        )
    if isinstance(fault, OSError) and fault.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = "Free space, or put engine.state_directories and output.directory on a larger drive, then start the run again."
        return StorageError.of(fault, "the drive is full", place=fault.filename, remedy=remedy)
    if isinstance(fault, OSError) and fault.errno is not None:
        remedy = "See that the drive is healthy and that this user may write there."
        return StorageError.of(fault, "a file operation failed", place=fault.filename, remedy=remedy)
    return None


def write_stack(directory: Path, fault: Exception) -> None:
    """Append the stack to the run's trainer.log, as far as that can still be written."""
    try:
        with (directory / LOG_FILE).open("a", encoding="utf-8") as log:
            traceback.print_exception(fault, file=log)
    except OSError:
        traceback.print_exception(fault)
