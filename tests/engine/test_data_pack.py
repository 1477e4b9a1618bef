"""Token files, batches and the preparation of a whole dataset."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lohan.data import pack
from lohan.data.pack import BatchSampler, TokenFileWriter, TokenRows
from lohan.data.prepare import prepare_tokens
from lohan.data.tokenize import UNTRAINED, TokenizedRow, Tokenizer
from lohan.errors import DataError, ModelError
from tests.fixtures.rows import alpaca_rows, messages_rows, write_jsonl
from tests.fixtures.tiny_model import make_tiny_tokenizer


def write(path, rows):
    with TokenFileWriter(path) as writer:
        for input_ids, labels in rows:
            writer.add(TokenizedRow(input_ids, labels))
        writer.describe({"pad_id": "7"})
    return TokenRows(path)


ROWS = [([1, 2, 3], [UNTRAINED, 2, 3]), ([4, 5], [UNTRAINED, 5]), ([6, 7, 8, 9], [UNTRAINED, UNTRAINED, 8, 9])]


@pytest.mark.parametrize("flush_tokens", [1, 4, 1 << 18])
def test_rows_come_back(tmp_path, monkeypatch, flush_tokens):
    monkeypatch.setattr(pack, "_FLUSH_TOKENS", flush_tokens)
    rows = write(tmp_path / "tokens.safetensors", ROWS)
    assert len(rows) == 3
    assert (rows.tokens, rows.longest, rows.pad_id) == (9, 4, 7)
    assert [tuple(part.tolist() for part in rows.row(index)) for index in range(3)] == ROWS
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tokens.safetensors"]


def test_file_is_an_ordinary_safetensors_file(tmp_path):
    write(tmp_path / "tokens.safetensors", ROWS)
    tensors = load_file(tmp_path / "tokens.safetensors")
    assert {name: (str(tensor.dtype), tensor.shape) for name, tensor in tensors.items()} == {
        "input_ids": ("int32", (9,)),
        "labels": ("int32", (9,)),
        "offsets": ("int64", (4,)),
    }


def test_digest_is_of_the_rows_and_of_nothing_else(tmp_path):
    digest = write(tmp_path / "one.safetensors", ROWS).digest
    assert write(tmp_path / "two.safetensors", ROWS).digest == digest
    others = (ROWS[::-1], ROWS[:2], [([1, 2, 3, 4], [UNTRAINED, 2, 3, UNTRAINED]), ([5], [5]), ROWS[2]])
    assert digest not in [write(tmp_path / f"other{index}.safetensors", rows).digest for index, rows in enumerate(others)]


def test_nothing_appears_when_writing_fails(tmp_path):
    with pytest.raises(RuntimeError), TokenFileWriter(tmp_path / "tokens.safetensors") as writer:
        writer.add(TokenizedRow([1], [1]))
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_batch_pads_by_position_to_its_longest_row(tmp_path):
    batch = write(tmp_path / "tokens.safetensors", ROWS).batch([0, 1])
    assert batch.input_ids.tolist() == [[1, 2, 3], [4, 5, 7]]
    assert batch.attention_mask.tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch.labels.tolist() == [[UNTRAINED, 2, 3], [UNTRAINED, 5, UNTRAINED]]
    assert {array.dtype for array in (batch.input_ids, batch.attention_mask, batch.labels)} == {np.dtype(np.int64)}
    assert (batch.tokens, batch.trained_tokens) == (5, 3)


def test_broken_token_files_are_refused(tmp_path):
    path = tmp_path / "tokens.safetensors"
    with pytest.raises(DataError, match="not a usable token file"):
        TokenRows(path)
    path.write_bytes(b"nonsense")
    with pytest.raises(DataError, match="not a usable token file"):
        TokenRows(path)
    save_file({"input_ids": np.zeros(3, np.int32)}, path, metadata={"format": "pt"})
    with pytest.raises(DataError, match="not a token file"):
        TokenRows(path)
    for offsets in ([0, 2], [0, 4, 3], [1, 3], [0, 0, 3], [0]):
        arrays = {"input_ids": np.zeros(3, np.int32), "labels": np.zeros(3, np.int32), "offsets": np.array(offsets, np.int64)}
        save_file(arrays, path, metadata={"format": "lohan-tokens"})
        with pytest.raises(DataError, match="offsets do not fit"):
            TokenRows(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-4])
    with pytest.raises(DataError, match="not a usable token file"):
        TokenRows(path)


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 16, 17, 63, 64, 100, 1000])
def test_every_row_comes_once_an_epoch_in_another_order(rows):
    sampler = BatchSampler(rows, batch_size=1, seed=3)
    epochs = [[sampler.batch(epoch * rows + step)[0] for step in range(rows)] for epoch in range(3)]
    assert sampler.first(rows + 1) == epochs[0]
    assert sampler.first(2) == epochs[0][:2]
    assert all(sorted(epoch) == list(range(rows)) for epoch in epochs)
    if rows > 16:
        assert epochs[0] != epochs[1] != epochs[2] != list(range(rows))


def test_batches_are_a_function_of_seed_and_step():
    sampler = BatchSampler(100, batch_size=8, seed=1)
    late = BatchSampler(100, batch_size=8, seed=1).batch(37)
    for step in range(38):
        last = sampler.batch(step)
    assert last == late
    assert BatchSampler(100, batch_size=8, seed=2).batch(37) != late
    # The batch size cuts the same sequence differently: no row is lost between two sizes.
    assert [row for step in range(4) for row in BatchSampler(100, 4, seed=1).batch(step)] == [
        row for step in range(2) for row in BatchSampler(100, 8, seed=1).batch(step)
    ]


def test_a_batch_may_be_larger_than_the_dataset():
    assert sorted(BatchSampler(3, batch_size=6, seed=0).batch(0)) == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("rows", "batch", "epochs", "steps"), [(64, 8, 1, 8), (65, 8, 1, 9), (65, 8, 2, 17), (10, 4, 0.5, 2), (3, 8, 0.1, 1)]
)
def test_steps_and_epochs(rows, batch, epochs, steps):
    sampler = BatchSampler(rows, batch, seed=0)
    assert sampler.steps(epochs) == steps
    assert sampler.epoch(steps - 1) == steps * batch / rows


def test_no_rows():
    with pytest.raises(DataError, match="no rows"):
        BatchSampler(0, 1, 0)


def test_dataset_becomes_a_token_file(tmp_path):
    make_tiny_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    seen = []
    prepared = prepare_tokens(
        write_jsonl(tmp_path / "rows.jsonl", messages_rows(600)),
        tokenizer,
        tmp_path / "tokens.safetensors",
        sequence_length=64,
        progress=seen.append,
    )
    rows = TokenRows(tmp_path / "tokens.safetensors")
    assert prepared.rows == len(rows) == 600
    assert prepared.tokens == rows.tokens
    assert prepared.longest_row_tokens == rows.longest == 64
    assert prepared.cut_rows > 0 < prepared.cut_tokens
    assert prepared.trained_tokens == rows.batch(range(600)).trained_tokens
    assert seen == [0, 256, 512]
    assert rows.metadata["sequence_length"] == "64"
    assert rows.pad_id == 2


def test_bad_rows_are_listed_by_line_and_left_out_only_by_choice(tmp_path):
    make_tiny_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    long_prompt = {"instruction": "why " * 100, "output": "so"}
    lines = [json.dumps(row) for row in [*alpaca_rows(3), long_prompt]]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join([lines[0], "broken", *lines[1:], *["{}"] * 6]))
    target = tmp_path / "tokens.safetensors"
    with pytest.raises(DataError) as caught:
        prepare_tokens(data, tokenizer, target, sequence_length=100)
    assert caught.value.place == "rows.jsonl"
    assert caught.value.message.startswith("8 of 11 rows cannot be used: line 2: not valid JSON")
    assert "line 5: no token of the row is trained; the answer begins behind token 100." in caught.value.message
    assert caught.value.message.endswith("; and 3 more.")
    assert "skip_bad_rows" in caught.value.remedy
    assert not target.exists()
    prepared = prepare_tokens(data, tokenizer, target, sequence_length=100, skip_bad_rows=True)
    assert (prepared.rows, prepared.bad_rows, len(TokenRows(target))) == (3, 8, 3)


def test_data_without_a_usable_row_never_starts(tmp_path):
    make_tiny_tokenizer(tmp_path)
    data = tmp_path / "rows.jsonl"
    data.write_text('{"instruction":"x","output":{"k":null}}\n')
    with pytest.raises(DataError, match=r"1 of 1 rows cannot be used: line 1: output must be text, found an object") as caught:
        prepare_tokens(data, Tokenizer.from_folder(tmp_path), tmp_path / "t", sequence_length=64, skip_bad_rows=True)
    assert caught.value.remedy == "Correct these rows."


def test_model_without_template_is_no_row_error(tmp_path):
    make_tiny_tokenizer(tmp_path, chat_template=None)
    data = write_jsonl(tmp_path / "rows.jsonl", messages_rows(2))
    with pytest.raises(ModelError, match="no chat template"):
        prepare_tokens(data, Tokenizer.from_folder(tmp_path), tmp_path / "t", sequence_length=64, skip_bad_rows=True)


def test_data_library_loads_neither_torch_nor_transformers():
    code = "import sys, lohan.data.prepare; print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
