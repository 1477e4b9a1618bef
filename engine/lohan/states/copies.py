"""Copies stretches of one state file into another: cloned where the file system can share the bytes, else read and written."""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch

from lohan.memory.arena import Arena
from lohan.units import MIB

if TYPE_CHECKING:
    from lohan.memory.store import StoreFile, Transfer

PIECE_BYTES = 4 * MIB
"""Read and written at a time; two of them are held."""
_FICLONERANGE = 0x4020940D  # _IOW(0x94, 13, struct file_clone_range)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Bytes of a file; offset and size are multiples of `BLOCK_BYTES`."""

    file: StoreFile
    offset_bytes: int
    size_bytes: int


class Copier:
    """Copies one stretch after the other; nothing of it is durable before the target is synced. Holds `2 * PIECE_BYTES` of host memory."""

    def __init__(self) -> None:
        self._arena = Arena()
        self._buffers: Sequence[torch.Tensor] = ()
        self._unclonable: set[tuple[StoreFile, StoreFile]] = set()
        self.cloned_bytes = 0
        self.copied_bytes = 0

    def copy(self, source: Stretch, target: Stretch) -> None:
        """Give `target` the bytes of `source`, which nobody writes meanwhile.

        Raises:
            StorageError: reading or writing failed.
        """
        assert source.size_bytes == target.size_bytes
        files = (source.file, target.file)
        if files not in self._unclonable:
            try:
                _clone(source, target)
            except OSError:  # another file system, one that cannot share, or one with larger blocks
                self._unclonable.add(files)
            else:
                self.cloned_bytes += source.size_bytes
                return
        self._copy(source, target)
        self.copied_bytes += source.size_bytes

    def close(self) -> None:
        """Give the memory back."""
        self._buffers = ()
        self._arena.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _copy(self, source: Stretch, target: Stretch) -> None:
        """The next piece is read while the one before is written."""
        if not self._buffers:
            self._buffers = [self._arena.allocate(PIECE_BYTES, torch.uint8, holder="copies of states") for _ in range(2)]
        writing: list[Transfer | None] = [None, None]
        for number, start in enumerate(range(0, source.size_bytes, PIECE_BYTES)):
            before = writing[number % 2]
            if before is not None:
                before.wait()
            piece = self._buffers[number % 2][: min(PIECE_BYTES, source.size_bytes - start)]
            source.file.read(source.offset_bytes + start, piece).wait()
            writing[number % 2] = target.file.write(target.offset_bytes + start, piece)
        for last in writing:
            if last is not None:
                last.wait()


def _clone(source: Stretch, target: Stretch) -> None:
    """Let the target's file share the source's blocks; raises OSError where that cannot be."""
    reader = os.open(source.file.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        writer = os.open(target.file.path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            fcntl.ioctl(writer, _FICLONERANGE, struct.pack("qQQQ", reader, source.offset_bytes, source.size_bytes, target.offset_bytes))
        finally:
            os.close(writer)
    finally:
        os.close(reader)
