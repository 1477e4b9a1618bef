"""The io task's work on a dataset: have its rows checked in a limited child and write down what came out."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Engine

from lohan.errors import LohanError
from lohan_app.datasets import repository
from lohan_app.datasets.service import rows_path
from lohan_app.db import read_transaction, write_transaction
from lohan_app.entities import DatasetFormat, DatasetState
from lohan_app.entities.base import now
from lohan_app.settings import Settings
from lohan_app.worker.limited import run_limited


def validate_dataset(settings: Settings, engine: Engine, dataset_id: str) -> None:
    """Check a dataset that is `validating`; anything else (done already, deleted) is left as it is."""
    with read_transaction(engine) as session:
        dataset = repository.get(session, dataset_id)
    if dataset is None or dataset.state is not DatasetState.VALIDATING:
        return

    def store_progress(fraction: float) -> None:
        with write_transaction(engine) as session:
            repository.move(session, dataset_id, source=DatasetState.VALIDATING, progress=fraction)

    try:
        found = run_limited("lohan_app.datasets.row_check", [str(rows_path(settings, dataset_id))], settings, on_progress=store_progress)
    except LohanError as error:
        _store(engine, dataset_id, state=DatasetState.INVALID, problem=error.to_dict())
        return
    _store(engine, dataset_id, errors=found["errors"], **_outcome(found))


def _outcome(found: dict[str, Any]) -> dict[str, Any]:
    rows, bad_rows = int(found["row_count"]), int(found["bad_row_count"])
    values: dict[str, Any] = {"row_count": rows, "bad_row_count": bad_rows, "preview": found["preview"], "problem": None}
    values["format"] = DatasetFormat(found["format"]) if found["format"] else None
    if rows == 0:
        first = found["errors"][0]
        values["state"] = DatasetState.INVALID
        values["problem"] = {
            "kind": "DataError",
            "message": f"none of the {bad_rows} rows can be used; the first: {first['message']}",
            "place": f"line {first['line']}",
            "remedy": "Correct the rows and upload the file again.",
        }
    else:
        values["state"] = DatasetState.HAS_BAD_ROWS if bad_rows else DatasetState.READY
    return values


def _store(engine: Engine, dataset_id: str, *, errors: list[dict[str, Any]] | None = None, **values: Any) -> None:
    """One transaction: readers see the verdict with its rows, or neither."""
    with write_transaction(engine) as session:
        if repository.move(session, dataset_id, source=DatasetState.VALIDATING, progress=1.0, validated_at=now(), **values):
            repository.replace_row_errors(session, dataset_id, errors or [])
