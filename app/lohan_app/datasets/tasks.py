"""Celery tasks on datasets."""

from __future__ import annotations

from lohan_app.datasets.validation import validate_dataset
from lohan_app.worker.celery import task, worker_engine, worker_settings


@task("datasets.validate")
def validate(dataset_id: str) -> None:
    """Check an uploaded file row by row."""
    validate_dataset(worker_settings(), worker_engine(), dataset_id)
