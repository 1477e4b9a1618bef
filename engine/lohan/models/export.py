"""Writes the trained model as a Hugging Face folder, streamed from the state store: one tensor in RAM at a time."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from lohan.config import Precision
from lohan.errors import EngineError
from lohan.models.load import empty_model
from lohan.models.tokenizer_files import write_tokenizer
from lohan.models.weights import INDEX_FILE, SINGLE_FILE

MAX_SHARD_BYTES = 5 * 1000**3
"""Tensors of one file; a larger tensor gets a file of its own."""

_TYPE_NAMES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float16: "F16", torch.int64: "I64", torch.bool: "BOOL"}


class Weights(Protocol):
    """Whose weights are written: a `Session`, or what its states hold while it is at rest."""

    @property
    def precision(self) -> Precision: ...

    def wait(self) -> None:
        """Block until they are complete."""

    def named_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter once, then the persistent buffers, each read as it is asked for."""


@dataclass(slots=True)
class _Shard:
    """One safetensors file that is being written; `entries` holds each tensor's begin and end behind the header."""

    file_name: str
    entries: dict[str, tuple[torch.dtype, tuple[int, ...], int, int]]
    size_bytes: int = 0

    def header(self) -> bytes:
        content: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        for name, (dtype, shape, begin, end) in self.entries.items():
            content[name] = {"dtype": _TYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        text = json.dumps(content, separators=(",", ":")).encode()
        return text + b" " * (-len(text) % 8)


def save_pretrained(
    session: Weights,
    config: Any,
    tokenizer_files_from: Path,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Callable[[float], None] = lambda _done: None,
) -> None:
    """Write weights, config.json, generation_config.json and the tokenizer's files into `folder`, which appears complete or not at all.

    Of tied weights only the first name is written, as transformers does. A folder of that
    name is replaced. `progress` is told the share of the weights that is written, 0 to 1.

    Args:
        session: whose weights; it is waited for.
        config: the transformers configuration the model was built from.
        tokenizer_files_from: the base model's folder or GGUF file.
        folder: where to; its parent must exist.
        dtype: of the weights; None takes the session's precision.

    Raises:
        EngineError: the session failed, or its weights are not those of `config`'s model.
        ModelError: the base model has no usable tokenizer.
        OSError: the file system refused (a full disk, no permission).
    """
    session.wait()
    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        write_tokenizer(tokenizer_files_from, temporary)
        dtype = dtype or (torch.bfloat16 if session.precision is Precision.BF16 else torch.float32)
        model = empty_model(config, dtype=dtype)
        _write_settings(model, config, tokenizer_files_from, temporary, dtype)
        shards = _plan_shards(model, dtype, max_shard_bytes)
        _write_weights(session.named_weights(dtype), shards, temporary, progress)
        if len(shards) > 1:
            _write_index(shards, temporary)
        _sync(temporary)
        _replace(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _write_settings(model: Any, config: Any, source: Path, folder: Path, dtype: torch.dtype) -> None:
    from transformers import GenerationConfig

    type_name = str(dtype).removeprefix("torch.")
    values = config.to_diff_dict()
    # Loaders before transformers 4.56 read torch_dtype, later ones dtype.
    values |= {"architectures": [type(model).__name__], "dtype": type_name, "torch_dtype": type_name}
    values.pop("_name_or_path", None)
    (folder / "config.json").write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    base = source / "generation_config.json"
    if base.is_file():
        shutil.copyfile(base, folder / base.name)
    else:
        (folder / base.name).write_text(GenerationConfig.from_model_config(config).to_json_string(), encoding="utf-8")


def _plan_shards(model: Any, dtype: torch.dtype, max_shard_bytes: int) -> list[_Shard]:
    """Give every parameter and persistent buffer of `model` its place, in the model's order."""
    wanted = [(name, dtype, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    wanted += [(name, buffer.dtype, tuple(buffer.shape)) for name, buffer in _persistent_buffers(model)]
    shards = [_Shard("", {})]
    for name, kind, shape in wanted:
        size_bytes = math.prod(shape) * kind.itemsize
        if shards[-1].entries and shards[-1].size_bytes + size_bytes > max_shard_bytes:
            shards.append(_Shard("", {}))
        shard = shards[-1]
        shard.entries[name] = (kind, shape, shard.size_bytes, shard.size_bytes + size_bytes)
        shard.size_bytes += size_bytes
    for number, shard in enumerate(shards, 1):
        shard.file_name = SINGLE_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
    return shards


def _persistent_buffers(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    names = model.state_dict().keys()
    return ((name, buffer) for name, buffer in model.named_buffers() if name in names)


def _write_weights(
    weights: Iterator[tuple[str, torch.Tensor]], shards: list[_Shard], folder: Path, progress: Callable[[float], None]
) -> None:
    total_bytes = sum(shard.size_bytes for shard in shards)
    done_bytes = 0
    missing = {name for shard in shards for name in shard.entries}
    with ExitStack() as stack:
        places = {}
        for shard in shards:
            file = stack.enter_context((folder / shard.file_name).open("wb"))
            header = shard.header()
            file.write(len(header).to_bytes(8, "little") + header)
            for name, (dtype, shape, begin, _) in shard.entries.items():
                places[name] = (file, dtype, shape, 8 + len(header) + begin)
        for name, tensor in weights:
            if name not in missing:
                raise EngineError(f"weight {name} is not one of the configuration's model, or came twice", place=name)
            missing.discard(name)
            file, dtype, shape, offset = places[name]
            assert tuple(tensor.shape) == shape, f"{name} has shape {tuple(tensor.shape)}, planned {shape}"
            file.seek(offset)
            done_bytes += file.write(tensor.to(dtype).contiguous().reshape(-1).view(torch.uint8).numpy().data)
            progress(done_bytes / total_bytes)
        if missing:
            raise EngineError(f"{len(missing)} weights are missing from the session, e.g. {min(missing)}", place=min(missing))


def _write_index(shards: list[_Shard], folder: Path) -> None:
    index = {
        "metadata": {"total_size": sum(shard.size_bytes for shard in shards)},
        "weight_map": {name: shard.file_name for shard in shards for name in shard.entries},
    }
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _sync(folder: Path) -> None:
    """Bring the files and then the folder's entries to the drive."""
    for path in (*folder.iterdir(), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _replace(temporary: Path, folder: Path) -> None:
    """Give `temporary` the name `folder`; what had it before goes away afterwards."""
    previous = folder.with_name(folder.name + ".old")
    shutil.rmtree(previous, ignore_errors=True)
    if folder.exists():
        folder.rename(previous)
    temporary.rename(folder)
    descriptor = os.open(folder.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    shutil.rmtree(previous, ignore_errors=True)
