"""Runs of the real trainer on two devices while random processes of the appliance are killed, and servers and drives fail.

`make test-soak SECONDS=600 FAULT=redis SEED=7 DATABASE=sqlite` is the whole one; the plain test run kills for a minute. What happened
stands in `soak.jsonl` of the test's folder, line by line, and in the report that is printed at the end; the same seed makes the same
schedule.
"""

from __future__ import annotations

import json
import os
import random
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from fixtures.machine import in_ci
from fixtures.processes import no_process_left
from sqlalchemy.exc import DBAPIError

from lohan_app.db import create_db_engine
from tests.engine import power_cut
from tests.soak import judge, postgresql
from tests.soak.arrangements import Appliance, Database, lohan_up, servers
from tests.soak.killer import Killer
from tests.soak.schedule import Fault, Victim, make_schedule
from tests.soak.submitting import Submitter
from tests.soak.victims import find
from tests.soak.witness import TrainerWitness, audit_transitions

SECONDS = float(os.environ.get("LOHAN_SOAK_SECONDS", "60"))
FAULT = Fault(os.environ.get("LOHAN_SOAK_FAULT", "none"))
SEED = int(os.environ.get("LOHAN_SOAK_SEED") or random.randrange(10**6))  # noqa: S311
DATABASE = Database(os.environ.get("LOHAN_SOAK_DATABASE", "postgres"))
RUNS = 10
"""At first; whenever few are left while processes are still being killed, more are queued."""
STEPS = 60 + int(max(0.0, SECONDS - 60) / 2)
DRIVE_BYTES = 4 << 30
"""Sparse; above what a plan and the service leave free on every drive."""


@pytest.mark.timeout(0)  # the drain has a limit of its own: when nothing happens any more
def test_runs_survive_whatever_is_killed(tmp_path: Path) -> None:
    assert FAULT is not Fault.POSTGRES or DATABASE is Database.POSTGRES, "FAULT=postgres needs DATABASE=postgres"
    if DATABASE is Database.POSTGRES and postgresql.programs() is None:
        assert not in_ci(), "CI: no PostgreSQL server programs"
        pytest.skip("no PostgreSQL server programs (initdb): install them, or say DATABASE=sqlite")
    if FAULT is Fault.DISK and (refusal := power_cut.refusal("ext4", to_be_cut=False)):
        pytest.skip(refusal)
    began = time.monotonic()
    (tmp_path / "models").mkdir()
    with ExitStack() as stack:
        is_on_drive = FAULT is Fault.DISK
        drive = stack.enter_context(power_cut.LoopDrive(tmp_path, "ext4", image_bytes=DRIVE_BYTES)).folder if is_on_drive else None
        stack.enter_context(no_process_left(tmp_path))  # a trainer that is left holds the drive
        data_dir = (drive or tmp_path) / "data"
        appliance = stack.enter_context(servers(tmp_path, data_dir) if DATABASE is Database.POSTGRES else lohan_up(tmp_path, data_dir))
        soak(appliance, tmp_path, drive, began)


def soak(appliance: Appliance, place: Path, drive: Path | None, began: float) -> None:
    settings, engine = appliance.settings, create_db_engine(appliance.settings)
    submitter = Submitter(appliance, engine, steps=STEPS)
    audit_transitions(engine)
    submitter.submit(RUNS)
    killer = Killer(appliance, place / "soak.jsonl", drive)
    report = Report(began)
    with TrainerWitness(settings.data_dir / "runs") as witness:
        try:
            with submitter:
                # From the first trainer on, so that a short soak on a busy machine finds each kind of process.
                appliance.wait(lambda: find(place, Victim.TRAINER), timeout_seconds=600, what="a trainer")
                killer.work(make_schedule(SEED, SECONDS, appliance.victims, FAULT), SECONDS)
                appliance.wait(appliance.is_ready, timeout_seconds=600, what="the appliance after the last kill")
            judge.drain(appliance, engine, submitter.run_ids)
        finally:
            report.add(hits=dict(killer.done), meetings=witness.meetings, looks=witness.looks, diary=str(place / "soak.jsonl"))
            with suppress(DBAPIError):  # whatever ended the soak is to be seen
                report.add(**judge.describe(engine, submitter.run_ids))
            report.show()
    judge.check_succeeded_once(settings, engine, submitter.run_ids)
    assert witness.meetings == []
    assert set(submitter.states()) == {"succeeded"}
    judge.check_weights(settings, submitter.run_ids, place / "undisturbed")
    engine.dispose()


class Report:
    """What is printed when the runs have ended, well or not."""

    def __init__(self, began: float) -> None:
        self._began = began
        self._values = {"seed": SEED, "seconds": SECONDS, "fault": FAULT, "database": DATABASE, "steps": STEPS}
        self.add(ready_seconds=round(time.monotonic() - began))

    def add(self, **values: object) -> None:
        self._values |= values

    def show(self) -> None:
        self.add(ended_seconds=round(time.monotonic() - self._began))
        print("", *(f"{name}: {json.dumps(value)}" for name, value in self._values.items()), sep="\n")
