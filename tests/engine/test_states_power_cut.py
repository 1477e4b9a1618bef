"""What a power failure may leave, at every instant of a few steps: only what was synced, or that and the newest bytes of the data files.

SIGKILL cannot show a missing sync: what the dead process wrote is still in the kernel. Here the calls that make things durable are
watched, and the folders are rebuilt from what they covered: a file's bytes as of its last sync, under the names that its folder had when
that was last synced.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from lohan.config import Durability
from lohan.errors import ResumeError
from lohan.memory.store import StoreFile
from lohan.states.state_store import StateStore
from tests.engine.state_files import change, contents, opened, same

# Of the images one in so many is looked at: all of them where every write goes to the files, and fewer in the variants of it.
KINDS = [
    pytest.param(Durability.STEP, 0, 1, id="ssd-step"),
    pytest.param(Durability.STEP, 60_000, 5, id="half-step"),
    pytest.param(Durability.STEP, 1 << 20, 5, id="ram-step"),
    pytest.param(Durability.SNAPSHOT, 0, 3, id="ssd-snapshot"),
    pytest.param(Durability.SNAPSHOT, 60_000, 3, id="half-snapshot"),
    pytest.param(Durability.SNAPSHOT, 1 << 20, 2, id="ram-snapshot"),
]


class Watch:
    """Keeps what is durable, and an image of it at each event."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directories: list[Path]) -> None:
        self._directories = directories
        self._entries: dict[Path, dict[str, int]] = {}
        self._bytes: dict[int, bytes] = {}
        self.committed = -1
        self.images: list[tuple[int, dict[Path, bytes], dict[Path, bytes]]] = []
        fsync, sync, write, rename, commit = os.fsync, StoreFile.sync, StoreFile.write, Path.rename, StateStore.commit

        def watched_fsync(descriptor):
            fsync(descriptor)
            status = os.fstat(descriptor)
            if stat.S_ISDIR(status.st_mode):
                folder = Path(f"/proc/self/fd/{descriptor}").readlink()
                self._entries[folder] = {entry.name: entry.inode() for entry in os.scandir(folder)}
            else:
                self._bytes[status.st_ino] = Path(f"/proc/self/fd/{descriptor}").read_bytes()
            self._event()

        def watched_sync(file):
            sync(file)
            for path in file.paths:
                self._bytes[path.stat().st_ino] = path.read_bytes()
            self._event()

        def watched_write(file, offset, source, **options):
            transfer = write(file, offset, source, **options)
            transfer.wait()
            self._event()
            return transfer

        def watched_rename(path, target):
            rename(path, target)
            self._event()

        def watched_commit(states, step, payload):
            commit(states, step, payload)
            self.committed = step
            self._event()

        monkeypatch.setattr(os, "fsync", watched_fsync)
        monkeypatch.setattr(StoreFile, "sync", watched_sync)
        monkeypatch.setattr(StoreFile, "write", watched_write)
        monkeypatch.setattr(Path, "rename", watched_rename)
        monkeypatch.setattr(StateStore, "commit", watched_commit)

    def _event(self) -> None:
        durable = {
            folder / name: self._bytes.get(inode, b"")
            for folder, entries in self._entries.items()
            if folder.name == "lohan-states" and folder.parent in self._directories
            for name, inode in entries.items()
        }
        newest = {path: path.read_bytes() for path in durable if path.suffix == ".bin" and path.exists()}
        self.images.append((self.committed, durable, durable | newest))


def rebuild(image: dict[Path, bytes], root: Path, target: Path) -> list[Path]:
    for path, content in image.items():
        copy = target / path.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(content)
    return [target / "a", target / "b"]


@pytest.mark.parametrize(("durability", "ram_bytes", "every"), KINDS)
def test_a_power_failure_at_any_instant_leaves_one_whole_step(durability, ram_bytes, every, tmp_path, monkeypatch):
    """With durability `snapshot` the first step is not recorded: what is found is the states as loaded, or the second."""
    root = tmp_path / "run"
    directories = [root / "a", root / "b"]
    expected = {}
    with monkeypatch.context() as patched:
        watch = Watch(patched, directories)
        with opened(directories, durability=durability, ram_bytes=ram_bytes) as states:
            expected[0] = contents(states)
            for step in (1, 2):
                states.begin_step(step)
                change(states, step, in_place=True)
                if step == 2 or durability is Durability.STEP:
                    states.commit(step, {})
                expected[step] = contents(states)
            states.begin_step(3)
            change(states, 3, in_place=True)
    outcomes = []
    for number, (committed, *images) in enumerate(watch.images[::every]):
        for kind, image in enumerate(images):
            found = rebuild(image, root, tmp_path / f"{number}-{kind}")
            try:
                with opened(found, resume=True, durability=durability) as states:
                    outcomes.append((committed, states.record.step))
                    assert states.record.step >= committed
                    assert same(contents(states), expected[states.record.step]), (number, kind)
            except ResumeError as error:
                assert committed == -1 and "no step record" in str(error), (number, kind, str(error))
    assert len(outcomes) >= 20
    if durability is Durability.SNAPSHOT:
        assert {step for _, step in outcomes} == {0, 2}
    elif every == 1:
        # Each step is found from just before its commit returns until just before the next one's does.
        assert {(0, 0), (0, 1), (1, 1), (1, 2), (2, 2)} <= set(outcomes)
