"""`durability = step`: whatever breaks off a step, and wherever, the states that are found again are those of one committed step."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from lohan._native import FaultPlan
from lohan.config import Durability, UnsafeFilesystems
from lohan.errors import ConfigError, EngineError, ResumeError, StorageError
from lohan.memory.arena import Arena
from lohan.memory.store import Store
from lohan.planning.state_form import StateForm
from lohan.states import preflight
from lohan.states.record import FOLDER, RecordFile, read_record
from lohan.states.state_store import StateStore
from lohan.states.streams import Stream, streams_of
from tests.engine.state_files import BOUNDARIES, change, contents, make_layouts, make_step, opened, same

ALL_IN_RAM = 1 << 20
HALF_IN_RAM = 60_000
ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The states after each of four steps of a run that nothing disturbed."""
    found = []
    with opened([tmp_path_factory.mktemp("undisturbed")]) as states:
        found.append(contents(states))
        for step in range(1, 5):
            make_step(states, step)
            found.append(contents(states))
    assert not any(same(found[step], found[step + 1]) for step in range(4))
    return found


def slots_on_disk(directory):
    """Slot of every part, by the record."""
    content = json.loads((directory / FOLDER / "record.json").read_text().partition("\n")[2])
    return {(unit, chunk, stream): slot for unit, chunk, stream, slot, _ in content["parts"]}


# ---------------------------------------------------------------- a step, undisturbed
def test_slots_alternate_and_the_last_step_stays_whole_while_the_next_is_written(expected, tmp_path):
    trained = {(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)}
    with opened([tmp_path]) as states:
        for step in range(1, 4):
            before = {path.name: path.read_bytes() for path in (tmp_path / FOLDER).glob("*.bin")}
            old = slots_on_disk(tmp_path)
            make_step(states, step)
            new = slots_on_disk(tmp_path)
            assert new.keys() == old.keys()
            for (unit, chunk, stream), slot in new.items():
                assert (slot != old[unit, chunk, stream]) is ((unit, chunk) in trained)
                place = states._table[unit, chunk, Stream(stream)]
                size = len(expected[0][unit, chunk, Stream(stream)])
                kept = slice(place.offsets_bytes[old[unit, chunk, stream]], place.offsets_bytes[old[unit, chunk, stream]] + size)
                after = (tmp_path / FOLDER / f"{stream}.bin").read_bytes()
                assert after[kept] == before[f"{stream}.bin"][kept], "the committed slot was written to"
            assert same(contents(states), expected[step])


@pytest.mark.parametrize("form", StateForm)
@pytest.mark.parametrize("ram_bytes", [0, HALF_IN_RAM, ALL_IN_RAM], ids=["ssd", "half", "ram"])
def test_resumed_states_are_the_committed_ones_with_their_payload(form, ram_bytes, tmp_path):
    directories = [tmp_path / "a", tmp_path / "b"]
    with opened(directories, form=form, ram_bytes=ram_bytes) as states:
        assert states.record is None
        make_step(states, 1)
        states.begin_step(2)
        change(states, 2)
        states.commit(2, {"random": [1, 2], "rate": 0.1 + 0.2, "name": "\u00e9"})
        left = contents(states)
    for opening in (2, 3):
        with opened(directories, form=form, ram_bytes=ALL_IN_RAM - ram_bytes, resume=True) as states:
            assert (states.record.step, states.record.epoch) == (2, 2)
            assert states.record.payload == {"random": [1, 2], "rate": 0.1 + 0.2, "name": "\u00e9"}
            assert read_record(directories).payload == states.record.payload
            assert same(contents(states), left)
            for layout in make_layouts():
                for place in layout.parameters:
                    assert states.read_parameter(layout, place).shape == place.shape
            if opening == 3:
                make_step(states, 3)
    assert read_record(directories).step == 3
    assert read_record(directories).epoch == 2


