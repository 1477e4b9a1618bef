"""An answer on a GPU: in bf16, within the memory that was reserved for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.tiny_model import make_tiny_model
from safetensors import safe_open

from lohan.cli.chat import _carry_out as carry_out_chat
from lohan.data.conversation import Conversation
from lohan.events import EventReader, EventType, ExitReason
from lohan.planning.answer_memory import answer_memory, most_tokens, read_config, shape_of
from lohan.planning.footprint import GPU_RESERVE_BYTES
from lohan.units import MIB

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def whole_gpu() -> Iterator[None]:
    """What a test may take of it is a setting of the process."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = make_tiny_model(tmp_path / "model", layers=4, hidden_size=512)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    return folder


CONVERSATION = Conversation.model_validate(
    {"messages": [{"role": "user", "content": "What is an SSD? " * 100}], "max_new_tokens": 64, "temperature": 0}
)


def ask(folder: Path, place: Path, gpu_memory_bytes: int) -> tuple[ExitReason, dict[str, dict[str, Any]]]:
    reason = carry_out_chat(folder, CONVERSATION, place, None, None, device="cuda", gpu_memory_bytes=gpu_memory_bytes)
    return reason, {event.type: event.fields for event in EventReader(place / "events.jsonl").read()}


def test_an_answer_stays_within_what_it_reserves(folder: Path, tmp_path: Path) -> None:
    with safe_open(folder / "model.safetensors", framework="pt") as weights:
        parameters = sum(weights.get_tensor(name).numel() for name in weights.keys())  # noqa: SIM118 - a handle, not a dict
    shape = shape_of(read_config(folder), parameters=parameters, largest_parameters=parameters, place="")
    tokens = most_tokens(shape, size_bytes=CONVERSATION.size_bytes, messages=1, max_new_tokens=64)
    reserved = answer_memory(shape, tokens, on_gpu=True).gpu_bytes
    before = torch.cuda.memory_reserved()
    reason, events = ask(folder, tmp_path / "chat", reserved)
    assert reason is ExitReason.SUCCEEDED, events
    assert events[EventType.STARTED]["precision"] == "bf16"
    assert events[EventType.ANSWER]["prompt_tokens"] > 512, "read in parts"
    assert torch.cuda.max_memory_reserved() - before <= reserved - GPU_RESERVE_BYTES // 2


def test_a_gpu_that_gives_too_little_is_told_as_such(folder: Path, tmp_path: Path) -> None:
    reason, events = ask(folder, tmp_path / "chat", GPU_RESERVE_BYTES // 2 + MIB)
    assert (reason, events[EventType.EXIT]["error"]["cause"]) == (ExitReason.FAILED, "gpu_memory")
