"""Finds the units of an unmodified Hugging Face causal language model, and what one block keeps alive per token.

A model is cut at its largest homogeneous `nn.ModuleList`: each of its modules is a block. The modules beside the list are *root
modules*: those registered before it make the embedding unit, those after it the head unit. A root module that shares a weight with
the embedding (a tied output projection) belongs to the embedding unit, so that every parameter has exactly one home.

A block is one unit, or, where it is too large for that, one for each of its children that have matrices (attention, MLP). Children without
(norms) go with these, the first with the first: that is what pre-norm models such as Llama run them before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from lohan.config import KernelSet, UnitGrain
from lohan.errors import ModelError
from lohan.planning.workload import UnitKind

if TYPE_CHECKING:
    from torch import nn

    from lohan.planning.workload import ModuleWorkload, OperatorWorkload, UnitWorkload, Workload

_Traced = TypeVar("_Traced")


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """One place a parameter hangs in the module tree: `module._parameters[attribute]`."""

    module: nn.Module
    attribute: str


@dataclass(frozen=True, slots=True, eq=False)
class UnitParameter:
    """A parameter, counted once; `names` are all it goes by, the first as `named_parameters()` gives it."""

    names: tuple[str, ...]
    parameter: nn.Parameter
    sites: tuple[Site, ...]

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """Parameters that move together, and the modules whose `forward` needs them (qualified name, module).

    Of a unit of kind MODULE the first is the one that has matrices.
    """

    name: str
    kind: UnitKind
    modules: tuple[tuple[str, nn.Module], ...]
    parameters: tuple[UnitParameter, ...]


@dataclass(slots=True)
class _Draft:
    name: str
    kind: UnitKind
    modules: list[tuple[str, nn.Module]] = field(default_factory=list)


def find_units(model: nn.Module, grain: UnitGrain = UnitGrain.BLOCK) -> list[Unit]:
    """The units of `model` in forward order: embedding, blocks or their modules, head.

    Works on meta, placeholder and real parameters alike.

    Args:
        grain: BLOCK or MODULE.

    Raises:
        ModelError: there is no list of blocks, a parameter lies outside embedding, blocks and head, blocks share parameters, or a block is
            to be cut and cannot be.
    """
    list_name, blocks = _block_list(model)
    embedding = _Draft("embedding", UnitKind.EMBEDDING)
    head = _Draft("head", UnitKind.HEAD)
    for name, module, before in _root_modules(model, list_name):
        (embedding if before else head).modules.append((name, module))
    _move_tied(embedding, head)
    drafts = [embedding]
    seen: set[int] = set()
    for index, block in enumerate(blocks):
        if id(block) not in seen:
            seen.add(id(block))
            name = f"{list_name}.{index}"
            drafts += _cut(name, block) if grain is UnitGrain.MODULE else [_Draft(name, UnitKind.BLOCK, [(name, block)])]
    drafts.append(head)
    return _collect(model, drafts)


def _block_list(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The ModuleList of one class that holds the most parameters."""
    from torch import nn

    best: tuple[int, str, nn.ModuleList] | None = None
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) and len({type(child) for child in module}) == 1:
            size = sum(parameter.numel() for parameter in module.parameters())
            if size and (best is None or size > best[0]):
                best = (size, name, module)
    if best is None:
        raise ModelError(
            "no nn.ModuleList of equal blocks was found",
            place=type(model).__name__,
            remedy="Use a decoder-only model of the transformers library, such as Llama, Mistral or Qwen.",
        )
    return best[1], best[2]


def _root_modules(model: nn.Module, list_name: str) -> Iterator[tuple[str, nn.Module, bool]]:
    """Children with parameters beside the path from `model` to the block list, and whether they are registered before it."""
    from torch import nn

    path = [""]
    for part in list_name.split(".")[:-1]:
        path.append(f"{path[-1]}.{part}" if path[-1] else part)
    chain = {*path, list_name}
    before = True
    for name, module in model.named_modules(remove_duplicate=False):
        if name == list_name:
            before = False
        parent = name.rpartition(".")[0]
        if name in path:
            for attribute, _ in module.named_parameters(recurse=False):
                raise _outside(f"{name}.{attribute}" if name else attribute)
        elif name not in chain and parent in path and any(True for _ in module.parameters()):
            for inner_name, inner in module.named_modules():
                if isinstance(inner, nn.ModuleList):
                    first = next(iter(inner.named_parameters()), None)
                    if first is not None:
                        raise _outside(f"{name}.{inner_name}.{first[0]}" if inner_name else f"{name}.{first[0]}")
            yield name, module, before


