"""Where base weights come from: one tensor at a time, by Hugging Face name, never a whole model in RAM."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from lohan.errors import ModelError

if TYPE_CHECKING:
    from torch import nn

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_MAX_INDEX_BYTES = 64 * 1024 * 1024
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class WeightSource(ABC):
    """Named tensors on disk. `names`, `shape` and `dtype` cost nothing; reading touches one tensor. Not thread-safe."""

    place: str
    """The folder or file, for messages."""

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """All tensors, in an order in which reading is cheap."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]: ...

    @abstractmethod
    def dtype(self, name: str) -> torch.dtype:
        """What `read` returns: torch.float32, torch.bfloat16 or torch.float16."""

    @abstractmethod
    def read(self, name: str) -> torch.Tensor:
        """The tensor: contiguous, on the CPU, not written to by the caller (it may be a view of the file)."""

    def read_stretch(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements `start` to `stop` of the tensor, row by row; 1-D, otherwise as `read`. Takes no more memory than about its result."""
        return self.read(name).reshape(-1)[start:stop]  # a view of the file, unless `read` says otherwise

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor, one in memory at a time."""
        for name in self.names:
            yield name, self.read(name)

    def check(self, model: nn.Module) -> None:
        """See that every parameter of `model` is here in its shape, before anything is allocated or read.

        Raises:
            ModelError: a tensor is missing or has another shape; all of them are counted, the first is named.
        """
        here = set(self.names)
        wanted = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        missing = [name for name in wanted if name not in here]
        wrong = [name for name, shape in wanted.items() if name in here and self.shape(name) != shape]
        if missing:
            raise ModelError(
                f"{len(missing)} of {len(wanted)} weights are missing, first {missing[0]!r}",
                place=self.place,
                remedy="Fetch the model's files again, or use a model whose config.json fits its weights.",
            )
        if wrong:
            name = wrong[0]
            raise ModelError(
                f"{len(wrong)} weights do not fit the configuration, {name!r} first: {list(self.shape(name))}, not {list(wanted[name])}",
                place=self.place,
                remedy="Use the config.json that belongs to these weights.",
            )


def open_weights(path: Path) -> WeightSource:
    """Open the safetensors of a model folder, or a GGUF file.

    Raises:
        ModelError: nothing there, pickled weights only, an index that names foreign or absent files, or a file that is cut short.
    """
    if path.is_dir():
        return SafetensorsWeights(path)
    if path.suffix.lower() in _PICKLE_SUFFIXES:
        raise _pickle_error(path)
    from lohan.models.gguf_weights import GgufWeights

    return GgufWeights(path)


class SafetensorsWeights(WeightSource):
    """`model.safetensors`, or the shards that `model.safetensors.index.json` names."""

    def __init__(self, folder: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self.place = str(folder)
        self._files: list[Any] = []
        self._file_of: dict[str, Any] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._types: dict[str, torch.dtype] = {}
        index = _read_index(folder)
        files = sorted(set(index.values())) if index else [_single_file(folder)]
        for file_name in files:
            path = folder / file_name
            if not path.is_file():
                raise ModelError(f"{INDEX_FILE} names {file_name}, which is missing", place=self.place, remedy="Fetch the missing file.")
            try:
                handle: Any = safe_open(path, framework="pt")
                self._files.append(handle)
                for name in handle.keys():  # noqa: SIM118 - a safetensors handle, not a dict
                    self._add(name, handle, file_name, index)
            except (SafetensorError, OSError) as error:
                raise ModelError(
                    f"not a usable safetensors file: {error}", place=str(path), remedy="Fetch the file again; pickled weights are refused."
                ) from error
        absent = sorted(set(index) - set(self._shapes)) if index else []
        if absent:
            raise ModelError(
                f"{INDEX_FILE} names {absent[0]!r} in {index[absent[0]]}, which does not hold it",
                place=self.place,
                remedy="Fetch the files again.",
            )

    def _add(self, name: str, handle: Any, file_name: str, index: Mapping[str, str]) -> None:
        if index and index.get(name) != file_name:
            return
        part = handle.get_slice(name)
        dtype = _DTYPES.get(part.get_dtype())
        if dtype is None:
            raise ModelError(
                f"tensor {name!r} is {part.get_dtype()}, expected F32, BF16 or F16",
                place=f"{self.place}/{file_name}",
                remedy="Use the model's unquantised weights.",
            )
        self._file_of[name], self._shapes[name], self._types[name] = handle, tuple(part.get_shape()), dtype

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        return self._types[name]

    def read(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._file_of[name].get_tensor(name)
        return tensor.contiguous()

    def close(self) -> None:
        self._file_of.clear()
        self._files.clear()


def _read_index(folder: Path) -> dict[str, str]:
    """The index's tensor -> file map, of plain file names; empty where the folder has no index."""
    path = folder / INDEX_FILE
    if not path.is_file():
        return {}
    try:
        if path.stat().st_size > _MAX_INDEX_BYTES:
            raise ValueError("it is larger than 64 MiB")
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError("weight_map is not an object with entries")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(f"not a usable index: {error}", place=str(path), remedy="Fetch the file again.") from error
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or Path(file_name).name != file_name or not file_name.endswith(".safetensors"):
            raise ModelError(
                f"weight_map puts {name!r} into {file_name!r}, expected the plain name of a safetensors file",
                place=str(path),
                remedy="Use an index that names files of its own folder.",
            )
    return weight_map


def _single_file(folder: Path) -> str:
    if (folder / SINGLE_FILE).is_file():
        return SINGLE_FILE
    pickled = sorted(path for path in folder.iterdir() if path.suffix in _PICKLE_SUFFIXES)
    if pickled:
        raise _pickle_error(pickled[0])
    raise ModelError(
        f"no weights: neither {SINGLE_FILE} nor {INDEX_FILE}",
        place=str(folder),
        remedy="Put the model's safetensors files into the folder.",
    )


def _pickle_error(path: Path) -> ModelError:
    return ModelError(
        f"pickled weights ({path.suffix}) are refused, because loading them can run code",
        place=str(path),
        remedy="Use the model's safetensors files, or convert it: model.save_pretrained(folder, safe_serialization=True).",
    )
