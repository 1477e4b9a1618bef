"""The page of the machine: what it has, and what the product chose."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse

from lohan.errors import LohanError
from lohan_app.auth.dependencies import PageUser, require_session
from lohan_app.context import AppContext, Context
from lohan_app.hardware import service
from lohan_app.system import service as system
from lohan_app.templating import render

router = APIRouter(dependencies=[Depends(require_session)])


def _fields(context: AppContext) -> dict[str, Any]:
    fields: dict[str, Any] = {"problem": None, "system": system.overview(context)}
    try:
        facts = context.hardware.facts()
    except LohanError as error:
        return fields | {"problem": error}
    return fields | {"facts": facts, "choices": service.choices(facts, context.settings)}


@router.get("/hardware")
def hardware_page(request: Request, identity: PageUser, context: Context) -> HTMLResponse:
    return render(request, "hardware/index.html", _fields(context), viewer=identity)


@router.get("/hardware/partials/facts")
def hardware_facts(request: Request, identity: PageUser, context: Context) -> HTMLResponse:
    return render(request, "hardware/_facts.html", _fields(context), viewer=identity)
