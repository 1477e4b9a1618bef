"""The token file: prepared rows as flat arrays, and the batches that are drawn from it.

A token file is a safetensors file with `input_ids` (int32, flat), `labels` (int32, flat, -100 where untrained) and `offsets` (int64,
one more than rows): row i is the half-open range offsets[i]..offsets[i+1]. Its metadata says how it was made. It is written in one
pass with a few rows in memory, and read through a memory map.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Self

from lohan.data.tokenize import UNTRAINED, TokenizedRow
from lohan.errors import DataError

if TYPE_CHECKING:
    import numpy as np

_FLUSH_TOKENS = 1 << 18
_FORMAT = "lohan-tokens"
_REMEDY = "Prepare the data again."


class TokenFileWriter:
    """Writes a token file; it appears under its name, complete and synced, when the `with` block ends without an exception."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._part_paths = [path.with_name(f"{path.name}.{name}.part") for name in ("input_ids", "labels")]
        self._input_ids, self._labels = array("i"), array("i")
        self._offsets = array("q", [0])
        self._metadata: dict[str, str] = {}

    def __enter__(self) -> Self:
        self._parts = [path.open("wb") for path in self._part_paths]
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._flush()
                self._assemble()
        finally:
            for part, path in zip(self._parts, self._part_paths, strict=True):
                part.close()
                path.unlink(missing_ok=True)

    def add(self, row: TokenizedRow) -> None:
        self._input_ids.extend(row.input_ids)
        self._labels.extend(row.labels)
        self._offsets.append(self._offsets[-1] + len(row.input_ids))
        if len(self._input_ids) >= _FLUSH_TOKENS:
            self._flush()

    def describe(self, metadata: Mapping[str, str]) -> None:
        """Set the file's metadata: text by name."""
        self._metadata = dict(metadata)

    def _flush(self) -> None:
        for part, values in zip(self._parts, (self._input_ids, self._labels), strict=True):
            part.write(_little_endian(values))
            del values[:]

    def _assemble(self) -> None:
        tokens, rows = self._offsets[-1], len(self._offsets)
        id_bytes, offset_bytes = 4 * tokens, 8 * rows
        # The widest type first, so that every array is aligned to its item size.
        header = json.dumps(
            {
                "__metadata__": {"format": _FORMAT, **self._metadata},
                "offsets": {"dtype": "I64", "shape": [rows], "data_offsets": [0, offset_bytes]},
                "input_ids": {"dtype": "I32", "shape": [tokens], "data_offsets": [offset_bytes, offset_bytes + id_bytes]},
                "labels": {"dtype": "I32", "shape": [tokens], "data_offsets": [offset_bytes + id_bytes, offset_bytes + 2 * id_bytes]},
            }
        ).encode()
        header += b" " * (-len(header) % 8)
        temporary = self._path.with_name(self._path.name + ".part")
        try:
            with temporary.open("wb") as file:
                file.write(len(header).to_bytes(8, "little") + header)
                file.write(_little_endian(self._offsets))
                for part, path in zip(self._parts, self._part_paths, strict=True):
                    part.flush()
                    with path.open("rb") as source:
                        shutil.copyfileobj(source, file, 1 << 20)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self._path)
        finally:
            temporary.unlink(missing_ok=True)


def _little_endian(values: array[int]) -> bytes:
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return values.tobytes()


