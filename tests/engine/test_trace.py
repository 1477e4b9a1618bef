"""What a session does is what its operations say, and a trace of it says so: order, bytes, times, and the file that shows it."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

import lohan
from lohan.config import Durability, Precision, States, UnsafeFilesystems, UpdateSchedule
from lohan.errors import ConfigError, EngineError, StorageError
from lohan.planning.access import AccessOrder
from lohan.planning.comparison import DifferenceKind, compare
from lohan.planning.operations import Operation, OperationKind, Resource, UpdateSequence
from lohan.planning.step_trace import Span, StepTrace, Wait, mean_busy
from lohan.streaming import chunk_pipeline, stages
from lohan.streaming import trace as tracing
from lohan.streaming.pending import PendingUpdates
from lohan.streaming.trace import Trace, write_perfetto
from tests.engine.reference import adamw, assert_bitwise_equal, make_batches, make_llama, open_session, train_streamed

STATE_BYTES = 12 * 140_000
PLACEMENTS = {"ssd": 0, "half": STATE_BYTES // 2, "ram": 4 * STATE_BYTES}
DURABLE = {"durability": Durability.STEP, "unsafe_filesystems": UnsafeFilesystems.ALLOW}


def traced(model, directory: Path, *, steps: int = 4, **options) -> tuple[tuple[Operation, ...], list[StepTrace]]:
    """What the steps of a session should do, and what the second and third of them did."""
    trace = Trace(first_step=2, steps=2)
    with open_session(model, adamw(model), directory, trace=trace, **options) as session:
        for batch in make_batches(steps):
            model(**{name: tensor.to(session.device) for name, tensor in batch.items()}).loss.backward()
            session.wait()
        operations = session.operations
    return tuple(operations), list(trace.steps)


def assert_as_scheduled(operations, steps) -> None:
    assert [step.step for step in steps] == [2, 3]
    for step in steps:
        differences = compare(operations, step)
        assert not differences, "\n".join(map(str, differences[:20]))
        assert sum(not isinstance(span.kind, Wait) for span in step.spans) == len(operations)


# ---------------------------------------------------------------- the engine and its schedule
@pytest.mark.parametrize("micro_batch_size", [4, 1], ids=["one micro-batch", "four micro-batches"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("ram_bytes", PLACEMENTS.values(), ids=PLACEMENTS)
@pytest.mark.parametrize("schedule", UpdateSchedule)
def test_a_step_does_exactly_what_its_operations_say(schedule, ram_bytes, tied, micro_batch_size, tmp_path):
    options = {"schedule": schedule, "ram_state_bytes": ram_bytes, "micro_batch_size": micro_batch_size}
    assert_as_scheduled(*traced(make_llama(tied=tied), tmp_path, **options))


@pytest.mark.parametrize(
    "options",
    [
        {"slots": 2},
        {"slots": 4},
        {"slots": 20},
        {"slots": 2, "kept_units": 2},
        {"kept_units": 20},
        {"grain": "module"},
        {"grain": "module", "kept_units": 4, "micro_batch_size": 1},
        {"clip": "global"},
        {"gradient_buffers": "all"},
        {"gradient_buffers": "all", "schedule": "naive", "ram_state_bytes": PLACEMENTS["half"]},
        {"precision": Precision.BF16, "states": States.EIGHT_BIT},
        {**DURABLE, "ram_state_bytes": PLACEMENTS["half"]},
        {**DURABLE, "ram_state_bytes": PLACEMENTS["ram"], "schedule": "naive"},
        {**DURABLE, "ram_state_bytes": PLACEMENTS["half"], "durability": Durability.SNAPSHOT},
    ],
    ids=[
        "2 slots",
        "4 slots",
        "all in slots",
        "two kept",
        "all kept",
        "modules",
        "modules kept",
        "clipped",
        "all gradients",
        "all gradients, naive",
        "8 bit",
        "durable, half",
        "durable, RAM",
        "between snapshots",
    ],
)
def test_so_it_does_with_other_settings(options, tmp_path):
    operations, steps = traced(make_llama(), tmp_path, **options)
    assert_as_scheduled(operations, steps)
    durability = options.get("durability", Durability.NONE)
    kinds = Counter(operation.kind for operation in operations)
    assert kinds[OperationKind.COMMIT] == (durability is Durability.STEP)
    assert (kinds[OperationKind.CHECKSUM] > 0) == (durability is not Durability.NONE)


@pytest.mark.parametrize("frozen", ["model.embed_tokens", "model.layers", "model.layers.0", "lm_head"])
@pytest.mark.parametrize("slots", [3, 20])
def test_so_it_does_with_frozen_units(frozen, slots, tmp_path):
    model = make_llama()
    model.get_submodule(frozen).requires_grad_(requires_grad=False)
    operations, steps = traced(model, tmp_path, slots=slots)
    assert_as_scheduled(operations, steps)


@pytest.mark.gpu
@pytest.mark.parametrize("kept", [0, 2])
@pytest.mark.parametrize("ram_bytes", PLACEMENTS.values(), ids=PLACEMENTS)
@pytest.mark.parametrize("schedule", UpdateSchedule)
def test_so_it_does_on_a_gpu(schedule, ram_bytes, kept, tmp_path):
    """Copies and blocks are timed by CUDA events: mapped onto the host's clock they are off by some microseconds."""
    options = {"device": "cuda", "schedule": schedule, "ram_state_bytes": ram_bytes, "kept_units": kept}
    operations, steps = traced(make_llama(tied=True), tmp_path, **options)
    for step in steps:
        differences = compare(operations, step, tolerance_seconds=2e-4)
        assert not differences, "\n".join(map(str, differences[:20]))
    busy = steps[0].busy()
    assert busy[Resource.M2G].bytes and busy[Resource.GPU].seconds > 0


