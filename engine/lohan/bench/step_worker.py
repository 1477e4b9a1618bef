"""The process that runs one setting of `lohan bench step`, alone, so that its memory is its own: `python -m lohan.bench.step_worker`.

Its lines are those of `lohan.bench.serving`.
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch

import lohan
from lohan.bench.serving import serve
from lohan.bench.step_account import Account
from lohan.bench.step_memory import GpuMemory, forget_host_peak
from lohan.bench.step_model import PooledWeights, block_seconds, make_config
from lohan.bench.step_options import StepTask
from lohan.bench.step_shapes import TRAINING_TO_FORWARD, block_forward_flops
from lohan.config import Durability, Precision, RamStates
from lohan.errors import EngineError
from lohan.streaming.device import resolve_device
from lohan.streaming.trace import Trace, write_perfetto

if TYPE_CHECKING:
    from lohan.bench.records import Record


def main() -> int:
    """Serve standard input; returns the exit status."""
    return serve(StepTask.model_validate_json, StepRun)


class StepRun:
    """A model under the engine, and random tokens for it. Not for use from several threads.

    Raises:
        LohanError: the task cannot be set up.
    """

    def __init__(self, task: StepTask) -> None:
        begin = time.perf_counter()
        self._task = task
        self._gpu = GpuMemory(task.plan.device)
        self._device = resolve_device(task.plan.device)
        self._dtype = torch.bfloat16 if task.training.precision is Precision.BF16 else torch.float32
        self._config = make_config(task.shape, task.training.sequence_length)
        self._generator = torch.Generator().manual_seed(1)
        self._resources = ExitStack()
        self._choices = [task.choice, *task.others]
        self._accounts = [Account() for _ in self._choices]
        self._choice = 0
        self._is_recorded = False  # the last step of the setting at work
        self._last_end: float | None = None
        self._trace = Trace(first_step=sys.maxsize, steps=1)  # which step it is to be is known when it comes
        if self._device.type == "cuda" and task.engine.gpu_memory_bytes is not None:
            total = torch.cuda.get_device_properties(self._device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, task.engine.gpu_memory_bytes / total), self._device)
        self._model = lohan.empty_model(self._config, dtype=self._dtype)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=task.training.learning_rate)
        with PooledWeights(self._model, self._dtype) as weights:
            self._session = self._resources.enter_context(self._open(weights))
        self.setup_seconds = time.perf_counter() - begin
        self._context_bytes: int | None = None
        self._before = self._session.statistics
        self._look_at_gpu()

    def _open(self, weights: PooledWeights) -> lohan.Session:
        training, engine = self._task.training, self._task.engine
        return lohan.init(
            self._model,
            self._optimizer,
            batch_size=training.batch_size,
            seq_length=training.sequence_length,
            state_directories=self._task.folders,
            device=self._task.plan.device,
            precision=training.precision,
            states=engine.states,
            schedule=engine.schedule,
            clip=training.clip,
            max_gradient_norm=training.max_gradient_norm,
            durability=engine.durability,
            ram_state_bytes=None if isinstance(engine.ram_state_bytes, RamStates) else engine.ram_state_bytes,
            unsafe_filesystems=engine.unsafe_filesystems,
            weights=weights,
            plan=self._task.plan,
            threads=engine.threads,
            trace=self._trace,
        )

    def step(self) -> Record:
        """One step on new random tokens, after another one: `seconds` from the end of that one's backward to the end of its own.

        Steps follow each other as in a run: nobody waits for the updates, but each forward for those of the units that it comes to. After
        a pause a step that does not count goes before.

        Raises:
            EngineError: it is not a step to be timed: the loss is not finite, or a background stage failed.
        """
        begin = self._last_end if self._last_end is not None else self._take_step()[1]
        loss, self._last_end = self._take_step()
        self._account.timed_steps += 1
        self._look_at_gpu()
        return {"seconds": self._last_end - begin, "loss": loss}

    def pause(self) -> None:
        """Finish all updates and records, so that nothing goes on while others take their steps."""
        self._session.wait()
        self._last_end = None
        account, now = self._account, self._session.statistics
        account.add(self._before, now)
        self._before = now
        account.look_at_memory(self._session, self._device, is_shared=len(self._choices) > 1)
        for step in self._trace.steps if self._is_recorded else ():
            account.note_busy(step)
            path = self._choices[self._choice].trace_path
            if path is not None:
                write_perfetto(self._trace, path, self._session.unit_names)
        self._is_recorded = False

    def use(self, choice: str) -> None:
        """Go on with the setting of this number: what it keeps of activations, and in which micro-batches.

        Raises:
            ValueError: there is no such setting.
            CapacityError: there is no room for it.
        """
        number = int(choice)
        self.pause()
        self._session.retain(self._choices[number].retention, self._choices[number].micro_batch_size)
        self._choice = number
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)
        forget_host_peak()

    @property
    def _account(self) -> Account:
        return self._accounts[self._choice]

    def _take_step(self) -> tuple[float, float]:
        """The loss of one step, and when its backward had ended."""
        training, session = self._task.training, self._session
        self._account.steps += 1
        if self._account.steps == self._task.trace_step:
            self._is_recorded = True
            self._trace.record(session.steps + 1, 1)
        shape = (training.batch_size, training.sequence_length)
        tokens = torch.randint(self._config.vocab_size, shape, generator=self._generator).to(self._device)
        loss = self._model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        self._optimizer.step()
        value = float(loss.detach())  # which waits for the device, as a run's log does
        session.wait_gradients()
        end = time.perf_counter()
        statistics = session.statistics
        assert statistics.last_step is not None, "its gradients have been looked at"
        self._account.gradient_norms.append(statistics.last_step.gradient_norm)
        if session.durability is Durability.STEP:
            session.commit({})
        skipped = statistics.skipped_steps
        if value != value or skipped:
            raise EngineError(f"the loss of step {session.steps} is {value}, and {skipped} steps were left out")
        return value, end

    def finish(self) -> Record:
        """What the run took, and how fast one block is in its place; where settings took turns, of each, as `choices`."""
        self.pause()
        on_gpu = self._device.type == "cuda"
        self._resources.close()
        peaks = {rows: self._block_peak(rows) for rows in sorted({choice.micro_batch_size for choice in self._choices})}
        kernels = str(self._session.kernels.kernels)
        results = [
            {
                **account.result(self._context_bytes, on_gpu=on_gpu),
                "micro_batch": rows,
                "kernels": kernels,
                "block_peak_tflops": peaks[rows],
            }
            for account, rows in zip(self._accounts, (choice.micro_batch_size for choice in self._choices), strict=True)
        ]
        return results[0] if len(results) == 1 else {"choices": results}

    def _block_peak(self, rows: int) -> float:
        """TFLOPS of one block by itself, with so many rows and the kernels in use."""
        length, kernels = self._task.training.sequence_length, self._session.kernels.kernels
        seconds = block_seconds(self._config, rows, length, device=self._device, dtype=self._dtype, kernels=kernels)
        return TRAINING_TO_FORWARD * block_forward_flops(self._task.shape, rows, length) / seconds / 1e12

    def _look_at_gpu(self) -> None:
        """When the warm-up is over: all kernels are loaded then, and other processes on the GPU have not moved since this one began."""
        if self._device.type == "cuda" and self._context_bytes is None and self._account.timed_steps == self._task.warmup:
            self._context_bytes = self._gpu.context_bytes(self._device)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._resources.__exit__(kind, error, trace)


if __name__ == "__main__":
    sys.exit(main())
