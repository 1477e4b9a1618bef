"""Steps that are clipped to a common norm and update on arrival: the bits of deferral, whatever the norm turns out to be."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

import lohan
from lohan.config import ClipUpdate, Durability, Precision, States, UnsafeFilesystems
from lohan.errors import ConfigError, EngineError, StorageError
from lohan.planning.schedule import DRIVES_CLIP_RATE
from lohan.streaming.clipping import StepStatistics
from lohan.streaming.parameters import DebugMode
from lohan.streaming.speculation import REMEMBERED_STEPS, Speculation
from lohan.streaming.trace import Trace
from tests.engine.reference import (
    Outcome,
    adamw,
    assert_bitwise_equal,
    assert_equal_training,
    make_batches,
    make_llama,
    open_session,
    train_plain,
    train_streamed,
)
from tests.engine.test_trace import assert_as_scheduled
from tests.engine.test_updates import spoil_gradients_below
from tests.fixtures.waiting import wait_until

STEPS = 6
STEP = {"durability": Durability.STEP, "unsafe_filesystems": UnsafeFilesystems.ALLOW, "clip": "global"}
STATE_BYTES = 12 * 140_000
MOST_REDONE = int(DRIVES_CLIP_RATE * REMEMBERED_STEPS)
VARIANTS: dict[str, dict[str, Any]] = {
    "on the drive": {},
    "half in RAM": {"ram_state_bytes": STATE_BYTES // 2},
    "in RAM": {"ram_state_bytes": 4 * STATE_BYTES},
    "bf16, half in RAM": {"precision": Precision.BF16, "ram_state_bytes": STATE_BYTES // 2},
    "8 bit": {"precision": Precision.BF16, "states": States.EIGHT_BIT},
    "naive": {"schedule": "naive", "ram_state_bytes": STATE_BYTES // 2},
    "accumulated": {"accumulation": 3, "max_gradient_norm": 1.58, "ram_state_bytes": STATE_BYTES // 2},
    "debug": {"debug": DebugMode.NAN_FILL, "kept_units": 2},
    "modules": {"grain": "module"},
}
IN_RAM = {"durability": Durability.NONE, "ram_state_bytes": 4 * STATE_BYTES, "spare_state_bytes": 4 * STATE_BYTES}
VARIANTS |= {
    "second places": IN_RAM,
    "second places of some units": {**IN_RAM, "spare_state_bytes": STATE_BYTES // 2},
    "second places, naive": {**IN_RAM, "schedule": "naive"},
    "second places, bf16, snapshots": {**IN_RAM, "precision": Precision.BF16, "durability": Durability.SNAPSHOT},
    "second places, 8 bit": {**IN_RAM, "precision": Precision.BF16, "states": States.EIGHT_BIT},
    "second places, accumulated": {**IN_RAM, "accumulation": 3, "max_gradient_norm": 1.58},
    "second places, debug": {**IN_RAM, "debug": DebugMode.NAN_FILL, "kept_units": 2},
}


@pytest.fixture(scope="module")
def plain() -> tuple[float, Outcome]:
    """A largest norm that some steps of the training exceed, and the plain training with it."""
    batches = make_batches(STEPS, padded=True)
    norms = [squared**0.5 for squared in train_plain(make_llama(tied=True), batches).squared_norms]
    limit = statistics.median(norms)
    return limit, train_plain(make_llama(tied=True), batches, max_gradient_norm=limit)


@pytest.fixture
def sessions(monkeypatch) -> list[lohan.Session]:
    """All that are opened."""
    opened: list[lohan.Session] = []
    original = lohan.Session.__init__
    monkeypatch.setattr(lohan.Session, "__init__", lambda self, *args: (original(self, *args), opened.append(self))[0])
    return opened


@pytest.mark.parametrize("variant", VARIANTS)
def test_parity_of_speculated_and_deferred_steps_bit_for_bit(variant, plain, sessions, tmp_path):
    limit, expected = plain
    options = {**STEP, "max_gradient_norm": limit, **VARIANTS[variant]}
    batches = make_batches(STEPS * options.get("accumulation", 1), padded=True)
    deferred, speculated = (
        train_streamed(make_llama(tied=True), batches, tmp_path / updates, clip_updates=updates, **options)
        for updates in (ClipUpdate.DEFER, ClipUpdate.SPECULATE)
    )
    assert_bitwise_equal(deferred, speculated)
    assert [session.statistics.speculated_steps for session in sessions] == [0, STEPS]
    assert [session.statistics.redone_steps for session in sessions] == [0, sessions[1].statistics.clipped_steps]
    assert 0 < sessions[1].statistics.clipped_steps < STEPS, "both sides of the limit are needed"
    if VARIANTS[variant].keys() <= {"ram_state_bytes", "spare_state_bytes", "schedule", "durability"}:
        assert_equal_training(speculated, expected)


def hold_back_the_embedding(session: lohan.Session) -> list[int]:
    """Its gradients, the step's last, wait until some other unit has been written; returns which have then."""
    worker = session._stages.worker
    submit, early = worker.submit, []

    def submit_slowly(update: Any) -> None:
        if update.layout.index == 0:
            wait_until(lambda: worker._withheld)
            early.extend(worker._withheld)
        submit(update)

    worker.submit = submit_slowly
    return early


