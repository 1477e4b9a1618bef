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

from lohan.errors import LohanError

ERROR_NUMBERS = ("need_bytes", "have_bytes")  # what CapacityError carries besides its texts
PROGRESS_SUFFIX = ".progress"
# The limits the kernel reports as an error of a call, rather than as a signal.
MEMORY, FILE_SIZE, FILE_COUNT = "memory", "file size", "open files"
_ERRNO_LIMITS = {errno.ENOMEM: MEMORY, errno.EFBIG: FILE_SIZE, errno.EMFILE: FILE_COUNT}

_result_path: Path | None = None


def report_progress(fraction: float) -> None:
    """Tell the parent how far the work is, 0 to 1; does nothing outside a limited child."""
    if _result_path is not None:
        _replace(_result_path.with_name(_result_path.name + PROGRESS_SUFFIX), {"progress": fraction})


def main(arguments: list[str]) -> int:
    global _result_path
    _result_path = Path(arguments[0])
    outcome: dict[str, Any]
    try:
        outcome = {"result": import_module(arguments[1]).main(arguments[2:])}
    except LohanError as error:
        outcome = {"error": error.to_dict(), "numbers": {name: vars(error)[name] for name in ERROR_NUMBERS if name in vars(error)}}
    except MemoryError:
        outcome = {"limit": MEMORY}
    except OSError as error:
        if error.errno not in _ERRNO_LIMITS:
            raise
        outcome = {"limit": _ERRNO_LIMITS[error.errno]}
    _replace(_result_path, outcome)
    return 0


def _replace(path: Path, value: dict[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(value), encoding="utf-8")
    temporary.replace(path)


if __name__ == "__main__":
    # Under its importable name: the module that runs here finds the same `report_progress`.
    sys.exit(import_module("lohan_app.worker.confined").main(sys.argv[1:]))
