"""Datasets: uploads, lists, deletion. Checking the rows is `datasets.validation`."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

from sqlalchemy import Engine
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from lohan_app.auth.repository import add_audit_entry
from lohan_app.auth.schemas import Identity
from lohan_app.context import AppContext
from lohan_app.datasets import repository
from lohan_app.datasets.schemas import DatasetDetail, DatasetView, RowErrorView
from lohan_app.datasets.upload import FORM_OVERHEAD_BYTES, UploadFile, disk_full, receive_body, receive_form, too_large
from lohan_app.db import read_transaction, write_transaction
from lohan_app.entities import Dataset, DatasetState
from lohan_app.entities.base import now
from lohan_app.errors import Conflict, NotFound, Unprocessable, still_needed
from lohan_app.paging import DEFAULT_LIMIT, Page, make_page
from lohan_app.settings import Settings
from lohan_app.storage import quota
from lohan_app.text import display_name
from lohan_app.worker.celery import send

UNNAMED = "dataset"


def rows_path(settings: Settings, dataset_id: str) -> Path:
    """Where the dataset's file lies; ids are ours, so no part of the path is a user's."""
    return settings.data_dir / "datasets" / dataset_id / "rows.jsonl"


# ---------------------------------------------------------------- upload
async def upload(
    context: AppContext,
    identity: Identity,
    stream: AsyncIterator[bytes],
    *,
    name: str | None,
    boundary: bytes | None = None,
    announced_bytes: int | None = None,
) -> DatasetDetail:
    """Take an upload and queue its validation; whatever goes wrong leaves neither a file nor a row behind.

    Args:
        name: the display name, where the request says one outside a form.
        boundary: of a multipart form; None where the body is the file itself.
        announced_bytes: Content-Length, if there is one: a request that cannot fit is refused before it is read.

    Raises:
        TooLarge, InsufficientStorage, BadRequest, Unprocessable: see `datasets.upload`.
        QuotaExceeded: the user's quota has no room for it.
    """
    shown_name = _checked_name(name or UNNAMED)
    dataset, file = await run_in_threadpool(_begin, context, identity, shown_name, announced_bytes)
    try:
        if boundary is None:
            await receive_body(stream, file)
        else:
            name_in_form = await receive_form(stream, boundary, file)
            shown_name = _checked_name(name or name_in_form or UNNAMED)
        return await run_in_threadpool(_finish, context, identity, dataset.id, file, shown_name)
    except BaseException:
        # Also when the server stops: the row and the partial file are one, and both go.
        await run_in_threadpool(_abandon, context, dataset.id, file)
        raise


def _checked_name(raw: str) -> str:
    try:
        # A file name may come with the folders it had on the sender's machine.
        return display_name(raw.replace("\\", "/").rstrip("/").rpartition("/")[2] or raw)
    except ValueError as error:
        raise Unprocessable(str(error), place="name", remedy="Give the dataset a name that can be read.") from error


def _begin(context: AppContext, identity: Identity, name: str, announced_bytes: int | None) -> tuple[Dataset, UploadFile]:
    limit = context.settings.upload_limit_bytes
    uploads = context.settings.data_dir / "uploads"
    if announced_bytes is not None:
        if announced_bytes > limit + FORM_OVERHEAD_BYTES:
            raise too_large(limit)
        if announced_bytes > shutil.disk_usage(uploads).free:
            raise disk_full(uploads)
    dataset = Dataset(owner_id=identity.user_id, name=name, state=DatasetState.UPLOADING)
    with write_transaction(context.engine) as session:
        left = quota.left(session, context.settings, user_id=identity.user_id, role=identity.role)
        if announced_bytes is not None:
            # A form is a little larger than its file; what matters is asked again when the file is there.
            _check_quota(session, context, identity, announced_bytes - FORM_OVERHEAD_BYTES)
        session.add(dataset)
    path = uploads / f"{dataset.id}.part"
    if left is None or left >= limit:
        return dataset, UploadFile(path, limit)
    return dataset, UploadFile(path, left, lambda _: _more_than_left(context, identity))


def _check_quota(session: Session, context: AppContext, identity: Identity, need_bytes: int) -> None:
    quota.check(session, context.settings, user_id=identity.user_id, role=identity.role, need_bytes=need_bytes, what="the file")


def _more_than_left(context: AppContext, identity: Identity) -> quota.QuotaExceeded:
    with read_transaction(context.engine) as session:
        return quota.more_than_left(session, context.settings, user_id=identity.user_id, role=identity.role)


def _finish(context: AppContext, identity: Identity, dataset_id: str, file: UploadFile, name: str) -> DatasetDetail:
    if file.size_bytes == 0:
        raise Unprocessable("the file is empty", place="file", remedy="Choose a file with one JSON object a line.")
    file.publish(rows_path(context.settings, dataset_id))
    with write_transaction(context.engine) as session:
        # Of two uploads at once that fit only one by one, the second is refused here; its file goes with its row.
        _check_quota(session, context, identity, file.size_bytes)
        repository.move(
            session,
            dataset_id,
            source=DatasetState.UPLOADING,
            state=DatasetState.VALIDATING,
            name=name,
            size_bytes=file.size_bytes,
            sha256=file.sha256,
        )
        add_audit_entry(session, user_id=identity.user_id, action="dataset.upload", subject=dataset_id, address=identity.address)
    send("datasets.validate", dataset_id, settings=context.settings)
    return get_dataset(context, identity, dataset_id)


def _abandon(context: AppContext, dataset_id: str, file: UploadFile) -> None:
    file.discard()
    _forget(context.settings, context.engine, dataset_id)


def _forget(settings: Settings, engine: Engine, dataset_id: str) -> None:
    """Remove row and files of an upload that did not finish; one that did is left alone."""
    with write_transaction(engine) as session:
        if dataset_id not in repository.unfinished_uploads(session):
            return
        repository.remove(session, dataset_id)
    shutil.rmtree(rows_path(settings, dataset_id).parent, ignore_errors=True)


def sweep_uploads(settings: Settings, engine: Engine) -> None:
    """Remove what uploads cut off by a stop of the web process have left, and what a deletion did not get to; called once, at start."""
    with read_transaction(engine) as session:
        unfinished = repository.unfinished_uploads(session)
    for dataset_id in unfinished:
        _forget(settings, engine, dataset_id)
    for part in (settings.data_dir / "uploads").glob("*.part"):
        part.unlink(missing_ok=True)
    for folder in (settings.data_dir / "trash").glob("dataset_*"):
        shutil.rmtree(folder, ignore_errors=True)


# ---------------------------------------------------------------- reading
def list_datasets(context: AppContext, identity: Identity, after: str | None = None, limit: int = DEFAULT_LIMIT) -> Page[DatasetView]:
    """The user's datasets, newest first; an administrator's list has everybody's."""
    owner_id = None if identity.is_admin else identity.user_id
    with read_transaction(context.engine) as session:
        rows = repository.list_datasets(session, owner_id=owner_id, after=after, limit=limit + 1)
    return make_page(rows, limit, DatasetView.model_validate, lambda dataset: dataset.id)


