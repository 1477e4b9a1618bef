"""When updates run, clipping, and steps that are left out: what becomes of a step's gradients."""

from __future__ import annotations

import threading
from itertools import groupby, pairwise

import pytest
import torch

from lohan._native import ThreadPool, gradient_norm
from lohan.config import Clip, Durability, Precision, States, UnsafeFilesystems, UpdateSchedule
from lohan.errors import ConfigError, EngineError
from lohan.states.state_store import StateStore
from lohan.streaming import chunk_pipeline, optimizer
from lohan.streaming.clipping import UpdateRules
from lohan.streaming.gradients import GradientOffload, HostGradient, measure_parts
from lohan.streaming.optimizer import OptimizerWorker
from lohan.streaming.steps import StepDriver
from tests.engine.reference import (
    Outcome,
    adamw,
    assert_bitwise_equal,
    assert_equal_training,
    make_batches,
    make_llama,
    open_session,
    train_plain,
    train_streamed,
    twin,
    weights_of,
)


# ---------------------------------------------------------------- schedules
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(("precision", "states"), [("fp32", "auto"), ("bf16", "auto"), ("bf16", "8bit")])
def test_parity_of_schedules_bit_for_bit_unit_by_unit(precision, states, tmp_path):
    options = {"precision": Precision(precision), "states": States(states), "clip": Clip.PER_UNIT, "max_gradient_norm": 0.5}
    serial, *others = (
        train_streamed(make_llama(tied=True), make_batches(4, padded=True), tmp_path / schedule, schedule=schedule, **options)
        for schedule in UpdateSchedule
    )
    for other in others:
        assert_bitwise_equal(serial, other)


def order_of_one_step(tmp_path, monkeypatch, **options) -> list[tuple[str, int, int]]:
    """What the optimizer starts, as ("read" or "write", unit, chunk), and where the backward ends, as ("end", 0, 0)."""
    order: list[tuple[str, int, int]] = []

    def note(event: tuple[str, int, int]) -> None:
        if event not in order:  # a chunk has several streams
            order.append(event)

    read, write, end = StateStore.read, StateStore.write, StepDriver._end

    def noted_read(store, layout, chunk, stream, target, *, urgent=False):
        if not urgent:  # weights are read urgently
            note(("read", layout.index, chunk.index))
        return read(store, layout, chunk, stream, target, urgent=urgent)

    def noted_write(store, layout, chunk, stream, source):
        note(("write", layout.index, chunk.index))
        return write(store, layout, chunk, stream, source)

    def noted_end(driver):
        note(("end", 0, 0))
        end(driver)

    model = make_llama()
    with open_session(model, adamw(model), tmp_path, **options) as session:
        monkeypatch.setattr(StateStore, "read", noted_read)
        monkeypatch.setattr(StateStore, "write", noted_write)
        monkeypatch.setattr(StepDriver, "_end", noted_end)
        model(**make_batches(1)[0]).loss.backward()
        session.wait()
    return order


@pytest.mark.parametrize("options", [{"schedule": "serial"}, {"clip": "global"}, {"schedule": "naive", "clip": "global"}])
def test_nothing_is_updated_before_the_end_of_the_backward(options, tmp_path, monkeypatch):
    order = order_of_one_step(tmp_path, monkeypatch, **options)
    assert order[0] == ("end", 0, 0)
    units = [unit for name, unit, _ in order if name == "write"]
    assert units == sorted(units), "in the order in which the next forward needs them"


