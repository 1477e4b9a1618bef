"""The plain PyTorch training that the engine is compared with, and small models to train both ways."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import lohan
from lohan.config import Precision, UnsafeFilesystems

VOCABULARY = 100
Batch = dict[str, torch.Tensor]
MakeOptimizer = Callable[[nn.Module], torch.optim.AdamW]
MakeScheduler = Callable[[torch.optim.Optimizer], Any]


def make_llama(*, tied: bool = False, seed: int = 0, attention: str = "sdpa", **options: Any) -> nn.Module:
    """A Llama of 3 blocks and about 140,000 parameters, in fp32, with everything else as transformers sets it."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    settings = {"vocab_size": VOCABULARY, "tie_word_embeddings": tied, "attn_implementation": attention}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **settings, **options})).train()


def make_batches(steps: int, *, batch: int = 4, length: int = 16, padded: bool = False, seed: int = 1) -> list[Batch]:
    """Random tokens; with `padded`, rows of different lengths whose padding is masked and untrained."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(steps):
        tokens = torch.randint(0, VOCABULARY, (batch, length), generator=generator)
        mask, labels = torch.ones_like(tokens), tokens.clone()
        if padded:
            for row in range(batch):
                end = int(torch.randint(length // 2, length + 1, (), generator=generator))
                mask[row, end:], labels[row, end:], labels[row, : row + 1] = 0, -100, -100
        batches.append({"input_ids": tokens, "attention_mask": mask, "labels": labels})
    return batches


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-3)


def two_groups(model: nn.Module) -> torch.optim.AdamW:
    """Weight decay on matrices only, and another learning rate and betas for the rest."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": 3e-3, "betas": (0.8, 0.95)}], lr=1e-3
    )


@dataclass
class Outcome:
    """What a training run leaves: its losses, weights before and after (fp32), and the squared gradient norm of each step."""

    losses: list[float]
    before: dict[str, torch.Tensor]
    after: dict[str, torch.Tensor]
    squared_norms: list[float]


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().float().cpu().clone() for name, parameter in model.named_parameters()}


def on_device_of(model: nn.Module, batch: Batch) -> Batch:
    device = next(model.parameters()).device
    return {name: tensor.to(device) for name, tensor in batch.items()}


def grouped(batches: Sequence[Batch], size: int) -> list[Sequence[Batch]]:
    return [batches[start : start + size] for start in range(0, len(batches), size)]


def token_counts(batches: Sequence[Batch]) -> list[int]:
    """Trained tokens of each batch: the first token of a row is predicted from nothing."""
    return [int((batch["labels"][:, 1:] != -100).sum()) for batch in batches]


def train_plain(
    model: nn.Module,
    batches: Sequence[Batch],
    *,
    make_optimizer: MakeOptimizer = adamw,
    make_scheduler: MakeScheduler | None = None,
    on_step: Callable[[int, nn.Module], None] | None = None,
    max_gradient_norm: float | None = None,
    accumulation: int = 1,
    seed: int = 7,
) -> Outcome:
    """fp32 training with torch.optim.AdamW; clipped by `clip_grad_norm_` where a largest norm is given.

    With `accumulation` each step takes that many batches, and its loss is the mean over all their tokens.
    """
    before = weights_of(model)
    optimizer = make_optimizer(model)
    scheduler = make_scheduler(optimizer) if make_scheduler else None
    torch.manual_seed(seed)
    losses, norms = [], []
    for step, group in enumerate(grouped(batches, accumulation)):
        if on_step:
            on_step(step, model)
        loss = torch.zeros(())
        for part, tokens in zip(group, token_counts(group), strict=True):
            share = model(**on_device_of(model, part)).loss * (tokens / sum(token_counts(group)))
            share.backward()
            loss = loss + share.detach().cpu()
        norms.append(sum(p.grad.double().pow(2).sum().item() for p in model.parameters() if p.grad is not None))
        if max_gradient_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_gradient_norm)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler:
            scheduler.step()
        losses.append(loss.item())
    return Outcome(losses, before, weights_of(model), norms)


def train_plain_bf16(
    model: nn.Module,
    batches: Sequence[Batch],
    *,
    max_gradient_norm: float | None = None,
    accumulation: int = 1,
    lr: float = 1e-3,
    seed: int = 7,
) -> Outcome:
    """bf16 training over fp32 master weights: gradients in bf16, AdamW in fp32, the weights rounded from the masters after each step.

    Gradients are added up and clipped in fp32; see `train_plain` for what the options mean.
    """
    before = weights_of(model)
    masters = [parameter.detach().float().clone().requires_grad_() for parameter in model.parameters()]
    model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(masters, lr=lr)
    torch.manual_seed(seed)
    losses, norms = [], []
    for group in grouped(batches, accumulation):
        loss = torch.zeros(())
        optimizer.zero_grad()
        for part, tokens in zip(group, token_counts(group), strict=True):
            share = model(**on_device_of(model, part)).loss * (tokens / sum(token_counts(group)))
            share.backward()
            loss = loss + share.detach().cpu()
            for master, parameter in zip(masters, model.parameters(), strict=True):
                master.grad = parameter.grad.float() if master.grad is None else master.grad + parameter.grad.float()
                parameter.grad = None
        norms.append(sum(master.grad.double().pow(2).sum().item() for master in masters))
        if max_gradient_norm is not None:
            nn.utils.clip_grad_norm_(masters, max_gradient_norm)
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
        losses.append(loss.item())
    names = [name for name, _ in model.named_parameters()]
    return Outcome(losses, before, dict(zip(names, (master.detach().cpu() for master in masters), strict=True)), norms)


