"""Base models: checked before they are trusted, and equal to what transformers loads from the same files."""

from __future__ import annotations

import json
import pickle
import struct
import subprocess
import sys
import tracemalloc
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

from lohan.errors import ModelError
from lohan.models.load import empty_model, load_config, open_weights
from tests.fixtures.gguf_model import make_tiny_gguf
from tests.fixtures.tiny_model import make_tiny_model, tiny_config


@pytest.fixture
def model_folder(tmp_path):
    return make_tiny_model(tmp_path / "model")


def load_reference(folder: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers' own making
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def edit_config(folder: Path, **values) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def assert_same_weights(path: Path, expected: dict[str, torch.Tensor]) -> None:
    with open_weights(path) as weights:
        weights.check(empty_model(load_config(path)))
        assert set(expected) == set(weights.names)
        for name, tensor in weights.items():
            assert tensor.is_contiguous()
            assert tensor.dtype is weights.dtype(name)
            assert tuple(tensor.shape) == weights.shape(name)
            assert torch.equal(tensor.float(), expected[name]), name


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shards", [1, 3])
def test_safetensors_folder_equals_transformers(tmp_path, tied, shards):
    folder = make_tiny_model(tmp_path / "model", tied=tied, shards=shards)
    assert_same_weights(folder, dict(load_reference(folder).named_parameters()))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "matrices", [GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0, GGMLQuantizationType.F16, GGMLQuantizationType.F32]
)
def test_gguf_file_equals_transformers(tmp_path, matrices, tied):
    # What AutoModelForCausalLM.from_pretrained(gguf_file=…) calls; that itself would need accelerate.
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = make_tiny_gguf(tmp_path / "tiny.gguf", matrices=matrices, tied=tied)
    skeleton = empty_model(load_config(path))
    assert_same_weights(path, load_gguf_checkpoint(path, return_tensors=True, model_to_load=skeleton)["tensors"])


def test_gguf_file_undoes_the_rotary_permutation(tmp_path):
    """Unquantised, the file holds exactly the weights of the folder it was made from."""
    path = make_tiny_gguf(tmp_path / "tiny.gguf", matrices=GGMLQuantizationType.F32)
    with open_weights(path) as ours, open_weights(tmp_path / "source") as source:
        assert set(ours.names) == set(source.names)
        for name in source.names:
            assert torch.equal(ours.read(name), source.read(name)), name


