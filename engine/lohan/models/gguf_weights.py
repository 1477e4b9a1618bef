"""Base weights from a GGUF file of the Llama architecture."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from lohan.errors import ModelError
from lohan.models.gguf_file import GgufFile
from lohan.models.weights import WeightSource


class GgufWeights(WeightSource):
    """A GGUF file of the Llama architecture, dequantised to fp32, under Hugging Face names."""

    def __init__(self, path: Path) -> None:
        self.place = str(path)
        self._file = GgufFile(path)
        architecture = self._file.metadata.get("general.architecture")
        if architecture != "llama":
            self._file.close()
            raise ModelError(
                f"the GGUF architecture is {architecture!r}, expected 'llama'",
                place=self.place,
                remedy="Use the model's safetensors folder instead.",
            )
        self._heads = int(self._file.metadata.get("llama.attention.head_count", 0))
        self._key_value_heads = int(self._file.metadata.get("llama.attention.head_count_kv", self._heads))
        self._source_of = dict(self._translate(self._file.tensors))

    def _translate(self, names: Iterable[str]) -> Iterator[tuple[str, str]]:
        for name in names:
            translated = gguf_to_hugging_face_name(name)
            if translated is not None:
                yield translated, name

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._source_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.tensors[self._source_of[name]].shape

    def dtype(self, name: str) -> torch.dtype:
        return torch.float32

    def read(self, name: str) -> torch.Tensor:
        return self.read_stretch(name, 0, math.prod(self.shape(name))).view(self.shape(name))

    def read_stretch(self, name: str, start: int, stop: int) -> torch.Tensor:
        source = self._source_of[name]
        tensor = self._file.tensors[source]
        columns = tensor.shape[-1] if tensor.shape else 1
        heads = self._heads_of(source)
        # Rows, or heads where their rows are in another order than the file's, that hold the stretch.
        grain = tensor.rows // heads if heads else 1
        first = start // columns // grain * grain
        last = -(-stop // (columns * grain)) * grain
        values = torch.from_numpy(self._file.read_rows(source, first, last))
        if heads:
            values = _undo_rotary_permutation(values, (last - first) // grain)
        return values.reshape(-1)[start - first * columns : stop - first * columns]

    def _heads_of(self, source: str) -> int:
        """How many heads' rows are interleaved in a tensor of the file; 0 in most."""
        if source.endswith(".attn_q.weight"):
            return self._heads
        return self._key_value_heads if source.endswith(".attn_k.weight") else 0

    def close(self) -> None:
        self._file.close()


_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def gguf_to_hugging_face_name(name: str) -> str | None:
    """The Llama parameter that a GGUF tensor holds; None for tensors that are no parameter (`rope_freqs.weight`)."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    match = _BLOCK_TENSOR.fullmatch(name)
    if match is None or match[2] not in _BLOCK_NAMES:
        return None
    return f"model.layers.{match[1]}.{_BLOCK_NAMES[match[2]]}.{match[3]}"


def _undo_rotary_permutation(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """GGUF interleaves the two halves of each head's rows for its rotary kernel; transformers wants them apart.

    Shapes: (heads x 2 x half, columns) both ways; row (h, i, j) of the file is row (h, j, i) of the result, i < half, j < 2.
    """
    half = weight.shape[0] // heads // 2
    return weight.view(heads, half, 2, -1).transpose(1, 2).reshape(weight.shape)