def test_a_redone_step_writes_twice_at_most_and_another_once(tmp_path):
    """What had not begun when the norm was known is not written for nothing."""
    written = {}
    for updates, largest in ((ClipUpdate.DEFER, 1e-3), (ClipUpdate.SPECULATE, 1e-3), (ClipUpdate.SPECULATE, 1e3)):
        model = make_llama()
        options = {**STEP, "clip_updates": updates, "max_gradient_norm": largest}
        with open_session(model, adamw(model), tmp_path / f"{updates} {largest}", **options) as session:
            if updates is ClipUpdate.SPECULATE:
                hold_back_the_embedding(session)
            before = session.statistics.bytes_written
            model(**make_batches(1)[0]).loss.backward()
            session.wait()
            written[updates, largest] = session.statistics.bytes_written - before
    once = written[ClipUpdate.DEFER, 1e-3]
    assert once < written[ClipUpdate.SPECULATE, 1e-3] <= 2 * once
    assert written[ClipUpdate.SPECULATE, 1e3] == written[ClipUpdate.DEFER, 1e-3]


def test_speculated_updates_begin_while_the_backward_goes_on(tmp_path):
    """A unit is written before the embedding's gradients are handed in, which wait for it here: the head, or one that overtook it."""
    model = make_llama()
    with open_session(model, adamw(model), tmp_path, clip_updates="speculate", max_gradient_norm=1e3, **STEP) as session:
        early = hold_back_the_embedding(session)
        model(**make_batches(1)[0]).loss.backward()
        session.wait()
    assert early
    assert 0 not in early


