"""Event streams over a real connection: order, resumption, the end, and one poller for all."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from fastapi import FastAPI
from fixtures.service import Person
from fixtures.things import ready_dataset, ready_model
from fixtures.waiting import wait_until
from fixtures.web_server import serving
from sqlalchemy import Engine, event, update

from lohan.events import Event, EventType
from lohan_app.auth.schemas import Scope
from lohan_app.db import read_transaction, write_transaction
from lohan_app.entities import Run, RunState
from lohan_app.redis_client import connect
from lohan_app.runs import queries, repository, stream
from lohan_app.runs.announce import CHANNEL, announce
from lohan_app.settings import Settings

TERMINAL = [RunState.SUCCEEDED, RunState.FAILED, RunState.CANCELLED]


@dataclass
class Message:
    kind: str
    id: str
    data: dict[str, Any]


class Stream:
    """A reader of server-sent events, as a browser reads them."""

    def __init__(self, port: int, path: str, headers: dict[str, str]) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        self._connection.request("GET", path, headers=headers)
        self.reply = self._connection.getresponse()

    def __iter__(self) -> Iterator[Message]:
        fields: dict[str, str] = {}
        for raw in self.reply:
            line = raw.decode().rstrip("\n")
            if line:
                name, _, value = line.partition(": ")
                fields[name] = value
            elif "data" in fields:
                yield Message(fields["event"], fields["id"], json.loads(fields["data"]))
                fields = {}

    def until(self, *, kind: str, **data: Any) -> list[Message]:
        """Everything up to and with the first message of that kind and content."""
        read = []
        for message in self:
            read.append(message)
            if message.kind == kind and all(message.data.get(name) == value for name, value in data.items()):
                return read
        raise AssertionError(f"the stream ended without {kind} {data}: {read}")

    def close(self) -> None:
        self._connection.close()


@pytest.fixture
def port(app: FastAPI, owner: Person) -> Iterator[int]:
    with serving(app) as port:
        yield port


@pytest.fixture
def open_stream(port: int, owner: Person) -> Iterator[Any]:
    """Opens streams as the owner's program; closes them at the end."""
    key = owner.key(Scope.READ)
    opened: list[Stream] = []

    def open_one(run_id: str, query: str = "", **headers: str) -> Stream:
        opened.append(Stream(port, f"/api/v1/runs/{run_id}/events{query}", key | headers))
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()


@pytest.fixture
def run(settings: Settings, engine: Engine, owner: Person) -> Run:
    """A run at work in its first epoch and attempt."""
    model, dataset = ready_model(settings, engine), ready_dataset(settings, engine, owner)
    run = Run(
        owner_id=owner.user.id, name="r", base_model_id=model.id, dataset_id=dataset.id,
        settings={}, state=RunState.RUNNING, devices=["cpu:0"], epoch=1, attempt=1,
    )  # fmt: skip
    with write_transaction(engine) as session:
        session.add(run)
    return run


def step(number: int, *, attempt: int = 1, seq: int | None = None, loss: float | None = 1.0) -> Event:
    fields = {"step": number, "total_steps": 100, "loss": loss, "learning_rate": 0.1, "tokens": 10, "step_seconds": 0.5, "eta_seconds": 9.0}
    return Event(attempt, seq or number + 1, 1e9 + number, EventType.STEP, fields)


STARTED = Event(1, 1, 1e9, EventType.STARTED, {"total_steps": 100})


def record(engine: Engine, run: Run, *events: Event) -> None:
    """What the supervisor does with a batch."""
    with write_transaction(engine) as session:
        repository.record_events(session, run.id, epoch=1, events=events, offset_bytes=0, malformed=0)


def set_run(engine: Engine, run: Run, **values: Any) -> None:
    with write_transaction(engine) as session:
        session.execute(update(Run).where(Run.id == run.id).values(**values))


