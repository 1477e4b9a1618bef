"""Who asks, and whether they may: dependencies that every router takes. Nothing here looks at a path.

A browser proves itself by its session cookie, a program by `Authorization: Bearer lohan_…`. A request that changes something and
came with a cookie must also come from our own pages: the same Origin, and the session's CSRF token.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Coroutine
from typing import Annotated, Any
from urllib.parse import urlsplit

from fastapi import Depends, Request
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.responses import Response

from lohan_app.auth import service, setup
from lohan_app.auth.schemas import Identity, Scope
from lohan_app.context import AppContext, Context
from lohan_app.errors import AuthenticationRequired, Forbidden, SetupRequired

SESSION_COOKIE = "lohan_session"
CSRF_HEADER = "x-csrf-token"
CSRF_FIELD = "csrf_token"
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
DEFAULT_PORTS = {"http": 80, "https": 443}


def client_address(request: Request) -> str:
    return request.client.host if request.client else ""


def set_session_cookie(response: Response, request: Request, token: str) -> None:
    """Store the session's token in the browser; it ends with the browser, or earlier by the idle limit."""
    response.set_cookie(SESSION_COOKIE, token, path="/", httponly=True, samesite="lax", secure=request.url.scheme == "https")


def clear_session_cookie(response: Response) -> None:
    response.delete_cookie(SESSION_COOKIE, path="/", httponly=True, samesite="lax")


def _place(scheme: str, netloc: str) -> tuple[str, int | None]:
    parts = urlsplit(f"//{netloc}")
    return (parts.hostname or "").lower(), parts.port or DEFAULT_PORTS.get(scheme)


def origin_matches(headers: Headers, scheme: str) -> bool:
    """Whether the request comes from a page of this very host and port, by Origin or else by Referer; neither means no.

    Schemes are not compared: behind a proxy that ends TLS the browser says https where this process sees http.
    """
    source = headers.get("origin") or headers.get("referer")
    if not source:
        return False
    try:
        parts = urlsplit(source)
        return parts.scheme in DEFAULT_PORTS and _place(parts.scheme, parts.netloc) in (
            _place(scheme, headers.get("host", "")),
            _place(parts.scheme, headers.get("host", "")),
        )
    except ValueError:  # a port that is no number
        return False


def require_same_origin(request: Request) -> None:
    """For the few unsafe requests that come without a session (set-up, login): they too must come from our own pages."""
    if not origin_matches(request.headers, request.url.scheme):
        raise Forbidden(
            "the request does not come from this service's own pages",
            place="Origin",
            remedy="Open the page from this service again; a program uses an API key and not a session.",
        )


async def _check_csrf(request: Request, identity: Identity) -> None:
    require_same_origin(request)
    sent = request.headers.get(CSRF_HEADER, "")
    if not sent and request.headers.get("content-type", "").split(";")[0].strip().lower() == "application/x-www-form-urlencoded":
        # Only this type: reading a multipart form here would spool an upload into the system's temporary folder.
        sent = str((await request.form()).get(CSRF_FIELD, ""))
    if not hmac.compare_digest(sent.encode(), (identity.csrf_token or "").encode()):
        raise Forbidden(
            "the form's token does not belong to this session",
            place=CSRF_FIELD,
            remedy="Reload the page and send the form again; scripts send the token as the header X-CSRF-Token.",
        )


def _identify(context: AppContext, headers: Headers, cookie: str | None, address: str) -> Identity:
    authorization = headers.get("authorization", "")
    scheme, _, credentials = authorization.partition(" ")
    if authorization:
        # A wrong key never falls back to the cookie: the sender meant the key.
        identity = service.key_identity(context.engine, credentials.strip(), address=address) if scheme.lower() == "bearer" else None
        if identity is not None:
            return identity
        raise AuthenticationRequired(
            "the API key is not valid", place="Authorization", remedy="Make a key in the settings.", headers={"WWW-Authenticate": "Bearer"}
        )
    if cookie:
        identity = service.session_identity(context.engine, context.settings, cookie, address=address)
        if identity is not None:
            return identity
    if not setup.is_set_up(context.engine):
        raise SetupRequired(
            "this service has not been set up yet", remedy="Open the set-up address that `lohan up` printed.", headers={"Retry-After": "10"}
        )
    raise AuthenticationRequired(
        "nobody is logged in", remedy="Log in, or send an API key as `Authorization: Bearer …`.", headers={"WWW-Authenticate": "Bearer"}
    )


async def authenticate(request: Request, context: Context) -> Identity:
    """Who makes this request.

    Raises:
        SetupRequired: there is no administrator yet.
        AuthenticationRequired: no valid key and no live session.
        Forbidden: a request that changes something and does not come from our own pages.
    """
    cookie = request.cookies.get(SESSION_COOKIE)
    identity = await run_in_threadpool(_identify, context, request.headers, cookie, client_address(request))
    if identity.session_id is not None and request.method not in SAFE_METHODS:
        await _check_csrf(request, identity)
    return identity


CurrentUser = Annotated[Identity, Depends(authenticate)]


def require_admin(identity: CurrentUser) -> Identity:
    if not identity.is_admin:
        raise Forbidden("only administrators may do this", remedy="Ask an administrator, or use one's key that has the scope `admin`.")
    return identity


RequireAdmin = Annotated[Identity, Depends(require_admin)]


def require_session(identity: CurrentUser) -> Identity:
    """Pages are for people: an API key is told to use the API, so that a key's scopes need asking about in one place only."""
    if identity.session_id is None:
        raise Forbidden("pages are for browsers", place="Authorization", remedy="Use the API under /api/v1 with the key.")
    return identity


PageUser = Annotated[Identity, Depends(require_session)]


def require_scope(scope: Scope) -> Callable[[Identity], Coroutine[Any, Any, Identity]]:
    """A dependency that lets only identities with `scope` pass: `Annotated[Identity, Depends(require_scope(Scope.RUNS))]`."""

    async def check(identity: CurrentUser) -> Identity:
        if not identity.may(scope):
            raise Forbidden(f"this key lacks the scope `{scope}`", place="Authorization", remedy="Use a key that has it.")
        return identity

    return check


Reader = Annotated[Identity, Depends(require_scope(Scope.READ))]
DatasetWriter = Annotated[Identity, Depends(require_scope(Scope.DATASETS))]
RunWriter = Annotated[Identity, Depends(require_scope(Scope.RUNS))]


def require_set_up(context: Context) -> None:
    """For pages that are open to strangers (login): before the set-up they lead there."""
    if not setup.is_set_up(context.engine):
        raise SetupRequired("this service has not been set up yet", remedy="Open the set-up address that `lohan up` printed.")


def browsers_only(request: Request) -> None:
    """For pages: their forms are bound to a session, and know nothing of a key's scopes."""
    if "authorization" in request.headers:
        raise Forbidden("pages are for browsers", place="Authorization", remedy="Send API keys to the addresses under /api/v1.")
