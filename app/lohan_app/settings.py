"""The service's settings: environment variables `LOHAN_*`, read once, one typed object.

A secret may come from a file: `LOHAN_DATABASE_URL_FILE=/run/secrets/database_url` is read in place of `LOHAN_DATABASE_URL`.
docs/settings.md lists every setting; tests/test_docs.py holds the two together.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from lohan.config import UnsafeFilesystems
from lohan.errors import ConfigError, StorageError

ENVIRONMENT_PREFIX = "LOHAN_"
UNIX_SOCKET_PATH_BYTES = 107  # sun_path holds 108 bytes with the closing NUL (unix(7))
DATA_FOLDERS = ("db", "broker", "secrets", "uploads", "datasets", "models", "runs", "profiles", "cache", "backups", "trash", "logs")


class _FileSource(PydanticBaseSettingsSource):
    """Values of `LOHAN_<NAME>_FILE`: the file's text without the last newline. A missing file is an error, never an empty secret."""

    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:
        variable = f"{ENVIRONMENT_PREFIX}{field_name.upper()}_FILE"
        path = os.environ.get(variable)
        if not path:
            return None, field_name, False
        try:
            return Path(path).read_text(encoding="utf-8").removesuffix("\n"), field_name, False
        except OSError as error:
            raise ConfigError(f"cannot read {path!r}: {error.strerror}", place=variable, remedy="Name a readable file.") from error

    def __call__(self) -> dict[str, Any]:
        values = {name: self.get_field_value(field, name)[0] for name, field in self.settings_cls.model_fields.items()}
        return {name: value for name, value in values.items() if value is not None}


