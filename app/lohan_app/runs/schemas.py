"""What the API takes and gives about runs."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from lohan.config import ActivationPolicy, EngineSection, Precision, TrainingSection, UnsafeFilesystems
from lohan.data.conversation import Conversation
from lohan.events import FinishReason
from lohan_app.auth.schemas import DisplayName
from lohan_app.entities import Metric, PauseCause, RunKind, RunState, Wanted
from lohan_app.runs.line import QueuePlace
from lohan_app.runs.requests import Request, allowed

if TYPE_CHECKING:
    from lohan_app.runs.queries import NamedRun

RecordId = Annotated[str, Field(min_length=1, max_length=64)]


def _no_boolean(value: object) -> object:
    # Pydantic would read true as the number 1.
    if isinstance(value, bool):
        raise ValueError("expected a number or text, found true or false")
    return value


Priority = Annotated[int, Field(ge=-100, le=100, strict=True)]
"""0 where nobody has set one."""


class TrainingRequest(TrainingSection):
    """`lohan.config.TrainingSection`; without `precision` the device decides (`runs.planning.plan_run`)."""

    _numbers = field_validator("*", mode="before")(_no_boolean)

    @field_validator("keep_steps")
    @classmethod
    def _nothing_beside_the_reservation(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if value:
            raise ValueError("is for runs from the command line: named snapshots take space that no run here has reserved")
        return value


class EngineRequest(EngineSection):
    """`lohan.config.EngineSection`, without what only the administrator sets."""

    _numbers = field_validator("*", mode="before")(_no_boolean)

    @field_validator("state_directories")
    @classmethod
    def _administrators_choice(cls, value: tuple[object, ...]) -> tuple[object, ...]:
        if value:
            raise ValueError("is set by the administrator (LOHAN_STATE_DIRS)")
        return value

    @field_validator("unsafe_filesystems")
    @classmethod
    def _administrators_drives(cls, value: UnsafeFilesystems) -> UnsafeFilesystems:
        if value is not UnsafeFilesystems.REFUSE:
            raise ValueError("is set by the administrator (LOHAN_UNSAFE_FILESYSTEMS)")
        return value

    @field_validator("profiles")
    @classmethod
    def _data_folders_profiles(cls, value: Path | None) -> Path | None:
        if value is not None:
            raise ValueError("is the folder `profiles` in the data folder")
        return value

    @field_validator("policy")
    @classmethod
    def _without_a_solver(cls, value: ActivationPolicy) -> ActivationPolicy:
        if value is ActivationPolicy.CHECKMATE:
            raise ValueError("is for runs from the command line: this policy needs SciPy, which the service does not load")
        return value


class PlanRequest(BaseModel):
    """A run to be planned; nothing is stored."""

    model_config = ConfigDict(extra="forbid")

    base_model_id: RecordId
    dataset_id: RecordId | None = None
    training: TrainingRequest = TrainingRequest()
    engine: EngineRequest = EngineRequest()


class RunRequest(PlanRequest):
    """A run to be queued."""

    name: DisplayName
    dataset_id: RecordId
    skip_bad_rows: bool = False
    """Whether rows that cannot be used are left out; a dataset that has some is refused otherwise."""
    keep_states_days: Annotated[int, Field(ge=0, le=3650, strict=True)] | None = None
    """Days for which its states stay on the drives after it has succeeded; by default as the installation says (at once: not at all)."""


class ExportRequest(BaseModel):
    """An export of what a run at rest has recorded."""

    model_config = ConfigDict(extra="forbid")

    dtype: Precision | None = None
    """Of the weights; by default the run's precision. fp32 are the master weights."""


class ChatRequest(Conversation):
    """A conversation that a run's result is to answer."""

    device: Annotated[str, Field(min_length=1, max_length=64)] = "auto"
    """As in `EngineRequest`."""
    follows: RecordId | None = None
    """A chat with the same run that has been answered: `messages` then hold only what is new."""


class AnswerView(BaseModel):
    """What a chat has been answered; null where the answer is not complete."""

    text: str
    finish_reason: FinishReason | None = None
    prompt_tokens: int | None = None
    answer_tokens: int | None = None
    seconds: float | None = None
    """From the first look at the conversation to the last token; loading the model is not in it."""
    first_token_seconds: float | None = None
    tokens_per_second: float | None = None
    """After the first token."""
    seed: int | None = None
    """Null where the likeliest token was taken each time."""


