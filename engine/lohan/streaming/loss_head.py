"""The model's `forward`: checks what training cannot honour, and computes the loss without the batch x sequence x vocabulary tensor.

For the model classes in `CHUNKED_LOSS_CLASSES` the output projection is taken out of the model's own forward; the loss is then
computed over chunks of tokens, each one region that is recomputed in the backward. All other classes keep their forward; their full
logits are counted in `Session.statistics.full_logits_fallbacks`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from lohan.config import KernelSet
from lohan.errors import EngineError
from lohan.models.kernels import NO_LABEL, cross_entropy_sum, loss_tokens
from lohan.streaming.activations import RootForward, refuse_cache

# Their forward is: base model, output projection, loss_function(logits, labels, vocab_size, **kwargs), and nothing else in between.
CHUNKED_LOSS_CLASSES = frozenset(
    {
        "transformers.models.llama.modeling_llama.LlamaForCausalLM",
        "transformers.models.mistral.modeling_mistral.MistralForCausalLM",
        "transformers.models.qwen2.modeling_qwen2.Qwen2ForCausalLM",
        "transformers.models.qwen3.modeling_qwen3.Qwen3ForCausalLM",
    }
)
_LOSS_ARGUMENTS = ("num_items_in_batch", "ignore_index", "shift_labels")


@dataclass(frozen=True, slots=True)
class _Targets:
    """What the loss is computed from: `kept` are the flat positions with a label, None for all; `labels` theirs; `divisor` the mean's."""

    kept: torch.Tensor | None
    labels: torch.Tensor
    divisor: Any


class ModelForward:
    """Takes the place of the model's `forward`.

    Args:
        head: the output projection's forward; None if the model has none that is a root module.
        begin: called before each forward; raises what keeps the session from running.
        count_fallback: called when a loss is computed through full logits.
        kernels: what computes a chunk's loss from its logits.
    """

    def __init__(
        self,
        model: nn.Module,
        head: RootForward | None,
        limits: tuple[int, int],
        begin: Any,
        count_fallback: Any,
        kernels: KernelSet = KernelSet.TORCH,
    ) -> None:
        self._kernels = kernels
        self._model, self._head, self._begin, self._count_fallback = model, head, begin, count_fallback
        self._batch_size, self._sequence_length = limits
        self._original = type(model).forward
        self._signature = inspect.signature(self._original)
        kind = type(model)
        self._chunked = head is not None and f"{kind.__module__}.{kind.__qualname__}" in CHUNKED_LOSS_CLASSES
        self.__signature__ = inspect.signature(model.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._begin()
        arguments = self._bind(args, kwargs)
        self._check_limits(arguments)
        labels = arguments.get("labels")
        if labels is None:
            return self._original(self._model, **arguments)
        if not self._chunked or arguments.get("logits_to_keep") or not self._has_standard_loss():
            self._count_fallback()
            return self._original(self._model, **arguments)
        return self._chunked_forward(arguments)

    def _bind(self, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        bound = self._signature.bind(self._model, *args, **kwargs).arguments
        arguments: dict[str, Any] = {}
        for name, value in list(bound.items())[1:]:
            if self._signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
                arguments.update(value)
            else:
                arguments[name] = value
        refuse_cache(arguments, "the model")
        if arguments.get("output_attentions"):
            raise EngineError(
                "output_attentions is set, but a region's inner tensors are not kept", place="output_attentions", remedy="Leave it off."
            )
        arguments["use_cache"] = False
        return arguments

    def _check_limits(self, arguments: Mapping[str, Any]) -> None:
        inputs = arguments.get("input_ids")
        inputs = arguments.get("inputs_embeds") if inputs is None else inputs
        if not torch.is_grad_enabled() or not isinstance(inputs, torch.Tensor) or inputs.dim() < 2:
            return
        batch, length = inputs.shape[:2]
        if batch > self._batch_size or length > self._sequence_length:
            raise EngineError(
                f"a batch of {batch} rows of {length} tokens was passed, but the session was made for "
                f"{self._batch_size} rows of {self._sequence_length} tokens",
                remedy="Pass smaller batches, or raise batch_size and seq_length in lohan.init.",
            )

    def _has_standard_loss(self) -> bool:
        from transformers.loss.loss_utils import ForCausalLMLoss

        return getattr(self._model, "loss_function", None) is ForCausalLMLoss

    def _chunked_forward(self, arguments: dict[str, Any]) -> Any:
        assert self._head is not None, "checked when the class was looked up"
        loss_arguments = {name: arguments.pop(name) for name in _LOSS_ARGUMENTS if name in arguments}
        # Before the blocks are queued: counting labels on the GPU makes the CPU wait for all queued work.
        targets = _targets(arguments.pop("labels"), **loss_arguments)
        as_tuple = arguments.pop("return_dict", None) is False
        self._head.bypassed = True
        try:
            output = self._original(self._model, **arguments, return_dict=True)
        finally:
            self._head.bypassed = False
        loss = self._loss(output.logits, targets)
        # hidden states under the name of logits would be taken for logits
        fields = {name: value for name, value in output.items() if name != "logits"}
        result = type(output)(**{**fields, "loss": loss})
        return result.to_tuple() if as_tuple else result

    def _loss(self, hidden: torch.Tensor, targets: _Targets) -> torch.Tensor:
        """Cross-entropy over the kept tokens of `hidden` (B, S, H), divided as transformers' ForCausalLMLoss does."""
        assert self._head is not None, "checked by the caller"
        rows = hidden.reshape(-1, hidden.shape[-1])
        labels = targets.labels.to(rows.device)
        if targets.kept is not None:
            rows = rows.index_select(0, targets.kept.to(rows.device))
        config: Any = self._model.config
        size = loss_tokens(rows, config.vocab_size, self._kernels)
        sums = [
            self._head.apply(part, cross_entropy_sum, part_labels, self._kernels)
            for part, part_labels in zip(torch.split(rows, size), torch.split(labels, size), strict=True)
        ]
        divisor = targets.divisor
        if isinstance(divisor, torch.Tensor):
            divisor = divisor.to(rows.device)
        mean: torch.Tensor = (torch.stack(sums).sum() if len(sums) > 1 else sums[0]) / divisor
        return mean


def _targets(
    labels: torch.Tensor, *, num_items_in_batch: Any = None, ignore_index: int = -100, shift_labels: torch.Tensor | None = None
) -> _Targets:
    """Shift `labels` (B, S) by one, and find the tokens that have one.

    Raises:
        EngineError: no token has a label, so that the mean would be 0/0.
    """
    if shift_labels is None:
        shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    flat = shift_labels.reshape(-1)
    kept = (flat != ignore_index).nonzero().reshape(-1)
    if not kept.numel():
        if num_items_in_batch is None:
            raise EngineError(
                f"no token of the batch has a label (all are {ignore_index})",
                place="labels",
                remedy="Leave out rows without trained tokens, and see that the sequence length does not cut them off.",
            )
        return _Targets(kept.new_zeros(1), flat.new_full((1,), NO_LABEL), num_items_in_batch)
    divisor = kept.numel() if num_items_in_batch is None else num_items_in_batch
    return _Targets(None if kept.numel() == flat.numel() else kept, flat[kept], divisor)
