"""Named snapshots: the states of a committed step, kept beside the run's own while training goes on.

`<state directory>/named/<name>/` has the files of one step, with one slot a chunk, and the first directory a step record, which is
renamed into place last: what has no record is the rest of one that was not finished.

The slots of the step that is kept are copied in the background. That they are not overwritten meanwhile is seen to by the writer, which
waits for the copy of the very part it is about to write (`wait_for`). That is seldom and short: the step after goes to the other slots,
so that a copy has a whole step's time before the first wait, and it goes through the units in the order in which updates on arrival do.
Copying such a part first, in the writer, would put the same bytes in the way of the step and need the same waiting besides.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lohan.config import Durability
from lohan.errors import ConfigError, LohanError, NamedSnapshotError, ResumeError
from lohan.states.copies import Copier, Stretch
from lohan.states.preflight import check_size, check_space, make_folder
from lohan.states.record import RECORD_FILE, Fingerprint, RecordFile, StepRecord, directory_number, read_record_file
from lohan.states.slots import Part
from lohan.states.streams import Place, Stream, place_chunks, stored_bytes

if TYPE_CHECKING:
    from lohan.memory.store import Store, StoreFile
    from lohan.planning.state_form import StateForm
    from lohan.states.layout import UnitLayout

NAMED_FOLDER = "named"
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
Files = Mapping[tuple[int, Stream], "StoreFile"]
"""By directory and stream."""
Table = Mapping[Part, Place]


def check_name(name: str) -> None:
    """See that `name` can be a snapshot's.

    Raises:
        ConfigError: it cannot.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"a named snapshot cannot be called {name!r}",
            place="name",
            remedy="Use up to 100 letters, digits, dots, dashes and underscores, and no dot in front.",
        )


def is_kept(directories: Sequence[Path], name: str) -> bool:
    """Whether these state directories have a whole snapshot `name`."""
    return (directories[0] / NAMED_FOLDER / name / RECORD_FILE).exists()


def read_named_record(directories: Sequence[Path], name: str) -> StepRecord:
    """The record of the snapshot `name` in these state directories.

    Raises:
        ConfigError: this is no name.
        ResumeError: there is no such snapshot, or its record is damaged.
    """
    check_name(name)
    record = read_record_file(directories[0] / NAMED_FOLDER / name / RECORD_FILE)
    if record is None:
        there = sorted(path.parent.name for path in (directories[0] / NAMED_FOLDER).glob(f"*/{RECORD_FILE}"))
        raise ResumeError(
            f"there is no named snapshot {name}",
            place=str(directories[0] / NAMED_FOLDER),
            remedy=f"Name one of these: {', '.join(there)}." if there else "None was kept: see training.keep_steps.",
        )
    return record


