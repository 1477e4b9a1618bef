"""Named snapshots: a step's states kept beside the run, and training that goes on from them."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from lohan.config import Durability, UnsafeFilesystems
from lohan.errors import CapacityError, ConfigError, EngineError, NamedSnapshotError, ResumeError, StorageError
from lohan.memory.store import StoreFile
from lohan.planning.state_form import StateForm
from lohan.states import copies, named, preflight
from lohan.states.copies import Copier
from lohan.states.named import NAMED_FOLDER, read_named_record
from lohan.states.record import FOLDER, RecordFile
from tests.engine import power_cut
from tests.engine.reference import adamw, make_batches, make_llama, open_session
from tests.engine.state_files import contents, make_step, opened, same

ROOT = Path(__file__).resolve().parent.parent.parent
PLACES = {"ssd": 0, "half": 60_000, "ram": 1 << 20}
DURABLE = [Durability.STEP, Durability.SNAPSHOT]


def keep(states, name):
    states.named.check_room(name)
    states.keep(name)


def files_below(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


# ---------------------------------------------------------------- the store
@pytest.mark.parametrize("form", StateForm)
@pytest.mark.parametrize("durability", DURABLE)
@pytest.mark.parametrize("ram_bytes", PLACES.values(), ids=PLACES)
def test_a_kept_step_is_found_again_however_far_the_run_has_gone(ram_bytes, durability, form, tmp_path):
    directories = [tmp_path / "a", tmp_path / "b"]
    options = {"durability": durability, "form": form}
    with opened(directories, ram_bytes=ram_bytes, **options) as states:
        for step in range(1, 3):
            make_step(states, step, in_place=True)
        kept = contents(states)
        keep(states, "two")
        for step in range(3, 6):
            make_step(states, step, in_place=True)
        states.named.finish()
    whole = {path: path.read_bytes() for directory in directories for path in (directory / NAMED_FOLDER).rglob("*") if path.is_file()}
    assert len(whole) > 4
    for _ in range(2):
        with opened(directories, resume_from="two", ram_bytes=PLACES["half"], **options) as states:
            assert (states.record.step, states.record.payload) == (2, {"step": 2})
            assert same(contents(states), kept)
            make_step(states, 3)
    with opened(directories, resume=True, **options) as states:
        assert states.record.step == 3
    assert whole == {path: path.read_bytes() for path in whole}, "the snapshot itself has changed"
    assert read_named_record(directories, "two").step == 2


def test_it_takes_one_slot_a_chunk(tmp_path):
    with opened([tmp_path]) as states:
        make_step(states, 1)
        keep(states, "one")
        states.named.finish()
    sizes = [sum(path.stat().st_size for path in (tmp_path / folder).glob("*.bin")) for folder in (FOLDER, Path(NAMED_FOLDER) / "one")]
    assert sizes[1] < 0.6 * sizes[0]


@pytest.mark.parametrize("durability", DURABLE)
def test_slots_are_not_overwritten_before_they_are_copied(durability, tmp_path, monkeypatch):
    """The copy stands still until the run has come as far as it can."""
    may_copy, copied = threading.Event(), []
    original = Copier.copy

    def copy(self, source, target):
        may_copy.wait()
        original(self, source, target)
        copied.append(target)

    monkeypatch.setattr(Copier, "copy", copy)
    with opened([tmp_path], durability=durability) as states:
        make_step(states, 1)
        kept = contents(states)
        keep(states, "one")
        make_step(states, 2)
        waits = threading.Event()
        waited = states.named.wait_for

        def wait_for(part, slot):
            waits.set()
            waited(part, slot)

        monkeypatch.setattr(states.named, "wait_for", wait_for)
        third = threading.Thread(target=make_step, args=(states, 3))
        third.start()
        waits.wait()
        assert not copied and third.is_alive()
        may_copy.set()
        third.join()
        states.named.finish()
        newest = contents(states)
    with opened([tmp_path], resume=True, durability=durability) as states:
        assert same(contents(states), newest)
    with opened([tmp_path], resume_from="one", durability=durability) as states:
        assert same(contents(states), kept)


def test_a_second_one_waits_for_the_first(tmp_path):
    with opened([tmp_path]) as states:
        expected = {}
        for step in range(1, 4):
            make_step(states, step)
            expected[step] = contents(states)
            keep(states, f"step-{step}")
        states.named.finish()
    for step, kept in expected.items():
        with opened([tmp_path], resume_from=f"step-{step}") as states:
            assert same(contents(states), kept)


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "a b", "é", "x" * 101, "../x"])
def test_names_that_are_none(name, tmp_path):
    with opened([tmp_path]) as states, pytest.raises(ConfigError, match="cannot be called"):
        states.named.check_room(name)
    with pytest.raises(ConfigError):
        read_named_record([tmp_path], name)


def test_what_cannot_be_kept_is_refused_beforehand(tmp_path, monkeypatch):
    with opened([tmp_path]) as states:
        make_step(states, 1)
        keep(states, "one")
        with pytest.raises(NamedSnapshotError, match="one already"):
            states.named.check_room("one")
        states.named.finish()
        with pytest.raises(NamedSnapshotError, match="one already"):
            states.named.check_room("one")
        with monkeypatch.context() as patch:
            patch.setattr(preflight.shutil, "disk_usage", lambda _path: type("Usage", (), {"free": 1000, "total": 1 << 40})())
            with pytest.raises(CapacityError) as caught:
                states.named.check_room("two")
        assert caught.value.need_bytes > caught.value.have_bytes == 1000
    with opened([tmp_path / "none"], durability=Durability.NONE) as states, pytest.raises(ConfigError, match="durability none"):
        states.named.check_room("one")


@pytest.mark.parametrize("fails_at", ["make_folder", "copy", "open", "sync", "record"])
def test_a_snapshot_that_fails_harms_nothing_and_leaves_nothing(fails_at, tmp_path, monkeypatch):
    def fail(*_values, **_options):
        raise StorageError("scripted", place="drive", errno=errno.ENOSPC)

    with opened([tmp_path]) as states:
        make_step(states, 1)
        with monkeypatch.context() as patch:
            match fails_at:
                case "make_folder":
                    patch.setattr(named, "make_folder", fail)
                case "copy":
                    patch.setattr(Copier, "copy", fail)
                case "open":
                    patch.setattr(states.named._store, "open", fail)
                case "sync":
                    patch.setattr(StoreFile, "sync", fail)
                case "record":
                    patch.setattr(RecordFile, "write", fail)
            keep(states, "one")
            states.named.close()
        make_step(states, 2)
        make_step(states, 3)
        newest = contents(states)
        with pytest.raises(NamedSnapshotError, match="one could not be made: scripted") as caught:
            states.named.check()
        assert isinstance(caught.value.__cause__, StorageError)
        states.named.check()
        assert files_below(tmp_path / NAMED_FOLDER) == [] if (tmp_path / NAMED_FOLDER).exists() else True
        keep(states, "one")
        states.named.finish()
    with opened([tmp_path], resume=True) as states:
        assert same(contents(states), newest)


def test_what_is_not_whole_is_no_snapshot(tmp_path):
    directories = [tmp_path / "a", tmp_path / "b"]
    with opened(directories) as states:
        make_step(states, 1)
        for name in ("kept", "cut", "damaged"):
            keep(states, name)
        states.named.finish()
        newest = contents(states)
    with pytest.raises(ResumeError, match="no named snapshot other") as caught:
        read_named_record(directories, "other")
    assert "cut, damaged, kept" in caught.value.remedy
    path = directories[1] / NAMED_FOLDER / "cut" / "remainder.bin"
    path.write_bytes(path.read_bytes()[:-4096])
    record = directories[0] / NAMED_FOLDER / "damaged" / "record.json"
    record.write_bytes(record.read_bytes()[:-9])
    for name, match in (("other", "no named snapshot"), ("damaged", "damaged"), ("cut", "bytes instead of")):
        with pytest.raises(ResumeError, match=match), opened(directories, resume_from=name):
            pass
        with opened(directories, resume=True) as states:
            assert same(contents(states), newest), "the run's own states were touched"


@pytest.mark.parametrize("filesystem", ["xfs", "btrfs"])
def test_blocks_are_shared_where_the_file_system_can(filesystem, tmp_path, monkeypatch):
    if refusal := power_cut.refusal(filesystem, to_be_cut=False):
        pytest.skip(refusal)
    monkeypatch.setattr(Copier, "_copy", None)
    with power_cut.LoopDrive(tmp_path, filesystem) as drive:
        with opened([drive.folder]) as states:
            make_step(states, 1)
            kept = contents(states)
            keep(states, "one")
            states.named.finish()
            for step in range(2, 5):
                make_step(states, step)
        for _ in range(2):
            with opened([drive.folder], resume_from="one") as states:
                assert same(contents(states), kept)
                make_step(states, 2)


def test_clones_are_of_the_ranges_that_are_kept(tmp_path, monkeypatch):
    """Clones are copies made by the test: what is looked at is that the ranges are the right ones, and nothing else is written."""
    cloned = []

    def clone(source, target):
        cloned.append(source.size_bytes)
        data = Path(source.file.path).read_bytes()[source.offset_bytes : source.offset_bytes + source.size_bytes]
        descriptor = os.open(target.file.path, os.O_WRONLY)
        os.pwrite(descriptor, data, target.offset_bytes)
        os.close(descriptor)

    monkeypatch.setattr(copies, "_clone", clone)
    monkeypatch.setattr(Copier, "_copy", None)
    with opened([tmp_path]) as states:
        make_step(states, 1)
        kept = contents(states)
        keep(states, "one")
        states.named.finish()
        make_step(states, 2)
    assert all(size % 4096 == 0 for size in cloned)
    with opened([tmp_path], resume_from="one") as states:
        assert same(contents(states), kept)


def test_directories_in_another_order_are_not_taken_for_half_a_snapshot(tmp_path):
    directories = [tmp_path / "a", tmp_path / "b"]
    with opened(directories) as states:
        make_step(states, 1)
        keep(states, "one")
        states.named.finish()
    before = files_below(tmp_path)
    with opened(directories[::-1]):
        pass
    assert [name for name in before if NAMED_FOLDER in name] == [name for name in files_below(tmp_path) if NAMED_FOLDER in name]


# ---------------------------------------------------------------- sudden death
def test_a_process_that_is_killed_in_the_middle_leaves_no_half_one(tmp_path):
    subprocess.run([sys.executable, "-m", "tests.engine.named_child", str(tmp_path)], check=True, cwd=ROOT, timeout=120)
    folders = sorted(tmp_path.iterdir(), key=lambda path: int(path.name))
    *half, whole = [(folder / NAMED_FOLDER / "one" / "record.json").exists() for folder in folders]
    assert whole and not any(half) and len(half) > 8
    for folder in folders:
        with opened([folder], resume=True) as states:
            assert states.record.step == 1
            expected = contents(states)
            if folder is not folders[-1]:
                assert files_below(folder / NAMED_FOLDER) == [], "the rest was not removed"
                keep(states, "one")
                states.named.finish()
        with opened([folder], resume_from="one") as states:
            assert same(contents(states), expected)


# ---------------------------------------------------------------- the session
TWO_SLOTS = {"unsafe_filesystems": UnsafeFilesystems.ALLOW}


@pytest.mark.parametrize("durability", DURABLE)
@pytest.mark.parametrize("options", [{}, {"schedule": "serial"}, {"ram_state_bytes": 1 << 24}], ids=["optimized", "serial", "ram"])
def test_training_goes_on_from_a_named_snapshot_bit_for_bit(options, durability, tmp_path):
    options = {"durability": durability, **TWO_SLOTS, **options}
    batches = make_batches(6)
    model = make_llama()
    with open_session(model, adamw(model), tmp_path, **options) as session:
        with pytest.raises(EngineError, match="not recorded"):
            session.keep("none")
        for number, batch in enumerate(batches, 1):
            model(**batch).loss.backward()
            session.commit({"position": number})
            if number == 3:
                session.keep("three")
        session.wait_kept()
        expected = dict(session.named_weights())
        with pytest.raises(NamedSnapshotError, match="already"):
            session.keep("three")
    model = make_llama()
    with open_session(model, adamw(model), tmp_path, resume_from="three", **options) as session:
        assert (session.steps, session.statistics.committed_steps) == (3, 3)
        session.keep("again")
        for batch in batches[3:]:
            model(**batch).loss.backward()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in session.named_weights())
        session.wait_kept()
    assert read_named_record([tmp_path], "again").payload["position"] == 3


def test_an_error_of_a_copy_comes_up_at_the_next_commit_which_is_made_nevertheless(tmp_path, monkeypatch):
    def fail(*_values):
        raise StorageError("scripted", errno=errno.EIO)

    model = make_llama()
    with open_session(model, adamw(model), tmp_path, durability=Durability.STEP, **TWO_SLOTS) as session:
        monkeypatch.setattr(Copier, "copy", fail)
        model(**make_batches(1)[0]).loss.backward()
        session.commit({})
        session.keep("one")
        session.wait()
        session._stages.states.named.close()
        model(**make_batches(1)[0]).loss.backward()
        with pytest.raises(NamedSnapshotError, match="scripted"):
            session.commit({"position": 2})
        session.wait_kept()
        assert session.statistics.committed_steps == 2
