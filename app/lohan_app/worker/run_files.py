"""Writes what a trainer gets: `run.toml` and `plan.json`, from the database row and the settings alone, never from a user's path."""

from __future__ import annotations

import json
import logging
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sqlalchemy.orm import Session

from lohan.config import EngineSection, RamStates, RunConfig, parse_run_config
from lohan.errors import ConfigError
from lohan.hardware.probe import occupied_bytes, probe
from lohan.planning.tiers import Tier
from lohan_app.entities import BaseModel, Run
from lohan_app.entities.base import now
from lohan_app.hardware.service import measured
from lohan_app.runs.repository import lock_run
from lohan_app.settings import Settings
from lohan_app.storage.report import ASIDE, named
from lohan_app.storage.retention import rules_of, states_expiry
from lohan_app.worker.launcher import RunFiles
from lohan_app.worker.processes import write_atomically

logger = logging.getLogger(__name__)


def state_directories(settings: Settings, run_id: str) -> tuple[Path, ...]:
    """Where a run's master weights and moments live, one folder per drive."""
    return tuple(folder / run_id for folder in settings.state_folders)


def put_aside_states(settings: Settings, run_id: str) -> bool:
    """Rename a run's states, on each drive, to what the reconciler removes; whether there were any.

    Of a run that is killed in between some drives have states and some have not: no trainer takes these for whole, and the next call
    finds the rest. A link is not ours, and stays.
    """
    found = False
    for folder in state_directories(settings, run_id):
        if folder.is_dir() and not folder.is_symlink():
            folder.rename(_aside(folder))
            found = True
    return found


def _aside(folder: Path) -> Path:
    return folder.with_name(f".trash-{folder.name}-{secrets.token_hex(4)}")


def remove_put_aside(settings: Settings) -> bool:
    """Remove what `put_aside_states` and `put_aside_trash` have renamed, also at an earlier time; whether there was anything."""
    folders = (*settings.state_folders, settings.data_dir / "trash")
    found = [path for folder in folders for _, path in named(folder, ASIDE)]
    for path in found:
        shutil.rmtree(path, ignore_errors=True)
    return bool(found)


def free_states_of_ended(settings: Settings, run: Run | None) -> None:
    """Delete what nothing goes on from any more. What a failed or cancelled run has recorded stays for a while: a retry goes on from it."""
    expiry = states_expiry(run, rules_of(settings)) if run is not None else None
    if run is not None and expiry is not None and expiry.is_due(now()):
        put_aside_states(settings, run.id)
        remove_put_aside(settings)


def take_over_states(settings: Settings, run: Run) -> None:
    """Have a retry that has not begun begin with what its parent has recorded; doing it again changes nothing.

    A rename on each drive: with one of them missing the trainer finds no record and begins with the base model.

    Raises:
        OSError: a drive does not let it.
    """
    if run.parent_id is None or run.attempt > 0:
        return
    for old, new in zip(state_directories(settings, run.parent_id), state_directories(settings, run.id), strict=True):
        if old.is_dir() and not new.exists():
            old.rename(new)


def move_to_trash(settings: Settings, run_id: str) -> None:
    """Put a deleted run's folder, less its prepared rows, where the reconciler empties it; nothing happens where there is none."""
    folder, trash = settings.run_folder(run_id), settings.data_dir / "trash" / run_id
    if folder.is_dir() and not trash.exists():
        folder.rename(trash)
    RunFiles(trash).tokens.unlink(missing_ok=True)


def move_deleted_to_trash(session: Session, settings: Settings, run_id: str) -> None:
    """`move_to_trash` under the row's lock: a run that was restored meanwhile keeps its folder."""
    run = lock_run(session, run_id)
    if run is not None and run.deleted_at is not None:
        move_to_trash(settings, run_id)


def take_from_trash(settings: Settings, run_id: str) -> bool:
    """Put a restored run's folder back where it was; whether there is one now. A link is not ours, and stays."""
    folder, trash = settings.run_folder(run_id), settings.data_dir / "trash" / run_id
    if trash.is_dir() and not trash.is_symlink() and not folder.exists():
        trash.rename(folder)
    return folder.is_dir()


def put_aside_trash(settings: Settings, run_id: str) -> bool:
    """Rename a deleted run's folder in the trash to what the reconciler removes, and nothing restores; whether there was one."""
    trash = settings.data_dir / "trash" / run_id
    if not trash.is_dir() or trash.is_symlink():
        return False
    trash.rename(_aside(trash))
    return True


