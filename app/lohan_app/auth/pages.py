"""Pages of set-up, login and settings."""

from __future__ import annotations

import re
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Form, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from lohan.errors import LohanError
from lohan_app.auth import service, setup
from lohan_app.auth.dependencies import (
    SESSION_COOKIE,
    PageUser,
    clear_session_cookie,
    client_address,
    require_same_origin,
    require_set_up,
    set_session_cookie,
)
from lohan_app.auth.passwords import MINIMUM_PASSWORD_CHARACTERS
from lohan_app.auth.schemas import ApiKeyRequest, Identity, Scope
from lohan_app.context import AppContext, Context
from lohan_app.errors import Forbidden, problem_of_error
from lohan_app.forms import local_path, read_form
from lohan_app.templating import render

router = APIRouter()

SETUP_COOKIE = "lohan_setup"
SETUP_COOKIE_SECONDS = 3600
SCOPE_TEXTS = {
    Scope.READ: "Look at everything you may see",
    Scope.DATASETS: "Upload and delete datasets",
    Scope.RUNS: "Plan, submit and cancel runs",
    Scope.ADMIN: "Do everything you may do, keys included",
}
DEFAULT_SCOPES = (Scope.READ, Scope.DATASETS, Scope.RUNS)
# In this order: the later names also stand in the user agents of the earlier ones.
BROWSERS = (("Edg/", "Edge"), ("OPR/", "Opera"), ("Firefox/", "Firefox"), ("Chrome/", "Chrome"), ("Safari/", "Safari"))
SYSTEMS = (
    ("Android", "Android"),
    ("iPhone", "iPhone"),
    ("iPad", "iPad"),
    ("Windows", "Windows"),
    ("Mac OS X", "macOS"),
    ("Linux", "Linux"),
)


# ---------------------------------------------------------------- set-up
@router.get("/setup")
def setup_page(request: Request, context: Context, token: str = "") -> Response:
    """The form of the first run. A token in the address is moved into a cookie, so that it stays in no history and no referrer."""
    if setup.is_set_up(context.engine):
        return render(request, "auth/setup_done.html", {})
    if token:
        response = RedirectResponse("/setup", 303)
        secure = request.url.scheme == "https"
        response.set_cookie(
            SETUP_COOKIE, token, max_age=SETUP_COOKIE_SECONDS, path="/setup", httponly=True, samesite="strict", secure=secure
        )
        return response
    return _setup_form(request, token=request.cookies.get(SETUP_COOKIE, ""))


def _setup_form(request: Request, *, token: str, name: str = "", problem: LohanError | None = None) -> HTMLResponse:
    fields = {"token": token, "name": name, "problem": problem, "password_length": MINIMUM_PASSWORD_CHARACTERS}
    return render(request, "auth/setup.html", fields, status_code=problem_of_error(problem).status if problem else 200)


@router.post("/setup", dependencies=[Depends(require_same_origin)])
def set_up(
    request: Request,
    context: Context,
    token: Annotated[str, Form()] = "",
    name: Annotated[str, Form()] = "",
    password: Annotated[str, Form()] = "",
) -> Response:
    address = client_address(request)
    try:
        context.login_backoff.check(f"setup:{address}")
        user = setup.create_first_admin(
            context.settings,
            context.engine,
            context.passwords,
            token=token.strip(),
            user_name=name.strip(),
            password=password,
            address=address,
        )
    except LohanError as error:
        if isinstance(error, Forbidden):
            context.login_backoff.failed(f"setup:{address}")
        return _setup_form(request, token=token, name=name, problem=error)
    login = service.open_session(context.engine, user, address=address, user_agent=request.headers.get("user-agent", ""))
    response = RedirectResponse("/", 303)
    set_session_cookie(response, request, login.token)
    response.delete_cookie(SETUP_COOKIE, path="/setup", httponly=True, samesite="strict")
    return response


# ---------------------------------------------------------------- login
@router.get("/login", dependencies=[Depends(require_set_up)])
def login_page(request: Request, context: Context, next: str = "") -> Response:
    token = request.cookies.get(SESSION_COOKIE)
    if token and service.session_identity(context.engine, context.settings, token, address=client_address(request)):
        return RedirectResponse(local_path(next), 303)
    return render(request, "auth/login.html", {"name": "", "next": local_path(next), "problem": None})