class Settings(BaseSettings):
    """Everything an administrator can set. Folders given as lists are separated by `:` as in PATH."""

    model_config = SettingsConfigDict(env_prefix=ENVIRONMENT_PREFIX, frozen=True, extra="ignore", use_attribute_docstrings=True)

    data_dir: Path = Path("data")
    """The data folder: database, uploads, datasets, runs, broker."""
    host: str = "127.0.0.1"
    """Address the web server listens on."""
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    """Port the web server listens on."""
    allowed_hosts: Annotated[tuple[str, ...], NoDecode] = ()
    """Host names, besides IP addresses, localhost and this machine's own names, under which browsers may reach the service."""
    database_url: SecretStr | None = None
    """SQLAlchemy URL; unset means SQLite in the data folder. PostgreSQL: `postgresql+psycopg://user:password@host/name`."""
    broker_url: SecretStr | None = None
    """URL of a Redis-protocol server; unset means `lohan up` starts one of its own in the data folder."""
    model_dirs: Annotated[tuple[Path, ...], NoDecode] = ()
    """Folders whose sub-folders and GGUF files can be registered as base models."""
    state_dirs: Annotated[tuple[Path, ...], NoDecode] = ()
    """Folders for master weights and moments, one per drive; unset means `states` in the data folder."""
    unsafe_filesystems: UnsafeFilesystems = UnsafeFilesystems.REFUSE
    """Whether these may lie on file systems that are no place for states: `refuse` or `allow`, for trials."""
    state_reserve_bytes: Annotated[int, Field(ge=0)] = 1024**3
    """Space on every state directory's drive that is never given to runs; the engine leaves 1 GiB alone in any case."""
    keep_states_days: Annotated[int, Field(ge=0, le=3650)] = 0
    """Days for which states of a run that has succeeded are kept after its export."""
    keep_failed_states_days: Annotated[int, Field(ge=0, le=3650)] = 7
    """Days for which a failed or cancelled run can be gone on from."""
    trash_days: Annotated[int, Field(ge=0, le=3650)] = 7
    """Days for which the result and notes of a deleted run stay in the trash, where nothing needs their room."""
    user_quota_bytes: Annotated[int, Field(ge=1)] | None = None
    """What one member's datasets, results and states may hold; unset means no limit."""
    devices: Annotated[tuple[str, ...], NoDecode] = ()
    """Devices runs may use: GPU UUIDs or `cpu:N`; unset means every GPU, or `cpu:0` where there is none."""
    upload_limit_bytes: Annotated[int, Field(ge=1)] = 2 * 1024**3
    """Largest dataset file that is taken."""
    session_idle_hours: Annotated[int, Field(ge=1, le=24 * 90)] = 24 * 7
    """A browser session ends after this long without a request."""
    start_silence_seconds: Annotated[float, Field(gt=0)] = 3600
    """A trainer that has not come to its first step and writes no event for this long is killed and started again."""
    step_silence_seconds: Annotated[float, Field(gt=0)] = 1800
    """The same from its first step on; ten steps, where these take longer."""
    worker_memory_bytes: Annotated[int, Field(ge=256 * 1024**2)] = 4 * 1024**3
    """Memory limit of the child processes that read uploaded files."""
    worker_cpu_seconds: Annotated[int, Field(ge=1)] = 1800
    """CPU-time limit of the child processes that read uploaded files."""

    @field_validator("allowed_hosts", "devices", mode="before")
    @classmethod
    def _split_names(cls, value: object) -> object:
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value

    @field_validator("model_dirs", "state_dirs", mode="before")
    @classmethod
    def _split_folders(cls, value: object) -> object:
        return tuple(Path(part).absolute() for part in value.split(":") if part) if isinstance(value, str) else value

    @field_validator("data_dir")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        return value.absolute()

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: Any, env_settings: Any, dotenv_settings: Any, file_secret_settings: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, _FileSource(settings_cls), env_settings

    @property
    def sqlalchemy_url(self) -> str:
        if self.database_url is not None:
            return self.database_url.get_secret_value()
        return f"sqlite:///{self.data_dir / 'db' / 'lohan.sqlite3'}"

    @property
    def broker_socket(self) -> Path:
        """Unix socket of the broker that `lohan up` starts; in a short folder of its own where the data folder's path is too long."""
        path = self.data_dir / "broker" / "broker.sock"
        if len(os.fsencode(path)) <= UNIX_SOCKET_PATH_BYTES:
            return path
        digest = hashlib.sha256(os.fsencode(self.data_dir)).hexdigest()[:16]
        # A fixed place: every process that shares the data folder has to find it, whatever its TMPDIR. `broker.prepare` checks its owner.
        return Path(f"/tmp/lohan-{os.getuid()}-{digest}/broker.sock")  # noqa: S108

    @property
    def celery_broker_url(self) -> str:
        if self.broker_url is not None:
            return self.broker_url.get_secret_value()
        return f"redis+socket://{quote(str(self.broker_socket))}"

    @property
    def state_folders(self) -> tuple[Path, ...]:
        return self.state_dirs or (self.data_dir / "states",)

    @property
    def profiles_folder(self) -> Path:
        """Where `lohan profile` keeps what it measured of this machine."""
        return self.data_dir / "profiles"

    def run_folder(self, run_id: str) -> Path:
        return self.data_dir / "runs" / run_id

    def make_folders(self) -> None:
        """Create the data folder's rooms, readable by this user alone.

        Raises:
            StorageError: one of them cannot be made.
        """
        try:
            for folder in (*(self.data_dir / name for name in DATA_FOLDERS), *self.state_folders):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            remedy = "Give this user the folder above it, or set LOHAN_DATA_DIR and LOHAN_STATE_DIRS to others."
            raise StorageError.of(error, "this folder cannot be made", place=error.filename, remedy=remedy) from error


def load_settings(**overrides: Any) -> Settings:
    """Read the settings from the environment.

    Raises:
        ConfigError: a variable has a value that is not allowed; it is named with its value.
    """
    try:
        return Settings(**overrides)
    except ValidationError as error:
        faults = "; ".join(
            f"{ENVIRONMENT_PREFIX}{'_'.join(str(part) for part in fault['loc']).upper()}={fault['input']!r}: {fault['msg']}"
            for fault in error.errors()
        )
        raise ConfigError(faults, place="environment", remedy="See docs/settings.md.") from error
