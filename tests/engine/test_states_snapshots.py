"""`durability = snapshot`: a step becomes the one to resume from only when it is committed; all that is done in between leaves it whole."""

from __future__ import annotations

import errno
import threading

import pytest
import torch

from lohan._native import FaultPlan
from lohan.config import Durability
from lohan.errors import EngineError, StorageError
from lohan.planning.state_form import StateForm
from lohan.states.record import RecordFile
from lohan.states.state_store import StateStore
from lohan.states.streams import streams_of
from tests.engine.state_files import change, contents, make_layouts, make_step, opened, same

PLACES = {"ssd": 0, "half": 60_000, "ram": 1 << 20}
SNAPSHOT = {"durability": Durability.SNAPSHOT}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The states after each of six steps of a run that nothing disturbed."""
    found = []
    with opened([tmp_path_factory.mktemp("undisturbed")]) as states:
        found.append(contents(states))
        for step in range(1, 7):
            make_step(states, step)
            found.append(contents(states))
    return found


def go_to(states: StateStore, first: int, last: int, *, in_place: bool = True) -> None:
    """Steps `first` to `last`, none of them committed."""
    for step in range(first, last + 1):
        states.begin_step(step)
        change(states, step, in_place=in_place)


@pytest.mark.parametrize("form", StateForm)
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("ram_bytes", PLACES.values(), ids=PLACES)
def test_the_last_snapshot_is_found_whatever_followed(ram_bytes, in_place, form, tmp_path):
    directories = [tmp_path / "a", tmp_path / "b"]
    with opened(directories, form=form, ram_bytes=ram_bytes, **SNAPSHOT) as states:
        go_to(states, 1, 3, in_place=in_place)
        kept = contents(states)
        states.commit(3, {"name": "three"})
        go_to(states, 4, 6, in_place=in_place)
        newest = contents(states)
        assert not same(kept, newest)
    with opened(directories, form=form, ram_bytes=PLACES["half"], resume=True, **SNAPSHOT) as states:
        assert (states.record.step, states.record.payload) == (3, {"name": "three"})
        assert same(contents(states), kept)
        go_to(states, 4, 6, in_place=in_place)
        assert same(contents(states), newest)


@pytest.mark.parametrize("ram_bytes", PLACES.values(), ids=PLACES)
def test_the_steps_are_those_of_other_durabilities(ram_bytes, expected, tmp_path):
    """And a run may go from one durability to the other."""
    with opened([tmp_path], ram_bytes=ram_bytes, **SNAPSHOT) as states:
        for step in (1, 2, 3):
            go_to(states, step, step)
            assert same(contents(states), expected[step])
        states.commit(3, {})
        states.begin_step(4)
    with opened([tmp_path], ram_bytes=ram_bytes, resume=True) as states:
        make_step(states, 4)
    with opened([tmp_path], resume=True, **SNAPSHOT) as states:
        go_to(states, 5, 6)
        assert same(contents(states), expected[6])


def test_memory_is_written_by_the_snapshot_alone_and_only_where_it_changed(tmp_path):
    layouts = make_layouts()
    with opened([tmp_path], ram_bytes=PLACES["ram"], **SNAPSHOT) as states:
        written = states.bytes_written
        go_to(states, 1, 3)
        assert states.bytes_written == written
        states.commit(3, {})
        trained = sum(
            stream.size_bytes(chunk.length)
            for layout in layouts
            for chunk in layout.chunks
            if chunk.trainable
            for stream in streams_of(chunk, states.form)
        )
        assert states.bytes_written == written + trained
        states.begin_step(4)
        states.commit(4, {})
        assert states.bytes_written == written + trained, "nothing had changed"


def test_chunks_on_the_drive_go_to_the_same_slot_until_a_snapshot(tmp_path):
    part = next(iter(contents_of_slots(tmp_path)))
    seen = []
    with opened([tmp_path / "run"], **SNAPSHOT) as states:
        for step in range(1, 5):
            go_to(states, step, step)
            seen.append(states._slots.current(part))
            if step == 2:
                states.commit(2, {})
    assert seen == [1, 1, 0, 0]


def contents_of_slots(tmp_path):
    with opened([tmp_path / "other"]) as states:
        return contents(states)


def test_the_step_after_a_snapshot_begins_when_its_record_is_durable(tmp_path, monkeypatch):
    order = []
    may_write, is_writing = threading.Event(), threading.Event()
    written = RecordFile.write

    def write(*values):
        is_writing.set()
        may_write.wait()
        order.append("record")
        return written(*values)

    with opened([tmp_path], **SNAPSHOT) as states:
        monkeypatch.setattr(RecordFile, "write", write)
        go_to(states, 1, 1)
        snapshot = threading.Thread(target=states.commit, args=(1, {}))
        snapshot.start()
        is_writing.wait()

        def begin():
            states.begin_step(2)
            order.append("begun")

        thread = threading.Thread(target=begin)
        thread.start()
        may_write.set()
        thread.join()
        snapshot.join()
        assert order == ["record", "begun"]


def test_steps_out_of_order_are_refused(tmp_path):
    with opened([tmp_path], **SNAPSHOT) as states:
        for step in (0, 2):
            with pytest.raises(EngineError, match=f"step {step} cannot begin"):
                states.begin_step(step)
        go_to(states, 1, 2)
        for step in (1, 4):
            with pytest.raises(EngineError, match=f"step {step} cannot begin"):
                states.begin_step(step)
        with pytest.raises(EngineError, match="step 1 cannot be committed"):
            states.commit(1, {})
        with pytest.raises(EngineError, match="no step to go back to"):
            states.rollback()
        states.commit(2, {})
        states.begin_step(3)


@pytest.mark.parametrize("ram_bytes", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("error_number", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
def test_every_transfer_up_to_the_next_snapshot_may_fail(ram_bytes, error_number, expected, tmp_path):
    """In the steps that are not recorded, and in the snapshot itself."""
    outcomes = set()
    for nth in range(1, 1000, 7):
        faults = FaultPlan()
        directory = tmp_path / str(nth)
        with opened([directory], ram_bytes=ram_bytes, faults=faults, **SNAPSHOT) as states:
            make_step(states, 1)
            faults.fail(nth, error_number)
            try:
                go_to(states, 2, 3)
                states.commit(3, {})
            except StorageError as error:
                assert error.errno == error_number
        with opened([directory], resume=True, **SNAPSHOT) as states:
            assert states.record.step == (1 if faults.struck else 3)
            assert same(contents(states), expected[states.record.step])
        outcomes.add(bool(faults.struck))
        if not faults.struck:
            assert outcomes == {False, True}
            return
    pytest.fail("there is no end of operations")


@pytest.mark.parametrize("ram_bytes", PLACES.values(), ids=PLACES)
def test_short_transfers_of_a_snapshot_change_nothing(ram_bytes, expected, tmp_path):
    faults = FaultPlan()
    for nth in range(1, 200, 3):
        faults.shorten(nth, 512)
    with opened([tmp_path], ram_bytes=ram_bytes, faults=faults, **SNAPSHOT) as states:
        go_to(states, 1, 2)
        states.commit(2, {})
    assert faults.struck
    with opened([tmp_path], resume=True, **SNAPSHOT) as states:
        assert same(contents(states), expected[2])


def test_after_a_snapshot_that_failed_nothing_is_written(expected, tmp_path, monkeypatch):
    def fail(*_values):
        raise StorageError("the record cannot be written", errno=errno.EIO)

    with opened([tmp_path], ram_bytes=PLACES["half"], **SNAPSHOT) as states:
        make_step(states, 1)
        go_to(states, 2, 2)
        with monkeypatch.context() as patch:
            patch.setattr(RecordFile, "write", fail)
            with pytest.raises(StorageError):
                states.commit(2, {})
        with pytest.raises(EngineError, match="commit of step 2 failed"):
            states.begin_step(3)
    with opened([tmp_path], resume=True, **SNAPSHOT) as states:
        assert same(contents(states), expected[1])


def test_frozen_chunks_in_memory_have_their_place_too(tmp_path):
    layout = make_layouts()[0]
    frozen = next(chunk for chunk in layout.chunks if not chunk.trainable)
    with opened([tmp_path], ram_bytes=PLACES["ram"], **SNAPSHOT) as states:
        values = torch.empty(frozen.length, dtype=states.weights_stream.dtype)
        states.read(layout, frozen, states.weights_stream, values).wait()
    with opened([tmp_path], resume=True, **SNAPSHOT) as states:
        again = torch.empty_like(values)
        states.read(layout, frozen, states.weights_stream, again).wait()
    assert torch.equal(values.view(torch.uint8), again.view(torch.uint8))
