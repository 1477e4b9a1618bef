"""Collects a model's tokenizer: tokenizer.json, tokenizer_config.json, the chat template, and config.json, from a folder or a GGUF file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lohan.errors import ModelError
from lohan.models.gguf_file import GgufFile

if TYPE_CHECKING:
    import tokenizers

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
"""What transformers looks for; nothing else is copied, so that no code comes along."""

_MAX_FILE_BYTES = 512 * 1024 * 1024
_CONTROL, _USER_DEFINED = 3, 4  # token types of GGUF


def write_tokenizer(path: Path, folder: Path) -> None:
    """Write the tokenizer's files and config.json of the model at `path` into `folder`, which is made.

    Args:
        path: a Hugging Face model folder, or a GGUF file (whose vocabulary and merges become a tokenizer.json).
        folder: where to; files of the same names are replaced.

    Raises:
        ModelError: there is no tokenizer, or none that `tokenizers` can hold.
    """
    from lohan.models.load import load_config

    config = load_config(path)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(config.to_json_string(), encoding="utf-8")
    if path.is_file():
        _write_gguf_tokenizer(path, folder)
    else:
        _copy_tokenizer(path, folder)


def _copy_tokenizer(source: Path, folder: Path) -> None:
    if not (source / "tokenizer.json").is_file():
        _convert_tokenizer(folder, place=str(source), pretrained=source)
        return
    for name in TOKENIZER_FILES:
        path = source / name
        if not path.is_file():
            continue
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ModelError(f"{name} is larger than 512 MiB", place=str(source), remedy="Fetch the file again.")
        if name == "tokenizer_config.json":
            _write_json(folder / name, _without_code(path))
        else:
            shutil.copyfile(path, folder / name)


def _without_code(path: Path) -> dict[str, Any]:
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(settings, dict):
            raise ValueError("it is not a JSON object")
    except (ValueError, RecursionError) as error:
        raise ModelError(f"not usable: {error}", place=str(path), remedy="Fetch the file again.") from error
    settings.pop("auto_map", None)
    return settings


def _write_gguf_tokenizer(path: Path, folder: Path) -> None:
    file = GgufFile(path)
    try:
        metadata = file.metadata
    finally:
        file.close()
    backend = _byte_level_backend(metadata)
    if backend is None:
        _convert_tokenizer(folder, place=str(path), pretrained=path.parent, gguf_file=path.name)
    else:
        backend.save(str(folder / "tokenizer.json"))
        _write_json(folder / "tokenizer_config.json", _gguf_settings(metadata))


def _byte_level_backend(metadata: dict[str, Any]) -> tokenizers.Tokenizer | None:
    """The byte-level BPE tokenizer that the metadata describes; None for kinds that only transformers can convert."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    splits = {"gpt-2": byte_level, "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])}
    split = splits.get(metadata.get("tokenizer.ggml.pre", "gpt-2"))
    tokens, merges = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.merges")
    if metadata.get("tokenizer.ggml.model") != "gpt2" or split is None or not tokens or not merges:
        return None
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[tuple(merge.split(" ", 1)) for merge in merges]))
    backend.pre_tokenizer = split
    backend.decoder = decoders.ByteLevel()
    added = [
        tokenizers.AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, metadata.get("tokenizer.ggml.token_type", []), strict=False)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    backend.add_tokens(added)
    begin = metadata.get("tokenizer.ggml.bos_token_id")
    if metadata.get("tokenizer.ggml.add_bos_token") and begin is not None:
        backend.post_processor = processors.TemplateProcessing(single=f"{tokens[begin]} $A", special_tokens=[(tokens[begin], begin)])
    return backend


def _gguf_settings(metadata: dict[str, Any]) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(index, int) and 0 <= index < len(tokens):
            settings[f"{name}_token"] = tokens[index]
    if isinstance(metadata.get("llama.context_length"), int):
        settings["model_max_length"] = metadata["llama.context_length"]
    if isinstance(metadata.get("tokenizer.chat_template"), str):
        settings["chat_template"] = metadata["tokenizer.chat_template"]
    return settings


def _convert_tokenizer(folder: Path, *, place: str, pretrained: Path, gguf_file: str | None = None) -> None:
    """Let transformers make a tokenizer.json, for older formats (SentencePiece) and GGUF tokenizers of other kinds."""
    from transformers import AutoTokenizer

    remedy = "Put the model's tokenizer.json into its folder."
    options = {"gguf_file": gguf_file} if gguf_file else {}
    try:
        auto_tokenizer: Any = AutoTokenizer
        tokenizer = auto_tokenizer.from_pretrained(str(pretrained), trust_remote_code=False, local_files_only=True, **options)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, RuntimeError) as error:
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(f"no usable tokenizer: {first_line}", place=place, remedy=remedy) from error
    if not getattr(tokenizer, "is_fast", False):
        raise ModelError("the tokenizer has no tokenizer.json form", place=place, remedy=remedy)
    tokenizer.save_pretrained(str(folder))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
