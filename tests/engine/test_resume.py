"""A run that is resumed goes on as if nothing had happened: the same losses and the same weights, bit for bit."""

from __future__ import annotations

import os
import resource
import shutil
import signal
from collections.abc import Callable
from typing import Any

import pytest

from lohan.cli.show import describe
from lohan.config import Durability, RunConfig, parse_run_config
from lohan.events import EventReader, EventType, EventWriter, ExitReason, Phase
from lohan.hardware.probe import occupied_bytes, probe
from lohan.planning.fit import SSD_RESERVE_BYTES
from lohan.planning.plan import Plan
from lohan.planning.tiers import Tier
from lohan.states.record import FOLDER, read_record
from lohan.streaming.executor import Session
from lohan.training.loop import train
from lohan.training.plan_run import plan_run, prepare_run, state_directories
from lohan.training.reporter import next_attempt
from tests.engine.resumed_runs import STEPS, check_equal, events_of, make_config
from tests.fixtures.rows import messages_rows, write_jsonl


class Killed(BaseException):
    """What a trainer's process cannot survive; nothing in it can catch this one."""


def train_until(config: RunConfig, step: int) -> None:
    """Train, and fall over when `step` has been reported."""

    def listener(kind: EventType, fields: dict[str, Any]) -> None:
        if kind is EventType.STEP and fields["step"] == step:
            raise Killed

    with pytest.raises(Killed):
        train(config, listener=listener)


@pytest.fixture(scope="module")
def references(tmp_path_factory) -> dict[str, RunConfig]:
    """Runs that were never interrupted, by precision."""
    return {}


def reference(references: dict[str, RunConfig], tmp_path_factory: Any, precision: str) -> RunConfig:
    if precision not in references:
        references[precision] = make_config(tmp_path_factory.mktemp(f"whole_{precision}"), precision=precision)
        assert train(references[precision], attempt=1) is ExitReason.SUCCEEDED
    return references[precision]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_three_falls_change_nothing(tmp_path, tmp_path_factory, references, precision):
    whole = reference(references, tmp_path_factory, precision)
    config = make_config(tmp_path, precision=precision)
    for step in (2, 6, 7):
        train_until(config, step)
    assert train(config) is ExitReason.SUCCEEDED
    check_equal(config, whole)
    # Each fell when its step had been reported and before it was recorded.
    assert [event["resumed_step"] for event in events_of(config, EventType.STARTED)] == [0, 1, 5, 6]
    evaluations = events_of(config, EventType.EVALUATION)
    assert [(event["when"], event["attempt"]) for event in evaluations] == [("before", 1), ("after", 4)]
    assert evaluations == [
        event | {"attempt": evaluations[at]["attempt"]} for at, event in enumerate(events_of(whole, EventType.EVALUATION))
    ]
    assert not list((config.output.directory / "states").rglob("*.bin"))


def test_a_run_goes_on_with_other_states_in_ram(tmp_path, tmp_path_factory, references):
    """A plan that is made anew may find more host memory, or less: where states lie is in no record, and changes no bit."""
    for step, ram_bytes in ((2, 0), (5, 1 << 19), (8, 1 << 30), (10, 1 << 20)):
        train_until(make_config(tmp_path, ram_state_bytes=ram_bytes), step)
    config = make_config(tmp_path)
    assert train(config) is ExitReason.SUCCEEDED
    check_equal(config, reference(references, tmp_path_factory, "fp32"))
    assert [event["resumed_step"] for event in events_of(config, EventType.STARTED)] == [0, 1, 4, 7, 9]


def test_a_run_goes_on_with_the_chunks_it_began_with(tmp_path, tmp_path_factory, references):
    """Whatever a plan that is made anew would choose."""
    train_until(make_config(tmp_path, chunk_parameters=2048), 4)
    config = make_config(tmp_path, ram_state_bytes="auto")
    assert plan_run(config).chunk_parameters != 2048
    train_until(config, 8)
    assert Plan.model_validate_json((config.output.directory / "plan.json").read_text()).chunk_parameters == 2048
    assert train(make_config(tmp_path, chunk_parameters=4096)) is ExitReason.FAILED
    assert "chunks of another size" in events_of(config, EventType.EXIT)[-1]["error"]["message"]
    assert train(config) is ExitReason.SUCCEEDED
    check_equal(config, reference(references, tmp_path_factory, "fp32"))


