"""What expires, when, and that nothing else is touched: the rules, and the reconciler that carries them out."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from fixtures.broker import Queues
from fixtures.runs import make_run, read_run, set_run
from fixtures.simulated_machine import simulated_machine
from sqlalchemy import Engine

from lohan.units import GIB, MIB
from lohan_app.db import write_transaction
from lohan_app.entities import Dataset, DatasetState, PauseCause, Run, RunState
from lohan_app.entities.base import new_id, now
from lohan_app.settings import Settings
from lohan_app.storage.report import Kind, measure, occupied_bytes, read_report, report_path
from lohan_app.storage.retention import Rules, rules_of, states_expiry, trash_expiry
from lohan_app.worker import housekeeping, run_files
from lohan_app.worker.housekeeping import UPLOAD_GRACE, Housekeeper
from lohan_app.worker.launcher import RunFiles
from lohan_app.worker.processes import holding
from lohan_app.worker.reconciler import Reconciler
from lohan_app.worker.reservations import DirectoryRoom, Machine
from lohan_app.worker.run_files import put_aside_states, remove_put_aside, state_directories
from lohan_app.worker.waiting import HEADROOM_BYTES

DAY = timedelta(days=1)
PLAN = {"device": "cpu", "parameters": GIB, "precision": "bf16", "tiers": [{"tier": "ssd", "items": [{"bytes": 20 * GIB}]}]}


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """With two drives for states."""
    changed = settings.model_copy(update={"state_dirs": (settings.data_dir / "drive-0", settings.data_dir / "drive-1")})
    changed.make_folders()
    return changed


@pytest.fixture
def housekeeper(settings: Settings, engine: Engine) -> Housekeeper:
    return Housekeeper(settings, engine)


def leave_states(settings: Settings, run_id: str, text: str = "x") -> None:
    for folder in state_directories(settings, run_id):
        folder.mkdir(parents=True)
        (folder / "states.bin").write_text(text)


def with_states(settings: Settings) -> set[str]:
    """Ids of the runs that have states on every drive; on some drives and not on others is an error."""
    drives = [{path.name for path in folder.iterdir()} for folder in settings.state_folders]
    assert all(found == drives[0] for found in drives)
    return drives[0]


def ended(
    settings: Settings, engine: Engine, state: RunState, ago: timedelta, *, asked: dict[str, Any] | None = None, **columns: Any
) -> str:
    run_id = make_run(settings, engine, state=state, **({"finished_at": now() - ago, "step": 2} | columns))
    if asked is not None:
        set_run(engine, run_id, settings=asked)
    leave_states(settings, run_id)
    return run_id


def engine_settings(**engine_section: str) -> dict[str, Any]:
    return {"training": {"max_steps": 3}, "engine": engine_section}


# ---------------------------------------------------------------- the rules
RULES = Rules(states=0 * DAY, failed_states=7 * DAY, trash=3 * DAY)
ENDED = now()


@pytest.mark.parametrize(
    ("values", "rules", "keep"),
    [
        ({"state": RunState.SUCCEEDED}, RULES, 0 * DAY),
        ({"state": RunState.SUCCEEDED}, replace(RULES, states=2 * DAY), 2 * DAY),
        ({"state": RunState.SUCCEEDED, "settings": {"keep_states_days": 5}}, RULES, 5 * DAY),
        ({"state": RunState.SUCCEEDED, "settings": {"keep_states_days": 0}}, replace(RULES, states=2 * DAY), 0 * DAY),
        ({"state": RunState.FAILED}, RULES, 7 * DAY),
        ({"state": RunState.FAILED, "step": 0}, RULES, 7 * DAY),
        ({"state": RunState.FAILED, "settings": engine_settings(setting_of_another_version="x")}, RULES, 7 * DAY),
        ({"state": RunState.FAILED, "settings": {"keep_states_days": 50}}, RULES, 7 * DAY),
        ({"state": RunState.FAILED, "settings": engine_settings(durability="none")}, RULES, 0 * DAY),
        ({"state": RunState.CANCELLED}, RULES, 7 * DAY),
        ({"state": RunState.CANCELLED, "step": 0}, RULES, 0 * DAY),
    ],
)
def test_states_of_ended_runs_expire_after(values: dict[str, Any], rules: Rules, keep: timedelta) -> None:
    run = Run(**({"settings": {}, "step": 3, "finished_at": ENDED} | values))
    expiry = states_expiry(run, rules)
    assert expiry is not None
    assert expiry.at == ENDED + keep
    assert expiry.is_due(ENDED + keep)
    assert not expiry.is_due(ENDED + keep - timedelta(microseconds=1))


def test_states_of_a_deleted_run_expire_at_its_deletion_and_its_trash_later() -> None:
    run = Run(state=RunState.FAILED, settings={}, step=3, finished_at=ENDED - DAY, deleted_at=ENDED)
    expiry = states_expiry(run, RULES)
    assert expiry is not None
    assert expiry.at == ENDED
    assert trash_expiry(ENDED, RULES).at == ENDED + 3 * DAY


@pytest.mark.parametrize("state", sorted(set(RunState) - {RunState.SUCCEEDED, RunState.FAILED, RunState.CANCELLED}))
def test_states_of_a_run_that_has_not_ended_never_expire(state: RunState) -> None:
    run = Run(state=state, settings={}, step=3, created_at=ENDED - 1000 * DAY)
    assert states_expiry(run, rules_of(Settings(keep_failed_states_days=0))) is None


# ---------------------------------------------------------------- states
@pytest.mark.database
def test_what_has_expired_goes_and_nothing_else_does(settings: Settings, engine: Engine, housekeeper: Housekeeper) -> None:
    gone = [
        ended(settings, engine, RunState.SUCCEEDED, 0 * DAY),
        ended(settings, engine, RunState.FAILED, 7 * DAY),
        ended(settings, engine, RunState.CANCELLED, 8 * DAY),
        ended(settings, engine, RunState.FAILED, 0 * DAY, asked=engine_settings(durability="none")),
        ended(settings, engine, RunState.FAILED, 0 * DAY, deleted_at=now()),
    ]
    stays = [
        ended(settings, engine, RunState.SUCCEEDED, 1 * DAY, asked=engine_settings() | {"keep_states_days": 2}),
        ended(settings, engine, RunState.FAILED, 6 * DAY),
        ended(settings, engine, RunState.CANCELLED, 6 * DAY),
        *(ended(settings, engine, state, 100 * DAY) for state in (RunState.QUEUED, RunState.RUNNING, RunState.PAUSED)),
        new_id("run"),
        "run_of_somebody_else",
        "lost+found",
    ]
    for unknown in stays[-3:]:
        leave_states(settings, unknown)
    expected = {(Kind.STATES, run_id) for run_id in gone}
    assert {(thing.kind, thing.id) for thing in housekeeper.due()} == expected
    assert with_states(settings) == {*gone, *stays}, "looking changes nothing"
    assert {(thing.kind, thing.id) for thing in housekeeper.remove_due()} == expected
    assert with_states(settings) == set(stays)
    assert housekeeper.remove_due() == []
    assert all(settings.run_folder(run_id).exists() for run_id in gone[:4]), "only states have expired"


@pytest.mark.database
def test_a_removal_that_was_cut_off_is_gone_on_with(
    settings: Settings, engine: Engine, housekeeper: Housekeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = ended(settings, engine, RunState.SUCCEEDED, 0 * DAY)
    rename, renamed = Path.rename, []

    def die_at_the_second(path: Path, target: Path) -> Path:
        if renamed:
            raise KeyboardInterrupt
        renamed.append(target)
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", die_at_the_second)
        with pytest.raises(KeyboardInterrupt):
            housekeeper.remove_due()
    assert [path.exists() for path in state_directories(settings, run_id)] == [False, True]
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_args, **_options: None)  # killed before any of the slow work was done
        housekeeper.remove_due()
    assert all(path.name.startswith(f".trash-{run_id}-") for folder in settings.state_folders for path in folder.iterdir())
    Housekeeper(settings, engine).remove_due()
    assert with_states(settings) == set()


@pytest.mark.database
def test_links_are_neither_followed_nor_removed(settings: Settings, engine: Engine, housekeeper: Housekeeper, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    linked = make_run(settings, engine, state=RunState.SUCCEEDED, finished_at=now())
    state_directories(settings, linked)[0].symlink_to(outside)
    with_link = ended(settings, engine, RunState.SUCCEEDED, 0 * DAY)
    (state_directories(settings, with_link)[1] / "inner").symlink_to(outside)
    (settings.data_dir / "trash" / new_id("run")).symlink_to(outside)
    housekeeper.remove_due()
    assert (outside / "precious").read_text() == "x"
    assert state_directories(settings, linked)[0].is_symlink()
    assert not any(path.exists() for path in state_directories(settings, with_link))


@pytest.mark.database
def test_states_that_a_trainer_still_holds_stay(settings: Settings, engine: Engine, housekeeper: Housekeeper) -> None:
    run_id = ended(settings, engine, RunState.CANCELLED, 30 * DAY)
    with holding(RunFiles(settings.run_folder(run_id)).trainer_lock):
        assert housekeeper.remove_due() == []
        assert with_states(settings) == {run_id}
    assert [thing.id for thing in housekeeper.remove_due()] == [run_id]


@pytest.mark.database
def test_a_retry_that_comes_while_its_parent_expires_gets_the_states(
    settings: Settings, engine: Engine, housekeeper: Housekeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = ended(settings, engine, RunState.FAILED, 8 * DAY)
    due = housekeeper.due()
    assert {thing.id for thing in due} == {parent}
    make_run(settings, engine, parent_id=parent)
    monkeypatch.setattr(housekeeper, "due", lambda: due)
    assert housekeeper.remove_due() == []
    assert with_states(settings) == {parent}


# ---------------------------------------------------------------- trash and uploads
@pytest.mark.database
def test_a_deleted_run_keeps_result_and_notes_for_a_while_and_never_states(
    settings: Settings, engine: Engine, housekeeper: Housekeeper
) -> None:
    run_id = ended(settings, engine, RunState.SUCCEEDED, 9 * DAY, deleted_at=now() - 6 * DAY)
    folder = settings.run_folder(run_id)
    (folder / "export").mkdir()
    for name in ("tokens.safetensors", "run.toml", "export/model.safetensors"):
        (folder / name).write_text("x")
    housekeeper.remove_due()  # also moves the folder: whoever deleted the run may have been killed before
    trash = settings.data_dir / "trash" / run_id
    assert not folder.exists()
    assert with_states(settings) == set()
    left = {str(path.relative_to(trash)) for path in trash.rglob("*")}
    assert left == {"run.toml", "export", "export/model.safetensors", "script.json"}
    set_run(engine, run_id, deleted_at=now() - 7 * DAY)
    assert [(thing.kind, thing.id) for thing in housekeeper.remove_due()] == [(Kind.TRASH, run_id)]
    assert not trash.exists()


@pytest.mark.database
@pytest.mark.parametrize(
    "columns",
    [
        {"state": RunState.PAUSED, "pause_cause": PauseCause.DISK_FULL},
        {"state": RunState.QUEUED, "state_reason": "Waits for space in the state directories: needs 2 GiB, free 1 GiB."},
    ],
)
def test_the_trash_gives_way_to_a_run_that_waits_for_room(
    settings: Settings, engine: Engine, housekeeper: Housekeeper, columns: dict[str, Any]
) -> None:
    deleted = make_run(settings, engine, state=RunState.FAILED, deleted_at=now())
    unknown = settings.data_dir / "trash" / new_id("run")
    unknown.mkdir()
    housekeeper.remove_due()
    assert (settings.data_dir / "trash" / deleted).is_dir()
    make_run(settings, engine, **columns)
    housekeeper.remove_due()
    assert list((settings.data_dir / "trash").iterdir()) == [unknown]


@pytest.mark.database
def test_only_uploads_that_nobody_waits_for_go(settings: Settings, engine: Engine, housekeeper: Housekeeper) -> None:
    uploads = settings.data_dir / "uploads"
    make_run(settings, engine)  # an owner
    with write_transaction(engine) as session:
        owner_id = session.query(Run).one().owner_id
        expected = Dataset(owner_id=owner_id, name="slow", state=DatasetState.UPLOADING)
        session.add(expected)
    stale, fresh = (f"{new_id('dataset')}.part" for _ in range(2))
    long_ago = (now() - 2 * UPLOAD_GRACE).timestamp()
    for name in (stale, fresh, f"{expected.id}.part", "notes.txt"):
        (uploads / name).write_text("x")
        if name != fresh:
            os.utime(uploads / name, (long_ago, long_ago))
    assert [(thing.kind, f"{thing.id}.part") for thing in housekeeper.remove_due()] == [(Kind.UPLOAD, stale)]
    assert {path.name for path in uploads.iterdir()} == {fresh, f"{expected.id}.part", "notes.txt"}


# ---------------------------------------------------------------- the reconciler
@pytest.mark.broker
@pytest.mark.database
def test_a_full_drive_and_expired_runs_let_the_queue_go_on(settings: Settings, engine: Engine, queues: Queues) -> None:
    """Two small drives, real files on them, and the free space that these leave: one tick frees what has expired, the paused run is back in
    its place, and both it and the one that waited are claimed. Nobody does anything."""
    limit = HEADROOM_BYTES + 6 * MIB
    expired = ended(settings, engine, RunState.FAILED, 7 * DAY - timedelta(hours=1))
    for folder in state_directories(settings, expired):
        (folder / "states.bin").write_bytes(bytes(4 * MIB))

    def planned(bytes_on_each: int) -> dict[str, Any]:
        return PLAN | {"tiers": [{"tier": "ssd", "items": [{"bytes": 2 * bytes_on_each}]}]}

    def look(_: Settings) -> Machine:
        rooms = [DirectoryRoom(str(folder), str(folder), limit - occupied_bytes(folder)) for folder in settings.state_folders]
        return simulated_machine(settings, directories=tuple(rooms))

    in_line_since = now() - DAY
    full = {"pause_cause": PauseCause.DISK_FULL, "state_reason": "The drive is full (x).", "queued_at": in_line_since}
    paused = make_run(settings, engine, state=RunState.PAUSED, plan=planned(3 * MIB), device="cpu:0", **full)
    queued = make_run(settings, engine, plan=planned(HEADROOM_BYTES + 5 * MIB // 2), device="cpu:1")
    reconciler = Reconciler(settings, engine, supervisor_command=("/bin/true",), look=look)
    for _ in range(2):
        reconciler.tick()
        first, second = read_run(engine, paused), read_run(engine, queued)
        assert (first.state, second.state) == (RunState.PAUSED, RunState.QUEUED)
        drive = settings.state_folders[0]
        goes_on = "The drive is full (x). It goes on by itself when there is room: it"
        assert first.state_reason.startswith(f"{goes_on} needs 515.00 MiB in {drive}, free 51")
        assert second.state_reason.startswith(f"Waits for space in the state directories: needs 514.50 MiB in {drive}, free 51")
    set_run(engine, expired, finished_at=now() - 7 * DAY)
    reconciler.tick()
    assert with_states(settings) == set()
    first, second = read_run(engine, paused), read_run(engine, queued)
    assert (first.state, first.pause_cause, second.state, second.state_reason) == (RunState.STARTING, None, RunState.STARTING, "")
    assert first.queued_at == in_line_since, "a full drive costs nobody the place"
    assert read_run(engine, expired).state is RunState.FAILED
    reconciler.close()


@pytest.mark.broker
@pytest.mark.database
def test_a_deleted_parents_states_go_to_the_retry_that_waits(settings: Settings, engine: Engine, tick: Callable[[], None]) -> None:
    parent = ended(settings, engine, RunState.FAILED, 0 * DAY, deleted_at=now())
    child = make_run(settings, engine, parent_id=parent, prepared_at=None)
    tick()
    assert with_states(settings) == {child}
    assert (settings.data_dir / "trash" / parent).is_dir()


# ---------------------------------------------------------------- measuring
@pytest.mark.database
def test_everything_is_measured_once_a_minute_and_after_a_removal(
    settings: Settings, engine: Engine, housekeeper: Housekeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, unknown = ended(settings, engine, RunState.FAILED, 0 * DAY), new_id("run")
    leave_states(settings, unknown, "x" * 10_000)
    leave_states(settings, "run_of_somebody_else")
    (settings.run_folder(kept) / "export").mkdir()
    (settings.run_folder(kept) / "export" / "model.safetensors").write_text("x" * 5000)
    housekeeper.measure_when_old()
    report = read_report(settings)
    assert report is not None
    states = {(item.id, item.place): item.bytes for item in report.items if item.kind is Kind.STATES}
    assert states == {
        (run_id, str(folder)): occupied_bytes(folder / run_id) for run_id in (kept, unknown) for folder in settings.state_folders
    }
    assert states[unknown, str(settings.state_folders[0])] >= 10_000
    assert {item.kind for item in report.items if item.id == kept} == {Kind.STATES, Kind.EXPORT, Kind.RUN_FILES}
    calls = []
    monkeypatch.setattr(housekeeping, "measure", lambda given: calls.append(given) or measure(given))
    housekeeper.measure_when_old()
    assert calls == []
    set_run(engine, kept, deleted_at=now())
    housekeeper.remove_due()
    housekeeper.measure_when_old()
    assert len(calls) == 1
    report = read_report(settings)
    assert report is not None
    assert {item.id for item in report.items if item.kind is Kind.STATES} == {unknown}


def test_a_damaged_measurement_counts_as_none(settings: Settings) -> None:
    assert read_report(settings) is None
    report_path(settings).write_text('{"measured_at": "yesterday"}')
    assert read_report(settings) is None


def test_putting_aside_what_is_not_there_does_nothing(settings: Settings) -> None:
    assert put_aside_states(settings, new_id("run")) is False
    assert remove_put_aside(settings) is False
    assert run_files.states_bytes(settings, new_id("run")) == 0
