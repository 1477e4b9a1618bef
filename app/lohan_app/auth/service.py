"""Logging in and out, browser sessions and API keys."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import Engine
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from lohan_app.auth import repository
from lohan_app.auth.passwords import NO_PASSWORD, LoginBackoff, PasswordHasher
from lohan_app.auth.schemas import ALL_SCOPES, MEMBER_SCOPES, Identity, Scope
from lohan_app.auth.setup import BOOTSTRAP_USER
from lohan_app.db import read_transaction, write_transaction
from lohan_app.entities import ApiKey, BrowserSession, Role, User
from lohan_app.entities.base import new_id, now
from lohan_app.errors import AuthenticationRequired, Forbidden, NotFound, Unprocessable
from lohan_app.settings import Settings

log = logging.getLogger(__name__)

# 256 random bits: SHA-256 is enough for what cannot be guessed, and is cheap at every request.
TOKEN_BYTES = 32
_API_KEY = re.compile(r"lohan_(?P<id>[0-9a-f]{32})_(?P<secret>[A-Za-z0-9_-]{43})")


@dataclass(frozen=True, slots=True)
class Login:
    """A session just opened; `token` goes into the cookie and is not kept."""

    token: str
    session: BrowserSession
    user: User


def sha256_hex(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def scopes_of_role(role: Role) -> frozenset[Scope]:
    return ALL_SCOPES if role is Role.ADMIN else MEMBER_SCOPES


def log_in(
    engine: Engine, passwords: PasswordHasher, backoff: LoginBackoff, *, user_name: str, password: str, address: str, user_agent: str = ""
) -> Login:
    """Check the password and open a session. Blocks for the hash: call it from a worker thread.

    Raises:
        AuthenticationRequired: no such user, or another password; the text does not say which.
        TooManyRequests: too many wrong guesses for this account or from this address.
    """
    keys = (f"account:{user_name.lower()}", f"address:{address}")
    backoff.check(*keys)
    with read_transaction(engine) as session:
        user = repository.user_by_name(session, user_name)
    if not passwords.matches(password, user.password_hash if user else None):
        backoff.failed(*keys)
        with write_transaction(engine) as session:
            repository.add_audit_entry(session, user_id=user.id if user else None, action="login.failed", address=address)
        raise AuthenticationRequired("user name or password is wrong", remedy="Check both and try again.")
    assert user is not None
    backoff.succeeded(*keys)
    return open_session(engine, user, address=address, user_agent=user_agent)


def open_session(engine: Engine, user: User, *, address: str, user_agent: str = "") -> Login:
    """Open a session for a user who has just proved who they are; every login gets a new token."""
    token = secrets.token_urlsafe(TOKEN_BYTES)
    opened = BrowserSession(
        token_hash=sha256_hex(token), csrf_token=secrets.token_urlsafe(TOKEN_BYTES), user_id=user.id, user_agent=user_agent[:255]
    )
    with write_transaction(engine) as session:
        session.add(opened)
        repository.add_audit_entry(session, user_id=user.id, action="login", address=address)
    return Login(token, opened, user)


def log_out(engine: Engine, identity: Identity) -> None:
    """End the session this request came with."""
    if identity.session_id is not None:
        revoke_session(engine, identity, identity.session_id)


def session_identity(engine: Engine, settings: Settings, token: str, *, address: str) -> Identity | None:
    """Who the cookie's token belongs to; None where the session is unknown or has been idle for too long."""
    with read_transaction(engine) as session:
        found = repository.session_with_user(session, sha256_hex(token))
    if found is None:
        return None
    opened, user = found
    oldest = now() - timedelta(hours=settings.session_idle_hours)
    if opened.last_seen_at < oldest:
        with write_transaction(engine) as session:
            repository.delete_sessions_before(session, oldest)
        return None
    if repository.is_stale(opened.last_seen_at):
        _note_seen(engine, repository.touch_session, opened.id)
    return Identity(user.id, user.name, user.role, scopes_of_role(user.role), address, session_id=opened.id, csrf_token=opened.csrf_token)


def _note_seen(engine: Engine, touch: Callable[[Session, str], None], row_id: str) -> None:
    """Write down that a session or key was used. A request that only reads must not fail because the database takes no writes now."""
    try:
        with write_transaction(engine) as session:
            touch(session, row_id)
    except OperationalError as error:
        log.warning("cannot note the use of %s: %s", row_id, error.orig)


def list_sessions(engine: Engine, identity: Identity) -> list[BrowserSession]:
    with read_transaction(engine) as session:
        return repository.sessions_of(session, identity.user_id)


def revoke_session(engine: Engine, identity: Identity, session_id: str) -> None:
    """End one of the user's sessions, wherever it was opened."""
    with write_transaction(engine) as session:
        if not repository.delete_session(session, session_id, user_id=identity.user_id):
            raise NotFound("no such session", place=session_id, remedy="Look at the list of your sessions.")
        repository.add_audit_entry(session, user_id=identity.user_id, action="session.revoke", subject=session_id, address=identity.address)


