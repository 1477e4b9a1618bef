"""Runs that are ended at somebody's request: paused and gone on with, or stopped with what they have learned kept."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lohan.cli.show import describe
from lohan.config import RunConfig
from lohan.errors import StopRequested
from lohan.events import EventType, ExitReason
from lohan.states.record import read_record
from lohan.training.loop import train
from lohan.training.plan_run import state_directories
from lohan.training.stopping import Control, StopWatch
from tests.engine.resumed_runs import STEPS, check_equal, events_of, make_config

Listener = Callable[[EventType, dict[str, Any]], None]


def ask(config: RunConfig, wanted: str) -> None:
    (config.output.directory / "control.json").write_text(json.dumps({"wanted": wanted}))


def asking(config: RunConfig, wanted: str, *, at_step: int) -> Listener:
    def listener(kind: EventType, fields: dict[str, Any]) -> None:
        if kind is EventType.STEP and fields["step"] == at_step:
            ask(config, wanted)

    return listener


def exits(config: RunConfig) -> list[tuple[str, int | None]]:
    return [(event["reason"], event["stopped_step"]) for event in events_of(config, EventType.EXIT)]


@contextmanager
def watching(folder: Path, wanted: str | None, *, signalled: bool) -> Iterator[StopWatch]:
    if wanted is not None:
        (folder / "control.json").write_text(wanted)
    with StopWatch(folder) as stop:
        if signalled:
            os.kill(os.getpid(), signal.SIGTERM)
        yield stop


@pytest.mark.parametrize(
    ("wanted", "signalled", "left", "enough", "reason"),
    [
        (None, False, False, False, None),
        (None, True, True, False, ExitReason.INTERRUPTED),
        ('{"wanted": "cancel"}', False, True, False, ExitReason.CANCELLED),
        ('{"wanted": "cancel"}', True, True, False, ExitReason.CANCELLED),
        ('{"wanted": "pause"}', False, True, False, ExitReason.PAUSED),
        ('{"wanted": "pause"}', True, True, False, ExitReason.PAUSED),
        ('{"wanted": "stop"}', False, False, True, None),
        # The host stops while the result is being made: it is made at the next start.
        ('{"wanted": "stop"}', True, True, True, ExitReason.INTERRUPTED),
        ('{"wanted": "dance"}', False, False, False, None),
        ('["cancel"]', False, False, False, None),
        ("{", True, True, False, ExitReason.INTERRUPTED),
    ],
)
def test_what_a_file_and_a_signal_mean_together(tmp_path, wanted, signalled, left, enough, reason):
    with watching(tmp_path, wanted, signalled=signalled) as stop:
        assert (stop.is_asked, stop.is_enough, stop.is_cancelled) == (left, enough, stop.control is Control.CANCEL)
        if not left:
            stop.check()
            return
        assert stop.reason is reason
        with pytest.raises(StopRequested):
            stop.check()


@pytest.mark.parametrize("durability", ["step", "snapshot"])
def test_a_paused_run_goes_on_as_if_nothing_had_happened(tmp_path, durability):
    whole = make_config(tmp_path / "whole")
    assert train(whole) is ExitReason.SUCCEEDED
    config = make_config(tmp_path / "paused", durability=durability)
    assert train(config, listener=asking(config, "pause", at_step=3)) is ExitReason.PAUSED
    record = read_record(state_directories(config))
    assert record is not None
    assert record.step == 3
    # Still wanted: it does not take a step.
    assert train(config) is ExitReason.PAUSED
    (config.output.directory / "control.json").unlink()
    assert train(config) is ExitReason.SUCCEEDED
    assert exits(config) == [("paused", None), ("paused", None), ("succeeded", None)]
    assert [event["step"] for event in events_of(config, EventType.STEP)] == list(range(1, STEPS + 1))
    check_equal(config, whole)


@pytest.mark.parametrize("durability", ["step", "snapshot", "none"])
def test_a_stopped_run_exports_what_it_has_learned(tmp_path, durability):
    """The same weights as a run of so many steps under a constant learning rate."""
    short = make_config(tmp_path / "short", schedule="constant", max_steps=4)
    assert train(short) is ExitReason.SUCCEEDED
    config = make_config(tmp_path / "stopped", schedule="constant", durability=durability)
    assert train(config, listener=asking(config, "stop", at_step=4)) is ExitReason.SUCCEEDED
    assert exits(config) == [("succeeded", 4)]
    assert [event["when"] for event in events_of(config, EventType.EVALUATION)] == ["before", "after"]
    assert (config.output.directory / "export" / "model.safetensors").read_bytes() == (
        short.output.directory / "export" / "model.safetensors"
    ).read_bytes()
    assert "stopped early at step 4: the model is in" in describe(EventType.EXIT, events_of(config, EventType.EXIT)[0], config)
    assert read_record(state_directories(config)) is None, "nothing goes on from a result"


def test_stopping_waits_for_the_first_step(tmp_path):
    config = make_config(tmp_path)
    config.output.directory.mkdir(parents=True)
    ask(config, "stop")
    assert train(config) is ExitReason.SUCCEEDED
    assert exits(config) == [("succeeded", 1)]


def test_a_paused_run_that_is_stopped_exports_without_another_step(tmp_path):
    config = make_config(tmp_path)
    assert train(config, listener=asking(config, "pause", at_step=3)) is ExitReason.PAUSED
    ask(config, "stop")
    assert train(config) is ExitReason.SUCCEEDED
    assert exits(config)[-1] == ("succeeded", 3)
    assert [event["step"] for event in events_of(config, EventType.STEP)] == [1, 2, 3]


def test_stopping_in_the_last_step_is_no_early_end(tmp_path):
    config = make_config(tmp_path)
    assert train(config, listener=asking(config, "stop", at_step=STEPS)) is ExitReason.SUCCEEDED
    assert exits(config) == [("succeeded", None)]
