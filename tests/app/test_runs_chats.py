"""Chats: what may be asked of which run, what an answer reserves, who sees what was said, and that real processes answer."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from fixtures.broker import Queues, running_broker
from fixtures.processes import no_process_left
from fixtures.runs import make_run, read_events, read_run, set_run
from fixtures.service import Person, page_text
from fixtures.things import ready_model
from fixtures.tiny_model import make_tiny_model, tiny_config
from fixtures.waiting import wait_until
from sqlalchemy import Engine, update
from sqlalchemy.exc import IntegrityError

from lohan.data.conversation import MAX_CONVERSATION_BYTES
from lohan.events import Event, EventType
from lohan.planning.answer_memory import answer_memory, most_tokens, shape_of
from lohan.units import GIB
from lohan_app.db import write_transaction
from lohan_app.entities import Run, RunKind, RunState
from lohan_app.entities.base import now
from lohan_app.runs import repository
from lohan_app.settings import Settings
from lohan_app.worker.housekeeping import Housekeeper
from lohan_app.worker.reservations import GpuRoom, Machine, fit, need_of
from lohan_app.worker.run_files import put_aside_trash
from lohan_app.worker.supervisor import Supervisor
from lohan_app.worker.trainer_command import arrange

SECRET = "the fox sleeps under the third bridge"
ASK = {"messages": [{"role": "user", "content": SECRET}], "max_new_tokens": 24, "temperature": 0}


@pytest.fixture
def queues(settings: Settings) -> Iterator[Queues]:
    with running_broker(settings) as queues:
        yield queues


def succeeded(settings: Settings, engine: Engine, person: Person, **columns: Any) -> str:
    """A training of this person with a model as its result."""
    run_id = make_run(settings, engine, **({"state": RunState.SUCCEEDED, "step": 3, "devices": []} | columns))
    model = ready_model(settings, engine, name=run_id[-8:])
    set_run(engine, run_id, owner_id=person.user.id, base_model_id=model.id)
    make_tiny_model(settings.run_folder(run_id) / "export")
    return run_id


def post(person: Person, path: str, body: dict[str, Any] | None = None, status: int = 201, **headers: str) -> dict[str, Any]:
    reply = person.client.post(f"/api/v1{path}", json=body or {}, headers=headers)
    assert reply.status_code == status, reply.text
    found: dict[str, Any] = reply.json()
    return found


def get(person: Person, path: str) -> dict[str, Any]:
    reply = person.client.get(f"/api/v1{path}")
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def tell(engine: Engine, run_id: str, *events: tuple[EventType, dict[str, Any]], attempt: int = 1, first_seq: int = 1) -> None:
    """What a chat's process says, as its supervisor stores it."""
    said = [Event(attempt, first_seq + index, 1_800_000_000.0, str(kind), fields) for index, (kind, fields) in enumerate(events)]
    with write_transaction(engine) as session:
        repository.record_events(session, run_id, epoch=0, events=said, offset_bytes=0, malformed=0)


def part(text: str, progress: float = 0.5) -> tuple[EventType, dict[str, Any]]:
    return EventType.ANSWER_PART, {"text": text, "tokens": 3, "progress": progress}


def whole(text: str, **fields: Any) -> tuple[EventType, dict[str, Any]]:
    return EventType.ANSWER, {"text": text, "finish_reason": "end_of_text", "prompt_tokens": 9, "answer_tokens": 4, **fields}


def answered(settings: Settings, engine: Engine, person: Person, run_id: str, text: str = "Under the first.") -> str:
    chat = post(person, f"/runs/{run_id}/chats", ASK)["id"]
    set_run(engine, chat, state=RunState.RUNNING)
    tell(engine, chat, whole(text))
    set_run(engine, chat, state=RunState.SUCCEEDED)
    return str(chat)


