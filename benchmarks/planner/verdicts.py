"""What step records say about the planner: pure functions of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from lohan.bench.records import Record
from lohan.config import ActivationPolicy, Clip

Setting = tuple[str, int, int, str]
"""Shape, rows, tokens of a row, and where the states lie."""


def measured(records: Iterable[Record]) -> list[Record]:
    """Those that are no reasons why there is nothing."""
    return [record for record in records if "skipped" not in record]


def setting_of(record: Record) -> Setting:
    return (record["shape"], record["batch"], record["sequence"], record["states_tier"])


@dataclass(frozen=True)
class Prediction:
    """One setting's forecast beside what was measured; errors are (forecast - measured) / measured."""

    setting: Setting
    predicted_seconds: float
    measured_seconds: float
    binding: str
    gpu_bytes_error: float | None
    """Of the plan's figure; None on a CPU."""
    host_bytes_error: float

    @property
    def seconds_error(self) -> float:
        return self.predicted_seconds / self.measured_seconds - 1


def predictions(records: Iterable[Record]) -> list[Prediction]:
    """Of every measured record that has a forecast."""
    return [
        Prediction(
            setting_of(record),
            record["predicted_step_seconds"],
            record["step_seconds"],
            str(record["predicted_binding"]),
            _error(record["plan_gpu_bytes"], record["gpu_peak_bytes"]),
            record["plan_host_bytes"] / record["host_peak_bytes"] - 1,
        )
        for record in measured(records)
        if record["predicted_step_seconds"]
    ]


def _error(planned: float | None, taken: float | None) -> float | None:
    return planned / taken - 1 if planned and taken else None


def summary(found: Sequence[Prediction]) -> dict[str, float]:
    """Median and worst sizes of the errors; `found` is not empty."""
    seconds = [abs(one.seconds_error) for one in found]
    host = [abs(one.host_bytes_error) for one in found]
    gpu = [abs(one.gpu_bytes_error) for one in found if one.gpu_bytes_error is not None]
    return {
        "settings": len({one.setting for one in found}),
        "seconds_median": median(seconds),
        "seconds_worst": max(seconds),
        "host_bytes_worst": max(host),
        **({"gpu_bytes_worst": max(gpu)} if gpu else {}),
    }


@dataclass(frozen=True)
class OfPeak:
    """A whole step beside its block alone."""

    setting: Setting
    states: str
    max_norm: float
    clip_rate: float
    """Of the steps, what was clipped."""
    seconds: float
    predicted_seconds: float
    fraction: float
    """Of the TFLOPS of one block with the same rows and kernels."""


def of_peak(records: Iterable[Record]) -> list[OfPeak]:
    """Of every measured record whose gradients were clipped to a common norm."""
    found = [record for record in measured(records) if record["clip"] == Clip.GLOBAL]
    fields = ("states", "max_norm", "clip_rate", "step_seconds", "predicted_step_seconds", "fraction_of_peak")
    return [OfPeak(setting_of(record), *(record[name] for name in fields)) for record in found]


@dataclass(frozen=True)
class Sweep:
    """A setting's steps with forced amounts of swapped activations, and with the planner's choice."""

    setting: Setting
    swapped_bytes: tuple[int, ...]
    seconds: tuple[float, ...]
    predicted_seconds: tuple[float, ...]
    """Of the same amounts."""
    chosen_bytes: int
    """That leave the device by the planner's choice."""
    chosen_seconds: float

    @property
    def behind_best(self) -> float:
        """How much longer the choice takes than the fastest of all, as a fraction; never below 0."""
        return self.chosen_seconds / min((*self.seconds, self.chosen_seconds)) - 1


def sweeps(records: Iterable[Record]) -> list[Sweep]:
    """Of each setting that was measured both ways."""
    by_setting: dict[Setting, list[Record]] = defaultdict(list)
    for record in measured(records):
        if record["policy"] == ActivationPolicy.HOLISTIC and record["predicted_step_seconds"]:
            by_setting[setting_of(record)].append(record)
    found = []
    for setting, group in by_setting.items():
        chosen = [record for record in group if record["swapped_activation_bytes"] is None]
        forced = sorted(
            (record for record in group if record["swapped_activation_bytes"] is not None),
            key=lambda record: int(record["swapped_activation_bytes"]),
        )
        if not chosen or not forced:
            continue
        found.append(
            Sweep(
                setting,
                tuple(record["swapped_activation_bytes"] for record in forced),
                tuple(record["step_seconds"] for record in forced),
                tuple(record["predicted_step_seconds"] for record in forced),
                _off_device(chosen[-1]),
                chosen[-1]["step_seconds"],
            )
        )
    return found


def _off_device(record: Record) -> int:
    return sum(size for tier, size in record["kept_activation_bytes"].items() if tier != "gpu")


@dataclass(frozen=True)
class Ablation:
    """All policies under one bound of host memory for activations."""

    setting: Setting
    ram_bytes: int
    seconds: dict[str, float]
    """By policy; those that ran."""
    refused: dict[str, str]
    """By policy: why it did not."""

    @property
    def ahead(self) -> float | None:
        """How much less time than the best other policy the planner's takes, as a fraction of its own: negative where it is behind."""
        others = [seconds for policy, seconds in self.seconds.items() if policy != ActivationPolicy.HOLISTIC]
        own = self.seconds.get(ActivationPolicy.HOLISTIC)
        return min(others) / own - 1 if own and others else None


def ablations(records: Iterable[Record]) -> list[Ablation]:
    """Of each setting and bound that several policies were tried with."""
    grouped: dict[tuple[Setting, int], list[Record]] = defaultdict(list)
    for record in records:
        if record["activation_ram_bytes"] is not None and record["swapped_activation_bytes"] is None:
            grouped[setting_of(record), record["activation_ram_bytes"]].append(record)
    return [
        Ablation(
            setting,
            ram_bytes,
            {record["policy"]: record["step_seconds"] for record in measured(group)},
            {record["policy"]: record["skipped"] for record in group if "skipped" in record},
        )
        for (setting, ram_bytes), group in grouped.items()
        if len({record["policy"] for record in group}) > 1
    ]
