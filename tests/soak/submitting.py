"""Asks the appliance for runs as a user does, over REST: a base model, a dataset, runs, and more of them when these end too soon."""

from __future__ import annotations

import secrets
import subprocess
import sys
import threading
import time
from contextlib import suppress
from http.client import HTTPException
from typing import Any, Self

from fixtures.appliance import environment_of
from fixtures.rows import messages_rows, write_jsonl
from fixtures.tiny_model import make_tiny_model
from sqlalchemy import Engine, func, select
from sqlalchemy.exc import DBAPIError

from lohan.errors import LohanError
from lohan_app.db import read_transaction
from lohan_app.demo.client import Client
from lohan_app.entities import Run
from lohan_app.entities.runs import TERMINAL_STATES
from tests.soak.arrangements import Appliance

LIMIT_SECONDS = 600.0
FEWEST_UNFINISHED = 3
"""With two devices: one of them waits in the queue."""
LOOK_SECONDS = 0.5
UNREADY = ("uploading", "validating", "inspecting")


def make_client(appliance: Appliance) -> Client:
    """A client with a key made by the product's own command."""
    done = subprocess.run(
        [sys.executable, "-m", "lohan_app.cli", "api-key", "create", "soak", "--scopes", "read,datasets,runs,admin"],
        env=environment_of(appliance.settings), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return Client(appliance.url, done.stdout.split()[-1])


class Submitter:
    """Queues runs, so many at first; inside its `with` block, in a thread, another one whenever too few are left to be disturbed."""

    def __init__(self, appliance: Appliance, engine: Engine, *, steps: int) -> None:
        self.run_ids: list[str] = []
        self._engine, self._steps, self._settings = engine, steps, appliance.settings
        self._client = make_client(appliance)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._refill, daemon=True)

    def submit(self, count: int) -> None:
        models = self._settings.model_dirs[0]
        make_tiny_model(models / "tiny")
        rows = write_jsonl(models.parent / "rows.jsonl", messages_rows(32))
        model = self._client.post("/base-models", {"source": "folder", "root": str(models), "name": "tiny"})
        dataset = self._client.upload("/datasets", rows, name="rows")
        self._ids = {"base_model_id": model["id"], "dataset_id": dataset["id"]}
        for path in (f"/base-models/{model['id']}", f"/datasets/{dataset['id']}"):
            found = self._client.wait(path, lambda found: found["state"] not in UNREADY, seconds=LIMIT_SECONDS)
            assert found["state"] == "ready", found
        for _ in range(count):
            self._submit(secrets.token_hex(16))

    def states(self) -> list[str]:
        """What the REST API says of each run."""
        return [self._client.get(f"/runs/{run_id}")["state"] for run_id in self.run_ids]

    def _submit(self, key: str) -> None:
        """Every second run is recorded by snapshots instead of at every step; the weights are the same."""
        number = len(self.run_ids)
        recorded = {"durability": "snapshot", "snapshot_minutes": 0.1} if number % 2 else {"durability": "step"}
        body: dict[str, Any] = {
            "name": f"soak {number}", **self._ids,
            "training": {
                "max_steps": self._steps, "batch_size": 4, "sequence_length": 64, "learning_rate": 1e-3, "evaluation_rows": 4,
                "precision": "fp32",
            },
            "engine": {"threads": 1, **recorded},
        }  # fmt: skip
        self.run_ids.append(str(self._client.post("/runs", body, **{"Idempotency-Key": key})["id"]))

    def _refill(self) -> None:
        while not self._done.wait(LOOK_SECONDS):
            if self._unfinished() < FEWEST_UNFINISHED:
                self._submit_under_fire()

    def _submit_under_fire(self) -> None:
        """Ask again with the same key until there is an answer: however often it was heard, it is one run."""
        key, answered = secrets.token_hex(16), len(self.run_ids) + 1
        while len(self.run_ids) < answered:
            with suppress(LohanError, OSError, ValueError, HTTPException):
                self._submit(key)
            time.sleep(LOOK_SECONDS)

    def _unfinished(self) -> int:
        try:
            with read_transaction(self._engine) as session:
                return session.scalar(select(func.count()).select_from(Run).where(Run.state.not_in(TERMINAL_STATES))) or 0
        except DBAPIError:
            return FEWEST_UNFINISHED

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        has_gone_on = self._thread.is_alive()
        self._done.set()
        self._thread.join(LIMIT_SECONDS)
        assert has_gone_on, "the submitter fell over; its traceback is above"
        assert not self._thread.is_alive(), "a submission was never answered"