@pytest.mark.parametrize(
    "options",
    [{}, {"ram_state_bytes": STATE_BYTES // 2, "schedule": "naive"}, IN_RAM, {**IN_RAM, "spare_state_bytes": STATE_BYTES // 2}],
    ids=["on the drive", "half in RAM", "second places", "second places of some units"],
)
def test_a_step_that_stands_does_what_its_operations_say(options, tmp_path):
    model, trace = make_llama(), Trace(first_step=2, steps=2)
    options = {**STEP, "clip_updates": "speculate", "max_gradient_norm": 1e3, **options}
    with open_session(model, adamw(model), tmp_path, trace=trace, **options) as session:
        for batch in make_batches(4):
            model(**batch).loss.backward()
            session.wait()
        operations = tuple(session.speculated_operations)
        assert operations != session.operations
    assert_as_scheduled(operations, trace.steps)


@pytest.mark.parametrize(
    "options",
    [
        {"durability": Durability.NONE},
        {**IN_RAM, "spare_state_bytes": 1000},
        {**IN_RAM, "ram_state_bytes": STATE_BYTES // 2},
        {"schedule": "serial"},
        {"clip": "none"},
        {"clip": "per_unit"},
    ],
    ids=["no durability", "no room for a unit", "no whole unit in RAM", "serial", "no clipping", "per unit"],
)
def test_without_two_slots_or_reason_nothing_is_speculated(options, sessions, tmp_path):
    options = {**STEP, "clip_updates": "speculate", "max_gradient_norm": 0.1, **options}
    train_streamed(make_llama(), make_batches(2), tmp_path, **options)
    assert sessions[0].statistics.speculated_steps == sessions[0].statistics.redone_steps == 0


def test_an_error_while_a_step_is_taken_back_ends_the_session_and_leaves_the_step_before(tmp_path, monkeypatch):
    model = make_llama()
    options = {**STEP, "clip_updates": "speculate", "max_gradient_norm": 1e-3}
    session = open_session(model, adamw(model), tmp_path, **options)

    def fail() -> None:
        raise StorageError("the drive is gone", place="nvme0")

    model(**make_batches(1)[0]).loss.backward()
    session.commit({})
    session.wait()
    reference = dict(session.named_weights())
    monkeypatch.setattr(session._stages.states, "rollback", fail)
    with pytest.raises(EngineError, match="the optimizer failed: the drive is gone"):
        model(**make_batches(1)[0]).loss.backward()
        session.wait()
    session.close()
    model = make_llama()
    with open_session(model, adamw(model), tmp_path, resume=True, **options) as session:
        assert session.steps == 1
        assert all(weight.equal(reference[name]) for name, weight in session.named_weights())


def test_a_step_with_an_infinite_gradient_is_taken_back_whole_from_second_places(tmp_path):
    """The last blocks have been updated when the first one's gradient turns out to be infinite."""
    model = make_llama()
    options = {**STEP, **IN_RAM, "clip_updates": "speculate", "max_gradient_norm": 1e3}
    first, second = make_batches(2)
    with open_session(model, adamw(model), tmp_path, **options) as session:
        model(**first).loss.backward()
        session.wait()
        before = {name: weight.clone() for name, weight in session.named_weights()}
        spoil_gradients_below(model, 0, float("inf"))
        model(**second).loss.backward()
        session.wait()
        assert (session.statistics.skipped_steps, session.statistics.redone_steps) == (1, 1)
        assert all(weight.equal(before[name]) for name, weight in session.named_weights())


@pytest.mark.parametrize("precision", [{}, {"precision": Precision.BF16, "states": States.EIGHT_BIT}], ids=["fp32", "8 bit"])
def test_what_a_step_leaves_alone_is_in_the_second_place_too(precision, tmp_path):
    """A parameter between others gets no gradient in every other step: its weights and moments go with theirs from place to place."""
    weights = []
    for updates in (ClipUpdate.DEFER, ClipUpdate.SPECULATE):
        model = make_llama()
        options = {**STEP, **IN_RAM, **precision, "clip_updates": updates, "max_gradient_norm": 1e3}
        with open_session(model, adamw(model), tmp_path / updates, **options) as session:
            rested = model.get_parameter("model.layers.1.mlp.up_proj.weight")
            for number, batch in enumerate(make_batches(5)):
                rested.requires_grad_(number % 2 == 0)
                model(**batch).loss.backward()
                session.wait()
            weights.append(dict(session.named_weights()))
            assert session.statistics.speculated_steps == (5 if updates is ClipUpdate.SPECULATE else 0)
    assert all(weight.equal(weights[1][name]) for name, weight in weights[0].items())


def test_auto_goes_by_the_rate_of_the_plan():
    speculation = Speculation(ClipUpdate.AUTO, is_possible=True, first=ClipUpdate.SPECULATE, most_failing=0.75)
    for step in range(REMEMBERED_STEPS):
        assert speculation.decide() == (step < 24)
        speculation.note(StepStatistics(step + 1, 1.0, 0, clipped=True), speculated=step < 24)


# ---------------------------------------------------------------- the decision
def _decisions(fails: list[bool], first: ClipUpdate = ClipUpdate.DEFER) -> list[bool]:
    """What `auto` decides before each step, and after the last."""
    speculation = Speculation(ClipUpdate.AUTO, is_possible=True, first=first)
    decided = [speculation.decide()]
    for step, clipped in enumerate(fails):
        speculation.note(StepStatistics(step + 1, 1.0, 0, clipped), speculated=decided[-1])
        decided.append(speculation.decide())
    return decided


def test_auto_speculates_while_fewer_than_a_quarter_of_the_last_steps_fail():
    assert _decisions([False] * 40) == [False] * REMEMBERED_STEPS + [True] * 9
    assert not any(_decisions(([False] * 3 + [True]) * 20))
    rarely = _decisions(([False] * 4 + [True]) * 20)
    assert all(rarely[REMEMBERED_STEPS:])
    # After eight failures in a row it defers, until they are so long ago that fewer than eight are remembered.
    burst = _decisions([False] * 40 + [True] * MOST_REDONE + [False] * 40)
    assert burst[40 : 40 + MOST_REDONE] == [True] * MOST_REDONE
    assert burst[40 + MOST_REDONE :] == [False] * (REMEMBERED_STEPS - MOST_REDONE + 1) + [True] * (40 - REMEMBERED_STEPS + MOST_REDONE)


def test_auto_begins_with_what_the_plan_expects_until_steps_show_otherwise():
    assert all(_decisions([False] * 40, ClipUpdate.SPECULATE))
    failing = _decisions([True] * 40, ClipUpdate.SPECULATE)
    assert failing == [True] * MOST_REDONE + [False] * (41 - MOST_REDONE)
    assert not Speculation(ClipUpdate.AUTO, is_possible=False, first=ClipUpdate.SPECULATE).decide()
    assert not Speculation(ClipUpdate.DEFER, is_possible=True, first=ClipUpdate.SPECULATE).decide()


def test_steps_that_are_left_out_count_as_failures():
    speculation = Speculation(ClipUpdate.AUTO, is_possible=True)
    for step in range(REMEMBERED_STEPS):
        speculation.note(StepStatistics(step + 1, 1.0, non_finite=int(step < MOST_REDONE)), speculated=False)
    assert not speculation.decide()
    speculation.note(StepStatistics(REMEMBERED_STEPS + 1, 1.0, 0), speculated=False)
    assert speculation.decide()
    speculation.note(StepStatistics(REMEMBERED_STEPS + 2, 1.0, 1), speculated=True)
    assert (speculation.speculated_steps, speculation.redone_steps) == (1, 1)


def test_auto_decides_alike_after_a_resumption(tmp_path):
    """34 steps at once, and with an interruption after 33: the last one is speculated either way."""
    tiny = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    outcomes = []
    for parts in ((34,), (33, 1)):
        batches = iter(make_batches(34))
        folder = tmp_path / str(len(parts))
        for number, steps in enumerate(parts):
            model = make_llama(**tiny)
            options = {**STEP, "max_gradient_norm": 1e3, "resume": number > 0}
            with open_session(model, adamw(model), folder, **options) as session:
                for _ in range(steps):
                    model(**next(batches)).loss.backward()
                    session.commit({"seen": True})
                session.wait()
                last = (session.statistics.speculated_steps, session.statistics.redone_steps, dict(session.named_weights()))
        outcomes.append(last)
    assert outcomes[0][:2] == outcomes[1][:2] == (2, 0)
    assert all(weight.equal(outcomes[1][2][name]) for name, weight in outcomes[0][2].items())


def test_another_word_is_refused(tmp_path):
    model = make_llama()
    with pytest.raises(ConfigError, match="clip_updates is 'guess', expected one of auto, defer, speculate"):
        open_session(model, adamw(model), tmp_path, clip_updates="guess")
