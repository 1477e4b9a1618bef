"""Pages of the whole: the dashboard and the API reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse

from lohan.errors import LohanError
from lohan_app.auth.dependencies import PageUser, require_session
from lohan_app.auth.schemas import Identity
from lohan_app.base_models import service as base_models
from lohan_app.context import AppContext, Context
from lohan_app.datasets import service as datasets
from lohan_app.entities import TERMINAL_STATES, RunKind, RunState
from lohan_app.paging import MAXIMUM_LIMIT
from lohan_app.runs import service as runs
from lohan_app.runs.presentation import PHASE_NAMES
from lohan_app.runs.states import ACTIVE_STATES
from lohan_app.system import service
from lohan_app.templating import render

router = APIRouter(dependencies=[Depends(require_session)])

FINISHED_SHOWN = 5
QUEUED_SHOWN = 20


@dataclass(frozen=True, slots=True)
class FirstStep:
    """A step of the list on an empty appliance."""

    title: str
    text: str
    address: str
    status: str
    """`done`, `next` or `later`."""


def _first_steps(*, has_model: bool, has_dataset: bool, has_run: bool) -> list[FirstStep]:
    """What to do on an empty appliance; nothing once a run has been made."""
    if has_run:
        return []
    return [
        FirstStep(
            "Add a model",
            "The sample model is small enough to try everything without a GPU.",
            "/models",
            "done" if has_model else "next",
        ),
        FirstStep(
            "Upload a dataset",
            "A JSON Lines file of conversations; every row is checked.",
            "/datasets",
            "done" if has_dataset else "next" if has_model else "later",
        ),
        FirstStep(
            "Start a run",
            "The plan shows what it takes before anything starts.",
            "/runs/new",
            "next" if has_model and has_dataset else "later",
        ),
    ]


def _machine(context: AppContext) -> dict[str, Any]:
    try:
        return {"machine": context.hardware.facts(), "machine_problem": ""}
    except LohanError as error:
        return {"machine": None, "machine_problem": str(error)}


def _warnings(context: AppContext) -> list[str]:
    broker = service.broker_state(context.settings)
    return [] if broker == "ok" else [f"The broker does not answer ({broker}): what is asked for now starts a little later."]


def _fields(context: AppContext, identity: Identity) -> dict[str, Any]:
    def runs_in(states: frozenset[RunState], limit: int) -> list[Any]:
        return runs.list_runs(context, identity, limit=limit, states=states).items

    running = runs_in(ACTIVE_STATES, MAXIMUM_LIMIT)
    queued, places = runs_in(frozenset({RunState.QUEUED}), MAXIMUM_LIMIT), {}
    if queued:
        places = runs.queue_places(context)
        queued.sort(key=lambda run: places[run.id].position if run.id in places else 0)
    # Somebody who chats has made a dozen runs in an hour: what was trained stays in sight.
    finished = runs.list_runs(context, identity, limit=FINISHED_SHOWN, states=TERMINAL_STATES, except_kind=RunKind.CHAT).items
    steps = _first_steps(
        has_model=bool(base_models.list_models(context).items),
        has_dataset=bool(datasets.list_datasets(context, identity, limit=1).items),
        has_run=bool(runs.list_runs(context, identity, limit=1, kind=RunKind.TRAIN).items),
    )
    return {
        "first_steps": steps,
        "running": running,
        "queued": queued[:QUEUED_SHOWN],
        "places": places,
        "finished": finished,
        "phase_names": PHASE_NAMES,
        "service_warnings": _warnings(context),
        **_machine(context),
    }


@router.get("/")
def dashboard(request: Request, identity: PageUser, context: Context) -> HTMLResponse:
    return render(request, "system/dashboard.html", _fields(context, identity), viewer=identity)


@router.get("/partials/dashboard")
def dashboard_part(request: Request, identity: PageUser, context: Context) -> HTMLResponse:
    return render(request, "system/_dashboard.html", _fields(context, identity), viewer=identity)


@router.get("/docs")
def api_reference(request: Request, identity: PageUser) -> HTMLResponse:
    """Swagger UI from our own files, started by a script file because the content policy forbids inline ones."""
    return render(request, "system/openapi.html", {}, viewer=identity)