@pytest.mark.parametrize("durability", Durability)
@pytest.mark.parametrize("in_place", [False, True])
def test_placements_are_equal_bit_for_bit(durability, in_place, expected, tmp_path):
    for name, ram_bytes in {"ssd": 0, "half": HALF_IN_RAM, "ram": ALL_IN_RAM}.items():
        with opened([tmp_path / name], durability=durability, ram_bytes=ram_bytes) as states:
            resident = len(states._resident.chunks)
            chunks = sum(len(layout.chunks) for layout in make_layouts())
            assert {"ssd": resident == 0, "half": 0 < resident < chunks, "ram": resident == chunks}[name]
            for step in range(1, 4):
                make_step(states, step, in_place=in_place)
                assert same(contents(states), expected[step])
            read = states.bytes_read
            contents(states)
            assert (states.bytes_read == read) is (name == "ram"), "RAM saves reads"
        on_disk = sum(file.stat().st_size for file in (tmp_path / name / FOLDER).glob("*.bin"))
        if durability is Durability.NONE and name == "ram":
            assert on_disk == 0


def test_memory_for_states_stands_on_the_account_and_comes_back(tmp_path):
    with Arena(budget_bytes=ALL_IN_RAM) as arena, Store() as io:
        states = StateStore(
            make_layouts(), [tmp_path], StateForm.SPLIT, io, ram_bytes=ALL_IN_RAM, arena=arena, unsafe_filesystems=UnsafeFilesystems.ALLOW
        )
        held = {holding.holder: holding.bytes for holding in arena.ledger.holdings}
        assert held["model states"] == sum(len(part.view(torch.uint8)) for part in states._resident.parts.values())
        states.close()
        assert arena.ledger.held_bytes == 0


@pytest.mark.parametrize("ram_bytes", [0, HALF_IN_RAM, ALL_IN_RAM], ids=["ssd", "half", "ram"])
def test_a_step_that_is_rolled_back_was_never_there(ram_bytes, expected, tmp_path):
    with opened([tmp_path], ram_bytes=ram_bytes) as states:
        make_step(states, 1, in_place=True)
        states.begin_step(2)
        change(states, 7, in_place=True)
        assert not same(contents(states), expected[1])
        states.rollback()
        assert same(contents(states), expected[1])
        change(states, 2, in_place=True)
        states.commit(2, {})
        assert same(contents(states), expected[2])
    with opened([tmp_path], resume=True) as states:
        states.begin_step(3)
        change(states, 9)
        states.rollback()
        assert same(contents(states), expected[2])


def test_memory_that_was_changed_and_not_yet_written_is_brought_back(expected, tmp_path):
    """The optimizer may fail between its update of the memory and the write."""
    layout = make_layouts()[0]
    with opened([tmp_path], ram_bytes=ALL_IN_RAM) as states:
        make_step(states, 1)
        states.begin_step(2)
        for tensor in states.resident(layout, layout.chunks[0]).values():
            tensor.view(torch.uint8).add_(1)
        assert not same(contents(states), expected[1])
        states.rollback()
        assert same(contents(states), expected[1])


# ---------------------------------------------------------------- order
def test_a_step_begins_when_the_record_of_the_one_before_is_durable(tmp_path, monkeypatch):
    order = []
    written = RecordFile.write

    def write(*values):
        written(*values)
        order.append("record")

    with opened([tmp_path]) as states:
        monkeypatch.setattr(RecordFile, "write", write)
        states.begin_step(1)
        began = threading.Event()

        def begin():
            began.set()
            states.begin_step(2)
            order.append("begun")

        thread = threading.Thread(target=begin)
        thread.start()
        began.wait()
        change(states, 1)
        states.commit(1, {})
        thread.join()
        assert order == ["record", "begun"]


