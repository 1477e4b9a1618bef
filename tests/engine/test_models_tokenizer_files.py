"""Tokenizers from folders and GGUF files: transformers reads what is written, and gives the same ids."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from lohan.data.tokenize import Tokenizer
from lohan.errors import ModelError
from lohan.models.tokenizer_files import write_tokenizer
from tests.fixtures.gguf_model import make_tiny_gguf
from tests.fixtures.rows import DIALOGS
from tests.fixtures.tiny_model import CHAT_TEMPLATE, make_tiny_model

MESSAGES = [{"role": "user", "content": "Say hello."}, {"role": "assistant", "content": "Hello!"}]
TEXTS = [text for dialog in DIALOGS for text in dialog] + ["<|im_start|>user\n 12  345\t<|im_end|>\n\n"]


def load(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def test_folder_is_copied_without_what_is_not_the_tokenizers(tmp_path):
    source = make_tiny_model(tmp_path / "source")
    settings = json.loads((source / "tokenizer_config.json").read_text())
    (source / "tokenizer_config.json").write_text(json.dumps(settings | {"auto_map": {"AutoTokenizer": ["x.X", None]}}))
    (source / "tokenization_x.py").write_text("raise SystemExit")
    (source / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    write_tokenizer(source, tmp_path / "target")
    assert sorted(path.name for path in (tmp_path / "target").iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert "auto_map" not in json.loads((tmp_path / "target" / "tokenizer_config.json").read_text())
    ours, theirs = load(tmp_path / "target"), load(source)
    assert [ours.encode(text) for text in TEXTS] == [theirs.encode(text) for text in TEXTS]
    assert ours.apply_chat_template(MESSAGES, tokenize=False) == theirs.apply_chat_template(MESSAGES, tokenize=False)


def test_gguf_tokenizer_equals_the_one_it_was_made_from(tmp_path):
    path = make_tiny_gguf(tmp_path / "tiny.gguf")
    write_tokenizer(path, tmp_path / "target")
    ours, source = load(tmp_path / "target"), load(tmp_path / "source")
    for text in TEXTS:
        assert ours.encode(text) == source.encode(text)
        assert ours.decode(ours.encode(text)) == text
    assert (ours.bos_token_id, ours.eos_token_id, ours.pad_token_id) == (1, 2, 2)
    assert ours.apply_chat_template(MESSAGES, tokenize=False) == source.apply_chat_template(MESSAGES, tokenize=False)
    assert Tokenizer.from_folder(tmp_path / "target").template is not None
    assert json.loads((tmp_path / "target" / "config.json").read_text())["model_type"] == "llama"


def test_gguf_tokenizer_equals_transformers_own_conversion(tmp_path):
    from transformers import AutoTokenizer

    path = make_tiny_gguf(tmp_path / "tiny.gguf")
    write_tokenizer(path, tmp_path / "target")
    ours, theirs = load(tmp_path / "target"), AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    assert [ours.encode(text) for text in TEXTS] == [theirs.encode(text) for text in TEXTS]


def test_gguf_tokenizer_of_another_kind_goes_through_transformers(tmp_path):
    path = make_tiny_gguf(tmp_path / "tiny.gguf", pre_tokenizer="llama-bpe")
    write_tokenizer(path, tmp_path / "target")
    assert [load(tmp_path / "target").encode(text) for text in TEXTS[:3]] == [load(tmp_path / "source").encode(text) for text in TEXTS[:3]]


def test_begin_token_is_put_before_texts_where_the_file_says_so(tmp_path):
    write_tokenizer(make_tiny_gguf(tmp_path / "tiny.gguf", add_begin_token=True), tmp_path / "target")
    assert load(tmp_path / "target").encode("a")[0] == 1


def test_model_without_any_tokenizer(tmp_path):
    source = make_tiny_model(tmp_path / "source")
    (source / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="no usable tokenizer") as caught:
        write_tokenizer(source, tmp_path / "target")
    assert "tokenizer.json" in caught.value.remedy


def test_broken_tokenizer_settings(tmp_path):
    source = make_tiny_model(tmp_path / "source")
    (source / "tokenizer_config.json").write_text("[1")
    with pytest.raises(ModelError, match="not usable"):
        write_tokenizer(source, tmp_path / "target")


def test_reading_a_gguf_header_loads_no_torch(tmp_path):
    make_tiny_gguf(tmp_path / "tiny.gguf")
    code = "import sys, pathlib, lohan.models.gguf_file as g; g.GgufFile(pathlib.Path(sys.argv[1])); print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path / "tiny.gguf")], capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"
