"""The page that says who holds what on the drives."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from lohan.errors import LohanError
from lohan_app.auth.dependencies import PageUser, require_session
from lohan_app.auth.schemas import Identity, Scope
from lohan_app.context import AppContext, Context
from lohan_app.errors import problem_of_error
from lohan_app.storage import service
from lohan_app.storage.report import Kind
from lohan_app.templating import render

router = APIRouter(dependencies=[Depends(require_session)])

KIND_NAMES = {
    Kind.STATES: "States",
    Kind.EXPORT: "Result",
    Kind.RUN_FILES: "Rows and logs",
    Kind.DATASET: "Dataset",
    Kind.UPLOAD: "Upload",
    Kind.MODEL: "Model's tokenizer",
    Kind.TRASH: "Trash",
}
HOLDINGS_SHOWN = 100


def _fields(context: AppContext, identity: Identity, problem: LohanError | None = None) -> dict[str, Any]:
    view = service.overview(context, identity)
    return {
        "storage": view,
        "shown": view.holdings[:HOLDINGS_SHOWN],
        "rest": view.holdings[HOLDINGS_SHOWN:],
        "kind_names": KIND_NAMES,
        "sums": [(name, size) for kind, name in KIND_NAMES.items() if (size := sum(i.bytes for i in view.holdings if i.kind is kind))],
        "freeable": {item.id: item for item in view.holdings if item.can_free},
        "may_write": identity.may(Scope.RUNS),
        "problem": problem,
    }


@router.get("/storage")
def storage_page(request: Request, identity: PageUser, context: Context) -> HTMLResponse:
    return render(request, "storage/index.html", _fields(context, identity), viewer=identity)


@router.get("/storage/partials/holdings")
def storage_holdings(request: Request, identity: PageUser, context: Context) -> HTMLResponse:
    return render(request, "storage/_holdings.html", _fields(context, identity), viewer=identity)


def _refused(request: Request, identity: Identity, context: AppContext, error: LohanError) -> HTMLResponse:
    """The page, with the reason at its top."""
    status = problem_of_error(error).status
    return render(request, "storage/index.html", _fields(context, identity, error), viewer=identity, status_code=status)


@router.post("/storage/runs/{run_id}/free")
def free_states(request: Request, identity: PageUser, context: Context, run_id: str) -> Response:
    """Free an ended run's states; where that is refused, the page says why."""
    try:
        service.free_states(context, identity, run_id)
    except LohanError as error:
        return _refused(request, identity, context, error)
    return RedirectResponse("/storage", 303)


@router.post("/storage/runs/{run_id}/restore")
def restore(request: Request, identity: PageUser, context: Context, run_id: str) -> Response:
    """Take a deleted run out of the trash and show it; where that is refused, the page says why."""
    try:
        service.restore(context, identity, run_id)
    except LohanError as error:
        return _refused(request, identity, context, error)
    return RedirectResponse(f"/runs/{run_id}", 303)
