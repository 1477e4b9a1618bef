"""`lohan profile`: what is measured, kept, shown, and what a user may get wrong. No timing is asserted."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from lohan.cli.measuring import ExitCode
from lohan.cli.show_profile import print_profile
from lohan.hardware.probe import HardwareFacts, probe
from lohan.hardware.profile import HardwareProfile
from lohan.hardware.profile_files import facts_of_device, load_profile, profile_path, save_profile, with_blocks
from lohan.models.blocks import trace_workload
from lohan.profiling.progress import ProfileProgress
from lohan.profiling.timing import QUICK, THOROUGH, Effort
from tests.engine.bench_runs import assert_termination_leaves_no_file
from tests.engine.profiles import block_times, figure, machine_facts, machine_profile
from tests.fixtures.tiny_model import make_tiny_model


def application():
    import typer

    from lohan.cli import register

    result = typer.Typer(pretty_exceptions_enable=False)
    register(result)
    return result


class Machine:
    """Stands in for measuring: counts, and makes up figures."""

    def __init__(self) -> None:
        self.efforts: list[Effort] = []

    def measure(self, facts: HardwareFacts, *, state_directories: Sequence[Path], effort: Effort, on_progress, **_) -> HardwareProfile:
        self.efforts.append(effort)
        on_progress(ProfileProgress("host memory", 0.0, 3.0))
        on_progress(ProfileProgress("host memory", 0.0, 3.0, "Not measured: commits: the drive is full"))
        value = figure(float(len(self.efforts))).model_copy(update={"repetitions": effort.repetitions})
        return machine_profile(facts, host_memory=value, commit_seconds=None, blocks=())


@pytest.fixture
def machine(monkeypatch) -> Machine:
    made = Machine()
    monkeypatch.setattr("lohan.profiling.machine.measure_machine", made.measure)
    return made


def run(folder: Path, *arguments: str | Path) -> Result:
    arguments = ("profile", "--directory", folder, "--profiles", folder / "profiles", "--device", "cpu", *arguments)
    return CliRunner().invoke(application(), [str(argument) for argument in arguments])


def cpu_facts(folder: Path) -> HardwareFacts:
    return facts_of_device(probe([folder]), None)


# ---------------------------------------------------------------- measuring and keeping


def test_a_profile_is_measured_once_and_kept(tmp_path, machine):
    first = run(tmp_path)
    assert first.exit_code == 0, first.output
    assert "Measured just now" in first.output
    assert "[  0%] host memory, about 3 s left" in first.stderr
    assert "Not measured: commits: the drive is full" in first.stderr
    kept = load_profile(tmp_path / "profiles", cpu_facts(tmp_path))
    assert kept is not None and kept.host_memory.value == 1.0
    second = run(tmp_path)
    assert second.exit_code == 0, second.output
    assert f"Measured {kept.date}" in second.stdout
    assert "Not measured: commit." in second.stdout
    assert machine.efforts == [THOROUGH]


def test_again_measures_anew_and_keeps_the_blocks(tmp_path, machine):
    facts = cpu_facts(tmp_path)
    save_profile(tmp_path / "profiles", machine_profile(facts))
    assert run(tmp_path, "--again").exit_code == 0
    kept = load_profile(tmp_path / "profiles", facts)
    assert kept is not None
    assert (kept.host_memory.value, kept.blocks) == (1.0, (block_times(),))


def test_a_quick_profile_serves_quick_calls_alone(tmp_path, machine):
    for arguments, efforts in ((["--quick"], [QUICK]), (["--quick"], [QUICK]), ([], [QUICK, THOROUGH]), (["--quick"], [QUICK, THOROUGH])):
        assert run(tmp_path, *arguments).exit_code == 0
        assert machine.efforts == efforts


@pytest.mark.usefixtures("machine")
def test_json_is_what_the_file_holds(tmp_path):
    for _ in range(2):
        done = run(tmp_path, "--json")
        path = profile_path(tmp_path / "profiles", cpu_facts(tmp_path))
        assert json.loads(done.stdout) == json.loads(path.read_text())


@pytest.mark.usefixtures("machine")
def test_profiles_lie_in_the_data_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(application(), ["profile", "--device", "cpu"]).exit_code == 0
    assert profile_path(tmp_path / "data" / "profiles", cpu_facts(tmp_path)).is_file()
    monkeypatch.setenv("LOHAN_DATA_DIR", str(tmp_path / "elsewhere"))
    assert CliRunner().invoke(application(), ["profile", "--device", "cpu"]).exit_code == 0
    assert profile_path(tmp_path / "elsewhere" / "profiles", cpu_facts(tmp_path)).is_file()


def test_state_directories_come_from_the_environment(tmp_path, machine, monkeypatch):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("LOHAN_STATE_DIRS", f"{tmp_path / 'one'}:{tmp_path / 'two'}")
    assert CliRunner().invoke(application(), ["profile", "--device", "cpu", "--profiles", str(tmp_path)]).exit_code == 0
    assert profile_path(tmp_path, facts_of_device(probe([tmp_path / "one", tmp_path / "two"]), None)).is_file()
    assert len(machine.efforts) == 1


# ---------------------------------------------------------------- what goes wrong


def test_a_damaged_profile_is_named_and_replaced_on_demand(tmp_path, machine):
    path = profile_path(tmp_path / "profiles", cpu_facts(tmp_path))
    path.parent.mkdir()
    path.write_text("{")
    done = run(tmp_path)
    assert done.exit_code == ExitCode.BAD_CONFIG
    assert str(path) in done.stderr and "--again" in done.stderr
    assert machine.efforts == []
    assert run(tmp_path, "--again").exit_code == 0
    assert load_profile(tmp_path / "profiles", cpu_facts(tmp_path)) is not None


@pytest.mark.usefixtures("machine")
def test_what_cannot_be_kept_is_shown_all_the_same(tmp_path, monkeypatch):
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    done = run(tmp_path, "--json")
    assert done.exit_code == ExitCode.FAILED
    assert HardwareProfile.model_validate_json(done.stdout).host_memory.value == 1.0
    assert "No space left on device" in done.stderr
    assert "--profiles" in done.stderr
    assert list((tmp_path / "profiles").iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--directory", "/no/such/folder"], "there is no such folder"),
        (["--device", "tpu"], "--device"),
        (["--device", "cuda:x"], "--device"),
        (["--device", "cuda:99"], "--device"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_wrong_argument_is_named_with_its_place(arguments, message, tmp_path, machine):
    done = run(tmp_path, *arguments)
    assert done.exit_code == ExitCode.BAD_CONFIG
    assert message in done.stderr
    assert machine.efforts == []


# ---------------------------------------------------------------- in a process of its own


def command(folder: Path, *arguments: str) -> list[str]:
    place = ["--directory", str(folder), "--profiles", str(folder / "profiles"), "--device", "cpu"]
    return [sys.executable, "-m", "lohan.cli", "profile", *place, *arguments]


def test_a_quick_profile_of_this_machine_and_a_block(tmp_path):
    model = make_tiny_model(tmp_path / "model")
    (tmp_path / "states").mkdir()
    arguments = [str(model), "--quick", "--seq", "32", "--precision", "fp32"]
    done = subprocess.run(command(tmp_path / "states", *arguments), capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    for name in ("host memory copy", "state directories half read", "matrix product", "AdamW on split-8bit states", "commit"):
        assert name in done.stdout
    assert "state directories, about" in done.stderr
    assert "a block and the head, 1 x 32 tokens" in done.stderr
    profile = load_profile(tmp_path / "states" / "profiles", cpu_facts(tmp_path / "states"))
    assert profile is not None
    assert {name for name, value in profile if value is None} == {"host_to_device", "device_to_host", "both_ways"}
    assert [(block.rows, block.sequence_length, block.precision) for block in profile.blocks] == [(1, 32, "fp32")]
    assert [path.name for path in (tmp_path / "states").iterdir()] == ["profiles"]


def test_a_terminated_measurement_leaves_no_file(tmp_path):
    assert_termination_leaves_no_file(command(tmp_path), tmp_path)


# ---------------------------------------------------------------- the tables


def test_the_table_shows_figures_with_their_spread(capsys):
    profile = machine_profile(
        machine_facts(), blocks=(block_times(backward_seconds=figure(1.25)),), ssd_read=figure(6e9).model_copy(update={"spread": 0.9})
    )
    print_profile(profile, is_new=False)
    shown = capsys.readouterr().out
    for text in ("25 GB/s", "150 TFLOPS", "2.0 B parameters/s", "2 ms", "90%", "10 ms", "1.25 s", "Measured 2026-11-30T12:00:00+00:00"):
        assert text in shown
    assert "Repetitions lie far apart in: state directories read." in shown
    assert "Not measured" not in shown


# ---------------------------------------------------------------- a model's block


@pytest.fixture
def measured_kernels() -> list[str]:
    """The kernel set of each call of `asked`."""
    return []


@pytest.fixture
def asked(monkeypatch, measured_kernels) -> list[dict]:
    """What was asked for of models' blocks; the times are made up."""
    calls: list[dict] = []

    def measure_model(
        profile: HardwareProfile, config, *, rows_list, length, precision, kernels, repetitions, most_seconds, **_
    ) -> HardwareProfile:
        measured_kernels.append(kernels)
        calls.append({"rows": list(rows_list), "length": length, "precision": str(precision), "limited": most_seconds is not None})
        times = figure(0.01).model_copy(update={"repetitions": repetitions})
        digest = trace_workload(config).digest
        shape = {
            "workload_digest": digest,
            "kernels": str(kernels),
            "precision": str(precision),
            "sequence_length": length,
            "forward_seconds": times,
        }
        return with_blocks(profile, [block_times(rows=rows, **shape) for rows in rows_list])

    monkeypatch.setattr("lohan.profiling.model.measure_model", measure_model)
    return calls


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "a small model")


