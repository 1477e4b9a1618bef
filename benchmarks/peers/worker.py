"""The process that runs one system, alone: `python -m benchmarks.peers.worker`, by the lines of `lohan.bench.serving`."""

from __future__ import annotations

import os
import sys
import time
from typing import Any, Self

import torch

from benchmarks.peers.settings import PeerTask, System
from benchmarks.peers.systems import make_trainer
from lohan.bench.records import Record
from lohan.bench.serving import serve
from lohan.bench.step_memory import GpuMemory, host_peak_bytes
from lohan.bench.step_model import PooledWeights, make_config
from lohan.config import Precision
from lohan.errors import EngineError


def main() -> int:
    """Serve standard input; returns the exit status."""
    return serve(PeerTask.model_validate_json, PeerRun)


class PeerRun:
    """A model in another system's hands, and random tokens for it: the same weights and tokens as LoHan's own."""

    def __init__(self, task: PeerTask) -> None:
        begin = time.perf_counter()
        self._task = task
        self._gpu = GpuMemory(task.device)
        self._device = self._take_device()
        self.kernels = self._patch_kernels()
        self._generator = torch.Generator().manual_seed(1)
        self._steps = self._timed_steps = 0
        self._last_end: float | None = None
        self._context_bytes: int | None = None
        self._trainer = make_trainer(task, self._make_model(), self._device)
        self.setup_seconds = time.perf_counter() - begin

    def _take_device(self) -> torch.device:
        """The one GPU of the task is all that this process sees: a system that takes every GPU takes that one."""
        if self._task.device == "cpu":
            return torch.device("cpu")
        os.environ["CUDA_VISIBLE_DEVICES"] = self._task.device
        device = torch.device("cuda", 0)
        if self._task.gpu_cap_bytes is not None:
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, self._task.gpu_cap_bytes / total), device)
        return device

    def _patch_kernels(self) -> str:
        """Liger's kernels in transformers' Llama, before there is a model; they need a GPU."""
        if not self._task.tuned or self._device.type != "cuda":
            return "eager"
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        # RoundPipe takes the model apart and computes the loss itself, so that a fused one would never be called.
        apply_liger_kernel_to_llama(fused_linear_cross_entropy=self._task.system is not System.ROUNDPIPE)
        return "liger"

    def _make_model(self) -> Any:
        from transformers import LlamaForCausalLM

        dtype = torch.bfloat16 if self._task.precision is Precision.BF16 else torch.float32
        config = make_config(self._task.shape, self._task.sequence)
        config.use_cache = False
        self._vocabulary = config.vocab_size
        with torch.device("meta"):
            model = LlamaForCausalLM(config).to(dtype)
        with PooledWeights(model, dtype) as weights:
            for name in weights.names:
                owner, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(weights.read(name).clone()))
        # Its buffers (frequencies) have no values on the meta device.
        model.model.rotary_emb = type(model.model.rotary_emb)(config=config)
        return model.train()

    def use(self, choice: str) -> None:
        """Go on with other micro-batches: `ROWS VARIANT`."""
        rows, _, variant = choice.partition(" ")
        self._trainer.use(int(rows), variant)
        self._last_end = None

    def step(self) -> Record:
        """One step on new random tokens, after another one: `seconds` from the end of that one to its own, with all of the update."""
        begin = self._last_end if self._last_end is not None else self._take_step()[1]
        loss, self._last_end = self._take_step()
        self._timed_steps += 1
        if self._device.type == "cuda" and self._timed_steps == self._task.warmup:
            self._context_bytes = self._gpu.context_bytes(self._device)
        return {"seconds": self._last_end - begin, "loss": loss}

    def _take_step(self) -> tuple[float, float]:
        shape = (self._task.batch, self._task.sequence)
        loss = self._trainer.train(torch.randint(self._vocabulary, shape, generator=self._generator))
        self._synchronize()
        end = time.perf_counter()
        self._steps += 1
        if loss != loss:
            raise EngineError(f"the loss of step {self._steps} is {loss}")
        return loss, end

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def pause(self) -> None:
        """Finish updates that are late, so that nothing goes on while others take their steps."""
        self._trainer.settle()
        self._synchronize()
        self._last_end = None

    def finish(self) -> Record:
        """The peaks of memory, and what was computed with."""
        self.pause()
        on_gpu = self._device.type == "cuda"
        return {
            "kernels": self.kernels,
            "host_peak_bytes": host_peak_bytes(),
            "gpu_peak_bytes": torch.cuda.max_memory_reserved(self._device) + (self._context_bytes or 0) if on_gpu else None,
            "gpu_allocated_peak_bytes": torch.cuda.max_memory_allocated(self._device) if on_gpu else None,
            "gpu_context_bytes": self._context_bytes,
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return


if __name__ == "__main__":
    sys.exit(main())