@pytest.mark.parametrize("schedule", ["naive", "optimized"])
def test_updates_begin_while_the_backward_goes_on(schedule, tmp_path, monkeypatch):
    order = order_of_one_step(tmp_path, monkeypatch, schedule=schedule)
    order.remove(("end", 0, 0))
    assert order[0][1] == 4, "the head's gradients are the first to arrive"
    chunks = [(unit, chunk) for name, unit, chunk in order if name == "read"]
    assert len(chunks) == len(set(chunks)) > 20
    if schedule == "naive":
        assert order == [(name, *chunk) for chunk in chunks for name in ("read", "write")]
        return
    for chunk, following in pairwise(chunks):
        if chunk[0] == following[0]:
            assert order.index(("read", *following)) < order.index(("write", *chunk)), "the next is read while one is updated"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"gradient_buffers": "all"}, [4, 0, 1, 2, 3]),
        ({"gradient_buffers": "all", "schedule": "naive"}, [4, 0, 1, 2, 3]),
        ({"gradient_buffers": "all", "schedule": "serial"}, [0, 1, 2, 3, 4]),
        ({"gradient_buffers": "few"}, [4, 3, 2, 1, 0]),
    ],
)
def test_of_units_that_wait_the_one_that_is_needed_first_is_next(options, expected, tmp_path, monkeypatch):
    """The head's update, or with few buffers any, takes until the backward has ended or its buffers are used up."""
    model, order = make_llama(), []
    backward_ended = threading.Event()
    waits = options["gradient_buffers"] == "all" and options.get("schedule") != "serial"

    def update(*arguments, **keywords):
        if waits:
            assert backward_ended.wait(60), "the backward waits for an update"
        return chunk_pipeline_update(*arguments, **keywords)

    chunk_pipeline_update = chunk_pipeline.adamw_update
    begin = StateStore.write

    def noted_write(store, layout, chunk, stream, source):
        order.append(layout.index)
        return begin(store, layout, chunk, stream, source)

    with open_session(model, adamw(model), tmp_path, **options) as session:
        monkeypatch.setattr(chunk_pipeline, "adamw_update", update)
        monkeypatch.setattr(StateStore, "write", noted_write)
        model(**make_batches(1)[0]).loss.backward()
        backward_ended.set()
        session.wait()
    assert list(dict.fromkeys(order)) == expected
    assert [unit for unit, _ in groupby(order)] == expected, "a unit's chunks stay together"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_measured_on_the_device_are_those_measured_here(dtype, tmp_path):
    """The roundings of n additions in fp32 wander by sqrt(n) / 2^24 of the sum where they are all made in a row: n is 60,000 at most."""
    gradients = torch.randn(100_000, generator=torch.Generator().manual_seed(1)).mul_(1e-3).to(dtype)
    gradients[60_000:70_000] = float("nan")  # between the parameters: undefined
    parts = [(0, 60_000), (70_000, 1), (70_001, 29_999)]
    norms = measure_parts(gradients, parts, torch.empty(5))
    host = HostGradient(torch.empty(0), torch.empty(5), torch.device("cpu"))
    host.take_norms(norms)
    pool = ThreadPool(1)
    expected = sum(gradient_norm(gradients[offset : offset + length], pool=pool).squared_norm for offset, length in parts)
    assert host.squared_norm == pytest.approx(expected, rel=60_000**0.5 / 2**24)


@pytest.mark.parametrize("clip", ["global", "per_unit"])
def test_steps_take_the_norms_that_the_device_measured(clip, tmp_path, monkeypatch):
    batches, send = make_batches(3), GradientOffload.send

    def measured(offload, unit, gradients, parts):
        host = send(offload, unit, gradients, parts)
        host._norms = torch.empty(len(parts))
        host.take_norms(measure_parts(gradients, parts, torch.empty(len(parts))))
        return host

    def train(name, **options):
        return train_streamed(make_llama(), batches, tmp_path / name, clip=clip, max_gradient_norm=0.5, **options)

    expected = train("here")
    accumulated = train_streamed(make_llama(), batches, tmp_path / "sums here", clip=clip, max_gradient_norm=0.5, accumulation=3)
    monkeypatch.setattr(GradientOffload, "send", measured)
    with monkeypatch.context() as patch:
        patch.setattr(optimizer, "measure", None)
        assert_equal_training(train("on the device"), expected)
    # The norm of several backwards' sum is not the last one's.
    again = train_streamed(make_llama(), batches, tmp_path / "sums", clip=clip, max_gradient_norm=0.5, accumulation=3)
    assert_bitwise_equal(accumulated, again)


def test_what_the_device_finds_infinite_is_counted_here(tmp_path, monkeypatch):
    """Squares may be beyond fp32 where gradients are not: such a step is no skipped one."""
    monkeypatch.setattr(HostGradient, "squared_norm", property(lambda _: float("inf")))
    batches = make_batches(2)
    run = train_streamed(make_llama(), batches, tmp_path, clip="global", max_gradient_norm=0.5)
    monkeypatch.undo()
    assert_bitwise_equal(run, train_streamed(make_llama(), batches, tmp_path / "again", clip="global", max_gradient_norm=0.5))


@pytest.mark.parametrize("schedule", UpdateSchedule)
def test_parity_with_plain_training(schedule, tmp_path):
    model = make_llama(tied=True)
    plain = train_plain(twin(model), make_batches(20, padded=True))
    assert_equal_training(train_streamed(model, make_batches(20, padded=True), tmp_path, schedule=schedule), plain)


