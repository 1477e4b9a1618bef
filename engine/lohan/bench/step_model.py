"""The model that `lohan bench step` trains: its configuration, weights that are made rather than read, and one block by itself."""

from __future__ import annotations

import statistics
import time
from itertools import count
from typing import TYPE_CHECKING, Any, Final

import torch

from lohan.config import KernelSet
from lohan.models.kernels import install_kernels
from lohan.models.weights import WeightSource

if TYPE_CHECKING:
    from torch import nn

    from lohan.bench.step_shapes import Shape

_DEVIATION: Final = 0.02  # of transformers' own initialisation
_POOL_ELEMENTS: Final = 1 << 20
_SHIFT_ELEMENTS: Final = 4099
_LEAST_BLOCK_PASSES: Final = 5


def make_config(shape: Shape, sequence: int) -> Any:
    """The transformers configuration."""
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        vocab_size=shape.vocabulary,
        max_position_embeddings=max(2048, sequence),
        tie_word_embeddings=False,
    )


class PooledWeights(WeightSource):
    """Random weights for a model whose values do not matter: every tensor is a stretch of one repeated pool of a million normal numbers.

    Drawing 3.4 billion numbers on a CPU takes minutes; this takes none, in the memory of the largest tensor. Vectors (norms) are ones.
    The same for every run.
    """

    place = "random weights"

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self._shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        self._starts = {name: index * _SHIFT_ELEMENTS % _POOL_ELEMENTS for index, name in enumerate(self._shapes)}
        self._dtype = dtype
        largest = max(parameter.numel() for parameter in model.parameters())
        pool = torch.randn(_POOL_ELEMENTS, generator=torch.Generator().manual_seed(0)).mul_(_DEVIATION).to(dtype)
        self._values = pool.repeat(-(-largest // _POOL_ELEMENTS) + 1)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        return self._dtype

    def read(self, name: str) -> torch.Tensor:
        shape = torch.Size(self._shapes[name])
        if len(shape) == 1:
            return torch.ones(shape, dtype=self._dtype)
        start = self._starts[name]
        return self._values[start : start + shape.numel()].view(shape)

    def close(self) -> None:
        self._values = torch.empty(0, dtype=self._dtype)


def block_seconds(
    config: Any,
    rows: int,
    sequence: int,
    *,
    device: torch.device,
    dtype: torch.dtype,
    kernels: KernelSet = KernelSet.TORCH,
    least_seconds: float = 1.0,
) -> float:
    """Seconds of one block's forward and backward with weights and activations on the device and nothing recomputed: the median.

    As many passes as `least_seconds` hold, at least five; two more go before.
    """
    block, rotary = one_block(config, device, dtype)
    install_kernels(block, kernels)
    hidden = torch.randn(rows, sequence, config.hidden_size, device=device, dtype=dtype, requires_grad=True)
    positions = rotary(hidden, torch.arange(sequence, device=device)[None])
    gradient = torch.randn_like(hidden)

    def run() -> float:
        _synchronize(device)
        begin = time.perf_counter()
        output = block(hidden, position_embeddings=positions)
        (output[0] if isinstance(output, tuple) else output).backward(gradient)
        block.zero_grad(set_to_none=True)
        hidden.grad = None
        _synchronize(device)
        return time.perf_counter() - begin

    for _ in range(2):
        run()
    seconds: list[float] = []
    for passes in count():
        if passes >= _LEAST_BLOCK_PASSES and sum(seconds) >= least_seconds:
            break
        seconds.append(run())
    return statistics.median(seconds)


def one_block(config: Any, device: torch.device, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """A block with real weights, and the module that computes its rotary positions."""
    import copy

    from transformers import LlamaForCausalLM

    small = copy.deepcopy(config)
    small.num_hidden_layers, small.vocab_size, small.use_cache = 1, 8, False
    with device:
        model: Any = LlamaForCausalLM(small)
    model = model.to(device, dtype).train()
    return model.model.layers[0], model.model.rotary_emb


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
