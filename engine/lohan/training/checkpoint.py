"""What a step boundary holds besides the model states and the optimizer's counts: all that the next step depends on, as JSON-ready data.

It is captured when a step has ended and before the next forward begins, so that no random number of the next step has been drawn. The
trainer and the models it runs draw from torch's generators alone (Python's and NumPy's are not used), and the order of the rows is a
function of (seed, step), so that a position is two numbers.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Mapping
from typing import Any, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lohan.config import TrainingSection, UnitGrain
from lohan.data.pack import DataPosition
from lohan.errors import ResumeError

PAYLOAD_VERSION = 1
PAYLOAD_KEY = "training"
"""Under it a step's record holds the trainer's part; the optimizer keeps its own beside it."""
BEGIN_AGAIN = "To begin again from the base model instead, remove the run's state directories."
_FREE_SETTINGS = frozenset({"evaluation_rows", "keep_steps"})  # beside the training, which they do not change


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class RandomStates(_Part):
    """torch's generators, each state as base64."""

    cpu: str
    cuda: str | None = None
    """Of the run's GPU; None where it runs on the CPU."""

    @classmethod
    def capture(cls, device: torch.device) -> Self:
        """Of the CPU's generator, and of `device`'s where that is a GPU."""
        return cls(cpu=_encode(torch.get_rng_state()), cuda=_encode(torch.cuda.get_rng_state(device)) if device.type == "cuda" else None)

    def restore(self, device: torch.device) -> None:
        """Set the generators; a GPU's state is left out where the run has moved to a CPU, and the other way round.

        Raises:
            ResumeError: these are no states of torch's generators.
        """
        try:
            torch.set_rng_state(_decode(self.cpu))
            if self.cuda is not None and device.type == "cuda":
                torch.cuda.set_rng_state(_decode(self.cuda), device)
        except (binascii.Error, RuntimeError, ValueError) as error:
            raise ResumeError(
                f"the generators' states cannot be set: {error}",
                place="random",
                remedy=f"Use the version of torch that the run was started with. {BEGIN_AGAIN}",
            ) from error

    def fits(self, device: torch.device) -> bool:
        """Whether all generators that a run on `device` draws from are among them."""
        return self.cuda is not None or device.type != "cuda"


class SchedulerState(_Part):
    """A learning-rate scheduler and what it has set in its optimizer's param groups."""

    state: dict[str, Any]
    learning_rates: tuple[float, ...]

    @classmethod
    def capture(cls, scheduler: torch.optim.lr_scheduler.LRScheduler) -> Self:
        rates = tuple(float(group["lr"]) for group in scheduler.optimizer.param_groups)
        return cls(state=scheduler.state_dict(), learning_rates=rates)

    def restore(self, scheduler: torch.optim.lr_scheduler.LRScheduler) -> None:
        """Set the scheduler and its optimizer's learning rates.

        Raises:
            ResumeError: the optimizer has another number of param groups.
        """
        groups = scheduler.optimizer.param_groups
        if len(groups) != len(self.learning_rates):
            raise ResumeError(
                f"the record has {len(self.learning_rates)} param groups, the optimizer has {len(groups)}",
                place="scheduler.learning_rates",
                remedy=BEGIN_AGAIN,
            )
        scheduler.load_state_dict(self.state)
        for group, rate in zip(groups, self.learning_rates, strict=True):
            group["lr"] = rate


class Checkpoint(_Part):
    """One step boundary."""

    version: int = PAYLOAD_VERSION
    step: int = Field(ge=0)
    """Steps done."""
    total_steps: int
    training: dict[str, Any]
    """The run's `TrainingSection`."""
    micro_batch_size: int
    """Another one adds gradients in another order, hence rounds otherwise."""
    grain: UnitGrain
    """The states are laid out by it."""
    chunk_parameters: int
    """The states are cut by it."""
    data_digest: str
    """`TokenRows.digest`."""
    data: DataPosition
    random: RandomStates
    scheduler: SchedulerState
    tokens_seen: int
    evaluation_seconds: float
    """What measuring the loss before the first step took: so long it will take again after the last."""
    metrics: dict[str, float | None]
    """Of the step, by name as in its event; what is not finite is None."""
    torch_version: str = torch.__version__

    def to_payload(self) -> dict[str, Any]:
        """As JSON-ready data for `Session.commit`."""
        return {PAYLOAD_KEY: self.model_dump(mode="json")}

    @classmethod
    def from_payload(cls, payload: Mapping[str, Any]) -> Self:
        """Read what `to_payload` made.

        Raises:
            ResumeError: another version wrote it, or fields are missing or wrong.
        """
        values = payload.get(PAYLOAD_KEY, {})
        version = values.get("version")
        if version != PAYLOAD_VERSION:
            raise ResumeError(
                f"the step record is of version {version!r}, this program reads version {PAYLOAD_VERSION}",
                place="version",
                remedy=f"Resume the run with the version of LoHan that it was started with. {BEGIN_AGAIN}",
            )
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            faults = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
            raise ResumeError(f"the step record cannot be used: {faults}", remedy=BEGIN_AGAIN) from error

    def check(self, training: TrainingSection, *, total_steps: int, data_digest: str, position: DataPosition) -> None:
        """See that a run with these settings and data is the one that this boundary belongs to; `position` is its data's after `step`.

        Raises:
            ResumeError: it is another one; every difference is named.
        """
        differences = self.differences(training)
        if total_steps != self.total_steps:
            differences.append(f"the run has {total_steps} steps, before it had {self.total_steps}")
        if data_digest != self.data_digest or position != self.data:
            differences.append("the rows are others than before")
        if differences:
            raise ResumeError(
                f"the run cannot be resumed from step {self.step}: {'; '.join(differences)}",
                remedy=f"Put it back as it was. {BEGIN_AGAIN}",
            )

    def differences(self, training: TrainingSection) -> list[str]:
        """The settings that change the training and are others than they were."""
        now = training.model_dump(mode="json")
        names = sorted((now.keys() | self.training.keys()) - _FREE_SETTINGS)
        return [
            f"training.{name} is {now.get(name)!r}, before it was {self.training.get(name)!r}"
            for name in names
            if now.get(name) != self.training.get(name)
        ]


def finite_metrics(**values: float | None) -> dict[str, float | None]:
    """Numbers by name; what is not finite, which JSON has no word for, becomes None."""
    return {name: value if value is not None and math.isfinite(value) else None for name, value in values.items()}


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)
