"""Base models: what can be registered, what is, and registering it. Looking into a model is `base_models.inspection`."""

from __future__ import annotations

import shutil
from contextlib import suppress
from itertools import chain, count
from pathlib import Path

from pydantic import ValidationError
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from lohan.planning.workload import Workload
from lohan_app.auth.repository import add_audit_entry
from lohan_app.auth.schemas import Identity
from lohan_app.base_models import repository, sources
from lohan_app.base_models.schemas import AvailableModel, BaseModelView
from lohan_app.context import AppContext
from lohan_app.db import read_transaction, write_transaction
from lohan_app.entities import BaseModel, BaseModelSource, BaseModelState
from lohan_app.entities.base import now
from lohan_app.errors import Conflict, NotFound, Unprocessable, still_needed
from lohan_app.paging import Page
from lohan_app.settings import Settings
from lohan_app.text import display_name
from lohan_app.worker.celery import send


def model_folder(settings: Settings, base_model_id: str) -> Path:
    """Where config.json, tokenizer files and workload.json are kept; the weights stay where they are."""
    return settings.data_dir / "models" / base_model_id


def list_models(context: AppContext) -> Page[BaseModelView]:
    """Every registered model, newest first. All users see them."""
    with read_transaction(context.engine) as session:
        return Page(items=[BaseModelView.model_validate(model) for model in repository.list_models(session)])


def names_by_workload(context: AppContext) -> dict[str, str]:
    """The models' names by the digests of their workloads, under which `lohan profile` keeps what it measures of a model."""
    with read_transaction(context.engine) as session:
        known = [(model.name, model.workload) for model in repository.list_models(session, with_workloads=True) if model.workload]
    names = {}
    for name, workload in known:
        with suppress(ValidationError):  # traced by another version
            names[Workload.model_validate(workload).digest] = name
    return names


def get_model(context: AppContext, base_model_id: str) -> BaseModelView:
    """Raises NotFound."""
    with read_transaction(context.engine) as session:
        return BaseModelView.model_validate(_existing(repository.get(session, base_model_id), base_model_id))


def available(context: AppContext) -> list[AvailableModel]:
    """What could be registered, and what is already."""
    with read_transaction(context.engine) as session:
        registered = {(model.source, model.root, model.path_in_root): model.id for model in repository.list_models(session)}
    return [
        entry.model_copy(update={"registered_id": registered.get(_key(entry.source, entry.root, entry.name))})
        for entry in sources.list_available(context.settings)
    ]


def _key(source: BaseModelSource, root: str, name: str) -> tuple[BaseModelSource, str, str]:
    return (source, "", "") if source is BaseModelSource.SAMPLE else (source, root, name)


def register(context: AppContext, identity: Identity, source: BaseModelSource, root: str = "", name: str = "") -> BaseModelView:
    """Register a model and queue its inspection.

    Raises:
        NotFound, Unprocessable: see `sources.resolve`.
        Conflict: it is registered already.
    """
    sources.resolve(context.settings, source=source, root=root, name=name)
    source, root, name = _key(source, root, name)
    try:
        with write_transaction(context.engine) as session:
            known = repository.find(session, source=source, root=root, path_in_root=name)
            if known is not None:
                raise _registered_already(known.name)
            shown = _free_name(session, sources.SAMPLE_NAME if source is BaseModelSource.SAMPLE else name)
            model = BaseModel(name=shown, source=source, root=root, path_in_root=name, state=BaseModelState.INSPECTING)
            session.add(model)
            session.flush()
            add_audit_entry(session, user_id=identity.user_id, action="base_model.register", subject=model.id, address=identity.address)
    except IntegrityError as error:
        # Two registrations at once on PostgreSQL: the index on the name lets one through.
        raise _registered_already(name) from error
    send("base_models.inspect", model.id, settings=context.settings)
    return BaseModelView.model_validate(model)


def _registered_already(name: str) -> Conflict:
    return Conflict(f"{name!r} is registered already", place="name", remedy="Use the registered model, or delete it first.")


def _free_name(session: Session, name: str) -> str:
    """The entry's own name, or one with the next free number where another folder has an entry of that name."""
    try:
        plain = display_name(name.removesuffix(sources.GGUF_SUFFIX))[:200]
    except ValueError as error:
        raise Unprocessable(str(error), place="name", remedy="Rename the folder.") from error
    candidates = chain((plain,), (f"{plain} ({number})" for number in count(2)))
    return next(candidate for candidate in candidates if not repository.name_is_taken(session, candidate))


def _existing(model: BaseModel | None, base_model_id: str) -> BaseModel:
    if model is None:
        raise NotFound("no such base model", place=base_model_id, remedy="Look at the list of base models.")
    return model


def delete_model(context: AppContext, identity: Identity, base_model_id: str) -> None:
    """Take the model off the list. Its weights stay where they are, and its row for the runs that were made from it.

    Raises:
        NotFound: see `get_model`.
        Conflict: a run that has not ended needs it.
    """
    with write_transaction(context.engine) as session:
        model = _existing(repository.get_locked(session, base_model_id), base_model_id)
        runs = repository.runs_using(session, base_model_id)
        if runs:
            raise still_needed("model", runs, place=base_model_id)
        model.deleted_at = now()
        add_audit_entry(session, user_id=identity.user_id, action="base_model.delete", subject=base_model_id, address=identity.address)
    shutil.rmtree(model_folder(context.settings, base_model_id), ignore_errors=True)
