"""The reference: plain PyTorch training in bf16 with fp32 master weights, everything on one device.

What a careful user writes by hand: the model computes in bf16, `torch.optim.AdamW` updates fp32 copies of its parameters (masters), and
each step ends with the masters rounded into the model. Gradients of a step's micro-batches are added up in fp32, each micro-batch's mean
loss weighted with its share of the step's trained tokens, so that the number of micro-batches changes the order of sums and nothing else.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from lohan.data.pack import Batch
from lohan.models.load import empty_model, load_config
from lohan.models.weights import open_weights
from lohan.training.steps import batch_loss

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn


def load_model(path: Path, *, dtype: torch.dtype, device: torch.device) -> tuple[nn.Module, list[torch.Tensor]]:
    """The model with its weights in `dtype`, in training mode, and the fp32 values they were rounded from, in `parameters()` order.

    Buffers, such as rotary frequencies, stay as transformers makes them (fp32), which `model.to(torch.bfloat16)` would round.
    """
    model = empty_model(load_config(path), dtype=dtype)
    exact: list[torch.Tensor] = []
    with torch.no_grad(), open_weights(path) as weights:
        weights.check(model)
        for name, parameter in model.named_parameters():
            value = weights.read(name).to(device, torch.float32, copy=True)
            exact.append(value)
            parameter.data = value.to(dtype, copy=True)
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(device))
    model.config.use_cache = False
    return model, exact


class MasterWeightTraining:
    """`model` in its working precision, and its fp32 masters under AdamW without weight decay.

    Args:
        model: its parameters are the rounded masters.
        masters: fp32, in `model.parameters()` order, on the model's device.
        micro_batches: into how many slices a batch's rows are cut; a batch has at least that many rows.
    """

    def __init__(self, model: nn.Module, masters: Sequence[torch.Tensor], *, learning_rate: float, micro_batches: int) -> None:
        self.model = model
        self._masters = [master.requires_grad_() for master in masters]
        self.optimizer = torch.optim.AdamW(self._masters, lr=learning_rate, weight_decay=0.0)
        self._micro_batches = micro_batches
        self._device = self._masters[0].device

    def step(self, batch: Batch) -> float:
        """Forward, backward and update; returns the mean loss over the batch's trained tokens, before the update."""
        loss = torch.zeros((), device=self._device)
        for part in slices(batch, self._micro_batches):
            share = batch_loss(self.model, part, self._device) * (part.trained_tokens / batch.trained_tokens)
            share.backward()  # type: ignore[no-untyped-call]
            loss += share.detach().float()
            self._collect_gradients()
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for master, parameter in zip(self._masters, self.model.parameters(), strict=True):
                parameter.copy_(master)
        return float(loss)

    def _collect_gradients(self) -> None:
        for master, parameter in zip(self._masters, self.model.parameters(), strict=True):
            if parameter.grad is None:
                continue
            gradient = parameter.grad.float()
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            parameter.grad = None


def slices(batch: Batch, count: int) -> list[Batch]:
    """`batch` cut into `count` slices of its rows, as equal as they can be."""
    rows = len(batch.input_ids)
    edges = [rows * index // count for index in range(count + 1)]
    arrays = (batch.input_ids, batch.attention_mask, batch.labels)
    return [Batch(*(array[start:stop] for array in arrays)) for start, stop in itertools.pairwise(edges)]
