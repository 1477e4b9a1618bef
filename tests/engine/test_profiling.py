"""Measuring a machine: every figure is there, nothing is left behind, and what cannot be measured says why. No timing is asserted."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lohan._native import FaultPlan, ThreadPool
from lohan.errors import CapacityError, StorageError
from lohan.hardware.probe import probe
from lohan.hardware.profile import HardwareProfile
from lohan.hardware.transfers import Operation
from lohan.planning.fit import SSD_RESERVE_BYTES
from lohan.planning.state_form import StateForm
from lohan.profiling import drives, progress, timing
from lohan.profiling.device import measure_matmul
from lohan.profiling.host import HostMeasurements
from lohan.profiling.machine import NO_DIRECTORIES, NO_GPU, is_rough, measure_machine
from lohan.profiling.passes import HALF_READS, Passes, operations, transfer_setting
from lohan.profiling.progress import Meter, ProfileProgress
from lohan.profiling.timing import QUICK, THOROUGH, Effort
from lohan.units import GIB, MIB
from tests.engine.profiles import machine_facts, machine_profile

CPU = torch.device("cpu")
TINY = Effort(seconds=0.0, repetitions=2, copy_bytes=4 * MIB, elements=64 * 1024, file_bytes=4 * MIB, matrix_side=1024)
GPU_FIGURES = {"host_to_device", "device_to_host", "both_ways"}
DRIVE_FIGURES = {"ssd_read", "ssd_write", "ssd_mixed"}


def measured(*directories: Path, told: list[ProfileProgress] | None = None) -> HardwareProfile:
    facts = probe(directories).model_copy(update={"gpus": ()})
    on_progress = None if told is None else told.append
    return measure_machine(facts, device=CPU, state_directories=directories, threads=1, on_progress=on_progress, effort=TINY)


def missing(profile: HardwareProfile) -> set[str]:
    return {name for name, value in profile if value is None}


def notes(told: list[ProfileProgress]) -> str:
    return "\n".join(one.note for one in told if one.note)


# ---------------------------------------------------------------- whole profiles


def test_every_figure_of_this_machine_is_measured(tmp_path):
    directories = (tmp_path / "one", tmp_path / "two")
    for directory in directories:
        directory.mkdir()
    told: list[ProfileProgress] = []
    profile = measured(*directories, told=told)
    assert missing(profile) == GPU_FIGURES
    assert profile.device_memory == profile.host_memory
    assert [(update.form, update.threads) for update in profile.updates] == [(str(form), 1) for form in StateForm]
    assert {update.elements_per_second.repetitions for update in profile.updates} == {TINY.repetitions}
    assert profile.blocks == ()
    assert profile.fingerprint == probe(directories).model_copy(update={"gpus": ()}).digest
    assert profile.date.endswith("+00:00")
    assert HardwareProfile.model_validate_json(profile.model_dump_json()) == profile
    assert [list(directory.iterdir()) for directory in directories] == [[], []]
    fractions = [one.fraction for one in told]
    assert fractions == sorted(fractions)
    assert (fractions[0], fractions[-1]) == (0.0, 1.0)
    assert NO_GPU in notes(told)
    assert torch.get_num_threads() == 1


def test_without_state_directories_the_rest_is_measured():
    told: list[ProfileProgress] = []
    assert missing(measured(told=told)) == {*GPU_FIGURES, *DRIVE_FIGURES, "commit_seconds"}
    assert NO_DIRECTORIES in notes(told)


@pytest.mark.parametrize(
    ("name", "absent"), [("measure_drives", DRIVE_FIGURES), ("measure_commit", {"commit_seconds"})], ids=["transfers", "commits"]
)
@pytest.mark.parametrize(
    "error",
    [
        StorageError("write failed: No space left on device", place="/drive", remedy="Free space.", errno=errno.ENOSPC),
        CapacityError("too little is free", need_bytes=2, have_bytes=1, remedy="Free space."),
        MemoryError("no memory for the buffers"),
    ],
    ids=["full", "no room", "no memory"],
)
def test_a_figure_that_cannot_be_measured_is_none_with_its_reason(error, name, absent, tmp_path, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(f"lohan.profiling.machine.{name}", fail)
    told: list[ProfileProgress] = []
    assert missing(measured(tmp_path, told=told)) == {*GPU_FIGURES, *absent}
    assert str(error) in notes(told)


def test_a_machine_without_memory_is_told_what_is_missing(tmp_path):
    facts = probe([tmp_path])
    facts = facts.model_copy(update={"ram": facts.ram.model_copy(update={"free_bytes": MIB})})
    with pytest.raises(CapacityError, match="free memory"):
        measure_machine(facts, device=CPU, state_directories=[tmp_path], threads=1, effort=TINY)
    assert list(tmp_path.iterdir()) == []


def test_what_was_measured_in_a_hurry_is_known():
    profile = machine_profile(machine_facts())
    assert not is_rough(profile)
    hasty = profile.host_memory.model_copy(update={"repetitions": QUICK.repetitions})
    assert is_rough(profile.model_copy(update={"host_memory": hasty}))


# ---------------------------------------------------------------- drives


def with_faults(plan: FaultPlan) -> Callable[..., Passes]:
    return partial(Passes, faults=plan)


@pytest.mark.parametrize("nth", [1, 9, 20])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=["full", "broken"])
def test_a_drive_that_fails_is_named_and_no_file_stays(number, nth, tmp_path, monkeypatch):
    plan = FaultPlan()
    plan.fail(nth, number, count=1000)
    monkeypatch.setattr(drives, "Passes", with_faults(plan))
    with pytest.raises(StorageError, match=os.strerror(number)) as caught:
        drives.measure_drives([tmp_path], TINY, free_host_bytes=8 * GIB)
    assert caught.value.errno == number
    assert str(tmp_path) in str(caught.value.place)
    assert list(tmp_path.iterdir()) == []


def test_a_commit_that_fails_leaves_no_file(tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise StorageError("sync failed: Input/output error", errno=errno.EIO)

    monkeypatch.setattr("lohan.states.state_store._sync_all", fail)
    with pytest.raises(StorageError, match="sync failed"):
        drives.measure_commit([tmp_path], TINY)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_may_not_be_written_to_is_named(tmp_path, monkeypatch):
    def refuse(**_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    for measure in (partial(drives.measure_drives, free_host_bytes=8 * GIB), drives.measure_commit):
        with pytest.raises(StorageError, match="Permission denied") as caught:
            measure([tmp_path], TINY)
        assert caught.value.place == str(tmp_path)


def test_a_directory_that_is_not_there_yet_is_measured_above_and_not_made(tmp_path):
    assert drives.nearest_folder(tmp_path / "not" / "yet") == tmp_path
    speeds = drives.measure_drives([tmp_path / "not" / "yet"], TINY, free_host_bytes=8 * GIB)
    assert min(speeds.read.value, speeds.write.value, speeds.mixed.value) > 0
    assert drives.measure_commit([tmp_path / "not" / "yet"], TINY).value > 0
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def asked(monkeypatch) -> list[int]:
    """The files' sizes that were asked for; nothing is written."""
    sizes: list[int] = []

    def stop(*_: object, file_bytes: int, **__: object) -> None:
        sizes.append(file_bytes)
        raise StorageError("enough is known")

    monkeypatch.setattr(drives, "Passes", stop)
    return sizes


