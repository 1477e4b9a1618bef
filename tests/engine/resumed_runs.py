"""Small runs whose result shows whether an interruption has changed anything, for the tests of resuming and of crashes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from lohan.config import RunConfig, parse_run_config
from lohan.events import EventReader, EventType
from tests.fixtures.rows import messages_rows, write_jsonl
from tests.fixtures.tiny_model import make_tiny_model

STEPS = 11  # of 4 rows, from 14: three epochs and a bit


def make_config(
    folder: Path,
    *,
    dropout: float = 0.1,
    precision: str = "fp32",
    states: str = "auto",
    durability: str = "step",
    snapshot_minutes: float = 10.0,
    clip_updates: str = "auto",
    ram_state_bytes: int | str = 0,
    chunk_parameters: int | None = None,
    **training: Any,
) -> RunConfig:
    """Rows are shuffled, attention drops a tenth, batches run in micro-batches, and the learning rate moves."""
    if not (folder / "model").exists():
        make_tiny_model(folder / "model")
        settings = json.loads((folder / "model" / "config.json").read_text())
        (folder / "model" / "config.json").write_text(json.dumps(settings | {"attention_dropout": dropout}))
        write_jsonl(folder / "rows.jsonl", messages_rows(14))
    return parse_run_config(
        {
            "model": {"path": folder / "model"},
            "data": {"path": folder / "rows.jsonl"},
            "training": {
                "batch_size": 4, "sequence_length": 64, "max_steps": STEPS, "learning_rate": 2e-3, "warmup_steps": 3, "weight_decay": 0.1,
                "seed": 5, "precision": precision, "evaluation_rows": 4,
            } | training,
            "engine": {"device": "cpu", "micro_batch_size": 3, "threads": 1, "states": states, "durability": durability,
                "snapshot_minutes": snapshot_minutes, "unsafe_filesystems": "allow", "ram_state_bytes": ram_state_bytes,
                "chunk_parameters": chunk_parameters,
                "clip_updates": clip_updates,
            },
            "output": {"directory": folder / "run"},
        },
        place="test",
    )  # fmt: skip


def events_of(config: RunConfig, *types: EventType) -> list[dict[str, Any]]:
    events = EventReader(config.output.directory / "events.jsonl").read()
    return [{"type": event.type, "attempt": event.attempt, **event.fields} for event in events if not types or event.type in types]


def curve_of(config: RunConfig) -> list[tuple[int, float, float, float]]:
    """Step, loss, gradient norm and learning rate, as they stand when all attempts have spoken."""
    curve: dict[int, tuple[int, float, float, float]] = {}
    for event in events_of(config, EventType.STARTED, EventType.STEP):
        if event["type"] == EventType.STARTED:
            curve = {step: point for step, point in curve.items() if step <= event["resumed_step"]}
        else:
            assert event["step"] not in curve
            curve[event["step"]] = (event["step"], event["loss"], event["gradient_norm"], event["learning_rate"])
    return list(curve.values())


def weights_of(config: RunConfig) -> dict[str, torch.Tensor]:
    return load_file(config.output.directory / "export" / "model.safetensors")


def check_equal(config: RunConfig, reference: RunConfig) -> None:
    assert curve_of(config) == curve_of(reference)
    weights, expected = weights_of(config), weights_of(reference)
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        assert torch.equal(weight, expected[name]), name
