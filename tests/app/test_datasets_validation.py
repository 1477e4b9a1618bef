"""Validation and what can be read of it: rows checked in a limited child, bad rows by line, owners' eyes only."""

from __future__ import annotations

import json

import pytest
from fixtures.rows import alpaca_rows, messages_rows, prompt_completion_rows
from fixtures.service import Person
from sqlalchemy import Engine
from starlette.testclient import TestClient

from lohan_app.datasets.service import rows_path
from lohan_app.datasets.validation import validate_dataset
from lohan_app.db import write_transaction
from lohan_app.entities import Dataset
from lohan_app.settings import Settings


def jsonl(rows) -> bytes:
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows).encode()


def upload(person: Person, content: bytes, name: str = "talks") -> str:
    reply = person.client.post("/api/v1/datasets", params={"name": name}, content=content)
    assert reply.status_code == 201, reply.text
    return reply.json()["id"]


def checked(person: Person, settings: Settings, engine: Engine, content: bytes) -> dict:
    """Upload, validate as the io task does, and read what the API says."""
    dataset_id = upload(person, content)
    validate_dataset(settings, engine, dataset_id)
    return person.client.get(f"/api/v1/datasets/{dataset_id}").json()


@pytest.mark.database
@pytest.mark.parametrize(
    ("rows", "found"), [(messages_rows(5), "messages"), (alpaca_rows(5), "alpaca"), (prompt_completion_rows(5), "prompt_completion")]
)
def test_good_rows_make_a_ready_dataset(owner: Person, settings: Settings, engine: Engine, rows, found):
    dataset = checked(owner, settings, engine, jsonl(rows))
    assert (dataset["state"], dataset["format"], dataset["row_count"], dataset["bad_row_count"]) == ("ready", found, 5, 0)
    assert dataset["progress"] == 1.0 and dataset["validated_at"] and dataset["problem"] is None
    assert [row["line"] for row in dataset["preview"]["rows"]] == [1, 2, 3, 4, 5]
    assert [message["role"] for message in dataset["preview"]["rows"][0]["messages"]][-1] == "assistant"


@pytest.mark.database
def test_bad_rows_are_listed_by_their_lines(owner: Person, settings: Settings, engine: Engine):
    good = messages_rows(3)
    rows = [good[0], "", "{not json", good[1], {"messages": []}, '{"messages": NaN}', good[2], '{"a": "<script>\\u202e"}']
    dataset = checked(owner, settings, engine, jsonl(rows))
    assert (dataset["state"], dataset["row_count"], dataset["bad_row_count"]) == ("has_bad_rows", 3, 4)
    errors = owner.client.get(f"/api/v1/datasets/{dataset['id']}/errors").json()
    assert [error["line"] for error in errors["items"]] == [3, 5, 6, 8]
    assert all(error["message"] for error in errors["items"]) and errors["next_cursor"] is None
    assert "{not json" in errors["items"][0]["excerpt"]


@pytest.mark.database
def test_row_errors_come_in_pages(owner: Person, settings: Settings, engine: Engine):
    dataset = checked(owner, settings, engine, jsonl([messages_rows(1)[0], *["{"] * 1500]))
    assert dataset["bad_row_count"] == 1500
    lines, after = [], 0
    while after is not None:
        page = owner.client.get(f"/api/v1/datasets/{dataset['id']}/errors", params={"after": after, "limit": 200}).json()
        lines += [error["line"] for error in page["items"]]
        after = page["next_cursor"]
    assert lines == list(range(2, 1002))  # the first 1,000 are kept


NO_DATASETS = {
    "array": b"[1, 2]", "compressed": b"\x1f\x8b\x08\x00aaaa", "UTF-16": "é".encode("utf-16"), "no rows": b"\n\n", "none of the 2": b"{\n{",
}  # fmt: skip


