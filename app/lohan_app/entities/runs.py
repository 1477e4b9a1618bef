"""Runs: what was asked for, where they stand, what they reported."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import BigInteger, CheckConstraint, ForeignKey, Index, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from lohan_app.entities.base import Entity, Id, new_id, now, text_enum


class RunKind(StrEnum):
    """What a run does with the device and the memory that it is given."""

    TRAIN = "train"
    PROFILE = "profile"
    """Measures how fast the machine is, and one block of a base model where one is named."""
    EXPORT = "export"
    """Writes what a training run has recorded, `parent_id`, as a Hugging Face folder."""
    CHAT = "chat"
    """Has the model that `parent_id` has as its result answer a conversation."""


class Wanted(StrEnum):
    """What the user wants of the run; written by users' requests alone."""

    RUN = "run"
    PAUSE = "pause"
    STOP = "stop"
    """End the training after the step at work, and keep the weights of that step as the run's result."""
    CANCEL = "cancel"


class RunState(StrEnum):
    """Where the run stands; written by the holder of the run's epoch, or by the reconciler."""

    DRAFT = "draft"
    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    CANCELLING = "cancelling"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


TERMINAL_STATES = frozenset({RunState.SUCCEEDED, RunState.FAILED, RunState.CANCELLED})


class PauseCause(StrEnum):
    """Why a run is paused."""

    REQUEST = "request"
    """Somebody asked for it; it goes on when somebody asks for that."""
    DISK_FULL = "disk_full"
    """A drive had no room left; it goes on by itself when there is room again."""


class Run(Entity):
    """A job of the queue: a training, or something else that needs a device or much memory; its folder is `<data>/runs/<id>/`."""

    __tablename__ = "runs"
    __table_args__ = (
        Index("ix_runs_state_created_at", "state", "created_at"),
        CheckConstraint("kind <> 'train' OR (base_model_id IS NOT NULL AND dataset_id IS NOT NULL)", name="training_has_model_and_data"),
        CheckConstraint("kind <> 'export' OR (base_model_id IS NOT NULL AND parent_id IS NOT NULL)", name="export_has_model_and_parent"),
        CheckConstraint("kind <> 'chat' OR parent_id IS NOT NULL", name="chat_has_parent"),
    )

    id: Mapped[str] = mapped_column(Id, primary_key=True, default=lambda: new_id("run"))
    kind: Mapped[RunKind] = mapped_column(text_enum(RunKind))
    owner_id: Mapped[str] = mapped_column(ForeignKey("users.id"), index=True)
    parent_id: Mapped[str | None] = mapped_column(ForeignKey("runs.id"))
    """The run that it is a retry of; of an export the training whose states it reads, of a chat the run whose result it asks."""
    name: Mapped[str] = mapped_column(String(255))
    base_model_id: Mapped[str | None] = mapped_column(ForeignKey("base_models.id"))
    """Null for a measurement without a model."""
    dataset_id: Mapped[str | None] = mapped_column(ForeignKey("datasets.id"))
    """Of a training run."""
    skip_bad_rows: Mapped[bool] = mapped_column(default=False)
    settings: Mapped[dict[str, Any]]
    """Of a training run `{"training": {…}, "engine": {…}}` as in `lohan.config.RunConfig`; of others `{"<kind>": {…}, "needs": {…}}`, see
    `runs.kinds`."""
    plan: Mapped[dict[str, Any] | None]
    """The `Plan` it was queued with."""
    started_plan: Mapped[dict[str, Any] | None]
    """The `Plan` its latest attempt began with, made for the machine as it was then; null before the first."""
    corrected_step_seconds: Mapped[float | None]
    """What a step is foreseen to take since the first steps have corrected the forecast; null where they have not."""
    priority: Mapped[int] = mapped_column(default=0, server_default="0")
    """Set by administrators: runs with a higher one come first in the queue."""
    queued_at: Mapped[datetime | None]
    """Since when it is in line; null of a draft. Kept where its trainer was interrupted or a drive was full: it takes its old place."""
    wanted: Mapped[Wanted] = mapped_column(text_enum(Wanted), default=Wanted.RUN)
    state: Mapped[RunState] = mapped_column(text_enum(RunState), default=RunState.QUEUED)
    state_reason: Mapped[str] = mapped_column(Text, default="")
    """Why it waits, paused or failed, in words a user can act on."""
    problem: Mapped[dict[str, Any] | None]
    """`LohanError.to_dict()` of a failed run, with `cause` (a `lohan.events.FailureCause`)."""
    pause_cause: Mapped[PauseCause | None] = mapped_column(text_enum(PauseCause))
    """Set while the run is paused."""
    start_after: Mapped[datetime | None]
    """Its next attempt does not begin before: a pause for breath after an attempt that came no further."""
    kill_attempt: Mapped[int | None]
    """The attempt whose trainer somebody wants killed; a later one is not meant."""
    prepared_at: Mapped[datetime | None]
    """When its rows had been tokenised; only then can it start."""
    epoch: Mapped[int] = mapped_column(default=0)
    """Raised by every supervisor that takes the run over; a write with a lower epoch is refused."""
    attempt: Mapped[int] = mapped_column(default=0)
    """How many trainers have been started for it."""
    devices: Mapped[list[str]]
    """Reserved devices: GPU UUIDs or `cpu:N`; empty while nothing is reserved."""
    reserved_ram_bytes: Mapped[int] = mapped_column(BigInteger, default=0)
    reserved_ssd_bytes: Mapped[int] = mapped_column(BigInteger, default=0)
    """Over all state directories."""
    reserved_directories: Mapped[dict[str, Any] | None]
    """The same by directory; null where nothing is reserved."""
    events_offset_bytes: Mapped[int] = mapped_column(BigInteger, default=0)
    """How far events.jsonl has been read into the database."""
    malformed_events: Mapped[int] = mapped_column(default=0)
    phase: Mapped[str] = mapped_column(String(32), default="")
    phase_progress: Mapped[float | None]
    step: Mapped[int] = mapped_column(default=0)
    total_steps: Mapped[int] = mapped_column(default=0)
    resumed_step: Mapped[int | None]
    """The step that the present attempt goes on from; null where it began from the base model."""
    loss: Mapped[float | None]
    first_loss: Mapped[float | None]
    """Mean loss over the evaluation rows before the first step."""
    last_loss: Mapped[float | None]
    """The same after the last step."""
    stopped_step: Mapped[int | None]
    """The step whose weights are the result, where somebody ended the training before its last."""
    eta_seconds: Mapped[float | None]
    created_at: Mapped[datetime] = mapped_column(default=now)
    started_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]
    deleted_at: Mapped[datetime | None]
    """When it was deleted: its files are gone, the row stays for what the queue owes to whom."""
    heartbeat_at: Mapped[datetime | None]
    """When the trainer last wrote an event; shown, and used to notice a hang, never to decide who owns the run."""

    def __init__(self, **columns: Any) -> None:
        # A column's own default comes with the insertion, and what a run needs and may be asked depends on its kind before that.
        super().__init__(**({"kind": RunKind.TRAIN} | columns))

    @property
    def reserved_space(self) -> dict[str, int]:
        """Bytes that it has reserved in each state directory."""
        return dict(self.reserved_directories or {})


