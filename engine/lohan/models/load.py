"""Opens base models without their weights: checks config.json before anything trusts it, and builds the modules with no memory.

The weights follow one tensor at a time through `open_weights` (`lohan.models.weights`).
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lohan.errors import ModelError
from lohan.models.gguf_file import GgufFile
from lohan.models.weights import WeightSource, open_weights

__all__ = ["WeightSource", "empty_model", "load_config", "open_weights"]

_MAX_CONFIG_BYTES = 4 * 1024 * 1024
# Bounds that no published model comes near; they keep a hostile config.json from building a million modules.
_INTEGER_BOUNDS = {
    "num_hidden_layers": 1024,
    "hidden_size": 131_072,
    "intermediate_size": 1_048_576,
    "num_attention_heads": 2048,
    "num_key_value_heads": 2048,
    "vocab_size": 4_194_304,
    "max_position_embeddings": 1_073_741_824,
}
_GGUF_FIELDS = {
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "rope.dimension_count": "head_dim",
}
_GGUF_TOKENS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "padding_token_id": "pad_token_id"}


def load_config(path: Path) -> Any:
    """The transformers configuration of a model folder or a GGUF file. Code that the folder brings is never run.

    Raises:
        ModelError: no config.json, a value out of bounds, an unknown model type, one that is no causal language model, a model that
            needs its own code (`auto_map`), or quantised weights.
    """
    values, place = _read_gguf_config(path) if path.is_file() else _read_config_file(path)
    _check(values, place)
    from transformers import AutoConfig

    try:
        return AutoConfig.for_model(**values)
    except Exception as error:
        # transformers raises its own validation classes, ValueError, KeyError and TypeError for a value it cannot use.
        if not isinstance(error, ValueError | KeyError | TypeError | AttributeError) and "huggingface_hub" not in type(error).__module__:
            raise
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"not a usable configuration: {first_line}", place=place, remedy="Fetch config.json again.") from error


def empty_model(config: Any, *, dtype: torch.dtype | None = None) -> nn.Module:
    """Build the causal language model of `config` without memory for its weights.

    Every parameter is a NaN-filled placeholder of its full shape with stride 0 and `requires_grad` (so an optimizer can be made at once);
    tied parameters stay one. Buffers, such as rotary frequencies, are real. The model is in training mode.

    Args:
        config: a transformers configuration.
        dtype: of the placeholders, hence of the computation; None takes the configuration's own, else bfloat16.

    Raises:
        ModelError: transformers has no causal language model for `config`, or a buffer depends on weights.
    """
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    # The engine switches caches off in the model's configuration; the caller's, which is exported, stays as it is.
    config = copy.deepcopy(config)
    dtype = dtype or getattr(config, "dtype", None) or torch.bfloat16
    try:
        with no_init_weights(), _EmptyOnMeta():
            auto_model: Any = AutoModelForCausalLM
            model: Any = auto_model.from_config(config, dtype=dtype, trust_remote_code=False)
            model.tie_weights()  # part of the initialisation that was skipped
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"the model cannot be built: {first_line}", place=str(config.model_type), remedy="Use another model.") from error
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise ModelError(
                f"buffer {name!r} is not computed from the configuration", place=str(config.model_type), remedy="Use another model."
            )
    placeholders: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) not in placeholders:
                value = torch.full((), float("nan"), dtype=dtype).expand(parameter.shape)
                placeholders[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
            module.register_parameter(name, placeholders[id(parameter)])
    built: nn.Module = model.train()
    return built


class _EmptyOnMeta(TorchFunctionMode):
    """Sends `torch.empty`, which modules allocate their weights with, to the meta device; all other factories stay real."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def _read_config_file(folder: Path) -> tuple[dict[str, Any], str]:
    path = folder / "config.json"
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise ModelError("config.json is larger than 4 MiB", place=str(path), remedy="Fetch it again.")
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        missing = "config.json is missing" if folder.is_dir() else "no such folder or file"
        raise ModelError(missing, place=str(folder), remedy="Name a Hugging Face model folder, or a GGUF file.") from error
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"config.json cannot be read: {error}", place=str(path), remedy="Fetch it again.") from error
    if not isinstance(values, dict):
        raise ModelError("config.json is not a JSON object", place=str(path), remedy="Fetch it again.")
    return values, str(path)


def _read_gguf_config(path: Path) -> tuple[dict[str, Any], str]:
    if path.suffix.lower() != ".gguf":
        # Opening as weights says what is wrong: pickled, or not GGUF.
        open_weights(path).close()
    file = GgufFile(path)
    try:
        metadata, tensors = file.metadata, file.tensors
        architecture = metadata.get("general.architecture")
        if architecture != "llama":
            raise ModelError(
                f"the GGUF architecture is {architecture!r}, expected 'llama'",
                place=str(path),
                remedy="Use the model's safetensors folder instead.",
            )
        values = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": "output.weight" not in tensors}
        values |= {ours: metadata[f"llama.{theirs}"] for theirs, ours in _GGUF_FIELDS.items() if f"llama.{theirs}" in metadata}
        values |= {
            ours: metadata[f"tokenizer.ggml.{theirs}"] for theirs, ours in _GGUF_TOKENS.items() if f"tokenizer.ggml.{theirs}" in metadata
        }
        values.setdefault("vocab_size", tensors["token_embd.weight"].shape[0] if "token_embd.weight" in tensors else 0)
        return values, str(path)
    finally:
        file.close()


def _check(values: dict[str, Any], place: str) -> None:
    if values.get("auto_map"):
        raise ModelError(
            "the model brings its own Python code (auto_map), which is never run",
            place=place,
            remedy="Use a model that the transformers library knows by itself.",
        )
    if values.get("quantization_config"):
        raise ModelError("the weights are quantised, and cannot be trained", place=place, remedy="Use the model's unquantised weights.")
    for key, highest in _INTEGER_BOUNDS.items():
        value = values.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= highest):
            raise ModelError(f"{key} is {value!r}, expected 1 to {highest}", place=place, remedy="Fetch config.json again.")
    model_type = values.get("model_type")
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise ModelError(
            f"unknown model type {model_type!r}",
            place=place,
            remedy="Use a model type that the installed transformers library knows, or upgrade transformers.",
        )
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ModelError(f"model type {model_type!r} is no causal language model", place=place, remedy="Use a text-generating model.")