@router.post("/login", dependencies=[Depends(require_same_origin), Depends(require_set_up)])
def log_in(
    request: Request,
    context: Context,
    name: Annotated[str, Form()] = "",
    password: Annotated[str, Form()] = "",
    next: Annotated[str, Form()] = "",
) -> Response:
    try:
        login = service.log_in(
            context.engine,
            context.passwords,
            context.login_backoff,
            user_name=name.strip(),
            password=password,
            address=client_address(request),
            user_agent=request.headers.get("user-agent", ""),
        )
    except LohanError as error:
        fields = {"name": name, "next": local_path(next), "problem": error}
        return render(request, "auth/login.html", fields, status_code=problem_of_error(error).status)
    response = RedirectResponse(local_path(next), 303)
    set_session_cookie(response, request, login.token)
    return response


@router.post("/logout")
def log_out(identity: PageUser, context: Context) -> Response:
    service.log_out(context.engine, identity)
    response = RedirectResponse("/login", 303)
    clear_session_cookie(response)
    return response


# ---------------------------------------------------------------- settings
def describe_browser(user_agent: str) -> str:
    """A browser as its user knows it, e.g. `Firefox on Linux`; whatever else sent the request by its first word."""
    browser = next((name for mark, name in BROWSERS if mark in user_agent), "")
    system = next((name for mark, name in SYSTEMS if mark in user_agent), "")
    if browser:
        return f"{browser} on {system}" if system else browser
    match = re.match(r"[^\s/]+", user_agent)
    return match.group() if match else "Unknown browser"


def _settings_page(request: Request, context: AppContext, identity: Identity, **changes: Any) -> HTMLResponse:
    error: LohanError | None = changes.get("problem")
    fields: dict[str, Any] = {
        "problem": None,
        "new_key": None,
        "values": {"name": "", "scopes": DEFAULT_SCOPES},
        "scopes": [(scope, text) for scope, text in SCOPE_TEXTS.items() if scope in identity.scopes],
        "keys": service.list_keys(context.engine, identity),
        "sessions": [
            {
                "id": opened.id,
                "browser": describe_browser(opened.user_agent),
                "created_at": opened.created_at,
                "last_seen_at": opened.last_seen_at,
                "is_current": opened.id == identity.session_id,
            }
            for opened in service.list_sessions(context.engine, identity)
        ],
    }
    status_code = problem_of_error(error).status if error else 200
    return render(request, "auth/settings.html", fields | changes, viewer=identity, status_code=status_code)


@router.get("/settings")
def settings_page(request: Request, identity: PageUser, context: Context) -> HTMLResponse:
    return _settings_page(request, context, identity)


@router.post("/settings/api-keys")
def create_key(
    request: Request,
    identity: PageUser,
    context: Context,
    name: Annotated[str, Form()] = "",
    scopes: Annotated[list[str] | None, Form()] = None,
) -> HTMLResponse:
    """Make a key and show its text, in this one reply; no redirect, because the text is kept nowhere it could be fetched from."""
    try:
        wanted = read_form(ApiKeyRequest, {"name": name, "scopes": scopes or []})
        text, key = service.create_key(context.engine, identity, name=wanted.name, scopes=wanted.scopes)
    except LohanError as error:
        return _settings_page(request, context, identity, problem=error, values={"name": name, "scopes": scopes or []})
    return _settings_page(request, context, identity, new_key={"name": key.name, "text": text})


@router.post("/settings/api-keys/{key_id}/revoke")
def revoke_key(request: Request, identity: PageUser, context: Context, key_id: str) -> Response:
    try:
        service.revoke_key(context.engine, identity, key_id)
    except LohanError as error:
        return _settings_page(request, context, identity, problem=error)
    return RedirectResponse("/settings#keys-title", 303)


@router.post("/settings/sessions/{session_id}/revoke")
def revoke_session(request: Request, identity: PageUser, context: Context, session_id: str) -> Response:
    try:
        service.revoke_session(context.engine, identity, session_id)
    except LohanError as error:
        return _settings_page(request, context, identity, problem=error)
    return RedirectResponse("/settings#sessions-title", 303)
