"""Where kept activations wait from forward to backward: on the device, in RAM, or on the drives.

What leaves the device is copied on a stream of its own as soon as it is there, and its memory is held until that copy has ended. What may
wait for that is bounded by what the largest region sends out: beyond it the compute stream waits for the oldest copy. On the way back
the next region's activations are brought to the device while the one before it runs. On the CPU copies take the place of transfers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from lohan.errors import EngineError
from lohan.planning.kept_footprint import whole_pages
from lohan.planning.operations import OperationKind
from lohan.planning.step_trace import Wait
from lohan.planning.tiers import Tier
from lohan.streaming.device import Event, delay, make_stream, on_stream
from lohan.streaming.kept_buffers import HostBuffer, KeptBuffers, StagingBuffers
from lohan.streaming.kept_drive import KeptDrive, StoredOutput
from lohan.streaming.kept_tensors import PackedOutputs, checksum

if TYPE_CHECKING:
    from pathlib import Path

    from lohan.memory.arena import Arena
    from lohan.memory.store import Store
    from lohan.streaming.pending import Failure
    from lohan.streaming.trace import Trace

_DELAY_CYCLES = 500_000  # about 0.3 ms on a GPU: longer than a small output's copy, so that a missing wait shows

Key = tuple[int, int, int]
"""Of an output: unit, region, and place among what is kept of the block."""


@dataclass(slots=True, eq=False)
class KeptOutput:
    """The outputs of one operator in one region, or the region's input."""

    label: str
    block: str
    """The block's name, for messages."""
    unit: int
    number: int
    """The region's, among the unit's in this forward."""
    place: int
    """Among what is kept of the block."""
    step: int
    tier: Tier
    packed: PackedOutputs
    copied: Event
    loaded: Event
    checksum: int | None = None
    buffer: HostBuffer | None = None
    stored: StoredOutput | None = None
    targets: list[torch.Tensor] = field(default_factory=list)
    has_left: bool = False
    """Whether it is in host memory or on the drive, or on its way there."""
    is_asked_for: bool = False

    @property
    def key(self) -> Key:
        """The same in every step."""
        return self.unit, self.number, self.place


def refuse_write(output: KeptOutput, writer: str = "") -> NoReturn:
    """Somebody has written, or is about to, to what is kept: `writer` is the operator, where it is known."""
    raise EngineError(
        f"the kept output of {output.label} in {output.block} was written to" + (f" by {writer}" if writer else " after it was computed"),
        place=output.block,
        remedy="Keep the output of the operator behind the one that writes, or use kernels that write elsewhere.",
    )