class NamedSnapshots:
    """Makes the named snapshots of one state store, one at a time, and reads them back into it.

    Args:
        directories: the state directories.
        files, table: the store's own.
    """

    def __init__(
        self,
        directories: Sequence[Path],
        layouts: Sequence[UnitLayout],
        form: StateForm,
        durability: Durability,
        store: Store,
        *,
        files: Files,
        table: Table,
    ) -> None:
        self._directories, self._durability, self._store = directories, durability, store
        self._fingerprint = Fingerprint.of(layouts, form, len(directories))
        self._files, self._table = files, table
        self._named_table, self._sizes = place_chunks(layouts, form, len(directories))
        self._lengths = {(layout.index, chunk.index): chunk.length for layout in layouts for chunk in layout.chunks}
        self._changed = threading.Condition()
        self._held: dict[Part, int] = {}
        self._name = ""
        self._thread: threading.Thread | None = None
        self._errors: list[NamedSnapshotError] = []

    def sweep(self) -> None:
        """Remove what is left of snapshots that were not finished. Nobody else makes any here: the directories are locked."""
        for folder in self._directories[0].glob(f"{NAMED_FOLDER}/*/"):
            # Where the directories were named in another order, the record lies in another one.
            if not (folder / RECORD_FILE).exists() and directory_number(folder) in (None, 0):
                self._remove(folder.name)

    def check_room(self, name: str) -> None:
        """See whether a snapshot `name` can be made.

        Raises:
            ConfigError: it is no name, or nothing is committed that could be kept.
            NamedSnapshotError: there is one of that name already.
            CapacityError: there is too little space.
        """
        check_name(name)
        if self._durability is Durability.NONE:
            raise ConfigError(
                "with durability none no step is whole on the drives that could be kept",
                place="engine.durability",
                remedy="Use step or snapshot.",
            )
        folders = self._folders(name)
        if name == self._name or is_kept(self._directories, name):
            raise NamedSnapshotError(f"there is a named snapshot {name} already", place=str(folders[0]), remedy="Use another name.")
        check_space(self._directories, self._sizes)

    def begin(self, name: str, record: StepRecord, parts: Mapping[Part, tuple[int, int]]) -> None:
        """Keep `record` and the slots of `parts` under `name`, in the background; waits for the snapshot before, if it is still being made.

        From now on `wait_for` holds back who would overwrite them.
        """
        self._join()
        with self._changed:
            self._name = name
            self._held = {part: slot for part, (slot, _) in parts.items()}
        self._thread = threading.Thread(target=self._run, args=(name, record, dict(parts)), name="lohan-named-snapshot", daemon=True)
        self._thread.start()

    def wait_for(self, part: Part, slot: int) -> None:
        """Block until `slot` of `part` is no longer needed by a snapshot."""
        with self._changed:
            self._changed.wait_for(lambda: self._held.get(part) != slot)

    def check(self) -> None:
        """Raise what has gone wrong since the last time.

        Raises:
            NamedSnapshotError: a snapshot could not be made; nothing is left of it.
        """
        with self._changed:
            error = self._errors.pop(0) if self._errors else None
        if error is not None:
            raise error

    def finish(self) -> None:
        """Block until the snapshot that is being made is whole; raises as `check`."""
        self._join()
        self.check()

    def close(self) -> None:
        """Block until nothing is being made."""
        self._join()

    def read(self, name: str) -> tuple[StepRecord, dict[Part, int]]:
        """The record of the snapshot `name`, and the checksums of its parts; its files are whole, as far as their sizes say.

        Raises:
            ResumeError: there is none, it is damaged, or belongs to other states.
        """
        read_named_record(self._directories, name)
        record, parts = RecordFile(self._folders(name), self._fingerprint).read()
        for (directory, stream), size_bytes in self._sizes.items():
            check_size(self._file(name, directory, stream), size_bytes)
        return record, {part: total for part, (_, total) in parts.items()}

    def restore(self, name: str) -> None:
        """Copy the snapshot `name` into the first slots of the store's files; nothing of it is durable yet.

        Raises:
            StorageError: reading or writing failed.
        """
        with contextlib.ExitStack() as stack:
            files = {key: stack.enter_context(self._store.open(self._file(name, *key))) for key in self._sizes}
            copier = stack.enter_context(Copier())
            for part in self._table:
                copier.copy(self._named_stretch(files, part), self._stretch(part, 0))

    def _folders(self, name: str) -> list[Path]:
        return [directory / NAMED_FOLDER / name for directory in self._directories]

    def _file(self, name: str, directory: int, stream: Stream) -> Path:
        return self._folders(name)[directory] / f"{stream}.bin"

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, name: str, record: StepRecord, parts: Mapping[Part, tuple[int, int]]) -> None:
        try:
            self._make(name, record, parts)
        except Exception as error:  # noqa: BLE001 - whatever it was, the run goes on without this snapshot
            self._remove(name)
            self._fail(name, error)
        finally:
            with self._changed:
                self._name = ""
                self._held = {}
                self._changed.notify_all()

    def _make(self, name: str, record: StepRecord, parts: Mapping[Part, tuple[int, int]]) -> None:
        folders = self._folders(name)
        self._remove(name)
        for folder in folders:
            make_folder(folder)
        record_file = RecordFile(folders, self._fingerprint)
        record_file.begin()
        check_space(folders, self._sizes)
        with contextlib.ExitStack() as stack:
            files = {
                key: stack.enter_context(self._store.open(self._file(name, *key), size_bytes=size_bytes))
                for key, size_bytes in self._sizes.items()
            }
            record_file.files_made()
            copier = stack.enter_context(Copier())
            for part in sorted(parts, reverse=True):
                copier.copy(self._stretch(part, parts[part][0]), self._named_stretch(files, part))
                with self._changed:
                    del self._held[part]
                    self._changed.notify_all()
            for file in files.values():
                file.sync()
        record_file.write(record.step, {part: (0, total) for part, (_, total) in parts.items()}, record.payload)

    def _stretch(self, part: Part, slot: int) -> Stretch:
        place = self._table[part]
        return Stretch(self._files[place.directory, part[2]], place.offsets_bytes[slot], self._size_bytes(part))

    def _named_stretch(self, files: Files, part: Part) -> Stretch:
        place = self._named_table[part]
        return Stretch(files[place.directory, part[2]], place.offsets_bytes[0], self._size_bytes(part))

    def _size_bytes(self, part: Part) -> int:
        unit, chunk, stream = part
        return stored_bytes(stream, self._lengths[unit, chunk])

    def _fail(self, name: str, error: Exception) -> None:
        message = error.message if isinstance(error, LohanError) else f"{type(error).__name__}: {error}"
        failed = NamedSnapshotError(
            f"the named snapshot {name} could not be made: {message}",
            place=(error.place if isinstance(error, LohanError) else None) or str(self._folders(name)[0]),
            remedy="Training goes on without it. See to the drive and its free space.",
        )
        failed.__cause__ = error
        with self._changed:
            self._errors.append(failed)

    def _remove(self, name: str) -> None:
        """The first directory's part last: it is by this one that `sweep` finds the rest."""
        for folder in reversed(self._folders(name)):
            shutil.rmtree(folder, ignore_errors=True)
