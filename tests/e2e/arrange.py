"""Things in the database for pages to show, as the service and the supervisor would have written them."""

from __future__ import annotations

import math
from typing import Any

from fixtures.profiles import profile_of

from lohan.events import Event, EventType
from lohan.hardware.probe import probe
from lohan.hardware.profile_files import facts_of_device, save_profile
from lohan.planning.plan import CHUNK_PARAMETERS, Plan, PlanItem, TierPlan
from lohan.planning.tiers import Tier
from lohan.planning.workload import UnitKind, UnitWorkload, Workload
from lohan.units import GIB
from lohan_app.db import write_transaction
from lohan_app.entities import (
    BaseModel,
    BaseModelSource,
    BaseModelState,
    Dataset,
    DatasetFormat,
    DatasetRowError,
    DatasetState,
    Run,
    RunState,
)
from lohan_app.entities.base import new_id, now
from lohan_app.runs import repository
from lohan_app.worker.housekeeping import Housekeeper
from tests.e2e.server import Site, Visitor

HOSTILE = "<img src=x onerror=alert(1)> \u202egnp.exe"
"""A name as an attacker would choose it: markup, and a mark that turns the rest of the line around."""
HOSTILE_SHOWN = "<img src=x onerror=alert(1)> \\u202egnp.exe"
SETTINGS = {"training": {"batch_size": 4, "sequence_length": 64, "learning_rate": 1e-3, "max_steps": 40}, "engine": {"device": "cpu"}}


def add_dataset(site: Site, visitor: Visitor, *, bad_rows: int = 0, **values: Any) -> Dataset:
    """A checked dataset of three rows, with `bad_rows` bad ones besides."""
    rows = [
        {"line": line, "messages": [{"role": "user", "content": f"Question {line}?"}, {"role": "assistant", "content": f"Answer {line}."}]}
        for line in (1, 2, 3)
    ]
    defaults: dict[str, Any] = {
        "name": "dialogs",
        "state": DatasetState.HAS_BAD_ROWS if bad_rows else DatasetState.READY,
        "format": DatasetFormat.MESSAGES,
        "size_bytes": 1234,
        "row_count": 3,
        "bad_row_count": bad_rows,
        "preview": {"rows": rows},
        "validated_at": now(),
    }
    dataset = Dataset(owner_id=visitor.user.id, **(defaults | values))
    with write_transaction(site.engine) as session:
        session.add(dataset)
        session.flush()
        session.add_all(
            DatasetRowError(dataset_id=dataset.id, line=4 + index, message=f"`messages` is missing ({index})", excerpt='{"text": "x"}')
            for index in range(min(bad_rows, 1000))
        )
    return dataset


def tiny_workload() -> Workload:
    """What a traced model of two small blocks looks like."""
    blocks = tuple(UnitWorkload(name=f"model.layers.{index}", kind=UnitKind.BLOCK, parameters=40_000) for index in range(2))
    return Workload(
        architecture="llama",
        units=(UnitWorkload(name="model.embed_tokens", kind=UnitKind.EMBEDDING, parameters=12_288), *blocks),
        hidden_size=32,
        vocabulary_size=384,
        context_length=256,
        tied_embeddings=True,
        block_saved_elements_per_token=800,
    )


def measure(site: Site, *workloads: Workload) -> None:
    """Leave a made-up profile of this machine's CPU and of these models in the data folder, as `lohan profile` does."""
    facts = facts_of_device(probe(site.settings.state_folders), None)
    save_profile(site.settings.profiles_folder, profile_of(facts, *workloads))


def add_model(site: Site, **values: Any) -> BaseModel:
    """A registered model; names are unique in the database, so the default one is made for the occasion."""
    workload = tiny_workload()
    defaults: dict[str, Any] = {
        "name": f"tiny-{new_id('x')[-8:]}",
        "source": BaseModelSource.FOLDER,
        "root": str(site.model_dir),
        "path_in_root": new_id("folder"),
        "state": BaseModelState.READY,
        "architecture": "llama",
        "parameters": workload.parameters,
        "context_length": workload.context_length,
        "workload": workload.model_dump(mode="json"),
    }
    model = BaseModel(**(defaults | values))
    with write_transaction(site.engine) as session:
        session.add(model)
    return model


