"""`lohan api-key`, `lohan admin`, `lohan migrate`: for whoever can read the data folder."""

from __future__ import annotations

import getpass
import secrets
import sys
from typing import Annotated

import typer
from sqlalchemy import Engine

from lohan_app.auth import service
from lohan_app.auth.passwords import PasswordHasher, check_new_password
from lohan_app.auth.schemas import Scope
from lohan_app.auth.setup import check_user_name
from lohan_app.db import create_db_engine, migrate
from lohan_app.entities import Role
from lohan_app.errors import Unprocessable
from lohan_app.settings import load_settings


def _database() -> Engine:
    settings = load_settings()
    settings.make_folders()
    migrate(settings)
    return create_db_engine(settings)


def create_api_key(
    name: Annotated[str, typer.Argument(help="What the key is for.")],
    scopes: Annotated[str, typer.Option(help="Comma-separated: read, datasets, runs, admin.")] = "read,datasets,runs",
) -> None:
    """Print a new API key of the local `bootstrap` administrator; it is shown this once."""
    try:
        wanted = [Scope(scope.strip()) for scope in scopes.split(",") if scope.strip()]
    except ValueError as error:
        raise Unprocessable(f"{scopes!r}: {error}", place="--scopes", remedy="Use read, datasets, runs, admin.") from error
    if not wanted:
        raise Unprocessable("no scope is named", place="--scopes", remedy="Use read, datasets, runs, admin.")
    engine = _database()
    key, _ = service.create_key(engine, service.bootstrap_identity(engine), name=name[:100], scopes=wanted)
    typer.echo(key)


def _read_password(user_name: str) -> str:
    """From the terminal without an echo, or the first line of a pipe; an empty answer gets a random one, which is printed."""
    prompt = "New password (empty for a random one): "
    password = getpass.getpass(prompt) if sys.stdin.isatty() else sys.stdin.readline().rstrip("\n")
    if not password:
        password = secrets.token_urlsafe(15)
        typer.echo(f"password: {password}")
    check_new_password(password, user_name=user_name)
    return password


def reset_password(name: Annotated[str, typer.Argument(help="The user's name.")]) -> None:
    """Set a user's password and end all their sessions."""
    engine = _database()
    service.reset_password(engine, PasswordHasher(), name=name, password=_read_password(name))
    typer.echo(f"new password set for {name}")


def create_user(
    name: Annotated[str, typer.Argument(help="The user's name.")],
    role: Annotated[Role, typer.Option(help="What the user may do.")] = Role.MEMBER,
) -> None:
    """Make a user."""
    check_user_name(name)
    engine = _database()
    service.create_user(engine, PasswordHasher(), name=name, password=_read_password(name), role=role)
    typer.echo(f"user {name} made ({role})")


def migrate_database() -> None:
    """Bring the database to the newest schema."""
    settings = load_settings()
    settings.make_folders()
    migrate(settings)
    typer.echo("the database is up to date")


def register(app: typer.Typer) -> None:
    """Mount these commands on the `lohan` command line."""
    keys = typer.Typer(help="API keys.", no_args_is_help=True)
    keys.command("create")(create_api_key)
    # A callback keeps `create` a sub-command: a group of one command would otherwise be that command.
    keys.callback()(lambda: None)
    app.add_typer(keys, name="api-key")
    admin = typer.Typer(help="Users, from the command line.", no_args_is_help=True)
    admin.command("reset-password")(reset_password)
    admin.command("create-user")(create_user)
    app.add_typer(admin, name="admin")
    app.command("migrate")(migrate_database)
