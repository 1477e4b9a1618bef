"""The web application: `create_app(settings)` builds it, `lohan up` serves it."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module, resources
from importlib.util import find_spec
from typing import Any

from fastapi import APIRouter, Depends, FastAPI
from sqlalchemy.exc import DBAPIError
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

import lohan
from lohan_app.auth.dependencies import browsers_only
from lohan_app.auth.setup import ensure_setup_token
from lohan_app.context import AppContext, make_context
from lohan_app.datasets.service import sweep_uploads
from lohan_app.errors import install_error_handlers
from lohan_app.middleware import BodyLimit, HostGuard, SecurityHeaders
from lohan_app.settings import Settings, load_settings

log = logging.getLogger(__name__)

API_PREFIX = "/api/v1"
FEATURES = ("auth", "runs", "datasets", "base_models", "hardware", "storage", "system")


class StaticFolder(StaticFiles):
    """Static files that browsers keep: for good where the address has the digest of the content, else until asked about again."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        names_content = scope["query_string"].startswith(b"v=")
        response.headers["Cache-Control"] = "public, max-age=31536000, immutable" if names_content else "no-cache"
        return response


def create_app(settings: Settings | None = None) -> FastAPI:
    """Build the application: routers of every feature, error handlers, middleware. Opens no connection yet."""
    settings = settings or load_settings()
    # The OpenAPI document and its page are served behind login (system.api), so FastAPI's own open ones are off.
    app = FastAPI(title="LoHan", version=lohan.__version__, lifespan=_lifespan, openapi_url=None, docs_url=None, redoc_url=None)
    app.state.context = make_context(settings)
    install_error_handlers(app)
    _include_routers(app)
    app.mount("/static", StaticFolder(directory=str(resources.files("lohan_app") / "web" / "static"), check_dir=False), name="static")
    # The last added is the outermost: even a refused Host gets the security headers.
    app.add_middleware(BodyLimit)
    app.add_middleware(HostGuard, allowed_hosts=settings.allowed_hosts)
    app.add_middleware(SecurityHeaders)
    return app


def _include_routers(app: FastAPI) -> None:
    for feature in FEATURES:
        router: APIRouter = import_module(f"lohan_app.{feature}.api").router
        app.include_router(router, prefix=API_PREFIX)
    app.include_router(import_module("lohan_app.system.api").root_router)
    for feature in FEATURES:
        if find_spec(f"lohan_app.{feature}.pages") is not None:
            pages: APIRouter = import_module(f"lohan_app.{feature}.pages").router
            app.include_router(pages, include_in_schema=False, dependencies=[Depends(browsers_only)])
    if find_spec("lohan_app.templating") is not None:
        templating: Any = import_module("lohan_app.templating")
        app.state.error_page = getattr(templating, "render_error_page", None)


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    context: AppContext = app.state.context
    await run_in_threadpool(_start, context)
    try:
        yield
    finally:
        await context.events.close()
        context.engine.dispose()


def _start(context: AppContext) -> None:
    context.settings.make_folders()
    try:
        ensure_setup_token(context.settings, context.engine)
        sweep_uploads(context.settings, context.engine)
    except DBAPIError as error:
        # /healthz and /readyz must answer while the database is away; the token is made when it is first asked for.
        log.warning("the database does not answer yet: %s", error.orig)
