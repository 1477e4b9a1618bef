"""Where commands look for states and profiles that are named by nobody: in the service's data folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

StateDirectories = Annotated[
    list[Path] | None,
    typer.Option(
        "--directory",
        metavar="FOLDER",
        envvar="LOHAN_STATE_DIRS",
        help="Where states will lie; again for more drives. Unset: states in the data folder.",
    ),
]
ProfileFolder = Annotated[
    Path | None, typer.Option("--profiles", metavar="FOLDER", help="Where profiles are kept. Unset: profiles in the data folder.")
]


def state_directories(named: Sequence[Path] | None) -> tuple[Path, ...]:
    """Those that were named, else the data folder's."""
    return tuple(folder.absolute() for folder in named or (_data_folder() / "states",))


def profile_folder(named: Path | None) -> Path:
    """The one that was named, else the data folder's."""
    return named or _data_folder() / "profiles"


def _data_folder() -> Path:
    """As the service has it, which is not asked: it is not part of the engine."""
    return Path(os.environ.get("LOHAN_DATA_DIR", "data")).absolute()
