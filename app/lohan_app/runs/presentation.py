"""A run in words: its phases, numbers, events and settings as the pages print them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

from lohan.config import Durability, EngineSection
from lohan.events import EventType, ExitReason, FailureCause, FinishReason, Phase
from lohan.units import GIB, format_bytes, format_count, format_duration
from lohan_app.entities import TERMINAL_STATES, PauseCause, RunKind, RunState, Wanted
from lohan_app.entities.base import now
from lohan_app.runs.kinds import KIND_NAMES, NEEDS
from lohan_app.runs.requests import Request
from lohan_app.runs.schemas import RunDetail, RunView
from lohan_app.runs.states import ACTIVE_STATES
from lohan_app.storage.retention import KEEP_STATES_DAYS, Expiry
from lohan_app.templating import MISSING, format_integer, format_number, format_rate, from_unix

PHASE_NAMES = {
    Phase.PREPARING_DATA: "Preparing the rows",
    Phase.LOADING_MODEL: "Loading the model",
    Phase.EVALUATING: "Evaluating",
    Phase.TRAINING: "Training",
    Phase.EXPORTING: "Exporting",
    Phase.MEASURING: "Measuring",
    Phase.ANSWERING: "Answering",
}
# The evaluation comes twice; the others once, in this order.
PHASE_LINE = (Phase.PREPARING_DATA, Phase.LOADING_MODEL, Phase.EVALUATING, Phase.TRAINING, Phase.EVALUATING, Phase.EXPORTING)
OTHER_LINES = {
    RunKind.PROFILE: (Phase.MEASURING,),
    RunKind.EXPORT: (Phase.LOADING_MODEL, Phase.EXPORTING),
    RunKind.CHAT: (Phase.LOADING_MODEL, Phase.ANSWERING),
}
"""The phases of runs that are no trainings."""
OTHER_NAMES = {(RunKind.EXPORT, Phase.LOADING_MODEL): "Opening the states"}
FIRST_EVALUATION, LAST_EVALUATION = 2, 4
EVALUATION_NAMES = {FIRST_EVALUATION: "First evaluation", LAST_EVALUATION: "Last evaluation"}
SILENCE = timedelta(minutes=2)
"""A running trainer that has written nothing for this long is pointed out; large models do take minutes for a step."""
EXIT_TEXTS = {
    ExitReason.SUCCEEDED: ("good", "Succeeded"),
    ExitReason.CANCELLED: ("", "Stopped because it was cancelled"),
    ExitReason.PAUSED: ("", "Paused by request"),
    ExitReason.INTERRUPTED: ("warn", "Interrupted: the machine or the service stops"),
}
FAILURE_WORDS: dict[str, str] = {
    FailureCause.GPU_MEMORY: "GPU memory ran out",
    FailureCause.HOST_MEMORY: "host memory ran out",
    FailureCause.STORAGE: "a drive failed",
    FailureCause.NON_FINITE: "its loss is no longer a number",
    FailureCause.DATA: "its rows cannot be used",
    FailureCause.MODEL: "its model cannot be used",
    FailureCause.SETTINGS: "its settings cannot be used",
    FailureCause.RESUME: "it cannot go on from what it has recorded",
    FailureCause.CAPACITY: "it does not fit this machine",
    FailureCause.LOST_GPU: "the GPU stopped answering",
    FailureCause.KILLED: "its trainer was killed",
    FailureCause.HUNG: "its trainer hung",
}
"""By `FailureCause`; a fault of the program has no shorter word than its message."""
CHAT_FAILURE_WORDS: dict[str, str] = FAILURE_WORDS | {
    FailureCause.DATA: "its conversation cannot be answered",
    FailureCause.KILLED: "its process was killed",
    FailureCause.HUNG: "its process hung",
}
FINISH_WORDS: dict[str, str] = {
    FinishReason.END_OF_TEXT: "the model ended it",
    FinishReason.LENGTH: "cut at the most tokens it may have",
    FinishReason.CANCELLED: "cancelled",
}
PAUSE_TITLES = {PauseCause.REQUEST: "Paused", PauseCause.DISK_FULL: "Paused: a drive is full"}
# The one thing a row of the list offers: the first of these that is possible. What cannot be taken back is on the run's own page.
QUICK_ACTIONS = (
    (Request.SUBMIT, "Queue it", "play"),
    (Request.RETRY, "Retry", "retry"),
    (Request.RESUME, "Resume", "play"),
    (Request.PAUSE, "Pause", "pause"),
)
SETTING_NAMES = {
    "batch_size": "Batch size",
    "sequence_length": "Sequence length",
    "epochs": "Epochs",
    "max_steps": "Steps at most",
    "learning_rate": "Learning rate",
    "schedule": "Schedule",
    "warmup_steps": "Warm-up steps",
    "weight_decay": "Weight decay",
    "clip": "Gradient clipping",
    "max_gradient_norm": "Largest gradient norm",
    "precision": "Precision",
    "evaluation_rows": "Rows to evaluate",
    "seed": "Seed",
    "updates": "Updates",
    "device": "Device",
    "micro_batch_size": "Micro-batch",
    "durability": "Durability",
    "snapshot_minutes": "Minutes between snapshots",
    "gpu_memory_bytes": "GPU memory at most",
    "host_memory_bytes": "RAM at most",
    "ram_state_bytes": "States in RAM",
    "chunk_parameters": "Parameters in a chunk",
    KEEP_STATES_DAYS: "Days its states are kept",
}


def summary_fields(run: RunDetail, *, tokens_per_second: float | None, may_write: bool) -> dict[str, Any]:
    """What the top of a run's page shows."""
    is_terminal = run.state in TERMINAL_STATES
    return {
        "run": run,
        "kind_name": KIND_NAMES[run.kind],
        "is_terminal": is_terminal,
        "actions": _actions(run) if may_write else [],
        "pause_loses_all": run.state in ACTIVE_STATES and _durability(run) is Durability.NONE,
        "failure_title": failure_title(run),
        "pause_title": PAUSE_TITLES.get(run.pause_cause or PauseCause.REQUEST, "Paused"),
        "resume_text": _resume_text(run),
        "is_silent": _is_silent(run),
        "phases": phase_line(run),
        "fraction": fraction(run),
        "steps_text": f"{run.step:,} of {run.total_steps:,}" if run.total_steps else MISSING,
        "attempt_text": _attempt(run),
        "eta_text": format_duration(run.eta_seconds) if run.state in ACTIVE_STATES and run.eta_seconds is not None else MISSING,
        "speed_text": f"{tokens_per_second:,.0f} tokens/s" if tokens_per_second is not None else MISSING,
        **_evaluation(run),
    }