@pytest.mark.parametrize(("word", "content"), NO_DATASETS.items())
def test_a_file_that_is_no_dataset_is_invalid_with_the_reason(owner: Person, settings: Settings, engine: Engine, content: bytes, word: str):
    dataset = checked(owner, settings, engine, content)
    assert dataset["state"] == "invalid"
    assert word in dataset["problem"]["message"] and dataset["problem"]["remedy"]


def test_a_child_that_runs_out_of_memory_is_a_reason_too(owner: Person, settings: Settings, engine: Engine):
    row = json.dumps({"messages": [{"role": "user", "content": "x" * 15_000_000}]})
    dataset_id = upload(owner, jsonl([row] * 2))
    limited = settings.model_copy(update={"worker_memory_bytes": 64 * 1024 * 1024})
    validate_dataset(limited, engine, dataset_id)
    dataset = owner.client.get(f"/api/v1/datasets/{dataset_id}").json()
    assert dataset["state"] == "invalid"
    assert "memory" in dataset["problem"]["message"]


@pytest.mark.database
def test_a_second_message_changes_nothing(owner: Person, settings: Settings, engine: Engine):
    dataset = checked(owner, settings, engine, jsonl(messages_rows(2)))
    rows_path(settings, dataset["id"]).write_bytes(b"[broken")
    validate_dataset(settings, engine, dataset["id"])
    validate_dataset(settings, engine, "dataset_unknown")
    assert owner.client.get(f"/api/v1/datasets/{dataset['id']}").json() == dataset


def test_a_long_row_is_shown_short(owner: Person, settings: Settings, engine: Engine):
    row = {"prompt": "x" * 100_000, "completion": "y"}
    dataset = checked(owner, settings, engine, jsonl([row]))
    assert len(dataset["preview"]["rows"][0]["messages"][0]["content"]) < 2100


@pytest.mark.database
def test_members_see_their_own_and_administrators_all(
    owner: Person, mate: Person, admin: Person, anonymous: TestClient, settings: Settings, engine: Engine
):
    mine = upload(owner, jsonl(messages_rows(1)))
    theirs = upload(mate, jsonl(messages_rows(1)))
    paths = (f"/api/v1/datasets/{mine}", f"/api/v1/datasets/{mine}/errors")
    for path in paths:
        assert [person.client.get(path).status_code for person in (owner, mate, admin)] == [200, 404, 200]
        assert anonymous.get(path).status_code == 401
    assert mate.client.delete(paths[0]).status_code == 404

    def listed(person: Person) -> list[str]:
        return [item["id"] for item in person.client.get("/api/v1/datasets").json()["items"]]

    assert (listed(owner), listed(mate), listed(admin)) == ([mine], [theirs], [theirs, mine])


@pytest.mark.database
def test_lists_come_in_pages(owner: Person, engine: Engine):
    with write_transaction(engine) as session:
        datasets = [Dataset(owner_id=owner.user.id, name=f"d{number}", state="ready") for number in range(5)]
        session.add_all(datasets)
        session.flush()
        ids = sorted((dataset.id for dataset in datasets), reverse=True)
    found, after = [], None
    while True:
        page = owner.client.get("/api/v1/datasets", params={"limit": 2} | ({"after": after} if after else {})).json()
        found += [item["id"] for item in page["items"]]
        after = page["next_cursor"]
        if after is None:
            break
    assert found == ids


@pytest.mark.database
def test_a_deleted_dataset_and_its_file_are_gone(owner: Person, settings: Settings):
    dataset_id = upload(owner, jsonl(messages_rows(1)))
    assert owner.client.delete(f"/api/v1/datasets/{dataset_id}").status_code == 204
    assert owner.client.get(f"/api/v1/datasets/{dataset_id}").status_code == 404
    assert owner.client.delete(f"/api/v1/datasets/{dataset_id}").status_code == 404
    assert owner.client.get("/api/v1/datasets").json()["items"] == []
    assert not rows_path(settings, dataset_id).parent.exists()
    assert list((settings.data_dir / "trash").iterdir()) == []
