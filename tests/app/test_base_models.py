"""Base models: what can be registered, what inspection finds, and who may do it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fixtures.service import Person
from fixtures.tiny_model import make_tiny_model
from sqlalchemy import Engine

from lohan.errors import ModelError
from lohan.planning.workload import Workload
from lohan_app.base_models import model_check
from lohan_app.base_models.inspection import inspect_model
from lohan_app.base_models.service import model_folder
from lohan_app.settings import Settings

URL = "/api/v1/base-models"


def register(person: Person, settings: Settings, name: str, **changes: str):
    body = {"source": "folder", "root": str(settings.model_dirs[0]), "name": name}
    return person.client.post(URL, json=body | changes)


def inspected(person: Person, settings: Settings, engine: Engine, name: str) -> dict:
    """Register, inspect as the io task does, and read what the API says."""
    reply = register(person, settings, name)
    assert (reply.status_code, reply.json()["state"]) == (201, "inspecting"), reply.text
    inspect_model(settings, engine, reply.json()["id"])
    return person.client.get(f"{URL}/{reply.json()['id']}").json()


def test_a_good_model_becomes_ready(admin: Person, settings: Settings, engine: Engine):
    make_tiny_model(settings.model_dirs[0] / "tiny", shards=3)
    model = inspected(admin, settings, engine, "tiny")
    assert (model["state"], model["problem"]) == ("ready", None)
    assert (model["name"], model["architecture"], model["context_length"]) == ("tiny", "llama", model["context_length"])
    folder = model_folder(settings, model["id"])
    workload = Workload.model_validate_json((folder / "workload.json").read_text())
    assert model["parameters"] == workload.parameters > 0 and model["context_length"] == workload.context_length
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= {path.name for path in folder.iterdir()}
    assert not list(folder.glob("*.safetensors"))


def unknown_type(folder: Path) -> None:
    change_config(folder, model_type="nonesuch")


def own_code(folder: Path) -> None:
    change_config(folder, auto_map={"AutoModelForCausalLM": "model.Model"})


def absurd_size(folder: Path) -> None:
    change_config(folder, num_hidden_layers=10**9)


def missing_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def wrong_shape(folder: Path) -> None:
    change_config(folder, intermediate_size=64)


def cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def pickled_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def change_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


FAULTS = [unknown_type, own_code, absurd_size, missing_weights, wrong_shape, cut_weights, pickled_weights, no_tokenizer, broken_config]


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.__name__ for fault in FAULTS])
def test_the_check_refuses_what_cannot_be_trained(tmp_path: Path, fault):
    """In this process, not in a limited child: torch is loaded once and not once a case."""
    model = make_tiny_model(tmp_path / "tiny")
    fault(model)
    (tmp_path / "out").mkdir()
    with pytest.raises(ModelError) as caught:
        model_check.main([str(model), str(tmp_path / "out")])
    assert caught.value.message and caught.value.remedy


def test_a_model_that_cannot_be_trained_says_why(admin: Person, settings: Settings, engine: Engine):
    unknown_type(make_tiny_model(settings.model_dirs[0] / "tiny"))
    model = inspected(admin, settings, engine, "tiny")
    assert model["state"] == "invalid"
    assert "nonesuch" in model["problem"]["message"] and model["problem"]["remedy"]
    assert not model_folder(settings, model["id"]).exists()


def test_a_model_that_vanishes_before_its_inspection_says_so(admin: Person, settings: Settings, engine: Engine):
    folder = make_tiny_model(settings.model_dirs[0] / "tiny")
    reply = register(admin, settings, "tiny")
    folder.rename(settings.model_dirs[0] / "moved")
    inspect_model(settings, engine, reply.json()["id"])
    assert admin.client.get(f"{URL}/{reply.json()['id']}").json()["state"] == "invalid"


@pytest.mark.database
def test_available_lists_folders_files_and_the_sample(admin: Person, settings: Settings):
    root = settings.model_dirs[0]
    make_tiny_model(root / "tiny")
    (root / "b.gguf").write_bytes(b"GGUF")
    (root / "notes.txt").write_text("no model")
    (root / "empty").mkdir()
    (root / "away").symlink_to("/etc")
    (root / "loop").symlink_to("loop")
    found = admin.client.get(f"{URL}/available").json()["items"]
    assert [(entry["source"], entry["name"]) for entry in found] == [
        ("sample", "SmolLM2-135M-Instruct"), ("folder", "b.gguf"), ("folder", "tiny"),
    ]  # fmt: skip
    assert all(entry["registered_id"] is None for entry in found)
    model_id = register(admin, settings, "tiny").json()["id"]
    found = admin.client.get(f"{URL}/available").json()["items"]
    assert [entry["registered_id"] for entry in found] == [None, None, model_id]


def test_the_sample_is_registered_by_its_source_alone(admin: Person):
    reply = admin.client.post(URL, json={"source": "sample"})
    assert (reply.status_code, reply.json()["name"], reply.json()["source"]) == (201, "SmolLM2-135M-Instruct", "sample")
    assert admin.client.post(URL, json={"source": "sample", "name": "other"}).status_code == 409


@pytest.mark.parametrize("name", ["", ".", "..", "../models", "a/b", "/etc", "x\x00y", "away", "loop"])
def test_names_that_lead_elsewhere_are_refused(admin: Person, settings: Settings, name: str):
    root = settings.model_dirs[0]
    (root / "away").symlink_to("/etc")
    (root / "loop").symlink_to("loop")
    (root.parent / "models_evil").mkdir()
    reply = register(admin, settings, name)
    assert (reply.status_code, reply.json()["place"]) == (422, "name")
    assert admin.client.get(URL).json()["items"] == []


@pytest.mark.parametrize("root", ["/etc", "", "/", "models"])
def test_roots_are_the_administrators_alone(admin: Person, settings: Settings, root: str):
    reply = register(admin, settings, "passwd", root=root)
    assert (reply.status_code, reply.json()["place"]) == (422, "root")


def test_what_is_not_there_is_404_and_what_is_registered_409(admin: Person, settings: Settings):
    assert register(admin, settings, "none").status_code == 404
    make_tiny_model(settings.model_dirs[0] / "tiny")
    assert register(admin, settings, "tiny").status_code == 201
    assert register(admin, settings, "tiny").status_code == 409


@pytest.mark.database
def test_a_name_is_free_again_after_deletion_and_numbered_in_another_folder(admin: Person, settings: Settings, app, tmp_path: Path):
    second = tmp_path / "more"
    app.state.context.settings = settings.model_copy(update={"model_dirs": (settings.model_dirs[0], second)})
    for root in (settings.model_dirs[0], second):
        make_tiny_model(root / "tiny")
    first = register(admin, settings, "tiny").json()
    assert register(admin, settings, "tiny", root=str(second)).json()["name"] == "tiny (2)"
    assert admin.client.delete(f"{URL}/{first['id']}").status_code == 204
    assert admin.client.get(f"{URL}/{first['id']}").status_code == 404
    assert register(admin, settings, "tiny").json()["name"] == "tiny"


@pytest.mark.parametrize(("method", "path"), [("POST", URL), ("DELETE", f"{URL}/model_x")])
def test_members_look_and_administrators_change(owner: Person, admin: Person, settings: Settings, method: str, path: str):
    make_tiny_model(settings.model_dirs[0] / "tiny")
    body = {"source": "folder", "root": str(settings.model_dirs[0]), "name": "tiny"}
    assert owner.client.request(method, path, json=body).status_code == 403
    assert owner.client.request(method, path, json=body, headers=owner.key()).status_code == 403
    assert owner.client.get(URL).status_code == 200
    assert owner.client.get(f"{URL}/available").status_code == 200
    assert admin.client.request(method, path, json=body).status_code in (201, 404)
