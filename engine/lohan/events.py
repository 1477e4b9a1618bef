"""`events.jsonl`: what a trainer says about itself, one JSON object a line, append-only.

The trainer is the only writer; the supervisor reads from a stored byte offset and copies into the database. Every event carries
`attempt` (which start of the run this is), `seq` (1, 2, … within the attempt), `time` (Unix seconds) and `type`, so that
reading a stretch twice changes nothing.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any


class EventType(StrEnum):
    """The types of event, and the fields each carries besides the common four."""

    STARTED = "started"
    """`device`, `precision`, `parameters`, `total_steps`, `batch_size`, `micro_batch_size`, `sequence_length`, `resumed_step` (the
    step it goes on from; 0 from the base model), `loss` (of that step, or null).

    What earlier attempts said of later steps holds no longer: these are done again."""
    PHASE = "phase"
    """`phase` (a `Phase`), `progress` (0 to 1, or null while unknown), `detail` (a sentence); of a measurement also `eta_seconds`."""
    STEP = "step"
    """`step` (1-based), `total_steps`, `epoch`, `loss`, `learning_rate`, `gradient_norm` (before clipping), `clipped` (whether gradients
    were scaled down), `skipped` (whether the step was left out because one was NaN or infinite), `clip_rate` (of all steps so far),
    `tokens`, `tokens_per_second`, `step_seconds`, `eta_seconds` (null while unknown), `device_peak_bytes`, `host_bytes`."""
    EVALUATION = "evaluation"
    """`when` (`before` or `after`), `rows`, `loss`: mean loss over the same training rows."""
    PLAN_CORRECTED = "plan_corrected"
    """The first steps took more than a tenth longer or shorter than foreseen: `step`, `outcome` (`kept`, `changed`: something else is kept
    of activations from the next step on, or `no_room`), `ratio` (measured over foreseen seconds, each step at its own tokens),
    `foreseen_seconds` (of a step of a whole batch), `corrected_seconds` (the same by the corrected figures), `new_seconds` (of what the run
    does now), `factors` (how much longer than foreseen each thing took, by name; `everything` is on top of the others), `detail`
    (the same as a sentence)."""
    ANSWER_PART = "answer_part"
    """The next piece of an answer: `text`, `tokens` (how many there are so far), `progress` (of the most it may have, 0 to 1).

    Several times a second at most. The pieces of one attempt, put together, are a beginning of the answer."""
    ANSWER = "answer"
    """The whole answer: `text`, `finish_reason` (a `FinishReason`), `prompt_tokens`, `answer_tokens`, `seconds` (from the first look at the
    conversation to the last token), `first_token_seconds` (null where there is none), `tokens_per_second` (after the first token; null
    below two), `seed` (null where the likeliest token was taken each time)."""
    NOTE = "note"
    """`message`: something to know, and nothing wrong."""
    WARNING = "warning"
    """`message`, `remedy`."""
    EXIT = "exit"
    """The trainer's last event: `reason` (an `ExitReason`), `error` (`LohanError.to_dict()` with `cause`, a `FailureCause`; or null),
    `stopped_step` (the step after which the training was ended by a request and its weights exported, or null)."""


class Phase(StrEnum):
    """What a trainer is doing: the first five in a training, in this order."""

    PREPARING_DATA = "preparing_data"
    LOADING_MODEL = "loading_model"
    EVALUATING = "evaluating"
    TRAINING = "training"
    EXPORTING = "exporting"
    MEASURING = "measuring"
    """The machine, and a model's block on it."""
    ANSWERING = "answering"
    """A conversation: reading it, then one token after the other."""


class FinishReason(StrEnum):
    """Why an answer ends where it does."""

    END_OF_TEXT = "end_of_text"
    """The model said that its turn is over."""
    LENGTH = "length"
    """It has as many tokens as were asked for, or as the model's context has room for."""
    CANCELLED = "cancelled"