class DeviceUse(Entity):
    """A stretch of time for which a run held its devices, from its claim to where it gave them back: what the queue owes to whom.

    Written with the transitions of the run's state, so that it says the same as they do; kept when the run is deleted.
    """

    __tablename__ = "device_uses"

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)
    began_at: Mapped[datetime] = mapped_column(primary_key=True)
    ended_at: Mapped[datetime | None]
    """Null while it holds them."""
    devices: Mapped[int]
    """How many."""


class RunEvent(Entity):
    """A trainer's event other than `step`, keyed so that reading a stretch again changes nothing."""

    __tablename__ = "run_events"

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    seq: Mapped[int] = mapped_column(primary_key=True)
    time: Mapped[float]
    type: Mapped[str] = mapped_column(String(32))
    fields: Mapped[dict[str, Any]]


class RunMetric(Entity):
    """One row per step; the latest attempt wins."""

    __tablename__ = "run_metrics"
    # Event streams ask twice a second for what came after (attempt, seq); without it each would read all of the run's steps.
    __table_args__ = (Index("ix_run_metrics_run_id_attempt_seq", "run_id", "attempt", "seq"),)

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    attempt: Mapped[int]
    seq: Mapped[int]
    time: Mapped[float]
    loss: Mapped[float | None]
    """Null where the loss was not a finite number."""
    learning_rate: Mapped[float]
    gradient_norm: Mapped[float | None]
    tokens: Mapped[int]
    tokens_per_second: Mapped[float | None]
    step_seconds: Mapped[float]
    epoch: Mapped[float | None]
    """How often the data had been gone through; null, as the following, for steps of a trainer that did not tell."""
    clip_rate: Mapped[float | None]
    """Share of all steps so far whose gradients were scaled down."""
    device_peak_bytes: Mapped[int | None] = mapped_column(BigInteger)
    host_bytes: Mapped[int | None] = mapped_column(BigInteger)


class Metric(StrEnum):
    """The numbers of a step that are curves: columns of `RunMetric`."""

    LOSS = "loss"
    LEARNING_RATE = "learning_rate"
    GRADIENT_NORM = "gradient_norm"
    TOKENS = "tokens"
    TOKENS_PER_SECOND = "tokens_per_second"
    STEP_SECONDS = "step_seconds"
    EPOCH = "epoch"
    CLIP_RATE = "clip_rate"
    DEVICE_PEAK_BYTES = "device_peak_bytes"
    HOST_BYTES = "host_bytes"


class RunCurve(Entity):
    """32 steps of one of a run's numbers in one row: what curves of long runs are made from, always in step with `run_metrics`."""

    __tablename__ = "run_curves"

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)
    metric: Mapped[str] = mapped_column(String(32), primary_key=True)
    bucket: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """The steps from 32 * bucket to 32 * bucket + 31."""
    first_step: Mapped[int]
    last_step: Mapped[int]
    steps: Mapped[int]
    """Steps there are in the bucket."""
    finite_steps: Mapped[int]
    """Those whose value was a finite number."""
    total: Mapped[float | None]
    """The sum of the finite values; null, as the following, where there is none."""
    first_value: Mapped[float | None]
    """Of the first step; null where it was not finite."""
    last_value: Mapped[float | None]
    minimum: Mapped[float | None]
    minimum_step: Mapped[int | None]
    """The first step that has it."""
    maximum: Mapped[float | None]
    maximum_step: Mapped[int | None]
    gap_step: Mapped[int | None]
    """The first step whose value was not finite."""