def _actions(run: RunDetail) -> list[Request]:
    """What the page offers. Killing comes into sight only where something else was asked for in vain, or the trainer is silent."""
    in_vain = run.wanted is not Wanted.RUN or run.state in (RunState.PAUSING, RunState.CANCELLING) or _is_silent(run)
    return [request for request in run.allowed if request is not Request.FORCE_STOP or in_vain]


def _durability(run: RunDetail) -> Durability:
    try:
        return Durability(run.settings.get("engine", {}).get("durability", EngineSection().durability))
    except ValueError:  # stored by another version
        return Durability.NONE


def failure_title(run: RunView) -> str:
    """What failed, in a line."""
    known = CHAT_FAILURE_WORDS if run.kind is RunKind.CHAT else FAILURE_WORDS
    words = known.get(str((run.problem or {}).get("cause")))
    return f"This run failed: {words}" if words else "This run failed"


def retention_fields(run: RunDetail, expiry: Expiry | None) -> dict[str, Any]:
    """How long an ended run's states stay, and so what a retry begins with. `expiry`: of the states that it has on the drives."""
    if run.kind is not RunKind.TRAIN:
        return {"states_expiry": None, "states_left": "", "retry_text": "Retry queues it once more; it begins anew."}
    goes_on = expiry is not None and _durability(run) is not Durability.NONE and run.step > 0
    begins = "and goes on from its last recorded step" if goes_on else "from the base model"
    clone = "Clone makes a draft whose settings you can change."
    return {
        "states_expiry": expiry,
        "states_left": _in_words(expiry.at - now()) if expiry is not None else "",
        "retry_text": f"Retry queues it once more{'' if goes_on else ','} {begins}; {clone}",
    }


def kept_for(days: float) -> str:
    """A setting's days in words."""
    return "not at all" if days == 0 else "for 1 day" if days == 1 else f"for {days:g} days"


def _in_words(left: timedelta) -> str:
    """How long until something is removed; the worker looks every few seconds, so that what is due goes at once."""
    days, hours = left // timedelta(days=1), left // timedelta(hours=1)
    if left <= timedelta(0):
        return "now"
    if days >= 2:
        return f"in {days} days"
    return f"in {hours} hours" if hours >= 2 else "within two hours"