def test_states_in_ram_take_no_drive(tmp_path):
    operations, steps = traced(make_llama(), tmp_path, ram_state_bytes=PLACEMENTS["ram"])
    assert not {Resource.SSD_READ, Resource.SSD_WRITE} & {operation.resource for operation in operations}
    busy = steps[0].busy()
    assert busy[Resource.SSD_READ].operations == busy[Resource.SSD_WRITE].operations == 0
    assert busy[Resource.M2G].bytes and busy[Resource.G2M].bytes and busy[Resource.CPU].bytes


@pytest.mark.usefixtures("deterministic")
def test_tracing_changes_no_bit(tmp_path):
    batches = make_batches(4, padded=True)
    plain, seen = (train_streamed(make_llama(), batches, tmp_path / name, trace=trace) for name, trace in (("a", None), ("b", Trace())))
    assert_bitwise_equal(plain, seen)


# ---------------------------------------------------------------- one source of order
class BackwardSequence(UpdateSequence):
    """Other than the operations say."""

    def place(self, unit: int) -> int:
        return -super().place(unit)

    def chunks(self, unit: int) -> list[int]:
        return list(super().chunks(unit))[::-1]


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("schedule", UpdateSchedule)
def test_updates_in_another_order_are_found_and_harmless(schedule, tmp_path, monkeypatch):
    batches, options = make_batches(3), {"schedule": schedule}
    expected = train_streamed(make_llama(), batches, tmp_path / "as scheduled", **options)
    monkeypatch.setattr(stages, "UpdateSequence", BackwardSequence)
    operations, steps = traced(make_llama(), tmp_path / "traced", **options)
    kinds = {(difference.kind, difference.operation.kind) for step in steps for difference in compare(operations, step)}
    assert (DifferenceKind.TOO_EARLY, OperationKind.UPDATE) in kinds
    assert_bitwise_equal(expected, train_streamed(make_llama(), batches, tmp_path / "other", **options))


@pytest.mark.usefixtures("deterministic")
def test_weights_in_another_order_are_found_and_harmless(tmp_path, monkeypatch):
    """A wrong guess costs loads, and no number."""
    batches = make_batches(3)
    expected = train_streamed(make_llama(), batches, tmp_path / "as scheduled")
    monkeypatch.setattr(stages, "access_order", lambda _: AccessOrder([4, 3, 2, 1, 0], [0, 1, 2, 3, 4]))
    operations, steps = traced(make_llama(), tmp_path / "traced")
    found = Counter((difference.kind, difference.operation or difference.span) for difference in compare(operations, steps[0]))
    kinds = {(kind, item.kind) for kind, item in found}
    assert (DifferenceKind.UNEXPECTED, OperationKind.WEIGHTS_READ) in kinds
    assert_bitwise_equal(expected, train_streamed(make_llama(), batches, tmp_path / "other"))


