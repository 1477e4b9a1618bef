"""Tokenises a run's rows. Runs in a limited child (`worker.limited`): dataset, tokenizer and chat template are foreign.

main([ROWS, MODEL_FOLDER, TARGET, SEQUENCE_LENGTH, skip|refuse, TOTAL_ROWS]) writes the token file TARGET and returns its counts.
"""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Any

from lohan.data.prepare import prepare_tokens
from lohan.data.tokenize import Tokenizer
from lohan_app.worker.confined import report_progress


class BadRows(StrEnum):
    """What becomes of rows that cannot be used."""

    SKIP = "skip"
    REFUSE = "refuse"


def main(arguments: list[str]) -> dict[str, Any]:
    """Raises DataError and ModelError as `lohan.data.prepare.prepare_tokens` does."""
    rows, folder, target, sequence_length, bad_rows, total_rows = arguments
    total = max(1, int(total_rows))
    prepared = prepare_tokens(
        Path(rows),
        Tokenizer.from_folder(Path(folder)),
        Path(target),
        sequence_length=int(sequence_length),
        skip_bad_rows=BadRows(bad_rows) is BadRows.SKIP,
        progress=lambda done: report_progress(min(1.0, done / total)),
    )
    return asdict(prepared)
