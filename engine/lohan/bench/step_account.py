"""What one setting of a process has taken so far, where several take turns in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lohan.bench.records import median
from lohan.bench.step_memory import host_peak_bytes

if TYPE_CHECKING:
    import torch

    from lohan.bench.records import Record
    from lohan.planning.step_trace import StepTrace
    from lohan.streaming.executor import Session
    from lohan.streaming.statistics import Statistics


@dataclass(slots=True)
class Account:
    """Of one setting: sums over all its turns, peaks over the highest of them."""

    steps: int = 0
    timed_steps: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    clipped_steps: int = 0
    gradient_norms: list[float] = field(default_factory=list)
    """Of each step, before clipping."""
    host_peak_bytes: int = 0
    gpu_reserved_peak_bytes: int = 0
    gpu_allocated_peak_bytes: int = 0
    busy: Record = field(default_factory=lambda: {"busy": {}, "waits": {}})
    """Of its recorded step: in which part of it each resource was busy, and the device waited."""

    def add(self, before: Statistics, after: Statistics) -> None:
        """What the session did between the two, all of it this setting's."""
        self.bytes_read += after.bytes_read - before.bytes_read
        self.bytes_written += after.bytes_written - before.bytes_written
        self.clipped_steps += after.clipped_steps - before.clipped_steps

    def look_at_memory(self, session: Session, device: torch.device, *, is_shared: bool) -> None:
        """Raise the peaks to those since they were last forgotten.

        Args:
            is_shared: whether other settings take turns: buffers that theirs have left in host memory do not count then.
        """
        import torch

        idle_bytes = session.host_memory.idle_bytes if is_shared else 0
        self.host_peak_bytes = max(self.host_peak_bytes, host_peak_bytes() - idle_bytes)
        if device.type == "cuda":
            self.gpu_reserved_peak_bytes = max(self.gpu_reserved_peak_bytes, torch.cuda.max_memory_reserved(device))
            self.gpu_allocated_peak_bytes = max(self.gpu_allocated_peak_bytes, torch.cuda.max_memory_allocated(device))

    def note_busy(self, step: StepTrace) -> None:
        """The setting's recorded step."""
        busy = {str(resource): busy.seconds / step.seconds for resource, busy in step.busy().items()}
        self.busy = {"busy": busy, "waits": {str(wait): seconds / step.seconds for wait, seconds in step.waits().items()}}

    def result(self, context_bytes: int | None, *, on_gpu: bool) -> Record:
        """What the process answers for the setting (bytes are of a step, on average).

        Args:
            context_bytes: what CUDA itself holds; `gpu_peak_bytes` is that and what the allocator reserved at most.
        """
        steps = max(1, self.steps)
        return {
            "bytes_read": self.bytes_read // steps,
            "bytes_written": self.bytes_written // steps,
            "clip_rate": self.clipped_steps / steps,
            "gradient_norm": median(self.gradient_norms) if self.gradient_norms else None,
            "host_peak_bytes": self.host_peak_bytes,
            "gpu_peak_bytes": self.gpu_reserved_peak_bytes + (context_bytes or 0) if on_gpu else None,
            "gpu_allocated_peak_bytes": self.gpu_allocated_peak_bytes if on_gpu else None,
            "gpu_context_bytes": context_bytes if on_gpu else None,
            **self.busy,
        }
