"""What the API gives about the service itself."""

from __future__ import annotations

from datetime import datetime

from pydantic import BaseModel


class Health(BaseModel):
    """The process answers."""

    status: str = "ok"


class Readiness(BaseModel):
    """Whether requests can be served; the broker is reported but not needed, as its messages are only wake-ups."""

    ready: bool
    database: str
    """`ok`, or what is wrong with it."""
    migrations: str
    """`ok`, or which revision is there and which is needed."""
    broker: str
    """`ok`, or what is wrong with it."""


class SystemView(BaseModel):
    """Versions, the parts the service talks to, and what was chosen."""

    version: str
    python: str
    started_at: datetime
    database: str
    """Kind and version, e.g. `SQLite 3.53.4`."""
    database_state: str
    migrations_state: str
    broker_state: str
    workers: list[str]
    """Names of the Celery workers that answered."""
    upload_limit_bytes: int
    model_dirs: list[str]
    """Names of the folders in LOHAN_MODEL_DIRS."""
    choices: list[str]
