"""What a run reserves, and whether it fits beside the others: devices, GPUs that others hold, host memory, each state directory."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fixtures.processes import no_process_left
from fixtures.runs import make_run, read_run
from sqlalchemy import Engine

from lohan.hardware.probe import GpuFacts, GpuHolder, GpuWork
from lohan.planning.fit import RAM_RESERVE_BYTES
from lohan.units import GIB
from lohan_app.entities import Run
from lohan_app.hardware.holders import describe, run_of
from lohan_app.settings import Settings
from lohan_app.worker.launcher import RunFiles, TrainerNote
from lohan_app.worker.processes import start_ticks
from lohan_app.worker.reservations import (
    DirectoryRoom,
    GpuRoom,
    Held,
    Machine,
    Need,
    Reservation,
    fit,
    gpu_room,
    held_by,
    look_at_machine,
    need_of,
)

FOLDERS = (Path("/a"), Path("/b"))
DIRECTORIES = (DirectoryRoom("/a", "drive 1", 50 * GIB), DirectoryRoom("/b", "drive 2", 20 * GIB))
MACHINE = Machine(("cpu:0", "cpu:1"), 64 * GIB, 60 * GIB, DIRECTORIES, 100 * GIB)
FREE_GPU = GpuRoom(24 * GIB, 23 * GIB)
GPUS = replace(MACHINE, devices=("GPU-a", "GPU-b"), gpus={"GPU-a": FREE_GPU, "GPU-b": FREE_GPU})
STRANGER = GpuHolder(pid=4711, name="python", user="ann", bytes=3 * GIB)


def held(name: str = "other", *devices: str, ram_bytes: int = 0, is_settled: bool = False, **space: int) -> Held:
    return Held(name, devices, ram_bytes, {f"/{path}": size for path, size in space.items()}, is_settled)


# ---------------------------------------------------------------- devices
@pytest.mark.parametrize(
    ("asked", "machine", "given"),
    [
        ("auto", MACHINE, "cpu:0"),
        ("cpu", MACHINE, "cpu:0"),
        ("cpu:1", MACHINE, "cpu:1"),
        ("auto", GPUS, "GPU-a"),
        ("cuda", GPUS, "GPU-a"),
        ("cuda:1", GPUS, "GPU-b"),
        ("GPU-b", GPUS, "GPU-b"),
    ],
)
def test_a_run_gets_the_device_it_asks_for(asked: str, machine: Machine, given: str) -> None:
    assert fit(Need(asked, 5, {"/a": 6}), machine, []) == Reservation([given], 5, {"/a": 6})


@pytest.mark.parametrize(("asked", "machine"), [("cuda", MACHINE), ("cpu", GPUS), ("cuda:2", GPUS), ("GPU-x", GPUS), ("cpu:7", MACHINE)])
def test_a_device_that_runs_may_not_use_is_named(asked: str, machine: Machine) -> None:
    answer = fit(Need(asked, 0), machine, [])
    assert isinstance(answer, str)
    assert repr(asked) in answer
    assert "LOHAN_DEVICES" in answer


def test_a_taken_device_leaves_the_next_one_and_then_none() -> None:
    first, second = held("first", "cpu:0"), held("second", "cpu:1")
    assert fit(Need("auto", 0), MACHINE, [first]) == Reservation(["cpu:1"], 0)
    assert fit(Need("auto", 0), MACHINE, [first, second]) == "Waits for cpu:0 or cpu:1, in use by 'first', 'second'."


# ---------------------------------------------------------------- GPUs that others hold
def gpus(**rooms: GpuRoom) -> Machine:
    return replace(GPUS, gpus=GPUS.gpus | {f"GPU-{letter}": room for letter, room in rooms.items()})


def test_a_gpu_that_a_stranger_holds_is_passed_over_and_then_waited_for() -> None:
    taken = replace(FREE_GPU, held_by=(describe(STRANGER),))
    assert fit(Need("auto", 0, gpu_bytes=GIB), gpus(a=taken), []) == Reservation(["GPU-b"], 0)
    assert fit(Need("cuda:0", 0, gpu_bytes=GIB), gpus(a=taken), []) == "Waits for GPU-a, in use by process 4711 (python, of ann, 3.00 GiB)."
    answer = fit(Need("cuda", 0), gpus(a=taken), [held("mine", "GPU-b")])
    assert answer == "Waits for GPU-a or GPU-b, in use by 'mine', process 4711 (python, of ann, 3.00 GiB)."


def test_memory_that_nobody_is_named_for_keeps_a_gpu_too_but_not_what_a_display_takes() -> None:
    drawn = replace(FREE_GPU, free_bytes=10 * GIB, drawn_by=("process 9 (Xorg)",))
    assert fit(Need("cuda", 0, gpu_bytes=20 * GIB), gpus(a=drawn), []) == Reservation(["GPU-b"], 0)
    answer = fit(Need("cuda:0", 0, gpu_bytes=20 * GIB), gpus(a=drawn), [])
    assert answer == "Waits for GPU-a; needs 20.00 GiB of GPU-a, free 10.00 GiB beside process 9 (Xorg)."
    # A plan may take all that was free; a display that opens a window since is not waited for.
    assert isinstance(fit(Need("cuda:0", 0, gpu_bytes=11 * GIB), gpus(a=drawn), []), Reservation)
    assert isinstance(fit(Need("cuda:0", 0, gpu_bytes=12 * GIB), gpus(a=drawn), []), str)


def test_the_processes_of_our_own_active_run_are_not_strangers_and_cpu_runs_do_not_care() -> None:
    taken = replace(FREE_GPU, free_bytes=0, held_by=(describe(STRANGER),))
    mixed = replace(gpus(a=taken), devices=("GPU-a", "cpu:0"))
    assert fit(Need("cuda", 0), mixed, [held("mine", "GPU-a")]) == "Waits for GPU-a, in use by 'mine'."
    assert fit(Need("cpu", 0), mixed, []) == Reservation(["cpu:0"], 0)


@pytest.mark.parametrize("argument", ["run.toml", ""])
def test_trainers_of_our_own_are_told_by_their_sessions(settings: Settings, engine: Engine, tmp_path: Path, argument: str) -> None:
    """Also what they have started, and measurements, which get the run's folder; a stranger whose command line looks like one is none."""
    run_id = make_run(settings, engine)
    files = RunFiles(settings.run_folder(run_id))
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1, flush=True); input()'])"
    with no_process_left(tmp_path):
        trainer = subprocess.Popen(
            [sys.executable, "-c", program, str(files.folder / argument)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        try:
            assert trainer.stdout is not None
            trainer.stdout.readline()
            assert run_of(settings, trainer.pid) is None, "its folder does not name it"
            TrainerNote(trainer.pid, start_ticks(trainer.pid) or 0, 1, None).write(files.trainer_note)
            child = int(Path(f"/proc/{trainer.pid}/task/{trainer.pid}/children").read_text().split()[0])
            assert [run_of(settings, pid) for pid in (trainer.pid, child, os.getpid(), 2**22 + 1)] == [run_id, run_id, None, None]
            ours = GpuHolder(pid=child, name="python", bytes=GIB)
            draws = GpuHolder(pid=child, name="Xorg", bytes=0, work=GpuWork.GRAPHICS)
            gpu = GpuFacts(uuid="GPU-a", index=0, name="x", total_bytes=9, free_bytes=8, holders=(ours, draws, STRANGER))
            assert gpu_room(settings, gpu) == GpuRoom(
                9,
                8,
                (f"the trainer of {run_id}, process {child} (python, 1.00 GiB), which is just ending", describe(STRANGER)),
                (f"process {child} (Xorg)",),
            )
        finally:
            trainer.communicate(b"\n", timeout=60)


# ---------------------------------------------------------------- host memory
def test_host_memory_has_to_fit_beside_what_others_were_promised_and_what_is_free_now() -> None:
    room = 64 * GIB - 40 * GIB - RAM_RESERVE_BYTES
    other = held(ram_bytes=40 * GIB, is_settled=True)
    assert isinstance(fit(Need("auto", room), MACHINE, [other]), Reservation)
    assert "host memory" in str(fit(Need("auto", room + 1), MACHINE, [other]))
    crowded = replace(MACHINE, ram_free_bytes=10 * GIB)
    assert "host memory" in str(fit(Need("auto", 10 * GIB), crowded, []))


def test_what_another_run_is_about_to_take_of_host_memory_is_not_given_twice() -> None:
    """Other programs hold 24 GiB: what is free now is no longer when the run that was claimed last has come to its first step."""
    crowded = replace(MACHINE, ram_free_bytes=40 * GIB)
    need = Need("auto", 20 * GIB)
    assert "free 9.00 GiB" in str(fit(need, crowded, [held(ram_bytes=30 * GIB)]))
    assert isinstance(fit(need, crowded, [held(ram_bytes=30 * GIB, is_settled=True)]), Reservation)


def test_a_run_that_may_keep_states_on_the_drives_takes_what_host_memory_there_is():
    """Rather than to wait for more: states in RAM are copies, which save reads."""
    crowded = replace(MACHINE, ram_free_bytes=10 * GIB + RAM_RESERVE_BYTES)
    assert fit(Need("auto", 12 * GIB, spare_ram_bytes=4 * GIB), crowded, []) == Reservation(["cpu:0"], 10 * GIB)
    assert fit(Need("auto", 9 * GIB, spare_ram_bytes=4 * GIB), crowded, []) == Reservation(["cpu:0"], 9 * GIB)
    assert "needs 11.00 GiB, free 10.00 GiB" in str(fit(Need("auto", 15 * GIB, spare_ram_bytes=4 * GIB), crowded, []))


# ---------------------------------------------------------------- state directories
def test_every_directory_needs_room_for_its_share_and_the_reason_names_it() -> None:
    assert isinstance(fit(Need("auto", 0, {"/a": 20 * GIB, "/b": 20 * GIB}), MACHINE, []), Reservation)
    answer = fit(Need("auto", 0, {"/a": 21 * GIB, "/b": 21 * GIB}), MACHINE, [])
    assert answer == "Waits for space in the state directories: needs 21.00 GiB in /b, free 20.00 GiB."


def test_directories_on_one_drive_share_its_space() -> None:
    shared = replace(MACHINE, directories=tuple(DirectoryRoom(path, "drive", 50 * GIB) for path in ("/a", "/b")))
    assert isinstance(fit(Need("auto", 0, {"/a": 25 * GIB, "/b": 25 * GIB}), shared, []), Reservation)
    assert "needs 52.00 GiB in /a and /b, free 50.00 GiB" in str(fit(Need("auto", 0, {"/a": 26 * GIB, "/b": 26 * GIB}), shared, []))


def test_space_that_another_run_is_about_to_fill_is_not_given_twice() -> None:
    need = Need("auto", 0, {"/a": 6 * GIB, "/b": 6 * GIB})
    assert "needs 6.00 GiB in /b, free 5.00 GiB" in str(fit(need, MACHINE, [held(a=15 * GIB, b=15 * GIB)]))
    # When it is at work its states are on the drives, and so no longer free.
    assert isinstance(fit(need, MACHINE, [held(a=15 * GIB, b=15 * GIB, is_settled=True)]), Reservation)


# ---------------------------------------------------------------- rows
def plan(ram_bytes: int = 0, ssd_bytes: int = 0, gpu_bytes: int = 0) -> dict[str, Any]:
    sizes = (("gpu", gpu_bytes), ("ram", ram_bytes), ("ssd", ssd_bytes))
    return {"device": "cpu", "tiers": [{"tier": name, "items": [{"name": "x", "bytes": size}]} for name, size in sizes]}


@pytest.mark.parametrize(
    ("durability", "asked", "spare"),
    [("step", "auto", 2), ("snapshot", None, 2), ("none", "auto", 0), ("step", 2 * GIB, 0), ("step", 0, 0)],
)
def test_only_copies_that_the_plan_chose_can_be_spared(durability: str, asked: object, spare: int) -> None:
    items = [{"name": "model states", "bytes": 2 * GIB, "formula": ""}, {"name": "process base", "bytes": GIB, "formula": ""}]
    run = Run(
        plan={"durability": durability, "tiers": [{"tier": "ram", "capacity_bytes": 9 * GIB, "items": items}]},
        settings={"engine": {} if asked is None else {"ram_state_bytes": asked}},
    )
    assert need_of(run, (), states={}) == Need("auto", 3 * GIB, spare_ram_bytes=spare * GIB)


@pytest.mark.parametrize(("durability", "spare"), [("none", 1), ("snapshot", 3)])
def test_second_places_of_states_can_always_be_spared(durability: str, spare: int) -> None:
    items = [{"name": "model states", "bytes": 2 * GIB, "formula": ""}, {"name": "second places of states", "bytes": GIB, "formula": ""}]
    tiers = [{"tier": "ram", "capacity_bytes": 9 * GIB, "items": items}]
    run = Run(plan={"durability": durability, "spare_state_bytes": GIB, "tiers": tiers}, settings={"engine": {}})
    assert need_of(run, (), states={}) == Need("auto", 3 * GIB, spare_ram_bytes=spare * GIB)


def test_the_need_comes_from_the_plan_with_an_equal_share_in_each_directory() -> None:
    run = Run(plan=plan(3 * GIB, 5 * GIB + 1, 7), settings={"engine": {"device": "cpu:1"}})
    half = (5 * GIB) // 2 + 1
    assert need_of(run, FOLDERS, states={}) == Need("cpu:1", 3 * GIB, {"/a": half, "/b": half}, gpu_bytes=7)
    assert need_of(Run(settings={}), FOLDERS, states={}) == Need("auto", 0, {"/a": 0, "/b": 0})
    # What its earlier attempts left is taken already.
    assert need_of(run, FOLDERS, states={"/a": GIB, "/b": 9 * GIB}).space == {"/a": half - GIB, "/b": 0}
    run.started_plan = plan(GIB)
    assert need_of(run, FOLDERS, states={}).ram_bytes == GIB, "what it last began with"
    assert need_of(run, FOLDERS, states={}, plan=plan(2 * GIB)).ram_bytes == 2 * GIB


def test_what_a_row_holds(settings: Settings, engine: Engine) -> None:
    columns = {"devices": ["cpu:0"], "reserved_ram_bytes": 7}
    run = read_run(engine, make_run(settings, engine, step=3, **columns))
    assert held_by(run) == Held("a run", ["cpu:0"], 7, {}, is_settled=False)
    run.reserved_directories, run.phase = {"/a": 9}, "training"
    assert held_by(run) == Held("a run", ["cpu:0"], 7, {"/a": 9}, is_settled=True)


def test_this_machine(settings: Settings) -> None:
    machine = look_at_machine(settings)
    assert machine.devices == settings.devices
    assert machine.ram_total_bytes >= machine.ram_free_bytes > 0
    assert [room.path for room in machine.directories] == [str(folder) for folder in settings.state_folders]
    assert all(room.free_bytes > 0 for room in machine.directories)
