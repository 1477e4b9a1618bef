"""`lohan bench`: its documents, its tables, the optimizers in turns, and what a user may get wrong. Causes are asserted, never timings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lohan.bench import adam, records, show
from lohan.bench import io as io_bench
from lohan.bench.adam import Case
from lohan.cli.bench import make_application
from lohan.cli.measuring import ExitCode
from lohan.errors import CapacityError, StorageError
from lohan.units import GIB, KIB, MIB, parse_bytes
from tests.engine.bench_runs import Notes, assert_termination_leaves_no_file, measured, options

ADAM_KEYS = {"system", "case", "elements", "elements_per_second", "ratio_to_torch_fused", "memory_bandwidth_fraction"}
IO_KEYS = {"system", "engine", "operation", "block_bytes", "depth", "bytes_per_second", "ratio_to_fio"}


def bench(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lohan.cli", "bench", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


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
    assert_termination_leaves_no_file(command, tmp_path)


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
        "lohan plain-fp32": [9.0, 1.0, 1.0], "lohan engine": [1.0] * 3, "lohan second-place": [2.0] * 3, "lohan 8bit": [0.5] * 3,
        "torch plain-fp32": [2.0] * 3, "torch engine": [3.0] * 3, "reference": [1.0] * 3,
    }  # fmt: skip
    found = {(r["system"], r["case"]): r for r in adam.make_records(jobs, seconds, elements=6, threads=1)}
    assert found["lohan", "plain-fp32"]["ratio_to_torch_fused"] == 2.0
    assert found["lohan", "plain-fp32"]["memory_bandwidth_fraction"] == 1.0
    assert found["lohan", "engine"]["ratio_to_torch_fused"] == 3.0
    assert found["lohan", "engine"]["memory_bandwidth_fraction"] == 26 / 28
    assert found["lohan", "second-place"]["ratio_to_torch_fused"] == 1.5
    assert found["lohan", "second-place"]["memory_bandwidth_fraction"] == 13 / 28
    assert found["lohan", "second-place"]["ratio_to_engine"] == 0.5
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


@pytest.mark.parametrize(("text", "count"), [("0", 0), ("4096", 4096), ("256K", 256 * KIB), ("4MiB", 4 * MIB), (" 1 gb ", GIB), ("7b", 7)])
def test_byte_counts_are_read(text: str, count: int):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "K", "-1", "1.5G", "1KK", "0x10", "1P"])
def test_what_is_no_byte_count_is_refused(text: str):
    with pytest.raises(ValueError, match="is no number of bytes"):
        parse_bytes(text)
