"""The real trainer under the real appliance: a tiny model trains to its end although its supervisor, its worker and itself are killed.

Nothing is sent by hand: the rows stand in the database as if every message had been lost, and the reconciler sends them again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixtures.appliance import REAL_UP_COMMAND, Appliance, TrainerCount, free_port
from fixtures.processes import no_process_left
from fixtures.rows import messages_rows
from fixtures.runs import read_events, read_metrics, read_run, want
from fixtures.tiny_model import make_tiny_model
from fixtures.waiting import wait_until
from safetensors.numpy import load_file

from lohan_app.datasets.service import rows_path
from lohan_app.db import read_transaction, write_transaction
from lohan_app.entities import BaseModel, BaseModelSource, BaseModelState, Dataset, DatasetState, Role, Run, RunState, User, Wanted
from lohan_app.entities.base import now
from lohan_app.settings import Settings
from lohan_app.worker.launcher import RunFiles

STEPS = 150
LOST = timedelta(minutes=5)


@pytest.fixture
def appliance(tmp_path: Path) -> Iterator[Appliance]:
    (tmp_path / "models").mkdir()
    make_tiny_model(tmp_path / "models" / "tiny")
    settings = Settings(data_dir=tmp_path / "data", model_dirs=(tmp_path / "models",), devices=("cpu:0",), port=free_port())
    with no_process_left(tmp_path):
        appliance = Appliance(settings, command=REAL_UP_COMMAND)
        try:
            appliance.start()
            yield appliance
        finally:
            appliance.close()


def register(appliance: Appliance) -> tuple[str, str, str]:
    """A user, a model to inspect and a dataset to validate, five minutes old; their ids."""
    then = now() - LOST
    with write_transaction(appliance.engine) as session:
        user = User(name="runner", password_hash="!", role=Role.MEMBER)
        root = str(appliance.settings.model_dirs[0])
        model = BaseModel(
            name="tiny", source=BaseModelSource.FOLDER, root=root, path_in_root="tiny", state=BaseModelState.INSPECTING, created_at=then
        )
        session.add_all([user, model])
        session.flush()
        dataset = Dataset(owner_id=user.id, name="rows", state=DatasetState.UPLOADING, created_at=then)
        session.add(dataset)
        session.flush()
        ids = user.id, model.id, dataset.id
    path = rows_path(appliance.settings, ids[2])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in messages_rows(32)))
    with write_transaction(appliance.engine) as session:
        found = session.get(Dataset, ids[2])
        assert found is not None
        found.state = DatasetState.VALIDATING
    return ids


def is_ready(appliance: Appliance, model_id: str, dataset_id: str) -> bool:
    with read_transaction(appliance.engine) as session:
        model, dataset = session.get(BaseModel, model_id), session.get(Dataset, dataset_id)
    assert model is not None
    assert dataset is not None
    assert (model.state, dataset.state) != (BaseModelState.INVALID, DatasetState.INVALID), (model.problem, dataset.problem)
    return (model.state, dataset.state) == (BaseModelState.READY, DatasetState.READY)


def submit(appliance: Appliance, ids: tuple[str, str, str], **columns: Any) -> str:
    training = {
        "max_steps": STEPS,
        "batch_size": 4,
        "sequence_length": 64,
        "learning_rate": 1e-3,
        "evaluation_rows": 4,
        "precision": "fp32",
    }
    with write_transaction(appliance.engine) as session:
        run = Run(
            owner_id=ids[0], base_model_id=ids[1], dataset_id=ids[2], name="tiny", devices=[], created_at=now() - LOST,
            settings={"training": training, "engine": {"threads": 1, "durability": "step", "unsafe_filesystems": "allow"}}, **columns,
        )  # fmt: skip
        session.add(run)
        session.flush()
        return run.id


def weights(appliance: Appliance, run_id: str) -> dict[str, np.ndarray]:
    (file,) = (appliance.settings.run_folder(run_id) / "export").glob("*.safetensors")
    return load_file(file)


def curve(appliance: Appliance, run_id: str) -> list[tuple[int, float | None, float | None, float]]:
    return [(point.step, point.loss, point.gradient_norm, point.learning_rate) for point in read_metrics(appliance.engine, run_id)]


def test_a_real_run_survives_the_kill_of_supervisor_worker_and_trainer(appliance: Appliance) -> None:
    ids = register(appliance)
    wait_until(lambda: is_ready(appliance, ids[1], ids[2]), timeout_seconds=120, what="the model and the rows")
    run_id = submit(appliance, ids)
    with TrainerCount(appliance, run_id) as count:
        wait_until(lambda: read_run(appliance.engine, run_id).step >= 2, timeout_seconds=180, what="step 2")
        first = appliance.trainers(run_id)[0]
        first.suspend()  # holds the run where it is, as a very long step would
        appliance.supervisor(run_id).kill()
        appliance.worker().kill()
        wait_until(lambda: read_run(appliance.engine, run_id).epoch == 2, timeout_seconds=120, what="the next supervisor")
        assert [found.pid for found in appliance.trainers(run_id)] == [first.pid], "adopted, not started again"
        done = read_run(appliance.engine, run_id).step
        first.resume()
        wait_until(lambda: read_run(appliance.engine, run_id).step > done, what="another step")
        first.kill()
        run = appliance.wait_for_end(run_id)
    assert count.most == 1
    resumed = run.resumed_step
    assert resumed is not None
    # No step begins before the one before it is recorded.
    assert resumed >= done
    appliance.check_whole_curve(run_id, attempt=2, resumed_step=resumed)
    assert run.state_reason == ""
    assert run.first_loss is not None
    assert run.last_loss is not None
    assert run.last_loss < 0.8 * run.first_loss
    export = appliance.settings.run_folder(run_id) / "export"
    assert {"config.json", "tokenizer.json"} <= {path.name for path in export.iterdir()}
    assert not (appliance.settings.state_folders[0] / run_id).exists()
    check_equals_an_undisturbed_run(appliance, ids, run)


def check_equals_an_undisturbed_run(appliance: Appliance, ids: tuple[str, str, str], run: Run) -> None:
    other = appliance.wait_for_end(submit(appliance, ids))
    assert (other.attempt, other.resumed_step) == (1, None)
    assert curve(appliance, run.id) == curve(appliance, other.id)
    assert (run.first_loss, run.last_loss) == (other.first_loss, other.last_loss)
    found, expected = weights(appliance, run.id), weights(appliance, other.id)
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        assert np.array_equal(weight, expected[name]), name


def test_a_real_run_is_paused_retried_from_its_states_and_stopped_with_its_result(appliance: Appliance) -> None:
    """What it has recorded goes from the run that failed to the one that retries it, and from there into the result."""
    ids = register(appliance)
    wait_until(lambda: is_ready(appliance, ids[1], ids[2]), timeout_seconds=120, what="the model and the rows")
    run_id = submit(appliance, ids)
    wait_until(lambda: read_run(appliance.engine, run_id).step >= 2, timeout_seconds=180, what="step 2")
    want(appliance.engine, run_id, Wanted.PAUSE)
    wait_until(lambda: read_run(appliance.engine, run_id).state is RunState.PAUSED, timeout_seconds=60, what="the pause")
    step = read_run(appliance.engine, run_id).step
    assert 2 <= step < STEPS
    last = read_events(appliance.engine, run_id)[-1]
    log = RunFiles(appliance.settings.run_folder(run_id)).trainer_log
    assert last.fields.get("reason") == "paused", (last.attempt, last.type, last.fields, log.read_text()[-2000:] if log.exists() else "")
    with write_transaction(appliance.engine) as session:
        run = session.get(Run, run_id)
        assert run is not None
        run.state = RunState.FAILED  # as a fault would have left it
    retry = submit(appliance, ids, parent_id=run_id, wanted=Wanted.STOP)
    ended = appliance.wait_for_end(retry)
    assert (ended.resumed_step, ended.step, ended.stopped_step) == (step, step, step)
    assert read_metrics(appliance.engine, retry) == [], "it does no step of its own"
    assert (appliance.settings.run_folder(retry) / "export" / "config.json").exists()
    assert weights(appliance, retry)
    assert not (appliance.settings.state_folders[0] / run_id).exists()
    assert not (appliance.settings.state_folders[0] / retry).exists()