def test_the_engine_takes_its_orders_from_the_operations(tmp_path, monkeypatch):
    """With the updates of the first unit taken out of them, the optimizer does not know what to do with it."""
    original = stages.step_operations

    def without_unit_0(shape, order):
        return tuple(item for item in original(shape, order) if not (item.kind is OperationKind.UPDATE and item.unit == 0))

    monkeypatch.setattr(stages, "step_operations", without_unit_0)
    model = make_llama()
    with pytest.raises(EngineError, match="the optimizer failed"), open_session(model, adamw(model), tmp_path) as session:
        model(**make_batches(1)[0]).loss.backward()
        session.wait()


# ---------------------------------------------------------------- the trace
def test_it_records_the_steps_asked_for_and_no_others(tmp_path):
    model = make_llama()
    trace = Trace(first_step=2, steps=2)
    batches = make_batches(5)
    with open_session(model, adamw(model), tmp_path, trace=trace) as session:
        done = []
        for batch in batches:
            begun = time.perf_counter()
            model(**batch).loss.backward()
            session.wait()
            with torch.no_grad():
                model(**batch)  # belongs to no step
            done.append((len(trace.steps), trace.is_complete, begun))
        assert [(count, complete) for count, complete, _ in done] == [(0, False), (1, False), (2, False), (2, True), (2, True)]
    starts = [begun for *_, begun in done]
    for step, begun, following in zip(trace.steps, starts[1:], starts[2:], strict=False):
        assert begun <= step.start_seconds <= step.end_seconds <= following
        assert all(span.start_seconds <= span.end_seconds for span in step.spans)
        assert all(begun <= span.start_seconds <= following for span in step.spans)
    assert trace.dropped_spans == 0


def test_a_step_is_as_long_as_it_is_known_to_be(tmp_path):
    model = make_llama()
    trace = Trace(first_step=1, steps=1)
    with open_session(model, adamw(model), tmp_path, trace=trace) as session:
        model(**make_batches(1)[0]).loss.backward()
        session.wait()
        waited = time.perf_counter()
        (step,) = trace.steps
        assert max(span.end_seconds for span in step.spans) <= step.end_seconds <= waited, "nothing follows, and all is done"
        model(**make_batches(1)[0]).loss.backward()
        assert trace.steps[0].end_seconds == step.end_seconds, "the pause between is not the step's"


def test_a_step_behind_which_nobody_waits_ends_where_the_next_begins(tmp_path):
    model = make_llama()
    trace = Trace(first_step=1, steps=1)
    with open_session(model, adamw(model), tmp_path, trace=trace) as session:
        with lohan.accumulate():
            model(**make_batches(1)[0]).loss.backward()
            session.wait()  # in the middle of a step: its end it is not
        model(**make_batches(1)[0]).loss.backward()
        begun = time.perf_counter()
        model(**make_batches(1)[0]).loss.backward()
        session.wait()
        (step,) = trace.steps
        assert step.end_seconds >= begun


def test_accumulated_backwards_are_one_step(tmp_path):
    trace = Trace(first_step=1, steps=2)
    train_streamed(make_llama(), make_batches(6), tmp_path, accumulation=3, trace=trace)
    for step in trace.steps:
        counts = Counter(span.kind for span in step.spans)
        assert counts[OperationKind.GRADIENTS_COPY] == 3 * counts[OperationKind.GRADIENT_NORM] == 15


def test_it_keeps_a_bounded_number_of_spans(tmp_path, monkeypatch):
    monkeypatch.setattr(tracing, "MOST_SPANS", 10)
    trace = Trace(first_step=1, steps=1)
    train_streamed(make_llama(), make_batches(1), tmp_path, trace=trace)
    (step,) = trace.steps
    assert len(step.spans) <= 10 < trace.dropped_spans


def test_waits_have_a_cause_and_are_not_busy(tmp_path, monkeypatch):
    """Updates that begin only once the step's end waits for them."""
    waits = threading.Event()
    wait_all, update = PendingUpdates.wait_all, chunk_pipeline.adamw_update

    def noted_wait(pending):
        waits.set()
        wait_all(pending)
        waits.clear()

    def late_update(*arguments, **options):
        assert waits.wait(60)
        update(*arguments, **options)

    monkeypatch.setattr(PendingUpdates, "wait_all", noted_wait)
    monkeypatch.setattr(chunk_pipeline, "adamw_update", late_update)
    monkeypatch.setattr(tracing, "_LEAST_WAIT_SECONDS", 0.0)
    _, steps = traced(make_llama(), tmp_path, schedule="serial")
    for step in steps:
        (wait,) = [span for span in step.spans if span.kind is Wait.UPDATES and span.unit is None]
        updates = [span for span in step.spans if span.kind is OperationKind.UPDATE]
        assert all(wait.start_seconds <= span.end_seconds <= wait.end_seconds for span in updates)
        assert step.waits()[Wait.UPDATES] >= wait.end_seconds - wait.start_seconds > 0
        assert sum(busy.operations for busy in step.busy().values()) == sum(not isinstance(span.kind, Wait) for span in step.spans)


