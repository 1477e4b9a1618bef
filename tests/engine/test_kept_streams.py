"""Copy streams without a GPU: their copies run as late as what is waited for allows, so that a missing wait shows in the numbers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lohan.errors import EngineError
from lohan.planning.retention import BlockTiers, Retention
from lohan.streaming import kept, kept_buffers, kept_tiers
from lohan.streaming.parameters import DebugMode
from tests.engine.kept_runs import GROUPS, in_tier, spread, trained
from tests.engine.reference import Outcome, assert_bitwise_equal

LABELS = [label for labels in GROUPS.values() for label in labels]
_LOCK = threading.RLock()


class LazyStream:
    """Does nothing until somebody waits for it."""

    def __init__(self, _device: Any = None) -> None:
        self.work: list[Callable[[], Any]] = []
        self.done = 0

    def run(self, until: int | None = None) -> None:
        with _LOCK:
            end = len(self.work) if until is None else until
            while self.done < end:
                self.done += 1
                self.work[self.done - 1]()
                self.work[self.done - 1] = _nothing

    synchronize = run


def _nothing(*_: Any) -> None:
    """Work that is done, or that these streams need not do."""


class LazyEvent:
    """As `lohan.streaming.device.Event`; the compute stream is the thread itself and never behind."""

    def __init__(self, _device: Any) -> None:
        self.stream: LazyStream | None = None
        self.place = 0

    def record(self, stream: LazyStream | None = None) -> None:
        self.stream, self.place = stream, len(stream.work) if stream is not None else 0

    def wait(self, stream: LazyStream | None = None) -> None:
        if stream is None:
            self.synchronize()
        elif self.stream is not None:
            with _LOCK:
                source, place = self.stream, self.place
                stream.work.append(lambda: source.run(place))

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.run(self.place)


class Deferring(TorchDispatchMode):
    """Copies inside the block are work of the stream."""

    def __init__(self, stream: LazyStream) -> None:
        super().__init__()
        self.stream = stream

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is not torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))
        with _LOCK:
            self.stream.work.append(lambda: func(*args, **(kwargs or {})))
        return args[0]


@pytest.fixture
def lazy_streams(monkeypatch) -> list[LazyStream]:
    streams = []

    def make_stream(device):
        streams.append(LazyStream(device))
        return streams[-1]

    monkeypatch.setattr(kept_tiers, "make_stream", make_stream)
    monkeypatch.setattr(kept_tiers, "on_stream", lambda stream: Deferring(stream) if stream is not None else contextlib.nullcontext())
    monkeypatch.setattr(kept_tiers, "delay", _nothing)
    monkeypatch.setattr(kept_tiers.KeptTiers, "_free_after", _nothing)
    for module in (kept, kept_buffers, kept_tiers):
        monkeypatch.setattr(module, "Event", LazyEvent)
    return streams


@pytest.fixture(scope="module")
def computed_again(tmp_path_factory) -> Outcome:
    return trained(tmp_path_factory.mktemp("again"), Retention(), steps=3)


@pytest.mark.parametrize("debug", DebugMode)
@pytest.mark.parametrize(
    "retention",
    [
        in_tier("ram", LABELS, boundaries=True),
        in_tier("ssd", LABELS, boundaries=True),
        spread(LABELS).model_copy(update={"boundaries": BlockTiers(ssd_blocks=(0, 2), ram_blocks=(1,))}),
    ],
    ids=["ram", "ssd", "spread"],
)
def test_copies_may_run_as_late_as_they_can(retention, debug, lazy_streams, computed_again, tmp_path):
    assert_bitwise_equal(trained(tmp_path, retention, steps=3, debug=debug), computed_again)
    assert [bool(stream.work) for stream in lazy_streams] == [True, True]
    assert all(stream.done == len(stream.work) for stream in lazy_streams), "nothing is left undone when the session ends"


@pytest.mark.parametrize("waiting", ["the device", "the way back"])
@pytest.mark.usefixtures("lazy_streams")
def test_a_missing_wait_would_show(waiting, computed_again, tmp_path, monkeypatch):
    """The streams above are lazy enough: where the device, or the stream that copies back, waits for nothing, the numbers are others."""
    original = LazyEvent.wait

    def wait(event, stream=None):
        if (stream is None) is not (waiting == "the device"):
            original(event, stream)

    monkeypatch.setattr(LazyEvent, "wait", wait)
    if waiting == "the way back":  # else the device waits for it when the forward has ended
        monkeypatch.setattr(kept_tiers.KeptTiers, "forward_ended", _nothing)
    norms: list[float] = []
    with contextlib.suppress(EngineError):  # what is in memory that was not copied to may be NaN
        norms = trained(tmp_path, in_tier("ram", LABELS, boundaries=True), steps=1).squared_norms
    assert norms != computed_again.squared_norms[:1]
