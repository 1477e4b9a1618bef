"""The `lohan` command: the engine's commands and the service's. Each is imported when it is called, so `lohan train` loads no web code."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Annotated, Any

import typer

from lohan.cli import register
from lohan.errors import ConfigError, LohanError

ABOUT = "Fine-tune all parameters of models far larger than the GPU, on one server."
EXIT_ERROR, EXIT_BAD_CONFIG = 1, 2
# What `pip install 'lohan[app]'` brings and the base install does not, by the names they are imported under.
APP_PACKAGES = frozenset(
    {"alembic", "celery", "fastapi", "kombu", "multipart", "psycopg", "pwdlib", "pydantic_settings", "pysqlite3"}
    | {"python_multipart", "redis", "sqlalchemy", "starlette", "uvicorn"}
)
# The rest of the line belongs to the command that is imported then.
_FORWARDED = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

Host = Annotated[str | None, typer.Option(help="Address to listen on (LOHAN_HOST).")]
Port = Annotated[int | None, typer.Option(help="Port to listen on (LOHAN_PORT).")]


def up(host: Host = None, port: Port = None) -> None:
    """Start the appliance: broker, worker and web server. Prints the address first; Ctrl-C stops it, runs go on."""
    with _app_extra():
        from lohan_app.settings import load_settings
        from lohan_app.worker.up import run_up

    run_up(load_settings(**_named(host=host, port=port)))


def web(host: Host = None, port: Port = None) -> None:
    """Start only the web server, for containers where `lohan worker` runs in another."""
    with _app_extra():
        from lohan_app.settings import load_settings
        from lohan_app.worker.up import run_web

    run_web(load_settings(**_named(host=host, port=port)))


def _named(**values: Any) -> dict[str, Any]:
    """The flags that were given; the others leave the settings alone."""
    return {name: value for name, value in values.items() if value is not None}


def worker() -> None:
    """Start only the worker: the queue's processes and the reconciler."""
    with _app_extra():
        from lohan_app.settings import load_settings
        from lohan_app.worker.main import run_worker

    run_worker(load_settings())


def doctor(json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False) -> None:
    """Say what this machine has, what was chosen, and what is missing."""
    with _app_extra():
        from lohan_app.settings import load_settings
        from lohan_app.worker.doctor import run_doctor

    raise typer.Exit(run_doctor(load_settings(), as_json=json))


def gc(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    unknown: Annotated[bool, typer.Option("--unknown", help="Remove also what the database does not know.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Say who holds what on the drives, and remove what has expired."""
    with _app_extra():
        from lohan_app.settings import load_settings
        from lohan_app.worker.gc import Mode, run_gc

    run_gc(load_settings(), Mode.LOOK if dry_run else Mode.REMOVE, with_unknown=unknown, as_json=json)


def api_key(context: typer.Context) -> None:
    """Make API keys from the command line."""
    _forward("api-key", context)


def admin(context: typer.Context) -> None:
    """Make users and reset passwords from the command line."""
    _forward("admin", context)


def migrate(context: typer.Context) -> None:
    """Bring the database to the newest schema."""
    _forward("migrate", context)


def _forward(name: str, context: typer.Context) -> None:
    """Run a command of `lohan_app.auth.commands`, which is imported only now."""
    with _app_extra():
        commands: Any = import_module("lohan_app.auth.commands")
    application = _application()
    commands.register(application)
    application(args=[name, *context.args], prog_name="lohan", standalone_mode=True)


@contextmanager
def _app_extra() -> Iterator[None]:
    """Turns the absence of the service's packages into words.

    Raises:
        ConfigError: one of them is not installed; it is named.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in APP_PACKAGES:
            raise
        raise ConfigError(
            f"this command needs {package}, which is not installed",
            place="lohan[app]",
            remedy="Run pip install 'lohan[app]'. Without it, `lohan train` works.",
        ) from error


def _application() -> typer.Typer:
    # Errors for users are printed by `main`; others show Python's own traceback.
    return typer.Typer(name="lohan", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=ABOUT)


def build() -> typer.Typer:
    """The whole command line."""
    application = _application()
    register(application)
    for command in (up, web, worker, doctor, gc):
        application.command()(command)
    for name, forwarder in (("api-key", api_key), ("admin", admin), ("migrate", migrate)):
        application.command(name, context_settings=_FORWARDED)(forwarder)
    return application


def main() -> None:
    """Console script. A user's error is one sentence on stderr; exit code 2 for a setting, 1 for anything else."""
    try:
        build()()
    except LohanError as error:
        print(f"lohan: {error}", file=sys.stderr)
        sys.exit(EXIT_BAD_CONFIG if isinstance(error, ConfigError) else EXIT_ERROR)


if __name__ == "__main__":
    main()
