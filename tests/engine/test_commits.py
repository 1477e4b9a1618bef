"""Which steps are committed, with what, and what a failing transfer leaves."""

from __future__ import annotations

import errno
import shutil

import pytest
import torch

import lohan
from lohan.config import Durability, UnsafeFilesystems
from lohan.errors import EngineError, StorageError
from lohan.memory.store import FaultPlan, Store
from lohan.states.state_store import StateStore
from lohan.streaming import stages
from tests.engine.reference import (
    adamw,
    make_batches,
    make_llama,
    open_session,
)


class Recorder:
    """Notes what a state store is told about steps, and when a chunk is written."""

    def __init__(self, monkeypatch):
        self.calls: list[tuple] = []
        for name in ("begin_step", "commit", "rollback", "write"):
            monkeypatch.setattr(StateStore, name, self._noting(name, getattr(StateStore, name)))

    def _noting(self, name, original):
        def noted(store, *arguments, **options):
            if name == "commit" and arguments[0] == 0:
                return original(store, *arguments, **options)  # of the states as they are loaded
            if name != "write":
                self.calls.append((name, *arguments))
            elif not self.calls or self.calls[-1] != ("write",):
                self.calls.append(("write",))
            return original(store, *arguments, **options)

        return noted


@pytest.mark.parametrize("options", [{}, {"schedule": "serial"}, {"clip": "global"}, {"schedule": "naive"}])
def test_each_step_is_begun_written_and_committed_before_the_next(options, tmp_path, monkeypatch):
    model = make_llama()
    with open_session(model, adamw(model), tmp_path, **options) as session:
        recorder = Recorder(monkeypatch)
        for number, batch in enumerate(make_batches(3)):
            model(**batch).loss.backward()
            session.commit({"position": number})
    names = [(call[0], *call[1:2]) for call in recorder.calls]
    assert names == [
        (name, *step) for number in (1, 2, 3) for name, step in (("begin_step", [number]), ("write", []), ("commit", [number]))
    ]
    payloads = [call[2] for call in recorder.calls if call[0] == "commit"]
    assert [payload["position"] for payload in payloads] == [0, 1, 2]
    assert all(count == 3 for unit in payloads[2]["optimizer"]["step_counts"] for count in unit)


def test_a_step_without_a_payload_is_committed_when_the_next_begins(tmp_path, monkeypatch):
    recorder = Recorder(monkeypatch)
    model = make_llama()
    with open_session(model, adamw(model), tmp_path) as session:
        for number, batch in enumerate(make_batches(4)):
            model(**batch).loss.backward()
            if number == 1:
                session.commit({"position": number})
    commits = {call[1]: call[2].get("position") for call in recorder.calls if call[0] == "commit"}
    assert commits == {1: None, 2: 1, 3: None}, "nor is the last one, when the others had theirs: it could not be gone on from"


def test_steps_are_committed_where_no_payload_ever_comes(tmp_path, monkeypatch):
    recorder = Recorder(monkeypatch)
    model = make_llama()
    with open_session(model, adamw(model), tmp_path):
        for batch in make_batches(2):
            model(**batch).loss.backward()
    assert [call[1] for call in recorder.calls if call[0] == "commit"] == [1, 2]


def test_a_skipped_step_is_committed_with_its_payload(tmp_path, monkeypatch):
    recorder = Recorder(monkeypatch)
    model = make_llama()
    with open_session(model, adamw(model), tmp_path, clip="global") as session:
        for factor in (1.0, float("nan")):
            (model(**make_batches(1)[0]).loss * factor).backward()
            session.commit({"factor": str(factor)})
    commits = [call for call in recorder.calls if call[0] == "commit"]
    assert [call[2]["factor"] for call in commits] == ["1.0", "nan"]
    assert [call[2]["optimizer"]["skipped_steps"] for call in commits] == [0, 1]
    assert all(count == 1 for unit in commits[1][2]["optimizer"]["step_counts"] for count in unit)


def test_a_payload_needs_a_step(tmp_path):
    model = make_llama()
    with open_session(model, adamw(model), tmp_path) as session, pytest.raises(EngineError, match="no finished step"):
        session.commit({})


