"""The service's benchmark at a small size: every case runs on its database and is recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks import service


def cases(records: list[dict], database: str) -> dict[str, dict]:
    return {record["case"]: record for record in records if record["database"] == database}


def test_a_small_run_is_recorded_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    output = tmp_path / "service.json"
    assert service.main(["--steps", "3000", "--runs", "120", "--output", str(output)]) == 0
    found = json.loads(output.read_text())
    assert (found["schema"], found["name"]) == (1, "service")
    shown = capsys.readouterr().out
    assert "skipped: no server was named" in shown
    sqlite = cases([record for record in found["records"] if "case" in record], "sqlite")
    assert {"run page", "ten curves, all steps", "list of 120 runs by REST", "a step is stored"} <= sqlite.keys()
    assert all(case in shown for case in sqlite)
    for record in sqlite.values():
        assert len(record["seconds_all"]) == service.REPEATS and record["statements"] > 0
    # How much is sent does not grow with the run.
    assert sqlite["loss curve, all steps"]["bytes"] < sqlite["page's points, all steps"]["bytes"] < 600_000


@pytest.mark.database(only="postgres")
def test_postgresql_runs_the_same_cases(tmp_path: Path, postgres_url: str):
    records = service.bench(tmp_path / "data", steps=500, runs=3, database_url=postgres_url)
    assert len(cases(records, "postgresql")) == len(records) == 11