@pytest.mark.parametrize("matrices", [GGMLQuantizationType.Q4_1, GGMLQuantizationType.F16])
def test_stretches_of_tensors_are_what_the_whole_holds(tmp_path, matrices):
    gguf = make_tiny_gguf(tmp_path / "tiny.gguf", matrices=matrices)
    for path in (gguf, tmp_path / "source"):
        with open_weights(path) as weights:
            for name in weights.names:
                whole = weights.read(name).reshape(-1)
                count = whole.numel()
                # Within a row, over rows and over heads, at either end, and nothing at all.
                for start, stop in ((0, count), (0, 1), (count - 1, count), (count // 3, count // 3 + 7), (5, count - 5), (9, 9)):
                    assert torch.equal(weights.read_stretch(name, start, stop), whole[start:stop]), (name, start, stop)


def test_a_stretch_of_a_large_tensor_takes_memory_for_itself_alone(tmp_path):
    path = tmp_path / "large.gguf"
    writer = GGUFWriter(path, "llama")
    rows, columns = 4096, 1024
    writer.add_tensor(
        "token_embd.weight",
        quantize(np.full((rows, columns), 127, np.float32), GGMLQuantizationType.Q8_0),
        raw_dtype=GGMLQuantizationType.Q8_0,
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    stretch = 64 * columns
    with open_weights(path) as weights:
        tracemalloc.start()
        try:
            values = weights.read_stretch("model.embed_tokens.weight", 100, 100 + stretch)
            peak_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert torch.equal(values, torch.full((stretch,), 127.0))
    # The scale times the codes, the codes in fp32, and the result; of at most two rows more. The whole has 16 MiB.
    assert peak_bytes < 4 * 4 * (stretch + 2 * columns)


def test_gguf_configuration_equals_transformers(tmp_path):
    from transformers import AutoConfig

    path = make_tiny_gguf(tmp_path / "tiny.gguf")
    ours, theirs = load_config(path).to_dict(), AutoConfig.from_pretrained(tmp_path, gguf_file=path.name).to_dict()
    for key in ("hidden_size", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters", "tie_word_embeddings", "vocab_size"):
        assert ours[key] == theirs[key], key
    assert ours["eos_token_id"] == 2


@pytest.mark.parametrize("tied", [True, False])
def test_empty_model_has_placeholders_real_buffers_and_no_memory(tmp_path, tied):
    from transformers import AutoModelForCausalLM

    config = load_config(make_tiny_model(tmp_path / "model", tied=tied))
    model = empty_model(config, dtype=torch.bfloat16)
    reference = AutoModelForCausalLM.from_config(config)
    assert [(name, p.shape) for name, p in model.named_parameters()] == [(name, p.shape) for name, p in reference.named_parameters()]
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    for parameter in model.parameters():
        assert parameter.dtype is torch.bfloat16
        assert parameter.requires_grad
        assert parameter.isnan().all()
        assert parameter.untyped_storage().nbytes() == 2
    for (name, ours), (_, theirs) in zip(model.named_buffers(), reference.named_buffers(), strict=True):
        assert torch.equal(ours, theirs), name
        assert ours.dtype is theirs.dtype
    assert model.training
    torch.optim.AdamW(model.parameters())


def test_empty_model_of_a_large_configuration_takes_no_memory(tmp_path):
    """70 billion parameters: allocating them would fail, building them takes a second."""
    folder = make_tiny_model(tmp_path / "model")
    edit_config(
        folder, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8, head_dim=128
    )
    model = empty_model(load_config(folder))
    assert sum(parameter.numel() for parameter in model.parameters()) > 60e9
    with open_weights(folder) as weights, pytest.raises(ModelError, match="weights are missing"):
        weights.check(model)


def test_dtype_follows_the_configuration(model_folder):
    assert next(empty_model(load_config(model_folder)).parameters()).dtype is torch.float32
    edit_config(model_folder, torch_dtype="bfloat16")
    assert next(empty_model(load_config(model_folder)).parameters()).dtype is torch.bfloat16


def test_weights_must_have_the_configurations_shapes(model_folder):
    edit_config(model_folder, intermediate_size=64)
    with (
        open_weights(model_folder) as weights,
        pytest.raises(ModelError, match=r"6 weights do not fit .* first: \[96, 32\], not \[64, 32\]"),
    ):
        weights.check(empty_model(load_config(model_folder)))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "no_such_model"}, "unknown model type 'no_such_model'"),
        ({"model_type": None}, "unknown model type None"),
        ({"model_type": ["llama"]}, "unknown model type"),
        ({"model_type": "t5"}, "no causal language model"),
        ({"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}, r"auto_map\), which is never run"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, expected 1 to 1024"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"vocab_size": -5}, "vocab_size is -5"),
        ({"hidden_size": "32"}, "hidden_size is '32'"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"hidden_size": 33, "head_dim": None}, "."),
        ({"rms_norm_eps": "small"}, "."),
    ],
)
def test_configurations_that_cannot_be_used(model_folder, values, message):
    edit_config(model_folder, **values)
    with pytest.raises(ModelError, match=message) as caught:
        empty_model(load_config(model_folder))
    assert caught.value.place
    assert caught.value.remedy


