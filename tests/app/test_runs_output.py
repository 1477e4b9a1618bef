"""What a run leaves for people to look at: the curve, the log, the download."""

from __future__ import annotations

import io
import os
import random
import zipfile
from pathlib import Path
from urllib.parse import unquote

import pytest
from fixtures.service import Person
from fixtures.things import ready_dataset, ready_model
from sqlalchemy import Engine, insert

from lohan_app.db import write_transaction
from lohan_app.entities import Run, RunMetric, RunState
from lohan_app.runs import curves
from lohan_app.runs.archive import content_disposition, stream_zip
from lohan_app.runs.logs import LINE_LIMIT_BYTES, STRETCH_BYTES, TAIL_BYTES, as_plain_text, read_log
from lohan_app.runs.service import POINTS_LIMIT
from lohan_app.settings import Settings


@pytest.fixture
def run(settings: Settings, engine: Engine, owner: Person) -> Run:
    model, dataset = ready_model(settings, engine), ready_dataset(settings, engine, owner)
    run = Run(
        owner_id=owner.user.id, name="Mein Lauf: ü/1", base_model_id=model.id, dataset_id=dataset.id,
        settings={}, state=RunState.SUCCEEDED, devices=[],
    )  # fmt: skip
    with write_transaction(engine) as session:
        session.add(run)
    settings.run_folder(run.id).mkdir(parents=True)
    return run


# ---------------------------------------------------------------- curve
def store_losses(engine: Engine, run: Run, losses: dict[int, float | None]) -> None:
    same = {"run_id": run.id, "attempt": 1, "time": 1e9, "learning_rate": 0.1, "tokens": 1, "step_seconds": 1.0}
    rows = [{**same, "step": step, "seq": step, "loss": loss} for step, loss in losses.items()]
    with write_transaction(engine) as session:
        session.execute(insert(RunMetric), rows)
        curves.refresh(session, run.id, first_step=min(losses), last_step=max(losses))


def metrics(person: Person, run: Run, **query: int) -> dict:
    return person.client.get(f"/api/v1/runs/{run.id}/metrics", params=query).json()


def test_a_run_without_steps_has_an_empty_curve(owner: Person, run: Run):
    assert metrics(owner, run) == {"data": [], "total": 0, "down_sampled": False, "last_event_id": None}


@pytest.mark.database
def test_a_short_curve_is_given_whole(owner: Person, run: Run, engine: Engine):
    losses = {step: (None if step == 7 else 1 / step) for step in range(1, POINTS_LIMIT + 1)}
    store_losses(engine, run, losses)
    found = metrics(owner, run)
    assert {point["step"]: point["loss"] for point in found["data"]} == losses
    assert (found["total"], found["down_sampled"], found["last_event_id"]) == (POINTS_LIMIT, False, f"1:{POINTS_LIMIT}")
    assert [point["step"] for point in metrics(owner, run, after_step=POINTS_LIMIT - 2)["data"]] == [POINTS_LIMIT - 1, POINTS_LIMIT]
    assert metrics(owner, run, after_step=POINTS_LIMIT)["data"] == []


@pytest.mark.database
def test_a_long_curve_keeps_spikes_dips_gaps_and_its_ends(owner: Person, run: Run, engine: Engine):
    numbers = random.Random(0)  # noqa: S311 - a curve, not a secret
    losses: dict[int, float | None] = {step: 2.0 + numbers.random() for step in range(1, 30_001)}
    losses |= {12_345: 99.0, 23_456: -5.0, 17_000: None, 17_001: None, 29_999: None}
    del losses[400]
    store_losses(engine, run, losses)
    found = metrics(owner, run)
    points = {point["step"]: point["loss"] for point in found["data"]}
    assert (found["total"], found["down_sampled"]) == (29_999, True)
    assert len(points) == len(found["data"]) <= POINTS_LIMIT
    assert list(points) == sorted(points)
    assert {1, 12_345, 23_456, 17_000, 29_999, 30_000} <= points.keys()
    assert all(losses[step] == loss for step, loss in points.items())


# ---------------------------------------------------------------- log
def log_of(person: Person, run: Run, **query: int) -> dict:
    return person.client.get(f"/api/v1/runs/{run.id}/log", params=query).json()


def test_a_log_that_is_not_there_yet_is_empty(owner: Person, run: Run):
    assert log_of(owner, run) == {"text": "", "next_offset": 0, "size": 0}


def test_a_log_is_followed_by_its_offset(owner: Person, run: Run, settings: Settings):
    path = settings.run_folder(run.id) / "trainer.log"
    path.write_text("one\ntwo\nthr")
    first = log_of(owner, run)
    assert first == {"text": "one\ntwo\n", "next_offset": 8, "size": 11}
    with path.open("a") as file:
        file.write("ee €\nfo")
    second = log_of(owner, run, offset=first["next_offset"])
    assert second["text"] == "three €\n"
    assert log_of(owner, run, offset=second["next_offset"])["text"] == ""
    path.write_text("new\n")
    assert log_of(owner, run, offset=second["next_offset"]) == {"text": "new\n", "next_offset": 4, "size": 4}