def _outside(name: str) -> ModelError:
    return ModelError(
        f"parameter {name} lies outside the embedding, the blocks and the head",
        place=name,
        remedy="Use a decoder-only model whose parameters all belong to its embedding, its list of blocks or its output head.",
    )


def _cut(name: str, block: nn.Module) -> list[_Draft]:
    """One unit for each child of `block` that has matrices; the block's own forward, which runs around them, needs no weights."""
    from torch import nn

    children = [(f"{name}.{child_name}", child) for child_name, child in block.named_children() if any(True for _ in child.parameters())]
    own = [f"{name}.{attribute}" for attribute, _ in block.named_parameters(recurse=False)]
    containers = [child_name for child_name, child in children if isinstance(child, nn.ModuleList | nn.ModuleDict)]
    drafts = [
        _Draft(child_name, UnitKind.MODULE, [(child_name, child)])
        for child_name, child in children
        if any(parameter.dim() > 1 for parameter in child.parameters())
    ]
    if own or containers or not drafts:
        raise ModelError(
            f"{name} cannot be cut into modules: "
            + (f"its own forward uses {', '.join([*own, *containers])}" if own or containers else "none of its modules has a matrix"),
            place=name,
            remedy='Use engine.grain = "block".',
        )
    whole = {draft.name for draft in drafts}
    for position, entry in enumerate(entry for entry in children if entry[0] not in whole):
        drafts[min(position, len(drafts) - 1)].modules.append(entry)
    return drafts


def _move_tied(embedding: _Draft, head: _Draft) -> None:
    """A head module that shares a parameter with the embedding moves there whole: a region takes its weights from one unit."""
    ids = {id(parameter) for _, module in embedding.modules for parameter in module.parameters()}
    tied = [entry for entry in head.modules if any(id(parameter) in ids for parameter in entry[1].parameters())]
    head.modules = [entry for entry in head.modules if entry not in tied]
    embedding.modules.extend(tied)


def _collect(model: nn.Module, drafts: list[_Draft]) -> list[Unit]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    home: dict[int, str] = {}
    units = []
    for draft in drafts:
        sites: dict[int, list[Site]] = {}
        parameters: dict[int, nn.Parameter] = {}
        for _, root in draft.modules:
            for module in root.modules():
                for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                    parameters[id(parameter)] = parameter
                    sites.setdefault(id(parameter), []).append(Site(module, attribute))
        for key in parameters:
            if home.setdefault(key, draft.name) != draft.name:
                raise ModelError(
                    f"parameter {names[key][0]} is shared between {home[key]} and {draft.name}",
                    place=names[key][0],
                    remedy="Only the embedding and the output projection may share a weight.",
                )
        if parameters:
            entries = (UnitParameter(tuple(names[key]), parameters[key], tuple(sites[key])) for key in parameters)
            units.append(Unit(draft.name, draft.kind, tuple(draft.modules), tuple(entries)))
    return units