def test_steps_out_of_order_are_refused(tmp_path):
    layouts = make_layouts()
    chunk = layouts[0].chunks[0]
    with opened([tmp_path]) as states:
        source = torch.zeros(chunk.length, dtype=torch.bfloat16)
        with pytest.raises(EngineError, match="outside a step"):
            states.write(layouts[0], chunk, Stream.WEIGHTS, source)
        with pytest.raises(EngineError, match="cannot be committed"):
            states.commit(1, {})
        states.begin_step(1)
        with pytest.raises(EngineError, match="cannot be committed"):
            states.commit(2, {})
        states.commit(1, {})
        with pytest.raises(EngineError, match="step 1 cannot begin"):
            states.begin_step(1)
    with pytest.raises(EngineError, match="closed"):
        states.begin_step(2)


def test_what_waits_for_a_commit_hears_of_its_failure(tmp_path, monkeypatch):
    with opened([tmp_path]) as states:
        states.begin_step(1)
        caught = []

        def begin():
            try:
                states.begin_step(2)
            except EngineError as error:
                caught.append(str(error))

        thread = threading.Thread(target=begin)
        thread.start()
        with pytest.raises(EngineError, match="JSON"):
            states.commit(1, {"no": object()})
        thread.join()
        assert "commit of step 1 failed" in caught[0]


