"""/api/v1/base-models."""

from __future__ import annotations

from fastapi import APIRouter, Response

from lohan_app.auth.dependencies import Reader, RequireAdmin
from lohan_app.base_models import service
from lohan_app.base_models.schemas import AvailableModel, BaseModelRequest, BaseModelView
from lohan_app.context import Context
from lohan_app.paging import Page

router = APIRouter(tags=["base models"])


@router.get("/base-models")
def list_models(_: Reader, context: Context) -> Page[BaseModelView]:
    """Every registered model, newest first."""
    return service.list_models(context)


@router.get("/base-models/available")
def available(_: Reader, context: Context) -> Page[AvailableModel]:
    """What can be registered: the entries of LOHAN_MODEL_DIRS, and the sample where it is installed."""
    return Page(items=service.available(context))


@router.post("/base-models", status_code=201)
def register(body: BaseModelRequest, identity: RequireAdmin, context: Context, response: Response) -> BaseModelView:
    """Register a model; its state goes from `inspecting` to `ready`, or to `invalid` with the problem."""
    model = service.register(context, identity, body.source, body.root, body.name)
    response.headers["Location"] = f"/api/v1/base-models/{model.id}"
    return model


@router.get("/base-models/{base_model_id}")
def get_model(base_model_id: str, _: Reader, context: Context) -> BaseModelView:
    return service.get_model(context, base_model_id)


@router.delete("/base-models/{base_model_id}", status_code=204)
def delete_model(base_model_id: str, identity: RequireAdmin, context: Context) -> None:
    """Take the model off the list; its weights stay. Refused with 409 while a run that has not ended needs it."""
    service.delete_model(context, identity, base_model_id)
