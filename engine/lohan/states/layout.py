"""Where each parameter lies inside its unit, and how a unit is cut into chunks. Pure numbers: no torch, no files.

A unit's parameters are packed into one flat array. Trainable parameters come first, so that the optimizer's states (master, moments)
are a prefix of the unit and frozen parameters cost none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lohan.errors import ConfigError
from lohan.planning.plan import CHUNK_PARAMETERS
from lohan.planning.workload import UnitKind

PARAMETER_ALIGNMENT = 256
"""Elements: no two parameters share a block of an 8-bit moment, whose scale belongs to one of them. It costs nothing to have it in every
form (of a block of 4 million parameters in 9 tensors, at most 0.06 %), and the form then does not decide where anything lies."""
UNIT_ALIGNMENT = 2048
"""Elements: 4096 bytes in bf16, the coarsest block size O_DIRECT asks for, so that no chunk has an unaligned end."""
DEFAULT_CHUNK_PARAMETERS = CHUNK_PARAMETERS


@dataclass(frozen=True, slots=True)
class ParameterSpecification:
    """A parameter as the model declares it."""

    name: str
    shape: tuple[int, ...]
    trainable: bool

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class ParameterLayout:
    """A parameter's place; `offset` counts elements from the start of the unit."""

    name: str
    shape: tuple[int, ...]
    trainable: bool
    offset: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A slice of a unit, the grain of state I/O and of the optimizer; `offset` and `length` count elements of the unit."""

    index: int
    offset: int
    length: int
    trainable: bool


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a parameter that lies in a chunk; `offset` counts elements from the start of the chunk."""

    parameter: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """A unit's flat array: `elements` long, the first `trainable_elements` of it with optimizer states."""

    index: int
    name: str
    kind: UnitKind
    parameters: tuple[ParameterLayout, ...]
    elements: int
    trainable_elements: int
    chunks: tuple[Chunk, ...]
    chunk_parameters: int = DEFAULT_CHUNK_PARAMETERS
    """Elements of a chunk at most."""

    def pieces(self, chunk: Chunk) -> Iterator[Piece]:
        """The parameters in `chunk`, in order of their offset; the padding between them belongs to none."""
        end = chunk.offset + chunk.length
        for index, parameter in enumerate(self.parameters):
            start, stop = max(parameter.offset, chunk.offset), min(parameter.offset + parameter.elements, end)
            if start < stop:
                yield Piece(index, start - chunk.offset, stop - start)


def layout_unit(
    index: int,
    name: str,
    kind: UnitKind,
    parameters: Sequence[ParameterSpecification],
    *,
    chunk_parameters: int = DEFAULT_CHUNK_PARAMETERS,
) -> UnitLayout:
    """Pack `parameters`, trainable ones first and otherwise in the given order, and cut the result into chunks.

    Args:
        chunk_parameters: elements of a chunk at most; a multiple of `UNIT_ALIGNMENT`.

    Raises:
        ConfigError: `chunk_parameters` is not a positive multiple of `UNIT_ALIGNMENT`.
    """
    if chunk_parameters <= 0 or chunk_parameters % UNIT_ALIGNMENT:
        raise ConfigError(
            f"chunk_parameters is {chunk_parameters}; it must be a positive multiple of {UNIT_ALIGNMENT}",
            place="chunk_parameters",
            remedy=f"Use {DEFAULT_CHUNK_PARAMETERS}, the default.",
        )
    places: list[ParameterLayout] = []
    ends = []
    offset = 0
    for trainable in (True, False):
        for parameter in parameters:
            if parameter.trainable is trainable:
                places.append(ParameterLayout(parameter.name, parameter.shape, trainable, offset))
                offset = _round_up(offset + parameter.elements, PARAMETER_ALIGNMENT)
        offset = _round_up(offset, UNIT_ALIGNMENT)
        ends.append(offset)
    trainable_elements, elements = ends
    chunks: list[Chunk] = []
    for start, end, trainable in ((0, trainable_elements, True), (trainable_elements, elements, False)):
        for position in range(start, end, chunk_parameters):
            chunks.append(Chunk(len(chunks), position, min(chunk_parameters, end - position), trainable))
    return UnitLayout(index, name, kind, tuple(places), elements, trainable_elements, tuple(chunks), chunk_parameters)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
