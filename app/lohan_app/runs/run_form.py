"""The new-run form: what its fields mean, and their way into a `RunRequest` or `PlanRequest`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lohan.config import EngineSection, Precision, TrainingSection
from lohan.units import GIB
from lohan_app.forms import FormError, read_form, without_blanks
from lohan_app.runs.schemas import PlanRequest, RunChange, RunDetail, RunRequest
from lohan_app.storage.retention import KEEP_STATES_DAYS
from lohan_app.templating import format_rate

TRAINING_FIELDS = (
    "batch_size",
    "sequence_length",
    "learning_rate",
    "epochs",
    "max_steps",
    "precision",
    "schedule",
    "warmup_steps",
    "weight_decay",
    "clip",
    "max_gradient_norm",
    "evaluation_rows",
    "seed",
)
ENGINE_FIELDS = ("device", "micro_batch_size", "durability", "snapshot_minutes")
# Form field -> field of the engine's section. People think in GiB, the engine in bytes.
GIB_FIELDS = {"gpu_memory_gib": "gpu_memory_bytes", "host_memory_gib": "host_memory_bytes"}
WHOLE_NUMBER = re.compile(r"-?[0-9]{1,9}")
MORE_FIELDS = frozenset(
    {
        *("schedule", "warmup_steps", "weight_decay", "clip", "max_gradient_norm", "evaluation_rows", "seed"),
        *("micro_batch_size", "device", "durability", "snapshot_minutes", KEEP_STATES_DAYS, *GIB_FIELDS),
    }
)
"""Fields that lie under "More settings"."""


def default_values(precision: Precision = Precision.BF16) -> dict[str, Any]:
    """The form as it opens: the engine's own defaults, and the precision that suits the machine."""
    training, engine = TrainingSection(), EngineSection()
    return {
        "base_model_id": "",
        "dataset_id": "",
        "name": "",
        "skip_bad_rows": False,
        "batch_size": training.batch_size,
        "sequence_length": training.sequence_length,
        "learning_rate": format_rate(training.learning_rate),
        "epochs": format_rate(training.epochs),
        "max_steps": "",
        "precision": str(precision),
        "schedule": str(training.schedule),
        "warmup_steps": training.warmup_steps,
        "weight_decay": format_rate(training.weight_decay),
        "clip": str(training.clip),
        "max_gradient_norm": format_rate(training.max_gradient_norm),
        "evaluation_rows": training.evaluation_rows,
        "seed": training.seed,
        "device": engine.device,
        "micro_batch_size": "",
        "durability": str(engine.durability),
        "snapshot_minutes": format_rate(engine.snapshot_minutes),
        "gpu_memory_gib": "",
        "host_memory_gib": "",
        KEEP_STATES_DAYS: "",
    }


def values_of(run: RunDetail) -> dict[str, Any]:
    """The form as it would have been filled in for `run`; what was left open stays open."""
    training, engine = run.settings.get("training", {}), run.settings.get("engine", {})
    values: dict[str, Any] = {"base_model_id": run.base_model_id, "dataset_id": run.dataset_id, "name": run.name}
    values["skip_bad_rows"] = run.skip_bad_rows
    for section, names in ((training, TRAINING_FIELDS), (engine, ENGINE_FIELDS)):
        values |= {name: _as_typed(section[name]) for name in names if section.get(name) is not None}
    values[KEEP_STATES_DAYS] = run.settings.get(KEEP_STATES_DAYS, "")
    for name, source in GIB_FIELDS.items():
        if engine.get(source) is not None:
            values[name] = f"{engine[source] / GIB:g}"
    return values


def _as_typed(value: Any) -> Any:
    return format_rate(value) if isinstance(value, float) else value


def kept_values(form: Mapping[str, str]) -> dict[str, Any]:
    """The form as it was sent, to be shown again."""
    sent = {name: form[name] for name in default_values() if name in form and name != "skip_bad_rows"}
    return default_values() | sent | {"skip_bad_rows": form.get("skip_bad_rows") == "true"}


def _sections(form: Mapping[str, str]) -> dict[str, Any]:
    filled = without_blanks(form)
    engine: dict[str, Any] = {name: filled[name] for name in ENGINE_FIELDS if name in filled}
    faults = {}
    for name, target in GIB_FIELDS.items():
        if name not in filled:
            continue
        try:
            engine[target] = max(0, int(float(filled[name]) * GIB))
        except (ValueError, OverflowError):
            faults[name] = f"not a number (found {filled[name][:100]})"
    if faults:
        raise FormError(faults)
    return {"training": {name: filled[name] for name in TRAINING_FIELDS if name in filled}, "engine": engine}


def read_plan_request(form: Mapping[str, str]) -> PlanRequest:
    """Raises FormError."""
    wanted = {"base_model_id": form.get("base_model_id", ""), "dataset_id": form.get("dataset_id") or None}
    return read_form(PlanRequest, wanted | _sections(form))


def read_priority(form: Mapping[str, str]) -> int:
    """Raises FormError."""
    return read_form(RunChange, {"priority": whole_number(form.get("priority", "").strip())}).priority


def read_run_request(form: Mapping[str, str], *, fallback_name: str) -> RunRequest:
    """Raises FormError."""
    wanted = {
        "base_model_id": form.get("base_model_id", ""),
        "dataset_id": form.get("dataset_id", ""),
        "name": form.get("name", "").strip() or fallback_name,
        "skip_bad_rows": form.get("skip_bad_rows") == "true",
    }
    return read_form(RunRequest, wanted | _sections(form) | _kept_days(form))


def _kept_days(form: Mapping[str, str]) -> dict[str, Any]:
    text = form.get(KEEP_STATES_DAYS, "").strip()
    return {KEEP_STATES_DAYS: whole_number(text)} if text else {}


def whole_number(text: str) -> int | str:
    """A whole number as such, where requests take no text for one; anything else as it was sent, to be refused with the field's name."""
    return int(text) if WHOLE_NUMBER.fullmatch(text) else text