def trace_workload(config: Any) -> Workload:
    """Measure what `config`'s model asks for, without its weights.

    `config` is a transformers configuration. The model is built without memory for its weights and one block of it runs on the meta
    device, where a tensor has a shape and no data.

    Raises:
        ModelError: the model has no units the engine can find, or its block cannot be traced.
    """
    from lohan.models.load import empty_model
    from lohan.models.trace import saved_elements_per_token
    from lohan.planning.workload import Workload

    model = empty_model(config)
    units = find_units(model)
    module, rotary = first_block(model, units)
    text = config.get_text_config()
    operators = _trace_operators(module, text.hidden_size, rotary)
    fused = _with_fused(_trace_operators, module, text.hidden_size, rotary)
    changes = fused != operators
    return Workload(
        architecture=str(config.model_type),
        units=tuple(_unit_workload(unit) for unit in units),
        hidden_size=text.hidden_size,
        vocabulary_size=text.vocab_size,
        context_length=text.max_position_embeddings,
        tied_embeddings=any(len(entry.names) > 1 for entry in units[0].parameters),
        block_saved_elements_per_token=saved_elements_per_token(module, text.hidden_size, rotary),
        modules=_trace_modules(model, module, text.hidden_size, rotary),
        operators=operators,
        fused_operators=fused if changes else (),
        fused_saved_elements_per_token=_with_fused(saved_elements_per_token, module, text.hidden_size, rotary) if changes else 0,
        head_flops_per_token=_head_flops_per_token(model),
    )


def first_block(model: nn.Module, units: Sequence[Unit]) -> tuple[nn.Module, nn.Module | None]:
    """The first block of `model`, and the model's module for rotary positions, if it has one."""
    name, block = next(unit for unit in units if unit.kind is UnitKind.BLOCK).modules[0]
    parent = model.get_submodule(name.rpartition(".")[0].rpartition(".")[0])  # of the list of blocks
    return block, getattr(parent, "rotary_emb", None)


def _trace_operators(block: nn.Module, hidden_size: int, rotary: nn.Module | None) -> tuple[OperatorWorkload, ...]:
    """The operators of `block`; none where they cannot be counted.

    That is no reason to refuse a model, which can be trained all the same: a plan can keep no output of an operator that it does not know,
    so that all is recomputed, and it has no wrong figure to count with.
    """
    from lohan.models.operator_trace import trace_operators

    try:
        return trace_operators(block, hidden_size, rotary)
    except ModelError:
        return ()


def _with_fused(trace: Callable[[nn.Module, int, nn.Module | None], _Traced], block: nn.Module, *arguments: Any) -> _Traced:
    """What `trace` finds of the block with fused operators, which all kernel sets but torch's have."""
    from lohan.models.kernels import install_kernels

    installed = install_kernels(block, KernelSet.COMPILED)
    try:
        return trace(block, *arguments)
    finally:
        installed.remove()


def output_projection(model: nn.Module) -> nn.Linear | None:
    """The linear layer that makes logits of `model`'s last hidden states; None if it has none."""
    from torch import nn

    find: Any = getattr(model, "get_output_embeddings", lambda: None)
    module = find()
    return module if isinstance(module, nn.Linear) else None


def _head_flops_per_token(model: nn.Module) -> int:
    projection = output_projection(model)
    return 0 if projection is None else 2 * projection.in_features * projection.out_features


def _trace_modules(model: nn.Module, block: nn.Module, hidden_size: int, rotary: nn.Module | None) -> ModuleWorkload | None:
    """What the model asks for where its blocks are cut; None where they cannot be."""
    from lohan.models.trace import trace_parts
    from lohan.planning.workload import ModuleWorkload

    try:
        units = find_units(model, UnitGrain.MODULE)
    except ModelError:
        return None
    inside = set(block.modules())
    parts = [[module for _, module in unit.modules] for unit in units if unit.modules[0][1] in inside]
    trace = trace_parts(block, parts, hidden_size, rotary)
    return ModuleWorkload(
        units=tuple(_unit_workload(unit) for unit in units),
        saved_elements_per_token=max(trace.saved_elements_per_token),
        boundaries_per_block=trace.boundaries,
    )


def _unit_workload(unit: Unit) -> UnitWorkload:
    from lohan.planning.workload import UnitWorkload
    from lohan.states.layout import ParameterSpecification, layout_unit

    entries = [ParameterSpecification(entry.name, tuple(entry.parameter.shape), trainable=True) for entry in unit.parameters]
    elements = layout_unit(0, unit.name, unit.kind, entries).elements
    return UnitWorkload(name=unit.name, kind=unit.kind, parameters=sum(entry.elements for entry in entries), elements=elements)
