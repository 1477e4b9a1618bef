"""Weights that stay on the device from a unit's forward to its backward: loads of a step, bytes of the slots, and the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lohan.config import Precision
from lohan.errors import ConfigError
from lohan.models.blocks import trace_workload
from lohan.planning.footprint import device_items, measure
from lohan.streaming.parameters import DebugMode
from tests.engine.reference import adamw, assert_bitwise_equal, make_batches, make_llama, open_session, train_streamed

BLOCKS = 8
UNITS = BLOCKS + 2
"""Embedding, blocks, head."""


def model_of(*, tied: bool) -> torch.nn.Module:
    return make_llama(tied=tied, num_hidden_layers=BLOCKS)


def loads_of_a_step(folder: Path, *, tied: bool, steps: int = 2, **options: Any) -> int:
    """What one step more adds: what is loaded ahead for the step after the last is the same for both."""
    totals = []
    for count in (steps, steps + 1):
        model = model_of(tied=tied)
        with open_session(model, adamw(model), folder / str(count), **options) as session:
            for batch in make_batches(count):
                model(**batch).loss.backward()
        totals.append(session.statistics.unit_loads)
    return totals[1] - totals[0]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    ("slots", "kept"), [(2, 0), (3, 0), (3, 1), (3, 2), (2, 4), (3, 5), (5, 3), (3, UNITS - 3), (3, UNITS), (UNITS, 0)]
)
def test_loads_of_a_step_are_as_derived(slots, kept, tied, tmp_path):
    """`lohan.planning.slots` derives them. Untied, the backward reads one unit less; tied, the forward begins and ends with unit 0."""
    read_in_backward = UNITS if tied else UNITS - 1
    on_device = min(kept + slots, read_in_backward)
    again = 1 if tied and kept == 0 and slots < UNITS else 0
    expected = UNITS + again + read_in_backward - on_device
    assert loads_of_a_step(tmp_path, tied=tied, slots=slots, kept_units=kept) == expected
    if kept + slots >= UNITS:
        assert expected == UNITS, "each unit once"


def test_a_kept_unit_that_is_not_updated_is_not_loaded_again(tmp_path):
    totals = []
    for steps in (2, 5):
        model = model_of(tied=False)
        for parameter in model.model.layers.parameters():
            parameter.requires_grad_(requires_grad=False)
        with open_session(model, adamw(model), tmp_path / str(steps), kept_units=UNITS) as session:
            for batch in make_batches(steps):
                model(**batch).loss.backward()
        totals.append(session.statistics.unit_loads)
    assert totals[1] - totals[0] == 3 * 2, "embedding and head alone"


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_kept_units_do_not_change_one_bit(tied, tmp_path):
    variants: list[dict[str, Any]] = [
        {},
        {"kept_units": 1},
        {"kept_units": 3, "slots": 2},
        {"kept_units": 5},
        {"kept_units": 9, "debug": DebugMode.NAN_FILL},
        {"kept_units": 2, "debug": DebugMode.NAN_FILL, "micro_batch_size": 2},
    ]
    batches = make_batches(3, padded=True)
    first, *others = (
        train_streamed(make_llama(tied=tied), batches, tmp_path / str(number), **options) for number, options in enumerate(variants)
    )
    for other in others:
        assert_bitwise_equal(first, other)


def test_evaluation_between_steps_reads_what_was_updated(tmp_path):
    losses = []
    for kept in (0, 4):
        model = make_llama()
        with open_session(model, adamw(model), tmp_path / str(kept), kept_units=kept) as session:
            found = []
            for batch in make_batches(3):
                model(**batch).loss.backward()
                with torch.no_grad():
                    found.append(model(**batch).loss.item())
            session.wait()
        losses.append(found)
    assert losses[0] == losses[1]


@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kept", [0, 2, 4, UNITS])
def test_slots_are_exactly_the_plans_bytes(kept, tied, precision, tmp_path):
    """Widths that no alignment divides; the embedding is larger than a block."""
    sizes = {"hidden_size": 40, "intermediate_size": 100, "vocab_size": 1500, "num_hidden_layers": 3, "num_attention_heads": 2}
    model = make_llama(tied=tied, **sizes)
    workload = trace_workload(model.config)
    items = device_items(measure(workload, precision), 4, 16, 2, kept)
    planned = next(item.bytes for item in items if item.name == "parameter slots")
    with open_session(model, adamw(model), tmp_path, kept_units=kept, precision=precision, chunk_parameters=1 << 20) as session:
        held = {holding.holder: holding.bytes for holding in session.host_memory.holdings}
        assert held["parameter slots"] == planned


def test_a_negative_number_of_kept_units_is_refused(tmp_path):
    model = make_llama()
    with pytest.raises(ConfigError, match="kept_units is -1"):
        open_session(model, adamw(model), tmp_path, kept_units=-1)
