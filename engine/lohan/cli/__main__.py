"""`python -m lohan.cli`: the engine's commands without the service's."""

from __future__ import annotations

import typer

from lohan.cli import register


def main() -> None:
    """Run the command that the arguments name."""
    application = typer.Typer(name="lohan", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
    register(application)
    application()


if __name__ == "__main__":
    main()