@pytest.mark.usefixtures("machine")
def test_a_models_shapes_are_measured_once_each(tmp_path, model, asked):
    own = "bf16" if cpu_facts(tmp_path).cpu.multiplies_bf16 else "fp32"
    done = run(tmp_path, model, "--rows", "2, 1", "--seq", "64")
    assert done.exit_code == 0, done.output
    assert asked.pop() == {"rows": [1, 2], "length": 64, "precision": own, "limited": False}
    assert "a small model" in done.stdout
    assert run(tmp_path, model, "--rows", "1,2,4", "--seq", "64").exit_code == 0
    assert asked.pop()["rows"] == [4]
    assert run(tmp_path, model, "--rows", "1,2,4", "--seq", "64").exit_code == 0
    assert asked == []
    assert run(tmp_path, model, "--seq", "64", "--precision", "bf16").exit_code == 0
    assert asked.pop()["limited"]
    kept = load_profile(tmp_path / "profiles", cpu_facts(tmp_path))
    assert kept is not None and {block.rows for block in kept.blocks} == {1, 2, 4, 8}


@pytest.mark.usefixtures("machine")
def test_again_measures_a_models_shapes_anew(tmp_path, model, asked):
    for _ in range(2):
        assert run(tmp_path, model, "--rows", "1", "--again").exit_code == 0
        assert asked.pop()["rows"] == [1]


