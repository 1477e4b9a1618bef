"""The demonstration's own parts: its dataset, its client, its search for a port and for an appliance that runs."""

from __future__ import annotations

import http.server
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lohan.data.formats import Row, RowError, iterate_rows
from lohan.errors import LohanError
from lohan_app.demo.appliance import find_running, free_port
from lohan_app.demo.client import ApiError, Client, answers
from lohan_app.demo.corpus import corpus_folder, dialogs, write_dataset


def test_the_dataset_is_the_whole_english_corpus_and_every_row_can_be_used(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    count = write_dataset(path)
    rows = list(iterate_rows(path))
    assert [row for row in rows if isinstance(row, RowError)] == []
    assert len(rows) == count > 2000


def test_dialogs_of_several_turns_are_kept_whole():
    lengths = [len(messages) for messages in dialogs(corpus_folder())]
    assert all(length % 2 == 0 for length in lengths)
    assert max(lengths) > 20


def test_speakers_alternate_and_an_unanswered_last_turn_is_left_out(tmp_path: Path):
    (tmp_path / "a.yml").write_text("conversations:\n- - Hello\n  - Hi\n  - How are you?\n- - Alone\n", encoding="utf-8")
    assert list(dialogs(tmp_path)) == [[{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]]


def test_a_taken_port_is_passed_over():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert free_port(taken.getsockname()[1]) > taken.getsockname()[1]


def test_an_appliance_that_has_ended_is_not_found(tmp_path: Path):
    (tmp_path / "up.lock").write_text(json.dumps({"pid": 1, "url": "http://127.0.0.1:1"}))
    assert find_running(tmp_path) is None
    assert find_running(tmp_path / "elsewhere") is None


class _Handler(http.server.BaseHTTPRequestHandler):
    """Answers as the service does: JSON, and problem+json with status 422 for what it does not know."""

    def do_GET(self):
        self._reply(200, {"path": self.path, "key": self.headers["Authorization"]})

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path.endswith("/datasets"):
            self._reply(201, {"type": self.headers["Content-Type"], "body": body.decode()})
        else:
            self._reply(422, {"title": "Unprocessable", "detail": "it is 9", "place": "training.batch_size", "remedy": "Use 8."})

    def _reply(self, status, value):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def address() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_client_sends_its_key_and_its_query(address: str):
    assert Client(address, "lohan_1_x").get("/runs", limit=5) == {"path": "/api/v1/runs?limit=5", "key": "Bearer lohan_1_x"}


def test_a_refusal_keeps_the_services_own_words(address: str):
    with pytest.raises(ApiError) as caught:
        Client(address, "k").post("/runs", {})
    error = caught.value
    assert (error.status, error.message, error.place, error.remedy) == (422, "it is 9", "training.batch_size", "Use 8.")


def test_an_upload_is_a_form_of_two_parts(address: str, tmp_path: Path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a", "completion": "b"}\n')
    sent = Client(address, "k").upload("/datasets", file, name="rows")
    assert sent["type"].startswith("multipart/form-data; boundary=")
    assert 'name="name"\r\n\r\nrows\r\n' in sent["body"]
    assert 'filename="rows.jsonl"' in sent["body"]
    assert file.read_text() in sent["body"]


def test_waiting_ends_with_an_error_that_names_what_was_seen(address: str):
    with pytest.raises(LohanError, match="still None after 0 s"):
        Client(address, "k").wait("/runs/1", lambda _: False, seconds=0)


def test_nobody_listening_is_said_with_the_address():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{unused.getsockname()[1]}"
        assert not answers(address)
        with pytest.raises(LohanError, match="no answer"):
            Client(address, "k").get("/runs")


def test_every_row_of_the_dataset_is_a_conversation(tmp_path: Path):
    write_dataset(tmp_path / "rows.jsonl")
    first = next(iterate_rows(tmp_path / "rows.jsonl"))
    assert isinstance(first, Row)
    assert [message["role"] for message in first.messages] == ["user", "assistant"]
