"""What is kept per parameter, in which element type, and where in the state files a chunk's part of it lies. No files here."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import torch

from lohan.planning.state_form import SCALE_BLOCK, StateForm

if TYPE_CHECKING:
    from lohan.states.layout import Chunk, UnitLayout

BLOCK_BYTES = 4096
"""The coarsest alignment O_DIRECT asks for: every chunk's part of a file begins at a multiple."""


class Stream(StrEnum):
    """One array per unit. A stream's file is `<directory>/lohan-states/<stream>.bin`."""

    MASTER = "master"
    """Master weights in fp32, where they are not split: the working copy too."""
    WEIGHTS = "weights"
    """The working copy in bf16: the upper half of a split master, or a frozen parameter."""
    REMAINDER = "remainder"
    """int16: the lower half of a split master."""
    FIRST_MOMENT = "first_moment"
    """fp32."""
    SECOND_MOMENT = "second_moment"
    """fp32."""
    FIRST_CODES = "first_codes"
    """uint8: the first moment in 8 bits."""
    FIRST_SCALES = "first_scales"
    """fp32, one per 256 elements."""
    SECOND_CODES = "second_codes"
    """uint8: the square root of the second moment in 8 bits."""
    SECOND_SCALES = "second_scales"
    """fp32, one per 256 elements."""

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES.get(self, torch.float32)

    def length(self, elements: int) -> int:
        """Entries that `elements` elements of a unit have in this stream."""
        return -(-elements // SCALE_BLOCK) if self in (Stream.FIRST_SCALES, Stream.SECOND_SCALES) else elements

    def size_bytes(self, elements: int) -> int:
        return self.length(elements) * self.dtype.itemsize


_DTYPES = {
    Stream.WEIGHTS: torch.bfloat16,
    Stream.REMAINDER: torch.int16,
    Stream.FIRST_CODES: torch.uint8,
    Stream.SECOND_CODES: torch.uint8,
}
_FLOAT_MOMENTS = (Stream.FIRST_MOMENT, Stream.SECOND_MOMENT)
_8BIT_MOMENTS = (Stream.FIRST_CODES, Stream.FIRST_SCALES, Stream.SECOND_CODES, Stream.SECOND_SCALES)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a chunk's stream lies in the files of a directory: one offset per slot."""

    directory: int
    offsets_bytes: tuple[int, ...]


def weights_stream(form: StateForm) -> Stream:
    """The stream the device computes with."""
    return Stream.WEIGHTS if form.is_split else Stream.MASTER


def master_streams(form: StateForm) -> tuple[Stream, ...]:
    """The streams that make up the master weights."""
    return (Stream.WEIGHTS, Stream.REMAINDER) if form.is_split else (Stream.MASTER,)


def trainable_streams(form: StateForm) -> tuple[Stream, ...]:
    """All streams of a trainable chunk: an update reads and writes each of them."""
    return master_streams(form) + (_8BIT_MOMENTS if form.has_8bit_moments else _FLOAT_MOMENTS)


def streams_of(chunk: Chunk, form: StateForm) -> tuple[Stream, ...]:
    """The streams a chunk has: frozen chunks have only their working copy."""
    return trainable_streams(form) if chunk.trainable else (weights_stream(form),)


def stored_bytes(stream: Stream, elements: int) -> int:
    """What a slot of `elements` elements takes of the stream's file: whole blocks."""
    return -(-stream.size_bytes(elements) // BLOCK_BYTES) * BLOCK_BYTES


def place_chunks(
    layouts: Sequence[UnitLayout], form: StateForm, directories: int, *, slots: int = 1, without: Container[tuple[int, int]] = ()
) -> tuple[dict[tuple[int, int, Stream], Place], dict[tuple[int, Stream], int]]:
    """Spread chunks over the directories; returns the table by (unit, chunk, stream) and the files' sizes by (directory, stream).

    Args:
        slots: how many places a trainable chunk has; a frozen one, which is never written again, has one.
        without: chunks, by (unit, chunk), that need no place.
    """
    table: dict[tuple[int, int, Stream], Place] = {}
    sizes: dict[tuple[int, Stream], int] = {}
    turn = 0
    for layout in layouts:
        for chunk in layout.chunks:
            if (layout.index, chunk.index) in without:
                continue
            directory = turn % directories
            turn += 1
            for stream in streams_of(chunk, form):
                start = sizes.get((directory, stream), 0)
                step = stored_bytes(stream, chunk.length)
                offsets = tuple(start + slot * step for slot in range(slots if chunk.trainable else 1))
                table[layout.index, chunk.index, stream] = Place(directory, offsets)
                sizes[directory, stream] = start + len(offsets) * step
    return table, sizes
