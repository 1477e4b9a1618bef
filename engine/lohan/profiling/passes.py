"""One pass over the state files through LoHan's transfers: what is moved, in which order, with how much in flight."""

from __future__ import annotations

import itertools
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Self

from lohan._native import AlignedBuffer, FaultPlan, IoEngine, IoError, IoFile, IoPool, IoTicket, io_uring_refusal
from lohan.errors import StorageError
from lohan.hardware.transfers import ENGINE_BLOCK_BYTES, Engine, Operation, TransferSetting, known_setting
from lohan.units import MIB

# 70 % reads, as evenly spread as ten places allow.
MOSTLY_READS: Final = "rrwrrwrrwr"
HALF_READS: Final = "rw"
# What runs go by where `lohan bench io` was never run.
_DEFAULT_DEPTH: Final = {Engine.URING: 8, Engine.THREADS: 4}
# Blocks are handed over in batches, and one batch more than may be in flight is under way: the next is queued while one is awaited. Where
# the blocks in flight take little memory a batch is as many, so that Python is seldom waited for (a quarter of eight 256 KiB: 84 % of the
# speed). Where they take more it is a quarter: fio has one buffer for each block in flight, and twice as much falls out of the processor's
# cache sooner (eight 1 MiB: 87 % with twice as much, 91-95 % with a quarter more).
_LITTLE_BYTES: Final = 4 * MIB
_NATIVE: Final = {Engine.URING: IoEngine.URING, Engine.THREADS: IoEngine.THREADS}


def transfer_setting(directories: Sequence[Path]) -> TransferSetting:
    """What a run with these state directories moves its files with."""
    chosen = known_setting(directories)
    if chosen is not None and not refusal(chosen.engine):
        return chosen
    engine = Engine.THREADS if refusal(Engine.URING) else Engine.URING
    return TransferSetting(engine, ENGINE_BLOCK_BYTES, _DEFAULT_DEPTH[engine])


def as_storage_error(error: IoError) -> StorageError:
    """A failed transfer as the error that users see."""
    return StorageError(
        f"{error.operation} failed: {os.strerror(error.errno or 0)}",
        place=str(error.filename),
        remedy=error.remedy,
        errno=error.errno,
        offset=error.offset,
    )


def operations(operation: Operation, *, total_bytes: int, block_bytes: int, mix: str = MOSTLY_READS) -> Iterator[tuple[Operation, int]]:
    """(READ or WRITE, offset in bytes) of each block in order; every block is moved once.

    Args:
        mix: of mixed operations: `r` for each that is read, `w` for each that is written, over and over.
    """
    blocks = total_bytes // block_bytes
    if operation is not Operation.MIXED:
        yield from ((operation, index * block_bytes) for index in range(blocks))
        return
    kinds = [Operation.READ if kind == "r" else Operation.WRITE for kind in itertools.islice(itertools.cycle(mix), blocks)]
    # Reads take the front of the file and writes what lies behind it: no two transfers touch the same bytes.
    cursors = {Operation.READ: 0, Operation.WRITE: kinds.count(Operation.READ)}
    for kind in kinds:
        yield kind, cursors[kind] * block_bytes
        cursors[kind] += 1


class Passes:
    """Files of the same size in several folders, and the transfers of one setting over them. Not for use from several threads.

    Args:
        file_bytes: of each file; a multiple of 4 MiB where there are several.
        faults: slows the transfers down.
        mix: see `operations`.

    Raises:
        IoError: the files cannot be made, or a transfer failed.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        setting: TransferSetting,
        *,
        file_bytes: int,
        faults: FaultPlan | None = None,
        mix: str = MOSTLY_READS,
    ) -> None:
        self._block_bytes, self._mix = setting.block_bytes, mix
        in_flight = setting.depth * len(paths)
        self._batch = in_flight if in_flight * setting.block_bytes <= _LITTLE_BYTES else -(-in_flight // 4)
        self._batches = -(-in_flight // self._batch) + 1
        self._pool = IoPool(setting.depth, engine=_NATIVE[setting.engine], depth=setting.depth, faults=faults)
        self._file: IoFile = self._pool.open(list(paths), size_bytes=file_bytes * len(paths))
        buffer = AlignedBuffer(self._batches * self._batch * setting.block_bytes)
        self._memory = self._pool.register_memory(buffer)
        view = memoryview(buffer.array())
        # A drive that compresses, or that knows zeros, must not be seen doing so.
        view[:] = os.urandom(setting.block_bytes) * (len(view) // setting.block_bytes)
        self._blocks = [view[start : start + setting.block_bytes] for start in range(0, len(view), setting.block_bytes)]

    @property
    def direct(self) -> bool:
        return self._file.direct

    @property
    def registered(self) -> bool:
        """Whether the kernel has pinned the buffers once for all transfers (io_uring, within the limit of locked memory)."""
        return not self._memory.refusal

    def run(self, operation: Operation, total_bytes: int, *, times: int = 1) -> float:
        """Seconds of moving the first `total_bytes` so many `times`; what was written is durable at the end."""
        moves = itertools.chain.from_iterable(
            operations(operation, total_bytes=total_bytes, block_bytes=self._block_bytes, mix=self._mix) for _ in range(times)
        )
        waiting: deque[list[IoTicket]] = deque()
        begin = time.perf_counter()
        for turn in itertools.count():
            batch = list(itertools.islice(moves, self._batch))
            if not batch:
                break
            if len(waiting) == self._batches:
                _wait(waiting.popleft())
            first = turn % self._batches * self._batch
            waiting.append(self._submit(batch, self._blocks[first : first + self._batch]))
        for tickets in waiting:
            _wait(tickets)
        if operation is not Operation.READ:
            self._file.sync()
        return time.perf_counter() - begin

    def _submit(self, batch: Sequence[tuple[Operation, int]], blocks: Sequence[memoryview]) -> list[IoTicket]:
        """Start one batch, in order: neighbours of a kind go together."""
        tickets: list[IoTicket] = []
        moves = zip(batch, blocks, strict=False)
        for kind, group in itertools.groupby(moves, key=lambda move: move[0][0]):
            requests = [(offset, block) for (_, offset), block in group]
            tickets += self._file.read_batch(requests) if kind is Operation.READ else self._file.write_batch(requests)
        return tickets

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


def refusal(engine: Engine) -> str:
    """Why an engine cannot be used here; empty when it can."""
    return io_uring_refusal() if engine is Engine.URING else ""
