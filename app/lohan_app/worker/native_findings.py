"""The part of `lohan doctor` about the native core: whether it loads, and which of the kernel's services it gets here.

None of the services is needed. Where one is refused the core takes another way, and a person may want to know which and why.
"""

from __future__ import annotations

import ctypes
import mmap
import resource
import tempfile
from pathlib import Path

from lohan.config import Durability, UpdateSchedule
from lohan.hardware.probe import StateDirectoryFacts
from lohan.planning.filesystems import refusal as unfitness
from lohan.planning.fit import SSD_RESERVE_BYTES
from lohan.planning.plan import CHUNK_PARAMETERS
from lohan.planning.schedule import UPDATE_ORDERS
from lohan.units import format_bytes
from lohan_app.worker.findings import Finding, Status

STAGING_BYTES = UPDATE_ORDERS[UpdateSchedule.OPTIMIZED].chunks_in_flight * CHUNK_PARAMETERS * 12
"""Buffers between the optimizer and the drives (12 bytes a parameter) with the largest chunks that a plan chooses: what a run would have
io_uring pin at most."""

_MLOCK_ONFAULT = 1  # counts the range without filling it
_MAP_NORESERVE = 0x4000  # in Python's mmap from 3.12 on; takes no swap space either


def native_core() -> Finding:
    """Whether the module loads, and which instructions it uses."""
    try:
        from lohan._native import available_instruction_sets
    except ImportError as error:
        remedy = "Build it: pip install . (needs a C++ compiler and Python's headers)."
        return Finding("native core", Status.MISSING, f"cannot be loaded: {error}", remedy)
    widest = available_instruction_sets()[-1].name.replace("AVX512", "AVX-512").lower().replace("avx", "AVX")
    return Finding("native core", Status.OK, f"loaded; the optimizer uses {widest} instructions on this processor")


def kernel_services() -> list[Finding]:
    """io_uring, huge pages and locked memory; nothing where the native core does not load."""
    try:
        from lohan._native import io_uring_refusal
    except ImportError:
        return []
    return [_io_uring(io_uring_refusal()), huge_pages(), locked_memory(STAGING_BYTES)]


def _io_uring(refusal: str) -> Finding:
    if not refusal:
        return Finding("io_uring", Status.OK, "works: state files are read and written through it")
    return Finding(
        "io_uring",
        Status.NOTE,
        f"cannot be used: {refusal}; threads read and write the state files instead, as fast in large blocks, with more CPU time",
        "Set kernel.io_uring_disabled=0 (sysctl); in a container, allow io_uring_setup, io_uring_enter and io_uring_register in its"
        " seccomp profile.",
    )


def huge_pages(setting: Path = Path("/sys/kernel/mm/transparent_hugepage/enabled")) -> Finding:
    """Whether large buffers get pages of 2 MiB: by the system's setting and for this process."""
    subject, without = "huge pages", "buffers lie in pages of 4 KiB, which costs the optimizer and the copies some speed"
    try:
        chosen = setting.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return Finding(
            subject, Status.NOTE, f"this kernel has no transparent huge pages; {without}", "Use a kernel that is built with them."
        )
    if chosen == "never":
        remedy = f"As root: echo madvise > {setting}; for good, boot with transparent_hugepage=madvise."
        return Finding(subject, Status.NOTE, f"transparent huge pages are off; {without}", remedy)
    if _status_field("THP_enabled") == "0":
        text = f"transparent huge pages are off for this process and what it starts; {without}"
        return Finding(subject, Status.NOTE, text, "Start the appliance without the tool that set PR_SET_THP_DISABLE.")
    return Finding(subject, Status.OK, f"transparent huge pages are on ({chosen}): large buffers lie in pages of 2 MiB")


def _status_field(name: str) -> str:
    """A line of /proc/self/status; empty where the kernel does not have it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(f"{name}:")), "")


def locked_memory(need_bytes: int) -> Finding:
    """Whether a run's buffers may be pinned for io_uring, found out by locking as much address space without filling it."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    allowed = "any amount" if limit == resource.RLIM_INFINITY else format_bytes(limit)
    if _may_lock(need_bytes):
        beyond = "" if limit == resource.RLIM_INFINITY or limit >= need_bytes else " (RLIMIT_MEMLOCK; this user may exceed it)"
        return Finding("locked memory", Status.OK, f"{allowed} may be locked{beyond}: enough to register I/O buffers")
    return Finding(
        "locked memory",
        Status.NOTE,
        f"{allowed} may be locked (RLIMIT_MEMLOCK), registering I/O buffers takes {format_bytes(need_bytes)} and more: the kernel pins them"
        " for each transfer instead, with more CPU time",
        "Raise the limit: ulimit -l unlimited; LimitMEMLOCK=infinity for systemd; --ulimit memlock=-1 for a container.",
    )


def _may_lock(size_bytes: int) -> bool:
    try:
        mlock2 = ctypes.CDLL(None).mlock2
        area = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    except (AttributeError, OSError):  # no such call, or no address space: the limit is all there is to go by
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        return limit == resource.RLIM_INFINITY or limit >= size_bytes
    with area:
        start = ctypes.c_char.from_buffer(area)
        locked = mlock2(ctypes.byref(start), ctypes.c_size_t(size_bytes), _MLOCK_ONFAULT) == 0
        del start  # the mapping cannot be closed, and so unlocked, while something refers to it
        return bool(locked)


def state_drive(directory: StateDirectoryFacts) -> Finding:
    """Room, kind and direct I/O of the file system a state folder lies on."""
    space = f"{format_bytes(directory.free_bytes)} free of {format_bytes(directory.total_bytes)} ({directory.filesystem})"
    subject = "state drive"
    if directory.free_bytes <= SSD_RESERVE_BYTES:
        return Finding(subject, Status.MISSING, f"{directory.path}: {space}", "Free space there: states take 12 bytes per parameter.")
    unfit = [durability for durability in Durability if unfitness(directory.filesystem, durability)]
    if unfit:
        which = "states" if len(unfit) == len(Durability) else "states that can be resumed"
        reason = unfitness(directory.filesystem, unfit[0])
        return Finding(subject, Status.NOTE, f"{directory.path}: {space}; {which} are refused there: it {reason}", "Use ext4 or XFS.")
    refusal = direct_refusal(Path(directory.path))
    if refusal is None and not directory.direct_io:
        refusal = "files there do not open with O_DIRECT"
    if refusal:
        text = f"{directory.path}: {space}; no direct I/O, so states go through the page cache: {refusal}"
        return Finding(subject, Status.NOTE, text, "Use ext4 or XFS on an NVMe drive for speed.")
    return Finding(subject, Status.OK, f"{directory.path}: {space}, direct I/O")


def direct_refusal(folder: Path) -> str | None:
    """Why the native core reads and writes a new file in `folder` through the page cache; empty where it does not, None if not known."""
    try:
        from lohan._native import IoPool
    except ImportError:
        return None
    pool = IoPool(1)
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".lohan-doctor-") as file:
            opened = pool.open(file.name, size_bytes=mmap.PAGESIZE)
            try:
                return opened.direct_refusal
            finally:
                opened.close()
    except OSError:  # the folder's own finding says that it cannot be written to
        return None
    finally:
        pool.close()
