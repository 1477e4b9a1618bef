"""Takes an upload from the network to the disk: block by block, never whole in memory and never in the system's temporary folder.

Both kinds of request end in an `UploadFile` in `<data>/uploads/`: a plain body, and a multipart form of one part `file` and
an optional part `name`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from lohan.errors import NO_SPACE, LohanError
from lohan.units import format_bytes
from lohan_app.errors import BadRequest, InsufficientStorage, TooLarge

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

# The network delivers 64 KiB at a time; sixteen of them per trip to the writer's thread make that trip cheap.
BLOCK_BYTES = 1024 * 1024
# Room for the parts' headers and a name around the file of a multipart form.
FORM_OVERHEAD_BYTES = 64 * 1024
FIELD_LIMIT_BYTES = 4096


class UploadFile:
    """A file that is being uploaded. Its methods block: call them from a worker thread. One owner at a time."""

    def __init__(self, path: Path, limit_bytes: int, refusal: Callable[[int], LohanError] | None = None) -> None:
        """`refusal` makes the error for a file above `limit_bytes`, where that is another limit than the one on uploads."""
        self.path = path
        self._refusal = refusal or too_large
        self.size_bytes = 0
        self._limit_bytes = limit_bytes
        self._digest = hashlib.sha256()
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def write(self, block: bytes) -> None:
        """Append `block`.

        Raises:
            TooLarge, QuotaExceeded: the file would be larger than its limit.
            InsufficientStorage: the disk is full.
        """
        if self.size_bytes + len(block) > self._limit_bytes:
            raise self._refusal(self._limit_bytes)
        rest = memoryview(block)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError as error:
            raise _storage_error(error) from error
        self.size_bytes += len(block)
        self._digest.update(block)

    def publish(self, target: Path) -> None:
        """Make the file durable under its final name: fsync, rename, fsync of the folders."""
        try:
            os.fsync(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1
            target.parent.mkdir(mode=0o700)
            self.path.rename(target)
            for folder in (target.parent, target.parent.parent):
                _fsync_folder(folder)
        except OSError as error:
            raise _storage_error(error) from error

    def discard(self) -> None:
        """Leave nothing behind."""
        if self._descriptor >= 0:
            # A full disk may report its error at close; the file goes either way.
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = -1
        self.path.unlink(missing_ok=True)


def too_large(limit_bytes: int) -> TooLarge:
    return TooLarge(
        f"the file is larger than {format_bytes(limit_bytes)}", place="file", remedy="Split it, or have LOHAN_UPLOAD_LIMIT_BYTES raised."
    )


def disk_full(folder: Path) -> InsufficientStorage:
    return InsufficientStorage("the disk is full", place=str(folder.name), remedy="Free some space in the data folder, then upload again.")


def _storage_error(error: OSError) -> Exception:
    return disk_full(Path("uploads")) if error.errno in NO_SPACE else error


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _BlockWriter:
    """Collects small pieces and hands them to the file's thread a block at a time."""

    def __init__(self, file: UploadFile) -> None:
        self._file = file
        self._pending = bytearray()

    def add(self, piece: bytes) -> None:
        self._pending += piece

    async def flush(self, *, at_least: int = 1) -> None:
        if len(self._pending) >= at_least:
            block, self._pending = bytes(self._pending), bytearray()
            await run_in_threadpool(self._file.write, block)


async def receive_body(stream: AsyncIterator[bytes], file: UploadFile) -> None:
    """Write a plain request body into `file`.

    Raises:
        BadRequest: the client went away.
        TooLarge, InsufficientStorage: see `UploadFile.write`.
    """
    writer = _BlockWriter(file)
    async for piece in _until_disconnect(stream):
        writer.add(piece)
        await writer.flush(at_least=BLOCK_BYTES)
    await writer.flush()


async def receive_form(stream: AsyncIterator[bytes], boundary: bytes, file: UploadFile) -> str | None:
    """Write the part `file` of a multipart form into `file`; returns the part `name`, or else the file's own name, if there is one.

    Raises:
        BadRequest: the client went away, the form is broken or cut short, or it has no part `file`.
        TooLarge, InsufficientStorage: see `UploadFile.write`.
    """
    writer = _BlockWriter(file)
    form = _Form(writer)
    parser = MultipartParser(boundary, form.callbacks())
    try:
        async for piece in _until_disconnect(stream):
            parser.write(piece)
            await writer.flush(at_least=BLOCK_BYTES)
        parser.finalize()
    except MultipartParseError as error:
        raise BadRequest(f"the form is broken: {error}", place="body", remedy="Send multipart/form-data with one part `file`.") from error
    if not form.is_complete:
        raise BadRequest("the form is cut short", place="body", remedy="Upload the file again.")
    if form.file_parts != 1:
        raise BadRequest(
            f"the form has {form.file_parts} parts `file`, expected one",
            place="file",
            remedy="Send one part named `file` with a file name.",
        )
    await writer.flush()
    return form.fields.get("name") or form.file_name


async def _until_disconnect(stream: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    try:
        async for piece in stream:
            yield piece
    except ClientDisconnect as error:
        raise BadRequest("the upload was broken off", place="body", remedy="Upload the file again.") from error


class _Form:
    """What the multipart parser found: the callbacks it makes, in the order of the bytes."""

    def __init__(self, writer: _BlockWriter) -> None:
        self.fields: dict[str, str] = {}
        self.file_name: str | None = None
        self.file_parts = 0
        self.is_complete = False
        self._writer = writer
        self._header_name = bytearray()
        self._header_value = bytearray()
        self._disposition = b""
        self._field: str | None = None
        self._value = bytearray()

    def callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._begin_part,
            "on_header_field": self._add_header_name,
            "on_header_value": self._add_header_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_part_data": self._add_data,
            "on_part_end": self._end_part,
            "on_end": self._end,
        }

    def _begin_part(self) -> None:
        self._disposition, self._field, self._value = b"", None, bytearray()

    def _add_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _add_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]
        if len(self._header_value) > FIELD_LIMIT_BYTES:
            raise BadRequest("a header of the form is too long", place="body", remedy="Shorten the file's name.")

    def _end_header(self) -> None:
        if bytes(self._header_name).lower() == b"content-disposition":
            self._disposition = bytes(self._header_value)
        self._header_name, self._header_value = bytearray(), bytearray()

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._field = options.get(b"name", b"").decode(errors="replace")
        if self._field == "file":
            self.file_parts += 1
            self.file_name = options.get(b"filename", b"").decode(errors="replace") or None

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        if self._field == "file":
            if self.file_parts == 1:
                self._writer.add(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > FIELD_LIMIT_BYTES:
            raise BadRequest(f"the field {self._field!r} is too long", place=self._field, remedy=f"At most {FIELD_LIMIT_BYTES} bytes.")

    def _end_part(self) -> None:
        if self._field and self._field != "file":
            self.fields[self._field] = self._value.decode(errors="replace")

    def _end(self) -> None:
        self.is_complete = True