def test_the_tail_begins_at_a_line(tmp_path: Path):
    path = tmp_path / "trainer.log"
    path.write_text("".join(f"line {number:06}\n" for number in range(50_000)))
    tail = read_log(path, None)
    assert tail.text.endswith("line 049999\n") and tail.text.startswith("line ")
    assert len(tail.text) <= TAIL_BYTES and tail.next_offset == tail.size == path.stat().st_size


def test_a_whole_log_can_be_read_in_stretches(tmp_path: Path):
    path = tmp_path / "trainer.log"
    content = "".join(f"{number} {'ü' * (number % 300)}\n" for number in range(5000))
    path.write_text(content)
    read, offset = "", 0
    while offset < path.stat().st_size:
        stretch = read_log(path, offset)
        read, offset = read + stretch.text, stretch.next_offset
    assert read == content


def test_a_line_longer_than_a_stretch_does_not_stop_the_reader(tmp_path: Path):
    path = tmp_path / "trainer.log"
    path.write_bytes(b"x" * (3 * STRETCH_BYTES) + b"\nend\n")
    texts, offset = [], 0
    while offset < path.stat().st_size:
        stretch = read_log(path, offset)
        assert stretch.next_offset > offset
        texts.append(stretch.text)
        offset = stretch.next_offset
    assert texts[-1].endswith("end\n")
    assert max(len(line) for text in texts for line in text.splitlines()) < LINE_LIMIT_BYTES + 30


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        (b"\x1b[31mred\x1b[0m\n", "red\n"),
        (b"\x1b]0;title\x07text\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\\n", "textlink\n"),
        (b"10%\r50%\r100%\n", "100%\n"),
        (b"windows\r\n", "windows\n"),
        (b"a\x00b\x08c\x7f\x9f\n", "abc\ufffd\n"),
        (b"\xff\xfe\n", "\ufffd\ufffd\n"),
        (b"tab\there <script>\n", "tab\there <script>\n"),
        (b"\x1b(B\x1bMup\x1b\n", "up\n"),
        (b"y" * 9000 + b"\n", "y" * LINE_LIMIT_BYTES + " … (line cut)\n"),
        (b"\n\n", "\n\n"),
        (b"", ""),
    ],
)
def test_what_a_terminal_would_act_on_is_left_out(raw: bytes, shown: str):
    assert as_plain_text(raw) == shown


# ---------------------------------------------------------------- download
def test_the_result_is_a_zip_of_the_export(owner: Person, run: Run, settings: Settings, tmp_path: Path):
    export = settings.run_folder(run.id) / "export"
    (export / "sub").mkdir(parents=True)
    weights = os.urandom(3 * 1024 * 1024 + 17)
    (export / "model.safetensors").write_bytes(weights)
    (export / "sub" / "config.json").write_text("{}")
    (export / "empty").touch()
    (tmp_path / "secret").write_text("secret")
    (export / "link").symlink_to(tmp_path / "secret")
    (export / "folder").symlink_to(tmp_path)
    reply = owner.client.get(f"/api/v1/runs/{run.id}/download")
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "application/zip"
    disposition = reply.headers["content-disposition"]
    assert unquote(disposition.partition("filename*=UTF-8''")[2]) == "Mein Lauf_ ü_1.zip"
    with zipfile.ZipFile(io.BytesIO(reply.content)) as archive:
        assert archive.testzip() is None
        names = [f"Mein Lauf_ ü_1/{name}" for name in ("empty", "model.safetensors", "sub/config.json")]
        assert sorted(archive.namelist()) == names
        assert archive.read(names[1]) == weights
        assert {entry.compress_type for entry in archive.infolist()} == {zipfile.ZIP_STORED}


def test_a_zip_is_made_piece_by_piece(tmp_path: Path):
    (tmp_path / "export").mkdir()
    with (tmp_path / "export" / "weights").open("wb") as file:
        file.truncate(40 * 1024 * 1024)
    pieces = [len(piece) for piece in stream_zip(tmp_path / "export", top="x")]
    assert max(pieces) < 2 * 1024 * 1024 and sum(pieces) > 40 * 1024 * 1024


@pytest.mark.parametrize("state", [RunState.RUNNING, RunState.FAILED, RunState.CANCELLED])
def test_a_run_without_a_result_says_so(owner: Person, run: Run, engine: Engine, settings: Settings, state: RunState):
    (settings.run_folder(run.id) / "export").mkdir()
    with write_transaction(engine) as session:
        session.merge(Run(id=run.id, state=state))
    reply = owner.client.get(f"/api/v1/runs/{run.id}/download")
    assert reply.status_code == 409 and state in reply.json()["detail"]


def test_a_result_that_was_removed_is_missed(owner: Person, run: Run):
    assert owner.client.get(f"/api/v1/runs/{run.id}/download").status_code == 404


FILE_NAMES = {
    "a.zip": "a.zip", 'x"\r\nSet-Cookie: a=b.zip': "x_Set-Cookie_a_b.zip", "été.zip": "ete.zip", "模型.zip": "zip", "..": "download",
}  # fmt: skip


@pytest.mark.parametrize(("name", "plain"), FILE_NAMES.items())
def test_file_names_cannot_break_out_of_the_header(name: str, plain: str):
    header = content_disposition(name)
    assert header.startswith(f'attachment; filename="{plain}"; filename*=UTF-8')
    assert header.isascii() and header.isprintable()