class RunView(BaseModel):
    """A run as it stands."""

    model_config = ConfigDict(from_attributes=True)

    id: str
    kind: RunKind = RunKind.TRAIN
    """What replies of before there were kinds, kept by their idempotency keys, do not say."""
    owner_id: str
    owner_name: str
    parent_id: str | None
    """The run that it is a retry of; of an export the training whose states it reads, of a chat the run whose result it asks."""
    name: str
    base_model_id: str | None
    """Null for a measurement without a model."""
    base_model_name: str | None
    dataset_id: str | None
    """Of a training run."""
    dataset_name: str | None
    skip_bad_rows: bool
    wanted: Wanted
    state: RunState
    state_reason: str
    problem: dict[str, Any] | None
    """`{kind, message, place, remedy, cause}` of a failed run."""
    pause_cause: PauseCause | None
    """Of a paused run: `request`, or `disk_full`, which goes on by itself when there is room."""
    start_after: datetime | None
    """Before then its next attempt does not begin."""
    priority: int = 0
    """Runs with a higher one come first in the queue; set by administrators."""
    queued_at: datetime | None = None
    """Since when it is in line; null of a draft."""
    allowed: list[Request]
    """What can be asked of it now."""
    devices: list[str]
    attempt: int
    phase: str
    phase_progress: float | None
    step: int
    total_steps: int
    resumed_step: int | None
    """The step that the present attempt goes on from; null where it began from the base model."""
    loss: float | None
    first_loss: float | None
    """Mean loss over the evaluation rows before the first step."""
    last_loss: float | None
    """The same after the last step."""
    stopped_step: int | None
    """The step whose weights are the result, where the training was stopped before its last."""
    eta_seconds: float | None
    created_at: datetime
    prepared_at: datetime | None
    started_at: datetime | None
    finished_at: datetime | None
    heartbeat_at: datetime | None


class RunDetail(RunView):
    settings: dict[str, Any]
    """`{"training": {…}, "engine": {…}}`; of other kinds `{"<kind>": {…}, "needs": {…}}`."""
    plan: dict[str, Any] | None
    """`lohan.planning.plan.Plan` as JSON, of a training run: what it was queued with."""
    started_plan: dict[str, Any] | None = None
    """The plan that its latest attempt began with, made for the machine as it was then; null before the first."""
    corrected_step_seconds: float | None = None
    """What a step is foreseen to take since the first steps corrected the forecast; null where they have not."""
    queue_place: QueuePlace | None = None
    """Of a queued run."""
    answer: AnswerView | None = None
    """Of a chat, as far as it has come; null before its first words."""


class RunChange(BaseModel):
    """What an administrator changes of a run."""

    model_config = ConfigDict(extra="forbid")

    priority: Priority


def view_of(named: NamedRun) -> RunView:
    """The run as lists show it."""
    return RunView.model_validate(_fields(named, RunView))


def detail_of(named: NamedRun, place: QueuePlace | None, answer: dict[str, Any] | None = None) -> RunDetail:
    """The run with its settings, plans and place in the queue; `answer`: of a chat."""
    return RunDetail.model_validate(_fields(named, RunDetail, queue_place=place, answer=answer))


def _fields(named: NamedRun, kind: type[RunView], **others: Any) -> dict[str, Any]:
    names = {"owner_name": named.owner_name, "base_model_name": named.base_model_name, "dataset_name": named.dataset_name} | others
    names["allowed"] = allowed(named.run)
    return {field: getattr(named.run, field) for field in kind.model_fields if field not in names} | names


class MetricPoint(BaseModel):
    """One step."""

    model_config = ConfigDict(from_attributes=True)

    step: int
    attempt: int
    time: float
    """Unix seconds."""
    loss: float | None
    """Null where it was not a finite number: a gap in the curve."""
    learning_rate: float
    gradient_norm: float | None
    tokens: int
    tokens_per_second: float | None
    step_seconds: float
    epoch: float | None
    clip_rate: float | None
    device_peak_bytes: int | None
    host_bytes: int | None


class MetricsView(BaseModel):
    """Steps in order; of more than 2,000 those with the lowest and the highest loss of equal stretches, and the first without one."""

    data: list[MetricPoint]
    total: int
    """Steps there are in the range, before down-sampling."""
    down_sampled: bool
    last_event_id: str | None
    """Where an event stream takes up from here: its query parameter `last_event_id`."""


class CurveView(BaseModel):
    """One of a run's numbers, a bucket of `bucket_steps` steps at a time: lists of one length, in the order of steps.

    A bucket that holds no step is left out. Values are null where none of the bucket (`first`, `last`: that step's) was finite.
    """

    first_step: list[int] = []
    last_step: list[int] = []
    gaps: list[int] = []
    """Steps whose value was not a finite number."""
    missing: list[int] = []
    """Steps of the bucket that are not recorded, between the curve's first step and its last."""
    first: list[float | None] = []
    last: list[float | None] = []
    minimum: list[float | None] = []
    maximum: list[float | None] = []
    mean: list[float | None] = []


class CurvesView(BaseModel):
    """Curves of a range of steps, each in at most 400 buckets of five values."""

    total: int
    """Steps there are in the range."""
    bucket_steps: int
    """Steps a bucket spans: the fewer steps are asked for, the finer the curve; 1 where each bucket is a step."""
    curves: dict[Metric, CurveView]
    last_event_id: str | None
    """Where an event stream takes up from here: its query parameter `last_event_id`."""


class LogView(BaseModel):
    """A stretch of the trainer's log."""

    text: str
    """Without terminal control sequences, lines cut at 8 kB."""
    next_offset: int
    """Byte to ask from next."""
    size: int
    """Bytes of the log so far."""
