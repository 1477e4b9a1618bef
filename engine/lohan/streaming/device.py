"""The few things that differ between a GPU and the CPU: streams, events and pinned memory. On the CPU all of them do nothing."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch

from lohan.errors import ConfigError

_ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def resolve_device(name: str) -> torch.device:
    """The torch device of a configuration's `device`: auto, cpu, cpu:N, cuda, cuda:N or a GPU's UUID (GPU-…).

    The first that is asked for settles how this process's CUDA allocator works, see `_let_segments_grow`.

    Raises:
        ConfigError: there is no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cpu"):
        return torch.device("cpu")
    _let_segments_grow()
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name.startswith("GPU-"):
        for index in range(count):
            # torch gives the UUID without the prefix that NVML and nvidia-smi put before it.
            if str(torch.cuda.get_device_properties(index).uuid) == name.removeprefix("GPU-"):
                return torch.device("cuda", index)
    elif name.startswith("cuda"):
        index = int(name.partition(":")[2] or 0)
        if index < count:
            return torch.device("cuda", index)
    raise ConfigError(f"device is {name!r}, but torch sees {count} GPUs", place="engine.device", remedy="Use auto or cpu, or free the GPU.")


def _let_segments_grow() -> None:
    """Have torch's allocator map more memory behind what it holds in place of taking further segments, whose rests fit nothing: of
    20.0 GiB that 3.43 billion parameters at 32 rows took of a GPU, 1.5 GiB were such rests, more than a plan's reserve has for them.

    What the user has set stands. Torch reads its variable when it is imported, and has no public way to say it later.
    """
    choose = getattr(torch._C, "_accelerator_setAllocatorSettings", None)  # noqa: SLF001
    if choose is not None and not any(os.environ.get(name) for name in _ALLOCATOR_SETTINGS):
        choose("expandable_segments:True")


class Event:
    """A point in a stream's work. `record` and `wait` act on the device's current stream of the calling thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def record(self, stream: Any = None) -> None:
        if self._event is not None:
            self._event.record(stream or torch.cuda.current_stream(self._device))

    def wait(self, stream: Any = None) -> None:
        """Make the stream, not the thread, wait for the recorded point."""
        if self._event is not None:
            (stream or torch.cuda.current_stream(self._device)).wait_event(self._event)

    @property
    def reached(self) -> bool:
        """Whether the recorded point lies behind, so that `synchronize` would not wait."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        """Make the thread wait for the recorded point."""
        if self._event is not None:
            self._event.synchronize()


def make_stream(device: torch.device) -> Any:
    """A stream for copies on a GPU; None on the CPU."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def on_stream(stream: Any) -> contextlib.AbstractContextManager[Any]:
    """Run the block's device work on `stream`; None leaves the current one."""
    return torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext()


def delay(stream: Any, cycles: int) -> None:
    """Keep `stream` busy for a number of GPU clock cycles (debug mode)."""
    if stream is not None:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]  # noqa: SLF001 - torch has no public way to occupy a stream
