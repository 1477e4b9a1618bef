"""Options of `lohan.init` that are words."""

from __future__ import annotations

import inspect
from enum import StrEnum

import pytest

import lohan
from lohan.errors import ConfigError
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
