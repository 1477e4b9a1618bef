"""/api/v1/system; and at the root: health, readiness, the OpenAPI document (its page is in system.pages)."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from lohan_app.auth.dependencies import CurrentUser, Reader
from lohan_app.context import Context
from lohan_app.system import service
from lohan_app.system.schemas import Health, Readiness, SystemView

router = APIRouter(tags=["system"])
root_router = APIRouter(include_in_schema=False)


@router.get("/system")
def system(_: Reader, context: Context) -> SystemView:
    """Versions, database, broker, workers, and what the product chose."""
    return service.overview(context)


@root_router.get("/healthz")
async def healthz() -> Health:
    """The process answers; nothing else is asked."""
    return Health()


@root_router.get("/readyz")
def readyz(context: Context, response: Response) -> Readiness:
    """200 once the database answers and has the newest schema, 503 before."""
    state = service.readiness(context)
    response.status_code = 200 if state.ready else 503
    return state


@root_router.get("/openapi.json")
def openapi(_: CurrentUser, request: Request) -> dict[str, Any]:
    document: dict[str, Any] = request.app.openapi()
    return document
