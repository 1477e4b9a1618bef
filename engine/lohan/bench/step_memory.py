"""How much memory a process has taken at most: of the host, and of a GPU with what CUDA itself holds there."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch


def host_peak_bytes(status: Path = Path("/proc/self/status")) -> int:
    """The most this process had resident at once, less what it has mapped of files that are memory: those are the state files of a tmpfs.

    Not `getrusage`: its figure begins with that of the process that started this one.
    """
    found = {name: rest.split() for line in status.read_text().splitlines() for name, _, rest in [line.partition(":")]}
    try:
        return (int(found["VmHWM"][0]) - int(found["RssShmem"][0])) * 1024
    except (KeyError, IndexError, ValueError) as error:
        raise OSError(f"{status} does not say how much memory was resident at most") from error


def forget_host_peak(references: Path = Path("/proc/self/clear_refs")) -> None:
    """Let `host_peak_bytes` count from now on, where the kernel lets a process ask for that; else it goes on from its beginning."""
    with suppress(OSError):
        references.write_text("5")


class GpuMemory:
    """The account of one GPU. Make it before this process touches the GPU.

    Args:
        uuid: of the GPU, as NVML has it; anything else counts nothing.
    """

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid
        self._before = _used_bytes(uuid)

    def context_bytes(self, device: torch.device) -> int | None:
        """What CUDA, its libraries and loaded kernels hold there, which no allocation of torch's counts; None where NVML cannot say.

        From this process's entry in NVML's list or, in a container that hides it, from what the whole GPU held before: nobody else may
        come or go meanwhile.
        """
        used, own = _used_bytes(self._uuid), _own_bytes(self._uuid)
        torch.cuda.synchronize(device)
        reserved = torch.cuda.memory_reserved(device)
        if own is not None:
            return max(0, own - reserved)
        return None if used is None or self._before is None else max(0, used - self._before - reserved)


def _used_bytes(uuid: str) -> int | None:
    return _ask(uuid, lambda nvml, handle: int(nvml.nvmlDeviceGetMemoryInfo(handle).used))


def _own_bytes(uuid: str) -> int | None:
    def find(nvml: Any, handle: Any) -> int | None:
        for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
            if process.pid == os.getpid() and process.usedGpuMemory:
                return int(process.usedGpuMemory)
        return None

    return _ask(uuid, find)


def _ask(uuid: str, question: Any) -> int | None:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        answer: int | None = question(pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid))
        return answer
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()
