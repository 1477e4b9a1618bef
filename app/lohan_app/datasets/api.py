"""/api/v1/datasets."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from python_multipart.multipart import parse_options_header

from lohan_app.auth.dependencies import DatasetWriter, Reader
from lohan_app.context import Context
from lohan_app.datasets import service
from lohan_app.datasets.schemas import DatasetDetail, DatasetView, RowErrorView
from lohan_app.datasets.upload import FORM_OVERHEAD_BYTES
from lohan_app.errors import BadRequest
from lohan_app.middleware import allow_body
from lohan_app.paging import DEFAULT_LIMIT, MAXIMUM_LIMIT, After, Limit, Page

router = APIRouter(tags=["datasets"])

# The endpoint reads the stream itself, so FastAPI cannot derive this from its signature.
UPLOAD_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file"],
                    "properties": {"file": {"type": "string", "format": "binary"}, "name": {"type": "string"}},
                }
            },
            "application/jsonl": {"schema": {"type": "string", "format": "binary"}},
        },
    }
}


@router.post("/datasets", status_code=201, openapi_extra=UPLOAD_BODY)
async def upload_dataset(
    request: Request,
    response: Response,
    identity: DatasetWriter,
    context: Context,
    name: Annotated[str | None, Query(max_length=1000)] = None,
) -> DatasetDetail:
    """Upload a JSONL file: as the part `file` of a multipart form (with an optional part `name`), or as the body itself with `?name=`."""
    allow_body(request.scope, context.settings.upload_limit_bytes + FORM_OVERHEAD_BYTES)
    content_type, options = parse_options_header(request.headers.get("content-type", ""))
    boundary = None
    if content_type == b"multipart/form-data":
        boundary = options.get(b"boundary")
        if not boundary:
            raise BadRequest("the form names no boundary", place="Content-Type", remedy="Let your HTTP client set Content-Type.")
    announced = request.headers.get("content-length", "")
    dataset = await service.upload(
        context,
        identity,
        request.stream(),
        name=name,
        boundary=boundary,
        announced_bytes=int(announced) if announced.isascii() and announced.isdigit() else None,
    )
    response.headers["Location"] = f"/api/v1/datasets/{dataset.id}"
    return dataset


@router.get("/datasets")
def list_datasets(identity: Reader, context: Context, after: After = None, limit: Limit = DEFAULT_LIMIT) -> Page[DatasetView]:
    """Newest first."""
    return service.list_datasets(context, identity, after, limit)


@router.get("/datasets/{dataset_id}")
def get_dataset(dataset_id: str, identity: Reader, context: Context) -> DatasetDetail:
    return service.get_dataset(context, identity, dataset_id)


@router.get("/datasets/{dataset_id}/errors")
def list_row_errors(
    dataset_id: str,
    identity: Reader,
    context: Context,
    after: Annotated[int, Query(ge=0, description="The last page's `next_cursor`: a line number.")] = 0,
    limit: Annotated[int, Query(ge=1, le=MAXIMUM_LIMIT)] = 100,
) -> Page[RowErrorView]:
    """The rows that cannot be used, by line; the first 1,000 are kept, `bad_row_count` counts all."""
    return service.row_errors(context, identity, dataset_id, after, limit)


@router.delete("/datasets/{dataset_id}", status_code=204)
def delete_dataset(dataset_id: str, identity: DatasetWriter, context: Context) -> None:
    """Refused with 409 while a run that has not ended needs it."""
    service.delete_dataset(context, identity, dataset_id)
