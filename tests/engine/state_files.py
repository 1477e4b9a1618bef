"""Small model states that change from step to step in a known way, and a process that is killed while it changes them.

Run as a program (`python -m tests.engine.state_files FOLDER`) it makes states in a folder for each boundary of a step and dies there.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from lohan._native import FaultPlan
from lohan.config import Durability, UnsafeFilesystems
from lohan.memory.store import Store, StoreFile
from lohan.planning.state_form import StateForm
from lohan.planning.workload import UnitKind
from lohan.states.layout import ParameterSpecification, UnitLayout, layout_unit
from lohan.states.slots import Part
from lohan.states.state_store import StateStore
from lohan.states.streams import streams_of

BOUNDARIES = ("begin", "first write", "last write", "before fdatasync", "before the record", "before rename", "after rename", "committed")
"""Where a step can break off, in their order."""


def make_layouts(*, chunk_parameters: int = 2048, width: int = 41) -> list[UnitLayout]:
    """Two units of a few chunks; the first has frozen parameters too."""
    units = [[("matrix", (50, width), True), ("frozen", (9, 100), False), ("scalar", (), True)], [("matrix", (60, 70), True)]]
    return [
        layout_unit(
            index,
            f"unit {index}",
            UnitKind.BLOCK,
            [ParameterSpecification(f"{index}.{name}", shape, trainable) for name, shape, trainable in entries],
            chunk_parameters=chunk_parameters,
        )
        for index, entries in enumerate(units)
    ]


@contextmanager
def opened(
    directories: list[Path],
    *,
    form: StateForm = StateForm.SPLIT,
    durability: Durability = Durability.STEP,
    faults: FaultPlan | None = None,
    layouts: list[UnitLayout] | None = None,
    ram_bytes: int = 0,
    spare_bytes: int = 0,
    resume: bool = False,
    resume_from: str | None = None,
) -> Iterator[StateStore]:
    """A store that is closed at the end; new states are loaded with numbers from a fixed seed and committed as step 0."""
    layouts = make_layouts() if layouts is None else layouts
    with Store(faults=faults) as io:
        states = StateStore(
            layouts,
            directories,
            form,
            io,
            durability=durability,
            ram_bytes=ram_bytes,
            spare_bytes=spare_bytes,
            resume=resume,
            resume_from=resume_from,
            unsafe_filesystems=UnsafeFilesystems.ALLOW,  # the tests' folders may be anywhere
        )
        try:
            if states.record is None:
                for layout in layouts:
                    values = [torch.randn(place.shape, generator=_generator(layout.index)) for place in layout.parameters]
                    states.load_unit(layout, lambda index, start, stop, values=values: values[index].reshape(-1)[start:stop])
                states.commit(0, {"step": 0})
            yield states
        finally:
            states.close()


def contents(states: StateStore) -> dict[Part, torch.Tensor]:
    """The newest bytes of every part."""
    found = {}
    for layout in make_layouts():
        for chunk in layout.chunks:
            for stream in streams_of(chunk, states.form):
                target = torch.empty(stream.length(chunk.length), dtype=stream.dtype)
                states.read(layout, chunk, stream, target).wait()
                found[layout.index, chunk.index, stream] = target.view(torch.uint8)
    return found


def change(states: StateStore, step: int, *, in_place: bool = False) -> None:
    """One step's reads and writes: every trained part becomes its old bytes plus random ones; with `in_place`, where it lies in memory."""
    for layout in make_layouts():
        for chunk in layout.chunks:
            if not chunk.trainable:
                continue
            memory = states.resident(layout, chunk) if in_place else None
            for stream in streams_of(chunk, states.form):
                if memory is None:
                    target = torch.empty(stream.length(chunk.length), dtype=stream.dtype)
                    states.read(layout, chunk, stream, target).wait()
                else:
                    target = memory[stream]
                added = torch.randint(0, 256, (target.nbytes,), generator=_generator(1000 * step + chunk.index), dtype=torch.uint8)
                target.view(torch.uint8).add_(added)
                states.write(layout, chunk, stream, target).wait()


def make_step(states: StateStore, step: int, *, in_place: bool = False) -> None:
    """One whole step."""
    states.begin_step(step)
    change(states, step, in_place=in_place)
    states.commit(step, {"step": step})


def same(ours: dict[Part, torch.Tensor], theirs: dict[Part, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[part], theirs[part]) for part in ours)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---------------------------------------------------------------- the process that is killed


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _break_off(boundary: str) -> None:
    """Have this process killed when step 2 reaches `boundary`."""
    written = StateStore.write
    writes = []

    def write(self, layout, chunk, stream, source):
        transfer = written(self, layout, chunk, stream, source)
        writes.append(transfer)
        if boundary == "first write":
            transfer.wait()
            _die()
        return transfer

    def before(function, name):
        def call(*values, **options):
            if boundary == name:
                _die()
            return function(*values, **options)

        return call

    StateStore.write = write
    StoreFile.sync = before(StoreFile.sync, "before fdatasync")
    Path.open = before(Path.open, "before the record")
    rename = before(Path.rename, "before rename")

    def rename_and_die(self, target):
        result = rename(self, target)
        if boundary == "after rename":
            _die()
        return result

    Path.rename = rename_and_die


def _run(folder: Path, boundary: str) -> None:
    with opened([folder / "a", folder / "b"], ram_bytes=60_000) as states:
        make_step(states, 1)
        states.begin_step(2)
        if boundary == "begin":
            _die()
        _break_off(boundary)
        change(states, 2)
        if boundary == "last write":
            _die()
        states.commit(2, {"step": 2})
        _die()


def main() -> None:
    """Die once at each boundary, each time in a process of its own."""
    torch.set_num_threads(1)
    for boundary in BOUNDARIES:
        child = os.fork()  # before any thread is started
        if child == 0:
            _run(Path(sys.argv[1]) / boundary.replace(" ", "-"), boundary)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (boundary, status)


if __name__ == "__main__":
    main()
