"""Pages of the base models."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Form, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from lohan.errors import LohanError
from lohan_app.auth.dependencies import PageUser, RequireAdmin, require_session
from lohan_app.auth.schemas import Identity
from lohan_app.base_models import service
from lohan_app.base_models.schemas import BaseModelRequest
from lohan_app.context import AppContext, Context
from lohan_app.entities import BaseModelSource, BaseModelState
from lohan_app.errors import problem_of_error
from lohan_app.forms import read_form
from lohan_app.templating import render

router = APIRouter(dependencies=[Depends(require_session)])


def _list_fields(context: AppContext, identity: Identity) -> dict[str, Any]:
    models = service.list_models(context).items
    return {
        "models": models,
        "is_busy": any(model.state is BaseModelState.INSPECTING for model in models),
        "may_manage": identity.is_admin,
    }


def _models_page(request: Request, context: AppContext, identity: Identity, problem: LohanError | None = None) -> HTMLResponse:
    fields = _list_fields(context, identity) | {
        "problem": problem,
        "available": [model for model in service.available(context) if model.registered_id is None],
        "sample": BaseModelSource.SAMPLE,
        "has_model_dirs": bool(context.settings.model_dirs),
    }
    status_code = problem_of_error(problem).status if problem else 200
    return render(request, "base_models/index.html", fields, viewer=identity, status_code=status_code)


@router.get("/models")
def models_page(request: Request, identity: PageUser, context: Context) -> HTMLResponse:
    return _models_page(request, context, identity)


@router.get("/models/partials/list")
def models_list(request: Request, identity: PageUser, context: Context) -> HTMLResponse:
    return render(request, "base_models/_list.html", _list_fields(context, identity), viewer=identity)


@router.post("/models")
def add_model(
    request: Request,
    identity: RequireAdmin,
    context: Context,
    source: Annotated[str, Form()] = "",
    root: Annotated[str, Form()] = "",
    name: Annotated[str, Form()] = "",
) -> Response:
    try:
        wanted = read_form(BaseModelRequest, {"source": source, "root": root, "name": name})
        service.register(context, identity, wanted.source, wanted.root, wanted.name)
    except LohanError as error:
        return _models_page(request, context, identity, error)
    return RedirectResponse("/models", 303)


@router.post("/models/{base_model_id}/delete")
def remove_model(request: Request, identity: RequireAdmin, context: Context, base_model_id: str) -> Response:
    try:
        service.delete_model(context, identity, base_model_id)
    except LohanError as error:
        return _models_page(request, context, identity, error)
    return RedirectResponse("/models", 303)