class TokenRows:
    """A token file's rows, memory-mapped. Thread-safe.

    Raises:
        DataError: the file is missing, is no token file, or its arrays do not fit each other.
    """

    def __init__(self, path: Path) -> None:
        import numpy as np
        from safetensors import SafetensorError, safe_open

        self.path = path
        try:
            # safe_open checks the header against the file's size; the arrays are then mapped instead of copied.
            with safe_open(path, framework="numpy") as handle:
                self.metadata: dict[str, str] = handle.metadata() or {}
                kinds = {name: (handle.get_slice(name).get_dtype(), handle.get_slice(name).get_shape()) for name in handle.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise DataError(f"not a usable token file: {error}", place=path.name, remedy=_REMEDY) from error
        ids, labels, offsets = (kinds.get(name, ("", [0])) for name in ("input_ids", "labels", "offsets"))
        if self.metadata.get("format") != _FORMAT or ids != labels or (ids[0], offsets[0]) != ("I32", "I64"):
            raise DataError(
                "not a token file: expected input_ids and labels of int32 and offsets of int64", place=path.name, remedy=_REMEDY
            )
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_bytes))
        mapped = np.memmap(path, np.uint8, "r")
        arrays = {}
        for name, dtype in (("input_ids", "<i4"), ("labels", "<i4"), ("offsets", "<i8")):
            begin, end = header[name]["data_offsets"]
            arrays[name] = mapped[8 + header_bytes + begin : 8 + header_bytes + end].view(dtype)
        self._input_ids, self._labels, self._offsets = arrays["input_ids"], arrays["labels"], arrays["offsets"]
        steps = np.diff(self._offsets)
        if len(self._offsets) < 2 or self._offsets[0] != 0 or self._offsets[-1] != len(self._input_ids) or (steps <= 0).any():
            raise DataError("the rows' offsets do not fit the tokens, or there are no rows", place=path.name, remedy=_REMEDY)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @property
    def tokens(self) -> int:
        return len(self._input_ids)

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        import numpy as np

        return int(np.diff(self._offsets).max())

    @property
    def largest_id(self) -> int:
        return int(self._input_ids.max())

    @property
    def pad_id(self) -> int:
        return int(self.metadata.get("pad_id", 0))

    @property
    def digest(self) -> str:
        """Of all rows: equal digests mean the same rows in the same order. Reads the file once."""
        digest = blake2b(digest_size=16)
        for values in (self._offsets, self._input_ids, self._labels):
            digest.update(values.data)
        return digest.hexdigest()

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Input ids and labels of one row, int32, as views of the file."""
        begin, end = self._offsets[index], self._offsets[index + 1]
        return self._input_ids[begin:end], self._labels[begin:end]

    def batch(self, indices: Sequence[int]) -> Batch:
        """The rows as arrays of (rows, longest of them), padded at the end by position: padding is never attended to, nor trained."""
        import numpy as np

        rows = [self.row(index) for index in indices]
        shape = (len(rows), max(len(input_ids) for input_ids, _ in rows))
        batch = Batch(np.full(shape, self.pad_id, np.int64), np.zeros(shape, np.int64), np.full(shape, UNTRAINED, np.int64))
        for at, (input_ids, labels) in enumerate(rows):
            batch.input_ids[at, : len(input_ids)] = input_ids
            batch.attention_mask[at, : len(input_ids)] = 1
            batch.labels[at, : len(labels)] = labels
        return batch


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Padded rows; all arrays are int64 of shape (rows, tokens)."""

    input_ids: np.ndarray
    attention_mask: np.ndarray
    labels: np.ndarray

    @property
    def tokens(self) -> int:
        """Tokens read, padding not counted."""
        return int(self.attention_mask.sum())

    @property
    def trained_tokens(self) -> int:
        """Tokens that count in the loss, which predicts from the second token on."""
        return int((self.labels[:, 1:] != UNTRAINED).sum())


@dataclass(frozen=True, slots=True)
class DataPosition:
    """Where a run stands in its data: behind row `index` of the shuffled epoch `epoch`, both from 0."""

    rows: int
    batch_size: int
    seed: int
    epoch: int
    index: int


class BatchSampler:
    """Which rows a step takes: a pure function of (seed, step), so that a run can be entered at any step without replaying it.

    Positions 0, 1, 2, … run through one shuffled epoch after the other; step s (from 0) takes the positions s*batch_size to
    (s+1)*batch_size, so every batch is full and every row comes once an epoch. An epoch's order is a keyed permutation that is computed
    row by row (a Feistel network on the next power of four, walked until it falls inside), not an array in memory.
    """

    def __init__(self, rows: int, batch_size: int, seed: int) -> None:
        if rows < 1:
            raise DataError("there are no rows to train on", remedy="Add rows to the dataset.")
        self.rows, self.batch_size, self.seed = rows, batch_size, seed
        self._half_bits = max(1, ((rows - 1).bit_length() + 1) // 2)

    def steps(self, epochs: float) -> int:
        """Steps that pass over the rows `epochs` times; the last one may reach into the next epoch."""
        return max(1, -(-round(epochs * self.rows) // self.batch_size))

    def epoch(self, step: int) -> float:
        """Passes over the data that are complete after step `step` (from 0)."""
        return (step + 1) * self.batch_size / self.rows

    def position(self, steps: int) -> DataPosition:
        """Where the data stands after `steps` steps."""
        epoch, index = divmod(steps * self.batch_size, self.rows)
        return DataPosition(self.rows, self.batch_size, self.seed, epoch, index)

    def batch(self, step: int) -> list[int]:
        """Row numbers of step `step` (from 0)."""
        first = step * self.batch_size
        return [self._row(position // self.rows, position % self.rows) for position in range(first, first + self.batch_size)]

    def first(self, count: int) -> list[int]:
        """The `count` rows (at most all) that the first epoch begins with."""
        return [self._row(0, position) for position in range(min(count, self.rows))]

    def _row(self, epoch: int, position: int) -> int:
        index = self._permute(epoch, position)
        while index >= self.rows:
            index = self._permute(epoch, index)
        return index

    def _permute(self, epoch: int, index: int) -> int:
        mask = (1 << self._half_bits) - 1
        left, right = index >> self._half_bits, index & mask
        for round_ in range(4):
            key = b"%d %d %d %d" % (self.seed, epoch, round_, right)
            left, right = right, left ^ (int.from_bytes(blake2b(key, digest_size=8).digest(), "little") & mask)
        return left << self._half_bits | right
