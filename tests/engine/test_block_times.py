"""A block's and a head's times: that all parts are there, and that only one block is made. No test looks at how long anything took."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, LlamaConfig

from lohan.config import KernelSet, Precision
from lohan.errors import ConfigError
from lohan.hardware.profile import BlockTimes
from lohan.models.block_times import measure_block
from lohan.models.blocks import trace_workload

SIZES = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 100}
LLAMA = LlamaConfig(**SIZES, num_key_value_heads=2)
CONFIGS = {
    "llama": LLAMA,
    "llama tied": LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=True),
    "gpt2": GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=100, bos_token_id=0, eos_token_id=0),
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CONFIGS)
def test_all_parts_are_timed(name, device, precision):
    shares = []
    options = {"rows": 2, "length": 24, "precision": precision, "device": torch.device(device), "repetitions": 2}
    times = measure_block(CONFIGS[name], **options, on_progress=shares.append)
    assert BlockTimes.model_validate_json(times.model_dump_json()) == times
    workload = trace_workload(CONFIGS[name])
    assert times.workload_digest == workload.digest
    assert (times.kernels, times.precision, times.rows, times.sequence_length) == ("torch", precision, 2, 24)
    for part in (times.forward_seconds, times.backward_seconds, times.head_seconds):
        assert part.value > 0
        assert part.repetitions == 2
    launches = (times.forward_launch_seconds, times.backward_launch_seconds)
    assert [part is not None and part.value > 0 for part in launches] == [device == "cuda"] * 2
    absent = {
        "_to_copy": precision is Precision.FP32,  # nothing is cast
        "native_dropout": device == "cpu",  # there dropout is several operators
        "attn:attention": device == "cpu" and name == "gpt2",  # no kernel of a CPU drops anything
        # and none of a GPU has grouped attention in fp32
        "self_attn:attention": device == "cuda" and precision is Precision.FP32,
    }
    assert list(times.operator_seconds) == [operator.label for operator in workload.operators]
    for label, seconds in times.operator_seconds.items():
        assert (seconds > 0) == (not any(text in label for text, is_absent in absent.items() if is_absent)), label
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_other_kernels_are_refused():
    with pytest.raises(ConfigError, match="liger"):
        measure_block(LLAMA, rows=1, length=8, precision=Precision.FP32, device=torch.device("cpu"), kernels=KernelSet.LIGER)
