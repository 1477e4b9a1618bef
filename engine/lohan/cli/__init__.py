"""The engine's commands: `lohan train`, `lohan export`, `lohan chat`, `lohan plan`, `lohan profile`, `lohan bench`.

Importing them loads no torch; each imports what it needs when it is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer


def register(application: typer.Typer) -> None:
    """Add the engine's commands to a command line."""
    from lohan.cli import bench, chat, commands, export, plan, profile

    application.command("train")(commands.train)
    application.command("export")(export.export)
    application.command("chat")(chat.chat)
    application.command("plan")(plan.plan)
    application.command("profile")(profile.profile)
    application.add_typer(bench.make_application(), name="bench")