@pytest.mark.database
def test_events_come_in_order_as_they_are_recorded(open_stream, engine: Engine, run: Run):
    stream = open_stream(run.id)
    assert stream.reply.status == 200
    assert stream.reply.headers["content-type"].startswith("text/event-stream")
    first = stream.until(kind="state")
    assert [message.data["state"] for message in first] == ["running"]
    record(engine, run, STARTED, step(1))
    record(engine, run, step(2, loss=None), Event(1, 4, 1e9, EventType.PHASE, {"phase": "exporting", "progress": 0.5}))
    read = stream.until(kind="phase")
    assert [(message.kind, message.id) for message in read if message.kind != "state"] == [
        ("started", "1:1"), ("step", "1:2"), ("step", "1:3"), ("phase", "1:4"),
    ]  # fmt: skip
    steps = [message.data for message in read if message.kind == "step"]
    assert [(data["step"], data["loss"], data["attempt"], data["total_steps"], data["eta_seconds"]) for data in steps] == [
        (1, 1.0, 1, 100, 9.0), (2, None, 1, 100, 9.0),
    ]  # fmt: skip
    after = stream.until(kind="state", phase="exporting")
    assert after[-1].data["phase_progress"] == 0.5


@pytest.mark.database
@pytest.mark.parametrize("how", ["header", "query"])
def test_a_stream_resumes_behind_the_last_event_it_saw(open_stream, engine: Engine, run: Run, how: str):
    record(engine, run, STARTED, *[step(number) for number in range(1, 8)])
    arguments = {"query": "?last_event_id=1:4"} if how == "query" else {"Last-Event-ID": "1:4"}
    stream = open_stream(run.id, **arguments)
    read = stream.until(kind="state")
    assert [message.data["step"] for message in read if message.kind == "step"] == [4, 5, 6, 7]
    record(engine, run, step(8))
    assert [message.id for message in stream.until(kind="step") if message.kind == "step"] == ["1:9"]


@pytest.mark.database
def test_a_long_absence_is_caught_up_whole(open_stream, engine: Engine, run: Run, monkeypatch):
    monkeypatch.setattr(stream, "EVENTS_PER_LOOK", 7)
    record(engine, run, STARTED, *[step(number) for number in range(1, 51)])
    read = open_stream(run.id, **{"Last-Event-ID": "0:0"}).until(kind="state")
    assert [message.id for message in read] == [f"1:{seq}" for seq in range(1, 52)] + ["1:51"]


@pytest.mark.database
def test_without_an_id_a_stream_begins_now(open_stream, engine: Engine, run: Run):
    record(engine, run, STARTED, step(1), step(2))
    stream = open_stream(run.id)
    assert [message.kind for message in stream.until(kind="state")] == ["state"]
    record(engine, run, step(3))
    assert [message.data["step"] for message in stream.until(kind="step") if message.kind == "step"] == [3]


@pytest.mark.database
def test_a_new_attempt_follows_the_old(open_stream, engine: Engine, run: Run):
    record(engine, run, STARTED, step(1), step(2))
    stream = open_stream(run.id)
    stream.until(kind="state")
    record(engine, run, Event(2, 1, 1e9, EventType.STARTED, {"total_steps": 100}), step(1, attempt=2))
    read = [message for message in stream.until(kind="step") if message.kind != "state"]
    assert [(message.kind, message.id) for message in read] == [("started", "2:1"), ("step", "2:2")]


@pytest.mark.database
@pytest.mark.parametrize("state", TERMINAL)
def test_the_end_of_the_run_is_the_end_of_the_stream(open_stream, engine: Engine, run: Run, state: RunState):
    stream = open_stream(run.id)
    stream.until(kind="state")
    record(engine, run, STARTED, step(1), Event(1, 3, 1e9, EventType.EXIT, {"reason": "succeeded"}))
    set_run(engine, run, state=state)
    read = list(stream)
    assert [message.kind for message in read if message.kind != "state"] == ["started", "step", "exit"]
    assert (read[-1].kind, read[-1].data["state"]) == ("state", state)


@pytest.mark.parametrize("state", TERMINAL)
def test_a_stream_of_a_run_that_has_ended_says_so_and_ends(open_stream, engine: Engine, run: Run, state: RunState):
    record(engine, run, STARTED, step(1))
    set_run(engine, run, state=state)
    assert [message.data["state"] for message in open_stream(run.id)] == [state]
    kinds = [message.kind for message in open_stream(run.id, **{"Last-Event-ID": "0:0"})]
    assert kinds == ["started", "step", "state"]


