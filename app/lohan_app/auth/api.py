"""/api/v1: set-up, login, sessions, API keys."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response

from lohan_app.auth import service, setup
from lohan_app.auth.dependencies import (
    CurrentUser,
    clear_session_cookie,
    client_address,
    require_same_origin,
    require_set_up,
    set_session_cookie,
)
from lohan_app.auth.schemas import (
    ApiKeyRequest,
    ApiKeyView,
    Identity,
    LoginReply,
    LoginRequest,
    NewApiKey,
    Scope,
    SessionView,
    SetupRequest,
    UserView,
)
from lohan_app.context import Context
from lohan_app.errors import Forbidden

router = APIRouter(tags=["accounts"])


@router.post("/setup", status_code=201, dependencies=[Depends(require_same_origin)])
def set_up(body: SetupRequest, request: Request, response: Response, context: Context) -> LoginReply:
    """Make the first administrator with the one-time token, and log them in."""
    address = client_address(request)
    context.login_backoff.check(f"setup:{address}")
    try:
        user = setup.create_first_admin(
            context.settings,
            context.engine,
            context.passwords,
            token=body.token,
            user_name=body.user_name,
            password=body.password,
            address=address,
        )
    except Forbidden:
        context.login_backoff.failed(f"setup:{address}")
        raise
    login = service.open_session(context.engine, user, address=address, user_agent=request.headers.get("user-agent", ""))
    set_session_cookie(response, request, login.token)
    return LoginReply(user=UserView.model_validate(user), csrf_token=login.session.csrf_token)


@router.post("/login", dependencies=[Depends(require_same_origin), Depends(require_set_up)])
def log_in(body: LoginRequest, request: Request, response: Response, context: Context) -> LoginReply:
    """Open a browser session; programs use API keys instead."""
    login = service.log_in(
        context.engine,
        context.passwords,
        context.login_backoff,
        user_name=body.user_name,
        password=body.password,
        address=client_address(request),
        user_agent=request.headers.get("user-agent", ""),
    )
    set_session_cookie(response, request, login.token)
    return LoginReply(user=UserView.model_validate(login.user), csrf_token=login.session.csrf_token)


@router.post("/logout", status_code=204)
def log_out(identity: CurrentUser, response: Response, context: Context) -> None:
    service.log_out(context.engine, identity)
    clear_session_cookie(response)


@router.get("/me")
def me(identity: CurrentUser) -> UserView:
    """Who this request is made as."""
    return UserView(id=identity.user_id, name=identity.user_name, role=identity.role)


def _account_owner(identity: CurrentUser) -> Identity:
    """Sessions and keys are managed by a person, or by a key that may do everything its owner may: a leaked key makes no others."""
    if identity.key_id is not None and Scope.ADMIN not in identity.scopes:
        raise Forbidden("this key may not manage keys", place="Authorization", remedy="Log in, or use a key with the scope `admin`.")
    return identity


AccountOwner = Annotated[Identity, Depends(_account_owner)]


@router.get("/sessions")
def list_sessions(identity: AccountOwner, context: Context) -> list[SessionView]:
    views = [SessionView.model_validate(opened) for opened in service.list_sessions(context.engine, identity)]
    return [view.model_copy(update={"is_current": view.id == identity.session_id}) for view in views]


@router.delete("/sessions/{session_id}", status_code=204)
def revoke_session(session_id: str, identity: AccountOwner, context: Context) -> None:
    service.revoke_session(context.engine, identity, session_id)


@router.get("/api-keys")
def list_keys(identity: AccountOwner, context: Context) -> list[ApiKeyView]:
    return [ApiKeyView.model_validate(key) for key in service.list_keys(context.engine, identity)]


@router.post("/api-keys", status_code=201)
def create_key(body: ApiKeyRequest, identity: AccountOwner, context: Context) -> NewApiKey:
    """Make a key; its text is in this reply and nowhere else."""
    key, api_key = service.create_key(context.engine, identity, name=body.name, scopes=body.scopes, expires_at=body.expires_at)
    return NewApiKey(key=key, api_key=ApiKeyView.model_validate(api_key))


@router.delete("/api-keys/{key_id}", status_code=204)
def revoke_key(key_id: str, identity: AccountOwner, context: Context) -> None:
    service.revoke_key(context.engine, identity, key_id)