def test_a_resumed_run_says_so_and_does_not_read_the_model_again(tmp_path):
    config = make_config(tmp_path)
    train_until(config, 5)
    (config.model.path / "model.safetensors").rename(config.model.path / "aside")
    with pytest.raises(Killed):
        train(config, listener=_fall_in_training)
    (config.model.path / "aside").rename(config.model.path / "model.safetensors")
    first, second = events_of(config, EventType.STARTED)
    assert (first["resumed_step"], first["loss"]) == (0, None)
    assert second["resumed_step"] == 4
    assert second["loss"] == events_of(config, EventType.STEP)[3]["loss"]
    assert describe(EventType.STARTED, second, config).endswith(", resumed at step 4")
    assert not describe(EventType.STARTED, first, config).endswith("resumed at step 0")
    details = [event["detail"] for event in events_of(config, EventType.PHASE) if event["attempt"] == 2]
    assert "Opening the states of step 4." in details
    assert "7 steps of 4 rows." in details


def _fall_in_training(kind: EventType, fields: dict[str, Any]) -> None:
    if kind is EventType.PHASE and fields["phase"] == Phase.TRAINING:
        raise Killed


def test_a_run_that_fell_while_exporting_only_exports(tmp_path, tmp_path_factory, references):
    config = make_config(tmp_path)

    def listener(kind: EventType, fields: dict[str, Any]) -> None:
        if kind is EventType.PHASE and fields["phase"] == Phase.EXPORTING:
            raise Killed

    with pytest.raises(Killed):
        train(config, listener=listener)
    assert train(config) is ExitReason.SUCCEEDED
    assert [event["step"] for event in events_of(config, EventType.STEP)] == list(range(1, STEPS + 1))
    check_equal(config, reference(references, tmp_path_factory, "fp32"))


def test_another_run_is_not_resumed(tmp_path):
    """Other settings or rows would make a run that is neither the old one nor a new one."""
    config = make_config(tmp_path)
    train_until(config, 3)
    write_jsonl(tmp_path / "rows.jsonl", messages_rows(15))
    changed = make_config(tmp_path, learning_rate=1e-4)
    assert train(changed) is ExitReason.FAILED
    error = events_of(config, EventType.EXIT)[-1]["error"]
    assert error["kind"] == "ResumeError"
    assert "training.learning_rate is 0.0001, before it was 0.002" in error["message"]
    assert "rows are others" in error["message"]
    # Nothing was touched: put back, it goes on.
    write_jsonl(tmp_path / "rows.jsonl", messages_rows(14))
    assert train(config) is ExitReason.SUCCEEDED
    assert events_of(config, EventType.STARTED)[-1]["resumed_step"] == 2


def test_a_run_that_fell_before_its_first_record_begins_again(tmp_path, tmp_path_factory, references):
    config = make_config(tmp_path)
    for fall in (_fall_in_training, _fall_at_first_step):
        with pytest.raises(Killed):
            train(config, listener=fall)
    assert train(config) is ExitReason.SUCCEEDED
    assert [event["resumed_step"] for event in events_of(config, EventType.STARTED)] == [0, 0, 0]
    check_equal(config, reference(references, tmp_path_factory, "fp32"))


def _fall_at_first_step(kind: EventType, fields: dict[str, Any]) -> None:
    if kind is EventType.STEP:
        raise Killed


def test_events_are_on_the_drive_before_their_step_is_recorded(tmp_path, monkeypatch):
    done: list[str] = []
    for owner, name in ((EventWriter, "sync"), (Session, "commit")):
        original = getattr(owner, name)

        def noting(*arguments: Any, name: str = name, original: Any = original) -> None:
            done.append(name)
            original(*arguments)

        monkeypatch.setattr(owner, name, noting)
    config = make_config(tmp_path, max_steps=2)
    assert train(config) is ExitReason.SUCCEEDED
    assert done == ["sync", "commit"] * 2
    done.clear()
    plain = config.model_copy(update={"engine": config.engine.model_copy(update={"durability": Durability.NONE})})
    assert train(plain) is ExitReason.SUCCEEDED
    assert done == []