def free_space(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=0, used=0, free=free_bytes))


def measure(*directories: Path, effort: Effort = THOROUGH, free_host_bytes: int = 64 * GIB) -> None:
    drives.measure_drives(directories, effort, free_host_bytes=free_host_bytes)


def test_files_leave_the_reserve_alone_and_share_a_file_system(tmp_path, monkeypatch, asked):
    directories = [tmp_path / "one", tmp_path / "two"]
    for directory in directories:
        directory.mkdir()
    in_flight = transfer_setting(directories).in_flight_bytes
    for free_bytes, expected in (
        (SSD_RESERVE_BYTES + 100 * GIB, THOROUGH.file_bytes),
        (SSD_RESERVE_BYTES + 4 * in_flight, 2 * in_flight),
        (SSD_RESERVE_BYTES + 4 * in_flight - 1, in_flight),
    ):
        free_space(monkeypatch, free_bytes)
        with pytest.raises(StorageError, match="enough"):
            measure(*directories)
        assert asked.pop() == expected
    free_space(monkeypatch, SSD_RESERVE_BYTES + 2 * in_flight - 1)
    for call in (measure, lambda *where: drives.measure_commit(where, TINY)):
        free_space(monkeypatch, SSD_RESERVE_BYTES + (2 * in_flight - 1 if call is measure else 1))
        with pytest.raises(CapacityError, match="stay free") as caught:
            call(*directories)
        assert caught.value.place == str(directories[0])
    assert not asked


