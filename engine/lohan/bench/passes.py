"""One pass over the state files through LoHan's transfers: what is moved, in which order, with how much in flight."""

from __future__ import annotations

import itertools
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Self

from lohan._native import AlignedBuffer, IoFile, IoPool, IoTicket
from lohan.hardware.transfers import Engine, Operation, TransferSetting

# 70 % reads, as evenly spread as ten places allow.
_MIXED_PATTERN: Final = "rrwrrwrrwr"
# Blocks handed over at a time are as many as may be in flight; while one such batch is awaited the next is already queued.
_BATCHES: Final = 2


def operations(operation: Operation, *, total_bytes: int, block_bytes: int) -> Iterator[tuple[Operation, int]]:
    """(READ or WRITE, offset in bytes) of each block in order; every block is moved once. Mixed: 70 % of them are read, 30 % written."""
    blocks = total_bytes // block_bytes
    if operation is not Operation.MIXED:
        yield from ((operation, index * block_bytes) for index in range(blocks))
        return
    kinds = [Operation.READ if kind == "r" else Operation.WRITE for kind in itertools.islice(itertools.cycle(_MIXED_PATTERN), blocks)]
    # Reads take the front of the file and writes what lies behind it: no two transfers touch the same bytes.
    cursors = {Operation.READ: 0, Operation.WRITE: kinds.count(Operation.READ)}
    for kind in kinds:
        yield kind, cursors[kind] * block_bytes
        cursors[kind] += 1


class Passes:
    """Files of `total_bytes` in several folders, and the transfers of one setting over them. Not for use from several threads.

    Raises:
        IoError: the files cannot be made, or a transfer failed.
    """

    def __init__(self, paths: Sequence[Path], setting: TransferSetting, *, file_bytes: int, pool: IoPool | None = None) -> None:
        self._setting = setting
        self._pool = make_pool(setting) if pool is None else pool
        self._file: IoFile = open_file(self._pool, paths, file_bytes)
        self._buffer = AlignedBuffer(_BATCHES * setting.in_flight_bytes)
        view = memoryview(self._buffer.array())
        # A drive that compresses, or that knows zeros, must not be seen doing so.
        view[:] = os.urandom(setting.block_bytes) * (len(view) // setting.block_bytes)
        self._blocks = [view[start : start + setting.block_bytes] for start in range(0, len(view), setting.block_bytes)]

    @property
    def direct(self) -> bool:
        return self._file.direct

    def run(self, operation: Operation, total_bytes: int, *, times: int = 1) -> float:
        """Seconds of moving the first `total_bytes` so many `times`; what was written is durable at the end."""
        moves = itertools.chain.from_iterable(
            operations(operation, total_bytes=total_bytes, block_bytes=self._setting.block_bytes) for _ in range(times)
        )
        depth = self._setting.depth
        waiting: deque[list[IoTicket]] = deque()
        begin = time.perf_counter()
        for turn in itertools.count():
            batch = list(itertools.islice(moves, depth))
            if not batch:
                break
            if len(waiting) == _BATCHES:
                _wait(waiting.popleft())
            first = turn % _BATCHES * depth
            waiting.append(submit(self._file, batch, self._blocks[first : first + depth]))
        for tickets in waiting:
            _wait(tickets)
        if operation is not Operation.READ:
            self._file.sync()
        return time.perf_counter() - begin

    def close(self) -> None:
        self._file.close()
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _wait(tickets: Sequence[IoTicket]) -> None:
    for ticket in tickets:
        ticket.wait()


def submit(file: IoFile, batch: Sequence[tuple[Operation, int]], blocks: Sequence[memoryview]) -> list[IoTicket]:
    """Start one batch, in order."""
    return [
        file.read(offset, block) if kind is Operation.READ else file.write(offset, block)
        for (kind, offset), block in zip(batch, blocks, strict=False)
    ]


def make_pool(setting: TransferSetting) -> IoPool:
    return IoPool(setting.depth)


def open_file(pool: IoPool, paths: Sequence[Path], file_bytes: int) -> IoFile:
    (path,) = paths
    return pool.open(path, size_bytes=file_bytes)


def refusal(engine: Engine) -> str:
    """Why an engine cannot be used here; empty when it can."""
    return "the native core has no io_uring engine" if engine is Engine.URING else ""
