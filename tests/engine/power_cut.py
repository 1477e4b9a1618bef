"""A file system on a loop device whose power can be cut: what was not made durable is gone when it is mounted again."""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path
from typing import Self

from tests.fixtures.waiting import wait_until

_FS_IOC_SHUTDOWN = 0x8004587D  # _IOR('X', 125, __u32)
_NO_LOG_FLUSH = 2
"""Neither data nor journal are written any more."""
_IMAGE_BYTES = 3 << 29
"""Sparse; above the GiB that a plan leaves on every drive."""


MAKERS = {"ext4": ("mkfs.ext4", "-q"), "xfs": ("mkfs.xfs", "-q"), "btrfs": ("mkfs.btrfs", "-q")}
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


class LoopDrive:
    """A file system of its own, of `image_bytes`, mounted at `folder` inside the `with` block; `filesystem` is one of `MAKERS`.

    Raises:
        OSError, subprocess.CalledProcessError: this machine cannot do that.
    """

    def __init__(self, place: Path, filesystem: str, *, image_bytes: int = _IMAGE_BYTES) -> None:
        self._maker = MAKERS[filesystem]
        self.folder = place / "drive"
        self._image = place / "drive.img"
        self._image_bytes = image_bytes

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True)
        with self._image.open("wb") as image:
            image.truncate(self._image_bytes)
        _run(*self._maker, str(self._image))
        self._mount()
        return self

    def __exit__(self, *_: object) -> None:
        self._unmount()

    def cut_power(self) -> None:
        """From now on nothing reaches the drive; every write fails."""
        descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, _FS_IOC_SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
        finally:
            os.close(descriptor)

    def restore_power(self) -> None:
        """Mount what reached the drive; whoever had a file open there has ended."""
        self._unmount()
        self._mount()

    def _unmount(self) -> None:
        # What a killed process had in an io_uring keeps its files open a moment longer than the process lives.
        wait_until(lambda: _succeeds("umount", str(self.folder)))

    def _mount(self) -> None:
        _run("mount", "-o", "loop", str(self._image), str(self.folder))


def _succeeds(*command: str) -> bool:
    try:
        _run(*command)
    except subprocess.CalledProcessError:
        return False
    return True


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=60, env=os.environ | {"PATH": _PATH})


@functools.cache
def refusal(filesystem: str, *, to_be_cut: bool) -> str:
    """Why this machine has no such drives; empty where it has."""
    missing = [name for name in (MAKERS[filesystem][0], "mount", "umount") if shutil.which(name, path=_PATH) is None]
    if missing:
        return f"no {', '.join(missing)}"
    with tempfile.TemporaryDirectory() as folder:
        try:
            with LoopDrive(Path(folder), filesystem) as drive:
                if to_be_cut:
                    drive.cut_power()
                    drive.restore_power()
        except (OSError, subprocess.CalledProcessError) as error:
            said = error.stderr.decode(errors="replace").strip() if isinstance(error, subprocess.CalledProcessError) else str(error)
            return f"{filesystem} cannot be mounted from a loop device and shut down here: {said}"
    return ""
