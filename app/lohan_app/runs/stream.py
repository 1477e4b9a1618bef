"""Server-sent events of runs: one poller per web process feeds every open stream."""

from __future__ import annotations

from sqlalchemy import Engine

from lohan_app.settings import Settings


class EventHub:
    """Owned by the web process's event loop."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine = engine
        self._settings = settings

    async def close(self) -> None:
        """End every stream."""
