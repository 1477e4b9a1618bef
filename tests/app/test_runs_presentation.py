"""A run in words: phases, events and settings as pages print them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from lohan.events import Phase
from lohan_app.entities import RunEvent, RunKind, RunState, Wanted
from lohan_app.entities.base import now
from lohan_app.runs.presentation import describe_events, describe_settings, fraction, phase_line, summary_fields
from lohan_app.runs.schemas import RunDetail


def run(**values: Any) -> RunDetail:
    fields: dict[str, Any] = dict.fromkeys(RunDetail.model_fields)
    fields |= dict.fromkeys(("id", "owner_id", "owner_name", "name", "base_model_id", "base_model_name", "dataset_id"), "x")
    fields |= {"dataset_name": "x", "skip_bad_rows": False, "wanted": Wanted.RUN, "state": RunState.RUNNING, "state_reason": ""}
    fields |= {
        "kind": RunKind.TRAIN,
        "allowed": [],
        "devices": [],
        "attempt": 1,
        "phase": "",
        "step": 0,
        "priority": 0,
        "total_steps": 0,
        "created_at": now(),
        "prepared_at": now(),
    }
    return RunDetail.model_validate(fields | {"settings": {}} | values)


def event(seq: int, type: str, **fields: Any) -> RunEvent:
    return RunEvent(run_id="run", attempt=1, seq=seq, time=1_800_000_000.0 + seq, type=type, fields=fields)


def statuses(detail: RunDetail) -> list[str]:
    return [phase["status"] for phase in phase_line(detail)]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"state": RunState.QUEUED, "prepared_at": None}, "later later later later later later"),
        ({"state": RunState.QUEUED, "prepared_at": None, "phase": "preparing_data"}, "now later later later later later"),
        ({"state": RunState.QUEUED}, "done later later later later later"),
        ({"state": RunState.STARTING}, "done now later later later later"),
        ({"phase": "evaluating"}, "done done now later later later"),
        ({"phase": "training", "step": 3}, "done done done now later later"),
        ({"phase": "evaluating", "step": 9}, "done done done done now later"),
        ({"phase": "exporting", "step": 9, "state": RunState.FAILED}, "done done done done done failed"),
        ({"state": RunState.SUCCEEDED, "phase": "exporting"}, "done done done done done done"),
    ],
)
def test_the_phase_line_says_where_the_run_is(values: dict[str, Any], expected: str) -> None:
    assert statuses(run(**values)) == expected.split()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"phase": "training", "step": 5, "total_steps": 20}, 0.25),
        ({"phase": "loading_model", "phase_progress": 0.5}, 0.5),
        ({"phase": "exporting"}, None),
        ({"state": RunState.FAILED, "step": 5, "total_steps": 20}, 0.25),
        ({"state": RunState.QUEUED}, 0.0),
        ({"state": RunState.SUCCEEDED}, 1.0),
    ],
)
def test_the_bar_is_as_full_as_the_work_is_done(values: dict[str, Any], expected: float | None) -> None:
    assert fraction(run(**values)) == expected


def test_of_many_reports_of_a_phase_one_is_told() -> None:
    told = describe_events(
        [
            event(1, "started", device="cpu", parameters=134_500_000),
            event(2, "phase", phase="loading_model", progress=0.1, detail="Reading 4 units."),
            event(3, "phase", phase="loading_model", progress=0.9, detail="Reading 4 units."),
            event(4, "evaluation", when="before", rows=8, loss=None),
            event(5, "warning", message="3 rows were cut.", remedy="Raise the sequence length."),
            event(6, "plan_corrected", ratio=1.4, detail="The first steps took 1.40 times as long as foreseen."),
            event(7, "plan_corrected"),
            event(8, "exit", reason="failed", error={"message": "disk full"}),
        ]
    )
    assert [entry["text"] for entry in told] == [
        "Failed: disk full",
        "The plan was corrected by what the first steps took",
        "The first steps took 1.40 times as long as foreseen.",
        "3 rows were cut. Raise the sequence length.",
        "Mean loss over 8 rows before the first step: not a finite number",
        "Reading 4 units.",
        "Trainer started on cpu with 134.5 M parameters",
    ]
    assert [entry["tone"] for entry in told[:4]] == ["bad", "", "", "warn"]


def test_an_event_with_other_fields_than_expected_is_still_told() -> None:
    told = describe_events(
        [event(1, "exit", reason="?", error="?"), event(2, "phase"), event(3, "news", x=1), event(4, "started", parameters="?")]
    )
    assert len(told) == 4


def test_a_resumed_trainer_says_from_where() -> None:
    (told,) = describe_events([RunEvent(run_id="run", attempt=3, seq=1, time=1e9, type="started", fields={"resumed_step": 1200})])
    assert told["text"] == "Trainer started on its device (attempt 3), resumed from step 1,200"
    assert describe_events([event(4, "started", resumed_step="?")])[0]["text"] == "Trainer started on its device"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"attempt": 1}, ""),
        ({"attempt": 2}, "attempt 2"),
        ({"attempt": 2, "resumed_step": 1200}, "attempt 2, resumed from step 1,200"),
    ],
)
def test_attempts_are_told_from_the_second_on(values: dict[str, Any], expected: str) -> None:
    assert summary_fields(run(**values), tokens_per_second=None, may_write=True)["attempt_text"] == expected


def test_a_silent_trainer_is_pointed_out() -> None:
    silent = run(heartbeat_at=now() - timedelta(minutes=5))
    assert summary_fields(silent, tokens_per_second=None, may_write=True)["is_silent"]
    busy = run(heartbeat_at=now())
    assert not summary_fields(busy, tokens_per_second=None, may_write=True)["is_silent"]


def test_settings_print_as_people_wrote_them() -> None:
    settings = {"training": {"learning_rate": 2e-5, "batch_size": 4096, "max_steps": None}, "engine": {"gpu_memory_bytes": 3 * 2**29}}
    assert describe_settings(run(settings=settings)) == [
        ("Batch size", "4,096"),
        ("Learning rate", "2e-5"),
        ("GPU memory at most", "1.5 GiB"),
    ]


@pytest.mark.parametrize(
    ("kind", "phase", "progress", "line", "settings"),
    [
        (RunKind.PROFILE, Phase.MEASURING, 0.25, [("Measuring", "now")], [("Device", "cpu"), ("Drives", "Left out")]),
        (RunKind.EXPORT, Phase.EXPORTING, 0.5, [("Opening the states", "done"), ("Exporting", "now")], [("Weights", "fp32")]),
        (
            RunKind.CHAT,
            Phase.ANSWERING,
            0.5,
            [("Loading the model", "done"), ("Answering", "now")],
            [("Device", "auto"), ("Tokens at most", "512"), ("Temperature", "0.7"), ("Seed", "7"), ("GPU memory reserved", "3.00 GiB")],
        ),
    ],
)
def test_runs_that_make_no_steps_have_their_own_phases(
    kind: RunKind, phase: Phase, progress: float, line: list[tuple[str, str]], settings: list[tuple[str, str]]
) -> None:
    stored: dict[str, Any] = {"profile": {"device": "cpu", "drives": False}, "export": {"dtype": "fp32"}, "needs": {"ram_bytes": 2 * 2**30}}
    stored["chat"] = {"device": "auto", "max_new_tokens": 512, "temperature": 0.7, "seed": 7, "messages": []}
    if kind is RunKind.CHAT:
        stored["needs"]["gpu_bytes"] = 3 * 2**30
    shown = run(kind=kind, phase=phase, phase_progress=progress, settings=stored)
    assert [(step["label"], step["status"]) for step in phase_line(shown)] == line
    assert fraction(shown) == progress
    assert describe_settings(shown) == [*settings, ("RAM reserved", "2.00 GiB")]
    ended = run(kind=kind, state=RunState.SUCCEEDED, settings=stored)
    assert {step["status"] for step in phase_line(ended)} == {"done"}


def test_the_two_schedules_of_a_run_are_told_apart():
    settings = {"training": {"schedule": "linear", "clip": "global", "max_gradient_norm": 0.5}, "engine": {"schedule": "serial"}}
    assert describe_settings(run(settings=settings)) == [
        ("Schedule", "linear"),
        ("Gradient clipping", "global"),
        ("Largest gradient norm", "0.5"),
        ("Updates", "serial"),
    ]
