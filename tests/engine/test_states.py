"""Layouts, chunk places and the files behind them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lohan.config import UnsafeFilesystems
from lohan.errors import CapacityError, ConfigError, StorageError
from lohan.memory.store import Store
from lohan.planning.state_form import StateForm
from lohan.planning.workload import UnitKind
from lohan.states.layout import PARAMETER_ALIGNMENT, UNIT_ALIGNMENT, ParameterSpecification, layout_unit
from lohan.states.record import FOLDER
from lohan.states.state_store import StateStore
from lohan.states.streams import Stream, place_chunks, streams_of, trainable_streams

shapes = st.lists(st.integers(1, 60), min_size=0, max_size=3).map(tuple)
parameters = st.lists(st.tuples(shapes, st.booleans()), min_size=1, max_size=12)
chunk_sizes = st.sampled_from([UNIT_ALIGNMENT, 2 * UNIT_ALIGNMENT, 32 * UNIT_ALIGNMENT])


def make_layout(drawn, chunk_parameters=UNIT_ALIGNMENT, index=0):
    entries = [ParameterSpecification(f"p{number}", shape, trainable) for number, (shape, trainable) in enumerate(drawn)]
    return layout_unit(index, f"unit {index}", UnitKind.BLOCK, entries, chunk_parameters=chunk_parameters)


@settings(max_examples=60, deadline=None)
@given(parameters, chunk_sizes)
def test_layouts_hold_every_element_once(drawn, chunk_parameters):
    layout = make_layout(drawn, chunk_parameters)
    owner = [-1] * layout.elements
    for index, place in enumerate(layout.parameters):
        assert place.offset % PARAMETER_ALIGNMENT == 0
        assert place.offset + place.elements <= (layout.trainable_elements if place.trainable else layout.elements)
        for position in range(place.offset, place.offset + place.elements):
            assert owner[position] == -1, "two parameters overlap"
            owner[position] = index
    assert [chunk.index for chunk in layout.chunks] == list(range(len(layout.chunks)))
    assert sum(chunk.length for chunk in layout.chunks) == layout.elements
    seen = [-1] * layout.elements
    for chunk in layout.chunks:
        assert chunk.offset % UNIT_ALIGNMENT == 0 and chunk.length % UNIT_ALIGNMENT == 0 and chunk.length <= chunk_parameters
        for piece in layout.pieces(chunk):
            assert layout.parameters[piece.parameter].trainable is chunk.trainable
            for position in range(chunk.offset + piece.offset, chunk.offset + piece.offset + piece.length):
                seen[position] = piece.parameter
    assert seen == owner, "the chunks' pieces are the parameters"


def test_chunks_of_an_odd_size_are_refused():
    for size in (0, -2048, 1000, UNIT_ALIGNMENT + 1):
        with pytest.raises(ConfigError) as caught:
            make_layout([((4,), True)], size)
        assert caught.value.place == "chunk_parameters"


@settings(max_examples=60, deadline=None)
@given(st.lists(parameters, min_size=1, max_size=4), st.integers(1, 5), st.sampled_from(list(StateForm)), st.integers(1, 2))
def test_places_never_overlap_and_go_round_robin(drawn, directories, form, slots):
    layouts = [make_layout(unit, index=index) for index, unit in enumerate(drawn)]
    table, sizes = place_chunks(layouts, form, directories, slots=slots)
    ends: dict[tuple[int, Stream], int] = {}
    turns = []
    for layout in layouts:
        for chunk in layout.chunks:
            kept = streams_of(chunk, form)
            places = [table[layout.index, chunk.index, stream] for stream in kept]
            turns.append(places[0].directory)
            for stream, place in zip(kept, places, strict=True):
                assert len(place.offsets_bytes) == (slots if chunk.trainable else 1)
                for offset in place.offsets_bytes:
                    assert offset % 4096 == 0
                    assert offset >= ends.get((place.directory, stream), 0)
                    ends[place.directory, stream] = offset + stream.size_bytes(chunk.length)
    assert turns == [number % directories for number in range(len(turns))]
    assert all(ends[key] <= sizes[key] for key in ends)


def test_a_parameter_larger_than_a_chunk_is_loaded_in_stretches(tmp_path):
    layout = make_layout([((9, 1000), True), ((5, 900), False)], chunk_parameters=2048)
    asked = []

    def read(index, start, stop):
        asked.append((index, start, stop))
        return torch.zeros(stop - start)

    with Store() as io:
        states = StateStore([layout], [tmp_path], StateForm.FP32, io, unsafe_filesystems=UnsafeFilesystems.ALLOW)
        states.load_unit(layout, read)
        states.close()
    for index, elements in ((0, 9000), (1, 4500)):
        stretches = [(start, stop) for parameter, start, stop in asked if parameter == index]
        assert [start for start, _ in stretches] == [0, *(stop for _, stop in stretches[:-1])]
        assert stretches[-1][1] == elements
        assert all(stop - start <= 2048 for start, stop in stretches)


@pytest.mark.parametrize("form", StateForm)
def test_what_is_loaded_is_read_back(form, tmp_path):
    drawn = [((3000,), True), ((7, 11), False), ((50, 41), True), ((), True)]
    layout = make_layout(drawn)
    values = {place.name: torch.randn(place.shape) for place in layout.parameters}
    with Store() as io:
        states = StateStore([layout], [tmp_path / "a", tmp_path / "b"], form, io, unsafe_filesystems=UnsafeFilesystems.ALLOW)
        states.load_unit(layout, lambda index, start, stop: values[layout.parameters[index].name].reshape(-1)[start:stop])
        weights = torch.empty(layout.elements, dtype=states.weights_stream.dtype)
        for _, transfer in states.read_weights(layout, weights, layout.chunks):
            transfer.wait()
        for place in layout.parameters:
            value = values[place.name]
            # Halfway between two bf16 numbers the split goes away from zero, torch to even: 1 of 65,536 random values.
            working = weights[place.offset : place.offset + place.elements].view(place.shape)
            assert (working.float() - value).abs().le(value.abs() * 2**-8).all()
            read = states.read_parameter(layout, place)
            exact = value if place.trainable or not form.is_split else value.bfloat16()
            assert read.dtype is exact.dtype and torch.equal(read, exact)
        for chunk in layout.chunks:
            if chunk.trainable:
                for stream in trainable_streams(form)[2 if form.is_split else 1 :]:
                    moment = torch.full((stream.length(chunk.length),), 7).to(stream.dtype)
                    states.read(layout, chunk, stream, moment).wait()
                    assert not moment.any(), "moments start at zero"
        states.close()


def test_moments_start_at_zero_over_the_leftovers_of_an_earlier_run(tmp_path):
    layout = make_layout([((3000,), True)])
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "first_moment.bin").write_bytes(b"\xff" * 65536)
    with Store() as io:
        states = StateStore([layout], [tmp_path], StateForm.FP32, io, unsafe_filesystems=UnsafeFilesystems.ALLOW)
        moment = torch.full((layout.chunks[0].length,), math.nan)
        states.read(layout, layout.chunks[0], Stream.FIRST_MOMENT, moment).wait()
        assert not moment.any()
        states.close()


def test_states_larger_than_the_drive_are_refused_with_both_figures(tmp_path):
    huge = layout_unit(
        0, "huge", UnitKind.BLOCK, [ParameterSpecification("weight", (2**25, 2**25), trainable=True)], chunk_parameters=2**50
    )
    with Store() as io, pytest.raises(CapacityError, match=r"need 12288\.00 TiB") as caught:
        StateStore([huge], [tmp_path], StateForm.SPLIT, io, unsafe_filesystems=UnsafeFilesystems.ALLOW)
    assert caught.value.need_bytes == 12 * 2**50
    assert 0 < caught.value.have_bytes < caught.value.need_bytes
    assert not list((tmp_path / FOLDER).glob("*.bin"))


def test_a_state_directory_that_cannot_be_made_names_itself(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with Store() as io, pytest.raises(StorageError) as caught:
        StateStore([make_layout([((4,), True)])], [tmp_path / "file"], StateForm.FP32, io)
    assert str(tmp_path / "file") in str(caught.value.place)
    assert caught.value.remedy