@pytest.mark.parametrize(
    ("options", "place"),
    [({"schedule": "eager"}, "schedule"), ({"clip": "value"}, "clip"), ({"max_gradient_norm": 0.0}, "max_gradient_norm")],
)
def test_wrong_rules_are_refused(options, place, tmp_path):
    model = make_llama()
    with pytest.raises(ConfigError) as caught:
        open_session(model, adamw(model), tmp_path, **options)
    assert caught.value.place == place


# ---------------------------------------------------------------- clipping
def norms_of(outcome: Outcome) -> list[float]:
    return [squared**0.5 for squared in outcome.squared_norms]


@pytest.mark.parametrize("schedule", UpdateSchedule)
def test_parity_with_global_clipping_on_some_steps(schedule, tmp_path):
    batches = make_batches(20, padded=True)
    largest = sorted(norms_of(train_plain(make_llama(), batches)))[10]
    model = make_llama()
    plain = train_plain(twin(model), batches, max_gradient_norm=largest)
    streamed = train_streamed(model, batches, tmp_path, schedule=schedule, clip="global", max_gradient_norm=largest)
    assert_equal_training(streamed, plain)
    assert norms_of(streamed) == pytest.approx(norms_of(plain), rel=1e-4)
    clipped = sum(norm > largest for norm in norms_of(plain))
    assert 0 < clipped < 20, "both sides of the limit are needed"


@pytest.mark.parametrize("largest", [1e-3, 1.0, 7.5, 1e3])
def test_the_factor_is_that_of_clip_grad_norm(largest):
    """On fp32 gradients, to 1e-6: torch sums in fp32, the native pass in fp64."""
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in (1000, 1, 257)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter) * 0.2
    before = [parameter.grad.clone() for parameter in parameters]
    norm = sum(gradient.double().square().sum().item() for gradient in before) ** 0.5
    theirs = torch.nn.utils.clip_grad_norm_(parameters, largest)
    assert norm == pytest.approx(theirs.item(), rel=1e-6)
    scale = UpdateRules(clip=Clip.GLOBAL, max_gradient_norm=largest).scale(norm**2)
    for parameter, gradient in zip(parameters, before, strict=True):
        torch.testing.assert_close(gradient * scale, parameter.grad, rtol=1e-6, atol=0)


def test_per_unit_clipping_scales_each_unit_by_its_own_norm(tmp_path):
    """With betas of 0 and no decay a first step moves a weight by lr * g / (|g| + epsilon): epsilon makes the scale visible."""

    def make_optimizer(model):
        return torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.0, 0.0), eps=1e3, weight_decay=0.0)

    model = make_llama()
    plain = twin(model)
    batch = make_batches(1)[0]
    plain(**batch).loss.backward()
    parts = [plain.model.embed_tokens, *plain.model.layers, None]
    before = weights_of(model)
    with open_session(model, make_optimizer(model), tmp_path, clip="per_unit", max_gradient_norm=0.1) as session:
        model(**batch).loss.backward()
        session.wait()
        statistics = session.statistics
        assert statistics.last_step.clipped and statistics.clip_rate == 1.0
        after = {name: tensor.float() for name, tensor in session.named_weights()}
    rest = [plain.model.norm.weight, plain.lm_head.weight]
    for part in parts:
        parameters = rest if part is None else list(part.parameters())
        torch.nn.utils.clip_grad_norm_(parameters, 0.1)
    for name, parameter in plain.named_parameters():
        expected = -parameter.grad / (parameter.grad.abs() + 1e3)
        torch.testing.assert_close(after[name] - before[name], expected, rtol=1e-3, atol=1.2e-7)  # one rounding of a weight below 2


def test_the_statistics_count_clipped_steps(tmp_path):
    model = make_llama()
    with open_session(model, adamw(model), tmp_path, clip="global", max_gradient_norm=1e3) as session:
        assert session.statistics.clip_rate == 0.0
        model(**make_batches(1)[0]).loss.backward()
        session.wait()
        assert not session.statistics.last_step.clipped
        (model(**make_batches(1)[0]).loss * 1e4).backward()
        session.wait()
        assert session.statistics.last_step.clipped
        assert session.statistics.last_step.gradient_norm > 1e3, "the norm is the one before clipping"
        assert (session.statistics.clipped_steps, session.statistics.clip_rate) == (1, 0.5)


# ---------------------------------------------------------------- steps that are left out
TWO_SLOTS = {"durability": Durability.STEP, "unsafe_filesystems": UnsafeFilesystems.ALLOW}
SKIPPING = {
    "global": {"clip": "global"},
    "serial": {"schedule": "serial"},
    "optimized": TWO_SLOTS,
    "naive": {"schedule": "naive", **TWO_SLOTS},
    "per unit": {"clip": "per_unit", **TWO_SLOTS},
    "in RAM": {"ram_state_bytes": 1 << 24, **TWO_SLOTS},
    "global, two slots": {"clip": "global", **TWO_SLOTS},
    "speculated": {"clip": "global", "clip_updates": "speculate", "max_gradient_norm": 8.0, **TWO_SLOTS},
    "speculated in RAM": {"clip": "global", "clip_updates": "speculate", "ram_state_bytes": 1 << 24, **TWO_SLOTS},
}