class KeptTiers:
    """Used by the threads that run forward and backward, never two at once.

    Args:
        folders: where activations on the drives lie; None where none go there.
        check_sums: whether what is kept is compared with what it was (debug mode).
    """

    def __init__(
        self,
        arena: Arena,
        store: Store,
        folders: Sequence[Path] | None,
        failure: Failure,
        *,
        device: torch.device,
        check_sums: bool,
        trace: Trace | None,
    ) -> None:
        self._device, self._failure, self._trace, self._check_sums, self._store = device, failure, trace, check_sums, store
        self._out, self._in = make_stream(device), make_stream(device)
        self._buffers = KeptBuffers(arena, device, fill_with_nan=check_sums)
        self._staging = StagingBuffers(arena, store, failure, device)
        self.drive = self._make_drive(folders)
        self._leaving: deque[KeptOutput] = deque()
        self._leaving_bytes = self._most_leaving_bytes = 0
        self.bytes_out = self.bytes_in = 0
        """Copied from the device and to it so far."""

    def reopen(self, folders: Sequence[Path] | None) -> None:
        """Begin anew, for another decision; nothing is kept now. The streams stay: torch has a few dozen, which it gives out in turn.

        Raises:
            StorageError: a folder cannot be used.
        """
        self.close()
        self._most_leaving_bytes = 0
        self.drive = self._make_drive(folders)

    def make_room(self, in_ram: Mapping[Key, int], on_drives: Mapping[Key, int]) -> None:
        """Make buffers and places for outputs of so many bytes before they come.

        Raises:
            CapacityError: there is no host memory for them.
            StorageError: there is no space on the drives for them.
        """
        if on_drives:
            self._staging.prepare(whole_pages(max(on_drives.values())))
            self._files.make_room(on_drives.items())
        made: list[tuple[Key, HostBuffer]] = []
        try:
            made += ((key, self._buffers.take(key, size_bytes, size_bytes)) for key, size_bytes in in_ram.items())
        finally:
            for key, buffer in made:
                self._buffers.give_back(key, buffer)

    def _make_drive(self, folders: Sequence[Path] | None) -> KeptDrive | None:
        if folders is None:
            return None
        return KeptDrive(self._store, folders, self._staging, self._failure, device=self._device, trace=self._trace)

    def keep(self, output: KeptOutput, room_bytes: int) -> None:
        """Take what has just been computed; `room_bytes` is what it may need at most in a larger micro-batch.

        Raises:
            CapacityError: there is no host memory for it.
            EngineError: an earlier one was written to before it had left, or a background stage failed.
            StorageError: there is no space on the drives for it.
        """
        if self._check_sums:
            output.checksum = checksum(output.packed.stretches())
        if output.tier is Tier.GPU:
            return
        if output.tier is Tier.SSD:
            output.stored = self._reserve(output, room_bytes)
        begun = self._mark(output)
        self._make_room(output.packed.bytes)
        buffer = self._host_buffer(output, room_bytes)
        self._add_wait(Wait.ROOM_FOR_ACTIVATIONS, output, begun)
        self._copy_out(output, buffer)
        if output.stored is None:
            output.buffer = buffer
        else:
            self._files.write(output.stored, buffer)
        output.has_left = True

    def region_ended(self, sent_bytes: int) -> None:
        """A region that sent out so many bytes has run."""
        self._most_leaving_bytes = max(self._most_leaving_bytes, sent_bytes)

    def forward_ended(self) -> None:
        """Nothing more leaves: wait for what is still on its way."""
        while self._leaving:
            oldest = self._leaving[0]
            begun = self._mark(oldest)
            self._let_go_oldest()
            self._add_wait(Wait.ROOM_FOR_ACTIVATIONS, oldest, begun)

    def ask_for(self, output: KeptOutput) -> None:
        """Begin to bring the output back to the device, unless that has begun or it never left: a forward may have broken off there."""
        if not output.has_left or output.is_asked_for:
            return
        output.is_asked_for = True
        output.targets = [torch.empty(size, dtype=torch.uint8, device=self._device) for size in output.packed.sizes]
        allocated = Event(self._device)
        allocated.record()  # the memory may be that of something the compute stream still uses
        allocated.wait(self._in)
        if output.stored is not None:
            self._files.read(output.stored)
        else:
            assert output.buffer is not None, "what left the device is in host memory"
            output.copied.wait(self._in)
            self._copy_in(output, output.buffer)

    def take(self, output: KeptOutput) -> Any:
        """What the operator returned; the current stream waits for it. Once only.

        Raises:
            EngineError: it was written to, or a background stage failed.
        """
        begun = self._mark(output)
        self.ask_for(output)
        if output.stored is not None:
            self._files.wait(output.stored)
        output.loaded.wait()
        if output.tier is not Tier.GPU:
            self._add_wait(Wait.ACTIVATIONS, output, begun)
        if self._check_sums or output.packed.was_written:
            self._check(output)
        result = output.packed.rebuild(output.targets)
        output.targets = []
        self.release(output)
        return result

    def release(self, output: KeptOutput) -> None:
        """Give back what the output has; the current stream need not have waited for its copies."""
        if output in self._leaving:
            self._leaving.remove(output)
            self._leaving_bytes -= output.packed.bytes
        if output.stored is not None:
            self._files.forget(output.stored)
            output.stored = None
        self._free_after(self._in, output.targets)
        output.targets = []
        if output.tier is not Tier.GPU:
            self._free_after(self._out, output.packed.let_go())
        if output.buffer is not None:
            self._buffers.give_back(output.key, output.buffer)
            output.buffer = None

    def close(self) -> None:
        """End the threads, remove the file, and give all memory back."""
        if self.drive is not None:
            self.drive.close()
            self.drive = None
        for stream in (self._out, self._in):
            if stream is not None:
                stream.synchronize()
        self._leaving.clear()
        self._leaving_bytes = 0
        self._staging.free()
        self._buffers.free()

    # ---------------------------------------------------------------- out

    def _make_room(self, size_bytes: int) -> None:
        """Let what is on its way out go, the oldest first, until there is room for more."""
        most = max(self._most_leaving_bytes, size_bytes)
        while self._leaving and self._leaving_bytes + size_bytes > most:
            self._let_go_oldest()

    def _let_go_oldest(self) -> None:
        output = self._leaving.popleft()
        self._leaving_bytes -= output.packed.bytes
        output.copied.wait()
        if output.packed.was_written:
            refuse_write(output)
        output.packed.let_go()

    def _host_buffer(self, output: KeptOutput, room_bytes: int) -> HostBuffer:
        if output.tier is Tier.RAM:
            return self._buffers.take(output.key, output.packed.bytes, room_bytes)
        self._staging.prepare(whole_pages(max(output.packed.bytes, room_bytes)))
        return self._staging.take()

    def _copy_out(self, output: KeptOutput, buffer: HostBuffer) -> None:
        computed = Event(self._device)
        computed.record()
        computed.wait(self._out)
        buffer.last_use.wait(self._out)
        self._delay(self._out)
        with on_stream(self._out):
            begun = self._mark(output, self._out)
            offset = 0
            for stretch in output.packed.stretches():
                buffer.memory[offset : offset + stretch.numel()].copy_(stretch, non_blocking=True)
                offset += stretch.numel()
            self._add_copy(OperationKind.ACTIVATIONS_OUT, output, begun, self._out)
        output.copied.record(self._out)
        buffer.last_use.record(self._out)
        self.bytes_out += offset
        self._leaving.append(output)
        self._leaving_bytes += offset

    def _reserve(self, output: KeptOutput, room_bytes: int) -> StoredOutput:
        span = (output.step, output.unit, output.place, output.number)
        stored = StoredOutput(output.key, output.packed.bytes, output.copied, lambda buffer: self._copy_in(output, buffer), span=span)
        self._files.reserve(stored, room_bytes)
        return stored

    @property
    def _files(self) -> KeptDrive:
        assert self.drive is not None, "there is a drive where a decision names one"
        return self.drive

    # ---------------------------------------------------------------- back

    def _copy_in(self, output: KeptOutput, buffer: HostBuffer) -> None:
        """Runs in the reader's thread where the output was on the drive."""
        self._delay(self._in)
        with on_stream(self._in):
            begun = self._mark(output, self._in)
            offset = 0
            for target in output.targets:
                target.copy_(buffer.memory[offset : offset + target.numel()], non_blocking=True)
                offset += target.numel()
            self._add_copy(OperationKind.ACTIVATIONS_IN, output, begun, self._in)
        output.loaded.record(self._in)
        buffer.last_use.record(self._in)
        self.bytes_in += offset

    def _check(self, output: KeptOutput) -> None:
        if output.packed.was_written:
            refuse_write(output)
        found = output.targets if output.tier is not Tier.GPU else output.packed.stretches()
        if output.checksum is not None and checksum(found) != output.checksum:
            refuse_write(output)

    # ---------------------------------------------------------------- small things

    def _delay(self, stream: Any) -> None:
        if self._check_sums:
            delay(stream, _DELAY_CYCLES)

    def _free_after(self, stream: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Memory that a copy of `stream` may still use is not given to anybody else before its end."""
        if stream is not None:
            for tensor in tensors:
                tensor.record_stream(stream)

    def _mark(self, output: KeptOutput, stream: Any = None) -> Any:
        return self._trace.mark(output.step, stream) if self._trace is not None else None

    def _add_copy(self, kind: OperationKind, output: KeptOutput, begun: Any, stream: Any) -> None:
        if self._trace is not None:
            ended, place = self._trace.mark(output.step, stream), {"chunk": output.place, "bytes": output.packed.bytes}
            self._trace.add(output.step, kind, output.unit, begun, ended, micro_batch=output.number, **place)

    def _add_wait(self, wait: Wait, output: KeptOutput, begun: Any) -> None:
        if self._trace is not None:
            self._trace.add(output.step, wait, output.unit, begun, self._mark(output), chunk=output.place, micro_batch=output.number)