@pytest.mark.parametrize(("options", "place"), [({"first_step": 0}, "first_step"), ({"steps": 0}, "steps")])
def test_numbers_out_of_range_are_refused(options, place):
    with pytest.raises(ConfigError) as caught:
        Trace(**options)
    assert caught.value.place == place


def test_it_belongs_to_one_session(tmp_path):
    trace = Trace()
    train_streamed(make_llama(), make_batches(1), tmp_path / "first", trace=trace)
    with pytest.raises(EngineError, match="another session"):
        train_streamed(make_llama(), make_batches(1), tmp_path / "second", trace=trace)


class FakeGpu:
    """Two clocks that run alike, the GPU's 1000 seconds behind, and events between them. `stream` arguments are seconds of queued work."""

    def __init__(self, latencies: list[float]) -> None:
        self.now, self.latencies, self.broken = 5000.0, latencies, False

    def perf_counter(self) -> float:
        return self.now

    def make_event(self, *, enable_timing: bool) -> FakeEvent:
        assert enable_timing
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu, self.at = gpu, 0.0

    def record(self, stream: float) -> None:
        self.at = self._gpu.now - 1000 + stream

    def synchronize(self) -> None:
        """The host hears of it late, by one latency after the other."""
        if self._gpu.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self._gpu.now += self._gpu.latencies.pop(0) if self._gpu.latencies else 0.0

    def elapsed_time(self, later: FakeEvent) -> float:
        return (later.at - self.at) * 1000


@pytest.fixture
def gpu(monkeypatch) -> FakeGpu:
    gpu = FakeGpu(latencies=[3.0, 0.5, 0.125, 0.25, 1.0])
    monkeypatch.setattr(torch.cuda, "Event", gpu.make_event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: 0.0)
    monkeypatch.setattr(tracing, "time", gpu)
    return gpu


@pytest.fixture
def fake_gpu(gpu) -> Trace:
    """A trace of the first step on a GPU that is not there."""
    trace = Trace(first_step=1, steps=1)
    trace.attach(torch.device("cuda"))
    trace.begin_step(1)
    assert not gpu.latencies, "the quickest of five is the reference"
    return trace


def test_times_of_a_gpu_are_mapped_onto_the_hosts_clock(gpu, fake_gpu):
    begun = gpu.now
    fake_gpu.add(1, OperationKind.FORWARD, 3, fake_gpu.mark(1), fake_gpu.mark(1, 5.0), micro_batch=0)
    fake_gpu.add(1, Wait.WEIGHTS, 3, fake_gpu.mark(1), fake_gpu.mark(1, 1e-6))
    fake_gpu.add(1, Wait.UPDATES, None, fake_gpu.mark(1), fake_gpu.mark(1, 1.0))
    fake_gpu.end_step()
    (step,) = fake_gpu.steps
    (block,) = [span for span in step.spans if span.kind is OperationKind.FORWARD]
    # The middle of the quickest reference's latency is off by half of it.
    assert block.start_seconds == pytest.approx(begun + 0.125 / 2)
    assert block.end_seconds - block.start_seconds == pytest.approx(5.0)
    assert [span.kind for span in step.spans if isinstance(span.kind, Wait)] == [Wait.UPDATES], "the other is no wait"


def test_a_gpu_that_fails_costs_its_spans_and_no_more(gpu, fake_gpu):
    fake_gpu.add(1, OperationKind.FORWARD, 0, fake_gpu.mark(1), fake_gpu.mark(1))
    fake_gpu.add(1, OperationKind.UPDATE, 0, fake_gpu.host_mark(1), fake_gpu.host_mark(1), chunk=0)
    fake_gpu.end_step()
    gpu.broken = True
    (step,) = fake_gpu.steps
    assert [span.kind for span in step.spans] == [OperationKind.UPDATE]
    assert fake_gpu.dropped_spans == 1


# ---------------------------------------------------------------- what is made of it
def span_of(kind, resource, start, end, *, bytes=0) -> Span:
    return Span(kind, resource, 0, None, None, bytes, start, end)


