"""What the API gives about storage."""

from __future__ import annotations

from datetime import datetime

from pydantic import BaseModel

from lohan_app.storage.report import Kind


class Drive(BaseModel):
    """A file system that state directories or the data folder lie on."""

    directories: list[str]
    """Those of them that share it."""
    total_bytes: int
    free_bytes: int
    """Available to this service now."""
    reserve_bytes: int
    """Never given to runs."""
    reserved_bytes: int
    """Promised to runs that have not written their states yet."""
    problem: str | None = None
    """Why it cannot be looked at, e.g. because it is not mounted."""


class Holding(BaseModel):
    """So much held by one thing in one place."""

    kind: Kind
    id: str
    place: str
    bytes: int
    name: str | None = None
    """What people call it; null where the database does not know it."""
    owner_id: str | None = None
    owner_name: str | None = None
    state: str | None = None
    """Of the run or dataset."""
    is_known: bool = True
    """False for what the database does not know: it is left alone until `lohan gc --unknown`."""
    expires_at: datetime | None = None
    """When it is removed by itself; null: when somebody deletes it, or its run ends."""
    why: str = ""
    """Why it is kept till then."""
    can_free: bool = False
    """Whether `DELETE /runs/ID/states` would free it now."""


class UserUsage(BaseModel):
    """What one user's datasets, results and states hold, and what their unfinished runs are still going to."""

    user_id: str
    user_name: str
    bytes: int
    quota_bytes: int | None
    """Null: no limit."""


class TrashedRun(BaseModel):
    """A deleted run whose result, log and curve can still be had back: `POST /runs/ID/restore`."""

    id: str
    name: str
    owner_id: str
    owner_name: str
    state: str
    """In which it ended."""
    deleted_at: datetime
    emptied_at: datetime
    """When it is removed for good; earlier where something else needs the room."""
    bytes: int | None = None
    """Null before the worker has measured it."""


class StorageView(BaseModel):
    """Who holds what. Members see their own things, administrators all."""

    measured_at: datetime | None
    """When `holdings` were measured; null before the worker has done so for the first time."""
    drives: list[Drive]
    holdings: list[Holding]
    trash: list[TrashedRun]
    """Deleted last first."""
    users: list[UserUsage]
