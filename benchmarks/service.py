"""Times what people wait for in the service when its database is full: pages, curves, news, lists (`make bench-service`).

In this process, without a network or a browser: what is timed is routing, queries and JSON. One run of `--steps` steps with ten numbers
each, and `--runs` runs in the list. PostgreSQL joins where `--postgres URL` names a server on which a database may be made.

    python -m benchmarks.service --output benchmarks/results/service.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, create_engine, event, text, update
from sqlalchemy.engine import make_url
from starlette.testclient import TestClient

from lohan.config import UnsafeFilesystems
from lohan.events import Event, EventType
from lohan_app.auth import service as auth
from lohan_app.auth.dependencies import SESSION_COOKIE
from lohan_app.db import create_db_engine, migrate, read_transaction, write_transaction
from lohan_app.entities import (
    BaseModel,
    BaseModelSource,
    BaseModelState,
    Dataset,
    DatasetState,
    Role,
    Run,
    RunState,
    SetupClaim,
    User,
)
from lohan_app.main import create_app
from lohan_app.runs import curves, queries, repository
from lohan_app.settings import Settings

BASE_URL = "http://localhost:8000"
REPEATS = 5
STEPS, RUNS = 200_000, 1_000

# Deterministic, uneven, with gaps: 7919 is prime, so a thousand losses come before one comes again.
_FILL = """
    INSERT INTO run_metrics (run_id, step, attempt, seq, time, loss, learning_rate, gradient_norm, tokens, tokens_per_second,
        step_seconds, epoch, clip_rate, device_peak_bytes, host_bytes)
    WITH RECURSIVE counter(step) AS (SELECT 1 UNION ALL SELECT step + 1 FROM counter WHERE step < :steps)
    SELECT :run_id, step, 1, step, 1.7e9 + step, CASE WHEN step % 5003 = 0 THEN NULL ELSE 1.0 + (step * 7919 % 1000) / 1000.0 END,
        0.001, 0.5 + step % 17, 4096, 1000.0 + step % 101, 0.25 + (step % 7) / 100.0, step / 10000.0, (step % 100) / 100.0,
        20000000000 + step, 60000000000 + step
    FROM counter
"""


def fill_run(engine: Engine, run_id: str, steps: int) -> None:
    """Store the steps 1 to `steps` of a run that has none, in two statements."""
    with write_transaction(engine) as session:
        session.execute(text(_FILL), {"run_id": run_id, "steps": steps})
        curves.refresh(session, run_id, first_step=1, last_step=steps)
        session.execute(update(Run).where(Run.id == run_id).values(step=steps, total_steps=2 * steps))


def make_runs(engine: Engine, count: int) -> tuple[User, list[str]]:
    """An administrator with `count` runs of one model, the first of them at work; returns the runs' ids, oldest first."""
    with write_transaction(engine) as session:
        user = User(name="bench", password_hash="!", role=Role.ADMIN)  # noqa: S106 - nobody can log in with it
        model = BaseModel(name="model", source=BaseModelSource.FOLDER, root="models", path_in_root="model", state=BaseModelState.READY)
        session.add_all([user, model])
        session.flush()
        dataset = Dataset(owner_id=user.id, name="rows", state=DatasetState.READY)
        session.add_all([dataset, SetupClaim(id=1, user_id=user.id)])
        session.flush()
        common = {"owner_id": user.id, "base_model_id": model.id, "dataset_id": dataset.id, "settings": {}, "devices": []}
        runs = [Run(name=f"run {number}", state=RunState.SUCCEEDED, attempt=1, **common) for number in range(count)]
        runs[0].state = RunState.RUNNING
        session.add_all(runs)
        session.flush()
        return user, [run.id for run in runs]


@contextmanager
def counted(engine: Engine) -> Iterator[list[str]]:
    """The statements that are executed meanwhile, besides SQLite's own BEGIN."""
    statements: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if not statement.startswith("BEGIN"):
            statements.append(statement)

    event.listen(engine, "before_cursor_execute", note)
    try:
        yield statements
    finally:
        event.remove(engine, "before_cursor_execute", note)


