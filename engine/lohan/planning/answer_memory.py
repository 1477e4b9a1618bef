"""What answering a conversation takes: weights, keys and values, and room to work. Pure: no torch.

    weights  = parameters x b
    keys and values = 2 x layers x key/value heads x head size x tokens x b
    working  = 2 x (a layer's keys and values, and these repeated for every head)
             + C x (8 hidden + 3 inner + tokens) x b + C x vocabulary x (b + 4)
    margin   = a tenth of all that, and 256 MiB

where b is 2 bytes on a GPU (bf16) and 4 on a CPU (fp32), and C the tokens that are read at a time (`PREFILL_TOKENS`). A GPU has
`GPU_RESERVE_BYTES` besides, for CUDA's context and libraries; host memory has the process itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lohan.errors import ModelError
from lohan.planning.footprint import CPU_BASE_BYTES, GPU_PROCESS_BASE_BYTES, GPU_RESERVE_BYTES
from lohan.units import MIB

PREFILL_TOKENS = 512
"""Of a conversation that are read at a time: working room does not grow with its square."""
TEMPLATE_TOKENS_PER_MESSAGE = 64
"""What a chat template writes around a message."""
TEMPLATE_TOKENS = 1024
"""What it writes besides, such as a system message of its own."""
GPU_BYTES_PER_ELEMENT, CPU_BYTES_PER_ELEMENT = 2, 4
MARGIN_BYTES = 256 * MIB
_MAX_CONFIG_BYTES = 4 * MIB
_NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "vocabulary": ("vocab_size",),
    "context": ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length"),
}
"""What models call it in config.json."""


@dataclass(frozen=True, slots=True)
class AnswerShape:
    """A model's sizes, as far as they say what an answer takes."""

    parameters: int
    largest_parameters: int
    """Of a unit: what is in host memory while weights go to a GPU."""
    layers: int
    heads: int
    key_value_heads: int
    head_size: int
    hidden: int
    inner: int
    vocabulary: int
    context: int
    """Tokens that the model reads at most."""


@dataclass(frozen=True, slots=True)
class AnswerMemory:
    """Bytes that an answer takes at most."""

    gpu_bytes: int
    """0 on a CPU."""
    ram_bytes: int


def shape_of(config: Mapping[str, Any], *, parameters: int, largest_parameters: int, place: str) -> AnswerShape:
    """The sizes in a config.json.

    Raises:
        ModelError: one of them is missing, or no number.
    """
    text = config.get("text_config")
    values = {**config, **text} if isinstance(text, Mapping) else config
    found = {name: _number(values, names, place) for name, names in _NAMES.items()}
    head_size = _optional(values, ("head_dim",)) or found["hidden"] // found["heads"]
    return AnswerShape(
        parameters=parameters,
        largest_parameters=largest_parameters,
        key_value_heads=_optional(values, ("num_key_value_heads", "n_head_kv")) or found["heads"],
        head_size=head_size,
        inner=_optional(values, ("intermediate_size", "n_inner", "ffn_dim")) or 4 * found["hidden"],
        **found,
    )


def read_config(folder: Path) -> dict[str, Any]:
    """The content of a model folder's config.json.

    Raises:
        ModelError: there is none, or it cannot be read.
    """
    path = folder / "config.json"
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise ValueError("it is larger than 4 MiB")
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"config.json cannot be read: {error}", place=str(path), remedy="Export the model again.") from error
    return values


def most_tokens(shape: AnswerShape, *, size_bytes: int, messages: int, max_new_tokens: int) -> int:
    """How many tokens conversation and answer have at most, before anything is tokenised: a token is at least a byte of text."""
    prompt = size_bytes + TEMPLATE_TOKENS_PER_MESSAGE * messages + TEMPLATE_TOKENS
    return min(shape.context, prompt + max_new_tokens)


def answer_memory(shape: AnswerShape, tokens: int, *, on_gpu: bool) -> AnswerMemory:
    """What an answer takes whose conversation and answer have `tokens` tokens at most; the formula is this module's docstring."""
    size = GPU_BYTES_PER_ELEMENT if on_gpu else CPU_BYTES_PER_ELEMENT
    weights = shape.parameters * size
    layer = 2 * shape.head_size * tokens * size
    cache = layer * shape.key_value_heads * shape.layers
    piece = min(PREFILL_TOKENS, tokens)
    working = 2 * layer * (shape.key_value_heads + shape.heads)
    working += piece * (8 * shape.hidden + 3 * shape.inner + tokens) * size + piece * shape.vocabulary * (size + 4)
    total = weights + cache + working
    total += total // 10 + MARGIN_BYTES
    if not on_gpu:
        return AnswerMemory(gpu_bytes=0, ram_bytes=total + CPU_BASE_BYTES)
    # A parameter is read, and converted, in host memory before it goes to the GPU.
    host = GPU_PROCESS_BASE_BYTES + shape.largest_parameters * (CPU_BYTES_PER_ELEMENT + GPU_BYTES_PER_ELEMENT)
    return AnswerMemory(gpu_bytes=total + GPU_RESERVE_BYTES, ram_bytes=host)


def _optional(values: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    found = (values[name] for name in names if name in values)
    return next((value for value in found if isinstance(value, int) and not isinstance(value, bool) and value > 0), None)


def _number(values: Mapping[str, Any], names: tuple[str, ...], place: str) -> int:
    value = _optional(values, names)
    if value is None:
        raise ModelError(f"config.json has no {names[0]}", place=place, remedy="Use a model whose config.json says it.")
    return value
