"""Whole runs of a tiny model in this process: what they report, that they learn what plain PyTorch learns, and what they leave."""

from __future__ import annotations

import fcntl
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from lohan.config import Precision, RunConfig, Schedule, TrainingSection, UnsafeFilesystems, parse_run_config
from lohan.data.pack import BatchSampler, TokenRows
from lohan.data.prepare import prepare_tokens
from lohan.data.tokenize import Tokenizer
from lohan.events import EventReader, EventType, ExitReason, Phase
from lohan.planning.plan import Plan
from lohan.training.loop import train
from lohan.training.metrics import learning_rate_factor
from lohan.training.setup import make_optimizer, remove_states
from tests.fixtures.gguf_model import make_tiny_gguf
from tests.fixtures.rows import alpaca_rows, messages_rows, write_jsonl
from tests.fixtures.tiny_model import make_tiny_model

STEPS = 6


def make_config(
    folder: Path, *, model: Path | None = None, data: Path | None = None, engine: dict[str, Any] | None = None, **training: Any
) -> RunConfig:
    """A run on the CPU: 8 rows a step in micro-batches of 3, two passes of warm-up, a weight decay."""
    settings = {
        "batch_size": 8,
        "sequence_length": 96,
        "max_steps": STEPS,
        "learning_rate": 2e-3,
        "warmup_steps": 2,
        "weight_decay": 0.1,
        "seed": 5,
        "precision": Precision.FP32,
        "evaluation_rows": 12,
    }
    return parse_run_config(
        {
            "model": {"path": model or make_tiny_model(folder / "model")},
            "data": {"path": data or write_jsonl(folder / "rows.jsonl", messages_rows(40))},
            "training": settings | training,
            "engine": {"device": "cpu", "micro_batch_size": 3, "threads": 1, "unsafe_filesystems": "allow"} | (engine or {}),
            "output": {"directory": folder / "run"},
        },
        place="test",
    )


def events_of(config: RunConfig, type: EventType | None = None) -> list[dict[str, Any]]:
    reader = EventReader(config.output.directory / "events.jsonl")
    events = [{"type": event.type, "attempt": event.attempt, "seq": event.seq, **event.fields} for event in reader.read()]
    assert reader.malformed == 0
    return [event for event in events if type is None or event["type"] == type]


def load_export(config: RunConfig) -> Any:
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers' own making
        return AutoModelForCausalLM.from_pretrained(config.output.directory / "export")


def plain_loss(model: Any, rows: TokenRows, indices: list[int]) -> torch.Tensor:
    batch = rows.batch(indices)
    return model(
        input_ids=torch.from_numpy(batch.input_ids),
        attention_mask=torch.from_numpy(batch.attention_mask),
        labels=torch.from_numpy(batch.labels),
        use_cache=False,
    ).loss


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> RunConfig:
    """One successful run that several tests look at."""
    config = make_config(tmp_path_factory.mktemp("finished"))
    assert train(config, attempt=1) is ExitReason.SUCCEEDED
    return config


def test_events_tell_the_run_in_order(finished):
    events = events_of(finished)
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    phases = list(dict.fromkeys(event["phase"] for event in events if event["type"] == EventType.PHASE))
    assert phases == [Phase.PREPARING_DATA, Phase.LOADING_MODEL, Phase.EVALUATING, Phase.TRAINING, Phase.EXPORTING]
    started = events_of(finished, EventType.STARTED)[0]
    assert (started["device"], started["precision"], started["total_steps"]) == ("cpu", "fp32", STEPS)
    assert (started["batch_size"], started["micro_batch_size"], started["sequence_length"]) == (8, 3, 96)
    assert events[-1] == {"type": "exit", "attempt": 1, "seq": len(events), "reason": "succeeded", "error": None, "stopped_step": None}


def test_steps_report_what_the_page_draws(finished):
    steps = events_of(finished, EventType.STEP)
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert [step["epoch"] for step in steps] == [8 * step / 40 for step in range(1, STEPS + 1)]
    assert steps[0]["eta_seconds"] is None
    assert all(step["eta_seconds"] > 0 for step in steps[1:])
    for step in steps:
        assert step["total_steps"] == STEPS
        assert step["gradient_norm"] > 0
        assert (step["clipped"], step["skipped"], step["clip_rate"]) == (False, False, 0.0)
        assert step["tokens"] > 0
        assert step["tokens_per_second"] == pytest.approx(step["tokens"] / step["step_seconds"])
        assert step["host_bytes"] > 100e6
        assert step["device_peak_bytes"] == 0


