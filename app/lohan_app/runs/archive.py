"""A folder as a zip file that is made while it is sent: nothing is written to the disk or held in memory."""

from __future__ import annotations

import os
import re
import stat
import unicodedata
import zipfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

READ_BYTES = 1024 * 1024


class _Sink:
    """What `zipfile` writes to: a stream that cannot be sought, emptied after each write."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._pieces.append(bytes(data))
        return len(data)

    def flush(self) -> None:
        pass

    def take(self) -> bytes:
        data, self._pieces = b"".join(self._pieces), []
        return data


def stream_zip(folder: Path, *, top: str) -> Iterator[bytes]:
    """The regular files of `folder` as a zip whose entries lie under `top/`.

    Stored, not compressed: weights do not get smaller. Symbolic links are left out, so that nothing outside `folder` is ever sent.
    """
    sink = _Sink()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:  # type: ignore[call-overload]  # a write-only stream
        for path in sorted(path for path in folder.rglob("*") if not path.is_symlink() and path.is_file()):
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            with os.fdopen(descriptor, "rb", buffering=0) as file:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    continue
                entry = zipfile.ZipInfo.from_file(path, f"{top}/{path.relative_to(folder)}", strict_timestamps=False)
                entry.compress_type = zipfile.ZIP_STORED
                # The size is written before the data is known to end there: 64-bit fields, whatever it is.
                with archive.open(entry, "w", force_zip64=True) as target:
                    while block := file.read(READ_BYTES):
                        target.write(block)
                        yield sink.take()
    yield sink.take()


def file_name_of(name: str) -> str:
    """`name` without what file systems refuse or treat as a path."""
    return re.sub(r'[/\\:*?"<>|\x00-\x1f]', "_", name).strip(" .") or "model"


def content_disposition(file_name: str) -> str:
    """The header (RFC 6266) that has a browser save under `file_name`; an ASCII form for clients that read no other."""
    plain = unicodedata.normalize("NFKD", file_name).encode("ascii", "ignore").decode()
    plain = re.sub(r"[^A-Za-z0-9._-]+", "_", plain).strip("._") or "download"
    return f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(file_name, safe='')}"
