"""Which units are found in which models, and what one block is said to keep alive."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PhiConfig,
    Qwen2Config,
    Qwen3Config,
    T5Config,
    T5ForConditionalGeneration,
)

from lohan.errors import ModelError
from lohan.models.blocks import find_units, trace_workload
from lohan.models.load import empty_model
from lohan.planning.workload import UnitKind, Workload
from tests.engine.reference import assert_equal_training, make_batches, make_llama, open_session, train_plain, train_streamed, twin

SIZES = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 100}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, num_key_value_heads=2),
    "llama tied": LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=True),
    "mistral": MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=8),
    "qwen2": Qwen2Config(**SIZES, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=16),
    "phi": PhiConfig(**SIZES, num_key_value_heads=4, bos_token_id=1, eos_token_id=2),
    "gpt2": GPT2Config(
        n_embd=64, n_layer=3, n_head=4, vocab_size=100, bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    ),
}
CHUNKED = {"llama", "llama tied", "mistral", "qwen2", "qwen3"}


def make_model(name):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32).train()


@pytest.mark.parametrize("name", CONFIGS)
def test_units_hold_every_parameter_once(name):
    model = make_model(name)
    units = find_units(model)
    assert [unit.kind for unit in units] == [UnitKind.EMBEDDING, *[UnitKind.BLOCK] * 3, UnitKind.HEAD]
    found = [id(entry.parameter) for unit in units for entry in unit.parameters]
    assert len(found) == len(set(found))
    assert set(found) == {id(parameter) for parameter in model.parameters()}
    for unit in units:
        for entry in unit.parameters:
            assert all(model.get_parameter(alias) is entry.parameter for alias in entry.names)
            assert all(site.module._parameters[site.attribute] is entry.parameter for site in entry.sites)
            assert len(entry.sites) == len(entry.names)


def test_tied_heads_live_with_the_embedding():
    units = find_units(make_model("llama tied"))
    assert [name for name, _ in units[0].modules] == ["model.embed_tokens", "lm_head"]
    assert [entry.names for entry in units[0].parameters] == [("model.embed_tokens.weight", "lm_head.weight")]
    assert [name for name, _ in units[-1].modules] == ["model.norm"]


@pytest.mark.parametrize("name", [name for name in CONFIGS if not name.startswith("llama")])
def test_parity_of_other_families(name, tmp_path):
    """Each family's block takes other arguments, and some have no chunked loss."""
    model = make_model(name)
    plain = train_plain(twin(model), make_batches(5, padded=True))
    assert_equal_training(train_streamed(model, make_batches(5, padded=True), tmp_path), plain)


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_full_logits_are_counted_where_there_is_no_adapter(name, tmp_path):
    model = make_model(name)
    optimizer = torch.optim.AdamW(model.parameters())
    with open_session(model, optimizer, tmp_path) as session:
        output = model(**make_batches(1)[0])
        assert session.statistics.full_logits_fallbacks == (0 if name in CHUNKED else 1)
        assert (output.logits is None) == (name in CHUNKED)


def test_a_model_without_blocks_is_refused():
    with pytest.raises(ModelError, match="ModuleList"):
        find_units(nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4)))


def test_parameters_beside_the_units_are_named():
    model = make_llama()
    model.model.register_parameter("scale", nn.Parameter(torch.ones(3)))
    with pytest.raises(ModelError, match=r"model\.scale"):
        find_units(model)
    model = make_llama()
    model.model.tower = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(2, 2)])})
    with pytest.raises(ModelError, match=r"model\.tower\.blocks\.0\.weight"):
        find_units(model)


def test_weights_shared_between_blocks_are_refused():
    model = make_llama()
    model.model.layers[2].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    with pytest.raises(ModelError, match=r"layers\.0\.mlp\.up_proj\.weight is shared between model\.layers\.0 and model\.layers\.2"):
        find_units(model)


def test_encoders_with_decoders_are_refused(tmp_path):
    model = T5ForConditionalGeneration(T5Config(d_model=32, d_ff=64, num_layers=2, num_heads=2, d_kv=16, vocab_size=100))
    with pytest.raises(ModelError):
        open_session(model, torch.optim.AdamW(model.parameters()), tmp_path)


@pytest.mark.parametrize("name", CONFIGS)
def test_workloads_are_traced_without_weights(name):
    config = CONFIGS[name]
    workload = trace_workload(config)
    assert Workload.model_validate_json(workload.model_dump_json()) == workload
    model = make_model(name)
    assert workload.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert workload.tied_embeddings == (len({id(parameter) for parameter in model.parameters()}) < len(model.state_dict()))
    assert (workload.hidden_size, workload.vocabulary_size) == (64, 100)
    # An upper bound within reason of what autograd saves when the block really runs in bf16.
    measured = _measured_elements_per_token(model.to(torch.bfloat16), length=48)
    assert measured <= workload.block_saved_elements_per_token <= 1.6 * measured


def test_large_models_are_traced_in_no_memory():
    config = LlamaConfig(hidden_size=16384, intermediate_size=53248, num_hidden_layers=126, num_attention_heads=128, num_key_value_heads=8)
    workload = trace_workload(config)
    assert 4e11 < workload.parameters < 4.2e11
    # 8 hidden-sized and 4 intermediate-sized tensors, and norms in fp32: 35 elements per element of the hidden size.
    assert 20 * 16384 < workload.block_saved_elements_per_token < 40 * 16384


def _measured_elements_per_token(model, *, length):
    block = find_units(model)[1].modules[0][1]
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    saved, kept = {}, []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if inside and storage._cdata not in weights:
            saved[storage._cdata] = storage.nbytes()
            kept.append(tensor)
        return tensor

    inside = []
    block.register_forward_pre_hook(lambda *_: inside.append(True) if not inside else None)
    block.register_forward_hook(lambda *_: inside.clear())
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.zeros(1, length, dtype=torch.long), use_cache=False)
    # The block's input is a boundary, which is planned for by itself.
    return sum(saved.values()) / 2 / length


def test_empty_models_have_the_same_units():
    config = CONFIGS["llama tied"]
    names = [[entry.names for entry in unit.parameters] for unit in find_units(empty_model(config))]
    assert names == [[entry.names for entry in unit.parameters] for unit in find_units(make_model("llama tied"))]
