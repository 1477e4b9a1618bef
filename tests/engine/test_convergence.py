"""`benchmarks.convergence`: its reference against plain training, its rows, its chart, and a small run of the whole."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.chart import Panel, Series, svg, ticks
from benchmarks.convergence import __main__ as command
from benchmarks.convergence.data import Corpus, open_corpus
from benchmarks.convergence.plain import MasterWeightTraining, load_model, slices
from benchmarks.convergence.runs import FINAL_STEPS, Curve
from transformers import LlamaForCausalLM

from lohan.data.pack import Batch
from lohan.errors import DataError
from tests.engine import reference
from tests.fixtures.rows import messages_rows
from tests.fixtures.tiny_model import make_tiny_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in messages_rows(60)), encoding="utf-8")
    return path


@pytest.fixture
def corpus(tiny, rows, tmp_path) -> Corpus:
    return open_corpus(tiny, rows, tmp_path, sequence=64, batch=4, held_out=9, seed=3)


def as_batch(batch: reference.Batch) -> Batch:
    return Batch(*(batch[name].numpy() for name in ("input_ids", "attention_mask", "labels")))


def parts(batch: Batch, count: int) -> list[reference.Batch]:
    names = ("input_ids", "attention_mask", "labels")
    return [{name: torch.from_numpy(getattr(part, name)) for name in names} for part in slices(batch, count)]


# ---------------------------------------------------------------- the reference


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_the_reference_is_plain_bf16_training_over_fp32_masters(micro_batches: int):
    batches = [as_batch(batch) for batch in reference.make_batches(5, padded=True)]
    plain = reference.train_plain_bf16(
        reference.make_llama(), [part for batch in batches for part in parts(batch, micro_batches)], accumulation=micro_batches
    )
    model = reference.make_llama()
    masters = [parameter.detach().clone() for parameter in model.parameters()]
    model.to(torch.bfloat16)
    training = MasterWeightTraining(model, masters, learning_rate=1e-3, micro_batches=micro_batches)
    training.optimizer.param_groups[0]["weight_decay"] = 1e-2  # AdamW's default, which the other one has
    losses = [training.step(batch) for batch in batches]
    assert losses == pytest.approx(plain.losses, rel=2e-3)  # shares are added in bf16 there, in fp32 here
    for master, (name, parameter) in zip(masters, model.named_parameters(), strict=True):
        assert torch.equal(master, plain.after[name]), name
        assert torch.equal(parameter, master.bfloat16()), name
        assert not torch.equal(master, master.bfloat16().float()), f"{name} lost the bits below bf16"


def test_micro_batches_change_the_order_of_sums_and_nothing_else():
    batch = as_batch(reference.make_batches(1, padded=True)[0])
    losses = []
    for count in (1, 2, 4):
        model = reference.make_llama()
        masters = [parameter.detach().clone() for parameter in model.parameters()]
        losses.append(MasterWeightTraining(model, masters, learning_rate=1e-3, micro_batches=count).step(batch))
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)


def test_a_batch_is_cut_into_all_its_rows():
    values = np.arange(14).reshape(7, 2)
    cut = slices(Batch(values, values, values), 3)
    assert [len(part.labels) for part in cut] == [2, 2, 3]
    assert np.array_equal(np.concatenate([part.input_ids for part in cut]), values)


def test_the_model_is_the_one_that_transformers_loads(tiny):
    model, exact = load_model(tiny, dtype=torch.bfloat16, device=CPU)
    theirs = LlamaForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16)
    for (name, ours), (_, other), value in zip(model.named_parameters(), theirs.named_parameters(), exact, strict=True):
        assert torch.equal(ours, other), name
        assert value.dtype is torch.float32
        assert torch.equal(value.bfloat16(), ours)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(buffer.dtype is torch.float32 for buffer in model.buffers())
    tokens = torch.arange(8)[None]
    assert torch.equal(model(input_ids=tokens).logits, theirs(input_ids=tokens, use_cache=False).logits)


# ---------------------------------------------------------------- rows


def test_no_row_that_is_held_out_is_trained(corpus):
    content = [corpus.rows.row(index)[0].tobytes() for index in range(len(corpus.rows))]
    assert len(corpus.held_out) == 9
    assert {content[index] for index in corpus.held_out} & {content[index] for index in corpus.trained} == set()
    trained = {corpus.batch(step).input_ids.tobytes() for step in range(8)}
    assert len(trained) == 8
    assert sum(len(batch.labels) for batch in corpus.held_out_batches()) == 9


def test_all_systems_get_the_same_batches(tiny, rows, corpus, tmp_path):
    (tmp_path / "again").mkdir()
    again = open_corpus(tiny, rows, tmp_path / "again", sequence=64, batch=4, held_out=9, seed=3)
    assert all(np.array_equal(corpus.batch(step).input_ids, again.batch(step).input_ids) for step in range(5))
    assert corpus.held_out == again.held_out


def test_too_few_rows_are_refused(tiny, rows, tmp_path):
    with pytest.raises(DataError, match="60 rows are too few to hold out 60"):
        open_corpus(tiny, rows, tmp_path, sequence=64, batch=4, held_out=60, seed=0)


# ---------------------------------------------------------------- the chart


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 200, [0, 50, 100, 150, 200]),
        (0, 12, [0, 2, 4, 6, 8, 10, 12]),
        (1.93, 3.41, [1.5, 2.0, 2.5, 3.0, 3.5]),
        (-0.0013, 0.0009, [-0.0015, -0.001, -0.0005, 0, 0.0005, 0.001]),
    ],
)
def test_ticks_are_round_and_cover_the_values(low: float, high: float, expected: list[float]):
    assert ticks(low, high) == pytest.approx(expected)


@pytest.mark.parametrize("value", [0.0, 3.0, -1e-9])
def test_a_constant_has_ticks_too(value: float):
    found = ticks(value, value)
    assert found[0] <= value <= found[-1]
    assert len(found) > 1


def test_a_chart_has_axes_lines_and_one_legend():
    series = Series("a & b", [0, 1, 2], [1.0, float("nan"), 3.0], "#000", "4 2")
    text = svg([Panel("first", "steps", "loss", [series]), Panel("second <", "steps", "difference", [series], (-1.0, 1.0))])
    root = ET.fromstring(text)  # noqa: S314 - written here
    space = "{http://www.w3.org/2000/svg}"
    texts = [element.text for element in root.iter(f"{space}text")]
    assert texts.count("a & b") == 1
    assert {"first", "second <", "steps", "loss", "difference"} <= set(texts)
    lines = [element.get("points").split() for element in root.iter(f"{space}polyline")]
    assert [len(points) for points in lines] == [2, 2]
    height = float(root.get("height"))
    assert all(0 <= float(number) <= max(height, 900) for points in lines for point in points for number in point.split(","))


# ---------------------------------------------------------------- verdict and command


def curve(system: str, states: str, final: float) -> Curve:
    return Curve(system, 1, states, [2.0], [1], [final] * FINAL_STEPS)


def test_the_engine_may_lie_twice_the_spread_from_the_mean():
    plain = [curve("torch", "fp32", value) for value in (1.0, 1.25, 1.5)]
    verdict = command.compare([*plain, curve("lohan", "split", 2.25), curve("lohan", "8bit", 2.375)])
    assert (verdict["plain_mean"], verdict["plain_spread"], verdict["allowed_distance"]) == (1.25, 0.5, 1.0)
    assert verdict["distance"] == {"split": 1.0, "8bit": 1.125}
    assert verdict["within"] == {"split": True, "8bit": False}


def test_the_whole_on_a_tiny_model(tiny, rows, tmp_path, capsys):
    arguments = ["--model", str(tiny), "--data", str(rows), "--folder", str(tmp_path), "--name", "tiny", "--device", "cpu"]
    status = command.main([*arguments, "--steps", "12", "--batch", "4", "--held-out", "8", "--learning-rate", "1e-3"])
    content = json.loads((tmp_path / "tiny.json").read_text())
    *runs, verdict = content["records"]
    assert (content["schema"], content["name"], content["machine"].keys() >= {"cpu", "torch"}) == (1, "convergence", True)
    assert [(run["system"], run["micro_batches"], run["states"]) for run in runs] == [
        *(("torch", count, "fp32") for count in (1, 2, 4)),
        ("lohan", 1, "split"),
        ("lohan", 1, "8bit"),
    ]
    for run in runs:
        assert len(run["losses"]) == 12
        assert run["held_out_steps"] == [0, *range(3, 13)]
        assert run["held_out_final"] == pytest.approx(sum(run["held_out_losses"][-10:]) / 10)
        assert run["held_out_losses"][-1] < run["held_out_losses"][0]
        assert run["held_out_losses"][0] == pytest.approx(runs[0]["held_out_losses"][0], rel=1e-3)
        assert run["losses"][-1] == pytest.approx(runs[0]["losses"][-1], rel=1e-3)
    assert status == (0 if all(verdict["within"].values()) else 1)
    assert str(tmp_path) not in json.dumps(content)
    ET.parse(tmp_path / "tiny.svg")  # noqa: S314 - written here
    assert "LoHan with 8bit states" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--steps", "9"], ["--batch", "3"], ["--precision", "fp8"]])
def test_a_wrong_option_is_refused(arguments: list[str]):
    with pytest.raises(SystemExit) as caught:
        command.main(arguments)
    assert caught.value.code == 2


def test_a_model_that_is_not_there_is_an_error_in_words(tmp_path, rows, capsys):
    assert command.main(["--model", str(tmp_path / "none"), "--data", str(rows)]) == 2
    assert "no such folder or file" in capsys.readouterr().err


def test_the_installed_corpus_can_be_written_for_another_machine(tmp_path):
    assert command.main(["--write-data", str(tmp_path / "rows.jsonl")]) == 0
    first = json.loads((tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert [message["role"] for message in first["messages"]] == ["user", "assistant"]