# ---------------------------------------------------------------- asking
def test_what_can_be_asked_and_whose_it_is(
    admin: Person, owner: Person, mate: Person, settings: Settings, engine: Engine, tick: Callable[[], None]
) -> None:
    run_id = succeeded(settings, engine, owner)
    post(mate, f"/runs/{run_id}/chats", ASK, status=404)
    made = post(owner, f"/runs/{run_id}/chats", ASK, **{"Idempotency-Key": "once"})
    assert (made["kind"], made["state"], made["parent_id"], made["owner_id"]) == ("chat", "queued", run_id, owner.user.id)
    assert (made["name"], made["queue_place"]["position"], made["answer"]) == ("Chat with a run", 1, None)
    assert post(owner, f"/runs/{run_id}/chats", ASK, **{"Idempotency-Key": "once"})["id"] == made["id"]
    post(owner, f"/runs/{run_id}/chats", ASK | {"max_new_tokens": 25}, status=422, **{"Idempotency-Key": "once"})
    # An administrator's chat with somebody's run is the administrator's own.
    private = {"messages": [{"role": "user", "content": "between us administrators"}]}
    other = post(admin, f"/runs/{run_id}/chats", private)["id"]
    assert [item["id"] for item in get(owner, f"/runs/{run_id}/chats")["items"]] == [made["id"]]
    assert [item["id"] for item in get(admin, f"/runs/{run_id}/chats")["items"]] == [other, made["id"]]
    assert owner.client.get(f"/api/v1/runs/{other}").status_code == 404
    assert "between us" not in page_text(owner, f"/runs/{run_id}?chat={other}")
    assert SECRET not in owner.client.get("/api/v1/runs").text, "lists say nothing of it"
    # A device like any other run's.
    tick()
    assert (read_run(engine, made["id"]).state, read_run(engine, made["id"]).devices) == (RunState.STARTING, ["cpu:0"])


