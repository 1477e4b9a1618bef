"""Checks a model and its optimizer, lays the units out, and puts the engine in place of forwards, parameters and `optimizer.step`.

Everything here that can refuse does so before anything is changed.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lohan.config import KernelSet
from lohan.errors import EngineError, ModelError
from lohan.planning.operations import Recompute, Visit
from lohan.planning.workload import UnitKind
from lohan.states.layout import ParameterSpecification, layout_unit
from lohan.streaming.activations import BlockForward, PartForward, RootForward, is_plain_embedding, is_token_wise
from lohan.streaming.hyperparameters import check_optimizer
from lohan.streaming.loss_head import ModelForward
from lohan.streaming.placeholders import guard, make_placeholder
from lohan.streaming.regions import RegionRunner, UnitRuntime

if TYPE_CHECKING:
    from lohan.models.blocks import Unit
    from lohan.models.weights import WeightSource
    from lohan.states.state_store import StateStore


def check_model(model: nn.Module, units: Sequence[Unit]) -> None:
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ModelError("the model has an encoder and a decoder", place=type(model).__name__, remedy="Use a decoder-only model.")
    entries = [entry for unit in units for entry in unit.parameters]
    first = entries[0]
    for entry in entries:
        if entry.parameter.is_meta:
            raise EngineError(
                f"parameter {entry.name} is on the meta device",
                place=entry.name,
                remedy="Build the model with lohan.empty_model before making the optimizer, and pass weights.",
            )
        if entry.parameter.dtype != first.parameter.dtype or not entry.parameter.is_floating_point():
            raise EngineError(
                f"parameter {entry.name} is {entry.parameter.dtype}, but {first.name} is {first.parameter.dtype}",
                place=entry.name,
                remedy="Load the model with one floating-point dtype.",
            )
    if not any(entry.parameter.requires_grad for entry in entries):
        raise EngineError("no parameter requires grad", remedy="Leave at least one parameter trainable.")


def check_weights(model: nn.Module, units: Sequence[Unit], weights: WeightSource | None) -> None:
    """See that `weights`, or else the model, has a value for every parameter."""
    if weights is not None:
        weights.check(model)
        return
    for entry in (entry for unit in units for entry in unit.parameters):
        if entry.parameter.numel() > 1 and not any(entry.parameter.stride()):
            raise EngineError(
                f"parameter {entry.name} is a placeholder without values",
                place=entry.name,
                remedy="Pass weights=lohan.models.load.open_weights(folder).",
            )


def lay_out(units: Sequence[Unit], optimizer: Any, chunk_parameters: int) -> tuple[list[UnitRuntime], list[list[int | None]]]:
    """Each unit's layout, and the param group of each of its parameters (None: frozen)."""
    entries = [entry for unit in units for entry in unit.parameters]
    trainable = [(entry.name, entry.parameter) for entry in entries if entry.parameter.requires_grad]
    groups = check_optimizer(optimizer, trainable, [entry.parameter for entry in entries])
    group_by_name = {name: group for (name, _), group in zip(trainable, groups, strict=True)}
    runtimes = []
    for index, unit in enumerate(units):
        specifications = [
            ParameterSpecification(entry.name, tuple(entry.parameter.shape), entry.parameter.requires_grad) for entry in unit.parameters
        ]
        layout = layout_unit(index, unit.name, unit.kind, specifications, chunk_parameters=chunk_parameters)
        by_name = {entry.name: entry for entry in unit.parameters}
        runtimes.append(UnitRuntime(layout, tuple(by_name[place.name] for place in layout.parameters)))
    return runtimes, [[group_by_name.get(place.name) for place in unit.layout.parameters] for unit in runtimes]


