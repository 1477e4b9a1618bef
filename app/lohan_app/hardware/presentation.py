"""A machine's measured figures in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from lohan.units import format_count
from lohan_app.templating import format_seconds

if TYPE_CHECKING:
    from lohan.hardware.profile import BlockTimes, HardwareProfile, Measured

RATE_NAMES = {
    "host_to_device": "RAM to GPU",
    "device_to_host": "GPU to RAM",
    "both_ways": "RAM and GPU, each way while both go on",
    "device_memory": "Copy in the device's memory",
    "host_memory": "Copy in RAM",
    "ssd_read": "State directories read",
    "ssd_write": "State directories written",
    "ssd_mixed": "State directories half read, half written",
    "gradient_norm": "Gradient norm",
    "checksum": "Checksum",
}
"""Fields of `HardwareProfile` in bytes per second."""
STATE_FORMS = {
    "fp32": "fp32 states",
    "split": "split masters",
    "fp32-8bit": "fp32 masters, 8-bit moments",
    "split-8bit": "split masters, 8-bit moments",
}
"""By `lohan.planning.state_form.StateForm`'s values."""
UNSTEADY_SPREAD = 0.5
"""A quiet machine repeats most figures within a tenth; one repetition that was disturbed makes a quarter."""


def describe_profile(profile: HardwareProfile, model_names: Mapping[str, str]) -> dict[str, Any]:
    """What the page shows of a profile: its figures with their spread, and the models that were measured.

    Args:
        model_names: by their workloads' digests; others are shown by that.
    """
    figures = [(name, text, figure) for name, text, figure in _figures(profile)]
    return {
        "device": profile.device,
        "threads": profile.updates[0].threads if profile.updates else None,
        "date": _moment(profile.date),
        "date_text": profile.date,
        "figures": [{"name": name, "text": text, "spread": figure.spread} for name, text, figure in figures],
        "unsteady": [name for name, _, figure in figures if figure.spread > UNSTEADY_SPREAD],
        "blocks": [_block(block, model_names) for block in profile.blocks],
    }


def _figures(profile: HardwareProfile) -> Iterator[tuple[str, str, Measured]]:
    """Name, median in words, and the figure, of all that were measured."""
    for field, name in RATE_NAMES.items():
        figure: Measured | None = getattr(profile, field)
        if figure is not None:
            yield name, f"{figure.value / 1e9:.3g} GB/s", figure
    matmul = profile.matmul_flops_per_second
    yield "Matrix product", f"{matmul.value / 1e12:.3g} TFLOPS", matmul
    for update in profile.updates:
        rate = update.elements_per_second
        yield f"AdamW, {STATE_FORMS.get(update.form, update.form)}", f"{format_count(round(rate.value))} parameters/s", rate
    if profile.commit_seconds is not None:
        yield "Commit of a step", format_seconds(profile.commit_seconds.value), profile.commit_seconds


def _block(block: BlockTimes, model_names: Mapping[str, str]) -> dict[str, Any]:
    return {
        "model": model_names.get(block.workload_digest, block.workload_digest[:12]),
        "precision": block.precision,
        "rows": block.rows,
        "sequence_length": block.sequence_length,
        "forward_seconds": block.forward_seconds.value,
        "backward_seconds": block.backward_seconds.value,
        "spread": max(block.forward_seconds.spread, block.backward_seconds.spread),
    }


def _moment(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None