# ---------------------------------------------------------------- failing operations
@pytest.mark.parametrize("ram_bytes", [0, HALF_IN_RAM, ALL_IN_RAM], ids=["ssd", "half", "ram"])
@pytest.mark.parametrize("error_number", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
def test_every_transfer_of_a_step_may_fail(ram_bytes, error_number, expected, tmp_path):
    for nth in range(1, 1000):
        faults = FaultPlan()
        directory = tmp_path / str(nth)
        with opened([directory], ram_bytes=ram_bytes, faults=faults) as states:
            make_step(states, 1)
            faults.fail(nth, error_number)
            try:
                make_step(states, 2)
            except StorageError as error:
                assert error.errno == error_number
                states.rollback()
                assert same(contents(states), expected[1]), "a step that failed can be rolled back and made again"
        outcome = 1 if faults.struck else 2
        with opened([directory], resume=True) as states:
            assert states.record.step == outcome
            assert same(contents(states), expected[outcome])
            make_step(states, outcome + 1)
            assert same(contents(states), expected[outcome + 1])
        if not faults.struck:
            assert nth > 20
            return
    pytest.fail("there is no end of operations")


@pytest.mark.parametrize("ram_bytes", [0, HALF_IN_RAM, ALL_IN_RAM], ids=["ssd", "half", "ram"])
def test_short_transfers_change_nothing(ram_bytes, expected, tmp_path):
    faults = FaultPlan()
    for nth in range(1, 100, 3):  # the rest of a transfer counts as an operation of its own
        faults.shorten(nth, 512)
    with opened([tmp_path], ram_bytes=ram_bytes, faults=faults) as states:
        make_step(states, 1)
    assert faults.struck
    with opened([tmp_path], resume=True) as states:
        assert same(contents(states), expected[1])


@pytest.mark.parametrize("call", ["fsync", "open", "rename"])
def test_every_call_for_the_record_may_fail(call, expected, tmp_path, monkeypatch):
    original = getattr(os, call)
    for nth in range(1, 20):
        directory, calls = tmp_path / f"{call}{nth}", []

        def fail(*values, nth=nth, calls=calls, **options):
            calls.append(values)
            if len(calls) == nth:
                raise OSError(errno.EIO, "scripted")
            return original(*values, **options)

        failed = False
        with opened([directory]) as states:
            make_step(states, 1)
            states.begin_step(2)
            change(states, 2)
            monkeypatch.setattr(os, call, fail)
            try:
                states.commit(2, {"step": 2})
            except StorageError as error:
                failed = True
                assert error.errno == errno.EIO and error.remedy
                # Which record is on the drive is open: nothing may be written to either step's slots.
                for use in (lambda: states.begin_step(3), lambda: change(states, 3), lambda: states.rollback()):
                    with pytest.raises(EngineError, match="commit of step 2 failed"):
                        use()
            finally:
                monkeypatch.setattr(os, call, original)
        with opened([directory], resume=True) as states:
            assert states.record.step in ((1, 2) if failed else (2,))
            assert same(contents(states), expected[states.record.step])
        if not failed:
            assert nth > 1, "nothing failed"
            return
    pytest.fail("there is no end of calls")


def test_a_failed_sync_of_the_data_leaves_the_step_before(expected, tmp_path, monkeypatch):
    with opened([tmp_path]) as states:
        make_step(states, 1)
        states.begin_step(2)
        change(states, 2)
        file = next(iter(states._files.values()))

        def fail():
            raise StorageError("sync failed", errno=errno.EIO)

        monkeypatch.setattr(type(file), "sync", lambda _self: fail())
        with pytest.raises(StorageError):
            states.commit(2, {})
        monkeypatch.undo()
        with pytest.raises(EngineError, match="commit of step 2 failed"):
            states.begin_step(2)
    with opened([tmp_path], resume=True) as states:
        assert same(contents(states), expected[1])


def test_data_files_are_synced_at_the_same_time(tmp_path, monkeypatch):
    with opened([tmp_path / "a", tmp_path / "b"]) as states:
        states.begin_step(1)
        change(states, 1)
        all_are_in = threading.Barrier(len(states._files), timeout=60)
        monkeypatch.setattr(type(next(iter(states._files.values()))), "sync", lambda _self: all_are_in.wait())
        states.commit(1, {})


# ---------------------------------------------------------------- sudden death
def test_a_killed_process_leaves_one_whole_step(expected, tmp_path):
    subprocess.run([sys.executable, "-m", "tests.engine.state_files", str(tmp_path)], check=True, cwd=ROOT, timeout=120)
    steps = {}
    for boundary in BOUNDARIES:
        folder = tmp_path / boundary.replace(" ", "-")
        with opened([folder / "a", folder / "b"], resume=True) as states:
            steps[boundary] = states.record.step
            assert states.record.payload == {"step": states.record.step}
            assert same(contents(states), expected[states.record.step]), boundary
            for step in range(states.record.step + 1, 5):
                make_step(states, step)
            assert same(contents(states), expected[4]), boundary
    assert steps == {boundary: 2 if boundary in ("after rename", "committed") else 1 for boundary in BOUNDARIES}


# ---------------------------------------------------------------- what cannot be resumed
@pytest.fixture
def left(tmp_path):
    """Two state directories with a committed step."""
    directories = [tmp_path / "a", tmp_path / "b"]
    with opened(directories) as states:
        make_step(states, 1)
    return directories


def refused(directories, match, **options):
    with pytest.raises(ResumeError, match=match) as caught, opened(directories, resume=True, **options):
        pass
    assert caught.value.remedy
    return caught.value


def test_states_of_something_else_are_refused_by_what_differs(left):
    refused(left, "another model", layouts=make_layouts(width=42))
    refused(left, "chunks of another size", layouts=make_layouts(chunk_parameters=4096))
    refused(left, "form fp32 instead of split", form=StateForm.FP32)
    refused(left[:1], "1 state directories instead of 2")
    with pytest.raises(ConfigError, match="durability none"), opened(left, resume=True, durability=Durability.NONE):
        pass
    with opened(left, resume=True) as states:
        assert states.record.step == 1, "a refusal changes nothing"


def test_directories_of_another_run_or_in_another_order_are_refused(left, tmp_path):
    with opened([tmp_path / "c", tmp_path / "d"]):
        pass
    error = refused([left[0], tmp_path / "d"], "not number 2")
    assert str(tmp_path / "d") in error.place
    (left[1] / FOLDER / "identity.json").unlink()
    refused(left, "no identity")


def test_moved_directories_are_resumed(left, tmp_path, expected):
    moved = [path.rename(tmp_path / f"moved-{path.name}") for path in left]
    with opened(moved, resume=True) as states:
        assert same(contents(states), expected[1])


def test_a_missing_or_damaged_record_is_said_to_be_so(left):
    path = left[0] / FOLDER / "record.json"
    whole = path.read_bytes()
    for position in (0, 9, 20, len(whole) // 2, len(whole) - 3):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        assert refused(left, "damaged").place == str(path)
        with pytest.raises(ResumeError, match="damaged"):
            read_record(left)
    path.write_bytes(b"")
    refused(left, "version|damaged")
    path.unlink()
    refused(left, "no step record")
    assert read_record(left) is None


def test_a_missing_or_cut_file_is_named(left):
    path = left[1] / FOLDER / "remainder.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[:-4096])
    assert refused(left, "bytes instead of").place == str(path)
    path.unlink()
    assert refused(left, "missing").place == str(path)
    assert not path.exists(), "nothing is made in its place"


@pytest.mark.parametrize("ram_bytes", [0, ALL_IN_RAM], ids=["ssd", "ram"])
def test_a_damaged_chunk_is_found_when_it_is_first_read(left, ram_bytes):
    layout = make_layouts()[0]
    path = left[0] / FOLDER / "remainder.bin"
    with opened(left, resume=True) as states:
        place = states._table[0, 0, Stream.REMAINDER]
        offset = place.offsets_bytes[states._slots.current((0, 0, Stream.REMAINDER))]
    assert place.directory == 0
    with path.open("r+b") as file:
        file.seek(offset + 5)
        byte = file.read(1)[0]
        file.seek(offset + 5)
        file.write(bytes([byte ^ 16]))
    with (
        pytest.raises(ResumeError, match="remainder of unit 0, chunk 0") as caught,
        opened(left, resume=True, ram_bytes=ram_bytes) as states,
    ):
        states.read_parameter(layout, layout.parameters[0])
    assert caught.value.place == str(path)


def test_each_chunk_is_verified_once(left):
    with opened(left, resume=True) as states:
        contents(states)
        assert not states._slots._unverified
        make_step(states, 2)
        contents(states)


def test_a_new_run_forgets_the_old_record_first(left):
    with Store() as io:
        StateStore(make_layouts(), left, StateForm.SPLIT, io, unsafe_filesystems=UnsafeFilesystems.ALLOW).close()
    assert read_record(left) is None


# ---------------------------------------------------------------- file systems
@pytest.mark.parametrize(
    ("filesystem", "durability", "is_refused"),
    [
        ("tmpfs", Durability.NONE, True),
        ("tmpfs", Durability.STEP, True),
        ("overlay", Durability.NONE, False),
        ("overlay", Durability.STEP, True),
        ("btrfs", Durability.NONE, False),
        ("btrfs", Durability.STEP, True),
        ("ext4", Durability.STEP, False),
        ("xfs", Durability.STEP, False),
    ],
)
def test_file_systems_that_are_no_place_for_states(filesystem, durability, is_refused, tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "filesystem_type", lambda _path: filesystem)
    preflight.check_filesystems([tmp_path], durability, UnsafeFilesystems.ALLOW)
    if not is_refused:
        preflight.check_filesystems([tmp_path], durability, UnsafeFilesystems.REFUSE)
        return
    with pytest.raises(ConfigError, match=filesystem) as caught:
        preflight.check_filesystems([tmp_path], durability, UnsafeFilesystems.REFUSE)
    assert caught.value.place == str(tmp_path)
    assert "unsafe_filesystems" in caught.value.remedy


def test_streams_of_frozen_chunks_have_one_slot(tmp_path):
    with opened([tmp_path]) as states:
        for layout in make_layouts():
            for chunk in layout.chunks:
                for stream in streams_of(chunk, StateForm.SPLIT):
                    assert len(states._table[layout.index, chunk.index, stream].offsets_bytes) == (2 if chunk.trainable else 1)
