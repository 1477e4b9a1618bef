"""How a trainer's end is judged: from its last event, its exit status and the kernel's counter to a trigger and words for the user."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lohan.cli.commands import ExitCode
from lohan.config import Durability, EngineSection
from lohan.errors import EngineError
from lohan.events import ExitReason
from lohan_app.entities import Run
from lohan_app.runs.states import Trigger
from lohan_app.worker.trainer import TrainerEnd

MAX_LOST_ATTEMPTS = 3
"""So often may a trainer vanish without a word at the same place; what the host's own stops end does not count."""
START_AGAIN = "The run starts again from the base model."
RESUME = "The run resumes from its last recorded step."
RESUME_OR_START_AGAIN = "The run resumes from its last snapshot, or starts again from the base model where it has none yet."
# What a user can do about the commonest signals; for the others the log is all there is.
_REMEDIES = {
    signal.SIGKILL: "Somebody or something killed it: see the kernel's log (dmesg).",
    signal.SIGSEGV: "This is a fault in the program: keep the trainer's log.",
    signal.SIGBUS: "A disk may be full or failing: see the kernel's log (dmesg).",
    signal.SIGABRT: "A library gave up: the trainer's log has its last words.",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What happens to the run."""

    trigger: Trigger
    reason: str = ""
    """For `Run.state_reason`."""
    problem: dict[str, Any] | None = None
    """For `Run.problem`."""


def how_it_goes_on(run: Run) -> str:
    """Where the run's next attempt begins, as a sentence.

    With durability `step` no step begins before the one before it is on the drives; when snapshots were made is the trainer's knowledge.
    """
    durability = EngineSection.model_validate(run.settings.get("engine", {})).durability
    if durability is Durability.NONE:
        return START_AGAIN
    if run.resumed_step:
        return RESUME
    if durability is Durability.SNAPSHOT:
        return RESUME_OR_START_AGAIN
    return RESUME if run.step > 1 else START_AGAIN


def judge(
    exit_fields: Mapping[str, Any] | None, end: TrainerEnd, *, lost_attempts: int, goes_on: str, log_tail: str, log_path: str
) -> Verdict:
    """Judge an end.

    `exit_fields` are those of the attempt's `exit` event, None where there is none; `lost_attempts` counts the attempts, this one
    included, whose trainer was not stopped by its host; `goes_on` says where the next attempt begins. The event wins over the status: a
    process may still fall over its own teardown.
    """
    reason = exit_fields.get("reason") if exit_fields is not None else _reason_of(end.status)
    if reason == ExitReason.SUCCEEDED:
        return Verdict(Trigger.SUCCEED)
    if reason == ExitReason.CANCELLED:
        return Verdict(Trigger.END_EARLY, "Cancelled.")
    if reason == ExitReason.INTERRUPTED:
        return Verdict(Trigger.END_EARLY, f"The machine or the service on it was stopped. {goes_on}")
    if exit_fields is not None:
        error = exit_fields.get("error")
        return _failure(error if isinstance(error, dict) else EngineError("the trainer failed without a reason", place=log_path).to_dict())
    if end.status is not None and end.status >= 0 and end.status != ExitCode.LOCKED:
        return _failure(_unspoken(end.status, log_tail, log_path))
    return _lost(end, lost_attempts, goes_on, log_path)


def _reason_of(status: int | None) -> ExitReason | None:
    """What the exit code alone says, where the trainer had no time for its last event."""
    if status == ExitCode.CANCELLED:
        return ExitReason.CANCELLED
    return ExitReason.INTERRUPTED if status == ExitCode.INTERRUPTED else None


def _failure(problem: dict[str, Any]) -> Verdict:
    return Verdict(Trigger.FAIL, str(problem.get("message", "")), problem)


def _unspoken(status: int, log_tail: str, log_path: str) -> dict[str, Any]:
    """It ended by itself before it could write why: the next attempt would end the same way."""
    lines = [line.strip() for line in log_tail.splitlines() if line.strip()]
    last = lines[-1] if lines else "it printed nothing"
    message = f"the trainer ended with exit code {status} without a reason; its last line: {last[:500]}"
    return EngineError(message, place=log_path, remedy="The trainer's log has the details.").to_dict()


def _lost(end: TrainerEnd, lost_attempts: int, goes_on: str, log_path: str) -> Verdict:
    what, remedy = _describe(end)
    if lost_attempts < MAX_LOST_ATTEMPTS:
        return Verdict(Trigger.END_EARLY, f"{what} (attempt {lost_attempts} of {MAX_LOST_ATTEMPTS}). {goes_on}")
    message = f"{what}, in the last of {MAX_LOST_ATTEMPTS} attempts"
    return _failure(EngineError(message, place=log_path, remedy=remedy).to_dict())


def _describe(end: TrainerEnd) -> tuple[str, str]:
    """What ended the trainer, and what a user can do about it."""
    if end.status == ExitCode.LOCKED:
        return "Another process trains in this run's folder", "End that process, then start the run again."
    if end.kernel_out_of_memory and end.status in (None, -signal.SIGKILL):
        return (
            "The host ran out of memory and the kernel ended the trainer (SIGKILL)",
            "Lower engine.host_memory_bytes, the batch size or the sequence length, or end other programs.",
        )
    if end.status is None:
        return "The trainer ended without a word", "The trainer's log may say more."
    number = signal.Signals(-end.status)
    return f"The trainer was ended by {number.name} ({signal.strsignal(number)})", _REMEDIES.get(number, "The trainer's log may say more.")
