"""What is read from the user's `torch.optim.AdamW`: its param groups' values, and how many updates each parameter has had."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lohan._native import AdamSegment
from lohan.errors import EngineError

if TYPE_CHECKING:
    from lohan.states.layout import UnitLayout


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """One param group's values, as they were when the backward began."""

    learning_rate: float
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float


def read_groups(optimizer: torch.optim.Optimizer) -> list[Hyperparameters]:
    """The groups' current values; a tensor learning rate is read."""
    return [
        Hyperparameters(
            float(group["lr"]), float(group["betas"][0]), float(group["betas"][1]), float(group["eps"]), float(group["weight_decay"])
        )
        for group in optimizer.param_groups
    ]


class StepCounts:
    """Updates each parameter has had: one that gets no gradient in a step keeps its count, as in torch.optim."""

    def __init__(self, layouts: Sequence[UnitLayout], group_of: Sequence[Sequence[int | None]]) -> None:
        """`group_of[unit][parameter]` is the parameter's param group, None where it is frozen."""
        self._counts = [[0] * len(layout.parameters) for layout in layouts]
        self._group_of = group_of

    @property
    def values(self) -> tuple[tuple[int, ...], ...]:
        """The counts by unit and parameter."""
        return tuple(tuple(unit) for unit in self._counts)

    def restore(self, values: Sequence[Sequence[int]]) -> None:
        """Go on from what `values` was.

        Raises:
            EngineError: they are those of another model.
        """
        if [len(unit) for unit in values] != [len(unit) for unit in self._counts]:
            raise EngineError(
                f"step counts of {sum(map(len, values))} parameters in {len(values)} units,"
                f" the model has {sum(map(len, self._counts))} in {len(self._counts)}",
                place="step_counts",
                remedy="Resume with the model and the trainable parameters that the run was started with.",
            )
        self._counts = [list(unit) for unit in values]

    def advance(self, layout: UnitLayout, touched: frozenset[int], groups: Sequence[Hyperparameters]) -> dict[int, list[AdamSegment]]:
        """Count one update of the `touched` parameters and return its segments per chunk."""
        counts = self._counts[layout.index]
        for parameter in touched:
            counts[parameter] += 1
        segments: dict[int, list[AdamSegment]] = {}
        for chunk in layout.chunks:
            for piece in layout.pieces(chunk):
                if piece.parameter in touched:
                    group = self._group_of[layout.index][piece.parameter]
                    assert group is not None, "a frozen parameter has no gradient"
                    values = groups[group]
                    segments.setdefault(chunk.index, []).append(
                        AdamSegment(
                            piece.offset,
                            piece.length,
                            values.learning_rate,
                            values.beta1,
                            values.beta2,
                            values.epsilon,
                            values.weight_decay,
                            counts[piece.parameter],
                        )
                    )
        return segments


def check_optimizer(optimizer: Any, trainable: Sequence[tuple[str, torch.nn.Parameter]], known: Sequence[torch.nn.Parameter]) -> list[int]:
    """See that `optimizer` is one the engine computes exactly, and find the param group of each trainable parameter.

    Args:
        trainable: (name, parameter) of all that get updated.
        known: all parameters of the model, frozen ones too.

    Returns:
        One group index per entry of `trainable`.

    Raises:
        EngineError: another class or option, a used optimizer, an unknown parameter, or one that is missing.
    """
    if type(optimizer) is not torch.optim.AdamW:
        raise EngineError(
            f"the optimizer is {type(optimizer).__name__}, expected torch.optim.AdamW itself", remedy="Pass a torch.optim.AdamW."
        )
    if optimizer.state:
        raise EngineError(
            "the optimizer has already made steps", remedy="Pass a new torch.optim.AdamW; its states are kept in the state store."
        )
    model_ids = {id(parameter) for parameter in known}
    group_of: dict[int, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        for option in ("amsgrad", "maximize", "capturable", "differentiable"):
            if group.get(option):
                raise EngineError(
                    f"param group {index} sets {option}, which is not supported", remedy=f"Make the optimizer without {option}."
                )
        for parameter in group["params"]:
            if id(parameter) not in model_ids:
                raise EngineError(
                    f"param group {index} holds a parameter of shape {tuple(parameter.shape)} that is not in the model",
                    remedy="Make the optimizer from this model's parameters, after the last change to the model.",
                )
            group_of[id(parameter)] = index
    for name, parameter in trainable:
        if id(parameter) not in group_of:
            raise EngineError(
                f"parameter {name} requires grad but is in no param group",
                place=name,
                remedy="Add it to the optimizer, or freeze it with requires_grad_(False).",
            )
    return [group_of[id(parameter)] for _, parameter in trainable]