# ---------------------------------------------------------------- snapshots
SNAPSHOT = {"durability": Durability.SNAPSHOT, "unsafe_filesystems": UnsafeFilesystems.ALLOW}


@pytest.mark.parametrize("options", [{}, {"schedule": "serial"}, {"clip": "global"}, {"ram_state_bytes": 1 << 24}])
def test_with_snapshots_only_the_steps_that_are_asked_for_are_recorded(options, tmp_path, monkeypatch):
    recorder = Recorder(monkeypatch)
    batches = make_batches(7)
    model = make_llama()
    with open_session(model, adamw(model), tmp_path, **SNAPSHOT, **options) as session:
        for number, batch in enumerate(batches[:5], 1):
            model(**batch).loss.backward()
            if number in (2, 4):
                session.commit({"position": number})
            if number == 4:
                session.wait()
                assert session.statistics.committed_steps == 4, "waiting includes the records"
                kept = dict(session.named_weights())
    commits = {call[1]: call[2]["position"] for call in recorder.calls if call[0] == "commit"}
    assert commits == {2: 2, 4: 4}, "nor is the last one"
    assert [call[1] for call in recorder.calls if call[0] == "begin_step"] == [1, 2, 3, 4, 5]
    model = make_llama()
    with open_session(model, adamw(model), tmp_path, resume=True, **SNAPSHOT, **options) as session:
        assert session.steps == 4
        assert all(torch.equal(tensor, kept[name]) for name, tensor in session.named_weights())
        for batch in batches[4:]:
            model(**batch).loss.backward()
        resumed = dict(session.named_weights())
    model = make_llama()
    with open_session(model, adamw(model), tmp_path, **options) as session:
        for batch in batches:
            model(**batch).loss.backward()
        assert all(torch.equal(tensor, resumed[name]) for name, tensor in session.named_weights())


def test_with_snapshots_a_non_finite_step_ends_the_session_and_the_error_says_from_where_to_go_on(tmp_path):
    model = make_llama()
    with open_session(model, adamw(model), tmp_path, **SNAPSHOT) as session:
        model(**make_batches(1)[0]).loss.backward()
        session.commit({})
        with pytest.raises(EngineError, match="NaN or infinite in step 2") as caught:
            (model(**make_batches(1)[0]).loss * float("nan")).backward()
            session.wait()
        assert "from its last snapshot, of step 1" in caught.value.remedy
        session.close()
    model = make_llama()
    with open_session(model, adamw(model), tmp_path, resume=True, **SNAPSHOT) as session:
        assert session.steps == 1


def test_a_record_that_comes_too_late_is_refused(tmp_path):
    """Within the next step's backwards there is no finished step that could still be recorded."""
    model = make_llama()
    with open_session(model, adamw(model), tmp_path, **SNAPSHOT) as session:
        model(**make_batches(1)[0]).loss.backward()
        with lohan.accumulate():
            model(**make_batches(1)[0]).loss.backward()
        with pytest.raises(EngineError, match="no finished step"):
            session.commit({})
        model(**make_batches(1)[0]).loss.backward()
        session.commit({})


# ---------------------------------------------------------------- failures
TWO_SLOTS = {"durability": Durability.STEP, "unsafe_filesystems": UnsafeFilesystems.ALLOW}


def run_two_steps(tmp_path, monkeypatch, faults, **options):
    """Two committed steps over a store with `faults`; returns the error, the steps whose commit was asked for, and weights by step.

    With two slots the session is then resumed without faults: the last of the weights are what it finds.
    """
    monkeypatch.setattr(stages.Store, "measured", lambda _directories: Store(faults=faults))
    options = {"chunk_parameters": 64 * 1024, **options}
    weights = []
    with monkeypatch.context() as patch:
        recorder = Recorder(patch)
        model = make_llama(num_hidden_layers=1)
        caught = None
        session = open_session(model, adamw(model), tmp_path, **options)
        begun = faults.operations
        try:
            for number, batch in enumerate(make_batches(2)):
                model(**batch).loss.backward()
                session.wait()
                session.commit({"position": number})
            session.wait()
        except EngineError as error:
            caught = error
        finally:
            session.close()
        committed = [call[1] for call in recorder.calls if call[0] == "commit"]
    if "durability" in options:
        monkeypatch.setattr(stages.Store, "measured", lambda _directories: Store())
        model = make_llama(num_hidden_layers=1)
        with open_session(model, adamw(model), tmp_path, resume=True, **options) as session:
            weights = [session.steps, dict(session.named_weights())]
    return caught, committed, begun, weights


