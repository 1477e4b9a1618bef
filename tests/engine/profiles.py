"""Profiles that tests share: figures that nobody measured."""

from __future__ import annotations

from lohan.hardware.probe import CpuFacts, GpuFacts, HardwareFacts, RamFacts, StateDirectoryFacts
from lohan.hardware.profile import BlockTimes, HardwareProfile, Measured, UpdateRate
from lohan.units import GIB


def machine_facts(*, gpus: int = 1, drives: int = 1) -> HardwareFacts:
    return HardwareFacts(
        cpu=CpuFacts(name="a processor", cores=8, usable_cores=8),
        ram=RamFacts(total_bytes=64 * GIB, free_bytes=60 * GIB),
        gpus=tuple(
            GpuFacts(uuid=f"GPU-{index}", index=index, name="a GPU", total_bytes=24 * GIB, free_bytes=24 * GIB) for index in range(gpus)
        ),
        state_directories=tuple(
            StateDirectoryFacts(
                path=f"/drive{drive}",
                filesystem="ext4",
                drive=str(drive),
                total_bytes=1000 * GIB,
                free_bytes=900 * GIB,
                direct_io=True,
            )
            for drive in range(drives)
        ),
    )


def block_times(**changes: object) -> BlockTimes:
    values: dict = {"workload_digest": "a model", "kernels": "torch", "precision": "bf16", "rows": 2, "sequence_length": 128}
    values |= {"forward_seconds": figure(0.01), "backward_seconds": figure(0.02), "operator_seconds": {"q_proj.mm": 0.001}}
    return BlockTimes(**(values | changes))


def machine_profile(facts: HardwareFacts, **changes: object) -> HardwareProfile:
    """Measured thoroughly, with a figure of everything."""
    values: dict = {
        "fingerprint": facts.digest,
        "date": "2026-11-30T12:00:00+00:00",
        "device": "a GPU",
        "host_to_device": figure(25e9),
        "device_to_host": figure(26e9),
        "both_ways": figure(20e9),
        "device_memory": figure(900e9),
        "matmul_flops_per_second": figure(150e12),
        "host_memory": figure(60e9),
        "ssd_read": figure(6e9),
        "ssd_write": figure(3e9),
        "ssd_mixed": figure(4e9),
        "commit_seconds": figure(0.002),
        "updates": (UpdateRate(form="split", threads=8, elements_per_second=figure(2e9)),),
        "gradient_norm": figure(30e9),
        "checksum": figure(20e9),
        "blocks": (block_times(),),
    }
    return HardwareProfile(**(values | changes))


def figure(value: float) -> Measured:
    return Measured(value=value, spread=0.05, repetitions=5)
