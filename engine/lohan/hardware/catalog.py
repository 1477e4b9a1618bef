"""Named machines: what they have and how fast they are by published figures, for plans on a machine that one does not have.

All are the server of the LoHan paper (arXiv 2403.06504, evaluation: two Xeon Gold 5320, 768 GB, twelve Intel P5510 of 3.84 TB, PCIe 4)
with the three GPUs it was tried with. A data sheet's figure is what a device reaches at most: what a run reaches is less, and a profile
that was measured goes before one from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lohan.hardware.probe import CpuFacts, GpuFacts, HardwareFacts, RamFacts, StateDirectoryFacts
from lohan.hardware.profile import HardwareProfile, Measured, UpdateRate
from lohan.units import GIB, MIB


@dataclass(frozen=True)
class NamedMachine:
    """A machine as plans need it. What is free is all there is."""

    name: str
    """What it is asked for by."""
    description: str
    facts: HardwareFacts
    profile: HardwareProfile
    """Its figures have one repetition and no spread: they were read, not measured. It has no blocks."""


@dataclass(frozen=True)
class _Gpu:
    name: str
    memory_bytes: int
    """As the driver counts it."""
    matmul_flops_per_second: float
    """Of bf16 with fp32 sums, dense."""
    memory_bytes_per_second: float


# NVIDIA Ada GPU architecture whitepaper, appendix A: "Peak BF16 Tensor TFLOPS with FP32 Accumulate" 165.2, memory bandwidth 1008 GB/sec.
# nvidia-smi shows 24564 MiB.
_RTX_4090 = _Gpu("NVIDIA GeForce RTX 4090", 24564 * MIB, 165.2e12, 1008e9)
# The same whitepaper, RTX 4080 (16 GB): 97.5 TFLOPS, 716.8 GB/sec. nvidia-smi shows 16376 MiB.
_RTX_4080 = _Gpu("NVIDIA GeForce RTX 4080", 16376 * MIB, 97.5e12, 716.8e9)
# NVIDIA Ampere GA102 GPU architecture whitepaper, appendix A: 71 TFLOPS, 936 GB/sec. nvidia-smi shows 24576 MiB.
_RTX_3090 = _Gpu("NVIDIA GeForce RTX 3090", 24576 * MIB, 71e12, 936e9)

# The paper's breakdown of a 13B step at batch 32: 213 GB of activations go to the host in 10 s of PCIe. (PCIe 4.0 x16 itself: 31.5 GB/s.)
_ONE_WAY_BYTES_PER_SECOND: Final = 213e9 / 10
# The paper on G10's optimizer, whose states go both ways at once: 182 GB each way in 13 s.
_BOTH_WAYS_BYTES_PER_SECOND: Final = 182e9 / 13
# Intel's data sheet of the Xeon Gold 5320: 26 cores, 52 threads, 8 channels of DDR4-2933 in each of the two sockets.
_THREADS: Final = 2 * 52
_DRAM_PEAK_BYTES_PER_SECOND: Final = 2 * 8 * 8 * 2933e6
# Not published: copies reach about four fifths of the peak on such machines (STREAM).
_HOST_BYTES_PER_SECOND: Final = 0.8 * _DRAM_PEAK_BYTES_PER_SECOND
# Solidigm (then Intel) D7-P5510, 3.84 TB, product brief: 128 KiB sequential reads up to 6500 MB/s, writes up to 3400 MB/s.
_DRIVES: Final = 12
_DRIVE_BYTES: Final = 3_840_000_000_000
_DRIVE_READ_BYTES_PER_SECOND: Final = 6.5e9
_DRIVE_WRITE_BYTES_PER_SECOND: Final = 3.4e9
# Half and half: each half takes the time it takes alone.
_DRIVE_MIXED_BYTES_PER_SECOND: Final = 2 / (1 / _DRIVE_READ_BYTES_PER_SECOND + 1 / _DRIVE_WRITE_BYTES_PER_SECOND)
# What AdamW reads and writes for a parameter, by form (`lohan bench adam`): gradients of 2 or 4 bytes read, the states read and written.
# As many threads are held back by memory alone: elements a second are derived from it.
_UPDATE_BYTES: Final = {"fp32": 4 + 24, "split": 2 + 24, "fp32-8bit": 4 + 12.0625, "split-8bit": 2 + 12.0625}
# When the figures above were read.
_DATE: Final = "2026-11-30T00:00:00+00:00"


def _figure(value: float) -> Measured:
    return Measured(value=value)


def _paper_server(name: str, gpu: _Gpu) -> NamedMachine:
    facts = HardwareFacts(
        # Ice Lake has no instructions for bf16.
        cpu=CpuFacts(name="Intel(R) Xeon(R) Gold 5320 CPU @ 2.20GHz", cores=_THREADS, usable_cores=_THREADS, multiplies_bf16=False),
        ram=RamFacts(total_bytes=768 * GIB, free_bytes=768 * GIB),
        gpus=(GpuFacts(uuid=f"catalog:{name}", index=0, name=gpu.name, total_bytes=gpu.memory_bytes, free_bytes=gpu.memory_bytes),),
        state_directories=tuple(
            StateDirectoryFacts(
                path=f"/nvme{drive}",
                filesystem="ext4",
                drive=f"nvme{drive}",
                total_bytes=_DRIVE_BYTES,
                free_bytes=_DRIVE_BYTES,
                direct_io=True,
            )
            for drive in range(_DRIVES)
        ),
        notes=("This machine was not looked at: its figures are published ones.",),
    )
    profile = HardwareProfile(
        fingerprint=facts.digest,
        date=_DATE,
        device=gpu.name,
        host_to_device=_figure(_ONE_WAY_BYTES_PER_SECOND),
        device_to_host=_figure(_ONE_WAY_BYTES_PER_SECOND),
        both_ways=_figure(_BOTH_WAYS_BYTES_PER_SECOND),
        device_memory=_figure(gpu.memory_bytes_per_second),
        matmul_flops_per_second=_figure(gpu.matmul_flops_per_second),
        host_memory=_figure(_HOST_BYTES_PER_SECOND),
        ssd_read=_figure(_DRIVES * _DRIVE_READ_BYTES_PER_SECOND),
        ssd_write=_figure(_DRIVES * _DRIVE_WRITE_BYTES_PER_SECOND),
        ssd_mixed=_figure(_DRIVES * _DRIVE_MIXED_BYTES_PER_SECOND),
        updates=tuple(
            UpdateRate(form=form, threads=_THREADS, elements_per_second=_figure(_HOST_BYTES_PER_SECOND / size))
            for form, size in _UPDATE_BYTES.items()
        ),
        # Both read what they are given once.
        gradient_norm=_figure(_HOST_BYTES_PER_SECOND),
        checksum=_figure(_HOST_BYTES_PER_SECOND),
    )
    return NamedMachine(name, f"{gpu.name} in the LoHan paper's server: 768 GB of RAM, {_DRIVES} NVMe drives", facts, profile)


NAMED_MACHINES: Final = {
    machine.name: machine
    for machine in (_paper_server("rtx-4090", _RTX_4090), _paper_server("rtx-3090", _RTX_3090), _paper_server("rtx-4080", _RTX_4080))
}
"""By name. Commits have no published figure."""
