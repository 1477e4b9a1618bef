"""The page of the machine: what it has, and what the product chose."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from starlette.concurrency import run_in_threadpool

from lohan.errors import LohanError
from lohan_app.auth.dependencies import PageUser, require_session
from lohan_app.auth.schemas import Identity
from lohan_app.base_models import service as base_models
from lohan_app.context import AppContext, Context
from lohan_app.entities import BaseModelState
from lohan_app.errors import problem_of_error
from lohan_app.hardware import measuring, presentation, service
from lohan_app.hardware.schemas import ProfileRequest
from lohan_app.system import service as system
from lohan_app.templating import render

if TYPE_CHECKING:
    from lohan.hardware.probe import HardwareFacts

router = APIRouter(dependencies=[Depends(require_session)])

ID_CHARACTERS = 64
"""As much of a form's field as can name something."""


def _fields(context: AppContext) -> dict[str, Any]:
    fields: dict[str, Any] = {"problem": None, "system": system.overview(context)}
    try:
        facts = context.hardware.facts()
    except LohanError as error:
        return fields | {"problem": error}
    users = service.gpu_users(context.engine, context.settings, facts)
    return fields | {"facts": facts, "gpu_users": users, "choices": service.choices(facts, context.settings)}


def _measured(context: AppContext, facts: HardwareFacts | None) -> dict[str, Any]:
    """The measured figures; of a machine that could not be looked at there are none."""
    if facts is None:
        return {"measured": None, "profile_problem": None}
    profile, fault = service.measured(facts, context.settings)
    if profile is None:
        return {"measured": None, "profile_problem": fault}
    return {"measured": presentation.describe_profile(profile, base_models.names_by_workload(context)), "profile_problem": None}


def _measuring(context: AppContext, identity: Identity, problem: LohanError | None = None) -> dict[str, Any]:
    """What is, was or can be measured. Not among what is asked for again every few seconds, but while a measurement goes on."""
    try:
        facts = context.hardware.facts()
    except LohanError:
        facts = None
    models = [(model.id, model.name) for model in base_models.list_models(context).items if model.state is BaseModelState.READY]
    return {
        **_measured(context, facts),
        "measurement": measuring.current(context, identity),
        "measure_problem": problem,
        "may_measure": identity.is_admin,
        "models": models,
        "devices": service.device_choices(context),
        "new_key": uuid.uuid4().hex,
    }


@router.get("/hardware")
def hardware_page(request: Request, identity: PageUser, context: Context) -> HTMLResponse:
    return render(request, "hardware/index.html", _fields(context) | _measuring(context, identity), viewer=identity)


@router.get("/hardware/partials/facts")
def hardware_facts(request: Request, identity: PageUser, context: Context) -> HTMLResponse:
    return render(request, "hardware/_facts.html", _fields(context), viewer=identity)


@router.get("/hardware/partials/measuring")
def hardware_measuring(request: Request, identity: PageUser, context: Context) -> HTMLResponse:
    return render(request, "hardware/_measuring.html", _measuring(context, identity), viewer=identity)


@router.post("/hardware/measure")
async def measure(request: Request, identity: PageUser, context: Context) -> Response:
    """Queue a measurement; where it is refused, the page says why."""
    form = {name: value for name, value in (await request.form()).items() if isinstance(value, str)}
    return await run_in_threadpool(_measure, request, identity, context, form)


def _measure(request: Request, identity: Identity, context: AppContext, form: dict[str, str]) -> Response:
    try:
        device, base_model_id = (form.get(name, "")[:ID_CHARACTERS] for name in ("device", "base_model_id"))
        wanted = ProfileRequest(device=device or "auto", base_model_id=base_model_id or None, drives=form.get("drives") == "yes")
        measuring.submit(context, identity, wanted, form.get("idempotency_key") or None)
    except LohanError as error:
        fields = _fields(context) | _measuring(context, identity, error)
        return render(request, "hardware/index.html", fields, viewer=identity, status_code=problem_of_error(error).status)
    return RedirectResponse("/hardware", 303)
