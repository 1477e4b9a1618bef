"""LoHan: fine-tunes all parameters of models far larger than the GPU.

Importing this package loads no torch: the public names below are looked up on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lohan.models.load import empty_model as empty_model
    from lohan.streaming.accumulation import accumulate as accumulate
    from lohan.streaming.executor import Session as Session
    from lohan.streaming.executor import init as init
    from lohan.streaming.trace import Trace as Trace

__version__ = "0.1.0"

_LAZY = {
    "accumulate": "lohan.streaming.accumulation",
    "empty_model": "lohan.models.load",
    "init": "lohan.streaming.executor",
    "Session": "lohan.streaming.executor",
    "Trace": "lohan.streaming.trace",
}

__all__ = ["Session", "Trace", "accumulate", "empty_model", "init"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'lohan' has no attribute {name!r}")
