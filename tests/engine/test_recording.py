"""Which steps a trainer records and keeps, and that a run goes on from any of them as if nothing had happened."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from lohan.cli import register
from lohan.cli.commands import ExitCode
from lohan.config import Durability, RunConfig, parse_run_config
from lohan.errors import ConfigError, StorageError
from lohan.events import EventType, ExitReason
from lohan.states.copies import Copier
from lohan.states.named import NAMED_FOLDER
from lohan.states.record import FOLDER, RecordFile, read_record
from lohan.states.state_store import StateStore
from lohan.training import recording
from lohan.training.loop import train
from tests.engine.resumed_runs import STEPS, check_equal, curve_of, events_of, make_config
from tests.engine.test_resume import Killed, train_until

NEVER = 10_000.0
ALWAYS = 1e-9


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> RunConfig:
    """A run that was never interrupted."""
    config = make_config(tmp_path_factory.mktemp("whole"))
    assert train(config, attempt=1) is ExitReason.SUCCEEDED
    return config


@pytest.fixture
def recorded(monkeypatch) -> list[int]:
    """The steps whose record was written."""
    steps: list[int] = []
    original = RecordFile.write

    def write(self, step, parts, payload):
        if self.path.parent.name == FOLDER:
            steps.append(step)
        return original(self, step, parts, payload)

    monkeypatch.setattr(RecordFile, "write", write)
    return steps


def snapshots(folder, *, minutes: float = NEVER, **options: Any) -> RunConfig:
    return make_config(folder, durability="snapshot", snapshot_minutes=minutes, **options)


def at(step: int, action: Callable[[], object]) -> Callable[[EventType, dict[str, Any]], None]:
    def listener(kind: EventType, fields: dict[str, Any]) -> None:
        if kind is EventType.STEP and fields["step"] == step:
            action()

    return listener


def stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def directory_of(config: RunConfig):
    return config.output.directory / "states"


def warnings_of(config: RunConfig) -> list[str]:
    return [event["message"] for event in events_of(config, EventType.WARNING)]


# ---------------------------------------------------------------- snapshots
@pytest.mark.parametrize("ram_bytes", [0, 222_000, 1 << 30], ids=["ssd", "half", "ram"])
def test_only_the_last_step_is_recorded_while_no_snapshot_is_due(ram_bytes, tmp_path, whole, recorded):
    config = snapshots(tmp_path, ram_state_bytes=ram_bytes)
    assert train(config) is ExitReason.SUCCEEDED
    assert recorded == [0, STEPS]
    check_equal(config, whole)


def test_every_step_is_recorded_when_each_is_due(tmp_path, whole, recorded):
    config = snapshots(tmp_path, minutes=ALWAYS)
    assert train(config) is ExitReason.SUCCEEDED
    assert recorded == list(range(STEPS + 1))
    check_equal(config, whole)


def test_snapshots_come_by_the_clock(tmp_path, monkeypatch, recorded):
    """Time passes only between steps, half a minute each."""
    seconds = [0.0]
    monkeypatch.setattr(recording, "monotonic", lambda: seconds[0])

    def listener(kind: EventType, _fields: dict[str, Any]) -> None:
        if kind is EventType.STEP:
            seconds[0] += 30

    assert train(snapshots(tmp_path, minutes=2), listener=listener) is ExitReason.SUCCEEDED
    assert recorded == [0, 4, 8, STEPS]


def test_a_run_that_is_stopped_makes_a_snapshot_first_and_goes_on_from_it(tmp_path, whole, recorded):
    config = snapshots(tmp_path, ram_state_bytes=222_000)
    assert train(config, listener=at(3, stop)) is ExitReason.INTERRUPTED
    assert recorded == [0, 3]
    assert train(config, listener=at(7, stop)) is ExitReason.INTERRUPTED
    assert train(config) is ExitReason.SUCCEEDED
    assert [event["resumed_step"] for event in events_of(config, EventType.STARTED)] == [0, 3, 7]
    check_equal(config, whole)


def test_a_run_that_is_cancelled_makes_none(tmp_path, recorded):
    config = snapshots(tmp_path)

    def cancel() -> None:
        (config.output.directory / "control.json").write_text('{"wanted": "cancel"}')

    assert train(config, listener=at(3, cancel)) is ExitReason.CANCELLED
    assert recorded == [0]


def test_a_killed_run_goes_on_from_its_last_snapshot(tmp_path, whole):
    config = snapshots(tmp_path, minutes=ALWAYS)
    train_until(config, 4)  # which fell before it was recorded
    config = snapshots(tmp_path)
    train_until(config, 9)
    assert train(config) is ExitReason.SUCCEEDED
    assert [event["resumed_step"] for event in events_of(config, EventType.STARTED)] == [0, 3, 3]
    check_equal(config, whole)


def test_a_killed_run_without_a_snapshot_begins_again(tmp_path, whole):
    config = snapshots(tmp_path)
    train_until(config, 4)
    assert train(config) is ExitReason.SUCCEEDED
    assert [event["resumed_step"] for event in events_of(config, EventType.STARTED)] == [0, 0]
    check_equal(config, whole)


def test_a_snapshot_at_the_stop_that_cannot_be_made_is_said(tmp_path, monkeypatch):
    config = snapshots(tmp_path)
    original = StateStore.commit

    def commit(self, step, payload):
        if step:
            raise StorageError("the drive is gone", place="drive")
        original(self, step, payload)

    monkeypatch.setattr(StateStore, "commit", commit)
    assert train(config, listener=at(3, stop)) is ExitReason.FAILED
    assert "the drive is gone" in events_of(config, EventType.EXIT)[-1]["error"]["message"]


# ---------------------------------------------------------------- named snapshots
@pytest.mark.parametrize("durability", ["step", "snapshot"])
def test_steps_are_kept_and_a_run_goes_on_from_each(durability, tmp_path, whole):
    config = make_config(tmp_path, durability=durability, snapshot_minutes=NEVER, keep_steps=(3, 7))
    assert train(config) is ExitReason.SUCCEEDED
    names = sorted(path.name for path in (directory_of(config) / NAMED_FOLDER).iterdir())
    assert names == ["step-000003", "step-000007"]
    check_equal(config, whole)
    assert not list((directory_of(config) / FOLDER).rglob("*.bin")), "the run's own states are gone"
    for step, name in ((7, "step-000007"), (3, "step-000003")):
        train_from(config, name, until=9)
        assert train(config) is ExitReason.SUCCEEDED
        started = [event["resumed_step"] for event in events_of(config, EventType.STARTED)]
        assert started[-2:] == [step, 8 if durability == "step" else 7]
        check_equal(config, whole)
    assert warnings_of(config) == [message for message in warnings_of(config) if "step-000007 already" in message]


def train_from(config: RunConfig, name: str, *, until: int) -> None:
    """Go on from a named snapshot, and fall over when step `until` has been reported."""

    def fall() -> None:
        raise Killed

    with pytest.raises(Killed):
        train(config, resume_from=name, listener=at(until, fall))


def test_a_snapshot_that_was_broken_off_is_made_when_the_run_goes_on(tmp_path, whole):
    config = make_config(tmp_path, keep_steps=(3,))
    assert train(config, listener=at(3, stop)) is ExitReason.INTERRUPTED
    (directory_of(config) / NAMED_FOLDER / "step-000003" / "record.json").unlink()
    assert train(config) is ExitReason.SUCCEEDED
    assert (directory_of(config) / NAMED_FOLDER / "step-000003" / "record.json").exists()
    assert not warnings_of(config)
    check_equal(config, whole)


def test_a_snapshot_that_cannot_be_made_is_a_warning(tmp_path, whole, monkeypatch):
    def fail(*_values):
        raise StorageError("the drive is full", place="drive")

    monkeypatch.setattr(Copier, "copy", fail)
    config = make_config(tmp_path, keep_steps=(3, STEPS - 1, STEPS))
    assert train(config) is ExitReason.SUCCEEDED
    said = warnings_of(config)
    assert len(said) == 3 and all("could not be made: the drive is full" in message for message in said)
    check_equal(config, whole)


def test_what_is_named_has_to_be_there(tmp_path):
    config = make_config(tmp_path, keep_steps=(3,))
    train_until(config, 5)
    for name, kind in (("step-000004", "ResumeError"), ("../x", "ConfigError")):
        assert train(config, resume_from=name) is ExitReason.FAILED
        assert events_of(config, EventType.EXIT)[-1]["error"]["kind"] == kind
    assert read_record([directory_of(config)]) is not None, "the run's own states stay"
    none = config.model_copy(update={"engine": config.engine.model_copy(update={"durability": Durability.NONE})})
    assert train(none, resume_from="step-000003") is ExitReason.FAILED
    assert events_of(config, EventType.EXIT)[-1]["error"]["kind"] == "ConfigError"
    values = config.model_dump(mode="json")
    values["engine"]["durability"] = "none"
    with pytest.raises(ConfigError, match="keep_steps"):
        parse_run_config(values, place="test")


def test_the_command_line_takes_the_name(tmp_path, whole):
    config = make_config(tmp_path, keep_steps=(3,))
    train_until(config, 5)
    before = curve_of(config)
    run_file = tmp_path / "run.toml"
    engine = "\n".join(
        f"{name} = {value!r}".replace("'", '"')
        for name, value in {"device": "cpu", "micro_batch_size": 3, "threads": 1, "unsafe_filesystems": "allow"}.items()
    )
    training = "\n".join(
        f"{name} = {value!r}".replace("'", '"').replace("(3,)", "[3]")
        for name, value in config.training.model_dump().items()
        if name
        in ("batch_size", "sequence_length", "max_steps", "learning_rate", "warmup_steps", "weight_decay", "seed", "evaluation_rows")
    )
    run_file.write_text(
        f'[model]\npath = "model"\n[data]\npath = "rows.jsonl"\n[training]\nprecision = "fp32"\n{training}\n[engine]\n{engine}\n'
        '[output]\ndirectory = "run"\n'
    )
    application = typer.Typer()
    register(application)
    result = CliRunner().invoke(application, ["train", str(run_file), "--resume-from", "step-000003"])
    assert result.exit_code == ExitCode.SUCCEEDED, result.output
    assert "resumed at step 3" in result.output
    assert before == curve_of(config)[: len(before)]
    check_equal(config, whole)