def _resume_text(run: RunDetail) -> str:
    if run.pause_cause is PauseCause.DISK_FULL:
        return "Free space on the drive, or delete runs that are no longer needed: nothing of this run is lost."
    if _durability(run) is Durability.NONE or not run.step:
        return "Resume queues it again; it begins from the base model."
    return "Resume queues it again; it goes on from its last recorded step."


def _attempt(run: RunView) -> str:
    if run.attempt < 2:
        return ""
    return f"attempt {run.attempt}" + (f", resumed from step {run.resumed_step:,}" if run.resumed_step else "")


def _is_silent(run: RunView) -> bool:
    return run.state is RunState.RUNNING and run.heartbeat_at is not None and now() - run.heartbeat_at > SILENCE


def _evaluation(run: RunView) -> dict[str, str]:
    if run.first_loss is None:
        return {"loss_text": MISSING, "loss_note": ""}
    if run.last_loss is None:
        return {"loss_text": format_number(run.first_loss), "loss_note": "before the first step"}
    return {"loss_text": f"{format_number(run.first_loss)} → {format_number(run.last_loss)}", "loss_note": "before and after"}


def _position(run: RunView) -> int:
    """Where in `PHASE_LINE` the run is; -1 before the first."""
    if run.kind is not RunKind.TRAIN:
        others = OTHER_LINES[run.kind]
        if run.state is RunState.SUCCEEDED:
            return len(others)
        return next((index for index, phase in enumerate(others) if phase == run.phase), -1)
    if run.state is RunState.SUCCEEDED:
        return len(PHASE_LINE)
    if run.phase == Phase.EVALUATING:
        return LAST_EVALUATION if run.step else FIRST_EVALUATION
    positions: dict[str, int] = {phase: index for index, phase in enumerate(PHASE_LINE) if phase is not Phase.EVALUATING}
    # Rows are prepared while the run waits in the queue; after that it has no phase until its trainer names one.
    return positions.get(run.phase, 1 if run.prepared_at is not None and run.state is not RunState.QUEUED else -1)


def phase_line(run: RunView) -> list[dict[str, str]]:
    """Every phase with its status: done, now, failed or later."""
    here = _position(run)
    is_training = run.kind is RunKind.TRAIN
    current = {RunState.FAILED: "failed", RunState.CANCELLED: "failed"}.get(run.state, "now")
    line = []
    for index, phase in enumerate(PHASE_LINE if is_training else OTHER_LINES[run.kind]):
        if is_training and index == 0 and run.prepared_at is not None and here != 0:
            status = "done"
        else:
            status = "done" if index < here else current if index == here else "later"
        label = EVALUATION_NAMES.get(index, PHASE_NAMES[phase]) if is_training else OTHER_NAMES.get((run.kind, phase), PHASE_NAMES[phase])
        line.append({"label": label, "status": status})
    return line


def fraction(run: RunView) -> float | None:
    """How much of the bar is full, 0 to 1; None while that is unknown."""
    if run.state is RunState.SUCCEEDED:
        return 1.0
    if run.total_steps and (run.phase == Phase.TRAINING or run.state in TERMINAL_STATES):
        return min(1.0, run.step / run.total_steps)
    if run.phase and run.phase_progress is not None:
        return min(1.0, max(0.0, run.phase_progress))
    return None if run.state in ACTIVE_STATES else 0.0


def describe_events(events: Iterable[Any]) -> list[dict[str, Any]]:
    """The trainer's events as sentences, newest first; of a phase's many reports of progress only the first."""
    told: list[dict[str, Any]] = []
    phase: tuple[int, str] | None = None
    for event in events:
        if event.type == EventType.ANSWER_PART:
            continue
        if event.type == EventType.PHASE:
            current = (event.attempt, str(event.fields.get("phase", "")))
            if current == phase:
                continue
            phase = current
        tone, text = _describe(event.type, event.fields, event.attempt)
        told.append({"time": from_unix(event.time), "tone": tone, "text": text})
    return told[::-1]


