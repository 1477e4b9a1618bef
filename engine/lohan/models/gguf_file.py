"""Reads GGUF files: the metadata, and dequantised tensors, or rows of them.

The `gguf` package's own reader takes 5 s for a vocabulary of 49,152 tokens, because it wraps every string in arrays; this one walks
the header with `struct` in 0.3 s, and checks each length against the file, so that a broken or hostile file raises `ModelError` instead
of allocating. Block sizes and dequantisation come from the `gguf` package. Format: ggml's docs/gguf.md, versions 2 and 3, little endian.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lohan.errors import ModelError

if TYPE_CHECKING:
    import numpy as np

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_MAX_ENTRIES = 1_000_000
_MAX_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies in the file."""

    name: str
    shape: tuple[int, ...]
    """In PyTorch's order: the fastest dimension last."""
    type: int
    """`gguf.GGMLQuantizationType`."""
    offset_bytes: int
    """From the file's start."""
    size_bytes: int

    @property
    def rows(self) -> int:
        """Of the fastest dimension's length each; a vector, as a scalar, is one."""
        return math.prod(self.shape[:-1])


class GgufFile:
    """An open GGUF file. Thread-safe to read from; `close` it when done.

    Raises:
        ModelError: the file is missing, is no GGUF file of version 2 or 3, is cut short, or has a tensor type that is unknown.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "the file is empty"
            raise ModelError(f"cannot be read: {reason}", place=str(path), remedy="Name an existing GGUF file.") from error
        try:
            self._read_header()
        except (struct.error, IndexError, UnicodeDecodeError, KeyError, ValueError) as error:
            self.close()
            if isinstance(error, ModelError):
                raise
            raise self._broken(f"the header cannot be read ({type(error).__name__})") from error

    def close(self) -> None:
        self._map.close()

    def read(self, name: str) -> np.ndarray:
        """The tensor as fp32, in PyTorch's shape; a fresh array that the caller owns."""
        tensor = self.tensors[name]
        return self.read_rows(name, 0, tensor.rows).reshape(tensor.shape)

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows `start` to `stop` of the tensor as fp32, of shape (rows, columns); a fresh array that the caller owns."""
        import numpy as np
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        tensor = self.tensors[name]
        row_bytes = tensor.size_bytes // max(1, tensor.rows)
        raw = np.frombuffer(self._map, np.uint8, (stop - start) * row_bytes, tensor.offset_bytes + start * row_bytes)
        rows = raw.reshape(stop - start, row_bytes)
        kind = GGMLQuantizationType(tensor.type)
        plain = {GGMLQuantizationType.F32: np.float32, GGMLQuantizationType.F16: np.float16}.get(kind)
        if plain is not None:
            return np.array(rows.view(plain), dtype=np.float32, order="C")
        return np.ascontiguousarray(dequantize(rows, kind), dtype=np.float32)

    def _read_header(self) -> None:
        magic, version, tensor_count, entry_count = struct.unpack_from("<4sIQQ", self._map, 0)
        if magic != b"GGUF":
            raise self._broken("it does not begin with GGUF")
        if version not in (2, 3):
            raise self._broken(f"its version is {version & 0xFFFF}, expected 2 or 3 (little endian)")
        if max(tensor_count, entry_count) > _MAX_ENTRIES:
            raise self._broken(f"it announces {tensor_count} tensors and {entry_count} entries")
        at = 24
        for _ in range(entry_count):
            key, at = self._string(at)
            (kind,) = struct.unpack_from("<I", self._map, at)
            self.metadata[key], at = self._value(kind, at + 4)
        infos = []
        for _ in range(tensor_count):
            name, at = self._string(at)
            (dimensions,) = struct.unpack_from("<I", self._map, at)
            if dimensions > _MAX_DIMENSIONS:
                raise self._broken(f"tensor {name!r} has {dimensions} dimensions")
            *sizes, kind, offset = struct.unpack_from(f"<{dimensions}QIQ", self._map, at + 4)
            at += 4 + 8 * dimensions + 12
            infos.append((name, tuple(reversed(sizes)), kind, offset))
        alignment = int(self.metadata.get("general.alignment", 32))
        if alignment <= 0:
            raise self._broken(f"general.alignment is {alignment}")
        data_start = -(-at // alignment) * alignment
        for name, shape, kind, offset in infos:
            self._add_tensor(name, shape, kind, data_start + offset)

    def _add_tensor(self, name: str, shape: tuple[int, ...], kind: int, offset_bytes: int) -> None:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        elements = math.prod(shape)
        if shape and shape[-1] % block:
            raise self._broken(f"tensor {name!r} has rows of {shape[-1]} elements, not a multiple of its block of {block}")
        size_bytes = elements // block * block_bytes
        if offset_bytes + size_bytes > len(self._map):
            raise self._broken(f"tensor {name!r} ends at byte {offset_bytes + size_bytes}, but the file has {len(self._map)}")
        if name in self.tensors:
            raise self._broken(f"tensor {name!r} stands in it twice")
        self.tensors[name] = GgufTensor(name, shape, kind, offset_bytes, size_bytes)

    def _string(self, at: int) -> tuple[str, int]:
        (length,) = struct.unpack_from("<Q", self._map, at)
        end = at + 8 + length
        if end > len(self._map):
            raise self._broken("a string runs past its end")
        return self._map[at + 8 : end].decode("utf-8"), end

    def _value(self, kind: int, at: int) -> tuple[Any, int]:
        if kind == _STRING:
            return self._string(at)
        if kind != _ARRAY:
            scalar = _SCALARS[kind]
            return struct.unpack_from(scalar, self._map, at)[0], at + struct.calcsize(scalar)
        item_kind, count = struct.unpack_from("<IQ", self._map, at)
        at += 12
        if item_kind in _SCALARS:
            size = struct.calcsize(_SCALARS[item_kind])
            if at + count * size > len(self._map):
                raise self._broken("an array runs past its end")
            return list(struct.unpack_from(f"<{count}{_SCALARS[item_kind][1]}", self._map, at)), at + count * size
        if item_kind != _STRING:
            raise self._broken("an array holds arrays")
        strings = []
        for _ in range(count):
            text, at = self._string(at)
            strings.append(text)
        return strings, at

    def _broken(self, what: str) -> ModelError:
        return ModelError(f"not a usable GGUF file: {what}", place=str(self.path), remedy="Fetch or convert the file again.")