def test_files_in_memory_are_said_to_be_and_stay_small(tmp_path, monkeypatch, asked):
    monkeypatch.setattr(drives, "lies_in_memory", lambda _: True)
    in_flight = transfer_setting([tmp_path]).in_flight_bytes
    with pytest.raises(StorageError, match="enough"):
        measure(tmp_path, free_host_bytes=8 * 3 * in_flight)
    assert asked.pop() == 3 * in_flight
    monkeypatch.setattr(drives, "Passes", Passes)
    assert "tmpfs" in drives.measure_drives([tmp_path], TINY, free_host_bytes=64 * GIB).notes[0]


def test_buffers_that_memory_cannot_hold_are_not_made(tmp_path, asked):
    with pytest.raises(CapacityError, match="buffers"):
        measure(tmp_path, free_host_bytes=64 * MIB)
    assert not asked


def test_mixed_operations_of_a_profile_are_half_reads():
    moves = list(operations(Operation.MIXED, total_bytes=20 * 4096, block_bytes=4096, mix=HALF_READS))
    assert sorted(offset for _, offset in moves) == [index * 4096 for index in range(20)]
    assert [kind for kind, _ in moves] == [Operation.READ, Operation.WRITE] * 10


# ---------------------------------------------------------------- host and device


@pytest.mark.parametrize("free_bytes", [0, 16 * MIB - 1])
def test_too_little_host_memory_is_an_error_with_its_figures(free_bytes):
    with pytest.raises(CapacityError) as caught:
        HostMeasurements(ThreadPool(1), TINY, free_bytes=free_bytes)
    assert (caught.value.need_bytes, caught.value.have_bytes) == (16 * MIB, free_bytes)


def test_little_host_memory_is_enough_for_small_arrays():
    host = HostMeasurements(ThreadPool(1), replace(TINY, elements=1 << 30), free_bytes=16 * MIB)
    assert host.update(StateForm.SPLIT).elements_per_second.value > 0
    assert host.gradient_norm(torch.bfloat16).value > 0
    assert host.memory().value > 0


def test_matrices_shrink_until_they_fit():
    assert measure_matmul(CPU, torch.float32, TINY, free_bytes=8 * MIB).value > 0
    with pytest.raises(CapacityError) as caught:
        measure_matmul(CPU, torch.float32, TINY, free_bytes=MIB)
    assert caught.value.have_bytes == MIB


# ---------------------------------------------------------------- repetitions and time left


def test_the_median_and_the_spread_of_repetitions_are_kept():
    figure = timing.summary([2.0, 1.0, 4.0])
    assert (figure.value, figure.spread, figure.repetitions) == (2.0, 1.5, 3)


def test_the_first_call_does_not_count(monkeypatch):
    monkeypatch.setattr(timing.time, "sleep", lambda _: None)
    seconds = iter([100.0, 2.0, 4.0, 1.0])
    figure = timing.rate(8.0, lambda: next(seconds), replace(TINY, repetitions=3))
    assert (figure.value, figure.repetitions) == (4.0, 3)


def test_repetitions_go_on_for_their_time_and_no_longer(monkeypatch):
    clock = iter(float(instant) for instant in range(1000))
    monkeypatch.setattr(timing.time, "sleep", lambda _: None)
    monkeypatch.setattr(timing.time, "monotonic", lambda: next(clock))
    assert len(timing.repeated(lambda: 0.1, replace(TINY, seconds=10.0))) == 11
    assert len(timing.repeated(lambda: 0.1, replace(TINY, seconds=1e9))) == 25


def test_the_time_left_follows_what_stages_took(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    told: list[ProfileProgress] = []
    meter = Meter([1.0, 3.0], told.append)
    meter.begin("first")
    now[0] += 2.0
    meter.end()
    meter.note("something")
    meter.begin("second")
    meter.end()
    assert [(one.what, one.fraction, one.seconds_left, one.note) for one in told] == [
        ("first", 0.0, 4.0, ""),
        ("first", 0.25, 6.0, "something"),
        ("second", 0.25, 6.0, ""),
        ("", 1.0, 0.0, ""),
    ]


def test_nothing_is_said_of_the_time_left_before_anything_is_known():
    told: list[ProfileProgress] = []
    Meter([1.0], told.append, in_seconds=False).begin("blocks")
    assert told[0].seconds_left is None
