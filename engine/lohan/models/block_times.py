"""How long one block of a model takes on the device, and the head beside it, with weights and activations there.

Nothing is streamed and, in the block, nothing is recomputed: this is what a device can do at best.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, TypeVar

import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lohan.config import KernelSet, Precision
from lohan.hardware.profile import BlockTimes, Measured
from lohan.models.block_inputs import block_arguments
from lohan.models.blocks import find_units, first_block, output_projection, trace_workload
from lohan.models.kernels import cross_entropy_sum, install_kernels, loss_tokens, resolve_kernels
from lohan.models.load import empty_model
from lohan.models.operators import BlockOperators
from lohan.planning.workload import UnitKind

_WARM_UP_PASSES = 2
_GPU_WARM_UP_SECONDS = 0.3  # an idle GPU's clocks are low
# Of a GPU, about 30 ms: the host gets ahead, so that no operator's time holds the wait for its launch.
_HEAD_START_CYCLES = 50_000_000
_DEVIATION = 0.02  # of transformers' own initialisation


def measure_block(
    config: Any,
    *,
    rows: int,
    length: int,
    precision: Precision,
    device: torch.device,
    kernels: KernelSet = KernelSet.TORCH,
    repetitions: int = 3,
    on_progress: Callable[[float], None] | None = None,
) -> BlockTimes:
    """Time one block of `config`'s model, and its head, with random weights.

    Memory is needed for the weights, gradients and activations of one block, then of the head: never for the model.

    Args:
        config: a transformers configuration.
        rows: of the micro-batch.
        length: tokens a row.
        precision: of weights and activations.
        device: a GPU, or the CPU.
        kernels: the kernel set; `auto` as `lohan.models.kernels.resolve_kernels` has it.
        repetitions: of what is timed, at least 1; unmeasured passes go before.
        on_progress: told the share of the timed passes that is done, 0 to 1.

    Raises:
        ModelError: the model has no units the engine can find.
        ConfigError: the kernel set cannot run on the device.
        RuntimeError: the block cannot run by itself, or (torch.OutOfMemoryError) does not fit on the device.
    """
    kernels = resolve_kernels(kernels, device)
    dtype = torch.bfloat16 if precision is Precision.BF16 else torch.float32
    workload = trace_workload(config)
    model = empty_model(config, dtype=dtype)
    install_kernels(model, kernels)
    units = find_units(model)
    projection = output_projection(model)
    on_gpu = device.type == "cuda"
    repeat = _Repetition(repetitions, device, parts=2 + on_gpu + (projection is not None), on_progress=on_progress)
    hidden = torch.randn(rows, length, workload.hidden_size, device=device, dtype=dtype, requires_grad=True)

    block = _BlockPasses(*first_block(model, units), hidden)
    passes = repeat(block.time_passes)
    operators = repeat(block.time_operators)
    launches = repeat(block.time_launches) if on_gpu else []
    block.free()
    head_passes = []
    if projection is not None:
        before = [module for unit in units if unit.kind is UnitKind.HEAD for _, module in unit.modules if module is not projection]
        head_passes = repeat(_HeadPasses(before, projection, hidden, kernels).time_passes)
    return BlockTimes(
        workload_digest=workload.digest,
        kernels=str(kernels),
        precision=precision.value,
        rows=rows,
        sequence_length=length,
        forward_seconds=_measured([forward for forward, _ in passes]),
        backward_seconds=_measured([backward for _, backward in passes]),
        operator_seconds={
            operator.label: statistics.median(seconds[operator.label] for seconds in operators)
            for operator in workload.operators_of(kernels)
        },
        head_seconds=_measured(head_passes) if head_passes else None,
        forward_launch_seconds=_measured([forward for forward, _ in launches]) if launches else None,
        backward_launch_seconds=_measured([backward for _, backward in launches]) if launches else None,
    )


_Result = TypeVar("_Result")


class _Repetition:
    """Does things again and again, after a warm-up; `parts` things in all."""

    def __init__(self, repetitions: int, device: torch.device, *, parts: int, on_progress: Callable[[float], None] | None) -> None:
        self._repetitions, self._passes, self._done = repetitions, parts * repetitions, 0
        self._warm_up_seconds = _GPU_WARM_UP_SECONDS if device.type == "cuda" else 0.0
        self._on_progress = on_progress

    def __call__(self, run: Callable[[], _Result]) -> list[_Result]:
        """What `run` returns each time; it has waited for the device."""
        begin = time.perf_counter()
        for passes in count():
            if passes >= _WARM_UP_PASSES and time.perf_counter() - begin >= self._warm_up_seconds:
                break
            run()
        results = []
        for _ in range(self._repetitions):
            results.append(run())
            self._done += 1
            if self._on_progress is not None:
                self._on_progress(self._done / self._passes)
        return results


def _measured(seconds: Sequence[float]) -> Measured:
    median = statistics.median(seconds)
    return Measured(value=median, spread=(max(seconds) - min(seconds)) / median, repetitions=len(seconds))


class _Clock:
    """Instants on the device: events of a GPU's current stream, or the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch declares it without
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self) -> None:
        """Until the device has done all that was queued."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def give_head_start(self) -> None:
        """Keep a GPU busy while the host queues what is timed."""
        if self._device.type == "cuda":
            with torch.cuda.device(self._device):
                torch.cuda._sleep(_HEAD_START_CYCLES)  # type: ignore[no-untyped-call]  # noqa: SLF001 - torch has no public one

    @staticmethod
    def seconds(begin: Any, end: Any) -> float:
        """Between two marks, after `wait`."""
        elapsed: float = end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3
        return elapsed


class _BlockPasses:
    """A block on the device of its input `hidden` (rows, length, width), with random weights."""

    def __init__(self, block: nn.Module, rotary: nn.Module | None, hidden: torch.Tensor) -> None:
        rows, length, _ = hidden.shape
        self._block, self._hidden = block, hidden
        self._arguments = block_arguments(block, rotary, rows, length, device=hidden.device, dtype=hidden.dtype)
        # Random like the block's input: products of equal numbers take less power, and a GPU that is not held back by it is faster.
        self._gradient = torch.randn_like(hidden)
        self._clock = _Clock(hidden.device)
        _put_weights(block, hidden.device, hidden.dtype)
        # A GPU's backwards run on a thread of their own, whose CUDA context comes with its first kernel; cuBLAS, if it is first, warns.
        torch.ones((), device=hidden.device, requires_grad=True).exp().backward()  # type: ignore[no-untyped-call]

    def time_passes(self) -> tuple[float, float]:
        """Seconds of a forward and of the backward after it."""
        self._clock.wait()
        begin = self._clock.mark()
        output = self._forward()
        middle = self._clock.mark()
        output.backward(self._gradient)  # type: ignore[no-untyped-call]
        end = self._clock.mark()
        self._clock.wait()
        self._hidden.grad = None
        self._block.zero_grad(set_to_none=True)
        return self._clock.seconds(begin, middle), self._clock.seconds(middle, end)

    def time_operators(self) -> Counter[str]:
        """Seconds of a forward's operators, by label."""
        operators = BlockOperators(self._block)
        timer = _OperatorTimer(operators, self._clock)
        try:
            self._clock.wait()
            self._clock.give_head_start()
            with timer:
                self._forward()
            self._clock.wait()
        finally:
            operators.close()
        return timer.seconds()

    def time_launches(self) -> tuple[float, float]:
        """Seconds in which the host queues a forward, and a recomputation with the backward, while the device is busy with other work.

        As in a run that keeps some operators' outputs: through a checkpoint, in which every operator's label is looked up.
        """
        operators = BlockOperators(self._block)
        try:
            self._clock.wait()
            self._clock.give_head_start()
            begin = time.perf_counter()
            output = checkpoint(
                self._forward, use_reentrant=False, context_fn=lambda: (_OperatorFollower(operators), _OperatorFollower(operators))
            )
            middle = time.perf_counter()
            output.backward(self._gradient)
            end = time.perf_counter()
            self._clock.wait()
        finally:
            operators.close()
        self._hidden.grad = None
        self._block.zero_grad(set_to_none=True)
        return middle - begin, end - middle

    def free(self) -> None:
        """Give the block's memory back."""
        self._block.to("meta")

    def _forward(self) -> torch.Tensor:
        output = self._block(self._hidden, **self._arguments)
        first: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return first


