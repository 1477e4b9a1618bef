"""The io task's work on a base model: have it looked into in a limited child and write down what came out."""

from __future__ import annotations

import shutil
from typing import Any

from sqlalchemy import Engine

from lohan.errors import LohanError
from lohan.planning.workload import Workload
from lohan_app.base_models import repository, sources
from lohan_app.base_models.service import model_folder
from lohan_app.db import read_transaction, write_transaction
from lohan_app.entities import BaseModelState
from lohan_app.settings import Settings
from lohan_app.worker.limited import AddressSpace, run_limited


def inspect_model(settings: Settings, engine: Engine, base_model_id: str) -> None:
    """Inspect a model that is `inspecting`; anything else (done already, deleted) is left as it is."""
    with read_transaction(engine) as session:
        model = repository.get(session, base_model_id)
    if model is None or model.state is not BaseModelState.INSPECTING:
        return
    folder = model_folder(settings, base_model_id)
    # Whatever an inspection that was cut short has left is written again.
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, parents=True)
    try:
        path = sources.path_of(settings, model)
        found = run_limited("lohan_app.base_models.model_check", [str(path), str(folder)], settings, address_space=AddressSpace.MAPS_FILES)
    except LohanError as error:
        shutil.rmtree(folder, ignore_errors=True)
        values: dict[str, Any] = {"state": BaseModelState.INVALID, "problem": error.to_dict()}
    else:
        workload = Workload.model_validate(found)
        values = {
            "state": BaseModelState.READY,
            "problem": None,
            "workload": found,
            "architecture": workload.architecture[:100],
            "parameters": workload.parameters,
            "context_length": workload.context_length,
        }
    with write_transaction(engine) as session:
        repository.finish_inspection(session, base_model_id, **values)
