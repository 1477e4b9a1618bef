"""Pages of the whole: the dashboard and the API reference."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from lohan_app.auth.dependencies import CurrentUser
from lohan_app.templating import render

router = APIRouter()


@router.get("/docs")
def api_reference(request: Request, identity: CurrentUser) -> HTMLResponse:
    """Swagger UI from our own files, started by a script file because the content policy forbids inline ones."""
    return render(request, "system/openapi.html", {}, viewer=identity)