def spoil_gradients_below(model, block: int, factor: float):
    """Multiply what flows back through a block's output: units above it get finite gradients, and are updated first."""

    def spoil(_module, _inputs, output):
        output.register_hook(lambda gradient: gradient * factor)

    return model.model.layers[block].register_forward_hook(spoil)


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
@pytest.mark.parametrize("options", SKIPPING.values(), ids=SKIPPING)
def test_a_step_with_a_non_finite_gradient_is_skipped_whole(options, factor, tmp_path):
    """Weights, moments and step counts are as if it had never been: what follows equals a run without it."""
    batches = make_batches(6)
    outcomes = []
    for name, spoilt in (("with", True), ("without", False)):
        model = make_llama()
        with open_session(model, adamw(model), tmp_path / name, **options) as session:
            for number, batch in enumerate(batches):
                if number == 3:
                    if not spoilt:
                        continue
                    before = dict(session.named_weights())
                    hook = spoil_gradients_below(model, 1, factor)
                    model(**batch).loss.backward()
                    hook.remove()
                    session.wait()
                    assert session.statistics.last_step.skipped and session.statistics.last_step.non_finite
                    assert all(torch.equal(tensor, before[key]) for key, tensor in session.named_weights())
                else:
                    model(**batch).loss.backward()
            session.wait()
            assert (session.statistics.steps, session.statistics.skipped_steps) == ((6, 1) if spoilt else (5, 0))
            assert not session.statistics.last_step.skipped
            outcomes.append(dict(session.named_weights()))
    assert all(torch.equal(outcomes[0][name], outcomes[1][name]) for name in outcomes[0])


def test_without_two_slots_or_all_gradients_such_a_step_ends_the_session(tmp_path):
    """Units above the bad gradient are updated already, and there is nothing to take them back from."""
    model = make_llama()
    with open_session(model, adamw(model), tmp_path) as session:
        spoil_gradients_below(model, 1, float("nan"))
        with pytest.raises(EngineError, match="NaN or infinite in step 1") as caught:
            model(**make_batches(1)[0]).loss.backward()
            session.wait()
        assert 'clip = "global"' in str(caught.value.remedy)
        session.close()


@pytest.mark.parametrize("schedule", UpdateSchedule)
@pytest.mark.parametrize("precision", Precision)
def test_states_in_ram_are_updated_where_they_lie(schedule, precision, tmp_path):
    """Nothing is read or written, also not within memory by way of a file's buffers; the bits are those of states on the drive."""
    outcomes = []
    for name, ram_bytes in (("drive", 0), ("RAM", 1 << 24)):
        outcomes.append(
            train_streamed(
                make_llama(), make_batches(3), tmp_path / name, schedule=schedule, precision=precision, ram_state_bytes=ram_bytes
            )
        )
    assert_bitwise_equal(*outcomes)
    assert not list((tmp_path / "RAM").rglob("*.bin")), "there are no files"


# ---------------------------------------------------------------- what a step is waited for
def test_the_verdict_on_deferred_updates_is_not_held_up_by_them(tmp_path, monkeypatch):
    may_update = threading.Event()
    update = OptimizerWorker._update

    def held_back(worker, *arguments):
        assert may_update.wait(60)
        update(worker, *arguments)

    monkeypatch.setattr(OptimizerWorker, "_update", held_back)
    model = make_llama()
    with open_session(model, adamw(model), tmp_path, clip=Clip.GLOBAL, max_gradient_norm=1e-3) as session:
        model(**make_batches(1)[0]).loss.backward()
        session.wait_gradients()
        last = session.statistics.last_step
        assert (last.step, last.clipped, session.statistics.clipped_steps) == (1, True, 1)
        assert session._stages.pending.is_pending(0)
        may_update.set()
        session.wait()
        assert not session._stages.pending.is_pending(0)


def test_waiting_for_gradients_raises_what_kept_them_from_being_looked_at(tmp_path):
    model = make_llama()
    with pytest.raises(EngineError, match="NaN or infinite"), open_session(model, adamw(model), tmp_path) as session:
        (model(**make_batches(1)[0]).loss * torch.inf).backward()
        session.wait_gradients()
