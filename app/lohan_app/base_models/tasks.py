"""Celery tasks on base models."""

from __future__ import annotations

from lohan_app.base_models.inspection import inspect_model
from lohan_app.worker.celery import task, worker_engine, worker_settings


@task("base_models.inspect")
def inspect(base_model_id: str) -> None:
    """Look into a registered model."""
    inspect_model(worker_settings(), worker_engine(), base_model_id)
