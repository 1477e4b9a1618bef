"""The training loop: batches in, optimizer steps, an event and a checkpoint at every step boundary."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil
import torch

from lohan.config import TrainingSection
from lohan.data.pack import Batch, BatchSampler, TokenRows
from lohan.events import EventType, Phase
from lohan.planning.correction import MeasuredStep
from lohan.streaming.executor import Session
from lohan.training.checkpoint import Checkpoint, RandomStates, SchedulerState, finite_metrics
from lohan.training.gradients import FiniteWatch, gradient_facts, warn_of_skipped_step
from lohan.training.metrics import Clock, learning_rate_factor
from lohan.training.recording import Recording
from lohan.training.reporter import Reporter
from lohan.training.stopping import StopWatch

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True)
class Course:
    """What a run goes through, before it is known where it begins."""

    rows: TokenRows
    sampler: BatchSampler
    total_steps: int
    data_digest: str
    """`TokenRows.digest`; empty where nothing is kept that would have to fit it."""

    @classmethod
    def of(cls, rows: TokenRows, training: TrainingSection, *, data_digest: str) -> Course:
        sampler = BatchSampler(len(rows), training.batch_size, training.seed)
        return cls(rows, sampler, training.max_steps or sampler.steps(training.epochs), data_digest)


class Steps:
    """Carries out the steps of one attempt.

    Args:
        recording: decides which boundaries are recorded.
        checkpoint: the boundary to go on from; None begins with the first step.
    """

    def __init__(
        self,
        session: Session,
        model: nn.Module,
        optimizer: torch.optim.AdamW,
        course: Course,
        training: TrainingSection,
        reporter: Reporter,
        stop: StopWatch,
        recording: Recording,
        checkpoint: Checkpoint | None,
    ) -> None:
        self._session, self._model, self._optimizer = session, model, optimizer
        self._course, self._training, self._reporter, self._stop = course, training, reporter, stop
        self._scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: learning_rate_factor(training, step, course.total_steps)
        )
        self._recording = recording
        self._metrics: dict[str, Any] = {}  # of the step that was done last
        self._clock = Clock(course.total_steps)
        self._finite = FiniteWatch()
        self._process = psutil.Process()
        self._first, self._tokens_seen = 0, 0
        if checkpoint is not None:
            self._first, self._tokens_seen = checkpoint.step, checkpoint.tokens_seen
            self._clock.afterwards_seconds = checkpoint.evaluation_seconds
            checkpoint.scheduler.restore(self._scheduler)
            checkpoint.random.restore(session.device)

    def run(self, *, evaluation_seconds: float | None = None, on_step: Callable[[MeasuredStep], None] = lambda _: None) -> int:
        """Do the steps that are left, or as many as are wanted; returns how many of the run's steps are done then.

        Args:
            evaluation_seconds: what the evaluation before them took, where there was one.
            on_step: called after every step; its last updates may be under way.

        Raises:
            StopRequested: the run was asked to stop; where it goes on from has been recorded.
            NonFiniteError: too many steps in a row had no finite loss or gradients.
        """
        if evaluation_seconds is not None:
            self._clock.afterwards_seconds = evaluation_seconds
        left = self._course.total_steps - self._first
        self._reporter.begin(Phase.TRAINING, f"{left} steps of {self._training.batch_size} rows.")
        done = self._first
        while done < self._course.total_steps:
            self._stop_if_asked(done)
            # Not before the first step: there would be nothing to keep.
            if done and self._stop.is_enough:
                self._record(done, is_last=True)
                break
            measured, self._metrics = self._step(done)
            done += 1
            on_step(measured)
            self._reporter.say(EventType.STEP, **self._metrics)
            self._finite.note(done, loss=self._metrics["loss"], skipped=self._metrics["skipped"])
            self._record(done)
        self._recording.finish()
        return done

    def _stop_if_asked(self, steps: int) -> None:
        """Leave the training behind step `steps`, with a record of it where the run will go on."""
        if self._stop.is_asked:
            if not self._stop.is_cancelled:
                self._record(steps, is_last=True)
                self._recording.finish()
            self._stop.check()

    def _record(self, steps: int, *, is_last: bool = False) -> None:
        """Record the boundary behind step `steps`, if that is due."""
        if self._recording.is_due(steps, is_last=is_last):
            # The event before the record: a step that is recorded is never done again, so nobody would say it a second time.
            self._reporter.sync()
            self._recording.record(steps, self._checkpoint(steps, self._metrics).to_payload())

    def _step(self, step: int) -> tuple[MeasuredStep, dict[str, Any]]:
        """Do step `step` (from 0); returns how long it took and what its event says."""
        course, session = self._course, self._session
        begun = time.monotonic()
        batch = course.rows.batch(course.sampler.batch(step))
        learning_rate = self._scheduler.get_last_lr()[0]
        loss = batch_loss(self._model, batch, session.device)
        loss.backward()  # type: ignore[no-untyped-call]  # torch declares it without types
        self._optimizer.step()
        self._scheduler.step()
        # Not for the updates: those that begin after the backward lie under the next forward.
        session.wait_gradients()
        seconds = time.monotonic() - begun
        self._clock.add(seconds)
        self._tokens_seen += batch.tokens
        statistics = session.statistics
        warn_of_skipped_step(statistics, self._reporter)
        rows, length = batch.input_ids.shape
        clipped = statistics.last_step is not None and statistics.last_step.clipped
        return MeasuredStep(step + 1, rows, length, seconds, clipped), {
            "step": step + 1,
            "total_steps": course.total_steps,
            "epoch": course.sampler.epoch(step),
            "loss": float(loss.detach()),
            "learning_rate": learning_rate,
            **gradient_facts(statistics),
            "tokens": batch.tokens,
            "tokens_per_second": batch.tokens / seconds,
            "step_seconds": seconds,
            "eta_seconds": self._clock.eta_seconds(step + 1),
            "device_peak_bytes": statistics.device_peak_bytes,
            "host_bytes": self._process.memory_info().rss,
        }

    def _checkpoint(self, steps: int, metrics: dict[str, Any]) -> Checkpoint:
        """The boundary behind step `steps` (from 1): before the next forward draws a random number."""
        course, session = self._course, self._session
        return Checkpoint(
            step=steps,
            total_steps=course.total_steps,
            training=self._training.model_dump(mode="json"),
            micro_batch_size=session.micro_batch_size,
            grain=session.grain,
            chunk_parameters=session.chunk_parameters,
            data_digest=course.data_digest,
            data=course.sampler.position(steps),
            random=RandomStates.capture(session.device),
            scheduler=SchedulerState.capture(self._scheduler),
            tokens_seen=self._tokens_seen,
            evaluation_seconds=self._clock.afterwards_seconds,
            metrics=finite_metrics(**{name: metrics[name] for name in ("loss", "learning_rate", "gradient_norm")}),
        )


def batch_loss(model: nn.Module, batch: Batch, device: torch.device) -> torch.Tensor:
    """Mean loss over the batch's trained tokens."""
    tensors = {
        name: torch.from_numpy(getattr(batch, name)).to(device, non_blocking=True) for name in ("input_ids", "attention_mask", "labels")
    }
    loss: torch.Tensor = model(**tensors).loss
    return loss
