"""Turns whatever ended a trainer into words with a remedy; the stack goes to trainer.log, where whoever mends the program looks."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lohan.errors import (
    NO_SPACE,
    CapacityError,
    ConfigError,
    DataError,
    DriveSpaceError,
    EngineError,
    LohanError,
    ModelError,
    NonFiniteError,
    ResumeError,
    StorageError,
)
from lohan.events import FailureCause

LOG_FILE = "trainer.log"
# CUDA's error numbers (driver_types.h) of a GPU or driver that has stopped answering; the others are a fault of the program. torch gives
# the number since 2.8; its text has been the same for longer.
_LOST_GPU_CODES = frozenset(
    {
        46,  # devices unavailable
        100,  # no device
        101,  # invalid device: it was there at the start
        214,  # uncorrectable ECC error
        220,  # uncorrectable NVLink error
        226,  # contained memory error
        719,  # launch failure, which a GPU that falls off the bus reports
        802,  # system not ready
        999,  # unknown error
    }
)
_LOST_GPU_TEXTS = (
    *("uncorrectable ecc error", "uncorrectable nvlink error", "contained error", "unspecified launch failure", "gpu is lost"),
    *("no cuda-capable device", "devices unavailable", "devices are busy or unavailable", "invalid device ordinal"),
    *("cuda error: unknown error", "system not yet initialized"),
)
TRAINING_MEMORY_REMEDY = "Use a smaller engine.micro_batch_size or training.sequence_length"
_CAUSES: tuple[tuple[type[LohanError], FailureCause], ...] = (
    (NonFiniteError, FailureCause.NON_FINITE),
    # Found by a look before anything was written: the same fault as a write that the drive refuses, and no fault of the run.
    (DriveSpaceError, FailureCause.DISK_FULL),
    (CapacityError, FailureCause.CAPACITY),
    (StorageError, FailureCause.STORAGE),
    (DataError, FailureCause.DATA),
    (ModelError, FailureCause.MODEL),
    (ConfigError, FailureCause.SETTINGS),
    (ResumeError, FailureCause.RESUME),
)


def as_error(fault: Exception) -> LohanError:
    """The typed error that stands for `fault`; a LohanError stands for itself, unless what caused it says more."""
    return _judge(fault)[0]


def to_fields(fault: Exception, *, memory_remedy: str = TRAINING_MEMORY_REMEDY) -> dict[str, Any]:
    """`as_error` as an `exit` event carries it: `LohanError.to_dict()` and `cause`.

    Args:
        memory_remedy: what makes the job smaller, as the beginning of a sentence.
    """
    error, cause = _judge(fault, memory_remedy)
    return {**error.to_dict(), "cause": str(cause)}


def is_out_of_space(fault: BaseException) -> bool:
    """Whether a drive had no room left, or this user's share of it is used up."""
    return any(isinstance(one, OSError) and one.errno in NO_SPACE for one in _chain(fault))


def _judge(fault: Exception, memory_remedy: str = TRAINING_MEMORY_REMEDY) -> tuple[LohanError, FailureCause]:
    for one in _chain(fault):
        named = _known(one, memory_remedy)
        if named is not None:
            return named
    if isinstance(fault, LohanError):
        return fault, next((cause for kind, cause in _CAUSES if isinstance(fault, kind)), FailureCause.PROGRAM)
    message = (str(fault).strip().splitlines() or [""])[0]
    error = EngineError(
        f"an unexpected error ended the run: {type(fault).__name__}: {message}",
        remedy=f"{LOG_FILE} has the details; report it if it comes again.",
    )
    return error, FailureCause.PROGRAM


def _chain(fault: BaseException) -> Iterator[BaseException]:
    """`fault` and what caused it; of an error that is not ours only itself: what a library wraps it knows best."""
    one: BaseException | None = fault
    while one is not None:
        yield one
        one = one.__cause__ if isinstance(one, LohanError) else None


def _known(fault: BaseException, memory_remedy: str) -> tuple[LohanError, FailureCause] | None:
    """Faults of the machine that have a name and a remedy of their own."""
    import torch

    if isinstance(fault, StorageError):
        return (fault, FailureCause.DISK_FULL) if fault.errno in NO_SPACE else None
    if isinstance(fault, LohanError):
        return None
    text = str(fault).strip()
    if isinstance(fault, torch.OutOfMemoryError):
        remedy = f"{memory_remedy}, and see what else uses the GPU."
        return _memory_error("GPU memory", remedy, text.splitlines()[0]), FailureCause.GPU_MEMORY
    if isinstance(fault, MemoryError) or "can't allocate memory" in text:
        return _memory_error("host memory", f"{memory_remedy}, and close other programs."), FailureCause.HOST_MEMORY
    if isinstance(fault, RuntimeError) and _is_lost_gpu(fault):
        remedy = "See `nvidia-smi` and the kernel's log (dmesg, lines with Xid) on the server; the GPU or the machine may need a restart."
        return EngineError(f"the GPU stopped answering: {text.splitlines()[0]}", place="GPU", remedy=remedy), FailureCause.LOST_GPU
    if isinstance(fault, OSError) and fault.errno in NO_SPACE:
        remedy = "Free space, or put engine.state_directories and output.directory on a larger drive, then start the run again."
        return StorageError.of(fault, "the drive is full", place=fault.filename, remedy=remedy), FailureCause.DISK_FULL
    if isinstance(fault, OSError) and fault.errno is not None:
        remedy = "See that the drive is healthy and that this user may write there."
        return StorageError.of(fault, "a file operation failed", place=fault.filename, remedy=remedy), FailureCause.STORAGE
    return None


def _memory_error(memory: str, remedy: str, detail: str = "") -> CapacityError:
    return CapacityError(
        f"{memory} ran out" + (f": {detail}" if detail else ""),
        need_bytes=0,
        have_bytes=0,
        place=memory,
        remedy=remedy,
    )


def _is_lost_gpu(fault: RuntimeError) -> bool:
    code = getattr(fault, "error_code", None)
    text = str(fault).lower()
    return code in _LOST_GPU_CODES or ("cuda" in text and any(words in text for words in _LOST_GPU_TEXTS))


def write_stack(directory: Path, fault: Exception) -> None:
    """Append the stack to the run's trainer.log, as far as that can still be written."""
    try:
        with (directory / LOG_FILE).open("a", encoding="utf-8") as log:
            traceback.print_exception(fault, file=log)
    except OSError:
        traceback.print_exception(fault)
