"""What a run's process is: `lohan train`, `lohan profile`, `lohan export` or `lohan chat`, with the files that it reads."""

from __future__ import annotations

import json

from lohan.data.conversation import Conversation
from lohan.errors import ConfigError
from lohan_app.entities import BaseModel, Run, RunKind
from lohan_app.runs.kinds import needs_of
from lohan_app.settings import Settings
from lohan_app.worker.launcher import RunFiles
from lohan_app.worker.processes import write_atomically
from lohan_app.worker.run_files import put_aside_states, state_directories, weights_of, write_config, write_run_files

SEQUENCE_LENGTH = 1024
"""Tokens of the rows that a model's block is timed with, where the model takes so many; plans scale to others."""


def arrange(settings: Settings, run: Run, model: BaseModel | None, source: Run | None, *, device: str) -> list[str]:
    """Write what the run's process reads; returns its command line behind `lohan`, less the attempt.

    Args:
        model: the run's base model.
        source: of an export, the training run whose states it reads; of a chat, the run whose result it asks.

    Raises:
        LohanError: the base model or its files are gone, or the stored settings are not valid.
    """
    files = RunFiles(settings.run_folder(run.id))
    match run.kind:
        case RunKind.TRAIN:
            write_run_files(settings, run, weights_of(settings, model), device=device)
            return ["train", str(files.config)]
        case RunKind.PROFILE:
            return _profile(settings, run, model, files, device)
        case RunKind.EXPORT:
            if source is None:
                raise ConfigError("the run to export no longer exists", place="parent_id", remedy="Export another run.")
            write_config(files.config, settings, source, weights_of(settings, model), device="cpu")
            return ["export", str(files.config), "--to", str(files.folder), "--dtype", str(run.settings["export"]["dtype"])]
        case RunKind.CHAT:
            return _chat(settings, run, source, files, device)


def _chat(settings: Settings, run: Run, source: Run | None, files: RunFiles, device: str) -> list[str]:
    """What was said goes through a file that this user alone may read: everybody on the machine sees command lines."""
    folder = settings.run_folder(source.id) / "export" if source is not None else None
    if folder is None or not folder.is_dir():
        raise ConfigError("the model that is to answer is no longer on the disk", place="parent_id", remedy="Chat with another run.")
    asked = {name: value for name, value in run.settings["chat"].items() if name in Conversation.model_fields}
    write_atomically(files.conversation, json.dumps(asked).encode())
    command = ["chat", str(folder), "--messages", str(files.conversation), "--job", str(files.folder), "--device", device]
    gpu_bytes = needs_of(run).gpu_bytes
    return [*command, "--gpu-memory-bytes", str(gpu_bytes)] if gpu_bytes else command


def _profile(settings: Settings, run: Run, model: BaseModel | None, files: RunFiles, device: str) -> list[str]:
    command = ["profile", "--again"]
    if run.base_model_id is not None:
        weights = weights_of(settings, model)
        assert model is not None, "its weights were found"
        command += [str(weights), "--seq", str(min(SEQUENCE_LENGTH, model.context_length))]
    command += ["--job", str(files.folder), "--device", device, "--profiles", str(settings.profiles_folder)]
    put_aside_states(settings, run.id)  # what an attempt that was killed has left of its files
    for folder in state_directories(settings, run.id):
        folder.mkdir(parents=True, exist_ok=True)
        command += ["--directory", str(folder)]
    return command if run.settings["profile"]["drives"] else [*command, "--no-drives"]
