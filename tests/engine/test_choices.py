"""Options of `lohan.init` that are words, and how many threads update where nobody says."""

from __future__ import annotations

import inspect
import os
from enum import StrEnum

import pytest
import torch

import lohan
from lohan.errors import ConfigError
from lohan.hardware.probe import probe
from lohan.profiling.machine import measure_machine
from lohan.profiling.timing import Effort
from lohan.streaming.choices import choose_threads
from lohan.units import MIB
from tests.engine.reference import adamw, make_batches, make_llama, open_session

WORDS = {name: option.default for name, option in inspect.signature(lohan.init).parameters.items() if isinstance(option.default, StrEnum)}
ANY_FILESYSTEM = {"unsafe_filesystems": "allow"}  # a temporary folder may well be in memory


@pytest.mark.parametrize("name", WORDS)
def test_another_word_is_refused_before_anything_is_changed(name, tmp_path):
    model = make_llama()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    with pytest.raises(ConfigError, match=f"{name} is 'other', expected one of {', '.join(type(WORDS[name]))}") as caught:
        open_session(model, adamw(model), tmp_path / "states", **{name: "other"})
    assert caught.value.remedy
    assert all(tensor.equal(before[key]) for key, tensor in model.state_dict().items())
    assert not (tmp_path / "states").exists()


def test_a_plain_word_is_as_good_as_its_member(tmp_path):
    weights = []
    for number, options in enumerate((WORDS | ANY_FILESYSTEM, {name: str(word) for name, word in WORDS.items()} | ANY_FILESYSTEM)):
        model = make_llama()
        with open_session(model, adamw(model), tmp_path / str(number), **options) as session:
            model(**make_batches(1)[0]).loss.backward()
            session.wait()
            assert session.precision is WORDS["precision"]
            weights.append(dict(session.named_weights()))
    assert weights[0].keys() == weights[1].keys()
    assert all(weight.equal(weights[1][name]) for name, weight in weights[0].items())


@pytest.mark.parametrize(("usable", "threads"), [(1, 1), (2, 2), (7, 7), (8, 6), (16, 14), (1024, 1022), (4096, 1024)])
def test_from_eight_cpus_on_two_are_left_to_those_who_launch(usable, threads, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(usable)))
    assert choose_threads(0) == threads
    assert choose_threads(16) == 16


def test_a_run_updates_with_as_many_threads_as_were_measured(tmp_path, monkeypatch):
    facts = probe(()).model_copy(update={"gpus": ()})
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(9)))
    tiny = Effort(seconds=0.0, repetitions=2, copy_bytes=4 * MIB, elements=64 * 1024, file_bytes=4 * MIB, matrix_side=256)
    profile = measure_machine(facts, device=torch.device("cpu"), effort=tiny)
    assert {update.threads for update in profile.updates} == {7}
    model = make_llama()
    with open_session(model, adamw(model), tmp_path, threads=0) as session:
        assert session._stages.worker._pool.threads == session._stages.states._pool.threads == 7