def fail_each_transfer(tmp_path, monkeypatch, stride=1, **options):
    """Run once without faults, then with each operation after the load failing in turn; yields what each run left."""
    counting = FaultPlan()
    caught, committed, loaded, _ = run_two_steps(tmp_path / "whole", monkeypatch, counting, **options)
    assert caught is None and committed == [1, 2]
    assert counting.operations > loaded + 10
    for nth in range(loaded + 1, counting.operations + 1, stride):
        faults = FaultPlan()
        faults.fail(nth, errno.EIO)
        caught, committed, _, weights = run_two_steps(tmp_path / str(nth), monkeypatch, faults, **options)
        shutil.rmtree(tmp_path / str(nth))
        if not faults.struck:  # how far weights are read ahead of use differs from run to run
            continue
        if caught is None:  # a read ahead for a third step, which nobody waited for
            assert committed == [1, 2] and faults.struck[0][0] == "read"
        else:
            assert isinstance(caught.__cause__, StorageError) and caught.__cause__.errno == errno.EIO
            assert "failed" in str(caught)
        assert committed in ([], [1], [1, 2])
        yield committed, weights


@pytest.mark.parametrize("options", [{}, {"clip": "global"}, {"schedule": "naive"}], ids=["optimized", "global", "naive"])
def test_whichever_transfer_fails_the_step_stops_with_its_cause(options, tmp_path, monkeypatch):
    """Every operation after the load, one after the other: no hang, a typed error, and no commit of a step that is not whole."""
    assert {0, 1} <= {len(committed) for committed, _ in fail_each_transfer(tmp_path, monkeypatch, **options)}


@pytest.mark.parametrize("durability", [Durability.STEP, Durability.SNAPSHOT])
@pytest.mark.parametrize("ram_bytes", [0, 100_000, 1 << 24], ids=["ssd", "half", "ram"])
def test_whichever_transfer_fails_the_last_committed_step_is_found_again(ram_bytes, durability, tmp_path, monkeypatch):
    options = {**TWO_SLOTS, "ram_state_bytes": ram_bytes, "durability": durability}
    expected = []
    for steps in range(3):
        model = make_llama(num_hidden_layers=1)
        with open_session(model, adamw(model), tmp_path / f"expected {steps}", chunk_parameters=64 * 1024, **options) as session:
            for batch in make_batches(2)[:steps]:
                model(**batch).loss.backward()
            session.wait()
            expected.append(dict(session.named_weights()))
    found_steps = set()
    stride = 1 if durability is Durability.STEP and ram_bytes < 1 << 24 else 3
    for committed, (found, weights) in fail_each_transfer(tmp_path, monkeypatch, stride, **options):
        asked = committed[-1] if committed else 0
        # A snapshot writes what lies in RAM itself, which may fail as well.
        assert found == asked or (durability is Durability.SNAPSHOT and ram_bytes and found == asked - 1)
        assert all(torch.equal(tensor, expected[found][name]) for name, tensor in weights.items())
        found_steps.add(found)
    assert {0, 1} <= found_steps


@pytest.mark.parametrize("method", ["begin_step", "commit"])
def test_a_commit_that_fails_stops_the_next_forward(method, tmp_path, monkeypatch):
    def fail(*_arguments):
        raise StorageError("the record cannot be written", place="record", errno=errno.ENOSPC)

    model = make_llama()
    with open_session(model, adamw(model), tmp_path) as session:
        monkeypatch.setattr(StateStore, method, fail)
        with pytest.raises(EngineError, match="the record cannot be written") as caught:
            for batch in make_batches(3):
                model(**batch).loss.backward()
                session.wait()
        assert isinstance(caught.value.__cause__, StorageError)
        session.close()