def test_busy_is_the_union_of_what_is_under_way():
    spans = (
        span_of(OperationKind.STATES_READ, Resource.SSD_READ, 1.0, 3.0, bytes=10),
        span_of(OperationKind.WEIGHTS_READ, Resource.SSD_READ, 1.5, 2.0, bytes=20),
        span_of(OperationKind.STATES_READ, Resource.SSD_READ, 2.5, 4.0, bytes=30),
        span_of(OperationKind.STATES_READ, Resource.SSD_READ, 5.0, 6.0, bytes=40),
        span_of(OperationKind.FORWARD, Resource.GPU, 1.0, 1.5),
        span_of(Wait.WEIGHTS, Resource.GPU, 2.0, 2.5),
    )
    step = StepTrace(2, 1.0, 11.0, spans)
    busy = step.busy()
    assert (busy[Resource.SSD_READ].seconds, busy[Resource.SSD_READ].bytes, busy[Resource.SSD_READ].operations) == (4.0, 100, 4)
    assert (busy[Resource.GPU].seconds, busy[Resource.GPU].operations) == (0.5, 1)
    assert busy.keys() == set(Resource)
    assert step.waits() == {wait: 0.5 if wait is Wait.WEIGHTS else 0.0 for wait in Wait}
    mean = mean_busy([step, StepTrace(3, 11.0, 21.0, ())])
    assert (mean[Resource.SSD_READ].seconds, mean[Resource.SSD_READ].bytes) == (2.0, 50)


def test_other_bytes_and_missing_operations_are_found():
    operations = (
        Operation(OperationKind.STATES_READ, 0, 0, bytes=10),
        Operation(OperationKind.UPDATE, 0, 0, after=(0,)),
        Operation(OperationKind.COMMIT, after=(1,)),
    )
    spans = (
        Span(OperationKind.STATES_READ, Resource.SSD_READ, 0, 0, None, 12, 1.0, 2.0),
        Span(OperationKind.UPDATE, Resource.CPU, 0, 0, None, 0, 1.9, 3.0),
        Span(OperationKind.UPDATE, Resource.CPU, 0, 0, None, 0, 4.0, 5.0),
    )
    step = StepTrace(1, 0.0, 6.0, spans)
    assert list(map(str, compare(operations, step))) == [
        "states read, unit 0, chunk 0: 12 bytes instead of 10",
        "too early: update, unit 0, chunk 0, before the end of states read, unit 0, chunk 0",
        "missing: commit",
        "unexpected: update, unit 0, chunk 0 of 0 bytes",
    ]
    kinds = [difference.kind for difference in compare(operations, step, tolerance_seconds=0.2)]
    assert DifferenceKind.TOO_EARLY not in kinds


def test_the_file_shows_every_span_on_its_resource(tmp_path):
    model = make_llama()
    trace = Trace(first_step=2, steps=2)
    with open_session(model, adamw(model), tmp_path / "states", trace=trace) as session:
        for batch in make_batches(4):
            model(**batch).loss.backward()
            session.wait()
        names = session.unit_names
    file = tmp_path / "trace.json"
    file.write_text("an earlier trace")
    write_perfetto(trace, file, names)
    assert [path.name for path in tmp_path.glob("trace*")] == ["trace.json"], "no temporary file stays"
    events = json.loads(file.read_text())["traceEvents"]
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"GPU", "M2G: host to GPU", "SSD read", "SSD read (2)", "SSD write", "CPU optimizer", "steps"} - set(tracks.values()) == {
        "M2G: host to GPU"  # without a GPU, files are read into their slot
    }
    drawn = [event for event in events if event["ph"] == "X"]
    assert len(drawn) == 2 + sum(len(step.spans) for step in trace.steps)
    block = next(event for event in drawn if event["cat"] == "forward" and event["args"]["unit"] == "model.layers.1")
    assert (tracks[block["tid"]], block["name"], block["args"]["micro_batch"]) == ("GPU", "forward model.layers.1", 0)
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in drawn)
    lanes: dict[int, float] = {}
    for event in sorted(drawn, key=lambda event: event["ts"]):
        assert event["ts"] >= lanes.get(event["tid"], 0.0) - 1e-2, "spans of a lane do not overlap"
        lanes[event["tid"]] = event["ts"] + event["dur"]


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(StorageError, match="cannot be written") as caught:
        write_perfetto(Trace(), tmp_path / "missing" / "trace.json", [])
    assert caught.value.place == str(tmp_path / "missing" / "trace.json")
