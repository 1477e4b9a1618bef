"""How ends are judged: every exit code, every signal, with and without a last event."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from lohan_app.entities import Run
from lohan_app.runs.states import Trigger
from lohan_app.worker.trainer import Killed, TrainerEnd
from lohan_app.worker.verdict import (
    BACKOFF_SECONDS,
    DISK_FULL_SECONDS,
    MAX_LOST_ATTEMPTS,
    RESUME,
    RESUME_OR_START_AGAIN,
    START_AGAIN,
    Verdict,
    how_it_goes_on,
    judge,
)


def verdict(
    exit_fields: dict[str, Any] | None = None,
    status: int | None = 0,
    *,
    lost: int = 1,
    goes_on: str = START_AGAIN,
    out_of_memory: bool = False,
    killed: Killed | None = None,
    log: str = "",
) -> Verdict:
    end = TrainerEnd(status, out_of_memory, killed, 1800.0 if killed is Killed.HUNG else 0.0)
    return judge(exit_fields, end, lost_attempts=lost, goes_on=goes_on, log_tail=log, log_path="/runs/x/trainer.log")


@pytest.mark.parametrize("status", [0, None, -signal.SIGSEGV, 1])
def test_success_is_said_by_the_event_and_a_fall_after_it_takes_nothing_back(status: int | None) -> None:
    assert verdict({"reason": "succeeded"}, status) == Verdict(Trigger.SUCCEED)


@pytest.mark.parametrize(("fields", "status"), [({"reason": "cancelled"}, 4), (None, 4)])
def test_cancelled(fields: dict[str, Any] | None, status: int) -> None:
    assert verdict(fields, status).trigger is Trigger.END_EARLY
    assert verdict(fields, status).problem is None


@pytest.mark.parametrize(("fields", "status"), [({"reason": "paused"}, 6), (None, 6), ({"reason": "paused"}, None)])
def test_paused_is_never_a_failure(fields: dict[str, Any] | None, status: int | None) -> None:
    assert verdict(fields, status, lost=99, goes_on=RESUME) == Verdict(Trigger.END_EARLY, f"Paused by request. {RESUME}")


def test_a_result_that_was_wanted_early_says_of_which_step_it_is() -> None:
    found = verdict({"reason": "succeeded", "stopped_step": 1200}, 0)
    assert (found.trigger, found.stopped_step) == (Trigger.SUCCEED, 1200)
    assert found.reason.startswith("Stopped early at step 1,200")
    assert verdict({"reason": "succeeded", "stopped_step": None}, 0) == Verdict(Trigger.SUCCEED)


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        (
            {"reason": "failed", "error": {"message": "the drive is full", "place": "/s/a", "cause": "disk_full"}},
            1,
            "The drive is full (/s/a).",
        ),
        ({"reason": "failed", "error": {"cause": "disk_full"}}, 1, "The drive is full."),
        (None, 7, "The drive is full (/runs/x/trainer.log)."),
    ],
)
def test_a_full_drive_is_waited_for_however_often(fields: dict[str, Any] | None, status: int, words: str) -> None:
    for lost in (1, MAX_LOST_ATTEMPTS, 99):
        assert verdict(fields, status, lost=lost) == Verdict(Trigger.RUN_OUT_OF_SPACE, words, wait_seconds=DISK_FULL_SECONDS)


def test_a_lost_gpu_is_tried_again_before_the_run_is_given_up() -> None:
    error = {"kind": "EngineError", "message": "the GPU stopped answering: x", "place": "GPU", "remedy": "Look.", "cause": "lost_gpu"}
    for lost in range(1, MAX_LOST_ATTEMPTS):
        found = verdict({"reason": "failed", "error": error}, 1, lost=lost, goes_on=RESUME)
        assert (found.trigger, found.wait_seconds) == (Trigger.END_EARLY, BACKOFF_SECONDS[lost - 1])
        assert found.reason == f"The GPU stopped answering: x (attempt {lost} of {MAX_LOST_ATTEMPTS}). {RESUME}"
    last = verdict({"reason": "failed", "error": error}, 1, lost=MAX_LOST_ATTEMPTS)
    assert last.trigger is Trigger.FAIL
    assert last.problem is not None
    assert (last.problem["cause"], last.problem["remedy"]) == ("lost_gpu", "Look.")


@pytest.mark.parametrize("killed", [Killed.BY_REQUEST, Killed.UNHEEDING])
@pytest.mark.parametrize("status", [-signal.SIGKILL, None])
def test_what_was_killed_by_request_was_not_lost(status: int | None, killed: Killed) -> None:
    expected = Verdict(Trigger.END_EARLY, f"The trainer was killed by request. {RESUME}")
    assert verdict(None, status, lost=99, killed=killed, goes_on=RESUME, out_of_memory=True) == expected
    assert verdict({"reason": "succeeded"}, status, killed=killed) == Verdict(Trigger.SUCCEED), "it was done before"


@pytest.mark.parametrize("cause", ["gpu_memory", "host_memory", "non_finite", "data", "model", "settings", "resume", "capacity", "storage"])
def test_what_the_next_attempt_would_meet_again_fails_at_once(cause: str) -> None:
    error = {"kind": "LohanError", "message": "odd", "place": None, "remedy": None, "cause": cause}
    assert verdict({"reason": "failed", "error": error}, 1) == Verdict(Trigger.FAIL, "odd", error)


@pytest.mark.parametrize(
    ("status", "killed", "out_of_memory", "cause"),
    [
        (-signal.SIGKILL, None, False, "killed"),
        (-signal.SIGKILL, None, True, "host_memory"),
        (-signal.SIGSEGV, None, False, "killed"),
        (None, None, False, "killed"),
        # Its own supervisor's SIGKILL is not the kernel's, whatever else was killed meanwhile.
        (-signal.SIGKILL, Killed.HUNG, True, "hung"),
        (None, Killed.HUNG, False, "hung"),
        (1, None, False, "program"),
        (3, None, False, "program"),
    ],
)
def test_every_end_has_its_cause(status: int | None, killed: Killed | None, out_of_memory: bool, cause: str) -> None:
    found = verdict(None, status, lost=MAX_LOST_ATTEMPTS, killed=killed, out_of_memory=out_of_memory)
    assert found.problem is not None
    assert found.problem["cause"] == cause
    assert found.problem["remedy"]


@pytest.mark.parametrize(("fields", "status"), [({"reason": "interrupted"}, 5), (None, 5), ({"reason": "interrupted"}, None)])
def test_interrupted_is_never_a_failure(fields: dict[str, Any] | None, status: int | None) -> None:
    found = verdict(fields, status, lost=99)
    assert found.trigger is Trigger.END_EARLY
    assert "stopped" in found.reason
    assert "base model" in found.reason
    assert verdict(fields, status, goes_on=RESUME).reason.endswith(RESUME)


@pytest.mark.parametrize(
    ("durability", "step", "resumed_step", "expected"),
    [
        ("step", 2, None, RESUME),
        ("step", 1, None, START_AGAIN),
        ("step", 1, 1, RESUME),
        ("snapshot", 9, None, RESUME_OR_START_AGAIN),
        ("snapshot", 1, 1, RESUME),
        ("none", 9, None, START_AGAIN),
    ],
)
def test_a_run_goes_on_from_what_is_certainly_recorded(durability: str, step: int, resumed_step: int | None, expected: str) -> None:
    assert how_it_goes_on(Run(settings={"engine": {"durability": durability}}, step=step, resumed_step=resumed_step)) == expected


def test_a_failure_carries_the_trainers_own_error() -> None:
    error = {"kind": "DataError", "message": "row 3 is empty", "place": "rows:3", "remedy": "Fill it."}
    assert verdict({"reason": "failed", "error": error}, 1) == Verdict(Trigger.FAIL, "row 3 is empty", error)


@pytest.mark.parametrize("error", [None, "text", []])
def test_a_failure_without_an_error_still_says_something(error: Any) -> None:
    found = verdict({"reason": "failed", "error": error}, 1)
    assert found.trigger is Trigger.FAIL
    assert found.problem is not None
    assert found.problem["place"] == "/runs/x/trainer.log"


@pytest.mark.parametrize("status", [0, 1, 2, 77])
def test_an_end_by_itself_without_a_last_event_would_end_the_same_way_again(status: int) -> None:
    found = verdict(None, status, log="first\nModuleNotFoundError: no torch\n\n")
    assert found.trigger is Trigger.FAIL
    assert f"exit code {status}" in found.reason
    assert found.reason.endswith("ModuleNotFoundError: no torch")
    assert "nothing" in verdict(None, status).reason


@pytest.mark.parametrize("status", [-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT, -signal.SIGHUP])
def test_a_signal_is_named_and_the_run_gets_three_attempts(status: int) -> None:
    name = signal.Signals(-status).name
    for lost in range(1, MAX_LOST_ATTEMPTS):
        found = verdict(None, status, lost=lost)
        assert found.trigger is Trigger.END_EARLY
        assert name in found.reason
        assert f"attempt {lost} of {MAX_LOST_ATTEMPTS}" in found.reason
        assert found.reason.endswith(START_AGAIN)
        assert verdict(None, status, lost=lost, goes_on=RESUME).reason.endswith(RESUME)
    last = verdict(None, status, lost=MAX_LOST_ATTEMPTS)
    assert last.trigger is Trigger.FAIL
    assert last.problem is not None
    assert name in last.problem["message"]
    assert last.problem["remedy"]


@pytest.mark.parametrize("status", [-signal.SIGKILL, None])
def test_the_kernels_choice_is_host_memory(status: int | None) -> None:
    found = verdict(None, status, lost=MAX_LOST_ATTEMPTS, out_of_memory=True)
    assert found.problem is not None
    assert "host ran out of memory" in found.problem["message"]
    assert "engine.host_memory_bytes" in found.problem["remedy"]


def test_a_crash_beside_somebody_elses_memory_trouble_is_a_crash() -> None:
    assert "SIGSEGV" in verdict(None, -signal.SIGSEGV, out_of_memory=True).reason


def test_an_adopted_trainer_may_end_without_a_word_or_a_status() -> None:
    found = verdict(None, None)
    assert found.trigger is Trigger.END_EARLY
    assert "without a word" in found.reason


def test_a_locked_folder_is_waited_for() -> None:
    found = verdict(None, 3)
    assert found.trigger is Trigger.END_EARLY
    assert "Another process" in found.reason
