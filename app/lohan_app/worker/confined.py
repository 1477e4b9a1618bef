"""The inside of `limited.run_limited`: runs one module's `main(arguments)` and leaves its return value, or its error, in a file.

python -m lohan_app.worker.confined RESULT_FILE MODULE [ARGUMENT…]
"""

from __future__ import annotations

import errno
import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from lohan.errors import NO_SPACE, LohanError

ERROR_NUMBERS = ("need_bytes", "have_bytes")  # what CapacityError carries besides its texts
PROGRESS_SUFFIX = ".progress"
# The limits the kernel reports as an error of a call, rather than as a signal.
MEMORY, FILE_SIZE, FILE_COUNT = "memory", "file size", "open files"
OUT_OF_SPACE_STATUS = 7
"""Exit code where a drive is full: neither a result nor last words could be relied on, as they may lie on that drive."""
_ERRNO_LIMITS = {errno.ENOMEM: MEMORY, errno.EFBIG: FILE_SIZE, errno.EMFILE: FILE_COUNT}

_result_path: Path | None = None


def report_progress(fraction: float) -> None:
    """Tell the parent how far the work is, 0 to 1; does nothing outside a limited child."""
    if _result_path is not None:
        _replace(_result_path.with_name(_result_path.name + PROGRESS_SUFFIX), {"progress": fraction})


def main(arguments: list[str]) -> int:
    global _result_path
    _result_path = Path(arguments[0])
    try:
        _replace(_result_path, _run(arguments[1], arguments[2:]))
    except Exception as error:
        if not _is_full_drive(error):
            raise
        return OUT_OF_SPACE_STATUS
    return 0


def _run(module: str, arguments: list[str]) -> dict[str, Any]:
    try:
        return {"result": import_module(module).main(arguments)}
    except LohanError as error:
        if _is_full_drive(error):
            raise
        return {"error": error.to_dict(), "numbers": {name: vars(error)[name] for name in ERROR_NUMBERS if name in vars(error)}}
    except MemoryError:
        return {"limit": MEMORY}
    except OSError as error:
        if error.errno not in _ERRNO_LIMITS:
            raise
        return {"limit": _ERRNO_LIMITS[error.errno]}


def _is_full_drive(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno in NO_SPACE
    # Libraries in Rust and C++ wrap the system's words in errors of their own; ours may quote a user's text.
    return not isinstance(error, LohanError) and any(os.strerror(number) in str(error) for number in NO_SPACE)


def _replace(path: Path, value: dict[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(value), encoding="utf-8")
    temporary.replace(path)


if __name__ == "__main__":
    # Under its importable name: the module that runs here finds the same `report_progress`.
    sys.exit(import_module("lohan_app.worker.confined").main(sys.argv[1:]))
