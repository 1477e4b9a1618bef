"""Reads an uploaded file row by row. Runs in a limited child (`worker.limited`): the file is foreign.

main([PATH]) returns format, counts, the first bad rows and a preview; a file that is no JSONL at all raises DataError.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lohan.data.formats import Row, iterate_rows
from lohan.errors import DataError
from lohan_app.worker.confined import report_progress

KEPT_ERRORS = 1000
PREVIEW_ROWS = 20
# A preview shows what a row is like; a row of megabytes is not sent to every page that shows it.
PREVIEW_CHARACTERS = 2000
PREVIEW_MESSAGES = 20
ROWS_PER_REPORT = 2000
COUNT_BLOCK_BYTES = 4 * 1024 * 1024


def main(arguments: list[str]) -> dict[str, Any]:
    """Check every row of the file `arguments[0]`."""
    path = Path(arguments[0])
    total_lines = max(1, _count_lines(path))
    row_format: str | None = None
    rows, bad_rows = 0, 0
    errors: list[dict[str, Any]] = []
    preview: list[dict[str, Any]] = []
    for index, item in enumerate(iterate_rows(path)):
        if index % ROWS_PER_REPORT == 0:
            report_progress(min(1.0, item.line / total_lines))
        if isinstance(item, Row):
            rows += 1
            row_format = row_format or str(item.format)
            if len(preview) < PREVIEW_ROWS:
                preview.append({"line": item.line, "messages": [_shown(message) for message in item.messages[:PREVIEW_MESSAGES]]})
        else:
            bad_rows += 1
            if len(errors) < KEPT_ERRORS:
                errors.append({"line": item.line, "message": item.message, "excerpt": item.excerpt})
    if rows == 0 and bad_rows == 0:
        raise DataError("the file has no rows", place="line 1", remedy="Put one JSON object on each line.")
    return {"format": row_format, "row_count": rows, "bad_row_count": bad_rows, "errors": errors, "preview": {"rows": preview}}


def _count_lines(path: Path) -> int:
    count = 0
    with path.open("rb") as file:
        while block := file.read(COUNT_BLOCK_BYTES):
            count += block.count(b"\n")
    return count


def _shown(message: dict[str, Any]) -> dict[str, str]:
    content = str(message["content"])
    if len(content) > PREVIEW_CHARACTERS:
        content = content[:PREVIEW_CHARACTERS] + " …"
    return {"role": str(message["role"]), "content": content}
