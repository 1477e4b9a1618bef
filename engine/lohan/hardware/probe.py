"""Asks the machine what it has, without torch and without a CUDA context: psutil, /proc, NVML."""

from __future__ import annotations

import hashlib
import os
import platform
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import psutil
from pydantic import BaseModel, ConfigDict, Field

Bytes = Annotated[int, Field(ge=0)]
IN_MEMORY_FILESYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs"})
"""As /proc/mounts has them: what is in their files is in host memory."""
_BF16_INSTRUCTIONS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


class _Facts(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class CpuFacts(_Facts):
    name: str
    cores: int
    """Logical CPUs of the machine."""
    usable_cores: int
    """Logical CPUs this process may run on."""
    multiplies_bf16: bool = False
    """Whether it has instructions for bf16 matrices (AVX512-BF16, AMX-BF16, or Arm's BF16): without them bf16 is slower than fp32."""


class RamFacts(_Facts):
    total_bytes: Bytes
    """Of the machine, or the container's limit where that is lower."""
    free_bytes: Bytes
    """What could be taken now without swapping."""


class GpuWork(StrEnum):
    """What a process does on a GPU, as the driver tells."""

    COMPUTE = "compute"
    GRAPHICS = "graphics"
    """It draws: a display server, a desktop."""


class GpuHolder(_Facts):
    """A process that has memory on a GPU."""

    pid: int
    name: str
    """Of its program; empty where this user may not see it."""
    bytes: Bytes
    """0 where the driver does not tell."""
    user: str = ""
    """Whose it is; empty where this user may not see it."""
    work: GpuWork = GpuWork.COMPUTE


class GpuFacts(_Facts):
    uuid: str
    index: int
    """As the driver numbers it."""
    name: str
    total_bytes: Bytes
    free_bytes: Bytes
    holders: tuple[GpuHolder, ...] = ()


class StateDirectoryFacts(_Facts):
    path: str
    filesystem: str
    """Type, e.g. ext4."""
    drive: str
    """Names the file system the directory is on: directories with the same one share its space."""
    total_bytes: Bytes
    free_bytes: Bytes
    """Available to this user."""
    direct_io: bool
    """Whether files there can be read and written past the page cache (O_DIRECT)."""


class HardwareFacts(_Facts):
    """A machine as it is now."""

    cpu: CpuFacts
    ram: RamFacts
    gpus: tuple[GpuFacts, ...]
    state_directories: tuple[StateDirectoryFacts, ...]
    notes: tuple[str, ...] = ()
    """What was looked for and not found, in sentences."""

    @property
    def digest(self) -> str:
        """SHA-256 over what stays the same while the machine does: not over what is free.

        State directories count by the file systems they are on, so that each run's own folder on a drive is the same machine.
        """
        sharing = Counter((directory.drive, directory.filesystem, directory.total_bytes) for directory in self.state_directories)
        # Not by `drive`: the kernel numbers devices anew when it starts.
        drives = sorted((filesystem, total_bytes, count) for (_, filesystem, total_bytes), count in sharing.items())
        gpus = [(gpu.uuid, gpu.name, gpu.total_bytes) for gpu in self.gpus]
        stable = repr((self.cpu.name, self.cpu.cores, self.ram.total_bytes, gpus, drives))
        return hashlib.sha256(stable.encode()).hexdigest()


def occupied_bytes(directory: Path) -> int:
    """What a folder's files take of their drive, e.g. the states of a run; 0 where there is no such folder."""
    total = 0
    for file in directory.rglob("*"):
        with suppress(FileNotFoundError):
            total += 512 * file.stat().st_blocks  # st_blocks counts units of 512 bytes, whatever the file system's blocks are
    return total


def probe(state_directories: Sequence[Path] = ()) -> HardwareFacts:
    """Look at CPU, RAM, GPUs and the drives of `state_directories`, which need not exist yet. Takes a few milliseconds; writes nothing.

    GPUs are listed only where the installed torch can use them; what is missing for that is said in `notes`.
    """
    notes: list[str] = []
    gpus = tuple(_gpus(notes))
    if gpus and not _torch_is_built_for_gpus():
        notes.append(f"{len(gpus)} GPU(s) were found, but the installed torch is a CPU build: runs use the CPU.")
        gpus = ()
    return HardwareFacts(
        cpu=_cpu(),
        ram=_ram(),
        gpus=gpus,
        state_directories=tuple(_state_directory(Path(path)) for path in state_directories),
        notes=tuple(notes),
    )


def _cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> CpuFacts:
    fields = _first_processor(cpuinfo)
    # x86 lists its instructions as `flags`, Arm as `Features`.
    instructions = f"{fields.get('flags', '')} {fields.get('Features', '')}".split()
    return CpuFacts(
        name=fields.get("model name", "") or platform.processor() or platform.machine(),
        cores=os.cpu_count() or 1,
        usable_cores=len(os.sched_getaffinity(0)),
        multiplies_bf16=not _BF16_INSTRUCTIONS.isdisjoint(instructions),
    )


def _first_processor(cpuinfo: Path) -> dict[str, str]:
    """The fields of the first processor the kernel lists; none where it lists none."""
    fields: dict[str, str] = {}
    try:
        with cpuinfo.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                if not line.strip():
                    break
                name, _, value = line.partition(":")
                fields[name.strip()] = value.strip()
    except OSError:
        pass
    return fields


def _ram() -> RamFacts:
    memory = psutil.virtual_memory()
    total, free = memory.total, memory.available
    for folder in _control_groups():
        limit, used = _number(folder / "memory.max"), _number(folder / "memory.current")
        if limit is not None and used is not None and limit < memory.total:
            # Page cache counts as used, and is given up when memory is asked for.
            total, free = min(total, limit), min(free, max(0, limit - used + _inactive_file_bytes(folder)))
    return RamFacts(total_bytes=total, free_bytes=free)


def _control_groups() -> Iterator[Path]:
    """This process's control group (version 2) and those above it, any of which may limit memory."""
    root = Path("/sys/fs/cgroup")
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        if line.startswith("0::"):
            folder = root / line[3:].lstrip("/")
            while folder.is_relative_to(root):
                yield folder
                folder = folder.parent


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _inactive_file_bytes(folder: Path) -> int:
    try:
        entries = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(entries.get("inactive_file", 0))


def _torch_is_built_for_gpus() -> bool:
    """Whether torch's CUDA library is installed; looks at files, because importing torch takes seconds."""
    torch = find_spec("torch")
    folders = torch.submodule_search_locations if torch is not None else None
    return any((Path(folder) / "lib" / "libtorch_cuda.so").exists() for folder in folders or ())


def _gpus(notes: list[str]) -> Iterator[GpuFacts]:
    try:
        import pynvml
    except ImportError:
        notes.append("GPUs were not looked for: nvidia-ml-py is not installed.")
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        notes.append(f"No GPU: NVIDIA's driver says: {error}.")
        return
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            yield _gpu(pynvml, index)
    except pynvml.NVMLError as error:
        notes.append(f"A GPU could not be read: {error}.")
    finally:
        pynvml.nvmlShutdown()


def _gpu(pynvml: Any, index: int) -> GpuFacts:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    holders = {holder.pid: holder for holder in _holders(pynvml, handle)}
    return GpuFacts(
        uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
        index=index,
        name=_text(pynvml.nvmlDeviceGetName(handle)),
        total_bytes=memory.total,
        free_bytes=memory.free,
        holders=tuple(holders.values()),
    )


def _holders(pynvml: Any, handle: Any) -> Iterator[GpuHolder]:
    """Processes that draw, then those that compute: a process that does both is listed by the driver twice, and counts as the latter."""
    for ask, work in (
        (pynvml.nvmlDeviceGetGraphicsRunningProcesses, GpuWork.GRAPHICS),
        (pynvml.nvmlDeviceGetComputeRunningProcesses, GpuWork.COMPUTE),
    ):
        try:
            processes = ask(handle)
        except pynvml.NVMLError:
            continue
        for process in processes:
            name, user = _process_name_and_user(process.pid)
            yield GpuHolder(pid=process.pid, name=name, user=user, bytes=process.usedGpuMemory or 0, work=work)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _process_name_and_user(pid: int) -> tuple[str, str]:
    """Of its program, and whose it is; empty where that may not be seen."""
    name = user = ""
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        name = process.name()
        user = process.username()
    return name, user


def _state_directory(path: Path) -> StateDirectoryFacts:
    existing = path.absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    usage = psutil.disk_usage(str(existing))
    return StateDirectoryFacts(
        path=str(path),
        filesystem=filesystem_type(existing),
        drive=str(existing.stat().st_dev),
        total_bytes=usage.total,
        free_bytes=usage.free,
        direct_io=_takes_direct_io(existing),
    )


def lies_in_memory(path: Path) -> bool:
    """Whether the files of the folder `path` are host memory (tmpfs)."""
    return filesystem_type(path) in IN_MEMORY_FILESYSTEMS


def filesystem_type(path: Path) -> str:
    """Type of the mount that `path` lies on, as the kernel names it (`ext4`, `overlay`); empty where that cannot be told."""
    resolved = path.resolve()
    mounts = [part for part in psutil.disk_partitions(all=True) if resolved.is_relative_to(part.mountpoint)]
    return max(mounts, key=lambda part: len(part.mountpoint)).fstype if mounts else ""


def _takes_direct_io(folder: Path) -> bool:
    """Whether an unnamed file of the folder's file system opens with O_DIRECT."""
    direct, unnamed = getattr(os, "O_DIRECT", 0), getattr(os, "O_TMPFILE", 0)
    if not direct or not unnamed:
        return False
    try:
        os.close(os.open(folder, unnamed | direct | os.O_RDWR | os.O_CLOEXEC, 0o600))
    except OSError:
        return False
    return True
