"""The database's tables, one class each. "Model" is kept for language models: a table row is an entity."""

from lohan_app.entities.accounts import ApiKey, AuditEntry, BrowserSession, IdempotencyKey, Role, SetupClaim, User
from lohan_app.entities.base import Entity, new_id
from lohan_app.entities.base_models import BaseModel, BaseModelSource, BaseModelState
from lohan_app.entities.datasets import Dataset, DatasetFormat, DatasetRowError, DatasetState
from lohan_app.entities.runs import (
    TERMINAL_STATES,
    DeviceUse,
    Metric,
    PauseCause,
    Run,
    RunCurve,
    RunEvent,
    RunKind,
    RunMetric,
    RunState,
    Wanted,
)

__all__ = [
    "TERMINAL_STATES",
    "ApiKey",
    "AuditEntry",
    "BaseModel",
    "BaseModelSource",
    "BaseModelState",
    "BrowserSession",
    "Dataset",
    "DatasetFormat",
    "DatasetRowError",
    "DatasetState",
    "DeviceUse",
    "Entity",
    "IdempotencyKey",
    "Metric",
    "PauseCause",
    "Role",
    "Run",
    "RunCurve",
    "RunEvent",
    "RunKind",
    "RunMetric",
    "RunState",
    "SetupClaim",
    "User",
    "Wanted",
    "new_id",
]