def leave_files(site: Site, run_id: str, *, states: bool) -> None:
    """What a run leaves on the drives: a log, a result, and states."""
    folder = site.settings.run_folder(run_id)
    (folder / "export").mkdir(parents=True)
    (folder / "export" / "model.safetensors").write_bytes(bytes(40_000))
    (folder / "events.jsonl").write_text("{}\n")
    if states:
        place = site.settings.state_folders[0] / run_id
        place.mkdir(parents=True)
        (place / "states.bin").write_bytes(bytes(100_000))


def measure_storage(site: Site, *, unknown_runs: int = 0) -> None:
    """Measure what lies on the drives, as the worker does, with states besides of runs that nobody knows."""
    for _ in range(unknown_runs):
        leave_files(site, new_id("run"), states=True)
    Housekeeper(site.settings, site.engine).measure()


def _tier(tier: Tier) -> TierPlan:
    return TierPlan(tier=tier, capacity_bytes=8 * GIB, items=(PlanItem(name=f"{tier} things", bytes=GIB, formula="1 x 1 GiB"),))


def make_plan() -> Plan:
    """A plan with something in every tier."""
    tiers = tuple(_tier(tier) for tier in Tier)
    return Plan(
        model="tiny",
        parameters=92_288,
        workload_digest="w",
        settings_digest="s",
        hardware_digest="h",
        device="cpu",
        precision="bf16",
        batch_size=4,
        micro_batch_size=2,
        sequence_length=64,
        slots=2,
        chunk_parameters=CHUNK_PARAMETERS,
        tiers=tiers,
        ssd_bytes_per_step=GIB,
        ssd_bytes_written_per_step=GIB // 2,
    )


def add_run(site: Site, visitor: Visitor, *, state: RunState = RunState.RUNNING, **values: Any) -> Run:
    """A run with its model, dataset and plan."""
    defaults: dict[str, Any] = {
        "name": "night run",
        "state": state,
        "base_model_id": values.pop("base_model_id", None) or add_model(site).id,
        "dataset_id": values.pop("dataset_id", None) or add_dataset(site, visitor).id,
        "settings": SETTINGS,
        "plan": make_plan().model_dump(mode="json"),
        "devices": [],
        "prepared_at": now(),
        "attempt": 1,
        "epoch": 1,
    }
    run = Run(owner_id=visitor.user.id, **(defaults | values))
    with write_transaction(site.engine) as session:
        session.add(run)
    site.settings.run_folder(run.id).mkdir(parents=True)
    return run


class Trainer:
    """Writes a run's events as its supervisor does: into the database, in order, with the epoch of the run."""

    def __init__(self, site: Site, run: Run, *, attempt: int = 1, total_steps: int = 40) -> None:
        self._site, self._run, self._attempt, self._total_steps = site, run, attempt, total_steps
        self._seq = 0

    def event(self, type: EventType, **fields: Any) -> None:
        self._record([self._next(type, fields)])

    def steps(self, first: int, last: int, *, loss: float | None = None) -> None:
        """Steps `first` to `last` with a falling loss, or with `loss`; NaN is written as the trainer does, as null."""
        losses = ((step, 4 / math.sqrt(step) if loss is None else loss) for step in range(first, last + 1))
        self._record([self._next(EventType.STEP, self._step(step, value)) for step, value in losses])

    def _step(self, step: int, loss: float) -> dict[str, Any]:
        return {
            "step": step,
            "total_steps": self._total_steps,
            "epoch": step / self._total_steps,
            "loss": loss if math.isfinite(loss) else None,
            "learning_rate": 1e-3,
            "gradient_norm": 1.0,
            "tokens": 128,
            "tokens_per_second": 1000.0,
            "step_seconds": 0.1,
            "eta_seconds": 0.1 * (self._total_steps - step),
        }

    def _next(self, type: EventType, fields: dict[str, Any]) -> Event:
        self._seq += 1
        return Event(self._attempt, self._seq, now().timestamp(), str(type), fields)

    def _record(self, events: list[Event]) -> None:
        with write_transaction(self._site.engine) as session:
            repository.record_events(session, self._run.id, epoch=1, events=events, offset_bytes=0, malformed=0)