def visits(model: nn.Module, units: Sequence[Unit], micro_batches: int) -> list[Visit]:
    """The modules that a forward goes through, in `micro_batches` where they are split; a tied output projection comes last.

    The loss of the output projection is taken to fit one chunk of tokens, and norms to run right before the module in whose unit they are.
    """
    tied_head = _output_projection(model)
    passed = []
    for index, unit in enumerate(units):
        if unit.kind is UnitKind.MODULE:
            passed += [Visit(index, micro_batches, Recompute.ELSEWHERE) for _ in unit.modules[1:]] + [Visit(index, micro_batches)]
            continue
        for _, module in unit.modules:
            if unit.kind is UnitKind.EMBEDDING and module is tied_head:
                continue
            is_split = unit.kind is UnitKind.BLOCK or is_token_wise(module)
            recompute = Recompute.NONE_SAVED if unit.kind is not UnitKind.BLOCK and is_plain_embedding(module) else Recompute.ALL
            passed.append(Visit(index, micro_batches if is_split else 1, recompute))
    if any(module is tied_head for _, module in units[0].modules):
        passed.append(Visit(0))
    return passed


def _output_projection(model: nn.Module) -> nn.Module | None:
    find = getattr(model, "get_output_embeddings", None)
    return find() if find is not None else None


def load(states: StateStore, units: Sequence[UnitRuntime], weights: WeightSource | None) -> None:
    for unit in units:

        def read(index: int, start: int, stop: int, unit: UnitRuntime = unit) -> torch.Tensor:
            entry = unit.parameters[index]
            if weights is not None:
                return weights.read_stretch(entry.name, start, stop)
            return entry.parameter.detach().reshape(-1)[start:stop].cpu()

        states.load_unit(unit.layout, read)


def replace_parameters(model: nn.Module, units: Sequence[UnitRuntime], dtype: torch.dtype, device: torch.device) -> None:
    """Give every parameter a placeholder, keeping its identity: optimizers and schedulers hold on to the objects."""
    entries = [entry for unit in units for entry in unit.parameters]
    for entry in entries:
        entry.parameter.grad = None
        entry.parameter.data = make_placeholder(entry.parameter.shape, dtype, device)
    guard({site.module for entry in entries for site in entry.sites}, [entry.parameter for entry in entries])
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(device))


def switch_caches_off(model: nn.Module) -> list[tuple[Any, Any]]:
    """Key/value caches and transformers' own checkpointing off; returns the configurations and what they said."""
    before = []
    config = getattr(model, "config", None)
    configs = [] if config is None else list({id(item): item for item in (config, config.get_text_config())}.values())
    for item in configs:
        before.append((item, getattr(item, "use_cache", None)))
        item.use_cache = False
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False) is True:
            module.gradient_checkpointing = False  # type: ignore[assignment]
    return before


def wrap(
    model: nn.Module,
    units: Sequence[Unit],
    runtimes: Sequence[UnitRuntime],
    runner: RegionRunner,
    limits: tuple[int, int],
    count_fallback: Callable[[], None],
    kernels: KernelSet,
) -> None:
    head = None
    projection = _output_projection(model)
    for unit, runtime in zip(units, runtimes, strict=True):
        for name, module in unit.modules:
            if unit.kind is UnitKind.BLOCK:
                module.forward = BlockForward(runner, runtime, name, module)
            elif unit.kind is UnitKind.MODULE:
                module.forward = PartForward(runner, runtime, name, module, is_main=module is unit.modules[0][1])
            else:
                module.forward = root = RootForward(runner, runtime, name, module)
                if module is projection:
                    head = root
    # `count_fallback` is a method of the session, which thus lives as long as the model.
    model.forward = ModelForward(model, head, limits, runner.begin_forward, count_fallback, kernels)


def take_over(optimizer: torch.optim.Optimizer, check: Callable[[], None]) -> None:
    """`step` only raises what went wrong; what would read or change states that are not in the optimizer is refused."""

    def step(_: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        check()
        return loss

    # Learning-rate schedulers, made before or after, look for this mark and then leave `step` alone.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # noqa: SLF001

    def zero_grad(_: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        """Gradients never stay in the parameters."""

    def refuse(*_: Any, **__: Any) -> None:
        raise EngineError(
            "the optimizer's states are in the state store",
            remedy="Use the session to read weights, and lohan.init with durability and resume to go on from a recorded step.",
        )

    for name, function in (("step", step), ("zero_grad", zero_grad)):
        setattr(optimizer, name, types.MethodType(function, optimizer))
    for name in ("state_dict", "load_state_dict", "add_param_group"):
        setattr(optimizer, name, types.MethodType(refuse, optimizer))
