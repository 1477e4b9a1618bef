"""The page of the machine: what it has, and what the product chose."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse

from lohan.errors import LohanError
from lohan_app.auth.dependencies import PageUser, require_session
from lohan_app.base_models import service as base_models
from lohan_app.context import AppContext, Context
from lohan_app.hardware import presentation, service
from lohan_app.system import service as system
from lohan_app.templating import render

if TYPE_CHECKING:
    from lohan.hardware.probe import HardwareFacts

router = APIRouter(dependencies=[Depends(require_session)])


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


@router.get("/hardware")
def hardware_page(request: Request, identity: PageUser, context: Context) -> HTMLResponse:
    fields = _fields(context)
    # Not among what is asked for again every few seconds: a measurement stays as it is.
    return render(request, "hardware/index.html", fields | _measured(context, fields.get("facts")), viewer=identity)


@router.get("/hardware/partials/facts")
def hardware_facts(request: Request, identity: PageUser, context: Context) -> HTMLResponse:
    return render(request, "hardware/_facts.html", _fields(context), viewer=identity)
