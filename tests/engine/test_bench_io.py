"""`lohan bench io`: what is moved and in which order, fio's arguments and output, the choice of transfers. No timing is asserted."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from lohan._native import IoEngine
from lohan.bench import fio, striping
from lohan.bench import io as io_bench
from lohan.errors import ConfigError
from lohan.hardware.probe import lies_in_memory
from lohan.hardware.transfers import (
    CHOICE_FILE,
    Engine,
    Operation,
    TransferChoice,
    TransferSetting,
    TransferSpeed,
    choose_transfers,
    known_setting,
    load_choice,
    save_choice,
)
from lohan.memory.store import Store
from lohan.profiling import passes
from lohan.units import GIB, KIB, MIB
from tests.engine.bench_runs import Notes, measured, options

# ---------------------------------------------------------------- transfers


@pytest.mark.parametrize("blocks", [1, 2, 9, 10, 33])
def test_mixed_passes_move_every_block_once(blocks: int):
    moves = list(passes.operations(Operation.MIXED, total_bytes=blocks * 4096, block_bytes=4096))
    assert sorted(offset for _, offset in moves) == [index * 4096 for index in range(blocks)]
    reads = sum(kind is Operation.READ for kind, _ in moves)
    assert abs(reads - 0.7 * blocks) < 1


def test_passes_write_what_fits_and_read_it_back(tmp_path):
    setting = TransferSetting(Engine.THREADS, 64 * KIB, 3)
    with passes.Passes([tmp_path / "states"], setting, file_bytes=MIB) as transfers:
        # Reading comes last: it fills the buffers that writing takes its bytes from.
        for operation in (Operation.WRITE, Operation.MIXED, Operation.READ):
            transfers.run(operation, 15 * 64 * KIB, times=2)
    content = (tmp_path / "states").read_bytes()
    assert len(content) == MIB
    assert content[: 64 * KIB] == content[14 * 64 * KIB : 15 * 64 * KIB] != bytes(64 * KIB)
    assert content[15 * 64 * KIB :] == bytes(64 * KIB)


def test_measurements_are_interleaved_and_counted(tmp_path, monkeypatch):
    ran: list[fio.FioJob] = []
    monkeypatch.setattr(fio, "program", lambda: "fio")
    monkeypatch.setattr(fio, "run", lambda job, _: ran.append(job) or 1e9)
    notes = Notes()
    found = io_bench.run(options(tmp_path, engines=(Engine.THREADS,)), notes)
    assert notes.expected == len(notes.made)
    assert [what.split()[0] for what in notes.made[:4]] == ["lohan", "fio", "fio", "lohan"]
    assert len(ran) == 3 * 2
    assert {job.bytes_per_path for job in ran} == {8 * MIB}
    assert [record["ratio_to_fio"] for record in measured(found, "fio")] == [1.0] * 3
    assert [record["ratio_to_fio"] * 1e9 for record in measured(found, "lohan")] == pytest.approx(
        [record["bytes_per_second"] for record in measured(found, "lohan")]
    )


def test_engines_are_compared_in_turns_and_with_each_other(tmp_path, monkeypatch):
    refused = passes.refusal(Engine.URING)
    if refused:
        pytest.skip(refused)
    monkeypatch.setenv("PATH", str(tmp_path))
    notes = Notes()
    found = io_bench.run(options(tmp_path, operations=(Operation.READ,)), notes)
    assert [what.split()[1] for what in notes.made[:4]] == ["uring", "threads", "threads", "uring"]
    uring, threads = measured(found, "lohan")
    assert threads["ratio_to_uring"] == threads["bytes_per_second"] / uring["bytes_per_second"]
    assert "ratio_to_uring" not in uring


def test_an_engine_that_is_refused_becomes_a_record(tmp_path, monkeypatch):
    reason = "io_uring_setup is not permitted"
    monkeypatch.setattr(io_bench, "refusal", lambda engine: reason if engine is Engine.URING else "")
    monkeypatch.setattr(fio, "program", lambda: None)
    found = io_bench.run(options(tmp_path, operations=(Operation.READ,)), Notes())
    assert {"system": "lohan", "engine": "uring", "skipped": reason} in found
    assert {record["engine"] for record in measured(found)} == {"threads"}
    found = io_bench.run(options(tmp_path, engines=(Engine.URING,)), Notes())
    assert [record for record in found if "skipped" not in record] == []


def test_two_limited_folders_are_measured_beside_one(tmp_path):
    """That they reach twice one is the pool's test; here every byte goes where the record says."""
    found = striping.run(tmp_path, engine=Engine.THREADS, limit_bytes_per_second=10**9, total_bytes=8 * MIB, rounds=1, watcher=Notes())
    assert [(record["operation"], record["directories"]) for record in found] == [("read", 1), ("read", 2), ("write", 1), ("write", 2)]
    assert [record["ratio_to_one_directory"] for record in found if record["directories"] == 1] == [1.0, 1.0]
    assert {path.name: path.stat().st_size for path in tmp_path.glob("limited1/*")} == {"one": 8 * MIB, "two": 4 * MIB}
    assert {path.name: path.stat().st_size for path in tmp_path.glob("limited2/*")} == {"two": 4 * MIB}