class ExitReason(StrEnum):
    """Why a trainer ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    PAUSED = "paused"
    """By request; the run goes on from its last recorded step when somebody asks for it."""
    INTERRUPTED = "interrupted"
    """SIGTERM without a request: the host or unit stops; the run is started again when it is back."""


class FailureCause(StrEnum):
    """What failed, as far as it decides what to do about it."""

    GPU_MEMORY = "gpu_memory"
    HOST_MEMORY = "host_memory"
    """An allocation was refused, or the kernel's `oom_kill` counter says that it killed."""
    DISK_FULL = "disk_full"
    STORAGE = "storage"
    """A drive or a file system failed otherwise."""
    NON_FINITE = "non_finite"
    """Too many steps in a row had a loss or gradients that are NaN or infinite."""
    DATA = "data"
    MODEL = "model"
    SETTINGS = "settings"
    RESUME = "resume"
    """What was to be gone on from is missing, damaged or another run's."""
    CAPACITY = "capacity"
    """The machine has too little of something, known before it ran out."""
    LOST_GPU = "lost_gpu"
    """The GPU or its driver stopped answering."""
    KILLED = "killed"
    """A signal from outside, or one that the program gave itself."""
    HUNG = "hung"
    """No sign of life for longer than the limit; the supervisor killed it."""
    PROGRAM = "program"
    """Everything else: a fault of the program."""


def _json_ready(value: Any) -> Any:
    """NaN and infinities are not JSON: they become null, here and at every depth."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _json_ready(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_ready(item) for item in value]
    return value


class EventWriter:
    """Appends events of one attempt; each line is one `write` on an O_APPEND descriptor. Not thread-safe: one owner.

    An event that a full drive cut short never joins the next one: it is finished when there is room again, or its line is ended.
    """

    def __init__(self, path: Path, *, attempt: int) -> None:
        self._file = path.open("ab", buffering=0)
        # A trainer was killed while it wrote; the next event must not join that line.
        self._is_inside_a_line = _ends_inside_a_line(path)
        self._attempt = attempt
        self._seq = 0
        self._folder, self._is_linked = path.parent, False

    def write(self, type: EventType, **fields: Any) -> None:
        self._seq += 1
        event = {"attempt": self._attempt, "seq": self._seq, "time": time.time(), "type": str(type), **_json_ready(fields)}
        self._append(json.dumps(event, allow_nan=False, separators=(",", ":")).encode() + b"\n")

    def _append(self, line: bytes) -> None:
        if self._is_inside_a_line:
            self._append_whole(b"\n")
        self._is_inside_a_line = True
        self._append_whole(line)
        self._is_inside_a_line = False

    def _append_whole(self, content: bytes) -> None:
        """The kernel takes what there is room for and says how much that was; only the next write is an error."""
        while content:
            content = content[self._file.write(content) :]

    def sync(self) -> None:
        """Bring what was written to the drive: it is there after a power failure too. Takes as long as the drive needs."""
        os.fdatasync(self._file.fileno())
        if not self._is_linked:
            folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(folder)  # the file's own entry, which it has since it was made
            finally:
                os.close(folder)
            self._is_linked = True

    def close(self) -> None:
        self._file.close()


def _ends_inside_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - 1))
        return size > 0 and file.read(1) != b"\n"


@dataclass(frozen=True, slots=True)
class Event:
    """One event as read back; `fields` holds what its type carries."""

    attempt: int
    seq: int
    time: float
    type: str
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class EventReader:
    """Reads complete lines from `offset_bytes` on; a malformed line is skipped and counted, an unfinished last line waits."""

    path: Path
    offset_bytes: int = 0
    malformed: int = 0

    def read(self) -> Iterator[Event]:
        """Yield the events that have come since the last call and move `offset_bytes` behind each."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self.offset_bytes)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self.offset_bytes += len(line)
                event = _parse(line)
                if event is None:
                    self.malformed += 1
                else:
                    yield event


def _parse(line: bytes) -> Event | None:
    try:
        raw = json.loads(line)
        return Event(int(raw.pop("attempt")), int(raw.pop("seq")), float(raw.pop("time")), str(raw.pop("type")), raw)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):  # the last: int() of 1e999
        return None
