"""What a trainer does between its first event and its last."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from lohan.config import Precision, RamStates, RunConfig
from lohan.events import EventType, ExitReason, Phase
from lohan.models.export import save_pretrained
from lohan.models.load import empty_model, load_config, open_weights
from lohan.planning.correction import MeasuredStep
from lohan.planning.plan import Plan
from lohan.streaming.executor import Session, init
from lohan.training.checkpoint import Checkpoint
from lohan.training.correcting import PlanWatch, write_plan
from lohan.training.metrics import MeanLoss
from lohan.training.plan_run import PlannedRun, prepare_run, state_directories
from lohan.training.recording import Recording
from lohan.training.reporter import Reporter
from lohan.training.resume import can_resume, find_checkpoint, is_resumable
from lohan.training.setup import ReportedWeights, make_optimizer, prepare_rows, remove_states
from lohan.training.steps import Course, Steps, batch_loss
from lohan.training.stopping import StopWatch
from lohan.training.tracing import RunTrace, TraceRequest
from lohan.units import format_count

if TYPE_CHECKING:
    from torch import nn

EXPORT_FOLDER = "export"


class Attempt:
    """One start of a run: data, plan, model, evaluation, steps, evaluation, export.

    Where the state directories hold the record of a step, the run goes on from there: the model is not read again, and what was
    measured before the first step is not measured again.

    Args:
        resume_from: a named snapshot to go on from, whatever else the state directories hold.
    """

    def __init__(
        self, config: RunConfig, reporter: Reporter, stop: StopWatch, *, resume_from: str | None, trace: TraceRequest | None
    ) -> None:
        self._config, self._reporter, self._stop, self._resume_from, self._trace = config, reporter, stop, resume_from, trace
        self._directory = config.output.directory
        self._state_directories = state_directories(config)

    def tidy(self, reason: ExitReason) -> None:
        """Remove the states, unless the run can go on from them. After the exit event: else a kill in between would undo the whole run."""
        if reason in (ExitReason.SUCCEEDED, ExitReason.CANCELLED) or not can_resume(self._config):
            remove_states(self._state_directories)

    def execute(self) -> int | None:
        """Do it; returns the step after which the training was ended by a request, None where it did all its steps.

        Raises:
            StopRequested: the run was asked to be left.
            Exception: whatever went wrong; `lohan.training.failures` has words for it.
        """
        model_config = load_config(self._config.model.path)
        rows = prepare_rows(self._config, model_config, self._reporter, self._stop)
        course = Course.of(rows, self._config.training, data_digest=rows.digest if is_resumable(self._config) else "")
        checkpoint = find_checkpoint(self._config, course, resume_from=self._resume_from)
        planned = self._plan(model_config, checkpoint)
        plan = planned.plan
        self._say_started(plan, course.total_steps, checkpoint)
        torch.manual_seed(self._config.training.seed)
        done = checkpoint.step if checkpoint is not None else 0
        tracing = RunTrace(self._trace, course.total_steps, done, self._reporter, is_watched=planned.running is not None)
        session, model, optimizer = self._load_model(model_config, plan, checkpoint, tracing)
        with tracing, session:
            tracing.attach(session)
            self._warn_of_changes(checkpoint, session)
            recording = Recording(
                session,
                self._config,
                self._state_directories,
                self._reporter,
                total_steps=course.total_steps,
                resumed_step=done,
            )
            watch = PlanWatch(planned, session, tracing.trace, self._reporter, self._directory, begin=tracing.free_from)

            def on_step(step: MeasuredStep) -> None:
                tracing.step_done()
                watch.step_done(step)

            steps = Steps(session, model, optimizer, course, self._config.training, self._reporter, self._stop, recording, checkpoint)
            before = self._evaluate(model, course, session.device, "before") if checkpoint is None else None
            done = steps.run(evaluation_seconds=before, on_step=on_step)
            self._evaluate(model, course, session.device, "after")
            self._export(session, model_config)
        return done if done < course.total_steps else None

    def _plan(self, model_config: Any, checkpoint: Checkpoint | None) -> PlannedRun:
        if checkpoint is None:
            planned = prepare_run(self._config, model_config)
        else:
            planned = prepare_run(
                self._config,
                model_config,
                micro_batch_size=checkpoint.micro_batch_size,
                grain=checkpoint.grain,
                chunk_parameters=checkpoint.chunk_parameters,
            )
        write_plan(planned.plan, self._directory)
        return planned

    def _say_started(self, plan: Plan, total_steps: int, checkpoint: Checkpoint | None) -> None:
        self._reporter.say(
            EventType.STARTED,
            device=plan.device,
            precision=plan.precision,
            parameters=plan.parameters,
            total_steps=total_steps,
            batch_size=plan.batch_size,
            micro_batch_size=plan.micro_batch_size,
            sequence_length=plan.sequence_length,
            resumed_step=checkpoint.step if checkpoint is not None else 0,
            loss=checkpoint.metrics.get("loss") if checkpoint is not None else None,
        )

    def _warn_of_changes(self, checkpoint: Checkpoint | None, session: Session) -> None:
        """What keeps a resumed run from being, bit for bit, the one that was never interrupted."""
        if checkpoint is None:
            return
        if checkpoint.torch_version != torch.__version__:
            self._reporter.warn(
                f"The run was started with torch {checkpoint.torch_version} and goes on with {torch.__version__}:"
                " its numbers may differ in their last digits."
            )
        if checkpoint.micro_batch_size != session.micro_batch_size:
            self._reporter.warn(
                f"The run had micro-batches of {checkpoint.micro_batch_size} and goes on with {session.micro_batch_size}:"
                " its numbers may differ in their last digits."
            )
        if not checkpoint.random.fits(session.device):
            self._reporter.warn("The run has moved to a GPU: from here on its dropout masks are others than they would have been.")

    def _load_model(
        self, model_config: Any, plan: Plan, checkpoint: Checkpoint | None, tracing: RunTrace
    ) -> tuple[Session, nn.Module, torch.optim.AdamW]:
        training, engine = self._config.training, self._config.engine
        if engine.threads:
            torch.set_num_threads(engine.threads)
        what = (
            f"Reading {format_count(plan.parameters)} parameters of {plan.model} into the states."
            if checkpoint is None
            else f"Opening the states of step {checkpoint.step}."
        )
        self._reporter.begin(Phase.LOADING_MODEL, what)
        working = torch.bfloat16 if training.precision is Precision.BF16 else torch.float32
        model = empty_model(model_config, dtype=working)
        optimizer = make_optimizer(model, self._config)
        with nullcontext() if checkpoint is not None else open_weights(self._config.model.path) as weights:
            session = init(
                model,
                optimizer,
                batch_size=training.batch_size,
                seq_length=training.sequence_length,
                state_directories=self._state_directories,
                device=plan.device,
                precision=training.precision,
                states=engine.states,
                schedule=engine.schedule,
                clip=training.clip,
                max_gradient_norm=training.max_gradient_norm,
                clip_updates=engine.clip_updates,
                gradient_buffers=engine.gradient_buffers,
                durability=engine.durability,
                ram_state_bytes=None if isinstance(engine.ram_state_bytes, RamStates) else engine.ram_state_bytes,
                unsafe_filesystems=engine.unsafe_filesystems,
                weights=ReportedWeights(weights, self._reporter, self._stop) if weights is not None else None,
                plan=plan,
                threads=engine.threads,
                resume=checkpoint is not None,
                resume_from=self._resume_from,
                trace=tracing.trace,
            )
        return session, model, optimizer

    def _evaluate(self, model: nn.Module, course: Course, device: torch.device, when: str) -> float:
        """Measure the mean loss of the rows that are trained first; returns the seconds it took.

        The order is the sampler's, a shuffle by the run's seed: the first rows of a file often share one topic and would speak for it
        alone.
        """
        count = min(self._config.training.evaluation_rows, len(course.rows))
        if not count:
            return 0.0
        begun = time.monotonic()
        self._reporter.begin(Phase.EVALUATING, f"Measuring the loss of {count} training rows {when} the training.")
        loss = MeanLoss()
        # Rows of similar length share a batch, so that little is padding; the mean over tokens does not depend on the order.
        order = sorted(course.sampler.first(count), key=lambda row: len(course.rows.row(row)[0]))
        # Every batch streams all weights once, so a larger one costs fewer reads. Without gradients about 4 boundary tensors live at a
        # time where the plan counts blocks + 1: six times fewer rows than that stay well inside it.
        config: Any = model.config
        size = self._config.training.batch_size * max(1, (config.num_hidden_layers + 1) // 6)
        model.eval()
        with torch.no_grad():
            for start in range(0, count, size):
                self._stop.check()
                batch = course.rows.batch(order[start : start + size])
                loss.add(float(batch_loss(model, batch, device)), batch.trained_tokens)
                self._reporter.progress(min(1.0, (start + size) / count))
        model.train()
        self._reporter.say(EventType.EVALUATION, when=when, rows=count, loss=loss.value)
        return time.monotonic() - begun

    def _export(self, session: Session, model_config: Any) -> None:
        self._stop.check()
        self._reporter.begin(Phase.EXPORTING, "Writing the trained model as a Hugging Face folder.")
        save_pretrained(session, model_config, self._config.model.path, self._directory / EXPORT_FOLDER, progress=self._reporter.progress)
