"""First run: a one-time token, known to whoever can read the data folder, makes the first administrator exactly once."""

from __future__ import annotations

import contextlib
import hmac
import os
import re
import secrets
from pathlib import Path

from sqlalchemy import Engine
from sqlalchemy.exc import IntegrityError

from lohan_app.auth import repository
from lohan_app.auth.passwords import PasswordHasher, check_new_password
from lohan_app.db import read_transaction, write_transaction
from lohan_app.entities import Role, SetupClaim, User
from lohan_app.errors import Conflict, Forbidden, Unprocessable
from lohan_app.settings import Settings

# Names appear in logs, commands and addresses; this alphabet needs no quoting in any of them.
USER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
BOOTSTRAP_USER = "bootstrap"


def token_path(settings: Settings) -> Path:
    return settings.data_dir / "secrets" / "setup_token"


def is_set_up(engine: Engine) -> bool:
    with read_transaction(engine) as session:
        return repository.setup_is_claimed(session)


def ensure_setup_token(settings: Settings, engine: Engine) -> str | None:
    """The one-time token, made now if there is none; None once the first administrator exists.

    The file (mode 0600) is made whole under another name and linked into place, so that of two processes both read the same token.
    """
    path = token_path(settings)
    if is_set_up(engine):
        path.unlink(missing_ok=True)
        return None
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_urlsafe(32))
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
        draft.unlink()
    return path.read_text(encoding="ascii").strip()


def setup_url(settings: Settings, token: str) -> str:
    """Where a browser uses the token; a wildcard address is shown as the local one."""
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(settings.host, settings.host)  # noqa: S104 - read, not bound
    return f"http://{host}:{settings.port}/setup?token={token}"


def token_matches(settings: Settings, token: str) -> bool:
    """Compare in constant time; false when there is no token file (set up already)."""
    try:
        expected = token_path(settings).read_bytes().strip()
    except FileNotFoundError:
        return False
    return hmac.compare_digest(expected, token.encode())


def check_user_name(name: str) -> str:
    """Raises Unprocessable where `name` cannot be a user's name."""
    if USER_NAME.fullmatch(name) is None or name.lower() == BOOTSTRAP_USER:
        raise Unprocessable(
            f"{name[:64]!r} cannot be a user name",
            place="user_name",
            remedy="Use 1 to 64 letters, digits, dots, dashes or underscores, beginning with a letter or digit.",
        )
    return name


def create_first_admin(
    settings: Settings, engine: Engine, passwords: PasswordHasher, *, token: str, user_name: str, password: str, address: str
) -> User:
    """Make the first administrator.

    Raises:
        Forbidden: the token is not the one in the file.
        Conflict: somebody else was first.
        Unprocessable: the name or the password cannot be used.
    """
    taken = Conflict("the first administrator exists already", remedy="Log in, or ask the administrator for an account.")
    if is_set_up(engine):
        raise taken
    if not token_matches(settings, token):
        raise Forbidden(
            "the set-up token is not valid", place="token", remedy=f"It stands in {token_path(settings).name} in the data folder's secrets."
        )
    check_user_name(user_name)
    check_new_password(password, user_name=user_name)
    user = User(name=user_name, password_hash=passwords.hash(password), role=Role.ADMIN)
    try:
        with write_transaction(engine) as session:
            if repository.setup_is_claimed(session):
                raise taken
            session.add(user)
            session.flush()
            session.add(SetupClaim(id=1, user_id=user.id))
            session.flush()
            repository.add_audit_entry(session, user_id=user.id, action="setup", subject=user.name, address=address)
    except IntegrityError as error:
        # PostgreSQL lets two requests get this far; the claim's primary key lets one through.
        raise taken from error
    token_path(settings).unlink(missing_ok=True)
    return user
