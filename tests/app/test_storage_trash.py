"""Deleted runs: had back from the trash until it is emptied, and what pages say of how long things stay."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from fixtures.runs import make_run, set_run
from fixtures.service import Person, page_text
from fixtures.things import ready_dataset, ready_model
from sqlalchemy import Engine, select

from lohan_app.db import read_transaction
from lohan_app.entities import AuditEntry, RunState
from lohan_app.entities.base import now
from lohan_app.settings import Settings
from lohan_app.worker.housekeeping import Housekeeper

DAY = timedelta(days=1)
STEPS = {"training": {"max_steps": 3}, "engine": {"durability": "step"}}


def ended(
    settings: Settings, engine: Engine, person: Person, state: RunState = RunState.FAILED, asked: dict[str, Any] = STEPS, **columns: Any
) -> str:
    """A run of this person that has ended, with everything it leaves: result, log and states."""
    run_id = make_run(settings, engine, state=state, **({"finished_at": now(), "step": 2} | columns))
    set_run(engine, run_id, owner_id=person.user.id, settings=asked)
    folder, states = settings.run_folder(run_id), settings.state_folders[0] / run_id
    for place in (folder / "export", states):
        place.mkdir(parents=True, exist_ok=True)
    for path in (folder / "trainer.log", folder / "export" / "model.safetensors", states / "states.bin"):
        path.write_text(f"{run_id} {path.name}")
    return run_id


def contents(*folders: Path) -> dict[str, str]:
    return {str(path): path.read_text() for folder in folders for path in folder.rglob("*") if path.is_file()}


def restore(person: Person, run_id: str) -> Any:
    return person.client.post(f"/api/v1/runs/{run_id}/restore")


@pytest.mark.database
def test_a_deleted_run_is_had_back_with_all_but_its_states(owner: Person, mate: Person, settings: Settings, engine: Engine) -> None:
    run_id, other = (ended(settings, engine, owner) for _ in range(2))
    before, beside = contents(settings.run_folder(run_id)), contents(settings.run_folder(other), settings.state_folders[0] / other)
    assert owner.client.delete(f"/api/v1/runs/{run_id}").status_code == 204
    housekeeper = Housekeeper(settings, engine)
    housekeeper.remove_due()
    housekeeper.measure()

    found = owner.client.get("/api/v1/storage").json()["trash"]
    assert [(run["id"], run["state"], run["owner_name"]) for run in found] == [(run_id, "failed", "owner")]
    assert found[0]["bytes"] > 0
    assert found[0]["emptied_at"] > found[0]["deleted_at"]
    assert mate.client.get("/api/v1/storage").json()["trash"] == []
    assert "Restore" in page_text(owner, "/storage")
    assert restore(mate, run_id).status_code == restore(owner, "run_none").status_code == 404

    assert [restore(owner, run_id).json()["state"] for _ in range(2)] == ["failed", "failed"]
    assert contents(settings.run_folder(run_id)) == before
    assert not (settings.state_folders[0] / run_id).exists()
    assert contents(settings.run_folder(other), settings.state_folders[0] / other) == beside
    assert owner.client.get("/api/v1/storage").json()["trash"] == []
    text = page_text(owner, f"/runs/{run_id}")
    assert "It has no states on the drives any more: a retry begins again from the base model." in text
    assert "Retry queues it once more, from the base model" in text
    with read_transaction(engine) as session:
        actions = session.scalars(select(AuditEntry.action).where(AuditEntry.subject == run_id)).all()
    assert sorted(actions) == ["run.delete", "run.restore"], "the second time changes nothing"


@pytest.mark.database
def test_what_the_trash_no_longer_has_stays_deleted(owner: Person, settings: Settings, engine: Engine) -> None:
    run_id = ended(settings, engine, owner)
    owner.client.delete(f"/api/v1/runs/{run_id}")
    set_run(engine, run_id, deleted_at=now() - 8 * DAY)
    Housekeeper(settings, engine).remove_due()
    assert list((settings.data_dir / "trash").iterdir()) == []
    reply = restore(owner, run_id)
    assert (reply.status_code, reply.json()["detail"]) == (409, "the run's trash has been emptied: nothing is left of it")
    assert owner.client.get(f"/api/v1/runs/{run_id}").status_code == 404
    page = owner.client.post(f"/storage/runs/{run_id}/restore")
    assert page.status_code == 409
    assert "trash has been emptied" in page.text


@pytest.mark.database
def test_a_restoration_and_the_emptying_of_the_trash_never_share_a_run(owner: Person, settings: Settings, engine: Engine) -> None:
    run_id = ended(settings, engine, owner)
    owner.client.delete(f"/api/v1/runs/{run_id}")
    set_run(engine, run_id, deleted_at=now() - 8 * DAY)
    housekeeper = Housekeeper(settings, engine)
    due = [thing for thing in housekeeper.due() if thing.kind == "trash"]
    assert [thing.id for thing in due] == [run_id]
    restore(owner, run_id)
    # Found to be due before, and removed after somebody has had it back.
    assert [housekeeper._remove(thing) for thing in due] == [False]
    assert (settings.run_folder(run_id) / "trainer.log").read_text() == f"{run_id} trainer.log"
    # Killed between the rename and the removal: nothing restores it, and the next look removes the rest.
    owner.client.delete(f"/api/v1/runs/{run_id}")
    assert housekeeper._remove(due[0])
    assert len(list((settings.data_dir / "trash").iterdir())) == 1
    assert restore(owner, run_id).status_code == 409
    housekeeper.remove_due()
    assert list((settings.data_dir / "trash").iterdir()) == []


class TestQuota:
    @pytest.fixture
    def settings(self, settings: Settings) -> Settings:
        return settings.model_copy(update={"user_quota_bytes": 1000})

    def test_a_restored_run_has_to_fit_the_quota(self, owner: Person, admin: Person, settings: Settings, engine: Engine) -> None:
        run_id = ended(settings, engine, owner)
        (settings.run_folder(run_id) / "export" / "large").write_bytes(bytes(10_000))
        owner.client.delete(f"/api/v1/runs/{run_id}")
        reply = restore(owner, run_id)
        assert reply.status_code == 409
        assert "quota" in reply.json()["detail"]
        assert (settings.data_dir / "trash" / run_id / "export" / "large").exists()
        assert restore(admin, run_id).status_code == 200, "administrators decide freely"


# ---------------------------------------------------------------- in words
@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"finished_at": now() - 3 * DAY + timedelta(hours=1)}, "are removed in 4 days, on"),
        ({"finished_at": now() - 7 * DAY + timedelta(hours=5, minutes=30)}, "are removed in 5 hours, on"),
        ({"finished_at": now() - 8 * DAY}, "are being removed: a retry goes on from them"),
        ({"state": RunState.SUCCEEDED}, "are being removed: the result is exported"),
        ({"state": RunState.SUCCEEDED, "asked": STEPS | {"keep_states_days": 3}}, "on the drives are removed in 2 days, on"),
    ],
)
def test_a_runs_page_says_when_its_states_go(
    owner: Person, settings: Settings, engine: Engine, columns: dict[str, Any], words: str
) -> None:
    text = page_text(owner, f"/runs/{ended(settings, engine, owner, **columns)}")
    assert words in text
    assert "stay in the trash for 7 days, until" in text


@pytest.mark.parametrize(("sent", "stored"), [("", None), ("0", 0), ("30", 30)])
def test_the_form_keeps_states_only_where_that_was_asked_for(
    owner: Person, settings: Settings, engine: Engine, sent: str, stored: int | None
) -> None:
    model, dataset = ready_model(settings, engine), ready_dataset(settings, engine, owner)
    form = {"base_model_id": model.id, "dataset_id": dataset.id, "keep_states_days": sent, "max_steps": "3"}
    reply = owner.client.post("/runs", data=form, follow_redirects=False)
    assert reply.status_code == 303, reply.text
    run_id = reply.headers["Location"].rpartition("/")[2]
    run = owner.client.get(f"/api/v1/runs/{run_id}").json()
    assert run["settings"].get("keep_states_days") == stored
    again = owner.client.get(f"/runs/new?from_run={run_id}").text
    assert f'value="{"" if stored is None else stored}"' in again.partition('id="keep_states_days"')[2].partition(">")[0]


@pytest.mark.parametrize("sent", ["-1", "3651", "2.5", "soon"])
def test_other_days_are_refused_beside_the_field(owner: Person, settings: Settings, engine: Engine, sent: str) -> None:
    model, dataset = ready_model(settings, engine), ready_dataset(settings, engine, owner)
    reply = owner.client.post("/runs", data={"base_model_id": model.id, "dataset_id": dataset.id, "keep_states_days": sent})
    assert reply.status_code == 422
    assert 'id="keep_states_days-fault"' in reply.text
    assert f'value="{sent}"' in reply.text