def _describe(kind: str, fields: dict[str, Any], attempt: int) -> tuple[str, str]:
    """Tone and sentence of one event. Fields come from a file on disk: none is trusted to be there."""
    match kind:
        case EventType.STARTED:
            parameters = fields.get("parameters")
            size = f" with {format_count(parameters)} parameters" if isinstance(parameters, int) else ""
            again = f" (attempt {attempt})" if attempt > 1 else ""
            step = fields.get("resumed_step")
            resumed = f", resumed from step {step:,}" if isinstance(step, int) and step > 0 else ""
            return "", f"Trainer started on {fields.get('device', 'its device')}{size}{again}{resumed}"
        case EventType.PHASE:
            # The trainer's own sentence where it has one; the phase line above names the phases.
            return "", str(fields.get("detail") or PHASE_NAMES.get(fields.get("phase", ""), fields.get("phase", "Next phase")))
        case EventType.EVALUATION:
            when = "before the first step" if fields.get("when") == "before" else "after the last step"
            loss = fields.get("loss")
            value = format_number(loss) if isinstance(loss, int | float) else "not a finite number"
            return "", f"Mean loss over {fields.get('rows', 'the same')} rows {when}: {value}"
        case EventType.PLAN_CORRECTED:
            return "", str(fields.get("detail") or "The plan was corrected by what the first steps took")
        case EventType.ANSWER:
            return "", f"Answered: {answer_note(fields)}"
        case EventType.NOTE:
            return "", str(fields.get("message", ""))
        case EventType.WARNING:
            return "warn", " ".join(str(fields[name]) for name in ("message", "remedy") if fields.get(name))
        case EventType.EXIT:
            return _describe_exit(fields)
        case _:
            return "", kind


def answer_note(fields: Mapping[str, Any]) -> str:
    """How long an answer is, how fast it came, and why it ends: as far as it is known."""
    read, written, speed = (fields.get(name) for name in ("prompt_tokens", "answer_tokens", "tokens_per_second"))
    told = [
        f"{read:,} tokens read" if isinstance(read, int) else "",
        f"{written:,} written" if isinstance(written, int) else "",
        f"{speed:,.1f} tokens/s" if isinstance(speed, int | float) else "",
        FINISH_WORDS.get(str(fields.get("finish_reason")), ""),
        f"seed {fields['seed']}" if isinstance(fields.get("seed"), int) else "",
    ]
    return ", ".join(part for part in told if part)


def _describe_exit(fields: dict[str, Any]) -> tuple[str, str]:
    reason = str(fields.get("reason", ""))
    if reason in EXIT_TEXTS:
        return EXIT_TEXTS[ExitReason(reason)]
    error = fields.get("error")
    message = error.get("message") if isinstance(error, dict) else None
    return "bad", f"Failed: {message}" if message else "Failed"


def describe_settings(run: RunDetail) -> list[tuple[str, str]]:
    """The settings a run was queued with, those that were left open not among them."""
    settings = run.settings
    if run.kind is not RunKind.TRAIN:
        return [*_describe_request(run), ("RAM reserved", format_bytes(settings.get(NEEDS, {}).get("ram_bytes", 0)))]
    training, engine = settings.get("training", {}), settings.get("engine", {})
    values = {**engine, **training, "schedule": training.get("schedule"), "updates": engine.get("schedule")}
    values[KEEP_STATES_DAYS] = settings.get(KEEP_STATES_DAYS)
    return [(label, _setting(name, values[name])) for name, label in SETTING_NAMES.items() if values.get(name) is not None]


def _describe_request(run: RunDetail) -> list[tuple[str, str]]:
    request = run.settings.get(run.kind, {})
    if run.kind is RunKind.EXPORT:
        return [("Weights", str(request.get("dtype", MISSING)))]
    if run.kind is RunKind.CHAT:
        names = {"device": "Device", "max_new_tokens": "Tokens at most", "temperature": "Temperature", "top_p": "Top-p", "seed": "Seed"}
        told = [(label, _setting(name, request[name])) for name, label in names.items() if request.get(name) is not None]
        gpu_bytes = run.settings.get(NEEDS, {}).get("gpu_bytes", 0)
        return [*told, *([("GPU memory reserved", format_bytes(gpu_bytes))] if gpu_bytes else [])]
    return [("Device", str(request.get("device", MISSING))), ("Drives", "Measured" if request.get("drives") else "Left out")]


def _setting(name: str, value: Any) -> str:
    if name.endswith("_bytes") and isinstance(value, int):
        return f"{value / GIB:g} GiB"
    if name in ("learning_rate", "weight_decay", "epochs", "max_gradient_norm", "snapshot_minutes", "temperature", "top_p"):
        return format_rate(value)
    return format_integer(value) if isinstance(value, int) else str(value)