def test_the_limit_stays_far_below_the_drive():
    assert striping.limit_for([]) == striping.limit_for([3e9, 5e9]) == 128 * 10**6
    assert striping.limit_for([3e9, 80e6]) == 20 * 10**6


def test_a_machine_without_fio_gets_a_record_that_names_the_package(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    found = io_bench.run(options(tmp_path, rounds=1, engines=(Engine.THREADS,)), Notes())
    assert [record for record in found if record["system"] == "fio"] == [{"system": "fio", "skipped": fio.MISSING}]
    assert {record["ratio_to_fio"] for record in measured(found)} == {None}


def test_fio_that_refuses_becomes_a_record(tmp_path, monkeypatch):
    def refuse(job: fio.FioJob, executable: str) -> float:
        raise fio.FioError("fio: engine not loadable")

    monkeypatch.setattr(fio, "program", lambda: "fio")
    monkeypatch.setattr(fio, "run", refuse)
    found = io_bench.run(options(tmp_path, engines=(Engine.THREADS,), operations=(Operation.READ,)), Notes())
    (theirs,) = [record for record in found if record["system"] == "fio"]
    assert theirs["skipped"] == "fio: engine not loadable"
    assert (theirs["engine"], theirs["operation"]) == ("psync", "read")


# ---------------------------------------------------------------- fio


def job(paths: list[Path], **changes: object) -> fio.FioJob:
    values: dict = {"paths": paths, "engine": Engine.THREADS, "operation": Operation.WRITE, "block_bytes": MIB, "depth": 4}
    values |= {"bytes_per_path": 32 * MIB, "times": 3, "direct": True, "registered": True}
    return fio.FioJob(**(values | changes))


def test_fio_threads_divide_every_file_among_them():
    arguments = fio.arguments(job([Path("/a:b/states"), Path("/c/states")]))
    assert arguments[-4:] == ["--name=states0", "--filename=/a\\:b/states", "--name=states1", "--filename=/c/states"]
    assert {"--numjobs=4", "--iodepth=1", f"--offset_increment={8 * MIB}", f"--size={8 * MIB}", f"--io_size={24 * MIB}"} <= set(arguments)
    assert {"--ioengine=psync", "--rw=write", "--direct=1", "--end_fsync=1", "--overwrite=1", "--allow_file_create=0"} <= set(arguments)
    assert "--fixedbufs=1" not in arguments


def test_fio_with_io_uring_is_one_job_a_file_of_that_depth():
    arguments = fio.arguments(job([Path("/states")], engine=Engine.URING, operation=Operation.MIXED, depth=16, direct=False))
    assert {"--ioengine=io_uring", "--numjobs=1", "--iodepth=16", "--rw=rw", "--rwmixread=70", "--direct=0"} <= set(arguments)
    assert {f"--size={32 * MIB}", "--fixedbufs=1"} <= set(arguments)
    assert "--fixedbufs=1" not in fio.arguments(job([Path("/states")], engine=Engine.URING, registered=False))


def test_fio_output_is_read():
    output = {"jobs": [{"error": 0, "read": {"io_bytes": 700, "runtime": 90}, "write": {"io_bytes": 300, "runtime": 100}}]}
    assert fio.bytes_per_second("note: something\n" + json.dumps(output)) == 10_000
    for bad in ("", "nothing", "{}", '{"jobs": []}', json.dumps({"jobs": [{"read": 1}]})):
        with pytest.raises(fio.FioError, match="not understood"):
            fio.bytes_per_second(bad)
    output["jobs"][0] |= {"error": 5}
    with pytest.raises(fio.FioError, match="error 5"):
        fio.bytes_per_second(json.dumps(output))


def test_fio_moves_exactly_the_bytes_and_keeps_the_file(tmp_path):
    executable = shutil.which("fio")
    if executable is None:
        pytest.skip(fio.MISSING)
    path = tmp_path / "states"
    path.write_bytes(bytes(16 * MIB))
    before = path.stat()
    for operation in (Operation.READ, Operation.MIXED, Operation.WRITE):
        arguments = fio.arguments(job([path], operation=operation, bytes_per_path=16 * MIB, times=2, direct=False))
        done = subprocess.run([executable, *arguments], capture_output=True, text=True, timeout=60, check=True)
        result = json.loads(done.stdout[done.stdout.find("{") :])["jobs"][0]
        moved = result["read"]["io_bytes"] + result["write"]["io_bytes"]
        # A mixed job of a few blocks may end early, when one direction has been over its region; it counts what it moved.
        assert moved == 32 * MIB if operation is not Operation.MIXED else 16 * MIB < moved <= 32 * MIB
        assert result["read"]["total_ios"] + result["write"]["total_ios"] == moved // MIB  # blocks of 1 MiB, none of the second size
    after = path.stat()
    assert (after.st_ino, after.st_size) == (before.st_ino, before.st_size)
    assert path.read_bytes().count(bytes(4096)) == 0


def test_fio_that_fails_says_why(tmp_path):
    executable = shutil.which("fio")
    if executable is None:
        pytest.skip(fio.MISSING)
    with pytest.raises(fio.FioError, match="fio"):
        fio.run(job([tmp_path / "absent"]), executable)
    with pytest.raises(fio.FioError, match="did not run"):
        fio.run(job([tmp_path / "absent"]), str(tmp_path / "no-fio"))


# ---------------------------------------------------------------- the choice


def speeds(table: dict[tuple[Engine, int, int], tuple[float, float]]) -> list[TransferSpeed]:
    return [
        TransferSpeed(TransferSetting(engine, block, depth), operation, rate)
        for (engine, block, depth), rates in table.items()
        for operation, rate in zip((Operation.READ, Operation.WRITE), rates, strict=True)
    ]


def test_the_fastest_setting_over_all_operations_is_chosen():
    choice = choose_transfers(speeds({
        (Engine.URING, 4 * MIB, 8): (6e9, 1e9),
        (Engine.THREADS, 4 * MIB, 8): (4e9, 2e9),
    }))  # fmt: skip
    assert choice is not None
    assert choice.setting == TransferSetting(Engine.THREADS, 4 * MIB, 8)
    assert choice.bytes_per_second == pytest.approx(2 / (1 / 4e9 + 1 / 2e9))
    assert "2.67 GB/s" in choice.reason
    assert "the fastest of 2 settings" in choice.reason


def test_of_equally_fast_settings_the_one_with_the_least_in_flight_is_chosen():
    choice = choose_transfers(speeds({
        (Engine.THREADS, 4 * MIB, 32): (4.0e9, 4.0e9),
        (Engine.THREADS, 4 * MIB, 8): (3.9e9, 3.9e9),
        (Engine.URING, 4 * MIB, 8): (3.9e9, 3.9e9),
        (Engine.URING, 4 * MIB, 4): (3.8e9, 3.8e9),
    }))  # fmt: skip
    assert choice is not None
    assert choice.setting == TransferSetting(Engine.URING, 4 * MIB, 8)
    assert "32.00 MiB" in choice.reason


def test_runs_get_the_best_of_the_settings_they_can_take():
    """They move 4 MiB at a time: a faster setting with other blocks is no choice for them, unless nothing else was measured."""
    table = {(Engine.URING, MIB, 32): (9e9, 9e9), (Engine.THREADS, 4 * MIB, 8): (3e9, 3e9), (Engine.URING, 4 * MIB, 8): (2e9, 2e9)}
    choice = choose_transfers(speeds(table))
    assert choice is not None and choice.setting == TransferSetting(Engine.THREADS, 4 * MIB, 8)
    choice = choose_transfers(speeds({(Engine.URING, MIB, 32): (9e9, 9e9)}))
    assert choice is not None and choice.setting.block_bytes == MIB


def test_a_choice_is_kept_in_the_folder_and_taken_by_the_store(tmp_path):
    empty, measured_folder = tmp_path / "empty", tmp_path / "measured"
    empty.mkdir()
    measured_folder.mkdir()
    assert load_choice([empty, measured_folder]) is None
    setting = TransferSetting(Engine.THREADS, 4 * MIB, 3)
    save_choice(measured_folder, TransferChoice(setting, 1e9, "1.00 GB/s"))
    assert sorted(path.name for path in measured_folder.iterdir()) == [CHOICE_FILE]
    assert load_choice([empty, measured_folder]) == setting
    with Store.measured([empty, measured_folder]) as store:
        assert store.engine is IoEngine.THREADS
        assert store.engine_refusal == ""
    with Store.measured([empty]) as store, Store() as default:
        assert store.engine is default.engine


def test_files_in_memory_are_copied_by_threads(tmp_path):
    """Unless something else was measured there, or one of the folders lies elsewhere."""
    in_memory = Path("/dev/shm")  # noqa: S108 - a tmpfs on every Linux; nothing is written
    setting = known_setting([in_memory])
    assert setting is not None
    assert (setting.engine, setting.block_bytes) == (Engine.THREADS, 4 * MIB)
    assert 4 <= setting.depth <= 16
    with Store.measured([in_memory]) as store:
        assert store.engine is IoEngine.THREADS
    assert known_setting([]) is None
    if not lies_in_memory(tmp_path):
        assert known_setting([in_memory, tmp_path]) is None
    measured = TransferSetting(Engine.URING, 4 * MIB, 3)
    save_choice(tmp_path, TransferChoice(measured, 1e9, "1.00 GB/s"))
    assert known_setting([in_memory, tmp_path]) == measured


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"schema": 1, "engine": "aio", "block_bytes": 4194304, "depth": 8}',
        '{"schema": 1, "engine": "uring", "block_bytes": 4194304, "depth": 0}',
        '{"schema": 1, "engine": "uring", "block_bytes": 1048576, "depth": 8}',
        '{"schema": 2, "engine": "uring", "block_bytes": 4194304, "depth": 8}',
    ],
)
def test_a_file_that_is_no_choice_counts_as_none(tmp_path, content):
    (tmp_path / CHOICE_FILE).write_text(content)
    assert load_choice([tmp_path]) is None


