"""`python -m benchmarks.planner`: what its records say, and the whole command with a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.planner import __main__ as planner
from benchmarks.planner import show
from benchmarks.planner.parts import PARTS, Machine, Question, to_profile
from benchmarks.planner.verdicts import ablations, of_peak, predictions, summary, sweeps

from lohan.bench.step_shapes import ShapeName
from lohan.config import Precision
from lohan.units import GIB, MIB


def record(**changes: Any) -> dict[str, Any]:
    return {
        "shape": "3.43b",
        "batch": 8,
        "sequence": 1024,
        "states_tier": "ram",
        "policy": "holistic",
        "clip": "none",
        "activation_ram_bytes": None,
        "swapped_activation_bytes": None,
        "step_seconds": 2.0,
        "predicted_step_seconds": 1.8,
        "predicted_binding": "gpu",
        "gpu_peak_bytes": 100,
        "plan_gpu_bytes": 104,
        "host_peak_bytes": 200,
        "plan_host_bytes": 190,
        "kept_activation_bytes": {"gpu": 7 * GIB, "ram": 3 * GIB, "ssd": GIB},
        **changes,
    }


def test_errors_are_fractions_of_what_was_measured():
    found = predictions([record(), record(batch=16, predicted_step_seconds=3.0, gpu_peak_bytes=None), record(skipped="does not fit")])
    assert [one.seconds_error for one in found] == [pytest.approx(-0.1), pytest.approx(0.5)]
    assert [one.gpu_bytes_error for one in found] == [pytest.approx(0.04), None]
    assert summary(found) == {
        "settings": 2,
        "seconds_median": pytest.approx(0.3),
        "seconds_worst": pytest.approx(0.5),
        "host_bytes_worst": pytest.approx(0.05),
        "gpu_bytes_worst": pytest.approx(0.04),
    }
    assert predictions([record(predicted_step_seconds=None)]) == []


def test_the_choice_is_held_against_the_fastest_of_all_amounts():
    forced = [record(swapped_activation_bytes=size * GIB, step_seconds=seconds) for size, seconds in ((8, 1.6), (0, 2.5), (4, 1.9))]
    (sweep,) = sweeps([*forced, record(step_seconds=1.68), record(batch=16)])
    assert sweep.swapped_bytes == (0, 4 * GIB, 8 * GIB)
    assert sweep.seconds == (2.5, 1.9, 1.6)
    assert sweep.chosen_bytes == 4 * GIB, "what stays on the GPU does not leave it"
    assert sweep.behind_best == pytest.approx(0.05)
    (best,) = sweeps([*forced, record(step_seconds=1.5)])
    assert best.behind_best == 0
    assert show.sweep_chart([sweep]).count("<path") + show.sweep_chart([sweep]).count("<polyline") >= 3


def test_policies_are_compared_under_one_bound_of_memory():
    others = {"g10": 2.5, "zero-infinity": 2.2}
    group = [record(policy=policy, activation_ram_bytes=GIB, step_seconds=seconds) for policy, seconds in others.items()]
    refused = record(policy="flashneuron", activation_ram_bytes=GIB, skipped="the states do not fit on the GPU")
    (ablation,) = ablations([*group, refused, record(activation_ram_bytes=GIB), record(activation_ram_bytes=2 * GIB)])
    assert ablation.ahead == pytest.approx(0.1)
    assert ablation.refused == {"flashneuron": "the states do not fit on the GPU"}


def test_whole_steps_are_held_against_one_block():
    clipped = {"clip": "global", "states": "8bit", "max_norm": 5.6, "clip_rate": 0.5, "fraction_of_peak": 0.85}
    (one,) = of_peak([record(**clipped), record(), record(**clipped, skipped="does not fit")])
    assert (one.setting, one.states, one.max_norm, one.clip_rate) == (("3.43b", 8, 1024, "ram"), "8bit", 5.6, 0.5)
    assert (one.seconds, one.predicted_seconds, one.fraction) == (2.0, 1.8, 0.85)


def test_the_parts_answer_what_they_are_for():
    settings = {
        (part.shape, batch, part.sequence, part.options["tiers"])
        for part in PARTS.values()
        if part.question is Question.PREDICTION
        for batch in part.batches
    }
    assert len(settings) >= 24
    assert len([part for part in PARTS.values() if part.question is Question.CONVEXITY]) == 4
    assert len([part for part in PARTS.values() if part.question is Question.ABLATION]) == 3
    assert len([part for part in PARTS.values() if part.question is Question.PEAK]) == 6
    machine = Machine("cuda", Precision.BF16, 24 * GIB, Path("/states"), Path("/dev/shm"), Path("/profiles"))  # noqa: S108
    profiled = to_profile(PARTS, machine)
    assert profiled[Path("/dev/shm"), ShapeName.LLAMA_3_43B, 1024] == (8, 16, 32, 64)  # noqa: S108
    assert profiled[Path("/states"), ShapeName.LLAMA_1_1B, 2048] == (2, 4, 8, 16)


def test_unknown_parts_are_refused_and_known_ones_listed(capsys, tmp_path):
    assert planner.main(["list", "--profiles", str(tmp_path)]) == 0
    assert capsys.readouterr().out.split() == list(PARTS)
    with pytest.raises(SystemExit):
        planner.main(["convexity-9", "--profiles", str(tmp_path)])
    assert "there is no part 'convexity-9'" in capsys.readouterr().err


def test_the_whole_command_measures_and_reports(tmp_path, capsys):
    output = tmp_path / "planner.json"
    folders = ["--profiles", str(tmp_path / "profiles"), "--directory", str(tmp_path), "--output", str(output)]
    assert planner.main(["--tiny", "--quick", "--device", "cpu", "--precision", "fp32", *folders, "convexity"]) == 0
    found = json.loads(output.read_text())["records"]
    assert all(one["predicted_step_seconds"] > 0 for one in found if "skipped" not in one)
    assert [one["swapped_activation_bytes"] for one in found] == [None, 0, MIB // 2, MIB]
    printed = capsys.readouterr().out
    for text in ("the planner's choice is", "step time off by", "Forced amounts"):
        assert text in printed
    assert Path(output).with_suffix(".svg").read_text().startswith("<svg")
