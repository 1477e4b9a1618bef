"""Preparing a run: its rows become a token file in a limited child, or the run fails with the reason."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest
from fixtures.service import Person
from fixtures.things import ready_dataset, ready_model
from fixtures.tiny_model import make_tiny_tokenizer
from safetensors.numpy import load_file
from sqlalchemy import Engine

from lohan.errors import EngineError
from lohan_app.base_models.service import model_folder
from lohan_app.db import read_transaction, write_transaction
from lohan_app.entities import PauseCause, Run, RunState, Wanted
from lohan_app.entities.base import now
from lohan_app.runs import prepare, repository
from lohan_app.runs.prepare import prepare_run
from lohan_app.runs.states import Trigger
from lohan_app.settings import Settings


def queued(engine: Engine, owner: Person, model, dataset, **values) -> str:
    settings = {"training": {"sequence_length": 64}, "engine": {}}
    columns = {"skip_bad_rows": False, "state": RunState.QUEUED, "settings": settings} | values
    run = Run(owner_id=owner.user.id, name="r", base_model_id=model.id, dataset_id=dataset.id, devices=[], **columns)
    with write_transaction(engine) as session:
        session.add(run)
    return run.id


def stored(engine: Engine, run_id: str) -> Run:
    with read_transaction(engine) as session:
        run = session.get(Run, run_id)
    assert run is not None
    return run


@pytest.mark.database
def test_rows_become_tokens_and_the_run_can_start(owner: Person, settings: Settings, engine: Engine):
    run_id = queued(engine, owner, ready_model(settings, engine), ready_dataset(settings, engine, owner, rows=5))
    prepare_run(settings, engine, run_id)
    run = stored(engine, run_id)
    assert (run.state, run.state_reason, run.phase, run.phase_progress) == (RunState.QUEUED, "", "", None)
    assert run.prepared_at is not None
    tokens = load_file(settings.run_folder(run_id) / "tokens.safetensors")
    assert len(tokens["offsets"]) == 6 and len(tokens["input_ids"]) == len(tokens["labels"]) == tokens["offsets"][-1]
    assert (tokens["labels"] == -100).any() and (tokens["labels"] != -100).any()


def test_bad_rows_are_left_out_where_that_was_chosen(owner: Person, settings: Settings, engine: Engine):
    model, dataset = ready_model(settings, engine), ready_dataset(settings, engine, owner, rows=3, bad_lines=("{", "[]"))
    run_id = queued(engine, owner, model, dataset, skip_bad_rows=True)
    prepare_run(settings, engine, run_id)
    assert len(load_file(settings.run_folder(run_id) / "tokens.safetensors")["offsets"]) == 4


def test_bad_rows_stop_the_run_otherwise(owner: Person, settings: Settings, engine: Engine):
    model, dataset = ready_model(settings, engine), ready_dataset(settings, engine, owner, rows=3, bad_lines=("{",))
    run_id = queued(engine, owner, model, dataset)
    prepare_run(settings, engine, run_id)
    run = stored(engine, run_id)
    assert run.state is RunState.FAILED and run.finished_at is not None
    assert run.problem is not None and "line 4" in run.problem["message"]
    assert run.problem["cause"] == "data"
    assert "line 4" in owner.client.get(f"/api/v1/runs/{run_id}").json()["state_reason"]


def test_a_broken_tokenizer_fails_the_run_with_the_reason(owner: Person, settings: Settings, engine: Engine):
    model, dataset = ready_model(settings, engine), ready_dataset(settings, engine, owner)
    (model_folder(settings, model.id) / "tokenizer.json").write_text("{")
    run_id = queued(engine, owner, model, dataset)
    prepare_run(settings, engine, run_id)
    run = stored(engine, run_id)
    assert run.state is RunState.FAILED
    assert run.problem is not None and run.problem["kind"] == "ModelError"


def test_a_chat_template_that_never_ends_fails_the_run_with_the_reason(owner: Person, settings: Settings, engine: Engine):
    model, dataset = ready_model(settings, engine), ready_dataset(settings, engine, owner)
    endless = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"
    make_tiny_tokenizer(model_folder(settings, model.id), chat_template=endless)
    run_id = queued(engine, owner, model, dataset)
    prepare_run(settings.model_copy(update={"worker_cpu_seconds": 3}), engine, run_id)
    run = stored(engine, run_id)
    assert run.state is RunState.FAILED
    # On a busy machine the clock's limit, twice the processor's, is reached first.
    assert run.problem is not None and run.problem["kind"] == "LimitError"


WAITING_FOR_NOTHING = [{"state": RunState.CANCELLED}, {"wanted": Wanted.CANCEL}, {"state": RunState.RUNNING}]


@pytest.mark.database
@pytest.mark.parametrize("values", WAITING_FOR_NOTHING, ids=["cancelled", "to be cancelled", "running"])
def test_a_run_that_does_not_wait_is_left_alone(owner: Person, settings: Settings, engine: Engine, values: dict):
    run_id = queued(engine, owner, ready_model(settings, engine), ready_dataset(settings, engine, owner), **values)
    prepare_run(settings, engine, run_id)
    assert stored(engine, run_id).prepared_at is None
    assert not (settings.run_folder(run_id) / "tokens.safetensors").exists()


@pytest.mark.database
def test_a_second_message_changes_nothing(owner: Person, settings: Settings, engine: Engine):
    run_id = queued(engine, owner, ready_model(settings, engine), ready_dataset(settings, engine, owner))
    prepare_run(settings, engine, run_id)
    before = stored(engine, run_id).prepared_at
    tokens = settings.run_folder(run_id) / "tokens.safetensors"
    inode = tokens.stat().st_ino
    prepare_run(settings, engine, run_id)
    prepare_run(settings, engine, "run_unknown")
    assert (stored(engine, run_id).prepared_at, tokens.stat().st_ino) == (before, inode)


def refusing(error: Exception, between: Callable[[], None] = lambda: None) -> Callable[..., None]:
    def run_limited(*_arguments: object, **_options: object) -> None:
        between()
        raise error

    return run_limited


@pytest.mark.database
def test_a_full_drive_pauses_a_run_that_is_being_prepared(owner: Person, settings: Settings, engine: Engine, monkeypatch):
    run_id = queued(engine, owner, ready_model(settings, engine), ready_dataset(settings, engine, owner))
    monkeypatch.setattr(prepare, "run_limited", refusing(OSError(errno.ENOSPC, "No space left on device")))
    prepare_run(settings, engine, run_id)
    run = stored(engine, run_id)
    assert (run.state, run.pause_cause, run.problem) == (RunState.PAUSED, PauseCause.DISK_FULL, None)
    assert run.start_after is not None


@pytest.mark.database
@pytest.mark.parametrize("state", [RunState.STARTING, RunState.RUNNING, RunState.SUCCEEDED, RunState.CANCELLED, RunState.QUEUED])
def test_a_task_that_fails_late_leaves_the_run_alone(owner: Person, settings: Settings, engine: Engine, monkeypatch, state: RunState):
    """Its message had come twice: the other task has prepared the run, which may have gone on since."""
    run_id = queued(engine, owner, ready_model(settings, engine), ready_dataset(settings, engine, owner))

    def other_task() -> None:
        with write_transaction(engine) as session:
            run = session.get(Run, run_id)
            assert run is not None
            run.state, run.prepared_at = state, now()

    monkeypatch.setattr(prepare, "run_limited", refusing(EngineError("killed"), other_task))
    prepare_run(settings, engine, run_id)
    run = stored(engine, run_id)
    assert (run.state, run.problem) == (state, None)


@pytest.mark.database
def test_a_run_that_is_paused_while_it_is_prepared_keeps_the_work(owner: Person, settings: Settings, engine: Engine, monkeypatch):
    run_id = queued(engine, owner, ready_model(settings, engine), ready_dataset(settings, engine, owner))
    whole = prepare.run_limited

    def paused_meanwhile(*arguments, **options):
        with write_transaction(engine) as session:
            repository.fire(session, run_id, Trigger.REQUEST_PAUSE)
        return whole(*arguments, **options)

    monkeypatch.setattr(prepare, "run_limited", paused_meanwhile)
    prepare_run(settings, engine, run_id)
    run = stored(engine, run_id)
    assert run.state is RunState.PAUSED
    assert run.prepared_at is not None