def test_a_cancelled_run_leaves_no_states_and_an_interrupted_one_keeps_them(tmp_path):
    config = make_config(tmp_path)

    def at_third(action: Callable[[], object]) -> Callable[[EventType, dict[str, Any]], None]:
        def listener(kind: EventType, fields: dict[str, Any]) -> None:
            if kind is EventType.STEP and fields["step"] == 3:
                action()

        return listener

    assert train(config, listener=at_third(lambda: os.kill(os.getpid(), signal.SIGTERM))) is ExitReason.INTERRUPTED
    record = read_record([config.output.directory / "states"])
    assert record is not None
    assert record.step == 3
    control = config.output.directory / "control.json"
    control.write_text('{"wanted": "cancel"}')
    assert train(config) is ExitReason.CANCELLED
    assert list((config.output.directory / "states").rglob("*.*")) == []


def test_a_run_folder_moves(tmp_path, tmp_path_factory, references):
    """Copied to another place, its states to another drive: the run file names them anew, nothing else is changed."""
    config = make_config(tmp_path / "old")
    train_until(config, 6)
    new = tmp_path / "new"
    shutil.copytree(tmp_path / "old", new)
    shutil.move(new / "run" / "states", new / "drive")
    shutil.rmtree(tmp_path / "old")
    moved = parse_run_config(
        {
            **make_config(new).model_dump(),
            "engine": config.engine.model_copy(update={"state_directories": (new / "drive",)}).model_dump(),
        },
        place="test",
    )
    assert train(moved) is ExitReason.SUCCEEDED
    assert events_of(moved, EventType.STARTED)[-1]["resumed_step"] == 5
    check_equal(moved, reference(references, tmp_path_factory, "fp32"))


def test_without_durability_a_run_begins_again(tmp_path, tmp_path_factory, references):
    config = make_config(tmp_path)
    config = config.model_copy(update={"engine": config.engine.model_copy(update={"durability": Durability.NONE})})
    train_until(config, 3)
    assert list((config.output.directory / "states").rglob("*.*")) == []
    assert train(config) is ExitReason.SUCCEEDED
    assert [event["resumed_step"] for event in events_of(config, EventType.STARTED)] == [0, 0]
    check_equal(config, reference(references, tmp_path_factory, "fp32"))


def test_the_attempt_is_counted_where_it_is_not_given(tmp_path):
    assert next_attempt(tmp_path) == 1
    for attempt in (1, 4):
        writer = EventWriter(tmp_path / "events.jsonl", attempt=attempt)
        writer.write(EventType.WARNING, message="")
        writer.close()
    assert next_attempt(tmp_path) == 5


def test_an_event_that_a_full_drive_cuts_short_is_an_error_and_never_joins_the_next(tmp_path):
    """The kernel writes what there is room for and reports only that; the limit on a file's size stands for a drive's."""
    path = tmp_path / "events.jsonl"
    writer = EventWriter(path, attempt=1)
    writer.write(EventType.WARNING, message="whole")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            writer.write(EventType.WARNING, message="cut short")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    writer.write(EventType.EXIT, reason=ExitReason.FAILED)
    writer.close()
    reader = EventReader(path)
    assert [(event.seq, event.type) for event in reader.read()] == [(1, EventType.WARNING), (3, EventType.EXIT)]
    assert reader.malformed == 1


def test_what_the_states_occupy_is_not_asked_for_twice(tmp_path, monkeypatch):
    """A drive more than half full of this run's own states still has room for them."""
    config = make_config(tmp_path)
    directory = config.output.directory / "states" / FOLDER
    directory.mkdir(parents=True)
    (directory / "first_moment.bin").write_bytes(bytes(3 << 20))
    (config.output.directory / "events.jsonl").write_bytes(bytes(5 << 20))
    occupied = occupied_bytes(directory)
    assert 3 << 20 <= occupied < 4 << 20
    facts = probe(state_directories(config))
    monkeypatch.setattr("lohan.training.plan_run.probe", lambda _: facts)  # what is free changes beside other processes
    expected = facts.state_directories[0].free_bytes - SSD_RESERVE_BYTES + occupied
    assert plan_run(config).tier(Tier.SSD).capacity_bytes == expected


def test_the_micro_batch_of_before_is_taken_where_it_fits(tmp_path):
    config = make_config(tmp_path)
    free = config.model_copy(update={"engine": config.engine.model_copy(update={"micro_batch_size": None})})
    assert plan_run(free).micro_batch_size == 4
    assert prepare_run(free, micro_batch_size=2).plan.micro_batch_size == 2
    assert prepare_run(config, micro_batch_size=2).plan.micro_batch_size == 3
