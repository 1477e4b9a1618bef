"""How a trainer's end is judged: from its last event, its exit status and the kernel's counter to a trigger and words for the user."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lohan.cli.commands import ExitCode
from lohan.config import Durability
from lohan.errors import EngineError
from lohan.events import ExitReason, FailureCause
from lohan.units import format_duration
from lohan_app.entities import Run, RunKind
from lohan_app.runs.states import Trigger
from lohan_app.storage.retention import durability_of
from lohan_app.worker.trainer import Killed, TrainerEnd

MAX_LOST_ATTEMPTS = 3
"""So often may a trainer vanish without a word at the same place; what the host's own stops end does not count."""
BACKOFF_SECONDS = (2.0, 60.0)
"""After the first and the second attempt that came no further than the one before: what is in the way may pass."""
DISK_FULL_SECONDS = 60.0
"""After so long at the earliest does a run go on that a full drive has paused: a quota may be full while the drive has room."""
START_AGAIN = "The run starts again from the base model."
BEGIN_ANEW = "It begins anew."
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
    wait_seconds: float = 0.0
    """Before the next attempt."""
    stopped_step: int | None = None
    """For `Run.stopped_step`."""


def how_it_goes_on(run: Run) -> str:
    """Where the run's next attempt begins, as a sentence.

    With durability `step` no step begins before the one before it is on the drives; when snapshots were made is the trainer's knowledge.
    """
    if run.kind is not RunKind.TRAIN:
        return BEGIN_ANEW
    durability = durability_of(run)
    if durability is Durability.NONE:
        return START_AGAIN
    if run.resumed_step:
        return RESUME
    if durability is Durability.SNAPSHOT:
        return RESUME_OR_START_AGAIN
    return RESUME if run.step > 1 else START_AGAIN


def recorded_step(run: Run) -> int:
    """The step that the next attempt goes on from at the latest; 0 where that is the trainer's knowledge alone."""
    return max(0, run.step - 1) if durability_of(run) is Durability.STEP else 0


def judge(
    exit_fields: Mapping[str, Any] | None, end: TrainerEnd, *, lost_attempts: int, goes_on: str, log_tail: str, log_path: str
) -> Verdict:
    """Judge an end.

    `exit_fields` are those of the attempt's `exit` event, None where there is none; `lost_attempts` counts the attempts, this one
    included, whose trainer was not stopped by its host; `goes_on` says where the next attempt begins. The event wins over the status: a
    process may still fall over its own teardown. What was killed by request was not lost, however often.
    """
    reason = exit_fields.get("reason") if exit_fields is not None else _reason_of(end.status)
    if reason == ExitReason.SUCCEEDED:
        return _success(exit_fields or {})
    if reason == ExitReason.CANCELLED:
        return Verdict(Trigger.END_EARLY, "Cancelled.")
    if reason == ExitReason.PAUSED:
        return Verdict(Trigger.END_EARLY, f"Paused by request. {goes_on}")
    if reason == ExitReason.INTERRUPTED:
        return Verdict(Trigger.END_EARLY, f"The machine or the service on it was stopped. {goes_on}")
    if exit_fields is not None:
        error = exit_fields.get("error")
        problem = error if isinstance(error, dict) else _program_error("the trainer failed without a reason", log_path)
        return _failure(problem, lost_attempts, goes_on)
    if end.killed in (Killed.BY_REQUEST, Killed.UNHEEDING):
        return Verdict(Trigger.END_EARLY, f"The trainer was killed by request. {goes_on}")
    if end.status == ExitCode.OUT_OF_SPACE:
        return out_of_space({"message": "the drive is full", "place": str(log_path)})
    if end.status is not None and end.status >= 0 and end.status != ExitCode.LOCKED:
        return _final(_unspoken(end.status, log_tail, log_path))
    return _lost(_describe(end, log_path), lost_attempts, goes_on)


def out_of_space(problem: Mapping[str, Any]) -> Verdict:
    """A drive had no room left: the run is paused, and the reconciler has it go on when there is room."""
    place = f" ({problem['place']})" if problem.get("place") else ""
    message = str(problem.get("message") or "the drive is full")
    reason = f"{message[:1].upper()}{message[1:]}{place}."
    return Verdict(Trigger.RUN_OUT_OF_SPACE, reason, wait_seconds=DISK_FULL_SECONDS)