def train_streamed(
    model: nn.Module,
    batches: Sequence[Batch],
    directory: Path,
    *,
    make_optimizer: MakeOptimizer = adamw,
    make_scheduler: MakeScheduler | None = None,
    on_step: Callable[[int, nn.Module], None] | None = None,
    accumulation: int = 1,
    commit_every: int = 0,
    seed: int = 7,
    **options: Any,
) -> Outcome:
    """The same through the engine. Two micro-batches, small chunks, 3 slots and the CPU, unless `options` say otherwise.

    With `accumulation` the tokens of a whole step are what every batch's summed loss is divided by. Every `commit_every`th step is
    committed; 0 leaves that to the engine.
    """
    before = weights_of(model)
    optimizer = make_optimizer(model)
    scheduler = make_scheduler(optimizer) if make_scheduler else None
    losses, norms = [], []
    with open_session(model, optimizer, directory, **options) as session:
        torch.manual_seed(seed)
        for step, group in enumerate(grouped(batches, accumulation)):
            if on_step:
                on_step(step, model)
            tokens = {"num_items_in_batch": sum(token_counts(group))} if accumulation > 1 else {}
            loss = torch.zeros(())
            for number, part in enumerate(group):
                with lohan.accumulate() if number + 1 < len(group) else nullcontext():
                    share = model(**on_device_of(model, part), **tokens).loss
                    share.backward()
                loss = loss + share.detach().cpu()
            optimizer.step()
            optimizer.zero_grad()
            if scheduler:
                scheduler.step()
            losses.append(loss.item())
            session.wait()
            if commit_every and (step + 1) % commit_every == 0:
                session.commit({"step": step + 1})
            norms.append(session.statistics.last_step.squared_gradient_norm)
        after = {name: tensor.float() for name, tensor in session.named_weights()}
    return Outcome(losses, before, after, norms)


def open_session(model: nn.Module, optimizer: torch.optim.AdamW, directory: Path, **options: Any) -> lohan.Session:
    settings: dict[str, Any] = {
        "batch_size": 4,
        "seq_length": 16,
        "micro_batch_size": 2,
        "device": "cpu",
        "kernels": "torch",  # what plain training computes with, on a GPU too
        "precision": Precision.FP32,
        "state_directories": [directory],
        "chunk_parameters": 4096,
        "threads": 1,
        "unsafe_filesystems": UnsafeFilesystems.ALLOW,  # a temporary folder may well be in memory
    }
    return lohan.init(model, optimizer, **{**settings, **options})


@dataclass(frozen=True)
class Measured:
    """How far one comparison was off: `loss` at its worst step, `weights` as `relative_difference` has it."""

    steps: int
    loss: float
    weights: float


MEASURED: list[Measured] = []
"""Every comparison made by `assert_equal_training`, for the summary that the test run prints."""


def relative_difference(streamed: Outcome, plain: Outcome) -> float:
    """Length of the difference between the final weights, over the length of the way plain training went from the initial ones."""
    assert streamed.after.keys() == plain.after.keys()
    difference = sum((streamed.after[name] - plain.after[name]).double().pow(2).sum().item() for name in plain.after)
    way = sum((plain.after[name] - plain.before[name]).double().pow(2).sum().item() for name in plain.after)
    return (difference / way) ** 0.5


def assert_equal_training(streamed: Outcome, plain: Outcome) -> None:
    """fp32 on both sides: only the order of sums differs (micro-batches, chunks of tokens, weighted means).

    One fp32 sum of a few hundred terms is off by some 1e-7 relative; micro-batches alone were measured to move plain training of such a
    model by 2e-7 in the loss and 1.2e-5 in the weights over 20 steps.
    """
    losses = max(abs(ours - theirs) / abs(theirs) for ours, theirs in zip(streamed.losses, plain.losses, strict=True))
    MEASURED.append(Measured(len(plain.losses), losses, relative_difference(streamed, plain)))
    for step, (ours, theirs) in enumerate(zip(streamed.losses, plain.losses, strict=True)):
        assert abs(ours - theirs) <= 1e-6 * abs(theirs), f"loss of step {step + 1}: {ours} != {theirs}"
    assert relative_difference(streamed, plain) < 1e-4


def assert_bitwise_equal(one: Outcome, other: Outcome) -> None:
    assert one.losses == other.losses
    assert one.squared_norms == other.squared_norms
    assert all(torch.equal(one.after[name], other.after[name]) for name in one.after)


@contextmanager
def block_slices(model: nn.Module, micro_batch_size: int) -> Iterator[None]:
    """Inside the block, plain `model` runs each transformer block slice by slice, as the engine does: it then draws the same dropout."""
    model.config.use_cache = False  # with a cache, the second slice would attend to the keys of the first
    blocks = list(model.model.layers)
    for block in blocks:
        block.forward = _sliced(type(block).forward.__get__(block), micro_batch_size)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


def _sliced(forward: Callable[..., torch.Tensor], size: int) -> Callable[..., torch.Tensor]:
    def run(hidden_states: torch.Tensor, **arguments: Any) -> torch.Tensor:
        batch = hidden_states.shape[0]

        def part(value: Any, start: int) -> Any:
            if isinstance(value, tuple):
                return tuple(part(item, start) for item in value)
            return value[start : start + size] if isinstance(value, torch.Tensor) and value.shape[0] == batch else value

        return torch.cat(
            [
                forward(hidden_states[start : start + size], **{name: part(value, start) for name, value in arguments.items()})
                for start in range(0, batch, size)
            ]
        )

    return run


def twin(model: nn.Module) -> nn.Module:
    """A second model with the same weights."""
    return copy.deepcopy(model)
