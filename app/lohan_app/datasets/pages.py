"""Pages of the datasets. Files are uploaded by the page's script to the REST API, for the sake of its progress bar."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from lohan.errors import LohanError
from lohan_app.auth.dependencies import PageUser, require_session
from lohan_app.auth.schemas import Identity
from lohan_app.context import AppContext, Context
from lohan_app.datasets import service
from lohan_app.entities import DatasetFormat, DatasetState
from lohan_app.errors import problem_of_error
from lohan_app.paging import After
from lohan_app.templating import render

router = APIRouter(dependencies=[Depends(require_session)])

FORMAT_NAMES = {
    DatasetFormat.MESSAGES: "OpenAI messages",
    DatasetFormat.ALPACA: "Alpaca",
    DatasetFormat.PROMPT_COMPLETION: "Prompt and completion",
}
BUSY_STATES = frozenset({DatasetState.UPLOADING, DatasetState.VALIDATING})
ERRORS_SHOWN = 20
"""Bad rows on the page at first; each "Show more" shows five times as many, up to the 1,000 that are kept."""
ERRORS_KEPT = 1000
PREVIEW_CHARACTERS = 4000
"""Of one message in the preview: enough to recognise it, and a row of megabytes does not make a page of megabytes."""


def _list_fields(context: AppContext, identity: Identity, after: str | None) -> dict[str, Any]:
    page = service.list_datasets(context, identity, after)
    return {
        "datasets": page.items,
        "next_after": page.next_cursor,
        "after": after,
        "formats": FORMAT_NAMES,
        "is_busy": any(dataset.state in BUSY_STATES for dataset in page.items),
    }


@router.get("/datasets")
def datasets_page(request: Request, identity: PageUser, context: Context, after: After = None) -> HTMLResponse:
    fields = _list_fields(context, identity, after) | {"upload_limit_bytes": context.settings.upload_limit_bytes}
    return render(request, "datasets/index.html", fields, viewer=identity)


@router.get("/datasets/partials/list")
def datasets_list(request: Request, identity: PageUser, context: Context, after: After = None) -> HTMLResponse:
    return render(request, "datasets/_list.html", _list_fields(context, identity, after), viewer=identity)


def _preview_rows(preview: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The stored first rows, each message cut to a readable length."""
    return [
        {
            "line": row["line"],
            "messages": [
                {
                    "role": message["role"],
                    "content": message["content"][:PREVIEW_CHARACTERS],
                    "left_out": max(0, len(message["content"]) - PREVIEW_CHARACTERS),
                }
                for message in row["messages"]
            ],
        }
        for row in (preview or {}).get("rows", [])
    ]


def _detail_fields(context: AppContext, identity: Identity, dataset_id: str, errors_limit: int) -> dict[str, Any]:
    dataset = service.get_dataset(context, identity, dataset_id)
    rows = service.row_errors(context, identity, dataset_id, limit=errors_limit)
    return {
        "dataset": dataset,
        "formats": FORMAT_NAMES,
        "rows": _preview_rows(dataset.preview),
        "errors": {"rows": rows.items, "more": rows.next_cursor is not None, "next_limit": min(ERRORS_KEPT, 5 * errors_limit)},
        "problem": None,
    }


ErrorsLimit = Annotated[int, Query(alias="errors", ge=1, le=ERRORS_KEPT)]


@router.get("/datasets/{dataset_id}")
def dataset_page(
    request: Request, identity: PageUser, context: Context, dataset_id: str, errors_limit: ErrorsLimit = ERRORS_SHOWN
) -> HTMLResponse:
    return render(request, "datasets/detail.html", _detail_fields(context, identity, dataset_id, errors_limit), viewer=identity)


@router.get("/datasets/{dataset_id}/partials/detail")
def dataset_detail(request: Request, identity: PageUser, context: Context, dataset_id: str) -> HTMLResponse:
    return render(request, "datasets/_detail.html", _detail_fields(context, identity, dataset_id, ERRORS_SHOWN), viewer=identity)


@router.post("/datasets/{dataset_id}/delete")
def delete_dataset(request: Request, identity: PageUser, context: Context, dataset_id: str) -> Response:
    try:
        service.delete_dataset(context, identity, dataset_id)
    except LohanError as error:
        fields = _detail_fields(context, identity, dataset_id, ERRORS_SHOWN) | {"problem": error}
        return render(request, "datasets/detail.html", fields, viewer=identity, status_code=problem_of_error(error).status)
    return RedirectResponse("/datasets", 303)