def test_missing_and_broken_configuration(tmp_path, model_folder):
    with pytest.raises(ModelError, match="no such folder or file"):
        load_config(tmp_path / "nowhere")
    for content, message in (
        (b"{", "cannot be read"),
        (b"[]", "not a JSON object"),
        (b"[" * 100_000, "cannot be read"),
        (b"\xff", "cannot be read"),
    ):
        (model_folder / "config.json").write_bytes(content)
        with pytest.raises(ModelError, match=message):
            load_config(model_folder)
    (model_folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        load_config(model_folder)


def test_code_in_the_folder_is_never_run(model_folder):
    (model_folder / "modeling_x.py").write_text("raise SystemExit('run')")
    (model_folder / "configuration_llama.py").write_text("raise SystemExit('run')")
    empty_model(load_config(model_folder))
    open_weights(model_folder).close()


def test_pickled_weights_are_refused(model_folder):
    weights = model_folder / "model.safetensors"
    content = weights.read_bytes()
    weights.unlink()
    with pytest.raises(ModelError, match="no weights: neither"):
        open_weights(model_folder)
    (model_folder / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    with pytest.raises(ModelError, match="pickled weights"):
        open_weights(model_folder)
    with pytest.raises(ModelError, match="pickled weights"):
        load_config(model_folder / "pytorch_model.bin")
    weights.write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(ModelError, match="not a usable safetensors file"):
        open_weights(model_folder)
    for broken in (content[:-4], content + b"xx", b"\xff" * 8 + content[8:], b""):
        weights.write_bytes(broken)
        with pytest.raises(ModelError, match="not a usable safetensors file"):
            open_weights(model_folder)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "../x.safetensors"}, "expected the plain name"),
        ({"a": "/etc/x.safetensors"}, "expected the plain name"),
        ({"a": "sub/x.safetensors"}, "expected the plain name"),
        ({"a": "x.bin"}, "expected the plain name"),
        ({"a": 5}, "expected the plain name"),
        ({"a": "absent.safetensors"}, "which is missing"),
        ({"no.such.weight": "model-00001-of-00002.safetensors"}, "which does not hold it"),
        ({}, "not a usable index"),
        ([], "not a usable index"),
    ],
)
def test_index_names_files_of_its_own_folder(tmp_path, weight_map, message):
    folder = make_tiny_model(tmp_path / "model", shards=2)
    (tmp_path / "x.safetensors").write_bytes((folder / "model-00001-of-00002.safetensors").read_bytes())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match=message):
        open_weights(folder)


def test_tensors_of_other_types_are_named(model_folder):
    import numpy as np
    from safetensors.numpy import save_file

    save_file({"model.norm.weight": np.ones(32, np.int8)}, model_folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"'model\.norm\.weight' is I8, expected F32, BF16 or F16"):
        open_weights(model_folder)


def test_gguf_of_another_architecture(tmp_path):
    path = make_tiny_gguf(tmp_path / "tiny.gguf", architecture="gptx")
    for read in (load_config, open_weights):
        with pytest.raises(ModelError, match="architecture is 'gptx'"):
            read(path)


def test_broken_gguf_files_are_named(tmp_path):
    path = make_tiny_gguf(tmp_path / "tiny.gguf")
    content = path.read_bytes()
    broken = {
        "it does not begin with GGUF": b"GGML" + content[4:],
        "its version is 9": content[:4] + struct.pack("<I", 9) + content[8:],
        "it announces": content[:8] + struct.pack("<Q", 2**60) + content[16:],
        "a string runs past its end": content[:24] + struct.pack("<Q", 2**62) + content[32:],
        "but the file has": content[:-100],
        "the header cannot be read": content[:20],
    }
    for message, data in broken.items():
        path.write_bytes(data)
        with pytest.raises(ModelError, match=message) as caught:
            open_weights(path)
        assert caught.value.place == str(path)
    for cut in range(30, len(content), 4001):
        path.write_bytes(content[:cut])
        with pytest.raises(ModelError):
            open_weights(path)
    path.write_bytes(b"")
    with pytest.raises(ModelError, match="the file is empty"):
        open_weights(path)
    with pytest.raises(ModelError, match="No such file"):
        open_weights(tmp_path / "none.gguf")


def test_weights_stay_on_disk_until_read(tmp_path):
    """Opening and checking a model reads headers only."""
    folder = make_tiny_model(tmp_path / "model", hidden_size=512, layers=8)
    code = (
        "import resource, sys; from pathlib import Path; import torch;"
        "from lohan.models.load import *; folder = Path(sys.argv[1]); model = empty_model(load_config(folder));"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
        "w = open_weights(folder); w.check(model); print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)"
    )
    size_bytes = (folder / "model.safetensors").stat().st_size
    grown = int(subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True).stdout)
    assert grown < size_bytes / 4


def test_tiny_config_is_a_real_llama(model_folder):
    config = load_config(model_folder)
    assert config.num_key_value_heads == tiny_config()["num_key_value_heads"]
    assert load_reference(model_folder).num_parameters() == sum(p.numel() for p in empty_model(config).parameters())