class _OperatorFollower(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks up the label of each operator."""

    def __init__(self, operators: BlockOperators) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operators = operators

    def __enter__(self) -> Any:
        self._operators.begin()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, function: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._operators.label(function)
        return function(*args, **(kwargs or {}))


class _OperatorTimer(_OperatorFollower):  # type: ignore[no-untyped-call]
    """Marks the begin and the end of each operator that has a label."""

    def __init__(self, operators: BlockOperators, clock: _Clock) -> None:
        super().__init__(operators)
        self._clock = clock
        self._spans: list[tuple[str, Any, Any]] = []

    def __torch_dispatch__(self, function: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        label = self._operators.label(function)
        if label is None:
            return function(*args, **(kwargs or {}))
        begin = self._clock.mark()
        result = function(*args, **(kwargs or {}))
        self._spans.append((label, begin, self._clock.mark()))
        return result

    def seconds(self) -> Counter[str]:
        """By label; after the device is done."""
        total: Counter[str] = Counter()
        for label, begin, end in self._spans:
            total[label] += self._clock.seconds(begin, end)  # type: ignore[assignment]  # a Counter holds any numbers
        return total


class _HeadPasses:
    """What follows the blocks: final norm, output projection and loss, recomputed in the backward, the loss over chunks of tokens. That is
    the engine's loss head for the families it knows; for others it computes all logits at once."""

    def __init__(self, before: Sequence[nn.Module], projection: nn.Linear, hidden: torch.Tensor, kernels: KernelSet) -> None:
        self._kernels = kernels
        for module in (*before, projection):
            _put_weights(module, hidden.device, hidden.dtype)
        self._before, self._projection, self._hidden = before, projection, hidden
        self._labels = torch.randint(projection.out_features, (hidden.shape[0] * hidden.shape[1],), device=hidden.device)
        self._chunk_tokens = loss_tokens(hidden, projection.out_features, kernels)
        self._clock = _Clock(hidden.device)

    def time_passes(self) -> float:
        """Seconds of a forward and its backward."""
        self._clock.wait()
        begin = self._clock.mark()
        self._loss().backward()  # type: ignore[no-untyped-call]
        end = self._clock.mark()
        self._clock.wait()
        self._hidden.grad = None
        for module in (*self._before, self._projection):
            module.zero_grad(set_to_none=True)
        return self._clock.seconds(begin, end)

    def _loss(self) -> torch.Tensor:
        states = self._hidden
        for module in self._before:
            states = checkpoint(module, states, use_reentrant=False)
        states = states.reshape(-1, states.shape[-1])
        chunks = zip(torch.split(states, self._chunk_tokens), torch.split(self._labels, self._chunk_tokens), strict=True)
        sums = [checkpoint(self._loss_sum, *chunk, use_reentrant=False) for chunk in chunks]
        return torch.stack(sums).sum() / len(self._labels)

    def _loss_sum(self, states: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return cross_entropy_sum(self._projection(states), labels, self._kernels)


def _put_weights(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Random matrices: products of zeros take less power, and so less time (measured: 894 instead of 788 TFLOPS on one GPU)."""
    generator = torch.Generator(device).manual_seed(0)
    for owner in module.modules():
        for name, placeholder in owner.named_parameters(recurse=False):
            value = torch.ones(placeholder.shape, device=device, dtype=dtype)
            if value.dim() > 1:
                value.normal_(std=_DEVIATION, generator=generator)
            owner.register_parameter(name, nn.Parameter(value))
    module.to(device)  # the buffers
