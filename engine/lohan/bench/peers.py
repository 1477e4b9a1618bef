"""The optimizers that LoHan's is measured beside. DeepSpeed and bitsandbytes take part where they are installed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from lohan.bench.adam import Case, Job
from lohan.bench.records import Record, Watcher

if TYPE_CHECKING:
    from lohan.bench.adam_arrays import Arrays

MAX_REASON_CHARACTERS = 300


def jobs(arrays: Arrays, watcher: Watcher) -> tuple[list[Job], list[Record]]:
    """The jobs of all peers that can run here, and a record with the reason for each that cannot."""
    found: list[Job] = []
    skipped: list[Record] = [
        {
            "system": "torch",
            "case": str(Case.EIGHT_BIT),
            "skipped": "torch has no 8-bit AdamW; `8bit` is compared with torch's path for the engine's job",
        }
    ]
    for system, make_step, cases in (
        ("torch", _torch_step, (Case.PLAIN_FP32, Case.ENGINE)),
        ("deepspeed", _deepspeed_step, (Case.PLAIN_FP32, Case.ENGINE)),
        ("bitsandbytes", _bitsandbytes_step, (Case.EIGHT_BIT,)),
    ):
        watcher.note(f"{system}: a first step (packages that compile their kernels at first use take minutes)")
        try:
            step = make_step(arrays)
            step()
        except Exception as error:  # noqa: BLE001 - foreign packages fail in ways of their own; the reason becomes a record
            reason = f"{type(error).__name__}: {error}".strip()
            if isinstance(error, ModuleNotFoundError) and error.name == system:
                reason = f"{system} is not installed: pip install {system}"
            skipped += [{"system": system, "case": str(case), "skipped": reason[:MAX_REASON_CHARACTERS]} for case in cases]
        else:
            found += _jobs_of(system, step, cases, arrays)
    return found, skipped


def _jobs_of(system: str, step: Callable[[], object], cases: Iterable[Case], arrays: Arrays) -> list[Job]:
    return [Job(system, case, step if case is Case.PLAIN_FP32 else lambda: _whole_job(arrays, step)) for case in cases]


def _whole_job(arrays: Arrays, step: Callable[[], object]) -> bool:
    """What `adamw_update` does in one pass, around an optimizer that takes fp32 gradients: nothing is allocated.

    The norm doubles as the finite check, as in `clip_grad_norm_(error_if_nonfinite=True)`: one pass less than asking each element.
    """
    arrays.gradient.copy_(arrays.half_gradient)
    finite = bool(torch.linalg.vector_norm(arrays.gradient).isfinite())
    step()
    arrays.weights.copy_(arrays.master)
    return finite


def _parameter(arrays: Arrays) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(arrays.master)
    parameter.grad = arrays.gradient
    return parameter


def _options(arrays: Arrays) -> dict[str, Any]:
    values = arrays.HYPERPARAMETERS
    return {
        "lr": values["learning_rate"],
        "betas": (values["beta1"], values["beta2"]),
        "eps": values["epsilon"],
        "weight_decay": values["weight_decay"],
    }


def _torch_step(arrays: Arrays) -> Callable[[], object]:
    parameter = _parameter(arrays)
    optimizer = torch.optim.AdamW([parameter], fused=True, **_options(arrays))
    optimizer.state[parameter] = {
        "step": torch.zeros((), dtype=torch.float32),
        "exp_avg": arrays.first_moment,
        "exp_avg_sq": arrays.second_moment,
    }
    return optimizer.step


def _deepspeed_step(arrays: Arrays) -> Callable[[], object]:
    module = import_module("deepspeed.ops.adam")
    parameter = _parameter(arrays)
    optimizer = module.DeepSpeedCPUAdam([parameter], adamw_mode=True, **_options(arrays))
    optimizer.state[parameter] = {"step": 0, "exp_avg": arrays.first_moment, "exp_avg_sq": arrays.second_moment}
    step: Callable[[], object] = optimizer.step
    return step


def _bitsandbytes_step(arrays: Arrays) -> Callable[[], object]:
    module = import_module("bitsandbytes")
    step: Callable[[], object] = module.optim.AdamW8bit([_parameter(arrays)], **_options(arrays)).step
    return step
