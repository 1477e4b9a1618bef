"""The models that `lohan bench step` trains: Llama shapes by name, their parameters, and the arithmetic of a step. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final

TRAINING_TO_FORWARD: Final = 3
"""A backward computes the gradients of inputs and of weights, each as much work as the forward. What is recomputed does not count."""


class ShapeName(StrEnum):
    """Named after their parameters."""

    TINY = "tiny"
    """To try the command."""
    LLAMA_1_1B = "1.1b"
    LLAMA_3_43B = "3.43b"
    LLAMA_6_7B = "6.7b"


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama with an output projection of its own (not tied to the embedding)."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int
    vocabulary: int

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    @property
    def block_matrices(self) -> int:
        """Parameters of one block's linear layers: query and output, key and value, and the three of the MLP."""
        query_and_output = 2 * self.hidden * self.heads * self.head_size
        key_and_value = 2 * self.hidden * self.key_value_heads * self.head_size
        return query_and_output + key_and_value + 3 * self.hidden * self.intermediate

    @property
    def parameters(self) -> int:
        """Of the whole model: blocks with two norms each, embedding, last norm, output projection."""
        return self.layers * (self.block_matrices + 2 * self.hidden) + 2 * self.vocabulary * self.hidden + self.hidden


SHAPES: Final = MappingProxyType(
    {
        ShapeName.TINY: Shape(hidden=64, intermediate=160, layers=2, heads=4, key_value_heads=4, vocabulary=1000),
        ShapeName.LLAMA_1_1B: Shape(hidden=2048, intermediate=5632, layers=22, heads=32, key_value_heads=4, vocabulary=32000),
        ShapeName.LLAMA_3_43B: Shape(hidden=3200, intermediate=8640, layers=26, heads=32, key_value_heads=32, vocabulary=32000),
        ShapeName.LLAMA_6_7B: Shape(hidden=4096, intermediate=11008, layers=32, heads=32, key_value_heads=32, vocabulary=32000),
    }
)


def block_forward_flops(shape: Shape, rows: int, sequence: int) -> int:
    """Multiplications and additions of one block's forward.

    2 for each parameter of a linear layer and token; and causal attention, in which a token meets half the sequence on average: 2 x
    sequence/2 x width for the scores, and as much for the weighted sum of the values. Norms, rotations, softmax and activations are
    left out, as usual.
    """
    attention = 2 * sequence * shape.heads * shape.head_size
    return rows * sequence * (2 * shape.block_matrices + attention)


def forward_flops(shape: Shape, rows: int, sequence: int) -> int:
    """The whole model's: its blocks, and 2 for each parameter of the output projection and token. The embedding only looks rows up."""
    return shape.layers * block_forward_flops(shape, rows, sequence) + rows * sequence * 2 * shape.hidden * shape.vocabulary


def step_flops(shape: Shape, rows: int, sequence: int) -> int:
    """What a training step's TFLOPS count: three times the forward, however much a schedule recomputes."""
    return TRAINING_TO_FORWARD * forward_flops(shape, rows, sequence)
