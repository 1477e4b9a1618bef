"""What the web process holds for as long as it runs: settings, the database, and the few things kept in memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated

from fastapi import Depends, Request
from sqlalchemy import Engine

from lohan_app.auth.passwords import LoginBackoff, PasswordHasher
from lohan_app.db import create_db_engine
from lohan_app.entities.base import now
from lohan_app.hardware.service import HardwareCache
from lohan_app.runs.stream import EventHub
from lohan_app.settings import Settings


@dataclass(slots=True)
class AppContext:
    """Owned by the application object; handlers get it as the dependency `Context`, never as a global."""

    settings: Settings
    engine: Engine
    hardware: HardwareCache
    events: EventHub
    passwords: PasswordHasher = field(default_factory=PasswordHasher)
    login_backoff: LoginBackoff = field(default_factory=LoginBackoff)
    started_at: datetime = field(default_factory=now)


def make_context(settings: Settings) -> AppContext:
    engine = create_db_engine(settings)
    return AppContext(settings, engine, HardwareCache(settings), EventHub(engine, settings))


def get_context(request: Request) -> AppContext:
    context = request.app.state.context
    assert isinstance(context, AppContext)
    return context


Context = Annotated[AppContext, Depends(get_context)]