class Bench:
    """One database with a long run and a long list, and a browser's session at the service over it."""

    def __init__(self, settings: Settings, *, steps: int, runs: int) -> None:
        settings.make_folders()
        migrate(settings)
        self.engine = create_db_engine(settings)
        user, ids = make_runs(self.engine, runs)
        self.run_id, self.steps, self.runs = ids[0], steps, runs
        fill_run(self.engine, self.run_id, steps)
        self.app = create_app(settings)
        self.client = TestClient(self.app, base_url=BASE_URL)
        self.client.cookies.set(SESSION_COOKIE, auth.open_session(self.engine, user, address="bench").token)
        self.records: list[dict[str, Any]] = []

    def measure(self) -> list[dict[str, Any]]:
        """Each thing once to warm up and `REPEATS` times; the records."""
        api, middle = f"/api/v1/runs/{self.run_id}", self.steps // 2
        self._get("run page", f"/runs/{self.run_id}")
        self._get("loss curve, all steps", f"{api}/curves?metric=loss")
        self._get("ten curves, all steps", f"{api}/curves")
        self._get("loss curve, a twentieth", f"{api}/curves?metric=loss&after_step={middle}&to_step={middle + self.steps // 20}")
        self._get("ten curves, a twentieth", f"{api}/curves?after_step={middle}&to_step={middle + self.steps // 20}")
        self._get("page's points, all steps", f"{api}/metrics")
        self._get("page's points, what is new", f"{api}/metrics?after_step={self.steps - 1}")
        self._get("list page", "/runs")
        self._whole_list()
        self._append()
        return self.records

    def _get(self, case: str, path: str) -> None:
        accept = {"Accept": "application/json" if path.startswith("/api") else "text/html"}

        def work() -> int:
            reply = self.client.get(path, headers=accept)
            reply.raise_for_status()
            return len(reply.content)

        self._time(case, work)

    def _whole_list(self) -> None:
        def work() -> int:
            after, found, size_bytes = "", 0, 0
            while True:
                reply = self.client.get("/api/v1/runs?limit=100" + after)
                size_bytes += len(reply.content)
                page = reply.json()
                found += len(page["items"])
                if page["next_cursor"] is None:
                    assert found == self.runs
                    return size_bytes
                after = f"&after={page['next_cursor']}"

        self._time(f"list of {self.runs:,} runs by REST", work)

    def _append(self) -> None:
        """What one more step costs: the supervisor's transaction, and the look that feeds all streams."""

        def store() -> int:
            self.steps += 1
            fields = {"step": self.steps, "loss": 1.5, "learning_rate": 1e-3, "tokens": 4096, "step_seconds": 0.3}
            news = Event(attempt=1, seq=self.steps, time=2e9, type=EventType.STEP, fields=fields)
            with write_transaction(self.engine) as session:
                repository.record_events(session, self.run_id, epoch=0, events=[news], offset_bytes=0, malformed=0)
            return 0

        def look() -> int:
            with read_transaction(self.engine) as session:
                assert len(queries.events_after(session, self.run_id, (1, self.steps - 1), 500)) == 1
            return 0

        self._time("a step is stored", store)
        self._time("a step is found for the streams", look)

    def _time(self, case: str, work: Callable[[], int]) -> None:
        engines = {self.engine, self.app.state.context.engine}
        work()
        seconds = []
        for _ in range(REPEATS):
            begun = time.perf_counter()
            size_bytes = work()
            seconds.append(time.perf_counter() - begun)
        statements = 0
        for engine in engines:
            with counted(engine) as found:
                work()
            statements += len(found)
        self.records.append(
            {
                "database": self.engine.dialect.name,
                "case": case,
                "seconds": statistics.median(seconds),
                "seconds_all": seconds,
                "bytes": size_bytes,
                "statements": statements,
                "steps": self.steps,
                "runs": self.runs,
            }
        )

    def close(self) -> None:
        self.client.close()
        self.app.state.context.engine.dispose()
        self.engine.dispose()


@contextmanager
def postgresql_database(server: str) -> Iterator[str]:
    """URL of a new database on the server, dropped at the end."""
    url, name = make_url(server), f"lohan_bench_{uuid.uuid4().hex}"
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(f'CREATE DATABASE "{name}"'))
    try:
        yield url.set(database=name).render_as_string(hide_password=False)
    finally:
        with engine.connect() as connection:
            connection.execute(text(f'DROP DATABASE "{name}" WITH (FORCE)'))
        engine.dispose()


def bench(folder: Path, *, steps: int, runs: int, database_url: str | None = None) -> list[dict[str, Any]]:
    """The records of one database: SQLite in `folder`, or the empty PostgreSQL database at the URL."""
    url = {} if database_url is None else {"database_url": database_url}
    subject = Bench(
        Settings(data_dir=folder, unsafe_filesystems=UnsafeFilesystems.ALLOW, devices=("cpu:0",), **url), steps=steps, runs=runs
    )
    try:
        return subject.measure()
    finally:
        subject.close()


def document(records: list[dict[str, Any]]) -> dict[str, Any]:
    """As all recorded results: docs/development.md."""
    machine = {"processors": os.cpu_count(), "load_1_minute": os.getloadavg()[0], "python": platform.python_version()}
    return {"schema": 1, "name": "service", "date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine, "records": records}


def table(records: list[dict[str, Any]]) -> str:
    """For a terminal: the median of each case by database."""
    lines = [f"{'database':<12}{'case':<34}{'seconds':>9}{'statements':>12}{'bytes':>12}"]
    for record in records:
        if "skipped" in record:
            lines.append(f"{record['database']:<12}skipped: {record['skipped']}")
        else:
            lines.append(
                f"{record['database']:<12}{record['case']:<34}{record['seconds']:>9.4f}{record['statements']:>12}{record['bytes']:>12,}"
            )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.service", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--postgres", help="URL of a server on which a database may be made and dropped")
    parser.add_argument("--output", type=Path, help="write the records there as JSON")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        records = bench(Path(folder) / "sqlite", steps=options.steps, runs=options.runs)
        if options.postgres is None:
            records.append({"database": "postgresql", "skipped": "no server was named (--postgres)"})
        else:
            with postgresql_database(options.postgres) as url:
                records += bench(Path(folder) / "postgresql", steps=options.steps, runs=options.runs, database_url=url)
    print(table(records))
    if options.output is not None:
        options.output.write_text(json.dumps(document(records), indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