def key_identity(engine: Engine, key: str, *, address: str) -> Identity | None:
    """Who an API key belongs to; None where it is malformed, unknown, revoked or expired."""
    match = _API_KEY.fullmatch(key)
    if match is None:
        return None
    with read_transaction(engine) as session:
        found = repository.key_with_user(session, f"key_{match['id']}")
    if found is None or not hmac.compare_digest(found[0].secret_hash, sha256_hex(match["secret"])):
        return None
    api_key, user = found
    if api_key.revoked_at is not None or (api_key.expires_at is not None and api_key.expires_at <= now()):
        return None
    if repository.is_stale(api_key.last_used_at):
        _note_seen(engine, repository.touch_key, api_key.id)
    # A key never holds more than its owner: an administrator made a member loses what their keys had.
    scopes = frozenset(Scope(scope) for scope in api_key.scopes) & scopes_of_role(user.role)
    return Identity(user.id, user.name, user.role, scopes, address, key_id=api_key.id)


def list_keys(engine: Engine, identity: Identity) -> list[ApiKey]:
    with read_transaction(engine) as session:
        return repository.keys_of(session, identity.user_id)


def create_key(
    engine: Engine, identity: Identity, *, name: str, scopes: Iterable[Scope], expires_at: datetime | None = None
) -> tuple[str, ApiKey]:
    """Make a key for the user; returns its text, which is not kept, and the stored row.

    Raises:
        Forbidden: a scope that the user does not hold.
        Unprocessable: an expiry in the past.
    """
    wanted = frozenset(scopes)
    missing = sorted(scope for scope in wanted if not identity.may(scope))
    if missing:
        raise Forbidden(f"you cannot grant {', '.join(missing)}", place="scopes", remedy="Choose scopes that you hold yourself.")
    if expires_at is not None and expires_at <= now():
        raise Unprocessable(f"{expires_at.isoformat()} is past", place="expires_at", remedy="Choose a time in the future.")
    key_id = new_id("key")
    secret = secrets.token_urlsafe(TOKEN_BYTES)
    api_key = ApiKey(
        id=key_id,
        user_id=identity.user_id,
        name=name,
        secret_hash=sha256_hex(secret),
        scopes=sorted(str(scope) for scope in wanted),
        expires_at=expires_at,
    )
    with write_transaction(engine) as session:
        session.add(api_key)
        repository.add_audit_entry(session, user_id=identity.user_id, action="key.create", subject=key_id, address=identity.address)
    return f"lohan_{key_id.removeprefix('key_')}_{secret}", api_key


def revoke_key(engine: Engine, identity: Identity, key_id: str) -> None:
    with write_transaction(engine) as session:
        if not repository.revoke_key(session, key_id, user_id=identity.user_id):
            raise NotFound("no such key", place=key_id, remedy="Look at the list of your keys.")
        repository.add_audit_entry(session, user_id=identity.user_id, action="key.revoke", subject=key_id, address=identity.address)


def bootstrap_identity(engine: Engine) -> Identity:
    """The local administrator whom whoever can read the data folder acts as; made on first use, without a password."""
    with write_transaction(engine) as session:
        user = repository.user_by_name(session, BOOTSTRAP_USER)
        if user is None:
            user = User(name=BOOTSTRAP_USER, password_hash=NO_PASSWORD, role=Role.ADMIN)
            session.add(user)
            session.flush()
            repository.add_audit_entry(session, user_id=user.id, action="user.create", subject=user.name, address="local")
    return Identity(user.id, user.name, user.role, scopes_of_role(user.role), "local")


def create_user(engine: Engine, passwords: PasswordHasher, *, name: str, password: str, role: Role) -> User:
    """Make a user from the command line.

    Raises:
        Unprocessable: the name is taken.
    """
    user = User(name=name, password_hash=passwords.hash(password), role=role)
    with write_transaction(engine) as session:
        if repository.user_by_name(session, name) is not None:
            raise Unprocessable(f"there is a user {name!r} already", place="user_name", remedy="Choose another name.")
        session.add(user)
        session.flush()
        repository.add_audit_entry(session, user_id=user.id, action="user.create", subject=name, address="local")
    return user


def reset_password(engine: Engine, passwords: PasswordHasher, *, name: str, password: str) -> None:
    """Set a new password and end the user's sessions.

    Raises:
        NotFound: no such user.
    """
    hashed = passwords.hash(password)
    with write_transaction(engine) as session:
        user = repository.user_by_name(session, name)
        if user is None:
            raise NotFound(f"there is no user {name!r}", place="user_name", remedy="Check the spelling.")
        user.password_hash = hashed
        repository.delete_sessions_of(session, user.id)
        repository.add_audit_entry(session, user_id=user.id, action="password.reset", subject=name, address="local")