@pytest.mark.usefixtures("machine")
def test_a_quick_shape_is_measured_properly_later(tmp_path, model, asked):
    for arguments, rows in ((["--quick"], [1]), (["--quick"], None), (["--rows", "1"], [1]), (["--rows", "1"], None)):
        assert run(tmp_path, model, *arguments).exit_code == 0
        assert (asked.pop()["rows"] if asked else None) == rows


@pytest.mark.usefixtures("machine", "asked")
def test_a_models_block_is_measured_with_each_kernel_set_once(tmp_path, model, measured_kernels):
    """A CPU has no other kernels than torch's unless they are named."""
    for arguments, kernels in (
        ([], ["torch"]),
        (["--kernels", "compiled", "--kernels", "torch", "--kernels", "compiled"], ["compiled"]),
        (["--kernels", "auto"], []),
    ):
        done = run(tmp_path, model, "--rows", "1", *arguments)
        assert done.exit_code == 0, done.output
        assert measured_kernels == kernels
        measured_kernels.clear()
    assert "compiled" in done.stdout
    kept = load_profile(tmp_path / "profiles", cpu_facts(tmp_path))
    assert kept is not None and [block.kernels for block in kept.blocks] == ["torch", "compiled"]


@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        (["--rows", "2"], "--rows: ", ExitCode.BAD_CONFIG),
        (["--precision", "fp32"], "--precision: ", ExitCode.BAD_CONFIG),
        (["--kernels", "torch"], "--kernels: ", ExitCode.BAD_CONFIG),
        (["MODEL", "--kernels", "liger"], "Liger's kernels need a GPU", ExitCode.BAD_CONFIG),
        (["MODEL", "--rows", "two"], "--rows: ", ExitCode.BAD_CONFIG),
        (["MODEL", "--rows", "1,,2"], "--rows: ", ExitCode.BAD_CONFIG),
        (["MODEL", "--rows", "0"], "--rows: ", ExitCode.BAD_CONFIG),
        (["MODEL", "--seq", "1025"], "context is 1024", ExitCode.BAD_CONFIG),
        (["/no/such/model"], "/no/such/model", ExitCode.FAILED),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_is_wrong_with_a_model_is_said_before_anything_is_measured(arguments, message, code, tmp_path, model, machine, asked):
    done = run(tmp_path, *(model if argument == "MODEL" else argument for argument in arguments))
    assert done.exit_code == code
    assert message in done.stderr
    assert machine.efforts == asked == []
