"""Which steps of a run are traced, and when its file is written."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lohan.config import RunConfig
from lohan.events import EventType, ExitReason
from lohan.streaming.executor import Session
from lohan.training.loop import train
from lohan.training.tracing import TraceReport, TraceRequest
from tests.engine.test_training import events_of, make_config


def train_traced(config: RunConfig, folder, *, steps: int = 2, **options: Any) -> tuple[ExitReason, list[TraceReport], list[int]]:
    """Why the run ended, the reports it gave, and how many steps' events there were at each of them."""
    reports, said = [], []

    def note(report: TraceReport) -> None:
        reports.append(report)
        said.append(len(events_of(config, EventType.STEP)))

    reason = train(config, trace=TraceRequest(folder / "trace.json", steps, note), **options)
    return reason, reports, said


def traced_steps(folder) -> list[str]:
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    return [event["name"] for event in events if event.get("cat") == "step"]


def test_the_file_is_there_once_the_step_behind_the_last_is_done(tmp_path):
    reason, (report,), said = train_traced(make_config(tmp_path), tmp_path)
    assert reason is ExitReason.SUCCEEDED
    assert [step.step for step in report.steps] == [2, 3]
    assert report.steps[0].end_seconds == report.steps[1].start_seconds
    assert (said, report.path, report.on_gpu) == ([3], tmp_path / "trace.json", False)
    assert traced_steps(tmp_path) == ["step 2", "step 3"]


@pytest.mark.parametrize(("max_steps", "expected"), [(1, [1]), (2, [2]), (3, [2, 3])])
def test_a_short_run_is_traced_as_far_as_it_goes(max_steps, expected, tmp_path):
    _, (report,), _ = train_traced(make_config(tmp_path, max_steps=max_steps), tmp_path)
    assert [step.step for step in report.steps] == expected


def test_a_run_that_fails_leaves_what_was_traced(tmp_path, monkeypatch):
    wait = Session.wait_gradients

    def failing_wait(session):
        wait(session)
        if session.steps == 3:
            raise RuntimeError("the third step")

    monkeypatch.setattr(Session, "wait_gradients", failing_wait)
    reason, (report,), _ = train_traced(make_config(tmp_path), tmp_path, steps=4)
    assert reason is ExitReason.FAILED
    assert [step.step for step in report.steps] == [2, 3]
    assert traced_steps(tmp_path) == ["step 2", "step 3"]


def test_a_run_that_ends_before_says_so(tmp_path, monkeypatch):
    config = make_config(tmp_path)
    monkeypatch.setattr(Session, "wait_gradients", lambda _: (_ for _ in ()).throw(RuntimeError("the first step")))
    reason, reports, _ = train_traced(config, tmp_path)
    assert (reason, reports) == (ExitReason.FAILED, [])
    assert not (tmp_path / "trace.json").exists()
    assert any("No step was traced" in event["message"] for event in events_of(config, EventType.WARNING))


def test_a_file_that_cannot_be_written_in_the_end_does_not_fail_the_run(tmp_path):
    config = make_config(tmp_path)
    (tmp_path / "trace.json").mkdir()
    reason, reports, _ = train_traced(config, tmp_path)
    assert (reason, reports) == (ExitReason.SUCCEEDED, [])
    assert any("trace cannot be written" in event["message"] for event in events_of(config, EventType.WARNING))


def test_a_resumed_run_is_traced_from_its_second_step_on(tmp_path, monkeypatch):
    config = make_config(tmp_path, engine={"durability": "step"})
    wait = Session.wait_gradients

    def interrupted_wait(session):
        wait(session)
        if session.steps == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(Session, "wait_gradients", interrupted_wait)
    assert train(config) is ExitReason.INTERRUPTED
    monkeypatch.setattr(Session, "wait_gradients", wait)
    _, (report,), _ = train_traced(config, tmp_path)
    resumed = events_of(config, EventType.STARTED)[-1]["resumed_step"]
    assert resumed > 0
    assert [step.step for step in report.steps] == [resumed + 2, resumed + 3]