def test_a_setting_that_was_not_measured_in_everything_is_not_chosen():
    table = speeds({(Engine.THREADS, MIB, 8): (1e9, 1e9)})
    half = TransferSpeed(TransferSetting(Engine.URING, MIB, 8), Operation.READ, 9e9)
    choice = choose_transfers([*table, half])
    assert choice is not None
    assert choice.setting.engine is Engine.THREADS
    assert choose_transfers([]) is None


def test_a_pass_moves_whole_blocks_in_every_folder_and_thread(tmp_path):
    chosen = io_bench.IoOptions(directories=(tmp_path,), size_bytes=GIB + 5 * MIB, block_bytes=(384 * KIB, 4 * MIB), depths=(5, 32))
    assert chosen.file_bytes == GIB + 4 * MIB
    for block, depth in itertools.product(chosen.block_bytes, chosen.depths):
        moved = chosen.bytes_per_path(TransferSetting(Engine.THREADS, block, depth))
        assert 0 < moved <= chosen.file_bytes
        assert moved % (depth * block) == 0
    with pytest.raises(ConfigError, match="128"):
        io_bench.IoOptions(directories=(tmp_path,), size_bytes=127 * MIB)


def test_files_are_striped_over_all_folders(tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    (record, *_) = measured(io_bench.run(options(tmp_path, directories=tuple(folders), operations=(Operation.READ,)), Notes()))
    assert record["directories"] == 2
    assert [list(folder.iterdir()) for folder in folders] == [[], []]