@pytest.mark.parametrize("text", ["1", "a:b", "1:2:3", "-1:2", "99999999999:1"])
def test_what_is_no_event_id_is_refused(open_stream, run: Run, text: str):
    reply = open_stream(run.id, **{"Last-Event-ID": text}).reply
    assert (reply.status, json.load(reply)["place"]) == (422, "Last-Event-ID")


@pytest.mark.database
def test_one_poller_looks_for_all_streams_and_rests_without_any(app: FastAPI, open_stream, engine: Engine, run: Run):
    hub = app.state.context.events
    looks: list[int] = []
    original = hub._look
    hub._look = lambda cursors: (looks.append(len(cursors)), original(cursors))[1]
    streams = [open_stream(run.id) for _ in range(5)]
    for one in streams:
        one.until(kind="state")
    looks.clear()
    record(engine, run, STARTED)
    for one in streams:
        one.until(kind="started")
    assert len(looks) < 5
    for one in streams:
        one.close()
    wait_until(lambda: not hub._feeds and all(task.done() for task in hub._tasks), what="the poller to rest")
    assert sum(hub._streams.values()) == 0


def test_a_user_may_hold_so_many_streams_and_no_more(open_stream, run: Run, monkeypatch):
    monkeypatch.setattr(stream, "STREAMS_PER_USER", 2)
    held = [open_stream(run.id) for _ in range(2)]
    for one in held:
        one.until(kind="state")
    assert open_stream(run.id).reply.status == 429


def test_a_silent_stream_is_kept_alive_and_ends_for_a_new_login(open_stream, run: Run, monkeypatch):
    monkeypatch.setattr(stream, "KEEP_ALIVE_SECONDS", 0.05)
    monkeypatch.setattr(stream, "LONGEST_STREAM_SECONDS", 2.0)
    text = open_stream(run.id).reply.read().decode()
    assert ": still here\n\n" in text
    assert text.count("event: state") == 1


@pytest.mark.database
def test_a_reader_that_falls_behind_is_let_go_and_resumes(open_stream, engine: Engine, run: Run, monkeypatch):
    monkeypatch.setattr(stream, "QUEUE_LIMIT", 3)
    first = open_stream(run.id)
    first.until(kind="state")
    record(engine, run, STARTED, *[step(number) for number in range(1, 11)])
    seen = ["0:0", *[message.id for message in first if message.kind != "state"]]
    resumed = open_stream(run.id, **{"Last-Event-ID": seen[-1]}).until(kind="state")
    ids = seen[1:] + [message.id for message in resumed if message.kind != "state"]
    assert ids == [f"1:{seq}" for seq in range(1, 12)]


@pytest.mark.broker
class TestAnnouncements:
    def test_an_announcement_wakes_the_poller(self, open_stream, settings: Settings, engine: Engine, run: Run, monkeypatch):
        # So slow a pace that only the announcement can bring the news within the reader's time-out.
        monkeypatch.setattr(stream, "POLL_SECONDS", 1000.0)
        one = open_stream(run.id)
        one.until(kind="state")
        with connect(settings) as client:
            wait_until(lambda: dict(client.pubsub_numsub(CHANNEL)).get(CHANNEL.encode()), what="the process to subscribe")
        record(engine, run, STARTED)
        announce(settings, run.id)
        assert one.until(kind="started")[-1].id == "1:1"


@pytest.mark.database(only="sqlite")
def test_queries_for_news_use_the_index(engine: Engine, run: Run):
    statements: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda _c, _cur, statement, *_: statements.append(statement))
    with read_transaction(engine) as session:
        queries.events_after(session, run.id, (1, 1), 10)
        query = next(statement for statement in statements if "run_metrics" in statement)
        plan = session.connection().exec_driver_sql(f"EXPLAIN QUERY PLAN {query}", (run.id, 1, 1, 10, 0)).all()
    assert "ix_run_metrics_run_id_attempt_seq" in str(plan)
