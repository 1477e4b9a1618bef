"""What a trainer does between its first event and its last."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import psutil
import torch

from lohan.config import Precision, RunConfig
from lohan.data.pack import Batch, BatchSampler, TokenRows
from lohan.events import EventType, Phase
from lohan.models.export import save_pretrained
from lohan.models.load import empty_model, load_config, open_weights
from lohan.planning.plan import Plan
from lohan.streaming.executor import Session, init
from lohan.training.metrics import Clock, MeanLoss, learning_rate_factor
from lohan.training.plan_run import plan_run, state_directories
from lohan.training.reporter import Reporter
from lohan.training.setup import ReportedWeights, make_optimizer, prepare_rows, remove_states
from lohan.training.stopping import StopWatch
from lohan.units import format_count

if TYPE_CHECKING:
    from torch import nn

PLAN_FILE, EXPORT_FOLDER = "plan.json", "export"


class Attempt:
    """One start of a run: data, plan, model, evaluation, steps, evaluation, export."""

    def __init__(self, config: RunConfig, reporter: Reporter, stop: StopWatch) -> None:
        self._config, self._reporter, self._stop = config, reporter, stop
        self._directory = config.output.directory
        self._state_directories = state_directories(config)
        self._process = psutil.Process()

    def execute(self) -> None:
        model_config = load_config(self._config.model.path)
        rows = prepare_rows(self._config, model_config, self._reporter, self._stop)
        sampler = BatchSampler(len(rows), self._config.training.batch_size, self._config.training.seed)
        total_steps = self._config.training.max_steps or sampler.steps(self._config.training.epochs)
        remove_states(self._state_directories)  # of a killed attempt: their space is ours
        plan = self._plan(model_config)
        self._say_started(plan, total_steps)
        torch.manual_seed(self._config.training.seed)
        try:
            session, model, optimizer = self._load_model(model_config, plan)
            with session:
                clock = Clock(total_steps)
                clock.afterwards_seconds = self._evaluate(model, rows, sampler, session.device, "before")
                self._steps(session, model, optimizer, rows, sampler, clock, total_steps)
                self._evaluate(model, rows, sampler, session.device, "after")
                self._export(session, model_config)
        finally:
            remove_states(self._state_directories)

    def _plan(self, model_config: Any) -> Plan:
        plan = plan_run(self._config, model_config)
        temporary = self._directory / (PLAN_FILE + ".tmp")
        temporary.write_text(plan.model_dump_json(indent=2) + "\n", encoding="utf-8")
        temporary.replace(self._directory / PLAN_FILE)
        return plan

    def _say_started(self, plan: Plan, total_steps: int) -> None:
        self._reporter.say(
            EventType.STARTED,
            device=plan.device,
            precision=plan.precision,
            parameters=plan.parameters,
            total_steps=total_steps,
            batch_size=plan.batch_size,
            micro_batch_size=plan.micro_batch_size,
            sequence_length=plan.sequence_length,
        )

    def _load_model(self, model_config: Any, plan: Plan) -> tuple[Session, nn.Module, torch.optim.AdamW]:
        training, engine = self._config.training, self._config.engine
        if engine.threads:
            torch.set_num_threads(engine.threads)
        self._reporter.begin(Phase.LOADING_MODEL, f"Reading {format_count(plan.parameters)} parameters of {plan.model} into the states.")
        working = torch.bfloat16 if training.precision is Precision.BF16 else torch.float32
        model = empty_model(model_config, dtype=working)
        optimizer = make_optimizer(model, self._config)
        with open_weights(self._config.model.path) as weights:
            session = init(
                model,
                optimizer,
                batch_size=training.batch_size,
                seq_length=training.sequence_length,
                state_directories=self._state_directories,
                device=plan.device,
                precision=training.precision,
                states=engine.states,
                durability=engine.durability,
                ram_state_bytes=engine.ram_state_bytes,
                unsafe_filesystems=engine.unsafe_filesystems,
                weights=ReportedWeights(weights, self._reporter, self._stop),
                plan=plan,
                threads=engine.threads,
            )
        return session, model, optimizer

    def _evaluate(self, model: nn.Module, rows: TokenRows, sampler: BatchSampler, device: torch.device, when: str) -> float:
        """Measure the mean loss of the rows that are trained first; returns the seconds it took.

        The order is the sampler's, a shuffle by the run's seed: the first rows of a file often share one topic and would speak for it
        alone.
        """
        count = min(self._config.training.evaluation_rows, len(rows))
        if not count:
            return 0.0
        begun = time.monotonic()
        self._reporter.begin(Phase.EVALUATING, f"Measuring the loss of {count} training rows {when} the training.")
        loss = MeanLoss()
        # Rows of similar length share a batch, so that little is padding; the mean over tokens does not depend on the order.
        order = sorted(sampler.first(count), key=lambda row: len(rows.row(row)[0]))
        # Every batch streams all weights once, so a larger one costs fewer reads. Without gradients about 4 boundary tensors live at a
        # time where the plan counts blocks + 1: six times fewer rows than that stay well inside it.
        config: Any = model.config
        size = self._config.training.batch_size * max(1, (config.num_hidden_layers + 1) // 6)
        model.eval()
        with torch.no_grad():
            for start in range(0, count, size):
                self._stop.check()
                batch = rows.batch(order[start : start + size])
                loss.add(float(_loss(model, batch, device)), batch.trained_tokens)
                self._reporter.progress(min(1.0, (start + size) / count))
        model.train()
        self._reporter.say(EventType.EVALUATION, when=when, rows=count, loss=loss.value)
        return time.monotonic() - begun

    def _steps(
        self,
        session: Session,
        model: nn.Module,
        optimizer: torch.optim.AdamW,
        rows: TokenRows,
        sampler: BatchSampler,
        clock: Clock,
        total_steps: int,
    ) -> None:
        training = self._config.training
        self._reporter.begin(Phase.TRAINING, f"{total_steps} steps of {training.batch_size} rows.")
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(training, step, total_steps))
        for step in range(total_steps):
            self._stop.check()
            begun = time.monotonic()
            batch = rows.batch(sampler.batch(step))
            learning_rate = scheduler.get_last_lr()[0]
            loss = _loss(model, batch, session.device)
            loss.backward()  # type: ignore[no-untyped-call]  # torch declares it without types
            optimizer.step()
            scheduler.step()
            # The first unit of the next forward is the last to be updated, so waiting here costs nothing and names the step that failed.
            session.wait()
            seconds = time.monotonic() - begun
            clock.add(seconds)
            statistics = session.statistics
            self._reporter.say(
                EventType.STEP,
                step=step + 1,
                total_steps=total_steps,
                epoch=sampler.epoch(step),
                loss=float(loss.detach()),
                learning_rate=learning_rate,
                gradient_norm=statistics.last_step.gradient_norm if statistics.last_step is not None else None,
                tokens=batch.tokens,
                tokens_per_second=batch.tokens / seconds,
                step_seconds=seconds,
                eta_seconds=clock.eta_seconds(step + 1),
                device_peak_bytes=statistics.device_peak_bytes,
                host_bytes=self._process.memory_info().rss,
            )

    def _export(self, session: Session, model_config: Any) -> None:
        self._stop.check()
        self._reporter.begin(Phase.EXPORTING, "Writing the trained model as a Hugging Face folder.")
        save_pretrained(session, model_config, self._config.model.path, self._directory / EXPORT_FOLDER, progress=self._reporter.progress)


def _loss(model: nn.Module, batch: Batch, device: torch.device) -> torch.Tensor:
    """Mean loss over the batch's trained tokens."""
    tensors = {
        name: torch.from_numpy(getattr(batch, name)).to(device, non_blocking=True) for name in ("input_ids", "attention_mask", "labels")
    }
    loss: torch.Tensor = model(**tensors).loss
    return loss