def test_steps_equal_plain_pytorch(finished):
    """The same rows, rates and decays in a loop without the engine."""
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(finished.model.path)
    rows = TokenRows(finished.output.directory / "tokens.safetensors")
    sampler = BatchSampler(len(rows), 8, seed=5)
    decayed = [parameter for name, parameter in model.named_parameters() if "norm" not in name]
    others = [parameter for name, parameter in model.named_parameters() if "norm" in name]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=2e-3, betas=(0.9, 0.999), eps=1e-8
    )
    for step, event in enumerate(events_of(finished, EventType.STEP)):
        rate = 2e-3 * learning_rate_factor(finished.training, step, STEPS)
        assert event["learning_rate"] == pytest.approx(rate)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        loss = plain_loss(model, rows, sampler.batch(step))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        assert event["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert event["gradient_norm"] == pytest.approx(norm.item(), rel=1e-4)
    reference = dict(model.named_parameters())
    for name, parameter in load_export(finished).named_parameters():
        assert torch.allclose(parameter, reference[name], atol=1e-5), name


def test_evaluations_are_the_loss_of_the_rows_that_are_trained_first(finished):
    from transformers import AutoModelForCausalLM

    before, after = events_of(finished, EventType.EVALUATION)
    rows = TokenRows(finished.output.directory / "tokens.safetensors")
    chosen = BatchSampler(len(rows), finished.training.batch_size, finished.training.seed).first(12)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = AutoModelForCausalLM.from_pretrained(finished.model.path)
    with torch.no_grad():
        assert before["loss"] == pytest.approx(plain_loss(base, rows, chosen).item(), rel=1e-5)
        assert after["loss"] == pytest.approx(plain_loss(load_export(finished), rows, chosen).item(), rel=1e-5)
    assert (before["when"], before["rows"], after["when"]) == ("before", 12, "after")
    assert after["loss"] < before["loss"]


def test_export_loads_and_generates(finished):
    from transformers import AutoTokenizer

    folder = finished.output.directory / "export"
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    config = json.loads((folder / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == "float32"
    assert config["use_cache"] is True
    tokenizer, model = AutoTokenizer.from_pretrained(folder), load_export(finished)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Say hello."}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    generated = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    assert generated.shape[1] <= prompt["input_ids"].shape[1] + 4
    assert isinstance(tokenizer.decode(generated[0]), str)


def test_run_folder_holds_the_plan_and_no_states(finished):
    directory = finished.output.directory
    plan = Plan.model_validate_json((directory / "plan.json").read_text())
    assert (plan.device, plan.micro_batch_size, plan.precision) == ("cpu", 3, "fp32")
    assert not list(directory.glob("**/*.bin"))
    assert not list(directory.glob("*.tmp"))


def test_second_attempt_begins_again_and_replaces_the_export(finished):
    first = events_of(finished)
    (finished.output.directory / "export" / "stale").touch()
    with (finished.output.directory / "events.jsonl").open("ab") as events:
        events.write(b'{"attempt":1,"seq":99,"ty')  # a trainer that was killed while writing
    assert train(finished, attempt=2) is ExitReason.SUCCEEDED
    reader = EventReader(finished.output.directory / "events.jsonl")
    events = list(reader.read())
    assert reader.malformed == 1
    assert [event.attempt for event in events[: len(first)]] == [1] * len(first)
    second = [event for event in events if event.attempt == 2]
    assert [event.seq for event in second] == list(range(1, len(second) + 1))
    losses = [[event.fields["loss"] for event in events if event.type == "step" and event.attempt == attempt] for attempt in (1, 2)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert not (finished.output.directory / "export" / "stale").exists()


def test_bf16_run_of_a_gguf_model_from_a_token_file(tmp_path):
    """The three other branches at once: quantised weights, prepared rows, bf16 with a schedule and epochs."""
    from transformers import AutoTokenizer

    path = make_tiny_gguf(tmp_path / "tiny.gguf")
    data = write_jsonl(tmp_path / "rows.jsonl", alpaca_rows(20))
    tokens = tmp_path / "tokens.safetensors"
    prepare_tokens(data, Tokenizer.from_folder(tmp_path / "source"), tokens, sequence_length=96)
    config = make_config(
        tmp_path, model=path, data=tokens, precision="bf16", max_steps=None, epochs=1.5, schedule="linear", evaluation_rows=0
    )
    assert train(config, attempt=1) is ExitReason.SUCCEEDED
    steps = events_of(config, EventType.STEP)
    assert len(steps) == 4  # 30 rows in batches of 8
    assert steps[-1]["epoch"] == 1.6
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert events_of(config, EventType.EVALUATION) == []
    model = load_export(config)
    assert model.dtype is torch.bfloat16
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert AutoTokenizer.from_pretrained(config.output.directory / "export").chat_template


def test_sharded_export_loads(tmp_path):
    from lohan.models.export import save_pretrained
    from lohan.models.load import empty_model, load_config, open_weights
    from lohan.streaming.executor import init

    folder = make_tiny_model(tmp_path / "model", tied=False)
    config = load_config(folder)
    model = empty_model(config, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters())
    with (
        open_weights(folder) as weights,
        init(
            model,
            optimizer,
            batch_size=1,
            seq_length=8,
            unsafe_filesystems=UnsafeFilesystems.ALLOW,
            state_directories=[tmp_path / "states"],
            device="cpu",
            precision=Precision.FP32,
            weights=weights,
        ) as session,
    ):
        done: list[float] = []
        save_pretrained(session, config, folder, tmp_path / "export", max_shard_bytes=60_000, progress=done.append)
    index = json.loads((tmp_path / "export" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert done == sorted(done)
    assert done[-1] == 1.0
    with open_weights(folder) as ours, open_weights(tmp_path / "export") as exported:
        assert set(ours.names) == set(exported.names)
        assert all(torch.equal(ours.read(name), exported.read(name)) for name in ours.names)
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, report = AutoModelForCausalLM.from_pretrained(tmp_path / "export", output_loading_info=True)
    assert not any(report.values())


def test_export_that_fails_leaves_the_previous_one(finished, tmp_path):
    """A full or read-only drive must not cost the model that is already there."""
    from lohan.models.export import save_pretrained
    from lohan.models.load import load_config

    class Broken:
        precision = Precision.FP32

        def wait(self):
            return None

        def named_weights(self, dtype):
            yield "model.embed_tokens.weight", torch.zeros(384, 32)
            raise OSError(28, "No space left on device")

    target = tmp_path / "export"
    target.mkdir()
    (target / "previous").touch()
    with pytest.raises(OSError, match="No space left"):
        save_pretrained(Broken(), load_config(finished.model.path), finished.model.path, target)
    assert [path.name for path in tmp_path.rglob("*")] == ["export", "previous"]


def test_bad_rows_end_the_run_with_their_lines(tmp_path):
    data = tmp_path / "rows.jsonl"
    write_jsonl(data, messages_rows(20))
    with data.open("a") as file:
        file.write("broken\n")
    config = make_config(tmp_path, data=data)
    assert train(config, attempt=1) is ExitReason.FAILED
    exit_event = events_of(config)[-1]
    assert exit_event["reason"] == "failed"
    assert exit_event["error"]["kind"] == "DataError"
    assert "1 of 21 rows cannot be used: line 21: not valid JSON" in exit_event["error"]["message"]
    skipping = config.model_copy(update={"data": config.data.model_copy(update={"skip_bad_rows": True})})
    assert train(skipping, attempt=2) is ExitReason.SUCCEEDED
    assert [event["message"] for event in events_of(skipping, EventType.WARNING)] == ["1 of 21 rows cannot be used and were left out."]


@pytest.mark.parametrize(
    ("training", "engine", "kind", "message"),
    [
        ({"sequence_length": 8}, {}, "DataError", "no token of the row is trained; the answer begins behind token 8"),
        ({"sequence_length": 4096}, {}, "ConfigError", "the model's context is 1024 tokens"),
        ({}, {"host_memory_bytes": 1000}, "CapacityError", "1000 B may be used"),
        ({}, {"device": "cuda:9"}, "ConfigError", "engine.device is 'cuda:9'"),
    ],
)
def test_runs_that_cannot_start_say_why(tmp_path, training, engine, kind, message):
    config = make_config(tmp_path, engine=engine, **training)
    assert train(config, attempt=1) is ExitReason.FAILED
    error = events_of(config)[-1]["error"]
    assert error["kind"] == kind
    assert message in error["message"]
    assert error["remedy"]
    assert "Traceback" in (config.output.directory / "trainer.log").read_text()
    assert not (config.output.directory / "export").exists()


def test_token_file_must_fit_the_run(tmp_path):
    make_tiny_model(tmp_path / "model")
    data = write_jsonl(tmp_path / "rows.jsonl", messages_rows(8))
    tokens = tmp_path / "tokens.safetensors"
    prepare_tokens(data, Tokenizer.from_folder(tmp_path / "model"), tokens, sequence_length=96)
    config = make_config(tmp_path, data=tokens, sequence_length=32)
    assert train(config, attempt=1) is ExitReason.FAILED
    assert "above training.sequence_length 32" in events_of(config)[-1]["error"]["message"]


def test_cut_rows_are_reported(tmp_path):
    config = make_config(tmp_path, sequence_length=64, max_steps=1, evaluation_rows=0)
    assert train(config, attempt=1) is ExitReason.SUCCEEDED
    (warning,) = events_of(config, EventType.WARNING)
    assert "rows are longer than 64 tokens" in warning["message"]
    assert "sequence_length" in warning["remedy"]


def test_listener_hears_every_event(tmp_path):
    heard: list[str] = []
    config = make_config(tmp_path, max_steps=1)
    train(config, attempt=1, listener=lambda kind, _fields: heard.append(str(kind)))
    assert heard == [event["type"] for event in events_of(config)]


def test_run_outlives_its_terminal(tmp_path):
    def gone(kind: EventType, fields: dict[str, Any]) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    config = make_config(tmp_path, max_steps=1)
    assert train(config, attempt=1, listener=gone) is ExitReason.SUCCEEDED
    assert events_of(config)[-1]["reason"] == "succeeded"


def test_states_of_a_killed_attempt_are_removed_and_those_of_another_run_are_not(tmp_path):
    for name in ("killed", "other"):
        (tmp_path / name / "lohan-states").mkdir(parents=True)
        (tmp_path / name / "lohan-states" / "master.bin").write_bytes(b"x")
    with (tmp_path / "other" / "lohan-states" / "lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        remove_states([tmp_path / "killed", tmp_path / "other", tmp_path / "absent"])
    assert [path.name for path in tmp_path.rglob("*.bin")] == ["master.bin"]
    assert (tmp_path / "other" / "lohan-states" / "master.bin").exists()
    assert not (tmp_path / "absent").exists()


def test_weight_decay_leaves_vectors_out(tmp_path):
    from lohan.models.load import empty_model, load_config

    config = make_config(tmp_path)
    model = empty_model(load_config(config.model.path))
    decayed, others = make_optimizer(model, config).param_groups
    assert decayed["weight_decay"] == 0.1
    assert others["weight_decay"] == 0.0
    assert {parameter.dim() for parameter in decayed["params"]} == {2}
    assert {parameter.dim() for parameter in others["params"]} == {1}
    assert len(decayed["params"]) + len(others["params"]) == len(list(model.parameters()))


def test_schedules():
    def course(schedule: Schedule, warmup: int = 0, steps: int = 8) -> list[float]:
        training = TrainingSection(schedule=schedule, warmup_steps=warmup)
        return [round(learning_rate_factor(training, step, steps), 6) for step in range(steps)]

    assert course(Schedule.CONSTANT) == [1] * 8
    assert course(Schedule.CONSTANT, warmup=4) == [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]
    assert course(Schedule.LINEAR) == [1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]
    assert course(Schedule.LINEAR, warmup=2, steps=6) == [0.5, 1, 1, 0.75, 0.5, 0.25]
    assert course(Schedule.COSINE)[::4] == [1, 0.5]
    assert course(Schedule.COSINE, warmup=99) == [round((step + 1) / 99, 6) for step in range(8)]
