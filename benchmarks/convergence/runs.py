"""One training of each system over the same batches: its loss at every step, and on the held-out rows now and then."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import nn

import lohan
from benchmarks.convergence.data import Corpus
from benchmarks.convergence.plain import MasterWeightTraining, load_model
from lohan.config import KernelSet, Precision, Schedule, States, TrainingSection, UnsafeFilesystems
from lohan.models.load import empty_model, load_config
from lohan.models.weights import open_weights
from lohan.streaming.device import resolve_device
from lohan.training.metrics import MeanLoss, learning_rate_factor
from lohan.training.steps import batch_loss

FINAL_STEPS = 10
"""The held-out losses behind the last steps, whose mean is what a run is judged by."""
EVALUATION_INTERVAL = 10
_ALL_STATES_BYTES = 1 << 50


@dataclass(frozen=True)
class Setup:
    """What all systems have in common."""

    model: Path
    corpus: Corpus
    steps: int
    learning_rate: float
    device: str
    precision: Precision
    seed: int
    kernels: KernelSet
    """Of the engine; plain PyTorch has its own."""

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision is Precision.BF16 else torch.float32

    def scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
        """A tenth of the steps up, then half a cosine wave down."""
        training = TrainingSection(schedule=Schedule.COSINE, warmup_steps=self.steps // 10)
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(training, step, self.steps))


@dataclass
class Curve:
    """What one system did."""

    system: str
    micro_batches: int
    states: str
    losses: list[float] = field(default_factory=list)
    """Of each step, before its update."""
    held_out_steps: list[int] = field(default_factory=list)
    """After how many steps the held-out loss was measured."""
    held_out_losses: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        if self.system == "torch":
            return f"plain PyTorch, {self.micro_batches} micro-batch{'es' if self.micro_batches > 1 else ''}"
        return f"LoHan, {self.states} states"

    @property
    def final_loss(self) -> float:
        """Mean of the last `FINAL_STEPS` held-out losses."""
        return fmean(self.held_out_losses[-FINAL_STEPS:])

    def record(self) -> dict[str, Any]:
        return {
            "system": self.system,
            "micro_batches": self.micro_batches,
            "states": self.states,
            "held_out_final": self.final_loss,
            "losses": self.losses,
            "held_out_steps": self.held_out_steps,
            "held_out_losses": self.held_out_losses,
        }


def train_plain(setup: Setup, micro_batches: int, say: Callable[[str], None]) -> Curve:
    """Plain PyTorch, see `benchmarks.convergence.plain`."""
    device = resolve_device(setup.device)
    torch.manual_seed(setup.seed)
    model, masters = load_model(setup.model, dtype=setup.dtype, device=device)
    training = MasterWeightTraining(model, masters, learning_rate=setup.learning_rate, micro_batches=micro_batches)
    curve = Curve("torch", micro_batches, "fp32")
    _follow(setup, curve, model, device, training.step, setup.scheduler(training.optimizer), say)
    return curve


def train_engine(setup: Setup, states: States, say: Callable[[str], None]) -> Curve:
    """The engine, with all states in host memory and the whole batch as one micro-batch."""
    torch.manual_seed(setup.seed)
    model = empty_model(load_config(setup.model), dtype=setup.dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=setup.learning_rate, weight_decay=0.0)
    plain_states = "split" if setup.precision is Precision.BF16 else "fp32"
    curve = Curve("lohan", 1, "8bit" if states is States.EIGHT_BIT else plain_states)
    with (
        tempfile.TemporaryDirectory() as folder,
        open_weights(setup.model) as weights,
        lohan.init(
            model,
            optimizer,
            batch_size=setup.corpus.sampler.batch_size,
            seq_length=max(setup.corpus.rows.longest, 1),
            state_directories=[folder],
            device=setup.device,
            precision=setup.precision,
            states=states,
            kernels=setup.kernels,
            ram_state_bytes=_ALL_STATES_BYTES,
            unsafe_filesystems=UnsafeFilesystems.ALLOW,
            weights=weights,
        ) as session,
    ):

        def step(batch: Any) -> float:
            loss = batch_loss(model, batch, session.device)
            loss.backward()
            optimizer.step()
            session.wait()
            return float(loss.detach())

        _follow(setup, curve, model, session.device, step, setup.scheduler(optimizer), say)
    return curve


def _follow(
    setup: Setup,
    curve: Curve,
    model: nn.Module,
    device: torch.device,
    step: Callable[[Any], float],
    scheduler: torch.optim.lr_scheduler.LambdaLR,
    say: Callable[[str], None],
) -> None:
    """Do all steps, measuring the held-out loss before the first, every few, and after each of the last."""

    def evaluate(done: int) -> None:
        curve.held_out_steps.append(done)
        curve.held_out_losses.append(held_out_loss(model, setup.corpus, device))
        say(f"{curve.name}: step {done} of {setup.steps}, held-out loss {curve.held_out_losses[-1]:.4f}")

    evaluate(0)
    for number in range(setup.steps):
        curve.losses.append(step(setup.corpus.batch(number)))
        scheduler.step()
        done = number + 1
        if done % EVALUATION_INTERVAL == 0 or done > setup.steps - FINAL_STEPS:
            evaluate(done)


def held_out_loss(model: nn.Module, corpus: Corpus, device: torch.device) -> float:
    """Mean over the trained tokens of all held-out rows."""
    mean = MeanLoss()
    model.eval()
    with torch.no_grad():
        for batch in corpus.held_out_batches():
            mean.add(float(batch_loss(model, batch, device)), batch.trained_tokens)
    model.train()
    return mean.value
