"""`benchmarks.peers`: other systems beside LoHan, what cannot be had, what becomes of a child that dies, and what is left behind."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from benchmarks.peers import __main__, comparison
from benchmarks.peers.settings import PeerTask, System, micro_batches, reason_not_to_run

from lohan.bench.step_child import ChildFailed, StepChild
from lohan.bench.step_options import StatesTier
from lohan.bench.step_shapes import ShapeName
from lohan.config import Precision
from lohan.units import GIB
from tests.engine.bench_runs import Notes, step_options


def peer_task(system: System = System.TORCH, **changes: object) -> PeerTask:
    values: dict = {"system": system, "tuned": False, "shape_name": ShapeName.TINY, "tier": StatesTier.RAM, "batch": 4, "sequence": 16}
    values |= {"precision": Precision.FP32, "device": "cpu", "gpu_cap_bytes": None, "directories": (), "micro_batch": 4, "variant": "keep"}
    return PeerTask(**{**values, **changes})


def scripted(code: str, monkeypatch) -> None:
    """Children of other systems run `code`."""
    monkeypatch.setattr(comparison, "start", lambda task: StepChild(task, command=(sys.executable, "-c", code)))


@pytest.mark.timeout(900)
def test_torch_and_lohan_take_steps_in_turns_and_the_others_say_why_not(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    output = tmp_path / "peers.json"
    arguments = ["--shape", "tiny", "--batch", "2", "--sequence", "16", "--device", "cpu", "--precision", "fp32", "--only", "installed"]
    arguments += ["--states-tier", "ram", "--directory", str(tmp_path), "--steps", "2", "--output", str(output)]
    assert __main__.main(arguments) == 0
    content = json.loads(output.read_text())
    found = {record["system"]: record for record in content["records"]}
    assert set(found) == {"lohan", "torch", "roundpipe", "deepspeed-cpu"}
    ours, torch_record = found["lohan"], found["torch"]
    assert "skipped" not in ours, ours
    assert "skipped" not in torch_record, torch_record
    assert ours["in_turns"]
    assert torch_record["in_turns"]
    assert ours["compared_with"] == "torch"
    assert len(ours["step_seconds_all"]) == len(torch_record["step_seconds_all"]) == 2
    assert torch_record["lohan_states"] == ours["states"] == "fp32"
    assert torch_record["ratio_to_lohan"] == torch_record["step_seconds"] / ours["step_seconds"]
    same = ("tuned", "shape", "parameters", "batch", "sequence", "precision", "clip", "max_norm", "device", "gpu_cap_bytes")
    assert {name: torch_record[name] for name in same} == {name: ours[name] for name in same}
    assert torch_record["host_peak_bytes"] > 0
    for name in ("roundpipe", "deepspeed-cpu"):
        assert "is not installed" in found[name]["skipped"] or "needs a CUDA GPU" in found[name]["skipped"]
    shown = capsys.readouterr().out
    assert "x LoHan" in shown
    assert "skipped roundpipe" in shown
    assert list(tmp_path.glob(".lohan-bench-*")) == []


def test_a_batch_is_cut_into_equal_parts():
    assert micro_batches(8) == [8, 4, 2, 1]
    assert micro_batches(6) == [6, 3]


def test_reasons_are_known_before_a_start(monkeypatch):
    monkeypatch.setattr("benchmarks.peers.settings.find_spec", lambda name: None if name == "roundpipe" else object())
    assert "roundpipe is not installed: pip install roundpipe" in (reason_not_to_run(peer_task(System.ROUNDPIPE)) or "")
    assert "needs a CUDA GPU" in (reason_not_to_run(peer_task(System.DEEPSPEED_CPU)) or "")
    assert reason_not_to_run(peer_task()) is None
    large = peer_task(shape_name=ShapeName.LLAMA_3_43B, device="GPU-1", gpu_cap_bytes=24 * GIB)
    assert "need 57.44 GiB of GPU memory, 24.00 GiB may be used" in (reason_not_to_run(large) or "")


def test_who_dies_leaves_a_skip_with_its_reason_and_lohan_goes_on(tmp_path, monkeypatch):
    scripted("import sys; sys.exit('no such kernel')", monkeypatch)
    measured: list = []
    monkeypatch.setattr(comparison, "_measure", lambda group, *_: measured.append(group) or [{"system": "lohan"}])
    options = comparison.PeerOptions(step_options(tmp_path), (System.TORCH,), (False,))
    skipped, ours = comparison.compare(options, Notes())
    assert skipped["system"] == "torch"
    assert skipped["skipped"] == "the process ended with status 1: no such kernel"
    assert ours == {"system": "lohan"}
    assert measured[0].peers == []
    assert list(tmp_path.glob(".lohan-bench-*")) == []


ANSWERS = """
import json, sys
task = json.loads(sys.stdin.readline())
print(json.dumps({"ready": 1.0}), flush=True)
for order in sys.stdin:
    word, *rest = order.split()
    if word == "use":
        rows = int(rest[0])
        if rows > 2:
            print(json.dumps({"error": "OutOfMemoryError: CUDA out of memory"}), flush=True)
            break
        print(json.dumps({"use": None}), flush=True)
    else:
        print(json.dumps({"step": {"seconds": 1.0 / rows, "loss": 1.0}}), flush=True)
"""


@pytest.mark.parametrize("tuned", [True, False])
def test_the_fastest_micro_batch_that_fits_is_taken(tuned: bool, monkeypatch):
    scripted(ANSWERS, monkeypatch)
    chosen = comparison.choose(peer_task(tuned=tuned), Notes())
    assert (chosen.micro_batch, chosen.variant) == (2, "recompute" if tuned else "keep")


def test_what_more_memory_would_not_help_ends_the_search(monkeypatch):
    scripted('print(\'{"error": "no libaio here"}\', flush=True)', monkeypatch)
    with pytest.raises(ChildFailed, match="no libaio here"):
        comparison.choose(peer_task(), Notes())


def test_folders_are_gone_with_the_child(tmp_path: Path):
    with StepChild(peer_task(directories=(tmp_path,)), command=(sys.executable, "-c", "input()")):
        assert len(list(tmp_path.iterdir())) == 1
    assert list(tmp_path.iterdir()) == []
