"""Plain PyTorch, RoundPipe 0.1.1 and DeepSpeed 0.19.8 behind one interface. Each is only called, through its documented interface."""

from __future__ import annotations

import inspect
import os
from typing import Any, Protocol

import torch

from benchmarks.peers.settings import LEARNING_RATE, PeerTask, System
from lohan.config import Precision


class Trainer(Protocol):
    """A system that holds a model."""

    def use(self, micro_batch: int, variant: str) -> None:
        """From the next step on."""

    def train(self, tokens: torch.Tensor) -> float:
        """Forward, backward and update with one batch; returns the loss."""

    def settle(self) -> None:
        """End whatever goes on in the background."""


def make_trainer(task: PeerTask, model: Any, device: torch.device) -> Trainer:
    """The system of a task around a model that lies in host memory."""
    match task.system:
        case System.TORCH:
            return PlainTrainer(task, model, device)
        case System.ROUNDPIPE:
            return RoundPipeTrainer(task, model)
        case _:
            return DeepSpeedTrainer(task, model)


def recompute_or_keep(model: Any, variant: str, *, reentrant: bool) -> None:
    """transformers' own activation checkpointing, or none."""
    if variant == "keep":
        model.gradient_checkpointing_disable()
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})


class PlainTrainer:
    """What a careful user writes: bf16 weights, `torch.optim.AdamW` on fp32 masters, everything on one device."""

    def __init__(self, task: PeerTask, model: Any, device: torch.device) -> None:
        self._task, self._model = task, model.to(device)
        self._parameters = list(self._model.parameters())
        whole = task.precision is Precision.FP32
        self._masters = self._parameters if whole else [weight.detach().float().requires_grad_() for weight in self._parameters]
        self._optimizer = torch.optim.AdamW(self._masters, lr=LEARNING_RATE, fused=True if task.tuned else None)
        self.use(task.micro_batch, task.variant)

    def use(self, micro_batch: int, variant: str) -> None:
        self._micro_batch = micro_batch
        recompute_or_keep(self._model, variant, reentrant=False)

    def train(self, tokens: torch.Tensor) -> float:
        parts = tokens.to(self._parameters[0].device).split(self._micro_batch)
        total = 0.0
        for part in parts:
            loss = self._model(input_ids=part, labels=part).loss / len(parts)
            loss.backward()
            total += loss.detach()
            self._collect_gradients()
        if self._task.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._masters, self._task.max_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self._masters is not self._parameters:
            with torch.no_grad():
                torch._foreach_copy_(self._parameters, self._masters)
        return float(total)

    def _collect_gradients(self) -> None:
        if self._masters is self._parameters:
            return
        for master, parameter in zip(self._masters, self._parameters, strict=True):
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None:
                master.grad = gradient.float() if master.grad is None else master.grad.add_(gradient)

    def settle(self) -> None:
        return


class RoundPipeTrainer:
    """RoundPipe with its preset for Llama and its Adam as AdamW.

    As installed: micro-batches and grain by default, logits and their loss as in its quick start, updates one step late. Tuned: the fused
    chunked loss of its own benchmark, clipping, updates that are over before the next step.
    """

    def __init__(self, task: PeerTask, model: Any) -> None:
        from roundpipe import wrap_model_to_roundpipe
        from roundpipe.models import llama
        from roundpipe.optim import Adam

        _accept_old_keywords(llama)
        self._task = task
        self._model = wrap_model_to_roundpipe(model, use_sequential_preset=True, optim_dtype=torch.float32)
        self._parameters = list(self._model.optim_parameters())
        # The weight decay of torch.optim.AdamW, which all others have too.
        self._optimizer = Adam(self._parameters, lr=LEARNING_RATE, weight_decay=0.01, decoupled_weight_decay=True)
        self.use(task.micro_batch, task.variant)

    def use(self, micro_batch: int, variant: str) -> None:
        from roundpipe import RoundPipeRunConfig

        self._parts = self._task.batch // micro_batch
        grain = {"recompute_grain": variant} if self._task.tuned else {}
        self._config = RoundPipeRunConfig(num_microbatch=self._parts, **grain)

    def train(self, tokens: torch.Tensor) -> float:
        parts = self._parts
        inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}
        loss = self._model.forward_backward(
            input_kwargs=inputs | ({"return_logits": False} if self._task.tuned else {}),
            loss_fn=lambda outputs, _: outputs.loss / parts,
            run_config=self._config,
        )
        self._model.step(self._update, is_async=not self._task.tuned)
        return float(loss)

    def _update(self) -> None:
        if self._task.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._parameters, self._task.max_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def settle(self) -> None:
        self._model.optim_updated.wait()


def _accept_old_keywords(module: Any) -> None:
    """transformers 5 renamed a keyword of `create_causal_mask` that RoundPipe 0.1.1 still gives, and dropped others."""
    make = module.create_causal_mask
    known = inspect.signature(make).parameters
    if "input_embeds" in known:
        return

    def create_causal_mask(*, input_embeds: Any, **others: Any) -> Any:
        return make(inputs_embeds=input_embeds, **{name: value for name, value in others.items() if name in known})

    module.create_causal_mask = create_causal_mask


class DeepSpeedTrainer:
    """DeepSpeed ZeRO-3, parameters in host memory, optimizer there or in files."""

    def __init__(self, task: PeerTask, model: Any) -> None:
        # One process and no launcher: what `deepspeed` or `torchrun` would set. Port 0 lets the store choose a free one.
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        import deepspeed

        self._task, config = task, deepspeed_config(task)
        deepspeed.init_distributed()
        deepspeed.zero.Init(module=model, config_dict_or_path=config)
        self._engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
        self.use(task.micro_batch, task.variant)

    def use(self, micro_batch: int, variant: str) -> None:
        self._micro_batch = micro_batch
        self._engine.set_train_micro_batch_size(micro_batch)
        self._engine.set_train_batch_size(self._task.batch)
        # Reentrant, as DeepSpeed's guides have it: the other kind compares shapes of weights that ZeRO-3 has released.
        recompute_or_keep(self._engine.module, variant, reentrant=True)

    def train(self, tokens: torch.Tensor) -> float:
        parts = tokens.to(self._engine.device).split(self._micro_batch)
        total = torch.zeros((), device=self._engine.device)
        for part in parts:
            loss = self._engine(input_ids=part, labels=part, use_cache=False).loss
            self._engine.backward(loss)  # divides by the number of parts
            self._engine.step()
            total += loss.detach() / len(parts)
        return float(total)

    def settle(self) -> None:
        return


def deepspeed_config(task: PeerTask) -> dict[str, Any]:
    """ZeRO-3 as its guides set it up; tuned: clipping, overlapped file transfers with more and larger requests."""
    files = task.system is System.DEEPSPEED_NVME
    optimizer: dict[str, Any] = {"device": "nvme" if files else "cpu", "pin_memory": True}
    if files:
        optimizer |= {"nvme_path": str(task.folders[0]), "pipeline_read": task.tuned, "pipeline_write": task.tuned}
    config: dict[str, Any] = {
        "train_batch_size": task.batch,
        "train_micro_batch_size_per_gpu": task.micro_batch,
        "bf16": {"enabled": task.precision is Precision.BF16},
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": 0.01}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu", "pin_memory": True},
            "offload_optimizer": optimizer,
            "overlap_comm": True,
            "contiguous_gradients": True,
        },
    }
    if task.max_norm is not None:
        config["gradient_clipping"] = task.max_norm
    if files and task.tuned:
        config["aio"] = {"block_size": 8 << 20, "queue_depth": 32, "intra_op_parallelism": 8, "overlap_events": True}
    return config
