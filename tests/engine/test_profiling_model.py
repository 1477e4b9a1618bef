"""Measuring a model's block: which shapes, what becomes of those that do not fit, and what is kept. No timing is asserted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lohan.config import Precision
from lohan.errors import ConfigError
from lohan.hardware.profile import BlockTimes, HardwareProfile
from lohan.models.blocks import trace_workload
from lohan.models.load import load_config
from lohan.profiling import model as model_measurements
from lohan.profiling.model import measure_model
from lohan.profiling.progress import ProfileProgress
from tests.engine.profiles import block_times, figure, machine_facts, machine_profile
from tests.fixtures.tiny_model import make_tiny_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_config(make_tiny_model(tmp_path_factory.mktemp("model")))


class Blocks:
    """Stands in for measuring blocks: counts, and fails where it is told to."""

    def __init__(self, config: Any) -> None:
        self.digest = trace_workload(config).digest
        self.rows: list[int] = []
        self.failures: dict[int, Exception] = {}
        self.seconds = 0.0

    def measure(self, _: Any, *, rows: int, length: int, precision: Precision, on_progress: Any, repetitions: int, **__: Any) -> BlockTimes:
        self.rows.append(rows)
        on_progress(0.5)
        if rows in self.failures:
            raise self.failures[rows]
        self.seconds += 10.0 * rows
        forward = figure(0.01 * rows).model_copy(update={"repetitions": repetitions})
        return block_times(
            workload_digest=self.digest, rows=rows, sequence_length=length, precision=precision.value, forward_seconds=forward
        )


@pytest.fixture
def blocks(config, monkeypatch) -> Blocks:
    made = Blocks(config)
    monkeypatch.setattr(model_measurements, "measure_block", made.measure)
    monkeypatch.setattr(model_measurements.time, "monotonic", lambda: made.seconds)
    return made


def empty_profile() -> HardwareProfile:
    return machine_profile(machine_facts(), blocks=(block_times(workload_digest="another model"),))


def measure(config: Any, *rows: int, profile: HardwareProfile | None = None, **options: Any) -> HardwareProfile:
    values = {"length": 16, "precision": Precision.FP32, "device": CPU, **options}
    return measure_model(profile or empty_profile(), config, rows_list=rows, **values)


def test_a_block_of_a_real_model_is_measured(config):
    told: list[ProfileProgress] = []
    profile = measure(config, 1, 2, repetitions=1, on_progress=told.append)
    assert [(block.rows, block.sequence_length, block.precision) for block in profile.blocks[1:]] == [(1, 16, "fp32"), (2, 16, "fp32")]
    assert profile.blocks[0].workload_digest == "another model"
    workload = trace_workload(config)
    for block in profile.blocks[1:]:
        assert block.workload_digest == workload.digest
        assert set(block.operator_seconds) == {operator.label for operator in workload.operators}
        assert block.head_seconds is not None
    assert HardwareProfile.model_validate_json(profile.model_dump_json()) == profile
    fractions = [one.fraction for one in told]
    assert fractions == sorted(fractions)
    assert (fractions[0], fractions[-1]) == (0.0, 1.0)
    assert told[0].seconds_left is None


def test_a_shape_is_measured_in_place_of_its_earlier_self(config, blocks):
    profile = measure(config, 1, 2)
    again = measure(config, 2, profile=profile, repetitions=9)
    assert [(block.rows, block.forward_seconds.repetitions) for block in again.blocks[1:]] == [(1, 3), (2, 9)]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "2 x 16 tokens: it does not fit into the memory of a GPU"),
        (RuntimeError("no kernel\nand more"), "2 x 16 tokens: the block cannot be computed by itself (no kernel)"),
    ],
    ids=["memory", "kernels"],
)
def test_a_shape_that_cannot_be_measured_is_left_out_with_its_reason(error, reason, config, blocks):
    blocks.failures[2] = error
    told: list[ProfileProgress] = []
    profile = measure(config, 1, 2, 4, on_progress=told.append)
    assert [block.rows for block in profile.blocks[1:]] == [1, 4]
    assert [one.note for one in told if one.note] == [f"Not measured: {reason}."]


def test_a_shape_that_host_memory_cannot_hold_is_not_tried(config, blocks):
    told: list[ProfileProgress] = []
    profile = measure(config, 1, 4096, length=1024, on_progress=told.append, profile=empty_profile())
    assert [block.rows for block in profile.blocks[1:]] == blocks.rows
    huge = measure(config, 1_000_000_000, on_progress=told.append)
    assert huge.blocks == empty_profile().blocks
    assert "free" in told[-2].note


def test_shapes_that_take_too_long_are_left_out(config, blocks):
    told: list[ProfileProgress] = []
    profile = measure(config, 1, 2, 4, 8, most_seconds=75.0, on_progress=told.append)
    assert blocks.rows == [1, 2, 4]
    assert [one.note for one in told if one.note] == [
        "Not measured: 8 x 16 tokens: it would take about 1 min 20 s; `--rows 8` measures it."
    ]
    # What is known of the model counts for the first shape, too.
    assert measure(config, 10_000, profile=profile, most_seconds=75.0).blocks == profile.blocks
    assert blocks.rows == [1, 2, 4]


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize(("rows", "length", "place"), [((), 16, "rows"), ((0,), 16, "rows"), ((1,), 0, "length"), ((1,), 1025, "length")])
def test_a_shape_that_there_is_not_is_refused(rows, length, place, config):
    with pytest.raises(ConfigError) as caught:
        measure(config, *rows, length=length)
    assert caught.value.place == place


def test_what_is_measured_of_a_model_does_not_need_its_weights(tmp_path: Path, blocks):
    folder = make_tiny_model(tmp_path)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    assert len(measure(load_config(folder), 1).blocks) == 2
