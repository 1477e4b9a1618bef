"""Processes on a GPU as the driver lists them."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import psutil

from lohan.hardware.probe import GpuHolder, GpuWork, _gpu

ME, NOBODY = os.getpid(), 2**22 + 1


class Driver:
    """NVML of one GPU, on which one process draws and computes, one only draws, and one is not to be seen."""

    class NVMLError(Exception):
        pass

    def __init__(self, *, can_list: bool = True) -> None:
        self._can_list = can_list

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetMemoryInfo(self, _: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(total=100, free=40)

    def nvmlDeviceGetUUID(self, index: int) -> str:  # noqa: N802
        return f"GPU-{index}"

    def nvmlDeviceGetName(self, _: int) -> bytes:  # noqa: N802
        return b"RTX 4090"

    def nvmlDeviceGetGraphicsRunningProcesses(self, _: int) -> list[Any]:  # noqa: N802
        return [SimpleNamespace(pid=ME, usedGpuMemory=20), SimpleNamespace(pid=1, usedGpuMemory=7)]

    def nvmlDeviceGetComputeRunningProcesses(self, _: int) -> list[Any]:  # noqa: N802
        if not self._can_list:
            raise self.NVMLError
        return [SimpleNamespace(pid=ME, usedGpuMemory=20), SimpleNamespace(pid=NOBODY, usedGpuMemory=None)]


def test_every_process_is_listed_once_with_what_may_be_seen_of_it() -> None:
    gpu = _gpu(Driver(), 3)
    assert (gpu.uuid, gpu.index, gpu.name, gpu.total_bytes, gpu.free_bytes) == ("GPU-3", 3, "RTX 4090", 100, 40)
    me, init = psutil.Process(ME), psutil.Process(1)
    assert gpu.holders == (
        GpuHolder(pid=ME, name=me.name(), user=me.username(), bytes=20),
        GpuHolder(pid=1, name=init.name(), user=init.username(), bytes=7, work=GpuWork.GRAPHICS),
        GpuHolder(pid=NOBODY, name="", bytes=0),
    )


def test_a_driver_that_does_not_list_processes_tells_the_memory_all_the_same() -> None:
    gpu = _gpu(Driver(can_list=False), 0)
    assert [holder.work for holder in gpu.holders] == [GpuWork.GRAPHICS] * 2
    assert gpu.free_bytes == 40