def _success(fields: Mapping[str, Any]) -> Verdict:
    step = fields.get("stopped_step")
    if not isinstance(step, int):
        return Verdict(Trigger.SUCCEED)
    return Verdict(Trigger.SUCCEED, f"Stopped early at step {step:,}: the result has the weights of that step.", stopped_step=step)


def _reason_of(status: int | None) -> ExitReason | None:
    """What the exit code alone says, where the trainer had no time for its last event."""
    reasons = {ExitCode.CANCELLED: ExitReason.CANCELLED, ExitCode.PAUSED: ExitReason.PAUSED, ExitCode.INTERRUPTED: ExitReason.INTERRUPTED}
    return reasons.get(ExitCode(status)) if status in reasons else None


def _failure(problem: dict[str, Any], lost_attempts: int, goes_on: str) -> Verdict:
    """What the trainer said itself."""
    match problem.get("cause"):
        case FailureCause.DISK_FULL:
            return out_of_space(problem)
        case FailureCause.LOST_GPU:  # a reset, or another GPU, may be all it takes
            return _lost(problem, lost_attempts, goes_on)
        case _:
            return _final(problem)


def _final(problem: dict[str, Any]) -> Verdict:
    return Verdict(Trigger.FAIL, str(problem.get("message", "")), problem)


def _program_error(message: str, place: str, remedy: str | None = None, cause: FailureCause = FailureCause.PROGRAM) -> dict[str, Any]:
    return {**EngineError(message, place=place, remedy=remedy).to_dict(), "cause": str(cause)}


def _unspoken(status: int, log_tail: str, log_path: str) -> dict[str, Any]:
    """It ended by itself before it could write why: the next attempt would end the same way."""
    lines = [line.strip() for line in log_tail.splitlines() if line.strip()]
    last = lines[-1] if lines else "it printed nothing"
    message = f"the trainer ended with exit code {status} without a reason; its last line: {last[:500]}"
    return _program_error(message, log_path, "The trainer's log has the details.")


def _lost(problem: dict[str, Any], lost_attempts: int, goes_on: str) -> Verdict:
    """An end that the next attempt may not meet again: it is made, after a pause for breath, until there were too many."""
    what = str(problem["message"])
    if lost_attempts < MAX_LOST_ATTEMPTS:
        reason = f"{what[:1].upper()}{what[1:]} (attempt {lost_attempts} of {MAX_LOST_ATTEMPTS}). {goes_on}"
        return Verdict(Trigger.END_EARLY, reason, wait_seconds=BACKOFF_SECONDS[max(0, lost_attempts - 1)])
    return _final(problem | {"message": f"{what}, in the last of {MAX_LOST_ATTEMPTS} attempts"})


def _describe(end: TrainerEnd, log_path: str) -> dict[str, Any]:
    """What ended the trainer, and what a user can do about it."""
    what, remedy, cause = _words(end)
    return _program_error(what, log_path, remedy, cause)


def _words(end: TrainerEnd) -> tuple[str, str, FailureCause]:
    if end.killed is Killed.HUNG:
        return (
            f"The trainer showed no sign of life for {format_duration(end.silence_seconds)} and was killed",
            "See the kernel's log (dmesg) for a drive or GPU that hangs; where a step may take so long, raise LOHAN_STEP_SILENCE_SECONDS.",
            FailureCause.HUNG,
        )
    if end.status == ExitCode.LOCKED:
        return "Another process trains in this run's folder", "End that process, then start the run again.", FailureCause.PROGRAM
    if end.kernel_out_of_memory and end.status in (None, -signal.SIGKILL):
        return (
            "The host ran out of memory and the kernel ended the trainer (SIGKILL)",
            "Let a training take less (engine.host_memory_bytes, batch size, sequence length), ask a chat for less, or end other programs.",
            FailureCause.HOST_MEMORY,
        )
    if end.status is None:
        return "The trainer ended without a word", "The trainer's log may say more.", FailureCause.KILLED
    number = signal.Signals(-end.status)
    remedy = _REMEDIES.get(number, "The trainer's log may say more.")
    return f"The trainer was ended by {number.name} ({signal.strsignal(number)})", remedy, FailureCause.KILLED
