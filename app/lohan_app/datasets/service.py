"""Datasets: uploads, validation, deletion."""

from __future__ import annotations

from sqlalchemy import Engine

from lohan_app.settings import Settings


def sweep_uploads(settings: Settings, engine: Engine) -> None:
    """Remove what uploads that never finished have left behind; called once, at start."""
