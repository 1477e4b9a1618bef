"""`lohan bench`: documents, skipped records, fio's arguments and output, the choice of transfers. Causes are asserted, never timings."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lohan.bench import adam, fio, passes, records, show, striping
from lohan.bench import io as io_bench
from lohan.bench.adam import Case
from lohan.cli.bench import ExitCode, make_application
from lohan.errors import CapacityError, ConfigError, StorageError
from lohan.hardware.transfers import Engine, Operation, TransferSetting, TransferSpeed, choose_transfers
from lohan.units import GIB, KIB, MIB, parse_bytes
from tests.fixtures.waiting import wait_until

ADAM_KEYS = {"system", "case", "elements", "elements_per_second", "ratio_to_torch_fused", "memory_bandwidth_fraction"}
IO_KEYS = {"system", "engine", "operation", "block_bytes", "depth", "bytes_per_second", "ratio_to_fio"}


class Notes:
    """A watcher that remembers."""

    def __init__(self) -> None:
        self.expected = 0
        self.made: list[str] = []

    def expect(self, measurements: int) -> None:
        self.expected += measurements

    def note(self, what: str) -> None:
        return

    def done(self, what: str) -> None:
        self.made.append(what)


def options(folder: Path, **changes: object) -> io_bench.IoOptions:
    values: dict = {"directories": (folder,), "size_bytes": 8 * MIB, "block_bytes": (256 * KIB,), "depths": (4,), "rounds": 2}
    values |= {"least_seconds": 0.0, "striping_bytes": 8 * MIB}
    return io_bench.IoOptions(**(values | changes))


def bench(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lohan.cli", "bench", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def measured(found: list[dict], system: str = "") -> list[dict]:
    """Records of whole measurements: not what was skipped, chosen, or held to a rate."""
    return [
        record
        for record in found
        if not {"skipped", "chosen", "directory_limit_bytes_per_second"} & set(record) and record["system"].startswith(system)
    ]


# ---------------------------------------------------------------- documents


def test_adam_prints_one_document_and_nothing_else(tmp_path):
    output = tmp_path / "results" / "adam.json"
    done = bench("adam", "--elements", "100000", "--rounds", "2", "--threads", "1", "--json", "--output", output)
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)
    assert json.loads(output.read_text()) == content
    assert content["schema"] == 1
    assert content["name"] == "adam"
    assert {"cpu", "cores", "ram_bytes", "kernel", "python", "torch"} <= set(content["machine"])
    for record in content["records"]:
        assert {"system", "case"} <= set(record)
        assert bool(record.get("skipped")) != ("elements_per_second" in record)
    systems = [record for record in measured(content["records"]) if record["system"] != adam.REFERENCE]
    ours = {("lohan", str(case)) for case in Case}
    assert {*ours, ("torch", "plain-fp32"), ("torch", "engine")} <= {(record["system"], record["case"]) for record in systems}
    for record in systems:
        assert set(record) >= ADAM_KEYS
        assert record["elements"] == 100_000
        assert record["threads"] == 1
        assert len(record["seconds_all"]) == 2


def test_io_prints_one_document_and_leaves_no_file(tmp_path):
    setting = ["--size", "8M", "--block", "256K", "--depth", "4", "--rounds", "1", "--operation", "mixed"]
    done = bench("io", "--directory", tmp_path, *setting, "--json")
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)
    assert content["name"] == "io"
    assert len(content["machine"]["filesystems"]) == 1
    assert [record for record in content["records"] if record.get("chosen")] != []
    assert {record["engine"] for record in measured(content["records"], "lohan")} >= {"threads"}
    for record in measured(content["records"]):
        assert set(record) >= IO_KEYS
        assert (record["operation"], record["block_bytes"], record["depth"]) == ("mixed", 256 * KIB, 4)
    assert list(tmp_path.iterdir()) == []


def test_no_document_names_a_folder_or_a_host(tmp_path):
    text = json.dumps(records.document("io", io_bench.run(options(tmp_path, rounds=1), Notes()), directories=[tmp_path]))
    assert str(tmp_path) not in text
    assert os.uname().nodename not in text


def test_results_that_cannot_be_written_are_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError) as caught:
        records.write_document(tmp_path / "file" / "adam.json", {})
    assert caught.value.place == str(tmp_path / "file" / "adam.json")


def test_a_file_that_may_not_be_so_large_fails_with_place_and_remedy(tmp_path):
    command = [
        "sh",
        "-c",
        'ulimit -f 1024 && exec "$0" "$@"',
        sys.executable,
        "-m",
        "lohan.cli",
        "bench",
        "io",
        "--directory",
        str(tmp_path),
    ]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == ExitCode.FAILED
    assert done.stdout == ""
    assert str(tmp_path) in done.stderr
    assert "allocate failed: File too large" in done.stderr
    assert "ulimit -f" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_terminated_measurement_leaves_no_file(tmp_path):
    command = [sys.executable, "-m", "lohan.cli", "bench", "io", "--directory", str(tmp_path), "--size", "64M", "--depth", "4"]
    command += ["--rounds", "100000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: any(tmp_path.glob("*/states")), timeout_seconds=60, what="the files")
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert list(tmp_path.iterdir()) == []


def test_tables_show_what_was_measured_and_what_was_not(capsys):
    show.print_adam(
        [
            {"system": "lohan", "case": "8bit", "elements": 10**6, "threads": 2, "elements_per_second": 2.5e9, "ratio_to_torch_fused": 1.5},
            {"system": "deepspeed", "case": "engine", "skipped": "not [bold]installed"},
        ]
    )
    shown = capsys.readouterr().out
    assert "2.5 B" in shown
    assert "1.50" in shown
    assert "x engine" not in shown  # nobody has it
    assert "skipped deepspeed engine: not [bold]installed" in shown
    setting = {"system": "lohan", "engine": "uring", "block_bytes": MIB, "depth": 8}
    limited = {**setting, "operation": "read", "directory_limit_bytes_per_second": 128e6, "ratio_to_one_directory": 1.98}
    show.print_io(
        [
            {**setting, "operation": "read", "direct": True, "bytes_per_second": 3.21e9, "ratio_to_fio": 0.97},
            {**limited, "directories": 1},
            {**limited, "directories": 2},
            {**setting, "chosen": True, "reason": "it is fast"},
        ]
    )
    shown = capsys.readouterr().out
    assert "3.21" in shown
    assert "97%" in shown
    assert "2 folders held to 128 MB/s each, read: 1.98 times one." in shown
    assert "Chosen for the engine: uring with blocks of 1.00 MiB, 8 in flight: it is fast." in shown


def test_progress_goes_to_stderr_as_lines_where_there_is_no_terminal(capsys):
    with show.watcher_on_stderr() as watcher:
        watcher.expect(2)
        watcher.note("filling")
        watcher.done("first")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "filling\n[1/2] first\n"


def test_what_others_print_does_not_reach_standard_output(capfd):
    with show.stdout_kept_clean():
        os.write(1, b"a library's greeting, ")
        subprocess.run(["echo", "a compiler's"], check=True)  # noqa: S607
    print("the document")
    captured = capfd.readouterr()
    assert captured.out == "the document\n"
    assert captured.err == "a library's greeting, a compiler's\n"


# ---------------------------------------------------------------- systems in turns


def test_every_round_runs_every_system_and_starts_with_another():
    calls: list[str] = []
    notes = Notes()
    seconds = records.interleaved({name: lambda name=name: calls.append(name) for name in "abc"}, rounds=2, watcher=notes)
    assert "".join(calls) == "abcbcacab"
    assert {name: len(values) for name, values in seconds.items()} == {"a": 2, "b": 2, "c": 2}
    assert notes.expected == len(notes.made) == 9


def test_ratios_are_those_of_medians():
    cases = {"lohan": tuple(Case), "torch": (Case.PLAIN_FP32, Case.ENGINE)}
    jobs = [adam.Job(system, case, lambda: None) for system in cases for case in cases[system]]
    seconds = {
        "lohan plain-fp32": [9.0, 1.0, 1.0], "lohan engine": [1.0] * 3, "lohan 8bit": [0.5] * 3,
        "torch plain-fp32": [2.0] * 3, "torch engine": [3.0] * 3, "reference": [1.0] * 3,
    }  # fmt: skip
    found = {(r["system"], r["case"]): r for r in adam.make_records(jobs, seconds, elements=6, threads=1)}
    assert found["lohan", "plain-fp32"]["ratio_to_torch_fused"] == 2.0
    assert found["lohan", "plain-fp32"]["memory_bandwidth_fraction"] == 1.0
    assert found["lohan", "engine"]["ratio_to_torch_fused"] == 3.0
    assert found["lohan", "engine"]["memory_bandwidth_fraction"] == 26 / 28
    assert found["lohan", "8bit"]["ratio_to_torch_fused"] == 6.0
    assert found["lohan", "8bit"]["ratio_to_engine"] == 2.0
    assert found["torch", "engine"]["ratio_to_torch_fused"] == 1.0


def test_the_number_of_elements_follows_the_memory():
    assert adam.choose_elements(None, 1 << 40) == adam.DEFAULT_ELEMENTS
    assert adam.choose_elements(None, 2 * adam.BYTES_HELD_PER_ELEMENT * 1000) == 1000
    assert adam.choose_elements(1000, adam.BYTES_HELD_PER_ELEMENT * 1000) == 1000
    with pytest.raises(CapacityError, match="--elements"):
        adam.choose_elements(1001, adam.BYTES_HELD_PER_ELEMENT * 1000)


def test_a_peer_that_breaks_becomes_a_record(monkeypatch):
    from lohan.bench import peers
    from lohan.bench.adam_arrays import Arrays

    def absent(_: Arrays) -> None:
        raise ModuleNotFoundError("No module named 'deepspeed'", name="deepspeed")

    def broken(_: Arrays) -> None:
        raise RuntimeError("no kernel for this processor" + "x" * 1000)

    monkeypatch.setattr(peers, "_deepspeed_step", absent)
    monkeypatch.setattr(peers, "_bitsandbytes_step", broken)
    jobs, skipped = peers.jobs(Arrays.allocate(1000), Notes())
    assert {job.name for job in jobs} == {"torch plain-fp32", "torch engine"}
    reasons = {(record["system"], record["case"]): record["skipped"] for record in skipped}
    assert reasons["deepspeed", "engine"] == "deepspeed is not installed: pip install deepspeed"
    assert reasons["bitsandbytes", "8bit"].startswith("RuntimeError: no kernel for this processor")
    assert len(reasons["bitsandbytes", "8bit"]) == peers.MAX_REASON_CHARACTERS
    assert ("torch", "8bit") in reasons


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
        (Engine.URING, MIB, 8): (6e9, 1e9),
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
        (Engine.THREADS, MIB, 8): (3.9e9, 3.9e9),
        (Engine.URING, MIB, 8): (3.9e9, 3.9e9),
        (Engine.URING, 256 * KIB, 8): (3.8e9, 3.8e9),
    }))  # fmt: skip
    assert choice is not None
    assert choice.setting == TransferSetting(Engine.URING, MIB, 8)
    assert "8.00 MiB" in choice.reason


def test_a_setting_that_was_not_measured_in_everything_is_not_chosen():
    table = speeds({(Engine.THREADS, MIB, 8): (1e9, 1e9)})
    half = TransferSpeed(TransferSetting(Engine.URING, MIB, 8), Operation.READ, 9e9)
    choice = choose_transfers([*table, half])
    assert choice is not None
    assert choice.setting.engine is Engine.THREADS
    assert choose_transfers([]) is None


# ---------------------------------------------------------------- what a user may get wrong


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--directory", "/nowhere/at/all"], "--directory /nowhere/at/all: there is no such folder"),
        (["--block", "5000"], "--block: 5000 bytes is no multiple of 4 KiB"),
        (["--block", "0"], "--block: 0 bytes"),
        (["--block", "many"], "--block: 'many' is no number of bytes"),
        (["--size", "1M"], "--size: 1.00 MiB is less"),
    ],
)
def test_a_wrong_argument_is_named_with_its_place(arguments: list[str], message: str, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(make_application(), ["io", *arguments])
    assert result.exit_code == ExitCode.BAD_CONFIG
    assert message in result.stderr


@pytest.mark.parametrize("arguments", ["adam --rounds 0", "adam --threads -1", "io --depth 0", "io --engine aio"])
def test_a_value_out_of_range_is_refused(arguments: str):
    assert CliRunner().invoke(make_application(), arguments.split()).exit_code == 2


def test_too_many_elements_fail_before_anything_is_allocated():
    result = CliRunner().invoke(make_application(), ["adam", "--elements", str(10**15)])
    assert result.exit_code == ExitCode.FAILED
    assert "--elements" in result.stderr


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


@pytest.mark.parametrize(("text", "count"), [("0", 0), ("4096", 4096), ("256K", 256 * KIB), ("4MiB", 4 * MIB), (" 1 gb ", GIB), ("7b", 7)])
def test_byte_counts_are_read(text: str, count: int):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "K", "-1", "1.5G", "1KK", "0x10", "1P"])
def test_what_is_no_byte_count_is_refused(text: str):
    with pytest.raises(ValueError, match="is no number of bytes"):
        parse_bytes(text)