def test_runs_without_a_model_say_how_they_get_one(owner: Person, settings: Settings, engine: Engine) -> None:
    run_id = succeeded(settings, engine, owner)
    chat = answered(settings, engine, owner, run_id)
    assert "a run of kind chat has no model" in post(owner, f"/runs/{chat}/chats", ASK, status=409)["detail"]
    assert owner.client.get(f"/api/v1/runs/{chat}/download").status_code == 409
    for state, words in ((RunState.RUNNING, "Wait until it has succeeded"), (RunState.PAUSED, "Export what it has recorded")):
        set_run(engine, run_id, state=state)
        assert words in post(owner, f"/runs/{run_id}/chats", ASK, status=409)["remedy"]
        assert "Ask the model" not in page_text(owner, f"/runs/{run_id}")
    # What a paused training's export has written is a model like any other.
    export = make_run(settings, engine, kind=RunKind.EXPORT, parent_id=run_id, state=RunState.SUCCEEDED, devices=[])
    set_run(engine, export, owner_id=owner.user.id, base_model_id=read_run(engine, run_id).base_model_id)
    assert "no longer on the disk" in post(owner, f"/runs/{export}/chats", ASK, status=409)["detail"]
    make_tiny_model(settings.run_folder(export) / "export")
    assert post(owner, f"/runs/{export}/chats", ASK)["parent_id"] == export


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": ""}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": "a\0b"}]}, "messages.0.content"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": "a", "weight": 0}]}, "messages.0.weight"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, ""),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}, {"role": "user", "content": "c"}]}, ""),
        ({"messages": [{"role": "user", "content": "é" * (MAX_CONVERSATION_BYTES // 2 + 1)}]}, ""),
        ({"messages": [{"role": "user", "content": "a"}] * 201}, "messages"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": 8193}, "max_new_tokens"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"seed": -1}, "seed"),
        ({"device": "cuda:7"}, "device"),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_what_is_out_of_bounds_is_named(owner: Person, settings: Settings, engine: Engine, change: dict[str, Any], place: str) -> None:
    run_id = succeeded(settings, engine, owner)
    refused = post(owner, f"/runs/{run_id}/chats", ASK | change, status=422)
    assert place in str(refused["place"])
    assert get(owner, f"/runs/{run_id}/chats")["items"] == []


def test_a_lone_surrogate_is_refused(owner: Person, settings: Settings, engine: Engine) -> None:
    run_id = succeeded(settings, engine, owner)
    body = '{"messages": [{"role": "user", "content": "a\\ud800"}]}'
    reply = owner.client.post(f"/api/v1/runs/{run_id}/chats", content=body, headers={"Content-Type": "application/json"})
    assert reply.status_code == 422, reply.text


# ---------------------------------------------------------------- what it takes
SEVEN_BILLION = tiny_config() | {
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "vocab_size": 32_000,
    "max_position_embeddings": 4096,
}


def test_what_an_answer_takes_grows_with_its_tokens_and_stays_within_the_context() -> None:
    shape = shape_of(SEVEN_BILLION, parameters=6_738_415_616, largest_parameters=202_383_360, place="")
    short, full = answer_memory(shape, 1024, on_gpu=True), answer_memory(shape, 4096, on_gpu=True)
    # Keys and values of a token: 2 x 32 layers x 32 heads x 128 x 2 bytes = 512 KiB.
    assert full.gpu_bytes - short.gpu_bytes > 3072 * 512 * 1024
    assert 2 * shape.parameters + 4096 * 512 * 1024 < full.gpu_bytes < 20 * GIB
    assert answer_memory(shape, 4096, on_gpu=False).ram_bytes > 4 * shape.parameters
    assert most_tokens(shape, size_bytes=100, messages=1, max_new_tokens=50) == 100 + 64 + 1024 + 50
    assert most_tokens(shape, size_bytes=100_000, messages=1, max_new_tokens=50) == 4096
    grouped = shape_of(SEVEN_BILLION | {"num_key_value_heads": 8}, parameters=1, largest_parameters=1, place="")
    assert answer_memory(grouped, 4096, on_gpu=True).gpu_bytes < answer_memory(shape, 4096, on_gpu=True).gpu_bytes - 12 * GIB


def test_what_can_never_fit_is_refused_with_need_and_have(owner: Person, settings: Settings, engine: Engine) -> None:
    run_id = succeeded(settings, engine, owner)
    path = settings.run_folder(run_id) / "export" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 10**6, "max_position_embeddings": 10**9}))
    refused = post(owner, f"/runs/{run_id}/chats", ASK, status=409)
    assert refused["type"].endswith("capacity-error")
    assert refused["need_bytes"] > refused["have_bytes"] > 0
    assert "max_new_tokens" in refused["remedy"]
    path.write_text("{}")
    assert "num_hidden_layers" in post(owner, f"/runs/{run_id}/chats", ASK, status=422)["detail"]


def test_a_chat_waits_for_a_gpu_with_all_the_memory_it_takes(owner: Person, settings: Settings, engine: Engine) -> None:
    chat = post(owner, f"/runs/{succeeded(settings, engine, owner)}/chats", ASK)["id"]
    needs = read_run(engine, chat).settings["needs"]
    assert (needs["device"], needs["gpu_bytes"], needs["result_bytes"]) == ("cpu", 0, 0)
    asked = read_run(engine, chat).settings
    set_run(engine, chat, settings=asked | {"needs": needs | {"device": "cuda", "gpu_bytes": 10 * GIB}})
    need = need_of(read_run(engine, chat), settings.state_folders, states={})
    room = {"ram_total_bytes": 64 * GIB, "ram_free_bytes": 64 * GIB, "directories": (), "data_free_bytes": GIB}
    free = Machine(
        devices=("GPU-a", "GPU-b"), gpus={"GPU-a": GpuRoom(24 * GIB, 10 * GIB - 1), "GPU-b": GpuRoom(24 * GIB, 10 * GIB)}, **room
    )
    reservation = fit(need, free, [])
    assert not isinstance(reservation, str), reservation
    assert reservation.devices == ["GPU-b"], "it has no plan that could do with less"
    source = read_run(engine, read_run(engine, chat).parent_id or "")
    settings.run_folder(chat).mkdir(parents=True)
    command = arrange(settings, read_run(engine, chat), None, source, device="GPU-b")
    assert command[-2:] == ["--gpu-memory-bytes", str(10 * GIB)]


def test_what_was_said_is_in_a_file_of_ones_own_and_in_no_command_line(owner: Person, settings: Settings, engine: Engine) -> None:
    run_id = succeeded(settings, engine, owner)
    chat = read_run(engine, post(owner, f"/runs/{run_id}/chats", ASK)["id"])
    settings.run_folder(chat.id).mkdir(parents=True)
    command = arrange(settings, chat, None, read_run(engine, run_id), device="cpu:0")
    assert SECRET not in " ".join(command)
    (path,) = (Path(word) for word in command if word.endswith("chat.json"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(path.read_text())["messages"] == ASK["messages"]


# ---------------------------------------------------------------- answers
@pytest.mark.database
def test_pieces_of_an_answer_go_when_it_is_whole(owner: Person, settings: Settings, engine: Engine) -> None:
    run_id = succeeded(settings, engine, owner)
    chat = post(owner, f"/runs/{run_id}/chats", ASK)["id"]
    set_run(engine, chat, state=RunState.RUNNING)
    tell(engine, chat, part("Under "), part("the se"))
    assert get(owner, f"/runs/{chat}")["answer"] | {"text": ""} == dict.fromkeys(get(owner, f"/runs/{chat}")["answer"], None) | {"text": ""}
    assert get(owner, f"/runs/{chat}")["answer"]["text"] == "Under the se"
    assert read_run(engine, chat).phase_progress == 0.5
    # Another attempt begins it anew.
    tell(engine, chat, (EventType.STARTED, {"resumed_step": 0}), part("Over"), attempt=2)
    assert get(owner, f"/runs/{chat}")["answer"]["text"] == "Over"
    # The page shows no words of an attempt that was lost.
    assert "Over" not in page_text(owner, f"/runs/{run_id}")
    set_run(engine, chat, phase="answering")
    assert "Over" in page_text(owner, f"/runs/{run_id}")
    tell(engine, chat, part(" it"), whole("Over it.", tokens_per_second=3.0), attempt=2, first_seq=3)
    answer = get(owner, f"/runs/{chat}")["answer"]
    assert (answer["text"], answer["finish_reason"], answer["tokens_per_second"]) == ("Over it.", "end_of_text", 3.0)
    assert [event.type for event in read_events(engine, chat)] == [EventType.STARTED, EventType.ANSWER]
    set_run(engine, chat, state=RunState.SUCCEEDED)
    shown = page_text(owner, f"/runs/{chat}")
    assert "Over it." in shown
    assert "9 tokens read, 4 written, 3.0 tokens/s, the model ended it" in shown.lower()


def test_a_question_follows_the_conversation_so_far(owner: Person, mate: Person, settings: Settings, engine: Engine) -> None:
    run_id = succeeded(settings, engine, owner)
    first = answered(settings, engine, owner, run_id)
    more = {"messages": [{"role": "user", "content": "Are you sure?"}], "follows": first}
    second = post(owner, f"/runs/{run_id}/chats", more)
    said = [(message["role"], message["content"]) for message in second["settings"]["chat"]["messages"]]
    assert said == [("user", SECRET), ("assistant", "Under the first."), ("user", "Are you sure?")]
    assert "is queued" in post(owner, f"/runs/{run_id}/chats", more | {"follows": second["id"]}, status=409)["detail"]
    post(owner, f"/runs/{run_id}/chats", more | {"follows": "run_none"}, status=404)
    post(owner, f"/runs/{run_id}/chats", more | {"follows": run_id}, status=404)
    post(owner, f"/runs/{succeeded(settings, engine, owner)}/chats", more, status=404)
    own = succeeded(settings, engine, mate)
    post(mate, f"/runs/{own}/chats", more, status=404)
    long = {"messages": [{"role": "user", "content": "x" * (MAX_CONVERSATION_BYTES - 10)}], "follows": first}
    assert post(owner, f"/runs/{run_id}/chats", long, status=422)["place"] == "messages"
    silent = answered(settings, engine, owner, run_id, text="")
    assert "no word" in post(owner, f"/runs/{run_id}/chats", more | {"follows": silent}, status=409)["detail"]
    # On the page the last chat stands for its conversation, and the form goes on from it.
    shown = owner.client.get(f"/runs/{run_id}?chat={first}").text
    assert f'name="follows" value="{first}"' in shown
    assert "Are you sure?" in page_text(owner, f"/runs/{run_id}?chat={second['id']}")


def test_the_page_works_without_a_script(owner: Person, settings: Settings, engine: Engine) -> None:
    run_id = succeeded(settings, engine, owner)
    assert "Each answer is a run of its own" in page_text(owner, f"/runs/{run_id}")
    form = {"message": "Where\r\ndoes it sleep?", "max_new_tokens": "16", "temperature": "0", "top_p": "1", "seed": ""}
    sent = owner.client.post(f"/runs/{run_id}/chats", data=form, follow_redirects=False)
    chat = get(owner, f"/runs/{run_id}/chats")["items"][0]["id"]
    assert (sent.status_code, sent.headers["Location"]) == (303, f"/runs/{run_id}?chat={chat}#chat")
    asked = get(owner, f"/runs/{chat}")["settings"]["chat"]
    assert (asked["messages"][0]["content"], asked["max_new_tokens"], asked["seed"]) == ("Where\ndoes it sleep?", 16, None)
    assert "1 of 1 in the queue" in page_text(owner, f"/runs/{run_id}")
    refused = owner.client.post(f"/runs/{run_id}/chats", data=form | {"temperature": "9", "message": "<b>keep me</b>"})
    assert "less than or equal to 2" in refused.text
    assert "&lt;b&gt;keep me&lt;/b&gt;</textarea>" in refused.text
    set_run(
        engine,
        chat,
        state=RunState.FAILED,
        problem={"message": "GPU memory ran out", "place": None, "remedy": "Ask.", "cause": "gpu_memory"},
    )
    failed = page_text(owner, f"/runs/{run_id}")
    assert "This run failed: GPU memory ran out" in failed
    assert "Ask again" in failed
    again = owner.client.post(f"/runs/{run_id}/partials/chats/{chat}/retry", data={})
    assert again.status_code == 200
    assert "Waiting in the queue" in again.text


def test_an_answer_that_has_begun_may_not_be_silent_for_as_long(settings: Settings) -> None:
    supervisor = Supervisor(settings, "run_x")
    assert supervisor._pulse.limit_seconds == settings.start_silence_seconds
    supervisor._feel_pulse([Event(1, 1, 0.0, str(EventType.ANSWER_PART), {"text": "a"})])
    assert supervisor._pulse.limit_seconds == settings.step_silence_seconds


def test_the_dashboard_keeps_trainings_in_sight(owner: Person, settings: Settings, engine: Engine) -> None:
    run_id = succeeded(settings, engine, owner, name="the training", finished_at=now())
    answered(settings, engine, owner, run_id)
    shown = page_text(owner, "/")
    assert "the training" in shown
    assert "Chat with the training" not in shown


# ---------------------------------------------------------------- how long it stays
def test_chats_go_with_their_run_and_come_back_with_it(owner: Person, settings: Settings, engine: Engine) -> None:
    run_id = succeeded(settings, engine, owner)
    first, waiting = answered(settings, engine, owner, run_id), post(owner, f"/runs/{run_id}/chats", ASK)["id"]
    assert waiting in owner.client.delete(f"/api/v1/runs/{run_id}").json()["detail"]
    post(owner, f"/runs/{waiting}/cancel", status=200)
    alone = answered(settings, engine, owner, run_id)
    for gone in (alone, run_id):
        assert owner.client.delete(f"/api/v1/runs/{gone}").status_code == 204
    assert owner.client.get(f"/api/v1/runs/{first}").status_code == 404
    trash = get(owner, "/storage")["trash"]
    assert {item["id"] for item in trash} == {run_id}, "a chat is had back with its run"
    assert "deleted too" in post(owner, f"/runs/{first}/restore", status=409)["detail"]
    post(owner, f"/runs/{run_id}/restore", status=200)
    assert {item["id"] for item in get(owner, f"/runs/{run_id}/chats")["items"]} == {first, waiting}
    assert get(owner, f"/runs/{first}")["answer"]["text"] == "Under the first."
    # With the trash goes what was said; the row stays for the queue.
    owner.client.delete(f"/api/v1/runs/{first}")
    Housekeeper(settings.model_copy(update={"trash_days": 0}), engine).remove_due()
    left = read_run(engine, first)
    assert (left.settings.get("chat"), read_events(engine, first)) == (None, [])
    assert not put_aside_trash(settings, first)


def test_a_retry_asks_once_more_as_long_as_the_model_is_there(owner: Person, settings: Settings, engine: Engine) -> None:
    run_id = succeeded(settings, engine, owner)
    chat = post(owner, f"/runs/{run_id}/chats", ASK)["id"]
    assert "it keeps nothing" in post(owner, f"/runs/{chat}/pause", status=409)["detail"]
    post(owner, f"/runs/{chat}/cancel", status=200)
    again = post(owner, f"/runs/{chat}/retry")
    assert (again["kind"], again["parent_id"], again["settings"]["chat"]["messages"]) == ("chat", run_id, ASK["messages"])
    (settings.run_folder(run_id) / "export").rename(settings.run_folder(run_id) / "elsewhere")
    assert "no longer on the disk" in post(owner, f"/runs/{chat}/retry", status=409)["detail"]
    set_run(engine, again["id"], state=RunState.STARTING, devices=["cpu:0"])
    assert Supervisor(settings, again["id"]).run() == 0
    assert (read_run(engine, again["id"]).state, read_run(engine, again["id"]).problem["cause"]) == (RunState.FAILED, "settings")  # type: ignore[index]


@pytest.mark.database
def test_the_database_holds_a_chat_to_its_run(settings: Settings, engine: Engine) -> None:
    run_id = make_run(settings, engine)
    with pytest.raises(IntegrityError), write_transaction(engine) as session:
        session.execute(update(Run).where(Run.id == run_id).values(kind=RunKind.CHAT))


# ---------------------------------------------------------------- the whole path
def test_a_real_model_answers_and_another_answer_is_cancelled(owner: Person, settings: Settings, engine: Engine, tmp_path: Path) -> None:
    run_id = succeeded(settings, engine, owner)
    chat = post(owner, f"/runs/{run_id}/chats", ASK)["id"]
    set_run(engine, chat, state=RunState.STARTING, devices=["cpu:0"])
    with no_process_left(tmp_path):
        assert Supervisor(settings, chat).run() == 0
    run = read_run(engine, chat)
    assert (run.state, run.problem, run.attempt, run.devices) == (RunState.SUCCEEDED, None, 1, [])
    answer = get(owner, f"/runs/{chat}")["answer"]
    assert (answer["finish_reason"], answer["answer_tokens"], answer["seed"]) == ("length", 24, None)
    types = [event.type for event in read_events(engine, chat)]
    assert (types[-2:], types.count(EventType.STARTED), EventType.ANSWER_PART in types) == (["answer", "exit"], 1, False)
    assert SECRET not in (settings.run_folder(chat) / "trainer.log").read_text()
    assert "24 written" in page_text(owner, f"/runs/{run_id}")

    # The longest answer of a model with more to compute, which is given up in the middle.
    export = settings.run_folder(run_id) / "export"
    make_tiny_model(export, layers=16, hidden_size=256)
    config = json.loads((export / "config.json").read_text())
    (export / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 20_000}))
    long = post(owner, f"/runs/{run_id}/chats", ASK | {"max_new_tokens": 8192})["id"]
    set_run(engine, long, state=RunState.STARTING, devices=["cpu:0"])
    with no_process_left(tmp_path):
        supervisor = Thread(target=Supervisor(settings, long).run)
        supervisor.start()
        wait_until(
            lambda: any(event.type == EventType.ANSWER_PART for event in read_events(engine, long)), timeout_seconds=120, what="words"
        )
        post(owner, f"/runs/{long}/cancel", status=200)
        supervisor.join(timeout=120)
    assert read_run(engine, long).state is RunState.CANCELLED
    cancelled = get(owner, f"/runs/{long}")["answer"]
    assert cancelled["finish_reason"] == "cancelled"
    assert 0 < cancelled["answer_tokens"] < 8192