def states_by_directory(settings: Settings, run_id: str) -> dict[str, int]:
    """Bytes that the states of a run's earlier attempts occupy in each state directory."""
    return {str(folder): occupied_bytes(folder / run_id) for folder in settings.state_folders}


def states_bytes(settings: Settings, run_id: str) -> int:
    """The same over all state directories."""
    return sum(states_by_directory(settings, run_id).values())


def write_run_files(settings: Settings, run: Run, weights: Path, *, device: str) -> None:
    """Write run.toml, and plan.json where the run has a plan. Written before every attempt: the device may be another one.

    Raises:
        ConfigError: the stored settings do not make a valid configuration.
    """
    files = RunFiles(settings.run_folder(run.id))
    write_config(files.config, settings, run, weights, device=device)
    plan = run.started_plan or run.plan
    if plan is not None:
        write_atomically(files.plan, json.dumps(plan).encode())


def write_config(path: Path, settings: Settings, run: Run, weights: Path, *, device: str) -> None:
    """Write what `lohan train` gets of the run to `path`; raises as `write_run_files`."""
    config = run_config(settings, run, weights, device=device)
    write_atomically(path, to_toml(config.model_dump(mode="json", exclude_none=True)).encode())


def run_config(settings: Settings, run: Run, weights: Path, *, device: str) -> RunConfig:
    """The run's configuration, with the device it was given.

    States take the host memory that the plan gave them. A run that was planned by measured figures is planned by them again; one that was
    not reserved nothing for what they would have it keep, and goes on without, as it does where the profile was damaged since.
    """
    files = RunFiles(settings.run_folder(run.id))
    plan = run.started_plan or run.plan or {}
    engine = dict(run.settings.get("engine", {}))
    engine |= {
        "device": device,
        "state_directories": [str(folder) for folder in state_directories(settings, run.id)],
        "unsafe_filesystems": settings.unsafe_filesystems,
    }
    if engine.get("ram_state_bytes", RamStates.AUTO) == RamStates.AUTO and plan:
        engine["ram_state_bytes"] = _reserved_for_states(run, plan)
    if plan.get("forecast") is not None and _is_measured(settings, device):
        engine["profiles"] = str(settings.profiles_folder)
    values = {
        "model": {"path": str(weights)},
        "data": {"path": str(files.tokens), "skip_bad_rows": run.skip_bad_rows},
        "training": run.settings.get("training", {}),
        "engine": engine,
        "output": {"directory": str(files.folder)},
    }
    return parse_run_config(values, place=f"run {run.id}")


def _reserved_for_states(run: Run, plan: Mapping[str, Any]) -> int:
    """Host memory for states: the plan's, less what the reservation is short of. The trainer sees no other run's reservation."""
    planned = sum(item["bytes"] for tier in plan.get("tiers", ()) if tier["tier"] == Tier.RAM for item in tier["items"])
    short = max(0, planned - run.reserved_ram_bytes) if run.reserved_ram_bytes else 0
    return max(0, int(plan.get("ram_state_bytes", 0)) - short)


def _is_measured(settings: Settings, device: str) -> bool:
    profile, fault = measured(probe(settings.state_folders), settings, EngineSection(device=device))
    if fault is not None:
        logger.warning("the run is planned without measured figures: %s", fault)
    return profile is not None


def weights_of(settings: Settings, model: BaseModel | None) -> Path:
    """The file or folder with the base model's weights.

    Raises:
        LohanError: the base model was removed, or its files are not where they were.
    """
    if model is None:
        raise ConfigError("the base model no longer exists", place="base_model_id", remedy="Start a new run with another base model.")
    from lohan_app.base_models.sources import path_of  # here: it loads FastAPI, which a supervisor that adopts has no use for

    return path_of(settings, model)


def to_toml(values: Mapping[str, Any]) -> str:
    """TOML of a tree of tables, strings, numbers, booleans and lists of these; tables come after the plain values, as TOML asks."""
    return "\n".join(_table("", values)) + "\n"


def _table(name: str, values: Mapping[str, Any]) -> list[str]:
    plain = {key: value for key, value in values.items() if not isinstance(value, Mapping)}
    lines = [f"[{name}]"] if name else []
    lines += [f"{key} = {_value(value)}" for key, value in plain.items()]
    for key, value in values.items():
        if isinstance(value, Mapping):
            lines += ["", *_table(f"{name}.{key}" if name else key, value)]
    return lines


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # TOML's basic strings are JSON's, but for one character and for \u escapes of surrogate pairs.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(item) for item in value)}]"
    assert isinstance(value, int | float), f"run.toml has no {type(value).__name__}"
    return repr(value)
