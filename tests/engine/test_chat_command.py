"""A model folder answers a conversation: as transformers' own generation does, bounded, and on the way out whoever wrote the folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from fixtures.tiny_model import CHAT_TEMPLATE, TURN_END, make_tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from lohan.cli.chat import _carry_out as carry_out_chat
from lohan.cli.commands import ExitCode
from lohan.data.conversation import Conversation, parse_conversation
from lohan.data.prompt import read_prompt
from lohan.data.tokenize import Tokenizer
from lohan.errors import CapacityError, ConfigError, DataError, ModelError
from lohan.events import Event, EventReader, EventType, ExitReason, Phase
from lohan.planning.footprint import GPU_RESERVE_BYTES
from lohan.training import answering
from lohan.training.answering import ChatJob
from lohan.training.job import carry_out
from lohan.units import GIB

TALK = [
    {"role": "user", "content": "Hello?"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": f"What is {TURN_END} and an SSD?"},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model")


def answer(folder: Path, place: Path, talk: list[dict[str, str]] | None = None, **settings: Any) -> tuple[ExitReason, list[Event]]:
    """In this process."""
    conversation = Conversation.model_validate({"messages": talk or TALK, "max_new_tokens": 20, "temperature": 0, **settings})
    reason = carry_out(
        place,
        lambda reporter, stop: ChatJob(folder, conversation, reporter, stop, device="cpu", gpu_memory_bytes=None),
        phase=Phase.LOADING_MODEL,
        attempt=None,
        listener=None,
    )
    return reason, list(EventReader(place / "events.jsonl").read())


def said(events: list[Event]) -> dict[str, Any]:
    (whole,) = [event.fields for event in events if event.type == EventType.ANSWER]
    return whole


def error_of(events: list[Event]) -> dict[str, Any]:
    error: dict[str, Any] = events[-1].fields["error"]
    return error


def chat(*arguments: str | Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lohan.cli", "chat", *map(str, arguments)]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=240, check=False)


# ---------------------------------------------------------------- the answer
@pytest.mark.parametrize("shards", [1, 3])
def test_a_greedy_answer_is_that_of_transformers(tmp_path: Path, shards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "FLUSH_SECONDS", 0.0)
    monkeypatch.setattr(answering, "PREFILL_TOKENS", 16)
    folder = make_tiny_model(tmp_path / "model", shards=shards, tied=shards == 1)
    reason, events = answer(folder, tmp_path / "chat")
    assert reason is ExitReason.SUCCEEDED
    # By transformers alone; a spelling of a special token in what somebody says is text there too, once it is encoded by itself.
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = Tokenizer.from_folder(folder).encode_prompt(TALK)
    harmless = [message | {"content": message["content"].replace(TURN_END, "END")} for message in TALK]
    theirs = tokenizer.apply_chat_template(harmless, add_generation_prompt=True, return_dict=False)
    assert Tokenizer.from_folder(folder).encode_prompt(harmless) == theirs
    assert len(ids) > len(theirs)
    assert ids.count(tokenizer.convert_tokens_to_ids(TURN_END)) == theirs.count(tokenizer.convert_tokens_to_ids(TURN_END))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = torch.tensor([ids])
    with torch.inference_mode():
        expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=20, do_sample=False)[0, len(ids) :]
    whole = said(events)
    assert whole["text"] == tokenizer.decode(expected, skip_special_tokens=True)
    assert (whole["prompt_tokens"], whole["answer_tokens"]) == (len(ids), len(expected))
    assert (whole["finish_reason"], whole["seed"]) == ("length", None)
    pieces = [event.fields for event in events if event.type == EventType.ANSWER_PART]
    assert whole["text"].startswith("".join(piece["text"] for piece in pieces))
    assert [piece["tokens"] for piece in pieces] == sorted(piece["tokens"] for piece in pieces)
    assert next(event.fields["phase"] for event in events if event.type == EventType.PHASE) == Phase.LOADING_MODEL


def test_pieces_come_seldom_however_fast_tokens_do(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10_000))
    monkeypatch.setattr(answering.time, "monotonic", lambda: next(clock) / 1000)  # every look at it a millisecond later
    monkeypatch.setattr(answering._Telling, "_text", lambda self: "a" * len(self._ids))
    _, events = answer(folder, tmp_path / "chat", max_new_tokens=900)
    pieces = [event for event in events if event.type == EventType.ANSWER_PART]
    assert 2 <= len(pieces) <= 900 / 1000 / answering.FLUSH_SECONDS


def test_a_seed_gives_the_same_answer_again(folder: Path, tmp_path: Path) -> None:
    drawn = {"temperature": 1.5, "top_p": 1, "max_new_tokens": 12}
    _, events = answer(folder, tmp_path / "first", **drawn)
    seed = said(events)["seed"]
    _, again = answer(folder, tmp_path / "second", seed=seed, **drawn)
    _, other = answer(folder, tmp_path / "third", seed=(seed + 1) % 2**32, **drawn)
    assert said(again)["text"] == said(events)["text"] != said(other)["text"]


def test_an_answer_ends_where_the_model_ends_it(folder: Path, tmp_path: Path) -> None:
    _, events = answer(folder, tmp_path / "whole")
    first = Tokenizer.from_folder(folder)._backend.encode(said(events)["text"], add_special_tokens=False).ids[0]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, first]}))
    _, events = answer(folder, tmp_path / "ended")
    whole = said(events)
    assert (whole["finish_reason"], whole["answer_tokens"], whole["tokens_per_second"]) == ("end_of_text", 1, None)


def test_the_end_of_a_turn_is_found_where_only_the_template_knows_it(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", chat_template=CHAT_TEMPLATE.replace("<|im_end|>", "<|endoftext|>"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": None}))
    assert read_prompt(folder, TALK).end_ids == {0}


def test_a_model_without_a_template_reads_what_a_row_of_it_is(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", chat_template=None)
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.decode(read_prompt(folder, TALK).ids) == f"Hello?Hello.{TURN_END}What is {TURN_END} and an SSD?"
    assert read_prompt(folder, TALK).ids.count(2) == 1, "what somebody says ends no text"
    assert read_prompt(folder, TALK).end_ids == {2}
    reason, events = answer(folder, tmp_path / "chat")
    assert (reason, said(events)["answer_tokens"]) == (ExitReason.SUCCEEDED, 20)


def test_the_context_bounds_conversation_and_answer(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    prompt = len(read_prompt(folder, TALK).ids)
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": prompt + 3}))
    _, events = answer(folder, tmp_path / "short")
    assert (said(events)["answer_tokens"], said(events)["finish_reason"]) == (3, "length")
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": prompt}))
    reason, events = answer(folder, tmp_path / "none")
    assert (reason, error_of(events)["cause"]) == (ExitReason.FAILED, "data")
    assert f"has {prompt} tokens" in error_of(events)["message"]


# ---------------------------------------------------------------- stopping
@pytest.mark.parametrize(
    ("control", "reason", "finish"),
    [('{"wanted": "cancel"}', ExitReason.CANCELLED, ["cancelled"]), (None, ExitReason.INTERRUPTED, [])],
    ids=["cancelled", "interrupted"],
)
def test_an_answer_is_left_in_the_middle(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, control: str | None, reason: ExitReason, finish: list[str]
) -> None:
    place = tmp_path / "chat"
    monkeypatch.setattr(answering, "FLUSH_SECONDS", 0.0)
    tell = answering._Telling._tell

    def ask_at_five(telling: Any) -> None:
        tell(telling)
        if len(telling._ids) == 5:
            (place / "control.json").write_text(control) if control else os.kill(os.getpid(), 15)

    monkeypatch.setattr(answering._Telling, "_tell", ask_at_five)
    ended, events = answer(folder, place, max_new_tokens=100)
    assert ended is reason
    answers = [event.fields for event in events if event.type == EventType.ANSWER]
    assert [fields["finish_reason"] for fields in answers] == finish, "one that is to be begun anew has no end"
    assert all(5 <= fields["answer_tokens"] <= 7 for fields in answers)


# ---------------------------------------------------------------- memory
@pytest.mark.parametrize(
    ("fault", "cause", "words"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), "gpu_memory", "GPU memory ran out"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "host_memory", "host memory ran out"),
    ],
    ids=["GPU", "host"],
)
def test_memory_that_ran_out_is_told_with_what_helps(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception, cause: str, words: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise fault

    monkeypatch.setattr(answering, "generate", fail)
    conversation = Conversation.model_validate({"messages": TALK})
    reason = carry_out_chat(folder, conversation, tmp_path / "chat", None, None, device="cpu", gpu_memory_bytes=None)
    error = error_of(list(EventReader(tmp_path / "chat" / "events.jsonl").read()))
    assert (reason, error["cause"]) == (ExitReason.FAILED, cause)
    assert error["message"].startswith(words)
    assert error["remedy"].startswith("Ask for fewer tokens, or leave out the earliest messages, and ")


def test_a_gpu_gives_no_more_than_was_reserved(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fractions = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(total_memory=24 * GIB))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda fraction, _device: fractions.append(fraction))
    conversation, gpu, unused = Conversation.model_validate({"messages": TALK}), torch.device("cuda", 0), cast("Any", None)
    for size in (None, 6 * GIB, 24 * GIB):
        ChatJob(folder, conversation, unused, unused, device="cuda", gpu_memory_bytes=size)._bound(gpu)
    assert fractions == [(6 * GIB - GPU_RESERVE_BYTES // 2) / (24 * GIB), 1 - GPU_RESERVE_BYTES // 2 / (24 * GIB)]
    with pytest.raises(CapacityError, match="reserved on a GPU of"):
        ChatJob(folder, conversation, unused, unused, device="cuda", gpu_memory_bytes=25 * GIB)._bound(gpu)


# ---------------------------------------------------------------- folders and files of others
HOSTILE = {
    "endless": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
    "greedy": "{% set ns = namespace(s='aaaaaaaa') %}{% for a in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_ends(folder: Path, name: str) -> None:
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": HOSTILE[name]}))
    with pytest.raises(ModelError, match="took more than 1 s of a processor or 4 GiB of memory"):
        read_prompt(folder, TALK, cpu_seconds=1)


def test_a_template_reaches_nothing_and_its_refusal_is_told(folder: Path, tmp_path: Path) -> None:
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    for template, words in (
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    ):
        (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
        with pytest.raises(DataError, match=words):
            read_prompt(folder, TALK)
    reason, events = answer(folder, tmp_path / "chat")
    assert (reason, error_of(events)["cause"], error_of(events)["place"]) == (ExitReason.FAILED, "data", "messages")
    assert "begin a new chat" in error_of(events)["remedy"]


def test_code_and_pickles_of_a_folder_are_refused(folder: Path, tmp_path: Path) -> None:
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(json.dumps(json.loads(config) | {"auto_map": {"AutoModelForCausalLM": "evil.Model"}}))
    (folder / "evil.py").write_text("raise SystemExit('it ran')")
    reason, events = answer(folder, tmp_path / "code")
    assert (reason, error_of(events)["cause"]) == (ExitReason.FAILED, "model")
    (folder / "config.json").write_text(config)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    reason, events = answer(folder, tmp_path / "pickle")
    assert (reason, error_of(events)["cause"]) == (ExitReason.FAILED, "model")
    assert "pickle" in error_of(events)["message"]


# ---------------------------------------------------------------- the command
def test_the_command_answers_and_nothing_else_is_on_stdout(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    path.write_text(json.dumps({"messages": TALK, "max_new_tokens": 5000, "temperature": 0}))
    done = chat(folder, "--messages", path, "--max-new-tokens", "20")
    assert done.returncode == ExitCode.SUCCEEDED, done.stderr
    _, events = answer(folder, tmp_path / "chat")
    assert done.stdout == said(events)["text"] + "\n"
    assert "20 written" in done.stderr


def test_what_is_no_conversation_is_refused_without_being_repeated(folder: Path) -> None:
    done = chat(folder, "--temperature", "3", stdin="a secret")
    assert done.returncode == ExitCode.BAD_CONFIG
    assert done.stderr.startswith("lohan: stdin: temperature: Input should be less than or equal to 2")
    for text in ('[{"role": "user", "content": "a secret", "name": "x"}]', '{"secret": 1}', "[not JSON: secret", '[{"role": "secret"}]'):
        with pytest.raises(ConfigError) as refusal:
            parse_conversation(text, place="stdin")
        assert "secret" not in str(refusal.value).replace("secret: Extra", ""), text
    assert parse_conversation(" Hello\n", place="").plain_messages == [{"role": "user", "content": "Hello"}]