def get_dataset(context: AppContext, identity: Identity, dataset_id: str) -> DatasetDetail:
    """Raises NotFound where there is none that this user may see."""
    with read_transaction(context.engine) as session:
        return DatasetDetail.model_validate(_visible(repository.get(session, dataset_id), identity, dataset_id))


def row_errors(context: AppContext, identity: Identity, dataset_id: str, after_line: int = 0, limit: int = 100) -> Page[RowErrorView]:
    """The bad rows by line number; the first 1,000 of a dataset are kept."""
    with read_transaction(context.engine) as session:
        _visible(repository.get(session, dataset_id), identity, dataset_id)
        rows = repository.row_errors(session, dataset_id, after_line=after_line, limit=limit + 1)
    return make_page(rows, limit, RowErrorView.model_validate, lambda row: str(row.line))


def _visible(dataset: Dataset | None, identity: Identity, dataset_id: str) -> Dataset:
    # A stranger's dataset and none at all look the same.
    if dataset is None or not identity.may_see(dataset.owner_id):
        raise NotFound("no such dataset", place=dataset_id, remedy="Look at the list of datasets.")
    return dataset


# ---------------------------------------------------------------- deletion
def delete_dataset(context: AppContext, identity: Identity, dataset_id: str) -> None:
    """Delete the dataset: its file goes, its row stays for the runs that were made from it.

    Raises:
        NotFound: see `get_dataset`.
        Conflict: it is still being uploaded, or a run that has not ended needs it.
    """
    with write_transaction(context.engine) as session:
        dataset = _visible(repository.get_locked(session, dataset_id), identity, dataset_id)
        if dataset.state is DatasetState.UPLOADING:
            raise Conflict("the dataset is still being uploaded", place=dataset_id, remedy="Wait for the upload, or stop it.")
        runs = repository.runs_using(session, dataset_id)
        if runs:
            raise still_needed("dataset", runs, place=dataset_id)
        dataset.deleted_at = now()
        add_audit_entry(session, user_id=identity.user_id, action="dataset.delete", subject=dataset_id, address=identity.address)
    _discard_files(context.settings, dataset_id)


def _discard_files(settings: Settings, dataset_id: str) -> None:
    """Out of the way in one step, then removed; a crash in between is finished by `sweep_uploads`."""
    folder = rows_path(settings, dataset_id).parent
    if folder.exists():
        trash = settings.data_dir / "trash" / dataset_id
        folder.rename(trash)
        shutil.rmtree(trash, ignore_errors=True)
