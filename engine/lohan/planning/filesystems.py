"""Which file systems model states may lie on. Pure text: the type comes from the kernel's table of mounts."""

from __future__ import annotations

from lohan.config import Durability
from lohan.hardware.probe import IN_MEMORY_FILESYSTEMS

REMEDY = 'Name a folder on ext4 or XFS; for a trial, engine.unsafe_filesystems = "allow" takes this one.'

_COPY_ON_WRITE = frozenset({"btrfs", "zfs", "bcachefs"})
_LAYERED = frozenset({"overlay", "overlayfs", "aufs", "unionfs", "fuse-overlayfs", "fuse.fuse-overlayfs"})


def refusal(filesystem: str, durability: Durability) -> str | None:
    """Why states with `durability` do not belong on a file system of this type (as in /proc/mounts), as a clause; None where they do."""
    if filesystem in IN_MEMORY_FILESYSTEMS:
        return f"is on {filesystem}, which keeps files in the very memory that the run's plan counts as free, and loses them at power-off"
    if durability is Durability.NONE:
        return None
    if filesystem in _COPY_ON_WRITE:
        return f"is on {filesystem}, which copies on write: space that was allocated beforehand can run out in the middle of a run"
    if filesystem in _LAYERED:
        return f"is on {filesystem}, a container's own layer, which goes when the container goes and does not say what is durable"
    return None
