"""Measuring a machine with a GPU: its links and its memory. No timing is asserted."""

from __future__ import annotations

import pytest
import torch

from lohan.config import Precision
from lohan.errors import CapacityError
from lohan.hardware.probe import probe
from lohan.hardware.profile_files import facts_of_device
from lohan.models.load import load_config
from lohan.profiling import device as device_measurements
from lohan.profiling.device import measure_copies, measure_device_memory, measure_matmul
from lohan.profiling.machine import measure_machine
from lohan.profiling.model import measure_model
from lohan.profiling.progress import ProfileProgress
from lohan.profiling.timing import QUICK
from lohan.units import GIB, MIB
from tests.engine.profiles import machine_profile
from tests.fixtures.tiny_model import make_tiny_model

pytestmark = pytest.mark.gpu


@pytest.fixture
def gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def test_every_figure_of_a_machine_with_a_gpu_is_measured(gpu, tmp_path):
    facts = facts_of_device(probe([tmp_path]), f"GPU-{torch.cuda.get_device_properties(gpu).uuid}")
    assert len(facts.gpus) == 1
    profile = measure_machine(facts, device=gpu, state_directories=[tmp_path], effort=QUICK)
    assert [name for name, value in profile if value is None] == []
    assert profile.device == torch.cuda.get_device_name(gpu)
    assert profile.fingerprint == facts.digest
    assert profile.device_memory != profile.host_memory
    assert list(tmp_path.iterdir()) == []


def test_both_ways_copies_what_each_way_copies(gpu):
    for figure in measure_copies(gpu, QUICK, free_host_bytes=8 * GIB):
        assert figure.value > 0
        assert figure.repetitions >= QUICK.repetitions


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gpu_multiplies_in_either_type(gpu, dtype):
    assert measure_matmul(gpu, dtype, QUICK).value > 0


def test_a_full_gpu_is_told_from_a_slow_one(gpu, monkeypatch):
    monkeypatch.setattr(device_measurements.torch.cuda, "mem_get_info", lambda _: (MIB // 4, 24 * GIB))
    for measure in (
        lambda: measure_device_memory(gpu, QUICK),
        lambda: measure_copies(gpu, QUICK, free_host_bytes=8 * GIB),
        lambda: measure_matmul(gpu, torch.bfloat16, QUICK),
    ):
        with pytest.raises(CapacityError, match="are free"):
            measure()


def test_a_block_is_measured_on_a_gpu_and_what_does_not_fit_is_left_out(gpu, tmp_path):
    facts = facts_of_device(probe([tmp_path]), f"GPU-{torch.cuda.get_device_properties(gpu).uuid}")
    config = load_config(make_tiny_model(tmp_path / "model"))
    profile = machine_profile(facts, blocks=())
    told: list[ProfileProgress] = []
    options = {"length": 1024, "precision": Precision.BF16, "device": gpu, "repetitions": 1, "on_progress": told.append}
    measured = measure_model(profile, config, rows_list=[2, 100_000_000], **options)
    assert [(block.rows, block.precision) for block in measured.blocks] == [(2, "bf16")]
    assert "does not fit" in next(one.note for one in told if one.note)
